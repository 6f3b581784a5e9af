"""How a shape came about: the layers between the user's tensor and the one that failed, with the shape after each.

Two sources show it, and neither computes anything: in a Sequential the layers before it, by the formulas of their
output shapes (`output_shape`, last in this file); else the autograd graph of the tensor, whose nodes know the shapes of
their outputs.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import nodes_of, statement_at
from nbdebug.observe.variables import attributes, class_attribute, named_modules
from nbdebug.report import Link
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.operands import OperandNames, is_instance
from nbdebug.tools.errors.shapes.call import (
    CallOperand,
    FailedCall,
    is_array,
)
from nbdebug.tools.errors.shapes.rules import Shape, ShapeOperand, ShapeStep
from nbdebug.tools.errors.values import (
    callee_name,
    operands,
    tensor_attribute,
    value_of,
)

MAX_NODES = 60
"""Nodes of a tensor's history that are read."""
OP_NAMES = {
    "MaxPool2DWithIndices": "max_pool2d",
    "MaxPool3DWithIndices": "max_pool3d",
    "Addmm": "linear",
    "Mm": "mm",
    "UnsafeView": "view",
    "ReshapeAlias": "reshape",
    "T": "t",
    "SqueezeBackward1": "squeeze",
}
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
SIZES = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "num_features",
    "normalized_shape",
    "num_channels",
    "num_groups",
    "input_size",
    "hidden_size",
    "num_layers",
    "embed_dim",
    "num_heads",
    "kernel_size",
    "in1_features",
    "in2_features",
    "num_parameters",
    "num_embeddings",
    "embedding_dim",
    "batch_first",
)
"""The settings of torch's layers that say for which sizes they were made."""


def user_input(call: FailedCall) -> ShapeOperand | None:
    """The user's tensor that went into what failed: the first in the arguments of the user's own call."""
    if call.inner is None or call.frame is None or not isinstance(call.node, ast.Call):
        return None
    for arg in [*call.node.args, *(k.value for k in call.node.keywords)]:
        for part in ast.walk(arg):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                value = value_of(part, call.frame)
                if is_array(value):
                    return CallOperand(ast.unparse(part), "", value).fact()
    return None


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


def layer_sizes(layer: nn.Module) -> dict[str, int]:
    """What a layer was made for, of the sizes that its class takes."""
    settings = attributes(layer)
    values = {name: settings[name] for name in SIZES if name in settings}
    return {
        name: value[0] if type(value) is tuple and len(set(value)) == 1 else value
        for name, value in values.items()
        if type(value) in (int, bool, tuple)
    }


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


def frames_below(context: ErrorContext) -> list[Frame]:
    """The frames under the user's innermost line, outermost first."""
    last = max((i for i, frame in enumerate(context.trail) if frame.users), default=-1)
    return context.trail[last + 1 :]


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


def path_of(layer: Any, names: OperandNames) -> str:
    """The name of a layer within its model ("stages.3.1"); with the model's own where that would be a bare number
    ("self.mlp.0"), or where the model is the layer."""
    inside = (names.context.path(layer) or "").removeprefix("_orig_mod.")  # of a compiled model
    whole = names.module(layer)
    root = whole.removesuffix(inside).rstrip(".")
    classes = {
        type(model).__name__ for model in names.context.owners.models.values()
    }  # names of models without a variable
    if inside[:1].isdigit() and whole.endswith(f".{inside}") and root not in classes:
        return whole
    return inside or whole


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


# -- output shapes by formula ----------------------------------------------------------------------------------------

Settings = dict[str, Any]
SAME_SHAPE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Softsign,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.Softmax,
    nn.LogSoftmax,
    nn.LogSigmoid,
    nn.Softmin,
    nn.Softmax2d,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LocalResponseNorm,
    nn.RMSNorm,
    nn.Threshold,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Tanhshrink,
    nn.CrossMapLRN2d,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)
CONVS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
TRANSPOSED_CONVS = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
POOLS = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
ADAPTIVE_POOLS = {
    nn.AdaptiveAvgPool1d: 1,
    nn.AdaptiveAvgPool2d: 2,
    nn.AdaptiveAvgPool3d: 3,
    nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2,
    nn.AdaptiveMaxPool3d: 3,
}


def output_shape(module: Any, shape: Shape) -> Shape | None:
    """The output shape of a module for an input of that shape; None where that is not known, or it fails."""
    kind = type(module)
    if kind is nn.Sequential:
        for child in (attributes(module).get("_modules") or {}).values():
            result = output_shape(child, shape)
            if result is None:
                return None
            shape = result
        return shape
    try:
        return _by_formula(kind, attributes(module), shape)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None


def _by_formula(kind: type, settings: Settings, shape: Shape) -> Shape | None:
    if kind in SAME_SHAPE:
        return shape
    if kind is nn.Linear:
        return (*shape[:-1], settings["out_features"]) if shape[-1] == settings["in_features"] else None
    if kind in CONVS and len(shape) >= CONVS[kind] + 1 and shape[-CONVS[kind] - 1] == settings["in_channels"]:
        return _window_shape(shape, CONVS[kind], settings, settings["out_channels"])
    if kind in TRANSPOSED_CONVS and len(shape) >= TRANSPOSED_CONVS[kind] + 1:
        return _transposed_shape(shape, TRANSPOSED_CONVS[kind], settings)
    if kind in POOLS:
        return _window_shape(shape, POOLS[kind], settings, None)
    if kind in ADAPTIVE_POOLS:
        sizes = _per_axis(settings["output_size"], ADAPTIVE_POOLS[kind])
        return (*shape[: -len(sizes)], *(new or old for new, old in zip(sizes, shape[-len(sizes) :])))
    formula = FORMULAS.get(kind)
    return formula(settings, shape) if formula else None


def _per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    """A setting for each axis: torch takes one number for all of them."""
    return tuple(value) if type(value) in (tuple, list) else (value,) * axes


def _window_shape(shape: Shape, axes: int, settings: Settings, channels: int | None) -> Shape | None:
    """A window slides over the last axes: floor((size + 2·padding - dilation·(kernel - 1) - 1) / stride + 1), as the
    pages of torch.nn.Conv2d and torch.nn.MaxPool2d give it."""
    kernel, dilation = _per_axis(settings["kernel_size"], axes), _per_axis(settings.get("dilation", 1), axes)
    stride = _per_axis(settings.get("stride") or settings["kernel_size"], axes)
    padding, rounded = settings.get("padding", 0), math.ceil if settings.get("ceil_mode") else math.floor
    sizes = []
    for i, size in enumerate(shape[-axes:]):
        if padding == "same":
            sizes.append(size)
            continue
        pad = 0 if padding == "valid" else _per_axis(padding, axes)[i]
        number = rounded((size + 2 * pad - dilation[i] * (kernel[i] - 1) - 1) / stride[i]) + 1
        if settings.get("ceil_mode") and (number - 1) * stride[i] >= size + pad:
            number -= 1  # the last window must start inside
        sizes.append(number)
    before = shape[:-axes] if channels is None else (*shape[: -axes - 1], channels)
    return (*before, *sizes) if min(sizes) > 0 else None


def _transposed_shape(shape: Shape, axes: int, settings: Settings) -> Shape:
    kernel, stride, pad, out, dilation = (
        _per_axis(settings[name], axes) for name in ("kernel_size", "stride", "padding", "output_padding", "dilation")
    )
    sizes = [
        (size - 1) * stride[i] - 2 * pad[i] + dilation[i] * (kernel[i] - 1) + out[i] + 1
        for i, size in enumerate(shape[-axes:])
    ]
    return (*shape[: -axes - 1], settings["out_channels"], *sizes)


def _flatten_shape(settings: Settings, shape: Shape) -> Shape:
    first, last = settings["start_dim"] % len(shape), settings["end_dim"] % len(shape)
    return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


def _unflatten_shape(settings: Settings, shape: Shape) -> Shape:
    axis, sizes = settings["dim"] % len(shape), list(settings["unflattened_size"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[axis] // -math.prod(sizes)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def _upsample_shape(settings: Settings, shape: Shape) -> Shape:
    axes = len(shape) - 2
    if settings["size"] is not None:
        return (*shape[:2], *_per_axis(settings["size"], axes))
    return (
        *shape[:2],
        *(int(size * scale) for size, scale in zip(shape[2:], _per_axis(settings["scale_factor"], axes))),
    )


def _pad_shape(settings: Settings, shape: Shape) -> Shape:
    sides, sizes = list(settings["padding"]), list(shape)
    for i in range(len(sides) // 2):
        sizes[-1 - i] += sides[2 * i] + sides[2 * i + 1]
    return tuple(sizes)


def _pixel_shuffle_shape(settings: Settings, shape: Shape) -> Shape:
    by = settings["upscale_factor"]
    return (*shape[:-3], shape[-3] // by**2, shape[-2] * by, shape[-1] * by)


def _glu_shape(settings: Settings, shape: Shape) -> Shape:
    sizes = list(shape)
    sizes[settings["dim"]] //= 2
    return tuple(sizes)


PADS: Iterable[type] = (
    nn.ZeroPad1d,
    nn.ZeroPad2d,
    nn.ZeroPad3d,
    nn.ConstantPad1d,
    nn.ConstantPad2d,
    nn.ConstantPad3d,
    nn.ReflectionPad1d,
    nn.ReflectionPad2d,
    nn.ReplicationPad1d,
    nn.ReplicationPad2d,
)
FORMULAS: dict[type, Callable[[Settings, Shape], Shape]] = {
    nn.Flatten: _flatten_shape,
    nn.Unflatten: _unflatten_shape,
    nn.Upsample: _upsample_shape,
    nn.UpsamplingNearest2d: _upsample_shape,
    nn.UpsamplingBilinear2d: _upsample_shape,
    nn.PixelShuffle: _pixel_shuffle_shape,
    nn.GLU: _glu_shape,
    nn.Embedding: lambda settings, shape: (*shape, settings["embedding_dim"]),
    **dict.fromkeys(PADS, _pad_shape),
}


OUT_SIZES = {"Linear": "out_features", "Conv1d": "out_channels", "Conv2d": "out_channels", "Conv3d": "out_channels"}


def constructor(context: ErrorContext, layer: nn.Module) -> tuple[str, ast.Call] | None:
    """(file, call) of the only call in the user's sources that can have made a layer: its class, and its sizes where
    they are numbers."""
    own, kind = attributes(layer), type(layer).__name__
    names = [name for name in (*_FIRST, OUT_SIZES.get(kind, "")) if name in own]
    wanted = [own[name] for name in names]
    exact: list[tuple[str, ast.Call]] = []
    possible: list[tuple[str, ast.Call]] = []
    for file in _files(context):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and callee_name(node) == kind and node.args:
                numbers = [_number(arg) for arg in node.args[: len(wanted)]]
                if any(n is not None and n != w for n, w in zip(numbers, wanted)):
                    continue
                (exact if None not in numbers else possible).append((file, node))
    candidates = exact or possible
    if len(candidates) > 1:  # the one that the attribute of this name gets
        name = (context.path(layer) or "").rpartition(".")[2]
        lines = [(made, statement_at(made[0], made[1].lineno)) for made in candidates]
        candidates = [
            made
            for made, line in lines
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == f"self.{name}"
        ]
    return candidates[0] if len(candidates) == 1 else None


_FIRST = ("num_embeddings", "in_features", "in_channels", "input_size", "num_features", "normalized_shape")


def _number(node: ast.expr) -> int | None:
    """The value of an expression of whole numbers: `16 * 5 * 5`."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None:
            return None
        ops: dict[type, Any] = {ast.Mult: left * right, ast.Add: left + right, ast.Sub: left - right}
        if isinstance(node.op, (ast.FloorDiv, ast.Pow)) and 0 < right < 32:
            return left // right if isinstance(node.op, ast.FloorDiv) else left**right if abs(left) < 1e4 else None
        return ops.get(type(node.op))
    return None


def _files(context: ErrorContext) -> Iterator[str]:
    """The user's files that can have made a layer: those of the traceback, other cells, and those of their models."""
    files = [frame.site.file for frame in context.users]
    files += [other for file in files[:1] for other in other_cells(file)]
    for model in context.owners.models.values():
        code = getattr(class_attribute(model, "__init__"), "__code__", None)
        if code is not None and not type(model).__module__.startswith("torch."):
            files.append(code.co_filename)
    yield from dict.fromkeys(files)
