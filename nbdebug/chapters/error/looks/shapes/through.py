"""Which shape a module of torch's own gives for a shape: by its formula, so that nothing is computed.

This tells where a size in the middle of a model comes from: the user knows the pictures that went in and the layers,
and the message speaks of 800.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from nbdebug.observe.named import attributes

Shape = tuple[int, ...]

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


def through(module: Any, shape: Shape) -> Shape | None:
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


def _of(kind: type, told: dict[str, Any], shape: Shape) -> Shape | None:
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


def _slid(shape: Shape, axes: int, told: dict[str, Any], channels: int | None) -> Shape | None:
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


def _spread(shape: Shape, axes: int, told: dict[str, Any]) -> Shape:
    kernel, stride, pad, out, dilation = (
        _each(told[name], axes) for name in ("kernel_size", "stride", "padding", "output_padding", "dilation")
    )
    sizes = [
        (size - 1) * stride[i] - 2 * pad[i] + dilation[i] * (kernel[i] - 1) + out[i] + 1
        for i, size in enumerate(shape[-axes:])
    ]
    return (*shape[: -axes - 1], told["out_channels"], *sizes)


def _flat(told: dict[str, Any], shape: Shape) -> Shape:
    first, last = told["start_dim"] % len(shape), told["end_dim"] % len(shape)
    return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


def _unflat(told: dict[str, Any], shape: Shape) -> Shape:
    axis, sizes = told["dim"] % len(shape), list(told["unflattened_size"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[axis] // -math.prod(sizes)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def _scaled(told: dict[str, Any], shape: Shape) -> Shape:
    axes = len(shape) - 2
    if told["size"] is not None:
        return (*shape[:2], *_each(told["size"], axes))
    return (*shape[:2], *(int(size * scale) for size, scale in zip(shape[2:], _each(told["scale_factor"], axes))))


def _padded(told: dict[str, Any], shape: Shape) -> Shape:
    sides, sizes = list(told["padding"]), list(shape)
    for i in range(len(sides) // 2):
        sizes[-1 - i] += sides[2 * i] + sides[2 * i + 1]
    return tuple(sizes)


def _shuffled(told: dict[str, Any], shape: Shape) -> Shape:
    by = told["upscale_factor"]
    return (*shape[:-3], shape[-3] // by**2, shape[-2] * by, shape[-1] * by)


def _halved(told: dict[str, Any], shape: Shape) -> Shape:
    sizes = list(shape)
    sizes[told["dim"]] //= 2
    return tuple(sizes)


def _looked_up(told: dict[str, Any], shape: Shape) -> Shape:
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
OTHERS: dict[type, Callable[[dict[str, Any], Shape], Shape]] = {
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
