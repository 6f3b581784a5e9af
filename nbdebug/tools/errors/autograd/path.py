"""Where the path of a gradient ends: a result is followed back through the user's source to what it was computed from.

Each expression has a gradient, has none because what it comes from never had one (data), or lost it at a place: the
innermost op behind which there still is one. Of a live tensor `requires_grad` says so; an expression whose frame is
gone is read. The walk enters the user's functions and modules; torch's own modules give a gradient when a parameter of
theirs requires one.

First come the ops, blocks and decorators that end a path, then the walk (`GradientPath`)."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.observe.variables import named_children, named_parameters
from nbdebug.text import clip
from nbdebug.tools.errors.autograd.calls import (
    callee,
    enclosing_scopes,
    entries,
    forward_of,
    forward_of_new_module,
    is_skipped,
    loop_modules,
    no_grad_decorator,
    truth,
)
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    assignments,
    calls_in,
    is_module,
    last_name,
    own_expressions,
    statement_of,
    static_value,
    targets,
    word_set,
)
from nbdebug.tools.errors.autograd.rules import GraphCut
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.values import UNKNOWN

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
    """The no_grad around a statement, if one is."""
    for around in code.source.around(node):
        for item in around.items if isinstance(around, (ast.With, ast.AsyncWith)) else ():
            disabled = _disables_grad(item.context_expr, code)
            if disabled is not None:
                text = f"with {_short(item.context_expr)}:"
                op = _manager_name(item.context_expr)
                return _graph_cut("block", op, text, around, code, target=target, statement=node) if disabled else None
        if around is code.node:
            break
    return None


def no_grad_function(code: FunctionSource) -> GraphCut | None:
    """The no_grad that decorates a function of the user's, if one does."""
    for decorator in getattr(code.node, "decorator_list", ()):
        if _disables_grad(decorator, code):
            cut = _graph_cut("block", _manager_name(decorator), "@" + ast.unparse(decorator), decorator, code)
            return dataclasses.replace(cut, statement=f"def {code.name}(...):")
    return None


def _manager_name(manager: Any) -> str:
    return last_name(manager.func if isinstance(manager, ast.Call) else manager)


def _disables_grad(manager: Any, code: FunctionSource) -> bool | None:
    """Whether a context manager, or a decorator, turns gradients off (True) or on (False); None where neither."""
    name = _manager_name(manager)
    mode = manager.args[0] if isinstance(manager, ast.Call) and manager.args else None
    if name in ("no_grad", "inference_mode"):
        return mode is None or truth(mode, code) is not False
    if name == "enable_grad":
        return False
    if name == "set_grad_enabled" and mode is not None:
        enabled = truth(mode, code)
        return None if enabled is None else not enabled
    return None


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


def _is_of_numpy(function: Any) -> bool:
    kind = function if issubclass(type(function), type) else type(function)
    plain = kind in (types.BuiltinFunctionType, types.FunctionType)
    module = function.__module__ if plain else type.__getattribute__(kind, "__module__")
    return str(module).partition(".")[0] == "numpy"


def values_put_in(code: FunctionSource, name: str) -> list[Any]:
    """What is put into a container of this name: `name.append(x)`, `name[k] = x`."""
    values: list[Any] = []
    for statement in code.statements():
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id == name
            for t in statement.targets
        ):
            values.append(statement.value)
        elif isinstance(statement, ast.Expr):
            values += [
                argument
                for call in calls_in(statement)
                if last_name(call.func) in ("append", "extend", "insert", "add")
                and isinstance(call.func, ast.Attribute)
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id == name
                for argument in call.args[-1:]
            ]
    return values


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
            if node.id in scope.arguments:
                return self.of(*scope.arguments[node.id])
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
        items = [self.of(value, code) for value in values_put_in(code, name)]
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
        if function is not UNKNOWN and _is_of_numpy(function):
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
            verdict = join_branches(self.of(value, inner) for value, _ in inner.returned())
            return verdict if verdict == DATA else decorated
        return join_branches(
            self._in_blocks(statement, self.of(value, inner), inner)
            for value, statement in inner.returned()
            if not is_skipped(statement, inner)
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
