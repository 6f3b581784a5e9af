"""A gradient was requested of something that has none: which variable it is, and at which op the path ended.

torch's message says what kind of request it was (`detect`), the failing line of which expression (`_requested`). From
there the result is followed back through the user's source to what it was computed from (`GradientPath`). Each
expression has a gradient, has none because what it comes from never had one (data), or lost it at a place: the
innermost op behind which there still is one. Of a live tensor `requires_grad` says so; an expression whose frame is
gone is read. The walk enters the user's functions and modules; torch's own modules give a gradient when a parameter of
theirs requires one. Where no op ends the path, gradients are off everywhere, or all parameters are frozen.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.sources import edit_of, functions, nodes_of
from nbdebug.observe.variables import MODULES_OWN, attributes, named_children, named_modules, named_parameters
from nbdebug.report import Edit
from nbdebug.text import clip
from nbdebug.tools.errors.autograd.functions import (
    FUNCTIONS,
    FunctionSource,
    assignments,
    backward_roots,
    callee,
    callee_word,
    enclosing_scopes,
    end_position,
    entries,
    failing_node,
    forward_of,
    forward_of_new_module,
    function_source,
    insertions,
    is_leaf_node,
    is_module,
    is_skipped,
    last_name,
    loop_modules,
    loops_around,
    loss_expression,
    method_source,
    no_grad_decorator,
    node_distances,
    own_expressions,
    reduced,
    statement_of,
    statements_of,
    static_value,
    targets,
    traceback_functions,
    truth,
)
from nbdebug.tools.errors.autograd.rules import GraphCut, NoGradFacts
from nbdebug.tools.errors.context import UNKNOWN, ErrorContext, calls_in, fact, is_tensor, kind_of_message, word_set

# -- the path of a gradient --------------------------------------------------------------------------------------------


CUTS: dict[str, frozenset[str]] = {
    "detached": word_set("detach detach_ stop_gradient"),
    "number": word_set("item tolist numpy float int bool"),
    "whole numbers": word_set(
        "argmax argmin argsort one_hot nonzero argwhere bincount histc searchsorted bucketize "
        "count_nonzero multinomial long int short byte char"
    ),
    "comparison": word_set(
        "gt ge lt le eq ne greater less greater_equal less_equal not_equal equal logical_and logical_or "
        "logical_not isnan isinf isfinite isclose allclose any all bool signbit"
    ),
    "rebuilt": word_set(
        "tensor as_tensor asarray array from_numpy Tensor FloatTensor LongTensor DoubleTensor HalfTensor IntTensor "
        "new_tensor scalar_tensor"
    ),
    "sampled": frozenset({"sample"}),
}
"""The names of functions and methods that end a path, by the kind of the cut."""
INDICES = word_set("max min sort topk mode kthvalue median cummax cummin")
"""Ops that return values and, beside them, their places."""
FRESH = word_set(
    "zeros ones zeros_like ones_like rand randn rand_like randn_like full full_like empty empty_like arange linspace "
    "eye randint randperm new_zeros new_ones new_full size dim numel len range isinstance type hasattr parameters "
    "state_dict print"
)
"""Functions whose result is new and depends on the values of nothing."""
FUNCTIONS_ONLY = word_set("float int bool tensor as_tensor asarray array from_numpy")
METHODS_ONLY = word_set("item tolist numpy detach_ long short byte char sample new_tensor")
WHOLE_DTYPES = ("long", "int", "short", "bool", "uint8", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor")
COMPARISONS = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
MAX_TEXT = 80
"""Characters of an expression in a sentence."""
MAX_DEPTH, MAX_STEPS = 40, 2000
"""Expressions within each other, and in all, that one walk looks at."""


def cut_kind(call: ast.Call, is_function: bool) -> str | None:
    """How a call ends the path of its operands, or None. is_function: `torch.argmax(x)`, not `x.argmax()`."""
    name = last_name(call.func)
    if name == "grad" and is_function:
        creates = [k.value for k in call.keywords if k.arg == "create_graph"]
        return None if any(not isinstance(v, ast.Constant) or v.value for v in creates) else "gradient"
    if name in ("to", "type") and not is_function:
        return "whole numbers" if any(_is_whole_dtype(argument) for argument in call_arguments(call)) else None
    if name == "float" and not is_function or name in METHODS_ONLY and is_function:
        return None
    if name in ("int", "bool") and not is_function:
        return "comparison" if name == "bool" else "whole numbers"
    if name in FUNCTIONS_ONLY and not is_function:
        return None
    return next((kind for kind, names in CUTS.items() if name in names), None)


def _is_whole_dtype(argument: Any) -> bool:
    if isinstance(argument, ast.Constant):
        return isinstance(argument.value, str) and argument.value.rpartition(".")[2] in WHOLE_DTYPES
    name = last_name(argument)
    return name in WHOLE_DTYPES or name.startswith(("int", "uint"))


def no_grad_block(node: Any, code: FunctionSource, target: str | None = None) -> GraphCut | None:
    """The no_grad around a statement, or the switch before it, if gradients are off there."""
    for around in code.source.around(node):
        for item in around.items if isinstance(around, (ast.With, ast.AsyncWith)) else ():
            disabled = _disables_grad(item.context_expr, code)
            if isinstance(disabled, GraphCut):
                return dataclasses.replace(disabled, target=target, statement=_short(node))
            if disabled is not None:
                text = f"with {_short(item.context_expr)}:"
                op = callee_word(item.context_expr)
                return _graph_cut("block", op, text, around, code, target=target, statement=node) if disabled else None
        if around is code.node:
            break
    switched = _switched_off(code, node)
    return switched and dataclasses.replace(switched, target=target, statement=_short(node))


def no_grad_function(code: FunctionSource) -> GraphCut | None:
    """The no_grad that decorates a function of the user's, if one does."""
    for decorator in getattr(code.node, "decorator_list", ()):
        disabled = _disables_grad(decorator, code)
        if disabled:
            cut = _graph_cut("block", callee_word(decorator), "@" + ast.unparse(decorator), decorator, code)
            cut = disabled if isinstance(disabled, GraphCut) else cut
            return dataclasses.replace(cut, statement=f"def {code.name}(...):")
    return None


def _disables_grad(manager: Any, code: FunctionSource) -> GraphCut | bool | None:
    """Whether a context manager, or a decorator, turns gradients off (True) or on (False); None where neither. Of one
    of the user's own, the place where it turns them off."""
    name = callee_word(manager)
    mode = manager.args[0] if isinstance(manager, ast.Call) and manager.args else None
    if name in ("no_grad", "inference_mode"):
        return mode is None or truth(mode, code) is not False
    if name == "enable_grad":
        return False
    if name == "set_grad_enabled" and mode is not None:
        enabled = truth(mode, code)
        return None if enabled is None else not enabled
    return _own_manager(manager, code)


def _own_manager(manager: Any, code: FunctionSource) -> GraphCut | bool | None:
    """The same of the user's: what `__enter__` leaves off, what is off at a function's `yield`, what it returns as
    manager, or how a decorator's inner function calls what it decorates."""
    made = static_value(manager.func if isinstance(manager, ast.Call) else manager, code)
    kind = made if issubclass(type(made), type) else type(made)
    if kind in (torch.no_grad, torch.inference_mode):
        return True
    enter = function_source(next((vars(k)["__enter__"] for k in kind.__mro__ if "__enter__" in vars(k)), None))
    if enter is not None:
        return _switched_off(enter)
    own = callee(manager, code) if isinstance(manager, ast.Call) else function_source(made)
    if own is None or own.node is code.node:
        return None
    for statement in own.statements():
        if isinstance(getattr(statement, "value", None), ast.Yield):
            return no_grad_block(statement, own)
        inner = own.in_scope(statement)
        for part in inner.statements() if isinstance(statement, FUNCTIONS) else ():
            if any(last_name(c.func) in own.positional for c in calls_in(part) if not hasattr(part, "body")):
                return no_grad_block(part, inner) or no_grad_function(inner)
    for value, statement in own.returned():
        chosen = [value.body, value.orelse][truth(value.test, own) is False] if isinstance(value, ast.IfExp) else value
        if isinstance(chosen, ast.Call) and not is_skipped(statement, own) and (off := _disables_grad(chosen, own)):
            return off if isinstance(off, GraphCut) else _graph_cut("block", "", _short(chosen), chosen, own)
    return None


SWITCH = "switch"
"""The op of a call that turns gradients off until another turns them on."""


def _switched_off(code: FunctionSource, node: Any = None) -> GraphCut | None:
    """The call that turned gradients off in a function, before a statement or at all, and not on again:
    `torch.set_grad_enabled(False)`, `mode.__enter__()`, `stack.enter_context(torch.no_grad())`, or one that does so."""
    off: GraphCut | None = None
    for statement in code.statements():
        plain = isinstance(statement, (ast.Expr, ast.Assign)) and not is_skipped(statement, code)
        before = node is None or end_position(statement) <= (node.lineno, node.col_offset)
        for call in calls_in(statement) if plain and before else ():
            name, owner = last_name(call.func), getattr(call.func, "value", None)
            here = _graph_cut("block", SWITCH, _short(call), call, code)
            if name in ("set_grad_enabled", "_set_grad_enabled") and call.args:
                off = here if _is_false(call.args[0]) else None
            elif name in ("__enter__", "__exit__"):
                if _disables_grad(owner, code) or _disables_grad(_made_by(owner, code), code):
                    off = here if name == "__enter__" else None
            elif name == "enter_context" and owner is not None and call.args and node is not None:
                within = [t for w in code.source.around(node) if isinstance(w, ast.With) for t in targets(w)]
                if ast.unparse(owner) in map(ast.unparse, within) and _disables_grad(call.args[0], code):
                    off = here
            elif call is statement.value and node is not None and (inner := callee(call, code)) is not None:
                switches = [c for s in inner.statements() if isinstance(s, ast.Expr) for c in calls_in(s)]
                off = _switched_off(inner) if "set_grad_enabled" in map(callee_word, switches) else off
    return off


def _made_by(node: Any, code: FunctionSource) -> Any:
    """The call that made a manager which a variable holds."""
    made = assignments(code, node.id, code.line) if isinstance(node, ast.Name) else []
    return getattr(made[-1], "value", node) if made else node


def _graph_cut(
    kind: str,
    op: str,
    text: str,
    node: Any,
    code: FunctionSource,
    *,
    source: str | None = None,
    target: str | None = None,
    sure: bool = True,
    statement: Any = None,
) -> GraphCut:
    """node: the syntax whose line is the place of the cut."""
    short = "" if statement is None else _short(statement)
    return GraphCut(kind, op, text, source, target, code.name, code.where(node), sure, statement=short)


def _short(node: Any) -> str:
    return clip(ast.unparse(node), MAX_TEXT)


def call_arguments(call: ast.Call) -> list[Any]:
    return [*call.args, *(k.value for k in call.keywords)]


def call_operands(call: ast.Call, code: FunctionSource) -> list[Any]:
    """The arguments of a call, and before them the `x` of `x.argmax()`."""
    base = [call.func.value] if isinstance(call.func, ast.Attribute) and not _is_function(call, code) else []
    return base + call_arguments(call)


def _is_function(call: ast.Call, code: FunctionSource) -> bool:
    """`torch.argmax(x)` and `float(x)`, not `x.argmax()`."""
    if isinstance(call.func, ast.Name):
        return True
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    return issubclass(type(static_value(base, code)), (types.ModuleType, type)) if base is not None else False


def target_index(statement: Any, name: str) -> int | None:
    """Which of several targets a variable is: `_, best = …` → 1 for `best`."""
    for whole in getattr(statement, "targets", ()):
        if isinstance(whole, (ast.Tuple, ast.List)):
            return next((i for i, t in enumerate(whole.elts) if isinstance(t, ast.Name) and t.id == name), None)
    return None


GRAD, DATA, UNSURE = "has a gradient", "never had one", "not known"
Verdict = GraphCut | str


def join_operands(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what is computed together: one gradient is enough; else the surest place at which one was lost."""
    known = list(verdicts)
    if GRAD in known:
        return GRAD
    return _surest_cut(known) or (UNSURE if UNSURE in known else DATA)


def join_branches(verdicts: Iterable[Verdict]) -> Verdict:
    """Of what may have run, one or the other: a lost gradient explains best why there is none."""
    known = list(verdicts)
    return _surest_cut(known) or next((verdict for verdict in (GRAD, UNSURE) if verdict in known), DATA)


def _surest_cut(verdicts: list[Verdict]) -> GraphCut | None:
    cuts = [verdict for verdict in verdicts if isinstance(verdict, GraphCut)]
    return min(cuts, key=lambda cut: not cut.sure, default=None)


def has_gradient(value: Any) -> bool:
    """Whether a value is a tensor that requires a gradient, or an exact container that holds one."""
    if is_tensor(value):
        return bool(value.requires_grad)
    if type(value) in (list, tuple, dict):
        items = list(value.values() if type(value) is dict else value)[:100]
        return any(is_tensor(item) and item.requires_grad for item in items)
    return False


class GradientPath:
    """One walk back. frozen: the modules and parameters on the way that require no gradient, by path."""

    def __init__(self, context: ErrorContext) -> None:
        self.context = context
        self.frozen: dict[str, Any] = {}
        self._walked: list[tuple[int, int]] = []
        self._steps = 0
        # the function is kept with the verdict, so that its id stays its own
        self._known: dict[tuple[int, int], tuple[Verdict, FunctionSource]] = {}

    def of(self, node: Any, code: Any) -> Verdict:
        """What became of the gradient of an expression."""
        if not isinstance(node, ast.AST):
            return node if node in (GRAD, DATA, UNSURE) or isinstance(node, GraphCut) else UNSURE
        if (id(node), id(code)) in self._known:
            return self._known[id(node), id(code)][0]
        self._steps += 1
        key = (id(node), id(code.node))
        if self._steps > MAX_STEPS or len(self._walked) > MAX_DEPTH or key in self._walked:
            return DATA if key in self._walked else UNSURE
        self._walked.append(key)
        try:
            verdict = self._expression(node, code)
            self._known[id(node), id(code)] = verdict, code
            return verdict
        finally:
            self._walked.pop()

    def _expression(self, node: Any, code: FunctionSource) -> Verdict:
        if isinstance(node, ast.Name):
            return self._name(node, code)
        if isinstance(node, ast.Call):
            return self._call(node, code)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, code)
        if isinstance(node, ast.Subscript):
            return self._item(node, code)
        if isinstance(node, ast.IfExp):
            test = truth(node.test, code)
            branches = [node.body, node.orelse] if test is None else [node.body if test else node.orelse]
            return join_branches(self.of(part, code) for part in branches)
        if isinstance(node, ast.Compare):
            sign = COMPARISONS.get(type(node.ops[0]), "in")
            return self._cut("comparison", sign, node, [node.left, *node.comparators], code)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._cut("comparison", "not", node, [node.operand], code)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self.of(node.elt, code)
        if isinstance(node, ast.JoinedStr | ast.Lambda | ast.Constant):
            return DATA
        return join_operands(
            self.of(part, code) for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.Starred))
        )

    def _name(self, node: ast.Name, code: FunctionSource) -> Verdict:
        """A variable: by its value, else by what gave it its value."""
        value = static_value(node, code)
        if has_gradient(value):
            return GRAD
        if issubclass(type(value), (types.ModuleType, type)) or is_module(value):
            return DATA
        for around in code.source.around(node):  # the `for` of a comprehension gives it its value
            for generator in getattr(around, "generators", ()):
                if any(isinstance(t, ast.Name) and t.id == node.id for t in ast.walk(generator.target)):
                    return self.of(generator.iter, code)
        for scope in enclosing_scopes(code):
            before: int | tuple[int, int] = code.line if scope is code else 10**9
            if scope is code and id(node) in code.source.parents:
                before = node.lineno, node.col_offset
            verdict = self._assigned(node.id, scope, before)
            if verdict is not None:
                return verdict
            if node.id in scope.arguments or node.id in scope.positional and value is UNKNOWN:
                return self.of(*scope.arguments.get(node.id, (UNSURE, None)))
        return self._leaf(value, node)

    def _leaf(self, value: Any, node: Any) -> Verdict:
        """A value that no statement has given: a closure's, a global, an attribute."""
        if is_tensor(value):
            if issubclass(type(value), torch.nn.Parameter):
                self.frozen.setdefault(ast.unparse(node), value)
            return DATA
        return UNSURE if value is UNKNOWN else DATA

    def _assigned(self, name: str, code: FunctionSource, before: int | tuple[int, int]) -> Verdict | None:
        """By the statements that give a variable its value, from the last back to the first that always runs."""
        verdicts: list[Verdict] = []
        put = insertions(code.statements(), name, ("append", "extend", "insert", "add"))
        items = [self.of(value, code) for _, value in put if value is not None]
        for statement in reversed(assignments(code, name, before)):
            if is_skipped(statement, code):
                continue
            verdicts.append(self._statement(statement, name, code))
            if not any(isinstance(n, (ast.If, ast.Try, ast.ExceptHandler)) for n in code.source.around(statement)):
                break
        return join_operands([join_branches(verdicts), *items]) if verdicts else None

    def _statement(self, statement: Any, name: str, code: FunctionSource) -> Verdict:
        """What an assignment gives to one of its targets."""
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            return self.of(statement.iter, code)
        if isinstance(statement, ast.AugAssign):
            first = not any(s.lineno < statement.lineno for s in assignments(code, name, statement.lineno))
            before = None if first else self._assigned(name, code, (statement.lineno, statement.col_offset))
            both = join_operands([self.of(statement.value, code), before or DATA])
            return self._in_blocks(statement, both, code, name)
        value = getattr(statement, "value", None)
        if value is None or isinstance(statement, (ast.With, ast.AsyncWith)):
            walruses = (n for n in own_expressions(statement) if isinstance(n, ast.NamedExpr))
            return next((self.of(n.value, code) for n in walruses), DATA)
        index = target_index(statement, name)
        if index == 1 and isinstance(value, ast.Call) and last_name(value.func) in INDICES:
            op = last_name(value.func)
            verdict = self._cut("whole numbers", op, value, call_operands(value, code), code, name)
        else:
            verdict = self.of(value, code) if index is None else self._entry(value, index, code)
            if index is not None and isinstance(verdict, GraphCut) and verdict.where.line == value.lineno:
                verdict = dataclasses.replace(verdict, target=name)
        return self._in_blocks(statement, verdict, code, name)

    def _in_blocks(self, statement: Any, verdict: Verdict, code: FunctionSource, name: str | None = None) -> Verdict:
        """The same under the blocks around a statement: under no_grad nothing gets a gradient."""
        if isinstance(verdict, GraphCut) or verdict == DATA:
            return verdict
        return no_grad_block(statement, code, name) or verdict

    def _attribute(self, node: ast.Attribute, code: FunctionSource) -> Verdict:
        value = static_value(node, code)
        if has_gradient(value) and node.attr != "data":
            return GRAD
        if node.attr == "data":
            return self._cut("detached", ".data", node, [node.value], code)
        if node.attr == "grad":
            return self._cut("gradient", ".grad", node, [node.value], code)
        if node.attr in ("shape", "dtype", "device", "ndim"):
            return DATA
        if node.attr == "indices":
            return self._cut("whole numbers", ".indices", node, [node.value], code)
        if value is not UNKNOWN and not (is_tensor(value) and value.grad_fn is None and not value.requires_grad):
            return DATA
        for statement in code.statements():  # an attribute that this function has set
            if (
                statement.lineno < code.line
                and any(ast.unparse(t) == ast.unparse(node) for t in targets(statement) if isinstance(t, ast.Attribute))
                and getattr(statement, "value", None) is not None
            ):
                return self._in_blocks(statement, self.of(statement.value, code), code, ast.unparse(node))
        return self._leaf(value, node) if value is not UNKNOWN else self.of(node.value, code)

    def _item(self, node: ast.Subscript, code: FunctionSource) -> Verdict:
        if has_gradient(static_value(node, code)):
            return GRAD
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if index == 1 and isinstance(node.value, ast.Call) and last_name(node.value.func) in INDICES:
            operands = call_operands(node.value, code)
            return self._cut("whole numbers", last_name(node.value.func), node, operands, code)
        return self.of(node.value, code) if index is None else self._entry(node.value, index, code)

    def _entry(self, node: Any, key: Any, code: FunctionSource) -> Verdict:
        """One entry of a tuple, a list or a dict, where the source shows it; else the whole."""
        parts = list(entries(node, key, code))
        verdict = join_branches(self.of(part, inner) for part, inner in parts)
        whole = UNSURE if parts and isinstance(verdict, GraphCut) else self.of(node, code)
        return whole if not parts or isinstance(whole, GraphCut) and whole.kind == "block" else verdict

    def _call(self, node: ast.Call, code: FunctionSource) -> Verdict:
        """A call: into the user's function or module; of an op that cuts; else by its arguments."""
        name, function = last_name(node.func), static_value(node.func, code)
        if isinstance(node.func, ast.Name) and function is UNKNOWN:
            modules = loop_modules(node.func.id, code)
            if modules:
                return self._through(modules, join_operands(self.of(a, code) for a in call_arguments(node)), code)
        if is_module(function):
            return self._module(function, node, code)
        inner = callee(node, code, function) or forward_of_new_module(node, code)
        if inner is not None:
            return self.function(inner)
        decorator = no_grad_decorator(function)
        if decorator is not None:
            text = f"{ast.unparse(node.func)} (decorated with {decorator})"
            return _graph_cut("block", decorator, text, node, code, statement=statement_of(node, code) or node)
        if name in FRESH:
            return DATA
        if name in ("checkpoint", "checkpoint_sequential"):
            return self._checkpoint(node, code)
        operands = call_operands(node, code)
        kind = cut_kind(node, _is_function(node, code))
        if kind is not None:
            return self._cut(kind, name, node, operands, code)
        plain = type(function) in (types.BuiltinFunctionType, types.FunctionType)
        made_by = function if issubclass(type(function), type) else type(function)
        home = function.__module__ if plain else type.__getattribute__(made_by, "__module__")
        if function is not UNKNOWN and str(home).partition(".")[0] == "numpy":
            return self._cut("number", ast.unparse(node.func), node, operands, code)
        unknown = [UNSURE] if isinstance(node.func, ast.Call) else []  # `nn.Linear(4, 3)(x)`: a new module is called
        return join_operands([*unknown, *(self.of(part, code) for part in operands)])

    def _checkpoint(self, node: ast.Call, code: FunctionSource) -> Verdict:
        """torch's checkpoint in its old form passes a gradient only where one of its inputs requires one."""
        inputs = [a for a in node.args[1:] if not isinstance(a, ast.Starred)]
        verdict = join_operands(self.of(a, code) for a in inputs)
        reentrant = next((k.value for k in node.keywords if k.arg == "use_reentrant"), None)
        if verdict != DATA or isinstance(reentrant, ast.Constant) and reentrant.value is False:
            return GRAD if verdict == DATA else verdict
        function = static_value(node.args[0], code) if node.args else UNKNOWN
        if is_module(function) and not _is_trainable(function):
            return DATA
        statement = statement_of(node, code)
        source = ", ".join(map(ast.unparse, inputs)) or None
        target = _target_text(statement, ast.Assign)
        text = _short(node)
        return _graph_cut(
            "checkpoint", "checkpoint", text, node, code, source=source, target=target, statement=statement or node
        )

    def function(self, inner: FunctionSource) -> Verdict:
        """A function of the user's: what it returns, under its decorators."""
        decorated = no_grad_function(inner)
        if decorated is not None:
            return decorated if self._returns(inner) != DATA else DATA
        return self._returns(inner)

    def _returns(self, inner: FunctionSource) -> Verdict:
        """What it returns or yields, under the blocks around these statements."""
        given = [(s.value.value, s) for s in inner.statements() if isinstance(getattr(s, "value", None), ast.Yield)]
        return join_branches(
            self._in_blocks(statement, self.of(value, inner), inner)
            for value, statement in [*inner.returned(), *given]
            if value is not None and not is_skipped(statement, inner)
        )

    def _module(self, module: Any, node: ast.Call, code: FunctionSource) -> Verdict:
        inner = callee(node, code, module)
        if inner is None:
            return self._through([module], join_operands(self.of(a, code) for a in call_arguments(node)), code)
        verdict = self.function(inner)
        if isinstance(verdict, GraphCut) or verdict == GRAD:
            return verdict
        return join_operands([verdict, UNSURE if _is_trainable(module) else DATA])

    def _through(self, modules: Iterable[Any], verdict: Verdict, code: FunctionSource) -> Verdict:
        """What a value becomes that goes through modules of torch's or a library's, one after the other."""
        for module in modules:
            inner = forward_of(module)
            if inner is not None:
                args = inner.node.args
                inputs = [a.arg for a in (*args.posonlyargs, *args.args)][1:2]
                verdict = self.function(dataclasses.replace(inner, arguments=dict.fromkeys(inputs, (verdict, None))))
            elif type(module) is torch.nn.Sequential or "_orig_mod" in named_children(module):
                verdict = self._through(named_children(module).values(), verdict, code)
            elif _is_trainable(module):
                verdict = GRAD
            elif next(named_parameters(module), None) is not None:
                self.frozen.setdefault(self.context.owners.paths.get(id(module)) or type(module).__name__, module)
        return verdict

    def _cut(
        self, kind: str, op: str, node: Any, operands: list[Any], code: FunctionSource, target: str | None = None
    ) -> Verdict:
        """An op that ends the path, unless none of its operands had a gradient, or one lost it before."""
        verdicts = [(self.of(part, code), part) for part in operands]
        verdict = join_operands(v for v, _ in verdicts)
        if isinstance(verdict, GraphCut) or verdict == DATA:
            return verdict
        source = next((ast.unparse(part) for v, part in verdicts if v == verdict), None)
        statement = statement_of(node, code)
        target = target or _target_text(statement, ast.Assign | ast.AugAssign)
        sure = verdict == GRAD
        return _graph_cut(
            kind, op, _short(node), node, code, source=source, target=target, sure=sure, statement=statement or node
        )


def _target_text(statement: Any, kinds: Any) -> str | None:
    return ", ".join(map(ast.unparse, targets(statement))) or None if isinstance(statement, kinds) else None


def _is_trainable(module: Any) -> bool:
    return any(parameter.requires_grad for _, parameter in named_parameters(module))


# -- what was requested, and of what -----------------------------------------------------------------------------------


MESSAGES = {
    "loss": r"element \d+ of (tensors|variables) does not require grad",
    "not scalar": "grad can be implicitly created only for scalar outputs",
    "input": "[Oo]ne of the differentiated Tensors does not require grad",
    "unused": "appears to not have been used in the graph",
    "no parameters": "optimizer got an empty parameter list",
    "not a leaf": "can't optimize a non-leaf Tensor",
    "hook": "cannot register a hook on a tensor that doesn't require grad|"
    "can't retain_grad on Tensor that has requires_grad=False",
    "inference": "Inference tensors cannot be saved for backward|requires_grad=True on inference tensor",
}
NOT_A_TENSOR = re.compile(r"'([\w.]+)' object has no attribute 'backward'")
NO_LOSS = re.compile(
    r"float|int|bool|complex|str|NoneType|tuple|list|dict|OrderedDict|ndarray|numpy\.\w+|\w*Loss|"
    r"\w*Output|\w*Outputs"
)
"""Types that users take for a loss; another class without a `backward` is a slip of another kind."""
GRAD_IS_NONE = re.compile(
    r"'NoneType' object has no attribute '\w+'|unsupported operand type.*NoneType|"
    r"must be Tensor, not NoneType"
)
HOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
MAX_REDUCED = 10_000_000
"""Elements of a loss whose mean is computed."""
MAX_UNTRACKED = 8
"""Attributes named that `parameters()` does not give."""


def detect(context: ErrorContext) -> NoGradFacts | None:
    """The facts of a missing gradient, or None where the exception is about something else."""
    what = _what(context)
    if what is None:
        return None
    codes = traceback_functions(context)
    if not codes:
        return NoGradFacts(context.raised(), what)
    code = codes[0]
    if what == "loss":  # autograd.grad for an input that requires none: then the loss need not have one
        inputs = _requested(context, code, "input")
        what = "input" if inputs is not None and input_at_fault(inputs, code, [], "input")[1] is not None else what
    expression = _requested(context, code, what)
    if what == "grad is None" and expression is None:
        return None
    return _facts(context, what, code, expression)


def _what(context: ErrorContext) -> str | None:
    """Which of these errors it is, by torch's message."""
    message = context.message
    what = kind_of_message(MESSAGES, message) if context.type in ("RuntimeError", "ValueError", "TypeError") else None
    if what is not None:
        return what
    missing = NOT_A_TENSOR.search(message) if context.type == "AttributeError" else None
    if missing and NO_LOSS.fullmatch(missing[1]):
        return "not a tensor"
    if context.type in ("AttributeError", "TypeError") and GRAD_IS_NONE.search(message):
        return "grad is None"
    return None


def _facts(context: ErrorContext, what: str, code: FunctionSource, expression: Any) -> NoGradFacts:
    """expression: that of which a gradient was requested."""
    roots = backward_roots(context)
    value = static_value(expression, code) if expression is not None else UNKNOWN
    without = (root for root in roots if what == "not scalar" or not root.requires_grad)
    tensor: Any = value if is_tensor(value) else next(without, None)
    text = ast.unparse(expression) if expression is not None else ""
    if what in ("input", "unused"):
        text, tensor, expression = input_at_fault(expression, code, roots, what)
    cut, no_path = _cut(context, what, expression, code)
    mean = None
    if what == "not scalar" and tensor is not None and 0 < tensor.numel() <= MAX_REDUCED and not tensor.is_meta:
        mean = float(tensor.detach().double().mean())  # the loss reduced to one number, by torch
    kind = NOT_A_TENSOR.search(context.message)
    models = context.owners.models.items()
    names = (f"{model_name}.{name}" for model_name, m in models for name, p in named_parameters(m) if p is tensor)
    return NoGradFacts(
        context.raised(),
        what,
        clip(text, 80),
        fact(text or "the tensor", tensor) if tensor is not None else None,
        kind[1] if kind else None,
        cut,
        no_path,
        tuple(name for name, model in models if attributes(model).get("training") is False),
        _counts(context),
        tuple(untracked(context)) if what == "no parameters" else (),
        mean,
        _result_of(expression, code, kind[1] == "NoneType") if kind and expression is not None else None,
        next(names, None),
        _registered(context) if what == "no parameters" else reduced(text, code) if what == "not scalar" else None,
    )


def _registered(context: ErrorContext) -> Edit | None:
    """The line of the user's that makes the first list of modules, with a ModuleList of them."""
    path, what = next(untracked(context), ("", ""))
    attribute, kind = path.rpartition(".")[2], "ModuleDict" if "dict" in what else "ModuleList"
    for file in dict.fromkeys(frame.site.file for frame in context.users) if "modules" in what else ():
        lines = [
            n for n in nodes_of(file) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == f"self.{attribute}"
        ]
        if len(lines) == 1:
            home = "nn" if any(frame.globals.get("nn") is torch.nn for frame in context.users) else "torch.nn"
            return edit_of(file, {lines[0].value: f"{home}.{kind}({{raw}})"})
    return None


def _counts(context: ErrorContext) -> tuple[tuple[str, int, int], ...]:
    """(model, numbers in parameters that require a gradient, all of them)."""
    counts = []
    for name, model in context.owners.models.items():
        lazy = torch.nn.parameter.UninitializedParameter
        sizes = [(p.requires_grad, p.numel()) for _, p in named_parameters(model) if not issubclass(type(p), lazy)]
        if sizes:
            counts.append((name, sum(n for requires, n in sizes if requires), sum(n for _, n in sizes)))
    return tuple(counts)


def untracked(context: ErrorContext) -> Iterator[tuple[str, str]]:
    """(name, what it is) of a module's attributes that `parameters()` does not give."""
    number = 0
    for model_name, model in context.owners.models.items():
        for _, part in named_modules(model):
            path = context.owners.paths.get(id(part)) or model_name
            for name, value in attributes(part).items():
                what = None if name in MODULES_OWN else _untracked_kind(value)
                if what is not None and number < MAX_UNTRACKED:
                    number += 1
                    yield f"{path}.{name}", what


def _untracked_kind(value: Any) -> str | None:
    items = list(value.values()) if type(value) is dict else value
    if type(value) in (list, tuple, dict) and items and all(is_module(item) for item in items):
        return f"a plain {type(value).__name__} of {len(items)} modules"
    if is_tensor(value) and value.requires_grad and value.is_leaf:
        return "a tensor, no nn.Parameter"
    return None


def _requested(context: ErrorContext, code: FunctionSource, what: str) -> Any:
    """The expression of which a gradient was requested, None where the line does not show it. what: as in
    `NoGradFacts`."""
    line = failing_node(code)
    if line is None:
        return None
    if what == "grad is None":
        return _none_grad(line, code)
    if what == "inference":
        parts = [n for n in ast.walk(line) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))]
        return next((part for part in parts if is_tensor(v := static_value(part, code)) and v.is_inference()), None)
    if what in ("no parameters", "not a leaf"):
        return _optimizer_argument(line, code, what)
    if what in ("input", "unused"):
        call = next((call for call in calls_in(line) if last_name(call.func) in ("backward", "grad")), None)
        if call is not None:
            inputs = (k.value for k in call.keywords if k.arg == "inputs")
            return call.args[1] if len(call.args) > 1 else next(inputs, None)
    return loss_expression(context, code, HOOKS if what == "hook" else ("backward", "grad"))


def _none_grad(line: Any, code: FunctionSource) -> Any:
    """The `x` of an `x.grad` that is None."""
    for part in ast.walk(line):
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            tensor = static_value(part.value, code)
            if is_tensor(tensor) and (tensor.grad_fn is not None or tensor.grad is None):
                return part.value
    return None


def _optimizer_argument(line: Any, code: FunctionSource, what: str) -> Any:
    """What an optimizer was given; of several tensors the one that is no leaf."""
    for call in calls_in(line):
        argument = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "params"), None)
        if argument is None:
            continue
        if what == "no parameters":
            return argument
        for part in ast.walk(argument):
            if isinstance(part, ast.expr) and is_tensor(v := static_value(part, code)) and v.grad_fn is not None:
                return part
        return argument
    return None


def input_at_fault(inputs: Any, code: FunctionSource, outputs: list[Any], what: str) -> tuple[str, Any, Any]:
    """(text, tensor, expression) of autograd.grad's input that has no gradient, or that the outputs don't come from."""
    parts = inputs.elts if isinstance(inputs, (ast.List, ast.Tuple)) else [inputs]
    graph = set(node_distances(outputs)) if what == "unused" else set()
    leaves = {id(before.variable) for node in graph for before in input_nodes(node) if is_leaf_node(before)}
    for part in parts:
        tensor = static_value(part, code)
        if not is_tensor(tensor):
            continue
        in_graph = tensor.grad_fn in graph if tensor.grad_fn is not None else id(tensor) in leaves
        if not (tensor.requires_grad if what == "input" else in_graph):
            return ast.unparse(part), tensor, part
    return ast.unparse(inputs) if inputs is not None else "", None, inputs


def _result_of(expression: Any, code: FunctionSource, nothing: bool) -> str | None:
    """The call whose result it is. nothing: only a function that returns nothing, by its name."""
    node = expression
    if isinstance(node, ast.Name):
        values = [s.value for s in assignments(code, node.id, code.line) if isinstance(s, ast.Assign)]
        node = values[-1] if values else None
    if not isinstance(node, ast.Call):
        return None
    if not nothing:
        return clip(ast.unparse(node), 60)
    function, inner = static_value(node.func, code), callee(node, code)
    if inner is None or inner.returned():
        return None
    return f"{type(function).__name__}.forward" if is_module(function) else inner.name


def _cut(context: ErrorContext, what: str, expression: Any, code: FunctionSource) -> tuple[GraphCut | None, bool]:
    """(where the path ends, whether there never was one)."""
    path = GradientPath(context)
    if what == "inference" and expression is not None:
        made = path.of(expression, code)
        return (made if isinstance(made, GraphCut) and made.kind == "block" else None), False
    if what not in ("loss", "not a tensor", "hook", "input"):
        return None, False
    if expression is None:
        return _cut_in_models(context, path), False
    block, off = _surrounding_block(context), not torch.is_grad_enabled()
    if block is not None and what != "not a tensor" and not (off and block.op == SWITCH):
        return block, False
    verdict = path.of(expression, code)
    if isinstance(verdict, GraphCut) and not (off and verdict.op == SWITCH):
        return verdict, False
    if off:
        return _global_switch(context), False
    if verdict != GRAD and path.frozen:
        return _frozen(context, path), False
    return (None, True) if verdict == DATA else (_left_off_in_loop(context), False)


def _cut_in_models(context: ErrorContext, path: GradientPath) -> GraphCut | None:
    """Where a library calls backward: the cut in what a model returns as its loss."""
    for model in context.owners.models.values():
        for name in ("training_step", "forward"):
            code = method_source(model, name)
            verdict = path.function(code) if code is not None else DATA
            if isinstance(verdict, GraphCut):
                return verdict
    return None


def _surrounding_block(context: ErrorContext) -> GraphCut | None:
    """The no_grad within which the failing line itself stands, here or in a function that called it."""
    for code in traceback_functions(context):
        line = failing_node(code)
        block = no_grad_block(line, code) if isinstance(line, (ast.expr, ast.stmt)) else None
        block = block or no_grad_function(code)
        if block is not None:
            return block
    return None


def _global_switch(context: ErrorContext) -> GraphCut:
    """Gradients are off: the line that turned them off and no other on again, as far as the source shows it."""
    for code in [scope for one in traceback_functions(context) for scope in enclosing_scopes(one)]:
        inner = [code.in_scope(f) for f in functions(code.source.tree) if code.node is code.source.tree]
        for scope in [code, *(f for f in inner if isinstance(f.node, FUNCTIONS))]:
            if (off := _switched_off(scope)) is not None:
                return dataclasses.replace(off, kind="global", op=off.text, statement="")
    return GraphCut("global", "torch.set_grad_enabled(False)")


def _left_off_in_loop(context: ErrorContext) -> GraphCut | None:
    """The function that a loop around the failing line calls, and that left gradients off for its next round; after
    the loop they may be on again."""
    for code in traceback_functions(context):
        line = failing_node(code)
        loops = loops_around(code, line) if line is not None else []
        for call in (c for loop in loops for s in statements_of(loop) if not hasattr(s, "body") for c in calls_in(s)):
            inner = callee(call, code)
            if inner is not None and (off := _switched_off(inner)) is not None:
                return dataclasses.replace(off, kind="global", op=off.text, statement="")
    return None


def _frozen(context: ErrorContext, path: GradientPath) -> GraphCut:
    """All that could learn was frozen: which modules, and the line that froze them."""
    names = tuple(path.frozen)
    for code in traceback_functions(context):
        outer = None if isinstance(code.node, ast.Module) else code.source.outer(code.node)
        for scope in [code, *([code.in_scope(outer)] if outer is not None else [])]:
            for statement in scope.statements():
                sets = isinstance(statement, ast.Assign) and _is_false(statement.value)
                frozen = sets and any(last_name(t) == "requires_grad" for t in targets(statement))
                calls = calls_in(statement) if isinstance(statement, ast.Expr) else []
                if frozen or any(last_name(c.func) == "requires_grad_" and any(map(_is_false, c.args)) for c in calls):
                    text, where = ast.unparse(statement), scope.where(statement)
                    return GraphCut("frozen", "requires_grad", text, function=scope.name, where=where, names=names)
    return GraphCut("frozen", "requires_grad", names=names)


def _is_false(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
