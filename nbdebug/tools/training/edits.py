"""The fix of a cause as an edit of the user's own statement, found in the syntax tree of their files.

    in_loss       in the forward or the loss function: run as edited on one batch (fixes.py)
    in_loop       in the loop: the user's own loop runs again as edited (EditTrials in retrain.py)
    in_call       an argument of a call that made the optimizer or a layer: set there, as the call would have set it
    in_loader     an argument of the call that made the loader: the samples are dealt so
    setup_text    lines before the optimizer is made: run on the model, with the user's own loop behind them

Each gives the edits that can be written, the gentlest first, and none where the statement can't be told.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from nbdebug.observe import sources
from nbdebug.observe.locations import Site, at_site, is_users_file, other_cells
from nbdebug.report import Edit, Finding, Where
from nbdebug.text import module_name
from nbdebug.tools.training.rules import slug
from nbdebug.tools.training.static_facts import BatchMixing, Broadcast, DetachedAt, LossCall, StaticFacts

CLIP = 1.0
"""The limit that nearly all published recipes clip at."""
LABEL_CRITERIA = {
    "cross_entropy": "CrossEntropyLoss",
    "nll_loss": "NLLLoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
}
GONE = "pass  # "
"""In the place of a statement that is left out."""
NONE_IGNORED = "-100"
"""The default of `ignore_index`."""
Node = ast.expr | ast.AugAssign


# In the forward or the loss


def in_loss(slug: str, static: StaticFacts, call: LossCall | None, model: nn.Module) -> Iterator[Edit]:
    """call: that of the loss function at which the cause is."""
    if slug in ("double-softmax", "wrong-output-activation") and call is not None:
        yield from _other_activation(call, model)
    elif slug == "missing-log-softmax" and call is not None:
        yield from _log_softmax(call)
    elif slug == "wrong-loss-shape":
        yield from _same_shape(static.broadcasts[0]) if static.broadcasts else ()
    elif slug == "label-out-of-range":
        for outside in [call for call in static.loss_calls if call.outside][:1]:
            yield from _at_operand(outside.where, outside.op, 1, "{} - 1") if outside.from_one else ()
    elif slug == "detached-graph" and static.detached:
        yield from joined(static.detached[0])
    elif slug == "batch-mixing" and static.mixing is not None and static.mixing.rows is None:
        yield from _batch_in_front(static.mixing)


def _batch_in_front(mixing: BatchMixing) -> Iterator[Edit]:
    """The first two dimensions exchanged before they are joined with others."""
    way = {"reshape": "{}.transpose(0, 1)", "flatten": "{}.transpose(0, 1)", "view": "{}.transpose(0, 1).contiguous()"}
    for op, template in way.items() if not mixing.layer and not mixing.placed and not mixing.kind else ():
        for node in _calls(mixing.where, op):
            operand = sources.operand(node, 0)
            if operand is not None:
                yield from _edited(mixing.where.file, {operand: template})


def _other_activation(call: LossCall, model: nn.Module) -> Iterator[Edit]:
    where, name = call.activation_where, call.activation or ""
    if name == "cosine_similarity" or (call.op == "cross_entropy" and call.bounded):
        yield from _at_operand(call.where, call.op, 0, "10 * {}")
        return
    for node in _calls(where, name):
        operand = sources.operand(node, 0)
        if operand is not None and isinstance(node, ast.Call):
            text = _in_parentheses(where.file or "", operand, node)
            if call.target_sum is None:
                yield from _edited(where.file, {node: text})
            elif sources.is_method(node):
                yield from _edited(where.file, {node: f"{text}.sigmoid()"})
            else:
                yield from _edited(where.file, {node: f"torch.sigmoid({sources.source(where.file or '', operand)})"})
    for node in _module_calls(where, model):
        if call.target_sum is None and node.args:
            yield from _edited(where.file, {node: _in_parentheses(where.file or "", node.args[0], node)})


def as_identity(module: nn.Module, file: str) -> Iterator[Edit]:
    """An activation of torch's, made as a module that does nothing. What stands behind it in a Sequential keeps its
    name. file: of the model or the loss, in whose cells it is made."""
    made = _only_call(type(module), file) if type(module).__module__ == "torch.nn.modules.activation" else None
    if made is not None:
        owner = sources.source(made[0], made[1].func).rpartition(".")[0] or "torch.nn"
        yield from _edited(made[0], {made[1]: f"{owner}.Identity()"})


def as_batch_first(module: nn.Module, file: str) -> Iterator[Edit]:
    """A layer of torch's, made with batch_first=True."""
    made = _only_call(type(module), file) if module_name(type(module)).startswith("torch.nn.") else None
    if made is not None:
        yield from _edited(made[0], sources.with_keyword(*made, "batch_first", "True"))


def _only_call(kind: type, file: str) -> tuple[str, ast.Call] | None:
    """(file, call) of the only one in this file and the notebook's other cells that makes such an object."""
    calls = [
        (other, node)
        for other in (file, *other_cells(file))
        for node in sources.nodes_of(other)
        if isinstance(node, ast.Call) and sources.name_of(node) == kind.__name__
    ]
    return calls[0] if len(calls) == 1 else None


def made_in_step(kind: type, where: Where) -> Where:
    """The line that makes such an object: the last before this line in its function, or the only one of the file."""
    file = where.file or ""
    function = sources.function_at(file, where.line) if where.line else None
    own = [n for n in ast.walk(function or ast.Module([], [])) if isinstance(n, ast.Call)]
    before = [n for n in own if sources.name_of(n) == kind.__name__ and n.lineno <= (where.line or 0)]
    last = max(before, key=lambda node: node.lineno, default=None)
    known = _only_call(kind, file) if last is None else (file, last)
    return where if known is None else at_site(where, Site(known[0], known[1].lineno, ""))


def _module_calls(where: Where, model: nn.Module) -> Iterator[ast.Call]:
    """The call of an activation module in the user's line: `self.squash(x)`."""
    module = dict(model.named_modules()).get(where.module or "")
    statement = _statement(where)
    if statement is None or module is None or type(module).__module__ != "torch.nn.modules.activation":
        return
    last = (where.module or "").rpartition(".")[2]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == last:
            yield node


def _log_softmax(call: LossCall) -> Iterator[Edit]:
    where, name = call.activation_where, call.activation or ""
    if call.softmax_dim is not None:
        for node in _calls(where, name):
            dim = sources.keyword(node, "dim") or sources.operand(node, 1)
            if dim is not None:
                yield from _edited(where.file, {dim: "1"})
        return
    if call.probabilities:
        yield from _renamed(where, "softmax", "log_softmax")
        yield from _at_operand(call.where, call.op, 0, "{}.clamp_min(1e-12).log()")
        return
    if call.op == "nll_loss":
        yield from _renamed(call.where, "nll_loss", "cross_entropy")
    yield from _at_operand(call.where, call.op, 0, f"{{}}.log_softmax({1 if call.op == 'nll_loss' else -1})")


def _renamed(where: Where, op: str, name: str) -> Iterator[Edit]:
    """Another function of torch's in the place of an op's."""
    for node in _calls(where, op):
        function = getattr(node, "func", None)
        if function is not None:
            text = sources.source(where.file or "", function)
            yield from _edited(where.file, {function: text.replace(op, name)})


def _same_shape(broadcast: Broadcast) -> Iterator[Edit]:
    if torch.Size(broadcast.output).numel() != torch.Size(broadcast.target).numel():
        return
    longer = len(broadcast.target) - len(broadcast.output)
    template = {-1: "{}.unsqueeze(-1)", 1: "{}.squeeze(-1)"}.get(longer, f"{{}}.reshape({list(broadcast.output)[1:]})")
    if longer not in (1, -1):
        template = "{}.reshape(-1" + "".join(f", {n}" for n in broadcast.output[1:]) + ")"
    yield from _at_operand(broadcast.where, broadcast.op, 1, template)
    back = {1: "{}.unsqueeze(-1)", -1: "{}.squeeze(-1)"}.get(longer)
    if back is not None:
        yield from _at_operand(broadcast.where, broadcast.op, 0, back)
    for node in _calls(broadcast.where, "sub"):  # of the user's own arithmetic
        for place, text in ((1, template), (0, back)):
            operand = sources.operand(node, place)
            if operand is not None and text is not None:
                yield from _edited(broadcast.where.file, {operand: text})


def joined(cut: DetachedAt) -> Iterator[Edit]:
    """The graph without the cut."""
    ways = {
        "detach": _without_detach,
        "no_grad": _with_grad,
        "checkpoint": _not_reentrant,
        "flat": _straight_through,
        "drawn": _reparametrized,
    }
    statement = _statement(cut.where)
    if statement is not None and cut.how in ways:
        yield from ways[cut.how](cut, statement)


def _reparametrized(cut: DetachedAt, statement: ast.stmt) -> Iterator[Edit]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sample":
            owner = _in_parentheses(cut.where.file or "", node.func.value, None)
            yield from _edited(cut.where.file, {node.func: f"{owner}.rsample"})


def _without_detach(cut: DetachedAt, statement: ast.stmt) -> Iterator[Edit]:
    for node in ast.walk(statement):
        owner = node.func if isinstance(node, ast.Call) and cut.op == "detach" else node
        if isinstance(owner, ast.Attribute) and owner.attr == cut.op and isinstance(node, ast.expr):
            yield from _edited(cut.where.file, {node: _in_parentheses(cut.where.file or "", owner.value, None)})


def _with_grad(cut: DetachedAt, statement: ast.stmt) -> Iterator[Edit]:
    for node in sources.nodes_of(cut.where.file or ""):
        if isinstance(node, ast.With) and _covers(node, cut.where.line or 0):
            for item in node.items:
                if _is_no_grad(item.context_expr):
                    yield from _edited(cut.where.file, {item.context_expr: "torch.enable_grad()"})


def _not_reentrant(cut: DetachedAt, statement: ast.stmt) -> Iterator[Edit]:
    """In the statement, or in the only one of the file: the layers themselves may stand elsewhere."""
    file = cut.where.file or ""
    for part in (ast.walk(statement), sources.nodes_of(file)):
        calls = [n for n in part if isinstance(n, ast.Call) and sources.name_of(n) == "checkpoint"]
        if len(calls) == 1:
            yield from _edited(file, sources.with_keyword(file, calls[0], "use_reentrant", "False"))
            return


def _straight_through(cut: DetachedAt, statement: ast.stmt) -> Iterator[Edit]:
    """The value of the op, with the gradient of its operand."""
    file = cut.where.file or ""
    for node in sources.calls_of(statement, cut.op):
        operand = sources.operand(node, 0)
        if operand is not None:
            text = sources.source(file, operand)
            again = f"({text})" if not isinstance(operand, sources.ATOMS) else text
            first = again if sources.may_repeat(operand) else f"(soft := {text})"
            again = again if sources.may_repeat(operand) else "soft"
            whole = sources.source(file, node)
            hard = whole.replace(text, again, 1)
            yield from _edited(file, {node: f"({first} + ({hard} - {again}).detach())"})


def _is_no_grad(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and sources.name_of(node) == "no_grad"


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _statement(where: Where) -> ast.stmt | None:
    if not where.file or not where.line or not is_users_file(where.file):
        return None
    return sources.statement_at(where.file, where.line)


def _calls(where: Where, op: str) -> list[Node]:
    """The calls of an op in the user's line."""
    statements = sources.statements_at(where.file or "", where.line or 0) if _statement(where) is not None else []
    return [call for statement in statements for call in sources.calls_of(statement, op)] if op else []


def _at_operand(where: Where, op: str, place: int, template: str) -> Iterator[Edit]:
    """An operand of the loss's call; of a criterion that the user calls, its argument."""
    statement = _statement(where)
    nodes = _calls(where, op)
    if statement is not None and not nodes:
        pairs = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and len(n.args) == 2]
        nodes = [n for n in pairs if "loss" in sources.name_of(n).lower() or "crit" in sources.name_of(n).lower()]
        nodes = nodes or (pairs if len(pairs) == 1 else [])  # type: ignore[assignment]
    for node in nodes[:1]:
        operand = sources.operand(node, place)
        if operand is not None:
            yield from _edited(where.file, {operand: template})


def _in_parentheses(file: str, node: ast.expr, place: ast.expr | None) -> str:
    """The text of an expression, to stand in another's place: without parentheses where that is a whole statement's
    value or an argument."""
    text = sources.source(file, node)
    tree = sources.tree_of(file)
    around = None if place is None or tree is None else sources.parents(tree).get(id(place))
    whole = isinstance(around, (ast.Return, ast.Assign)) or (isinstance(around, ast.Call) and place in around.args)
    return text if isinstance(node, sources.ATOMS) or whole else f"({text})"


def _edited(file: str | None, changes: Mapping[ast.AST, str]) -> Iterator[Edit]:
    edit = sources.edit_of(file or "", changes)
    if edit is not None:
        yield edit


def _calls_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and sources.name_of(node) == "backward"


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


# In the loop


def in_loop(slug: str, loop: LoopStatements) -> Iterator[Edit]:
    yield from {
        "zero-grad-missing": loop.cleared,
        "gradients-cleared-before-step": loop.cleared_first,
        "clip-before-unscale": loop.unscaled,
        "eval-mode-in-training": loop.in_train_mode,
        "exploding-gradients": loop.clipped,
        "loss-spike": loop.clipped,
        "accumulation-scale": loop.divided,
        "train-mode-in-eval": loop.in_eval_mode,
        "scheduler-order": loop.scheduled,
        "plateau": loop.unscheduled,
    }.get(slug, lambda: iter(()))()


@dataclasses.dataclass
class LoopStatements:
    """The function in which the user's loop calls backward. names: the variables of the loop; places: the user's lines,
    by what they do, as a watched run gives them; accumulation: batches of a step, and what a loss is divided by."""

    names: Mapping[str, Any]
    model: nn.Module
    optimizers: Sequence[Any]
    scheduler: Any
    places: Mapping[str, Where]
    accumulation: tuple[int, float] = (1, 1.0)

    def __post_init__(self) -> None:
        where = self.places.get("backward", Where())
        self.file, self.backward = where.file or "", _statement(where)
        if self.backward is not None and where.line:
            calls = [node for node in sources.nodes_of(self.file) if _calls_backward(node)]
            self.backward = self._of_the_line(where.line, calls)
        self.function = sources.function_at(self.file, where.line) if self.backward is not None and where.line else None

    def _of_the_line(self, line: int, parts: Sequence[ast.AST]) -> ast.stmt | None:
        """Of the statements that share a line the one that has one of these parts, else the first."""
        shared = sources.statements_at(self.file, line)
        return next((one for one in shared if any(node in parts for node in ast.walk(one))), next(iter(shared), None))

    def _joined(self, statement: ast.stmt, text: str, behind: bool = False) -> str:
        """A template that puts a text before or behind a statement: on the same line where that has others too."""
        alone = len(sources.statements_at(self.file, statement.lineno)) == 1
        gap = "\n" + " " * statement.col_offset if alone else "; "
        return f"{{raw}}{gap}{text}" if behind else f"{text}{gap}{{raw}}"

    def _named(self, node: ast.expr, things: Iterable[Any]) -> bool:
        """Whether an expression names one of these: the end of it is a name of theirs."""
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        values = [value for key, value in self.names.items() if key.rpartition(".")[2] == name]
        return any(value is thing for value in values for thing in things)

    def _methods(self, name: str, function: ast.AST | None = None) -> list[tuple[ast.stmt, ast.Call, ast.expr]]:
        """Statements of the function that call a method of this name: (statement, call, its owner), in order."""
        found, function = [], function or self.function
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                statement = self._of_the_line(node.lineno, [node])
                if statement is not None:
                    found.append((statement, node, node.func.value))
        return sorted(found, key=lambda row: (row[1].lineno, row[1].col_offset))

    def _optimizer(self) -> str:
        """The optimizer as the function writes it (or that around it, of a closure), where it makes one step; "" where
        that can't be told."""
        inner = getattr(self.function, "lineno", 1)
        for function in (self.function, sources.function_at(self.file, inner - 1) if self.file else None):
            steps = self._methods("step", function)
            owners = [owner for _, _, owner in steps if self._named(owner, self.optimizers)]
            owners += [c.args[0] for _, c, _ in steps if c.args and self._named(c.args[0], self.optimizers)]
            texts = {sources.source(self.file, owner) for owner in owners}
            if texts:
                return texts.pop() if len(texts) == 1 else ""
        return ""

    def _before(self, statement: ast.stmt, text: str) -> Iterator[Edit]:
        yield from _edited(self.file, {statement: self._joined(statement, text)})

    def cleared(self) -> Iterator[Edit]:
        optimizer = self._optimizer()
        if optimizer and self.backward is not None:
            yield from self._before(self.backward, f"{optimizer}.zero_grad()")

    def cleared_first(self) -> Iterator[Edit]:
        """The two statements change places; or backward and a step that comes before it; or there is a step."""
        backward = self.backward
        if backward is None:
            return
        clears = self._methods("zero_grad")
        for statement, _, _ in clears:
            if _place(statement) > _place(backward):
                yield from self._exchanged(backward, statement)
        steps = [statement for statement, _, owner in self._methods("step") if self._named(owner, self.optimizers)]
        for statement in steps:
            if _place(statement) < _place(backward):
                yield from self._exchanged(statement, backward)
        owners = [sources.source(self.file, owner) for _, _, owner in clears if self._named(owner, self.optimizers)]
        if not steps and owners:
            yield from _edited(self.file, {backward: self._joined(backward, f"{owners[0]}.step()", behind=True)})

    def _exchanged(self, first: ast.stmt, second: ast.stmt) -> Iterator[Edit]:
        one, other = (sources.source(self.file, statement) for statement in (first, second))
        if "{" not in one + other:
            yield from _edited(self.file, {first: other, second: one})

    def scheduled(self) -> Iterator[Edit]:
        """The scheduler's step behind the optimizer's, behind the loop over the batches, or into it; or without it."""
        schedules, trains = (
            self._schedules(),
            [s for s, _, o in self._methods("step") if self._named(o, self.optimizers)],
        )
        inner = self._inner_loop(trains[0].lineno) if trains else None
        text = sources.source(self.file, schedules[0]) if schedules else ""
        if len(schedules) == 1 and len(trains) == 1 and inner is not None and "{" not in text:
            schedule = schedules[0]
            if schedule in inner.body and _place(schedule) < _place(trains[0]):
                yield from self._exchanged(schedule, trains[0])
            else:
                behind = inner if schedule in inner.body else inner.body[-1]
                gap, gone = " " * behind.col_offset, "pass  # moved"
                for edit in _edited(self.file, {behind: f"{{raw}}\n{gap}{text}", schedule: gone}):
                    yield dataclasses.replace(edit, new=re.sub(rf"\n[ \t]*{gone}[^\n]*", "", edit.new))
        yield from self.unscheduled()

    def _schedules(self) -> list[ast.stmt]:
        """The statements that step the scheduler."""
        steps = self._methods("step")
        return [s for s, _, owner in steps if self.scheduler is not None and self._named(owner, [self.scheduler])]

    def unscheduled(self) -> Iterator[Edit]:
        """No step of the scheduler."""
        for statement in self._schedules() if len(self._schedules()) == 1 else ():
            alone = len(sources.statements_at(self.file, statement.lineno)) == 1  # the comment ends with the line
            if isinstance(statement, ast.Expr) and statement.lineno == statement.end_lineno and alone:
                yield from _edited(self.file, {statement: f"{GONE}{{raw}}"})

    def _inner_loop(self, line: int) -> ast.For | ast.While | None:
        """The innermost loop of the function around a line."""
        parts = ast.walk(self.function) if self.function is not None else ()
        loops = [node for node in parts if isinstance(node, (ast.For, ast.While)) and _covers(node, line)]
        return max(loops, key=lambda node: node.lineno, default=None)

    def unscaled(self) -> Iterator[Edit]:
        optimizer = self._optimizer()
        scalers = [o for _, c, o in self._methods("step") if c.args and self._named(c.args[0], self.optimizers)]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for statement, _, _ in self._methods(name):
                if optimizer and scalers:
                    text = sources.source(self.file, scalers[0])
                    yield from self._before(statement, f"{text}.unscale_({optimizer})")

    def clipped(self) -> Iterator[Edit]:
        model = self._model(self.function)
        if model and self.backward is not None:
            code = f"torch.nn.utils.clip_grad_norm_({model}.parameters(), {CLIP})"
            yield from _edited(self.file, {self.backward: self._joined(self.backward, code, behind=True)})

    def _model(self, part: ast.AST | None) -> str:
        """The model as a part of the source writes it."""
        for node in ast.walk(part) if part is not None else ():
            if isinstance(node, (ast.Name, ast.Attribute)) and self._named(node, [self.model]):
                return sources.source(self.file, node)
        return ""

    def divided(self) -> Iterator[Edit]:
        """The loss divided by the batches of a step, where backward is called."""
        every, divisor = self.accumulation
        for node in ast.walk(self.backward) if self.backward is not None else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                loss = node.func.value
                if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
                    yield from _edited(self.file, {loss.right: str(every)})
                elif divisor == 1:
                    yield from _edited(self.file, {loss: f"({{}} / {every})"})

    def in_train_mode(self) -> Iterator[Edit]:
        """At the top of the innermost loop around the training step."""
        where = self.places.get("training", Where())
        line = where.line if where.file == self.file else None
        at = self.backward.lineno if self.backward is not None else 0
        inner = self._inner_loop(line or at) or self._inner_loop(at)
        model = self._model(self.function)
        if inner is not None and model:
            yield from self._before(inner.body[0], f"{model}.train()")

    def in_eval_mode(self) -> Iterator[Edit]:
        """Around the `with torch.no_grad()` of a validation that returns nothing within it; at the top of a function
        without gradients, where each pass goes back to train mode by itself."""
        goes_back = any(
            self._named(o, [self.model]) and self._inner_loop(s.lineno) for s, _, o in self._methods("train")
        )
        where = self.places.get("evaluation", Where())
        self.file = where.file or ""
        blocks = [
            node
            for node in sources.nodes_of(self.file)
            if isinstance(node, ast.With)
            and _covers(node, where.line or 0)
            and any(_is_no_grad(item.context_expr) for item in node.items)
            and not any(isinstance(part, (ast.Return, ast.Yield)) for part in ast.walk(node))
        ]
        for block in blocks[:1]:
            model, gap = self._model(block), " " * block.col_offset
            if model:
                yield from _edited(self.file, {block: f"{model}.eval()\n{gap}{{raw}}\n{gap}{model}.train()"})
        for function in sources.nodes_of(self.file) if goes_back and not blocks else ():
            marks = function.decorator_list if isinstance(function, ast.FunctionDef) else []
            model = self._model(function) if any("no_grad" in ast.unparse(mark) for mark in marks) else ""
            calls = [n.value for n in getattr(function, "body", []) if isinstance(n, ast.Expr)]
            if isinstance(function, ast.FunctionDef) and model and not any(sources.name_of(c) == "eval" for c in calls):
                yield from self._before(function.body[0], f"{model}.eval()")


# In a call that made something


def users_files(model: nn.Module, *functions: Any, file: str | None = None) -> list[str]:
    """The files and cells in which the user's functions and modules stand, the other cells of a notebook behind. file:
    one that is known to be such."""
    files: dict[str, None] = {} if file is None else {file: None}
    for thing in (*functions, *(type(m) for m in model.modules())):
        code = getattr(getattr(thing, "__func__", thing), "__code__", None)
        file = code.co_filename if code is not None else None
        if file is None and inspect.isclass(thing) and not thing.__module__.startswith("torch."):
            try:
                file = inspect.getsourcefile(thing)
            except (TypeError, OSError):
                file = None
        if file is not None and is_users_file(file):
            files[file] = None
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and is_users_file(script):
        files[script] = None
    for file in list(files):
        files |= dict.fromkeys(other_cells(file))
    return list(files)


FROZEN = re.compile("requires?_?grad_?")
"""Names by which a person means `requires_grad`."""


def never_frozen(
    model: nn.Module, trained: Collection[str], files: Iterable[str]
) -> tuple[tuple[str, ...], Where] | None:
    """Of the parameters with these names those that a line without effect was to freeze, and the line: it sets an
    attribute of a module, or another name on the parameter, or compares where it was to assign. None where none is."""
    things = [*model.named_modules(), *model.named_parameters()]
    owners = [n for n, t in things if any(FROZEN.fullmatch(k) and v is False for k, v in vars(t).items())]
    names = tuple(n for n in trained if any(n == owner or n.startswith(f"{owner}.") or not owner for owner in owners))
    lines: list[tuple[bool, Where]] = []
    for file in files:
        for node in sources.nodes_of(file):
            if isinstance(node, ast.Assign) and names:
                part, value = node.targets[0], node.value
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare) and not owners:
                part, value = node.value.left, node.value.comparators[0]
            else:
                continue
            if isinstance(part, ast.Attribute) and FROZEN.fullmatch(part.attr) and ast.unparse(value) == "False":
                said = any(owner and ast.unparse(part.value).endswith(owner) for owner in owners)
                lines.append((said, at_site(Where(), Site(file, node.lineno, ""))))
    if not names and all(p.requires_grad for p in model.parameters()) and lines:
        names = tuple(trained)
    return (names, max(lines, key=lambda line: line[0], default=(False, Where()))[1]) if names else None


def in_label_loss(files: Iterable[str], call: LossCall, argument: str, value: str) -> Iterator[Edit]:
    """Another argument of the call of a loss of class labels, or of the only one that makes such a criterion."""
    nodes = [(call.where.file or "", node) for node in _calls(call.where, call.op) if isinstance(node, ast.Call)]
    if not nodes:
        kind = LABEL_CRITERIA.get(call.op)
        made = [(file, n) for file in files for n in sources.nodes_of(file) if isinstance(n, ast.Call)]
        nodes = [(file, node) for file, node in made if sources.name_of(node) == kind]
    if len(nodes) != 1 or call.op not in LABEL_CRITERIA:
        return
    known = sources.keyword(nodes[0][1], argument)
    idle = not call.weighted if "weight" in argument else not call.ignored  # what stands there does nothing
    if "{}" in value and known is not None:
        yield from _edited(nodes[0][0], {known: value})
    elif "{}" not in value and (known is None or idle or value == NONE_IGNORED):
        yield from _edited(nodes[0][0], sources.with_keyword(*nodes[0], argument, value))


def in_call(files: Sequence[str], kinds: Sequence[str], argument: str, old: float, new: str) -> Iterator[Edit]:
    """The only calls in these files that make objects of these classes, with another value of an argument. old: the
    value that each object has; a number in the source must be that."""
    made = [
        (file, node)
        for file in files
        for node in sources.nodes_of(file)
        if isinstance(node, ast.Call) and sources.name_of(node) in kinds
    ]
    if len(made) > len(kinds):  # those that write this number
        made = [(f, n) for f, n in made if _number(_argument(n, argument)) == old]
    if len(made) != len(kinds) or len({file for file, _ in made}) != 1:
        return
    (file, call), known = made[0], [_argument(node, argument) for _, node in made]
    names = {_last_name(value) for value in known if value is not None and _number(value) is None}
    if len(made) > 1 and all(_number(value) == old for value in known):
        yield from _edited(file, {value: new for value in known if value is not None})
    hidden = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    names |= {argument} if hidden and known == [None] else set()
    bound = list(_bound(files, min(names), old, new)) if len(names) == 1 and (hidden or None not in known) else []
    yield from bound
    if bound or len(made) > 1 or isinstance(known[0], ast.Name):
        return
    number = _number(known[0])
    if (number is not None and number != old) or hidden or any(isinstance(n, ast.Dict) for n in ast.walk(call)):
        return
    place = known[0]
    yield from _edited(file, {place: new} if place is not None else sources.with_keyword(file, call, argument, new))


def _last_name(node: ast.expr) -> str:
    """`lr` of `lr`, `self.lr` and `config["lr"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _bound(files: Iterable[str], name: str, old: float, new: str) -> Iterator[Edit]:
    """The only place where this number is given a name: by an assignment, an argument, a default or a key."""
    nodes = [(file, node) for file in files for node in sources.nodes_of(file)]
    takes = dict(pair for _, node in nodes for pair in _parameters(node))
    values = [(file, value) for file, node in nodes for n, value in _bindings(node, takes) if n == name]
    values = [(file, part) for file, value in values for part in _branches(value) if _number(part) == old]
    if len(values) == 1:
        yield from _edited(values[0][0], {values[0][1]: new})


def _branches(node: ast.expr) -> list[ast.expr]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def _parameters(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """(name, parameters) of a function, or of what makes objects of a class."""
    if isinstance(node, ast.FunctionDef):
        yield node.name, [a.arg for a in node.args.args]
    elif isinstance(node, ast.ClassDef):
        inits = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        yield from ((node.name, [a.arg for a in init.args.args[1:]]) for init in inits)


def _bindings(node: ast.AST, takes: Mapping[str, list[str]]) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((_last_name(target), node.value) for target in targets)
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg, node.value
    elif isinstance(node, ast.Dict):
        yield from ((str(k.value), v) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant))
    elif isinstance(node, ast.arguments):
        yield from zip([a.arg for a in node.args[len(node.args) - len(node.defaults) :]], node.defaults)
        yield from ((a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults) if d is not None)
    elif isinstance(node, ast.Call):
        yield from zip(takes.get(sources.name_of(node), ()), node.args)


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    place = {"lr": 1, "p": 0}.get(name)
    known = sources.keyword(call, name)
    return known if known is not None or place is None or len(call.args) <= place else call.args[place]


def _number(node: ast.expr | None) -> float | None:
    try:
        value = None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def _around(calls: list[tuple[str, ast.Call]], train: Any) -> list[tuple[str, ast.Call]]:
    """Of several those in a function that the loop stands in, too."""
    code: Any = getattr(getattr(train, "__func__", train), "__code__", None)
    near = []
    for file, call in calls if code is not None and len(calls) > 1 else ():
        scope = sources.function_at(file, call.lineno)
        if file == code.co_filename and isinstance(scope, ast.FunctionDef) and _covers(scope, code.co_firstlineno):
            near.append((file, call))
    return near or calls


def in_loader(files: Iterable[str], names: Mapping[str, Any], loader: Any, train: Any) -> Iterator[Edit]:
    """`shuffle=True` in the call that makes a loader which reads in order: the only one, or that of its variable."""
    if type(getattr(loader, "sampler", None)) is not SequentialSampler:
        return
    made, own = [], []
    for file in files:
        for node in sources.nodes_of(file):
            if isinstance(node, ast.Call) and sources.name_of(node) == type(loader).__name__:
                made.append((file, node))
            if isinstance(node, ast.Assign):
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(node.targets[0].elts, node.value.elts))
                own += [value for target, value in pairs if names.get(_last_name(target)) is loader]
    calls = _around([pair for pair in made if any(pair[1] is value for value in own)] or made, train)
    if len(calls) == 1 and sources.keyword(calls[0][1], "sampler", "batch_sampler") is None:
        yield from _edited(calls[0][0], sources.with_keyword(*calls[0], "shuffle", "True"))


MODEL = "model"
"""What lines of ours call the model."""
INITIAL = {
    "bad-init": "kaiming_normal_(layer.weight, nonlinearity='relu')",
    "dead-relu": "kaiming_normal_(layer.weight, nonlinearity='relu')",
    "saturated-activation": "xavier_uniform_(layer.weight)",
}
"""By the cause, how the weights of a new layer are drawn."""


def setup_text(finding: Finding, model: nn.Module) -> str:
    """Lines that cure a model before its optimizer is made; "" where there are none: parameters that are to be trained,
    or weights that are drawn for the width of their layers. Those of no other layer are: they may be pretrained."""
    if slug(finding) == "frozen-parameters" and "requires_grad_(True)" in finding.fixes[0].code:
        return finding.fixes[0].code
    modules, draw = dict(model.named_modules()), INITIAL.get(slug(finding), "")
    named = [str(name) for name in finding.evidence.get("where", ())]
    layers = {name: modules[name] for name in named if name in modules and _draws(modules[name])}
    if not draw or not layers:
        return ""
    paths = [re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"{MODEL}.{name}") for name in layers]
    lines = [f"for layer in ({', '.join(paths)}{',' * (len(paths) == 1)}):", f"    torch.nn.init.{draw}"]
    if all(layer.bias is not None for layer in layers.values()):
        lines.append("    torch.nn.init.zeros_(layer.bias)")
    return "\n".join(lines)


def _draws(layer: nn.Module) -> bool:
    """Whether it has a weight matrix that is trained."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.requires_grad and weight.dim() > 1 and hasattr(layer, "bias")


SQUASHING = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")
"""Activations that are flat far from zero."""


def as_relus(files: Iterable[str], names: Iterable[str]) -> Iterator[Edit]:
    """ReLU where activations of these classes are named, in a call or without one (`activation = nn.Sigmoid`)."""
    for file in files:
        alike = [n for n in sources.nodes_of(file) if isinstance(n, ast.Attribute) and n.attr in names]
        tests = [n for n in sources.nodes_of(file) if isinstance(n, ast.Call) and sources.name_of(n) == "isinstance"]
        tested = {id(part) for test in tests for part in ast.walk(test)}
        alike = [n for n in alike if ast.unparse(n.value).endswith("nn") and id(n) not in tested]
        if alike:
            yield from _edited(file, {n: f"{ast.unparse(n.value)}.ReLU" for n in alike})
            return


def without_factor(files: Sequence[str], where: Where, factor: float) -> Iterator[Edit]:
    """1 in the place of a constant factor: in its line, or where its name is bound."""
    parts = [part for s in sources.statements_at(where.file or "", where.line or 0) for part in ast.walk(s)]
    numbers = [n for n in parts if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    for number in [n for n in numbers if n.value and factor in (n.value, 1 / n.value)]:  # type: ignore[operator]
        yield from _edited(where.file, {number: "1.0"})
    for name in dict.fromkeys(_last_name(n) for n in parts if isinstance(n, (ast.Name, ast.Attribute))):
        for old in (factor, 1 / factor):
            yield from _bound(files, name, old, "1.0")


def _made(files: Iterable[str], things: Sequence[Any], train: Any) -> tuple[str, ast.Call] | None:
    """(file, call) of the only one in these files, or around the loop, that makes objects of the class of this one."""
    kind = type(things[0]).__name__ if len(things) == 1 else ""
    nodes = [(file, node) for file in files for node in sources.nodes_of(file)]
    calls = [(file, node) for file, node in nodes if isinstance(node, ast.Call) and sources.name_of(node) == kind]
    calls = _around(calls, train)
    return calls[0] if len(calls) == 1 else None


def with_all_parameters(
    files: Sequence[str], names: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Any], train: Any, path: str
) -> Iterator[Edit]:
    """The only optimizer made with all parameters of the model in place of those of a part; or the plain container at
    this path (of an attribute) as one that torch knows."""
    owner, _, attribute = path.rpartition(".")
    held = getattr(dict(model.named_modules()).get(owner), attribute, None)
    kinds: dict[Any, str] = {list: "ModuleList", tuple: "ModuleList", dict: "ModuleDict"}
    kind = kinds.get(type(held))
    nodes = [(file, node) for file in files for node in sources.nodes_of(file) if isinstance(node, ast.Assign)]
    lines = [(file, node) for file, node in nodes if ast.unparse(node.targets[0]) == f"self.{attribute}"]
    if kind is not None:
        for file, node in lines if len(lines) == 1 else ():
            nn_is_there = any(isinstance(n, ast.Name) and n.id == "nn" for n in sources.nodes_of(file))
            yield from _edited(file, {node.value: f"{'' if nn_is_there else 'torch.'}nn.{kind}({{raw}})"})
        return
    made = _made(files, optimizers, train)
    first = made[1].args[0] if made is not None and made[1].args else None
    part = getattr(getattr(first, "func", None), "value", None)
    root = part
    while isinstance(root, ast.Attribute):
        root = root.value
    whole = isinstance(root, ast.Name) and root is not part and names.get(root.id, model) is model
    if made is not None and part is not None and whole and sources.name_of(first) == "parameters":  # type: ignore[arg-type]
        yield from _edited(made[0], {part: root.id})  # type: ignore[union-attr]


def before_optimizer(
    files: Iterable[str], names: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Any], train: Any, text: str
) -> Iterator[Edit]:
    """Lines before the only statement that makes the only optimizer, of all parameters of the model."""
    made = _made(files, optimizers, train)
    if made is None or "{" in text:
        return
    file, call = made
    owners = [n.value for n in ast.walk(call) if isinstance(n, ast.Attribute) and n.attr.endswith("parameters")]
    whole = [n.id for n in owners if isinstance(n, ast.Name) and names.get(n.id, model) is model]
    statement = sources.statement_at(file, call.lineno)
    if len(owners) == len(whole) == 1 and statement is not None:
        pad = "\n" + " " * statement.col_offset
        text = re.sub(rf"\b{MODEL}\b(?=[.\[])", whole[0], text)
        yield from _edited(file, {statement: text.replace("\n", pad) + pad + "{raw}"})
