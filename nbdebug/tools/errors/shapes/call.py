"""Which call failed, and its operands: the tensors with the user's names for them.

Either the user's own line holds the op (`q @ k`, `torch.cat(...)`, `x.view(...)`), and its operands are read from the
syntax. Or it called something of torch's, a layer or a function, whose frame holds the tensors under torch's names
(`input`, `target`, `hx`); the user's names are found by identity, or by the position of the argument in the user's
call. Of a compiled model the frames are known from text alone: the layer is found by its sizes. The last part reads
what an operand was bound to before the line, and which call takes the result.
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
from nbdebug.tools.errors.operands import OperandNames, library_frames
from nbdebug.tools.errors.sandbox import Sandbox, quiet
from nbdebug.tools.errors.shapes.messages import parse_message
from nbdebug.tools.errors.shapes.rules import Shape, ShapeOperand
from nbdebug.tools.errors.values import UNKNOWN, bindings, entries, expression, message_of, statement, value_of

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
PASS_THROUGH = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CONTAINERS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""They are at fault themselves only where no layer inside them is."""
LONGEST_TEXT = 60
REPLACED = ("query", "key", "value", "hx", "key_padding_mask", "attn_mask", "mask")
"""Arguments that torch's layers hand on as other tensors: the user's are known by their shape."""
FLATTENING = ("reshape", "view", "flatten", "contiguous", "long", "clone", "detach", "squeeze")
MAX_BINDINGS = 3
"""Bindings that are followed back from a name."""


@dataclasses.dataclass
class CallOperand:
    """One tensor or array that the op was given. text: what the user wrote for it, "" where that is not known."""

    text: str
    role: str
    value: Any
    node: ast.AST | None = None
    weight: bool = False

    @property
    def shape(self) -> Shape | None:
        return tuple(self.value.shape) if is_array(self.value) else None

    def fact(self) -> ShapeOperand:
        dtype = str(self.value.dtype).removeprefix("torch.") if is_array(self.value) else ""
        return ShapeOperand(self.text[:LONGEST_TEXT], self.role, self.shape, dtype, self.weight)


@dataclasses.dataclass
class FailedCall:
    """op: its name as the user knows it; frame: the user's innermost; node: the expression of theirs that failed or
    called what failed; layer: torch's module that failed; function, inner: torch's function that failed and the frame
    with its arguments, where the op is not in the user's line; arguments: its plain ones, each as (text, value)."""

    op: str
    operands: list[CallOperand]
    frame: Frame | None = None
    node: ast.AST | None = None
    layer: nn.Module | None = None
    function: Callable[..., Any] | None = None
    inner: Frame | None = None
    arguments: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def direct(self) -> bool:
        """Whether the user's own expression is the op, or calls the very layer or function that failed."""
        if self.inner is None:
            return True
        function = value_of(self.node.func, self.frame) if isinstance(self.node, ast.Call) and self.frame else UNKNOWN
        return function is not UNKNOWN and (function is self.layer or function is self.function)


def failed_call(context: ErrorContext, kind: str, names: OperandNames) -> FailedCall:
    """The call that raised."""
    frame = _with_self(context, context.users[0]) if context.users else None
    node = _failing_expression(frame, kind) if frame is not None else None
    below = [f for f in library_frames(context) if f.names]  # in frames known from text alone there is nothing to read
    if not below:
        return _expression_call(frame, node, kind)
    modules = [f.module for f in below if f.module is not None and type(f.module) not in PASS_THROUGH]
    layer = next((m for m in modules if type(m) not in CONTAINERS), modules[-1] if modules else None)
    if layer is not None and not type(layer).__name__.endswith("Loss"):
        forwards = (f for f in reversed(below) if f.module is layer and f.site.function == "forward")
        inner = _as_passed(next(forwards, below[-1]), layer, below)
        function: Callable[..., Any] | None = type(layer).forward
    else:  # of a loss the function knows the tensors as well, and may be called again
        inner = below[-1]
        if layer is not None:
            inner = next((f for f in reversed(below) if _torch_function(f) is not None), inner)
        layer, function = None, _torch_function(inner)
    op = inner.site.function if layer is None else type(layer).__name__
    call = FailedCall(op, [], frame, node, layer, function, inner)
    call.operands = list(_argument_operands(call, names))
    return call


def _as_passed(inner: Frame, layer: Any, below: list[Frame]) -> Frame:
    """Attention transposes what has its batch first before it computes: its frame with the operands as passed."""
    transposed = (
        type(layer) is nn.MultiheadAttention
        and bool(attributes(layer).get("batch_first"))
        and any(frame.site.function == "multi_head_attention_forward" for frame in below)
    )
    if not transposed or inner.site.function != "forward":
        return inner
    names = {
        name: value.detach().transpose(0, 1)
        for name, value in inner.names.items()
        if name in ("query", "key", "value") and is_tensor(value) and value.ndim == 3
    }
    return dataclasses.replace(inner, names={**inner.names, **names})


def _torch_function(frame: Frame) -> Callable[..., Any] | None:
    """torch's function whose frame this is."""
    for home in (nn.functional, torch.functional, torch.nn.utils.rnn, torch.Tensor):
        function = vars(home).get(frame.site.function)
        if type(function) is FunctionType and function.__code__.co_filename == frame.site.file:
            return function
    return None


def _failing_expression(frame: Frame, kind: str) -> ast.AST | None:
    """Where Python knows only the statement, its parts are run on copies, innermost first: the first that fails in the
    same way is the one."""
    node = expression(frame)
    if kind == "truth" and node is not None:
        return _ambiguous_part(getattr(node, "test", node), frame)
    if not isinstance(node, ast.stmt) or isinstance(node, ast.AugAssign):
        return node
    inner = [n for n in ast.walk(node) if isinstance(n, (ast.BinOp, ast.Call, ast.Compare, ast.Subscript))]
    for part in reversed(inner):
        if _failure_kind(part, frame) == kind:
            return part
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if kind in ("unpack", "assign", "expand", "broadcast") and isinstance(target, (ast.Tuple, ast.Subscript)):
        return target
    return inner[0] if inner else node


def _ambiguous_part(test: ast.AST, frame: Frame) -> ast.AST:
    """The part of a condition that is no single true or false."""
    for part in ast.walk(test):
        if isinstance(part, ast.expr):
            value = operand_value(part, frame)
            if is_array(value) and value.ndim > 0:
                return part
    return test


def _failure_kind(node: ast.AST, frame: Frame) -> str | None:
    """What kind of shape error an expression raises when it runs on copies; None where it runs, or can't."""
    with quiet():
        try:
            Sandbox().evaluate(node, frame)
        except Exception as error:  # CannotRun has no message, and so no kind
            message = parse_message(message_of(error))
            return message.kind if message else None
    return None


def is_array(value: Any) -> bool:
    return is_tensor(value) or type(value) is np.ndarray


def operand_value(node: ast.AST, frame: Frame) -> Any:
    """The value of an operand: from the frame, else computed again on copies, else UNKNOWN."""
    value = value_of(node, frame)
    if value is not UNKNOWN:
        return value
    with quiet():
        try:
            return Sandbox().evaluate(node, frame)
        except Exception:
            return UNKNOWN


# -- torch's frames: the tensors under torch's names --------------------------------------------------------------


def _argument_operands(call: FailedCall, names: OperandNames) -> Iterator[CallOperand]:
    """The tensors among the arguments of torch's function, under the user's names."""
    assert call.inner is not None
    roles = list(inspect.signature(call.function).parameters) if call.function else list(call.inner.names)
    written = _written_arguments(call, [role for role in roles if role != "self"])
    for role in roles:
        argument: Any = call.inner.names.get(role)
        several: list[Any] = list(argument) if type(argument) in (list, tuple) and len(argument) < 50 else [argument]
        for i, value in enumerate(several):
            if is_array(value):
                named = names.argument(value, role) if is_tensor(value) else None
                text = named.name if named is not None and named.known else ""
                node = written.get(role)
                if node is not None and call.frame is not None and value_of(node, call.frame) is value:
                    text = ast.unparse(node)  # the name in the line that failed, of several
                if not text and role in REPLACED:
                    text, value = _of_same_shape(call, value, role)
                label = role if len(several) == 1 else f"{role}[{i}]"
                if not text and node is not None:
                    text, value = _as_written(call, node, i if len(several) > 1 else None, value)
                yield CallOperand(text, label, value, node, bool(named and named.owner is not None))


def _of_same_shape(call: FailedCall, item: Any, role: str) -> tuple[str, Any]:
    """The one argument of the user's call that has this shape, or has it with batch and time exchanged: torch's layers
    make another tensor of a mask, and transpose what has its batch first."""
    shapes = {tuple(item.shape)} if "mask" in role else {tuple(item.shape), (*item.shape[1::-1], *item.shape[2:])}
    values: dict[str, Any] = {}
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, (ast.Name, ast.Attribute)) and call.frame is not None:
            value, text = value_of(node, call.frame), ast.unparse(node)
            if is_array(value) and tuple(value.shape) in shapes and ("mask" in role or "mask" not in text):
                values[text] = value
    return values.popitem() if len(values) == 1 else ("", item)


def _as_written(call: FailedCall, node: ast.AST, i: int | None, item: Any) -> tuple[str, Any]:
    """The user's text for an argument, and the tensor as they passed it: torch's function may have transposed it."""
    if i is not None:
        inner = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
        return (ast.unparse(inner[i]) if i < len(inner) else f"{ast.unparse(node)}[{i}]"), item
    value = operand_value(node, call.frame) if call.frame is not None else UNKNOWN
    return ast.unparse(node), value if is_array(value) else item


def _written_arguments(call: FailedCall, parameters: list[str]) -> dict[str, ast.AST]:
    """What the user wrote for each parameter, where the user's own expression calls this layer or function."""
    node = call.node
    if not isinstance(node, ast.Call) or call.frame is None:
        return {}
    function = value_of(node.func, call.frame)
    method = getattr(node.func, "attr", "") == call.op and not issubclass(type(function), nn.Module)
    if function is UNKNOWN and isinstance(node.func, ast.Call):  # a layer made and called on the spot
        kind = value_of(node.func.func, call.frame)
        loss = getattr(node.func.func, "attr", "").endswith("Loss")
        function = call.layer if kind is type(call.layer) or loss else function
    same = (
        function is not UNKNOWN
        and function is call.layer
        or function is call.function
        or method
        or (issubclass(type(function), nn.Module) and type(function).__name__.endswith("Loss"))
    )
    if not same:
        return {}
    plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    return {**dict(zip(parameters, plain)), **{k.arg: k.value for k in node.keywords if k.arg}}


def operands_of_shapes(context: ErrorContext, shapes: tuple[Shape | None, ...]) -> list[CallOperand]:
    """The user's variables of these shapes, where the line itself can't be read (`%time`, `exec`) and each is the only
    one of its shape."""
    operands = []
    for shape in shapes:
        alike = {
            id(value): (name, value)
            for name, value, _ in context.variables()
            if shape is not None and is_array(value) and tuple(value.shape) == shape
        }
        if len(alike) == 1:
            name, value = next(iter(alike.values()))
            operands.append(CallOperand(name, "", value))
    return operands


# -- the user's own expression ---------------------------------------------------------------------------------------


def _expression_call(frame: Frame | None, node: ast.AST | None, kind: str) -> FailedCall:
    """Of an op in the user's own line."""
    call = FailedCall(_op_name(node), [], frame, node)
    if frame is None or node is None:
        return call
    function: Any = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
    if issubclass(type(function), nn.Module) and type(function).__module__.startswith("torch.nn."):
        call.layer, call.op = function, type(function).__name__  # of a compiled model
    for role, part in _operand_nodes(node, frame, kind):
        value = operand_value(part, frame)
        text = ast.unparse(part)
        if type(value) in (list, tuple) and value and all(is_array(item) for item in value):
            call.operands += [CallOperand(f"{text}[{i}]", role, item) for i, item in enumerate(value)]
        elif is_array(value) or value is UNKNOWN and not _is_plain(part):
            call.operands.append(CallOperand(text, role, None if value is UNKNOWN else value, part))
        elif type(value) in (int, tuple, list, torch.Size):
            call.arguments.append((text, value if type(value) is int else tuple(value)))
    return call


def _op_name(node: ast.AST | None) -> str:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return SYMBOLS.get(type(node.op), "") + "=" * isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Compare):
        return SYMBOLS.get(type(node.ops[0]), "")
    if isinstance(node, ast.Call):
        return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    if isinstance(node, ast.Subscript):
        return "[]"
    return str(node.attr) if isinstance(node, ast.Attribute) else ""


def _operand_nodes(node: ast.AST, frame: Frame, kind: str) -> Iterator[tuple[str, ast.AST]]:
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
        yield from _call_nodes(node, frame)
    else:
        yield "self", node


def _call_nodes(node: ast.Call, frame: Frame) -> Iterator[tuple[str, ast.AST]]:
    function = value_of(node.func, frame)
    if isinstance(node.func, ast.Attribute) and (
        function is UNKNOWN or type(function) in (MethodType, BuiltinFunctionType) and is_array(function.__self__)
    ):
        yield "self", node.func.value
    for arg in [*node.args, *(k.value for k in node.keywords)]:
        if isinstance(arg, (ast.List, ast.Tuple)) and arg.elts and not all(_is_plain(e) for e in arg.elts):
            yield from (("tensors", part) for part in arg.elts)
        else:
            yield "", arg


def _is_plain(node: ast.AST) -> bool:
    """Sizes, axes and slices: no tensors, though their values may be unknown."""
    function = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    plain = (ast.Constant, ast.Slice, ast.UnaryOp, ast.Tuple, ast.Starred)
    return isinstance(node, plain) or function in ("size", "len", "int")


# -- a compiled model ------------------------------------------------------------------------------------------------


def compiled_layer(context: ErrorContext, weight: Shape | None) -> Any:
    """The one Linear of the user's models whose weight, transposed, has this shape; None where several have it."""
    if context.carried is None or weight is None or len(weight) != 2:
        return None
    layers = {
        id(part): part
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        if type(part) is nn.Linear and (part.in_features, part.out_features) == weight
    }
    return next(iter(layers.values())) if len(layers) == 1 else None


def _with_self(context: ErrorContext, frame: Frame) -> Frame:
    """A frame that is known from text alone, as a compiled model's, with its `self` where one module of the user's has
    this method."""
    if frame.names or frame.site.function in ("<module>", "<lambda>"):
        return frame
    owners = {
        id(part): part
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        for kind in type(part).__mro__
        if _has_line(vars(kind).get(frame.site.function), frame)
    }
    if len(owners) != 1:
        return frame
    module = next(iter(owners.values()))
    return dataclasses.replace(frame, names={"self": module}, module=module)


def _has_line(method: Any, frame: Frame) -> bool:
    if type(method) is not FunctionType or method.__code__.co_filename != frame.site.file:
        return False
    return frame.site.line in [line for *_, line in method.__code__.co_lines()]


# -- the statements around the line ----------------------------------------------------------------------------------


def _scope(frame: Frame) -> ast.AST | None:
    """The function of a frame as syntax, or the whole file or cell."""
    tree = tree_of(frame.site.file)
    if tree is None:
        return None
    line = frame.site.line
    around = [n for n in functions(tree) if isinstance(n, SCOPES) and n.lineno <= line <= (n.end_lineno or 0)]
    return min(around, key=lambda n: (n.end_lineno or 0) - n.lineno, default=tree)


def unflattened(node: ast.AST | None, frame: Frame, rows: int) -> Iterator[tuple[ast.expr, ast.expr, Any]]:
    """(expression, the part of it before it was flattened, the value of that) of a flat operand of so many rows: of its
    expression, or of what its name was bound to before."""
    for source in bindings_back(node, frame):
        base = source
        while isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in FLATTENING:
            base = base.func.value
            value = operand_value(base, frame)
            if is_array(value) and value.ndim > 1 and value.shape[0] * value.shape[1] == rows:
                yield source, base, value


def bindings_back(node: ast.AST | None, frame: Frame) -> Iterator[ast.expr]:
    """The expression itself, then what its name was bound to, nearest first."""
    scope, line = _scope(frame), frame.site.line
    for _ in range(MAX_BINDINGS):
        if not isinstance(node, ast.expr):
            return
        yield node
        if not isinstance(node, ast.Name) or scope is None:
            return
        earlier = [b for b in bindings(scope, node.id) if b[0].lineno < line]
        if not earlier:
            return
        value, keys = earlier[-1]
        node, line = next((part for part, rest in entries(value, keys) if not rest), None), value.lineno


def next_call(node: ast.AST | None, frame: Frame) -> ast.Call | None:
    """The call that takes the result of the failing expression: the one around it, or the next one after the statement
    whose first argument is the name that it binds."""
    line, scope = statement(frame), _scope(frame)
    if line is None or scope is None:
        return None
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and n.args]
    around = next((call for call in calls if call.args[0] is node), None)
    if around is not None or not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
        return around
    name, end = line.targets[0].id, line.end_lineno or line.lineno
    after = [n for n in calls if n.lineno > end and isinstance(n.args[0], ast.Name) and n.args[0].id == name]
    return min(after, key=lambda n: n.lineno, default=None)
