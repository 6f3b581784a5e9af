"""Which call failed, and what it was given: the tensors with the user's names for them.

Either the user's own line holds the op (`q @ k`, `torch.cat(...)`, `x.view(...)`), and its operands are read from the
syntax. Or it called something of torch's, a layer or a function, whose frame holds the tensors under torch's names
(`input`, `target`, `hx`); the user's names are found by identity, or by the place of the argument in the user's call.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import SCOPES, functions, tree_of
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.operands import OperandNames, within
from nbdebug.tools.errors.sandbox import Sandbox, quiet
from nbdebug.tools.errors.shapes.facts import ShapeOperand
from nbdebug.tools.errors.shapes.messages import read
from nbdebug.tools.errors.syntax import bound, entries
from nbdebug.tools.errors.values import UNKNOWN, expression, message_of, statement, value_of


def layer_of(scene: ErrorContext, weight: tuple[int, ...] | None) -> Any:
    """The one Linear of the user's models whose weight, transposed, has this shape; None where several have it."""
    if scene.carried is None or weight is None or len(weight) != 2:
        return None
    found = {
        id(part): part
        for model in scene.owners.models.values()
        for _, part in named_modules(model)
        if type(part) is nn.Linear and (part.in_features, part.out_features) == weight
    }
    return next(iter(found.values())) if len(found) == 1 else None


def revived(scene: ErrorContext, frame: Frame) -> Frame:
    """A frame that is known from text alone, as a compiled model's, with its `self` where one module of the user's has
    this method."""
    if frame.names or frame.site.function in ("<module>", "<lambda>"):
        return frame
    found = {
        id(part): part
        for model in scene.owners.models.values()
        for _, part in named_modules(model)
        for kind in type(part).__mro__
        if _written_at(vars(kind).get(frame.site.function), frame)
    }
    if len(found) != 1:
        return frame
    mine = next(iter(found.values()))
    return dataclasses.replace(frame, names={"self": mine}, module=mine)


def _written_at(method: Any, frame: Frame) -> bool:
    code = method.__code__ if type(method) is FunctionType else None
    lines = [line for *_, line in code.co_lines() if line is not None] if code is not None else []
    return code is not None and code.co_filename == frame.site.file and frame.site.line in lines


SYMBOLS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.MatMult: "@",
    ast.Pow: "**",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.GtE: ">=",
}


def is_shaped(value: Any) -> bool:
    return is_tensor(value) or type(value) is np.ndarray


def look_up(node: ast.AST, frame: Frame) -> Any:
    """The value of an operand: as it lies there, else computed again on copies, else UNKNOWN."""
    found = value_of(node, frame)
    if found is not UNKNOWN:
        return found
    with quiet():
        try:
            return Sandbox().evaluate(node, frame)
        except Exception:
            return UNKNOWN


def is_number(node: ast.AST) -> bool:
    """Sizes, axes and slices: no tensors, though their values may be unknown."""
    called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return isinstance(node, (ast.Constant, ast.Slice, ast.UnaryOp, ast.Tuple, ast.Starred)) or called in (
        "size",
        "len",
        "int",
    )


def op_of(node: ast.AST | None) -> str:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return SYMBOLS.get(type(node.op), "") + "=" * isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Compare):
        return SYMBOLS.get(type(node.ops[0]), "")
    if isinstance(node, ast.Call):
        return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    if isinstance(node, ast.Subscript):
        return "[]"
    return str(node.attr) if isinstance(node, ast.Attribute) else ""


def nodes(node: ast.AST, frame: Frame, kind: str) -> Iterator[tuple[str, ast.AST]]:
    """(role, node) of the operands of an expression."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Subscript)) and isinstance(node.ctx, ast.Store):
        around = statement(frame)
        yield from ([("target", node)] if isinstance(node, ast.Subscript) else [])
        if isinstance(around, (ast.Assign, ast.AugAssign)):
            yield "value", around.value
    elif isinstance(node, ast.BinOp):
        yield from (("left", node.left), ("right", node.right))
    elif isinstance(node, ast.AugAssign):
        yield from (("left", node.target), ("right", node.value))
    elif isinstance(node, ast.Compare) and kind != "truth":
        yield from (("left", node.left), ("right", node.comparators[0]))
    elif isinstance(node, ast.Subscript):
        yield "self", node.value
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield "index", index
    elif isinstance(node, ast.Call):
        yield from _called_with(node, frame)
    else:
        yield "self", node


def _called_with(node: ast.Call, frame: Frame) -> Iterator[tuple[str, ast.AST]]:
    function = value_of(node.func, frame)
    if isinstance(node.func, ast.Attribute) and (
        function is UNKNOWN or type(function) in (MethodType, BuiltinFunctionType) and is_shaped(function.__self__)
    ):
        yield "self", node.func.value
    for arg in [*node.args, *(k.value for k in node.keywords)]:
        if isinstance(arg, (ast.List, ast.Tuple)) and arg.elts and not all(is_number(e) for e in arg.elts):
            yield from (("tensors", part) for part in arg.elts)
        else:
            yield "", arg


PASSING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CONTAINERS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""They are at fault themselves only where no layer inside them is."""
LONGEST = 60
ALIKE = ("query", "key", "value", "hx", "key_padding_mask", "attn_mask", "mask")
"""Arguments that torch's layers hand on as other tensors: the user's are known by their shape."""


@dataclasses.dataclass
class CallPart:
    """One tensor or array that the op was given. text: what the user wrote for it, "" where that is not known."""

    text: str
    role: str
    value: Any
    node: ast.AST | None = None
    weight: bool = False

    @property
    def shape(self) -> tuple[int, ...] | None:
        return tuple(self.value.shape) if is_shaped(self.value) else None

    def operand(self) -> ShapeOperand:
        dtype = str(self.value.dtype).removeprefix("torch.") if is_shaped(self.value) else ""
        return ShapeOperand(self.text[:LONGEST], self.role, self.shape, dtype, self.weight)


@dataclasses.dataclass
class FailedCall:
    """op: its name as the user knows it; frame: the user's innermost; node: the expression of theirs that failed or
    called what failed; layer: torch's module that failed; function, inner: torch's function that failed and the frame
    with its arguments, where the op is not in the user's line; numbers: its plain arguments, each with its text."""

    op: str
    parts: list[CallPart]
    frame: Frame | None = None
    node: ast.AST | None = None
    layer: nn.Module | None = None
    function: Callable[..., Any] | None = None
    inner: Frame | None = None
    numbers: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def direct(self) -> bool:
        """Whether the user's own expression is the op, or calls the very layer or function that failed."""
        if self.inner is None:
            return True
        called = value_of(self.node.func, self.frame) if isinstance(self.node, ast.Call) and self.frame else UNKNOWN
        return called is not UNKNOWN and (called is self.layer or called is self.function)


def failing(scene: ErrorContext, kind: str, names: OperandNames) -> FailedCall:
    """The call that raised."""
    frame = revived(scene, scene.users[0]) if scene.users else None
    node = _precise(frame, kind) if frame is not None else None
    below = [f for f in within(scene) if f.names]  # of frames known from text alone there is nothing to read
    if not below:
        return _written(frame, node, kind)
    modules = [f.module for f in below if f.module is not None and type(f.module) not in PASSING]
    layer = next((m for m in modules if type(m) not in CONTAINERS), modules[-1] if modules else None)
    losses = layer is not None and type(layer).__name__.endswith("Loss")
    inner = (
        next((f for f in reversed(below) if f.module is layer and f.site.function == "forward"), below[-1])
        if layer is not None and not losses
        else below[-1]
    )
    function = type(layer).forward if layer is not None and not losses else _function(inner)
    if losses:  # the function tells the tensors as well, and may be called again
        inner = next((f for f in reversed(below) if _function(f) is not None), inner)
        layer, function = None, _function(inner)
    inner = _as_given(inner, layer, below)
    call = FailedCall(
        inner.site.function if layer is None else type(layer).__name__, [], frame, node, layer, function, inner
    )
    call.parts = list(_given(call, names))
    return call


def _as_given(inner: Frame, layer: Any, below: list[Frame]) -> Frame:
    """Attention turns what has its batch first before it computes: its frame with the operands as it was given them."""
    turned = (
        type(layer) is nn.MultiheadAttention
        and bool(attributes(layer).get("batch_first"))
        and any(frame.site.function == "multi_head_attention_forward" for frame in below)
    )
    if not turned or inner.site.function != "forward":
        return inner
    names = {
        name: value.detach().transpose(0, 1)
        for name, value in inner.names.items()
        if name in ("query", "key", "value") and is_tensor(value) and value.ndim == 3
    }
    return dataclasses.replace(inner, names={**inner.names, **names})


def _function(frame: Frame) -> Callable[..., Any] | None:
    """torch's function whose frame this is."""
    for home in (nn.functional, torch.functional, torch.nn.utils.rnn, torch.Tensor):
        found = vars(home).get(frame.site.function)
        if type(found) is FunctionType and found.__code__.co_filename == frame.site.file:
            return found
    return None


def _given(call: FailedCall, names: OperandNames) -> Iterator[CallPart]:
    """The tensors among the arguments of torch's function, under the user's names."""
    assert call.inner is not None
    wanted = list(inspect.signature(call.function).parameters) if call.function else list(call.inner.names)
    written = _arguments(call, [name for name in wanted if name != "self"])
    for role in wanted:
        value: Any = call.inner.names.get(role)
        several: list[Any] = list(value) if type(value) in (list, tuple) and len(value) < 50 else [value]
        for i, item in enumerate(several):
            if is_shaped(item):
                found = names.asked(item, role) if is_tensor(item) else None
                text = found.name if found is not None and found.known else ""
                node = written.get(role)
                if node is not None and call.frame is not None and value_of(node, call.frame) is item:
                    text = ast.unparse(node)  # the name in the line that failed, of several
                if not text and role in ALIKE:
                    text, item = _alike(call, item, role)
                label = role if len(several) == 1 else f"{role}[{i}]"
                if not text and node is not None:
                    text, item = _named(call, node, i if len(several) > 1 else None, item)
                yield CallPart(text, label, item, node, bool(found and found.owner is not None))


def _alike(call: FailedCall, item: Any, role: str) -> tuple[str, Any]:
    """The one argument of the user's call that has this shape, or has it with batch and time exchanged: torch's layers
    make another tensor of a mask, and turn what has its batch first."""
    shapes = {tuple(item.shape)} if "mask" in role else {tuple(item.shape), (*item.shape[1::-1], *item.shape[2:])}
    found: dict[str, Any] = {}
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        named = isinstance(node, (ast.Name, ast.Attribute)) and call.frame is not None
        value: Any = value_of(node, call.frame) if named and call.frame is not None else UNKNOWN
        if is_shaped(value) and tuple(value.shape) in shapes and ("mask" in role or "mask" not in ast.unparse(node)):
            found[ast.unparse(node)] = value
    return found.popitem() if len(found) == 1 else ("", item)


def _named(call: FailedCall, node: ast.AST, i: int | None, item: Any) -> tuple[str, Any]:
    """The user's text for an argument, and the tensor as they gave it: torch's function may have turned it since."""
    if i is not None:
        inner = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
        return (ast.unparse(inner[i]) if i < len(inner) else f"{ast.unparse(node)}[{i}]"), item
    given = look_up(node, call.frame) if call.frame is not None else UNKNOWN
    return ast.unparse(node), given if is_shaped(given) else item


def _arguments(call: FailedCall, wanted: list[str]) -> dict[str, ast.AST]:
    """What the user wrote for each parameter, where the user's own expression calls this layer or function."""
    node = call.node
    if not isinstance(node, ast.Call) or call.frame is None:
        return {}
    called = value_of(node.func, call.frame)
    method = getattr(node.func, "attr", "") == call.op and not issubclass(type(called), nn.Module)
    if called is UNKNOWN and isinstance(node.func, ast.Call):  # a layer made and called on the spot
        kind = value_of(node.func.func, call.frame)
        loss = getattr(node.func.func, "attr", "").endswith("Loss")
        called = call.layer if kind is type(call.layer) or loss else called
    same = (
        called is not UNKNOWN
        and called is call.layer
        or called is call.function
        or method
        or (issubclass(type(called), nn.Module) and type(called).__name__.endswith("Loss"))
    )
    if not same:
        return {}
    plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    return {**dict(zip(wanted, plain)), **{k.arg: k.value for k in node.keywords if k.arg}}


def of_shapes(scene: ErrorContext, shapes: tuple[tuple[int, ...] | None, ...]) -> list[CallPart]:
    """The user's variables of these shapes, where the line itself can't be read (`%time`, `exec`) and each is the only
    one of its shape."""
    found = []
    for shape in shapes:
        known = {
            id(value): (name, value)
            for name, value, _ in scene.variables()
            if shape is not None and is_shaped(value) and tuple(value.shape) == shape
        }
        if len(known) == 1:
            name, value = next(iter(known.values()))
            found.append(CallPart(name, "", value))
    return found


def _precise(frame: Frame, kind: str) -> ast.AST | None:
    """The failing expression. Where Python knows only the statement, its parts are run on copies, innermost first: the
    first that fails in the same way is the one."""
    node = expression(frame)
    if kind == "truth" and node is not None:
        return _undecided(getattr(node, "test", node), frame)
    if not isinstance(node, ast.stmt) or isinstance(node, ast.AugAssign):
        return node
    inner = [n for n in ast.walk(node) if isinstance(n, (ast.BinOp, ast.Call, ast.Compare, ast.Subscript))]
    for part in reversed(inner):
        if failure(part, frame) == kind:
            return part
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if kind in ("unpack", "assign", "expand", "broadcast") and isinstance(target, (ast.Tuple, ast.Subscript)):
        return target
    return inner[0] if inner else node


def _undecided(test: ast.AST, frame: Frame) -> ast.AST:
    """The part of a condition that is no single true or false."""
    for part in ast.walk(test):
        if isinstance(part, ast.expr):
            value = look_up(part, frame)
            if is_shaped(value) and value.ndim > 0:
                return part
    return test


def failure(node: ast.AST, frame: Frame) -> str | None:
    """What kind of shape error an expression raises when it runs on copies; None where it runs, or can't."""
    with quiet():
        try:
            Sandbox().evaluate(node, frame)
        except Exception as failed:  # CannotRun has no message, and so no kind
            said = read(message_of(failed))
            return said.kind if said else None
    return None


def _written(frame: Frame | None, node: ast.AST | None, kind: str) -> FailedCall:
    """The op stands in the user's own line."""
    call = FailedCall(op_of(node), [], frame, node)
    if frame is None or node is None:
        return call
    called: Any = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
    if issubclass(type(called), nn.Module) and type(called).__module__.startswith("torch.nn."):
        call.layer, call.op = called, type(called).__name__  # of a compiled model
    for role, part in nodes(node, frame, kind):
        value = look_up(part, frame)
        text = ast.unparse(part)
        if type(value) in (list, tuple) and value and all(is_shaped(item) for item in value):
            call.parts += [CallPart(f"{text}[{i}]", role, item) for i, item in enumerate(value)]
        elif is_shaped(value) or value is UNKNOWN and not is_number(part):
            call.parts.append(CallPart(text, role, None if value is UNKNOWN else value, part))
        elif type(value) in (int, tuple, list, torch.Size):
            call.numbers.append((text, value if type(value) is int else tuple(value)))
    return call


FLATTENING = ("reshape", "view", "flatten", "contiguous", "long", "clone", "detach", "squeeze")
HOPS = 3


def scope_of(frame: Frame) -> ast.AST | None:
    """The function of a frame as syntax, or the whole file or cell."""
    tree = tree_of(frame.site.file)
    if tree is None:
        return None
    line = frame.site.line
    around = [n for n in functions(tree) if isinstance(n, SCOPES) and n.lineno <= line <= (n.end_lineno or 0)]
    return min(around, key=lambda n: (n.end_lineno or 0) - n.lineno, default=tree)


def before_flattening(node: ast.AST | None, frame: Frame, rows: int) -> Iterator[tuple[ast.expr, ast.expr, Any]]:
    """(expression, the part of it before it was flattened, what that is) of a flat operand of so many rows: of what
    stands there, or of what its name was bound to before."""
    for source in _sources(node, frame):
        base = source
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in FLATTENING:
            base = base.func.value
            value = look_up(base, frame)
            if is_shaped(value) and value.ndim > 1 and value.shape[0] * value.shape[1] == rows:
                yield source, base, value


def _sources(node: ast.AST | None, frame: Frame) -> Iterator[ast.expr]:
    """The expression itself, then what its name was bound to, nearest first."""
    scope, line = scope_of(frame), frame.site.line
    for _ in range(HOPS):
        if not isinstance(node, ast.expr):
            return
        yield node
        if not isinstance(node, ast.Name) or scope is None:
            return
        earlier = [b for b in bound(scope, node.id) if b[0].lineno < line]
        if not earlier:
            return
        value, keys = earlier[-1]
        node, line = next((part for part, rest in entries(value, keys) if not rest), None), value.lineno


def with_base(source: ast.expr, base: ast.expr, new: str) -> str:
    """The expression with another text in the place of its base; views become reshapes, as a cut tensor needs."""
    text = ast.unparse(source).replace(ast.unparse(base), new, 1)
    return text.replace(".view(", ".reshape(")


def taken_by(node: ast.AST | None, frame: Frame) -> ast.Call | None:
    """The call that is given what the failing expression gives: the one around it, or the next one after the statement
    that is given the name which it binds."""
    made, scope = statement(frame), scope_of(frame)
    if made is None or scope is None:
        return None
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and n.args]
    around = next((call for call in calls if call.args[0] is node), None)
    if around is not None or not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return around
    name, end = made.targets[0].id, made.end_lineno or made.lineno
    after = [n for n in calls if n.lineno > end and isinstance(n.args[0], ast.Name) and n.args[0].id == name]
    return min(after, key=lambda n: n.lineno, default=None)
