"""The facts of a size, a number of axes or an axis that does not fit, or None.

The message says which kind of misfit it is and gives some numbers (`call`), the failing call has the operands
(`call`); what the message leaves out is read from these (`_complete`). Then come the history of the shape and the fixes
that fit."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.frames import Frame, phase
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.report import Link
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    is_tensor,
    operands,
    statement,
    tensor_attribute,
)
from nbdebug.tools.errors.operands import OperandNames, is_instance, library_frames
from nbdebug.tools.errors.rules import Raised, word_pairs
from nbdebug.tools.errors.shapes.call import (
    CallOperand,
    FailedCall,
    ParsedMessage,
    compiled_layer,
    failed_call,
    frames_below,
    is_array,
    layer_sizes,
    operand_value,
    operands_of_shapes,
    parse_message,
    path_of,
    user_input,
)
from nbdebug.tools.errors.shapes.fixes import (
    MAX_FIXES,
    as_edits,
    attention_fixes,
    attention_message,
    downstream,
    downstream_fixes,
    operand_fixes,
    other_layer_fixes,
    remainder,
    resized_layer_fixes,
    token_shift,
)
from nbdebug.tools.errors.shapes.rules import (
    FailedLayer,
    Shape,
    ShapeFacts,
    ShapeFix,
    ShapeOperand,
    ShapeStep,
    ViewDownstream,
)
from nbdebug.tools.errors.shapes.trials import output_shape

RAISES = (
    "RuntimeError ValueError IndexError AssertionError TypeError NotImplementedError AxisError TorchRuntimeError "
    "DimensionMismatchError"
).split()
WITH_HISTORY = ("features", "small", "rank", "loss", "count")
"""Kinds for which the history of the shape is reported."""
TENSORS_ONLY = ("unpack", "truth", "scalar")
"""Kinds whose message Python words the same for things that are no tensors."""
INPUT_SIZES = (
    "in_features in_channels num_features normalized_shape num_channels input_size embed_dim d_model num_parameters"
).split()
"""The settings that say which size of input a layer was made for."""
ON_LAST_AXIS = (
    "Linear LayerNorm RMSNorm RNN LSTM GRU RNNCell LSTMCell GRUCell MultiheadAttention Bilinear linear layer_norm "
    "rms_norm"
).split()
"""Layers and functions that work on the last axis of their input."""
UNBATCHED_AXES = {f"{kind}{axes}d": axes + 1 for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)}


def detect(context: ErrorContext) -> ShapeFacts | None:
    """The facts of a shape that does not fit, or None where the exception is about something else."""
    message = parse_message(context.message) if context.type in RAISES else None
    last = context.trail[-1] if context.trail else None
    line = statement(last) if last is not None and last.users else None
    own = isinstance(line, ast.Raise) or isinstance(line, ast.Assert) and context.type == "AssertionError"
    collates = any("torch/utils/data/_utils/collate.py" in f.site.file.replace("\\", "/") for f in context.trail)
    # in collate a sample is at fault, in an optimizer its state: other rules report those
    if message is None or own or collates or phase(context.trail) == "optimizer":
        return None
    names = OperandNames(context)
    call = failed_call(context, message.kind, names)
    if message.kind in TENSORS_ONLY and not _is_of_tensors(call):
        return None
    if not call.operands and call.node is None:
        call.operands = operands_of_shapes(context, (message.a, message.b))
    entry = user_input(call)
    if call.layer is None and message.kind == "product" and (layer := compiled_layer(context, message.b)) is not None:
        entry = next((operand.fact() for operand in call.operands if operand.shape is not None), None)
        call.layer, call.op, call.operands = layer, type(layer).__name__, [CallOperand("", "input", None)]
    message = _complete(call, message)
    failed_layer = None
    if call.layer is not None:
        failed_layer = FailedLayer(path_of(call.layer, names), type(call.layer).__name__, layer_sizes(call.layer))
    which = message.which or 0 if message.kind in ("features", "rank") else 0
    which = which if which < len(call.operands) else 0
    at_fault = call.operands[which] if call.operands else None
    history = shape_history(context, call, at_fault, names) if message.kind in WITH_HISTORY else ()
    shift, folded = None, None
    if message.kind == "loss":
        shift = token_shift(call)
        scores = next((operand.value for operand in call.operands if operand.role == "input"), None)
        folded = batch_change(scores, message.actual, names) if message.actual is not None else None
    after = downstream(call, message, names)
    fixes = _fixes(context, call, message, failed_layer, after, history)
    fixes = as_edits(context, call, fixes, message.actual)
    if message.kind == "loss" and shift is None and folded is None:
        history = history[-1:]  # how its axes came about: what made them last
    return ShapeFacts(
        _raised(context, failed_layer),
        message.kind,
        call.op,
        _operands(call, message),
        failed_layer,
        message.axis,
        message.expected,
        message.actual,
        message.which,
        tuple(call.arguments),
        message.b if message.kind == "mask" else message.a,
        entry,
        user_lines(context, at_fault),
        history,
        folded,
        shift[0] if shift else None,
        after,
        remainder(call) if message.kind == "count" else _uneven(context) if message.kind == "divide" else None,
        fixes,
    )


DIVIDED = (
    ("embed_dim", "num_heads"),
    ("num_channels", "num_groups"),
    ("in_channels", "groups"),
    ("out_channels", "groups"),
)
"""Settings of torch's layers of which the second must divide the first."""


def _uneven(context: ErrorContext) -> tuple[str, int, int] | None:
    """(name of the divisor, what is divided, by what) of a layer that is being made."""
    for frame in library_frames(context):
        for whole, by in DIVIDED:
            sizes = frame.names.get(whole), frame.names.get(by)
            if all(type(size) is int and size > 0 for size in sizes) and sizes[0] % sizes[1]:  # type: ignore[operator]
                return by, *sizes  # type: ignore[return-value]
    return None


def _is_of_tensors(call: FailedCall) -> bool:
    """Whether what was unpacked, indexed or asked is a tensor's or its shape: other tuples are none of ours."""
    if any(operand.shape is not None for operand in call.operands):
        return True
    node = call.node
    if call.frame is not None and isinstance(node, (ast.Tuple, ast.List)):
        around = statement(call.frame)
        node = around.value if isinstance(around, ast.Assign) else None
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Attribute) and part.attr in ("shape", "size") and call.frame is not None:
            value = operand_value(part.value, call.frame)
            if value is not UNKNOWN and CallOperand("", "", value).shape is not None:
                return True
    return False


def _complete(call: FailedCall, message: ParsedMessage) -> ParsedMessage:
    """What the message leaves out, from the operands themselves."""
    shapes = [operand.shape for operand in call.operands]
    if type(call.layer) is nn.MultiheadAttention and message.kind in ("product", "count", "broadcast"):
        return attention_message(call, message) or dataclasses.replace(message, kind="attention")
    if call.layer is not None and message.kind == "product":  # a Linear: its message is about matrices
        message = dataclasses.replace(message, kind="features")
    if message.kind == "product" and len(shapes) == 2 and message.actual is None:
        return _with_inner_sizes(message, *shapes)
    shape = shapes[0] or message.a if shapes else None
    return _with_axis(call, message, shape) if message.kind == "features" and shape else message


def _with_inner_sizes(message: ParsedMessage, a: Shape | None, b: Shape | None) -> ParsedMessage:
    """Which sizes of two factors differ: those summed over, or those of the batch."""
    if not a or not b:
        return message
    inner = b[-2 if len(b) > 1 else -1]
    if a[-1] != inner:
        return dataclasses.replace(message, actual=a[-1], expected=inner)
    return dataclasses.replace(message, kind="broadcast", actual=a[0], expected=b[0], axis=0)


def _with_axis(call: FailedCall, message: ParsedMessage, shape: Shape) -> ParsedMessage:
    """On which axis of its input a layer works, and what it was made for."""
    unbatched = len(shape) == UNBATCHED_AXES.get(call.op)
    axis = len(shape) - 1 if call.op in ON_LAST_AXIS else 0 if unbatched else min(1, len(shape) - 1)
    sizes = layer_sizes(call.layer) if call.layer is not None else {}
    size = next((sizes[name] for name in INPUT_SIZES if name in sizes), None)
    expected = message.expected
    if expected is None:
        expected = size if type(size) is int else (message.b or (None,))[-1]
    if call.layer is not None and type(size) is int and "Linear" in call.op:
        expected = size
    return dataclasses.replace(message, axis=axis, expected=expected, actual=shape[axis])


def _fixes(
    context: ErrorContext,
    call: FailedCall,
    message: ParsedMessage,
    layer: FailedLayer | None,
    after: ViewDownstream | None,
    history: tuple[ShapeStep, ...],
) -> tuple[ShapeFix, ...]:
    """What was tried, likeliest first: another view of an operand, then another layer."""
    kind = message.kind
    if layer is not None and type(call.layer) is nn.MultiheadAttention and kind == "features":
        return tuple(attention_fixes(call, layer.path))
    fixes = operand_fixes(call, message)
    if after is not None:
        return (*downstream_fixes(call, message, after.path), *fixes)[:MAX_FIXES]
    if layer is not None and (kind == "small" or kind == "features" and not fixes):
        return (*fixes, *resized_layer_fixes(context, call, message, history, layer.path))[: MAX_FIXES + 1]
    if layer is not None and kind in ("hidden", "rank"):
        return (*fixes, *other_layer_fixes(call, message, layer.path))[:MAX_FIXES]
    return fixes


def _raised(context: ErrorContext, layer: FailedLayer | None) -> Raised:
    """The exception, with the module by the name in the title."""
    raised = context.raised()
    where = raised.where
    if layer is not None:
        where = dataclasses.replace(where, module=layer.path, module_type=layer.kind)
    elif (where.module_type or "").endswith("Loss"):  # what ran there is no part of a model
        where = dataclasses.replace(where, module=None, module_type=None)
    return dataclasses.replace(raised, where=where)


def _operands(call: FailedCall, message: ParsedMessage) -> tuple[ShapeOperand, ...]:
    """The operands as plain facts; of those whose shape is not known the one in the message."""
    own = [op for op in call.operands if op.text or not op.role.startswith("hx")]  # not a state that torch has made
    operands = [operand.fact() for operand in own]
    unknown = [i for i, operand in enumerate(operands) if operand.shape is None]
    shapes: list[Any] = [shape for shape in (message.a, message.b) if shape is not None]
    if call.layer is not None and unknown and message.a is not None:  # what went into the layer of a compiled model
        operands[0] = dataclasses.replace(operands[0], shape=message.a)
    elif len(operands) == len(shapes) and message.kind in ("product", "broadcast", "loss", "join"):
        for i in unknown:
            operands[i] = dataclasses.replace(operands[i], shape=shapes[i])
    return tuple(operands)


# -- how a shape came about --------------------------------------------------------------------------------------------

MAX_NODES = 60
"""Nodes of a tensor's history that are read."""
OP_NAMES = word_pairs(
    "MaxPool2DWithIndices:max_pool2d MaxPool3DWithIndices:max_pool3d Addmm:linear Mm:mm UnsafeView:view "
    "ReshapeAlias:reshape T:t SqueezeBackward1:squeeze"
)
"""Nodes of the autograd graph whose op the user knows by another name."""
WHOLE = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Layers of several ops: one step each."""
VIEWS = ("view", "reshape")
PREPARING = (*VIEWS, "transpose", "clone", "unsqueeze")
"""Ops that only prepare what a layer is given: the rows of a sequence under each other, time first."""


def user_lines(context: ErrorContext, at_fault: CallOperand | None) -> tuple[Link, ...]:
    """The user's lines that led there, outermost first, each with the tensor at fault where it stands in its call, else
    the first that does; a line without one where it is a function of the user's with a name. Each once."""
    links: list[Link] = []
    visited: set[tuple[str, int]] = set()
    for frame in reversed(context.users[1:]):
        arrays = [(text, value) for text, value in operands(frame) if is_array(value)]
        same = [pair for pair in arrays if at_fault is not None and pair[1] is at_fault.value]
        operand = next(iter([*same, *arrays]), None)
        key = (operand[0], id(operand[1])) if operand is not None else (frame.site.function, 0)
        if key in visited or operand is None and frame.site.function.startswith("<"):
            continue
        visited.add(key)
        what = f"`{operand[0]}` {list(operand[1].shape)} goes in" if operand else f"in `{frame.site.function}`"
        if links and (links[-1].where.file, links[-1].where.line) == (frame.site.file, frame.site.line):
            links.pop()  # a comprehension runs on the line of its function
        links.append(Link(what, frame.where))
    return tuple(links)


def shape_history(
    context: ErrorContext, call: FailedCall, operand: CallOperand | None, names: OperandNames
) -> tuple[ShapeStep, ...]:
    """The steps from the user's tensor to the operand at fault, in order; () where they are not known."""
    start, below = user_input(call), frames_below(context)
    shape = start.shape if start is not None else None
    for frame in below if start is None else ():  # made in the call itself: `model(torch.rand(2, 3))`
        given = frame.names.get("args")
        if shape is None and type(given) is tuple and given and is_tensor(given[0]):
            shape = tuple(given[0].shape)
    levels = [frame for frame in below if type(frame.module) is nn.Sequential and "input" in frame.names]
    if shape is not None and levels:
        steps = tuple(_sequential_history(names, levels, shape))
        if steps:
            return steps
    return graph_history(operand.value, names) if operand is not None else ()


def _sequential_history(names: OperandNames, levels: list[Frame], start: Shape) -> Iterator[ShapeStep]:
    """Every layer before the one that failed, level by level of nested Sequentials."""
    shape: Shape | None = start
    for level in levels:
        running = level.names.get("module")
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is running:
                break
            before, shape = shape, None if shape is None else output_shape(child, shape)
            if shape is not None and shape != before:
                path, kind = path_of(child, names), type(child).__name__
                yield ShapeStep(f"{path} ({kind})" if path != kind else kind, shape)
        value = level.names["input"]
        actual = tuple(value.shape) if is_tensor(value) else None
        if actual is not None and shape != actual:
            yield ShapeStep("the layers before it", actual)
        shape = actual


def batch_change(value: Any, rows: int, names: OperandNames) -> ShapeStep | None:
    """The op after which the first axis of a tensor no longer had this number of rows."""
    for before, after in itertools.pairwise(graph_history(value, names)):
        if before.shape[:1] == (rows,) and after.shape[:1] != (rows,):
            return after
    return None


def graph_history(value: Any, names: OperandNames) -> tuple[ShapeStep, ...]:
    """The ops that changed the shape, first to last, along the first operand that has a history."""
    if not is_tensor(value):
        return ()
    steps: list[ShapeStep] = []
    for step in _as_layers(list(_graph_steps(value, names))[::-1]):
        if not steps or steps[-1].shape != step.shape:
            steps.append(ShapeStep(f"{step.path} ({step.op})" if step.path else step.op, step.shape))
    return tuple(steps)


@dataclasses.dataclass(frozen=True)
class GraphStep:
    """One node: the op, its output shape, the path of the layer whose weight it used ("" for none), and that layer."""

    op: str
    shape: Shape
    path: str = ""
    layer: Any = None


def _graph_steps(value: Any, names: OperandNames) -> Iterator[GraphStep]:
    """The nodes, last to first."""
    owners = _parameter_owners(names)
    node: Any = tensor_attribute(value, "grad_fn")
    for _ in range(MAX_NODES):
        if node is None:
            return
        inputs = [(inner, _parameter_of(inner)) for inner in input_nodes(node)]
        layer = next((owners[id(p)] for _, p in inputs if p is not None and id(p) in owners), None)
        outputs = getattr(node, "_input_metadata", None)
        if outputs:
            shape = tuple(outputs[0].shape)
            name = re.sub(r"Backward\d*$", "", node.name())
            op = OP_NAMES.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            if layer is None:
                yield GraphStep(op, shape)
            else:
                yield GraphStep(type(layer).__name__, shape, path_of(layer, names), layer)
        node = next((inner for inner, parameter in inputs if parameter is None), None)


def _parameter_owners(names: OperandNames) -> dict[int, Any]:
    """The layer of each parameter, by the parameter's id; of several ops the outermost."""
    outer: dict[int, Any] = {}
    owners: dict[int, Any] = {}
    for model in names.context.owners.models.values():
        for _, part in named_modules(model):  # outer ones come first
            for _, inner in named_modules(part) if is_instance(part, WHOLE) else ():
                outer.setdefault(id(inner), part)
            for parameter in (attributes(part).get("_parameters") or {}).values():
                owners.setdefault(id(parameter), outer.get(id(part), part))
    return owners


def _parameter_of(node: Any) -> Any:
    """The parameter that this operand is, as it is or transposed; None for data."""
    if "Accumulate" in node.name():
        return node.variable
    inputs = input_nodes(node)
    views = r"(T|Transpose|Permute|To|ToCopy|Unsqueeze|View|Expand|UnsafeSplit|Split)(With\w+)?Backward"
    return _parameter_of(inputs[0]) if len(inputs) == 1 and re.match(views, node.name()) else None


def _as_layers(steps: list[GraphStep]) -> Iterator[GraphStep]:
    """Each layer once, with its output shape."""
    last: Mapping[str, int] = {step.path: i for i, step in enumerate(steps) if step.path}
    i = 0
    while i < len(steps):
        step = steps[i]
        if step.path:
            i = _last_step(steps, last[step.path] if is_instance(step.layer, WHOLE) else i)
            step = dataclasses.replace(step, shape=steps[i].shape)
        elif _only_prepares(steps, i):
            i += 1
            continue
        yield step
        i += 1


def _only_prepares(steps: list[GraphStep], i: int) -> bool:
    k = next((k for k in range(i, len(steps)) if steps[k].op not in PREPARING or steps[k].path), len(steps) - 1)
    layer = steps[k].layer
    if is_instance(layer, nn.Linear):
        return k == i + 1 and len(steps[_last_step(steps, k)].shape) > 2 and len(steps[i].shape) == 2
    return k > i and is_instance(layer, WHOLE)


def _last_step(steps: list[GraphStep], i: int) -> int:
    """The number of the last node of the layer whose last product is node i."""
    layer, following = steps[i].layer, [step.op for step in steps[i + 1 :]]
    settings = attributes(layer)
    transposed = ("transpose",) if settings.get("batch_first") else ()
    if is_instance(layer, nn.RNNBase):
        stacked = following.index("stack") + 1 if "stack" in following else 0
        ends = ("cat",) if settings.get("bidirectional") else ()
        return _skip(following, i, stacked, (*ends, *transposed))
    if is_instance(layer, nn.MultiheadAttention):
        return _skip(following, i, 0, ("view", *transposed))
    view = is_instance(layer, nn.Linear) and bool(following) and following[0] in VIEWS
    after = steps[i + 1].shape if view else ()
    return i + (len(after) > 2 and after[-1] == steps[i].shape[-1])


def _skip(following: list[str], i: int, done: int, ops: tuple[str, ...]) -> int:
    """Over these ops as well, where they follow in this order."""
    for op in ops:
        done += following[done : done + 1] == [op]
    return i + done
