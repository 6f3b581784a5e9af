"""The op that failed, tried again with another view of one of its operands: transposed, with an axis more or less.

A fix is offered where the call fails as it was and runs as it would be, on copies, within a fraction of a second.
First come the trials of one call, then the views of an operand that are worth one, then the output shapes of torch's
layers by their formulas, and the call that made a layer.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import nodes_of, statement_at
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.text import module_name
from nbdebug.tools.errors.context import (
    ErrorContext,
    callee_name,
)
from nbdebug.tools.errors.rules import word_pairs
from nbdebug.tools.errors.sandbox import CannotRun, Sandbox, quiet
from nbdebug.tools.errors.shapes.call import CallOperand, FailedCall, is_array
from nbdebug.tools.errors.shapes.rules import Shape, ShapeFix

Accept = Callable[[Shape], bool]
SECONDS = 0.25
"""For all trials of one error together; the clock is read between them."""
ROWS, SIDE = 2, 64
"""Of a batch too large to try, as many rows, and of its images as large a corner, as show whether the rest fits."""


@dataclasses.dataclass(frozen=True)
class FixIdea:
    """Another view of one operand. which: its number; code: what the user would write for it."""

    slug: str
    which: int
    code: str
    change: Callable[[Any], Any]


class CallTrials:
    """Runs of one call."""

    def __init__(self, call: FailedCall):
        self.call, self.until = call, time.monotonic() + SECONDS
        self.fails = self._fails()

    def _fails(self) -> bool:
        """Whether it fails on copies as well: else they prove nothing."""
        with quiet():
            try:
                self._run({})
            except CannotRun:
                return False
            except Exception:
                return True
        return False

    def fix(self, idea: FixIdea, accept: Accept | None = None) -> ShapeFix | None:
        """The fix that an idea is, if the call runs with it. accept: whether a result of this shape makes sense."""
        shape = self.result([idea])
        if shape is None or accept is not None and not accept(shape):
            return None
        if self._crop() and self.call.layer is not None:  # what the whole input would give
            view = idea.change(torch.zeros((), device="cpu").expand(self.call.operands[0].shape or ()))
            shape = output_shape(self.call.layer, tuple(view.shape))
        return ShapeFix(idea.slug, self.call.operands[idea.which].text, idea.code, True, shape)

    def first_fixes(self, *stages: Iterable[FixIdea], accept: Accept | None = None) -> Iterator[ShapeFix]:
        """The fixes of the first stage that has any: what is less likely is not offered beside them."""
        for ideas in stages:
            fixes = [fix for idea in ideas if (fix := self.fix(idea, accept)) is not None]
            yield from fixes
            if fixes:
                return

    def result(self, ideas: Iterable[FixIdea]) -> Shape | None:
        """The output shape of the call with these changes; None where it fails, or was not run."""
        if not self.fails or time.monotonic() > self.until:
            return None
        return shape_of_run(lambda: self._run({idea.which: idea.change for idea in ideas}))

    def result_of(self, node: ast.AST) -> Shape | None:
        """The output shape of another expression in the place of the one that failed; None where it fails."""
        frame = self.call.frame
        return shape_of_run(lambda: Sandbox().evaluate(node, frame)) if self.fails and frame is not None else None

    def without(self, role: str) -> Shape | None:
        """The output shape of the layer without one of its arguments."""
        call, function = self.call, self.call.function
        if call.inner is None or function is None:
            return None
        names = dict(call.inner.names) | {role: None, call.operands[0].role: call.operands[0].value}
        return shape_of_run(lambda: Sandbox().call_function(function, names, {}, call.layer))

    def with_layer(self, module: nn.Module, code: str, path: str, slug: str = "layer") -> Iterator[ShapeFix]:
        """Another layer in the place of the one that failed: by its formula, else by running it."""
        operand = self.call.operands[0]
        shape, sandbox = output_shape(module, operand.shape) if operand.shape is not None else None, Sandbox()
        with quiet():
            try:
                value = sandbox.copy(next(iter(self._crop().values()), operand.value))
                if not sandbox.large and operand.value.device.type == "cpu":
                    shape = result_shape(module.to(operand.value.dtype)(value))
            except Exception:  # it does not fit either
                return
        if shape is not None:
            yield ShapeFix(slug, path, code, True, shape)

    def _run(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        call = self.call
        if call.op in ("cat", "stack", "concatenate") and call.inner is None:
            return self._join(changes)
        if call.direct and call.node is not None and call.frame is not None and not self._crop():
            try:
                return self._evaluate(changes)
            except CannotRun:  # torch's own frame has all that the user's expression has computed
                if call.inner is None:
                    raise
        if call.inner is None or call.function is None:
            raise CannotRun
        sandbox = Sandbox()
        names = dict(call.inner.names) | self._crop()
        roles = {call.operands[i].role: change for i, change in changes.items()}
        new = {role: change(sandbox.copy(names[role])) for role, change in roles.items()}
        return sandbox.call_function(call.function, names, new, call.layer)

    def _evaluate(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        call, sandbox = self.call, Sandbox()
        assert call.frame is not None
        new: dict[int | str, Any] = {
            call.operands[i].text: change(sandbox.copy(call.operands[i].value)) for i, change in changes.items()
        }
        return Sandbox(new).evaluate(call.node, call.frame)

    def _join(self, changes: dict[int, Callable[[Any], Any]]) -> Any:
        sandbox = Sandbox()
        values = [sandbox.copy(operand.value) for operand in self.call.operands]
        for i, change in changes.items():
            values[i] = change(values[i])
        home = np if type(values[0]) is np.ndarray else torch
        sandbox.allow("cat")
        return getattr(home, self.call.op)(values, *[join_axis(self.call)])

    def _crop(self) -> dict[str, Any]:
        """A large input of a convolution, cut to a corner of its first rows: it shows what fits. An axis of as many
        entries as the layer has channels stays whole. {} of all others."""
        layer: Any = self.call.layer
        operand = self.call.operands[0] if self.call.operands else None
        if (
            operand is None
            or type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
            or not torch.is_tensor(operand.value)
        ):
            return {}
        if operand.value.ndim < 3 or operand.value.numel() < 100_000:
            return {}
        channels = attributes(layer)["in_channels"]
        corner = [slice(0, ROWS), *(slice(None if size == channels else SIDE) for size in operand.value.shape[1:])]
        return {operand.role: operand.value.detach()[tuple(corner)]}


def shape_of_run(run: Callable[[], Any]) -> Shape | None:
    """The shape of what a trial gives; None where it raises: CannotRun, or whatever torch or NumPy raise where it is no
    fix."""
    with quiet():
        try:
            return result_shape(run())
        except Exception:
            return None


def result_shape(result: Any) -> Shape:
    """The shape of a result, of the first of several."""
    while issubclass(type(result), (tuple, list)) and result:
        result = result[0]
    return tuple(result.shape) if is_array(result) else ()


def join_axis(call: FailedCall) -> int:
    """The axis along which tensors are joined: the first by default, as in torch.cat."""
    node = call.node
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg in ("dim", "axis"):
            axis = dict(call.arguments).get(ast.unparse(keyword.value))
            return axis if type(axis) is int else 0
    return next((n for _, n in call.arguments if type(n) is int), 0)


def known_operands(call: FailedCall) -> list[tuple[int, CallOperand]]:
    return [(i, op) for i, op in enumerate(call.operands) if op.shape is not None and not op.weight]


def no_larger(call: FailedCall) -> Accept:
    """Accepts a result of no more elements than the largest operand: two axes that cross are never what was meant."""
    most = max((math.prod(op.shape) for op in call.operands if op.shape is not None), default=0)
    return lambda shape: math.prod(shape) <= most


def with_method(operand: CallOperand) -> str:
    """The user's text for an operand, in a form to call a method on."""
    simple = operand.node is None or isinstance(operand.node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return operand.text if simple and operand.text else f"({operand.text or 'x'})"


def transpose_axes(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """Two axes exchanged, the last two first."""
    name, axes = with_method(operand), len(operand.shape or ())
    if axes == 2:
        yield FixIdea("transpose", which, f"{name}.T", lambda x: x.T)
    pairs = [(-2, -1), (1, 2), (0, 1), (1, 3), (0, 2)] if axes > 2 else []
    done = set()
    for i, j in pairs:
        pair = (i % axes, j % axes)
        if max(i, j) < axes and pair not in done:
            done.add(pair)
            method = "swapaxes" if type(operand.value) is np.ndarray else "transpose"
            yield FixIdea("transpose", which, f"{name}.{method}({i}, {j})", operator.methodcaller("swapaxes", i, j))


def permute_axes(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """The last axis moved to where torch has its channels, and the reverse."""
    orders: dict[int, list[tuple[int, ...]]] = {
        3: [(2, 0, 1), (1, 2, 0)],
        4: [(0, 3, 1, 2), (0, 2, 3, 1)],
        5: [(0, 4, 1, 2, 3), (0, 2, 3, 4, 1)],
    }
    for order in orders.get(len(operand.shape or ()), ()):
        if is_array(operand.value) and type(operand.value) is not np.ndarray:
            code = f"{with_method(operand)}.permute{order}"
            yield FixIdea("permute", which, code, operator.methodcaller("permute", *order))


def add_axis(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """An axis of size 1 added."""
    name, axes = with_method(operand), len(operand.shape or ())
    for k in [1, 0, *range(2, axes + 1)] if axes else [0]:
        if type(operand.value) is np.ndarray:
            code = f"np.expand_dims({operand.text}, {k})"
            yield FixIdea("unsqueeze", which, code, functools.partial(np.expand_dims, axis=k))
        else:
            yield FixIdea("unsqueeze", which, f"{name}.unsqueeze({k})", operator.methodcaller("unsqueeze", k))
    if axes == 2:
        yield FixIdea("unsqueeze", which, f"{name}[None, None]", lambda x: x[None, None])
        yield FixIdea("unsqueeze", which, f"{name}[:, :, None, None]", lambda x: x[:, :, None, None])


def align_axes(which: int, operand: CallOperand, to: CallOperand) -> Iterator[FixIdea]:
    """Each axis of the shorter beside an axis of the longer that has its size, with axes of size 1 between: a batch of
    numbers beside a batch of images, a mask [N, S] beside scores [N, H, L, S]."""
    own, long = operand.shape or (), to.shape or ()
    if not 0 < len(own) < len(long):
        return
    # the batch first, then what keeps the last axis the last: as masks of attention are meant
    ends = sorted(itertools.combinations(range(len(long)), len(own)), key=lambda at: (at[0], -at[-1]))
    for places in ends:
        if all(long[place] == size for place, size in zip(places, own)):
            index = tuple(slice(None) if i in places else None for i in range(len(long)))
            text = ", ".join(":" if i is not None else "None" for i in index)
            yield FixIdea("unsqueeze", which, f"{with_method(operand)}[{text}]", operator.itemgetter(index))


def remove_axis(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """An axis of size 1 removed."""
    for k, size in reversed(list(enumerate(operand.shape or ()))):
        if size == 1:
            code = f"{with_method(operand)}.squeeze({k})"
            yield FixIdea("squeeze", which, code, operator.methodcaller("squeeze", k))


def flatten_axes(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """Several axes made one."""
    if len(operand.shape or ()) > 2 and type(operand.value) is not np.ndarray:
        yield FixIdea("flatten", which, f"{with_method(operand)}.flatten(1)", lambda x: x.flatten(1))


def resize_image(which: int, operand: CallOperand, to: CallOperand) -> Iterator[FixIdea]:
    """An image resized to another, where only their sizes differ."""
    a, b = operand.shape or (), to.shape or ()
    if len(a) == len(b) == 4 and a[0] == b[0] and a[2:] != b[2:] and to.text and "float" in str(operand.value.dtype):
        code = f"F.interpolate({operand.text}, size={with_method(to)}.shape[2:])"
        yield FixIdea("resize", which, code, lambda x: nn.functional.interpolate(x, size=b[2:]))


# -- output shapes by formula ------------------------------------------------------------------------------------------

Settings = dict[str, Any]
SAME_SHAPE = frozenset(
    getattr(nn, name)
    for name in (
        "Identity ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Softplus Softsign Hardswish "
        "Hardsigmoid Hardtanh Softmax LogSoftmax LogSigmoid Softmin Softmax2d Dropout Dropout1d Dropout2d Dropout3d "
        "AlphaDropout FeatureAlphaDropout BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LayerNorm GroupNorm "
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm RMSNorm Threshold Hardshrink Softshrink "
        "Tanhshrink CrossMapLRN2d TransformerEncoderLayer TransformerEncoder"
    ).split()
)
"""Layers whose output has the shape of their input."""
CONVS = {getattr(nn, f"Conv{axes}d"): axes for axes in (1, 2, 3)}
TRANSPOSED_CONVS = {getattr(nn, f"ConvTranspose{axes}d"): axes for axes in (1, 2, 3)}
POOLS = {getattr(nn, f"{kind}Pool{axes}d"): axes for kind in ("Max", "Avg") for axes in (1, 2, 3)}
ADAPTIVE_POOLS = {getattr(nn, f"Adaptive{kind}Pool{axes}d"): axes for kind in ("Max", "Avg") for axes in (1, 2, 3)}


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


PADS = [
    getattr(nn, f"{kind}Pad{axes}d")
    for kind, most in (("Zero", 3), ("Constant", 3), ("Reflection", 2), ("Replication", 2))
    for axes in range(1, most + 1)
]
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
OUT_SIZES = word_pairs("Linear:out_features Conv1d:out_channels Conv2d:out_channels Conv3d:out_channels")


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
        if code is not None and not module_name(type(model)).startswith("torch."):
            files.append(code.co_filename)
    yield from dict.fromkeys(files)
