"""How a shape came about: the layers between the user's tensor and the one that failed, with the shape after each.

Two ways tell it, and neither computes anything: in a Sequential the layers before it, by their formulas; else the
autograd graph of the tensor, whose nodes know the shapes of what they gave.
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
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.report import Link
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.operands import OperandNames, is_a
from nbdebug.tools.errors.shapes.call import CallPart, FailedCall, is_shaped
from nbdebug.tools.errors.shapes.facts import Shape, ShapeOperand, ShapeStep
from nbdebug.tools.errors.values import of_tensor, operands, value_of

MOST = 60
COMMON = {
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
"""Layers of several ops: told as one."""
VIEWS = ("view", "reshape")
READY = (*VIEWS, "transpose", "clone", "unsqueeze")


@dataclasses.dataclass(frozen=True)
class GraphStep:
    """One node: the op, the shape of what it gave, the layer whose weight it used ("" for none), and that layer."""

    op: str
    shape: Shape
    path: str = ""
    layer: Any = None


def way(value: Any, names: OperandNames) -> tuple[ShapeStep, ...]:
    """The ops that changed the shape, first to last, along the first operand that has a history."""
    if not is_tensor(value):
        return ()
    told: list[ShapeStep] = []
    for step in _as_layers(list(_steps(value, names))[::-1]):
        if not told or told[-1].shape != step.shape:
            name = f"{step.path} ({step.op})" if step.path else step.op
            told.append(ShapeStep(name, step.shape))
    return tuple(told)


def batch_changed(value: Any, rows: int, names: OperandNames) -> ShapeStep | None:
    """The op after which the first axis of a tensor no longer had this number of rows."""
    for before, after in itertools.pairwise(way(value, names)):
        if before.shape[:1] == (rows,) and after.shape[:1] != (rows,):
            return after
    return None


def _steps(value: Any, names: OperandNames) -> Iterator[GraphStep]:
    """The nodes, last to first."""
    owners = _owners(names)
    node: Any = of_tensor(value, "grad_fn")
    for _ in range(MOST):
        if node is None:
            return
        given = [(inner, _weight(inner)) for inner in input_nodes(node)]
        layer = next((owners[id(w)] for _, w in given if w is not None and id(w) in owners), None)
        told = getattr(node, "_input_metadata", None)
        if told:
            yield _step(node, tuple(told[0].shape), layer, names)
        node = next((inner for inner, weight in given if weight is None), None)


def _step(node: Any, shape: Shape, layer: Any, names: OperandNames) -> GraphStep:
    name = re.sub(r"Backward\d*$", "", node.name())
    op = COMMON.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return (
        GraphStep(op, shape) if layer is None else GraphStep(type(layer).__name__, shape, path_of(layer, names), layer)
    )


def _owners(names: OperandNames) -> dict[int, Any]:
    """The layer of each parameter, by the parameter's id; of several ops the outermost."""
    outer: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for model in names.scene.owners.models.values():
        for _, part in named_modules(model):  # outer ones come first
            for _, inner in named_modules(part) if is_a(part, WHOLE) else ():
                outer.setdefault(id(inner), part)
            for weight in (attributes(part).get("_parameters") or {}).values():
                found.setdefault(id(weight), outer.get(id(part), part))
    return found


def path_of(layer: Any, names: OperandNames) -> str:
    """The name of a layer within its model ("stages.3.1"); with the model's own where that would be a bare number
    ("self.mlp.0"), or where the model is the layer."""
    inside = (names.scene.path(layer) or "").removeprefix("_orig_mod.")  # of a compiled model
    whole = names.module(layer)
    root = whole.removesuffix(inside).rstrip(".")
    if inside[:1].isdigit() and whole.endswith(f".{inside}") and root not in _classes(names):
        return whole
    return inside or whole


def _classes(names: OperandNames) -> set[str]:
    """Models that no variable has are called by their class."""
    return {type(model).__name__ for model in names.scene.owners.models.values()}


def _weight(node: Any) -> Any:
    """The parameter that this operand is, as it lies or transposed; None for data."""
    if "Accumulate" in node.name():
        return node.variable
    inside = input_nodes(node)
    if (
        re.match(
            r"(T|Transpose|Permute|To|ToCopy|Unsqueeze|View|Expand|UnsafeSplit|Split)(With\w+)?Backward", node.name()
        )
        and len(inside) == 1
    ):
        return _weight(inside[0])
    return None


def _as_layers(steps: list[GraphStep]) -> Iterator[GraphStep]:
    """Each layer once, with the shape of what it gave."""
    last: Mapping[str, int] = {step.path: i for i, step in enumerate(steps) if step.path}
    i = 0
    while i < len(steps):
        step = steps[i]
        if step.path:
            end = last[step.path] if is_a(step.layer, WHOLE) else i
            i = _ends(steps, end)
            step = dataclasses.replace(step, shape=steps[i].shape)
        elif _leads_in(steps, i):
            i += 1
            continue
        yield step
        i += 1


def _leads_in(steps: list[GraphStep], i: int) -> bool:
    """Whether it only makes ready what a layer is given: the rows of a sequence under each other, time first."""
    k = next((k for k in range(i, len(steps)) if steps[k].op not in READY or steps[k].path), len(steps) - 1)
    layer = steps[k].layer
    if is_a(layer, nn.Linear):
        return k == i + 1 and len(steps[_ends(steps, k)].shape) > 2 and len(steps[i].shape) == 2
    return k > i and is_a(layer, WHOLE)


def _ends(steps: list[GraphStep], i: int) -> int:
    """The number of the last node of the layer whose last product is node i."""
    layer, then = steps[i].layer, [step.op for step in steps[i + 1 :]]
    known = attributes(layer)
    turned = ("transpose",) if known.get("batch_first") else ()
    if is_a(layer, nn.RNNBase):
        joined = then.index("stack") + 1 if "stack" in then else 0
        ends = ("cat",) if known.get("bidirectional") else ()
        return _over(then, i, joined, (*ends, *turned))
    if is_a(layer, nn.MultiheadAttention):
        return _over(then, i, 0, ("view", *turned))
    view = is_a(layer, nn.Linear) and bool(then) and then[0] in VIEWS
    after = steps[i + 1].shape if view else ()
    return i + (len(after) > 2 and after[-1] == steps[i].shape[-1])


def _over(then: list[str], i: int, done: int, ops: tuple[str, ...]) -> int:
    """Over these ops as well, where they follow in this order."""
    for op in ops:
        done += then[done : done + 1] == [op]
    return i + done


Size = tuple[int, ...]

SAME = (
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
BACK = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
POOLS = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
TO_SIZE = {
    nn.AdaptiveAvgPool1d: 1,
    nn.AdaptiveAvgPool2d: 2,
    nn.AdaptiveAvgPool3d: 3,
    nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2,
    nn.AdaptiveMaxPool3d: 3,
}


def through(module: Any, shape: Size) -> Size | None:
    """The shape of what this module gives for an input of that shape; None where that is not known, or it fails."""
    kind = type(module)
    if kind is nn.Sequential:
        for child in (attributes(module).get("_modules") or {}).values():
            found = through(child, shape)
            if found is None:
                return None
            shape = found
        return shape
    try:
        return _of(kind, attributes(module), shape)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None


def _of(kind: type, told: dict[str, Any], shape: Size) -> Size | None:
    if kind in SAME:
        return shape
    if kind is nn.Linear:
        return (*shape[:-1], told["out_features"]) if shape[-1] == told["in_features"] else None
    if kind in CONVS and len(shape) >= CONVS[kind] + 1 and shape[-CONVS[kind] - 1] == told["in_channels"]:
        return _slid(shape, CONVS[kind], told, told["out_channels"])
    if kind in BACK and len(shape) >= BACK[kind] + 1:
        return _spread(shape, BACK[kind], told)
    if kind in POOLS:
        return _slid(shape, POOLS[kind], told, None)
    if kind in TO_SIZE:
        wanted = _each(told["output_size"], TO_SIZE[kind])
        return (*shape[: -len(wanted)], *(w or s for w, s in zip(wanted, shape[-len(wanted) :])))
    other = OTHERS.get(kind)
    return other(told, shape) if other else None


def _each(value: Any, axes: int) -> tuple[Any, ...]:
    """A setting for each axis: torch takes one number for all of them."""
    return tuple(value) if type(value) in (tuple, list) else (value,) * axes


def _slid(shape: Size, axes: int, told: dict[str, Any], channels: int | None) -> Size | None:
    """A window slides over the last axes: floor((size + 2·padding - dilation·(kernel - 1) - 1) / stride + 1), as the
    pages of torch.nn.Conv2d and torch.nn.MaxPool2d give it."""
    kernel, dilation = _each(told["kernel_size"], axes), _each(told.get("dilation", 1), axes)
    stride = _each(told.get("stride") or told["kernel_size"], axes)
    padding, up = told.get("padding", 0), math.ceil if told.get("ceil_mode") else math.floor
    sizes = []
    for i, size in enumerate(shape[-axes:]):
        if padding == "same":
            sizes.append(size)
            continue
        pad = 0 if padding == "valid" else _each(padding, axes)[i]
        found = up((size + 2 * pad - dilation[i] * (kernel[i] - 1) - 1) / stride[i]) + 1
        if told.get("ceil_mode") and (found - 1) * stride[i] >= size + pad:
            found -= 1  # the last window must start inside
        sizes.append(found)
    before = shape[:-axes] if channels is None else (*shape[: -axes - 1], channels)
    return (*before, *sizes) if min(sizes) > 0 else None


def _spread(shape: Size, axes: int, told: dict[str, Any]) -> Size:
    kernel, stride, pad, out, dilation = (
        _each(told[name], axes) for name in ("kernel_size", "stride", "padding", "output_padding", "dilation")
    )
    sizes = [
        (size - 1) * stride[i] - 2 * pad[i] + dilation[i] * (kernel[i] - 1) + out[i] + 1
        for i, size in enumerate(shape[-axes:])
    ]
    return (*shape[: -axes - 1], told["out_channels"], *sizes)


def _flat(told: dict[str, Any], shape: Size) -> Size:
    first, last = told["start_dim"] % len(shape), told["end_dim"] % len(shape)
    return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


def _unflat(told: dict[str, Any], shape: Size) -> Size:
    axis, sizes = told["dim"] % len(shape), list(told["unflattened_size"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[axis] // -math.prod(sizes)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def _scaled(told: dict[str, Any], shape: Size) -> Size:
    axes = len(shape) - 2
    if told["size"] is not None:
        return (*shape[:2], *_each(told["size"], axes))
    return (*shape[:2], *(int(size * scale) for size, scale in zip(shape[2:], _each(told["scale_factor"], axes))))


def _padded(told: dict[str, Any], shape: Size) -> Size:
    sides, sizes = list(told["padding"]), list(shape)
    for i in range(len(sides) // 2):
        sizes[-1 - i] += sides[2 * i] + sides[2 * i + 1]
    return tuple(sizes)


def _shuffled(told: dict[str, Any], shape: Size) -> Size:
    by = told["upscale_factor"]
    return (*shape[:-3], shape[-3] // by**2, shape[-2] * by, shape[-1] * by)


def _halved(told: dict[str, Any], shape: Size) -> Size:
    sizes = list(shape)
    sizes[told["dim"]] //= 2
    return tuple(sizes)


def _looked_up(told: dict[str, Any], shape: Size) -> Size:
    return (*shape, told["embedding_dim"])


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
OTHERS: dict[type, Callable[[dict[str, Any], Size], Size]] = {
    nn.Flatten: _flat,
    nn.Unflatten: _unflat,
    nn.Upsample: _scaled,
    nn.UpsamplingNearest2d: _scaled,
    nn.UpsamplingBilinear2d: _scaled,
    nn.PixelShuffle: _shuffled,
    nn.GLU: _halved,
    nn.Embedding: _looked_up,
    **dict.fromkeys(PADS, _padded),
}


def entered(call: FailedCall) -> ShapeOperand | None:
    """The user's tensor that went into what failed: the first in the arguments of the user's own call."""
    if call.inner is None or call.frame is None or not isinstance(call.node, ast.Call):
        return None
    for arg in [*call.node.args, *(k.value for k in call.node.keywords)]:
        for part in ast.walk(arg):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                value = value_of(part, call.frame)
                if is_shaped(value):
                    return CallPart(ast.unparse(part), "", value).operand()
    return None


def passed(scene: ErrorContext, call: FailedCall, given: CallPart | None, names: OperandNames) -> tuple[ShapeStep, ...]:
    """The steps from the user's tensor to the one at fault, in order; () where they can't be told."""
    start = entered(call)
    levels = [frame for frame in below(scene) if type(frame.module) is nn.Sequential and "input" in frame.names]
    if start is not None and start.shape is not None and levels:
        found = list(_layers(names, levels, start.shape))
        if found:
            return tuple(found)
    return way(given.value, names) if given is not None else ()


def below(scene: ErrorContext) -> list[Frame]:
    """The frames under the user's innermost line, outermost first."""
    last = max((i for i, frame in enumerate(scene.trail) if frame.users), default=-1)
    return scene.trail[last + 1 :]


def _layers(names: OperandNames, levels: list[Frame], shape: tuple[int, ...]) -> Iterator[ShapeStep]:
    """Every layer before the one that failed, level by level of nested Sequentials."""
    at: tuple[int, ...] | None = shape
    for level in levels:
        running = level.names.get("module")
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is running:
                break
            before, at = at, None if at is None else through(child, at)
            if at is not None and at != before:
                yield ShapeStep(_called(names, child), at)
        reached = level.names["input"]
        actual = tuple(reached.shape) if is_tensor(reached) else None
        if actual is not None and at != actual:
            yield ShapeStep("the layers up to there", actual)
        at = actual


def _called(names: OperandNames, child: Any) -> str:
    path = path_of(child, names)
    kind = type(child).__name__
    return f"{path} ({kind})" if path != kind else kind


def lines(scene: ErrorContext, at_fault: CallPart | None) -> tuple[Link, ...]:
    """The user's lines that led there, outermost first, each with the tensor at fault where it stands in its call, else
    the first that does; a line without one where it is a function of the user's with a name. Each once."""
    found: list[Link] = []
    seen: set[tuple[str, int]] = set()
    for frame in reversed(scene.users[1:]):
        there = [(text, value) for text, value in operands(frame) if is_shaped(value)]
        same = [one for one in there if at_fault is not None and one[1] is at_fault.value]
        given = next(iter([*same, *there]), None)
        key = (given[0], id(given[1])) if given is not None else (frame.site.function, 0)
        if key in seen or given is None and frame.site.function.startswith("<"):
            continue
        seen.add(key)
        told = f"`{given[0]}` {list(given[1].shape)} goes in" if given else f"in `{frame.site.function}`"
        if found and (found[-1].where.file, found[-1].where.line) == (frame.site.file, frame.site.line):
            found.pop()  # a comprehension runs on the line of its function
        found.append(Link(told, frame.where))
    return tuple(found)


def sizes(layer: nn.Module) -> dict[str, int]:
    """What a layer was made for, of the sizes that its class takes."""
    told = attributes(layer)
    wanted = (
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
    )
    found = {name: told[name] for name in wanted if name in told}
    if "batch_first" in told:
        found["batch_first"] = told["batch_first"]
    return {
        name: value[0] if type(value) is tuple and len(set(value)) == 1 else value
        for name, value in found.items()
        if type(value) in (int, bool, tuple)
    }
