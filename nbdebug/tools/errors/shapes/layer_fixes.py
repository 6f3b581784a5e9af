"""Fixes for a layer that was made for another size: the layer made for this one, the images resized to the size that it
was made for, or a pooling before the flattening that makes images of any size fit. Then, of a flattening view, fixes
that also fit the layer after it; and of attention."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.operands import OperandNames
from nbdebug.tools.errors.sandbox import quiet
from nbdebug.tools.errors.shapes.call import FailedCall, next_call, operand_value
from nbdebug.tools.errors.shapes.facts import Shape, ShapeFix, ShapeStep, ViewDownstream
from nbdebug.tools.errors.shapes.history import frames_below, layer_sizes, output_shape, path_of, user_input
from nbdebug.tools.errors.shapes.messages import ParsedMessage
from nbdebug.tools.errors.shapes.trials import CallTrials, result_shape, with_method
from nbdebug.tools.errors.values import value_of

LARGEST = 1024
"""The side of the largest image that is tried."""
Settings = dict[str, Any]


def resized_layer_fixes(
    context: ErrorContext, call: FailedCall, message: ParsedMessage, history: tuple[ShapeStep, ...], path: str
) -> Iterator[ShapeFix]:
    """For a layer that was made for another size, likeliest first."""
    layer = call.layer
    if layer is None or not call.operands:
        return
    if call.operands[0].shape is None:  # of a compiled model only the message has the sizes
        new = layer_of_size(layer, message.actual) if message.a is not None and message.kind == "features" else None
        if new is not None and message.a is not None:
            result = output_shape(new[0], message.a)
            yield ShapeFix("layer", path, new[1], result is not None, result)
        return
    yield from _resized_images(context, call)
    trials = CallTrials(call)
    before = next((step.shape for step in reversed(history) if len(step.shape) > 2), None)
    if type(layer) is nn.Linear and before is not None and len(call.operands[0].shape) == 2:
        yield from _pooling(layer, before)
    new = layer_of_size(layer, message.actual)
    if new is not None and message.actual != message.expected:
        yield from trials.with_layer(*new, path)


def other_layer_fixes(call: FailedCall, message: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """The layer of the same family for as many axes; a recurrent layer without the state that does not fit."""
    layer, shape = call.layer, call.operands[0].shape if call.operands else None
    if layer is None or shape is None:
        return
    kind = type(layer).__name__
    if kind.endswith("d") and kind[-2:-1].isdigit() and len(shape) in (3, 4, 5):
        family = getattr(nn, f"{kind[:-2]}{len(shape) - 2}d", None)
        maker = LAYER_CODE.get(family) if family is not None and family is not type(layer) else None
        size = layer_sizes(layer).get("num_features") or layer_sizes(layer).get("in_channels")
        if maker is not None and type(size) is int:
            code = maker(attributes(layer), size)
            with quiet():
                yield from CallTrials(call).with_layer(eval(code, {"nn": nn}), code, path, "kind")
    if message.kind == "hidden" and call.function is not None and isinstance(call.node, ast.Call) and call.node.args:
        result = CallTrials(call).without("hx")
        if result is not None:
            code = f"{ast.unparse(call.node.func)}({ast.unparse(call.node.args[0])})"
            yield ShapeFix("state", "", f"{code}   # without a state: torch begins with zeros", True, result)


def _pooling(layer: nn.Linear, before: Shape) -> Iterator[ShapeFix]:
    """A pooling to the square that the layer was made for, if it was made for one."""
    channels, axes = before[1], len(before) - 2
    pool = {1: "AdaptiveAvgPool1d", 2: "AdaptiveAvgPool2d"}.get(axes)
    area = layer.in_features // channels if channels else 0
    side = area if axes == 1 else math.isqrt(area)
    if pool and side > 0 and channels * side**axes == layer.in_features:
        result = output_shape(nn.Sequential(getattr(nn, pool)(side), nn.Flatten(), layer), before)
        yield ShapeFix("pool", "", f"nn.{pool}({side})   # before the flattening", result is not None, result)


def _resized_images(context: ErrorContext, call: FailedCall) -> Iterator[ShapeFix]:
    """The image size that the layer was made for: by the formulas of the layers, for each size."""
    image, layer = user_input(call), call.layer
    levels = [f for f in frames_below(context) if type(f.module) is nn.Sequential and "input" in f.names]
    shape = image.shape if image else None
    if image is None or shape is None or len(shape) < 3 or not levels or layer is None:
        return
    axes = 2 if len(shape) > 3 else 1

    def result(side: int) -> Shape | None:
        return _at_layer(levels, (*shape[:-axes], *(side,) * axes), layer)

    sides = [side for side in range(1, LARGEST + 1) if result(side) is not None]
    if sides and shape[-axes:] not in [(side,) * axes for side in sides]:
        distances = [abs(side - max(shape[-axes:])) for side in sides]
        roundest = min(sides, key=lambda side: -(side & -side))  # 32 rather than 33
        side = roundest if type(layer) is nn.Linear else sides[distances.index(min(distances))]
        code = f"{image.name} = F.interpolate({image.name}, size={(side,) * axes})"
        yield ShapeFix("images", image.name, code, True, result(side))


def _at_layer(levels: list[Any], start: Shape, layer: nn.Module) -> Shape | None:
    """The output shape of the layer for that shape at the entrance of the Sequentials; None where it does not fit."""
    shape: Shape | None = start
    for level in levels:
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is level.names.get("module") or shape is None:
                break
            shape = output_shape(child, shape)
    return output_shape(layer, shape) if shape is not None else None


def layer_of_size(layer: nn.Module, size: int | None) -> tuple[nn.Module, str] | None:
    """The layer made for inputs of this size, and the code that makes it."""
    maker = LAYER_CODE.get(type(layer))
    if maker is None or size is None or size <= 0:
        return None
    code = maker(attributes(layer), size)
    with quiet():
        try:
            return eval(code, {"nn": nn}), code  # a text of ours, of numbers of the layer's
        except Exception:
            return None


def _linear_code(settings: Settings, size: int) -> str:
    bias = "" if settings["_parameters"].get("bias") is not None else ", bias=False"
    return f"nn.Linear({size}, {settings['out_features']}{bias})"


def _conv_code(name: str) -> Callable[[Settings, int], str]:
    def code(settings: Settings, size: int) -> str:
        arguments = [f"nn.{name}({size}, {settings['out_channels']}, {_one_number(settings['kernel_size'])}"]
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = _one_number(settings[key])
            arguments += [f"{key}={value!r}"] if value != default else []
        return ", ".join(arguments) + ")"

    return code


def _one_number(value: Any) -> Any:
    return value[0] if type(value) is tuple and len(set(value)) == 1 else value


def _norm_code(name: str) -> Callable[[Settings, int], str]:
    return lambda settings, size: f"nn.{name}({size})"


def _recurrent_code(name: str) -> Callable[[Settings, int], str]:
    def code(settings: Settings, size: int) -> str:
        more = f", {settings['num_layers']}" if settings.get("num_layers", 1) > 1 else ""
        more += ", batch_first=True" if settings.get("batch_first") else ""
        more += ", bidirectional=True" if settings.get("bidirectional") else ""
        return f"nn.{name}({size}, {settings['hidden_size']}{more})"

    return code


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
LAYER_CODE: dict[type, Callable[[Settings, int], str]] = {
    nn.Linear: _linear_code,
    **{kind: _conv_code(kind.__name__) for kind in _CONVS},
    **{kind: _norm_code(kind.__name__) for kind in _NORMS},
    nn.GroupNorm: lambda settings, size: f"nn.GroupNorm({settings['num_groups']}, {size})",
    nn.MultiheadAttention: lambda settings, size: f"nn.MultiheadAttention({size}, {settings['num_heads']})",
    **{kind: _recurrent_code(kind.__name__) for kind in _RECURRENT},
}


# -- a view that flattens --------------------------------------------------------------------------------------------


def count_fixes(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Iterator[ShapeFix | None]:
    """One of the sizes left to torch (-1); for a flattening view, flatten itself."""
    operand, sizes = call.operands[0], message.a
    if call.op not in ("view", "reshape") or call.inner is not None or sizes is None or operand.shape is None:
        return
    if remainder(call) is not None or downstream(call, message) is not None:
        return
    name, total = with_method(operand), math.prod(operand.shape)
    texts = [t for t, _ in call.arguments] if len(call.arguments) == len(sizes) else [str(size) for size in sizes]
    if -1 not in sizes:
        for i in range(len(sizes)):
            new = [*sizes[:i], -1, *sizes[i + 1 :]]
            fixed = math.prod(size for size in new if size > 0)
            if total and total % fixed == 0:
                code = f"{name}.{call.op}({', '.join([*texts[:i], '-1', *texts[i + 1 :]])})"
                result = tuple(total // fixed if size == -1 else size for size in new)
                yield ShapeFix("count", operand.text, code, True, result)
    elif len(sizes) == 2 and len(operand.shape) > 2:
        result = (operand.shape[0], math.prod(operand.shape[1:]))
        yield ShapeFix("flatten", operand.text, f"{name}.flatten(1)", True, result)


def downstream(call: FailedCall, message: ParsedMessage, names: OperandNames | None = None) -> ViewDownstream | None:
    """The layer that comes next, where it could not take the rows that there are."""
    layer, shape = _next_layer(call, message), call.operands[0].shape if call.operands else None
    if layer is None or not shape:
        return None
    expected, actual = attributes(layer)["in_features"], math.prod(shape[1:])
    path = path_of(layer, names) if names is not None else ""
    return ViewDownstream(path, expected, actual) if expected != actual else None


def _next_layer(call: FailedCall, message: ParsedMessage) -> Any:
    """The Linear that takes the output of a flattening."""
    two_sizes = message.kind == "count" and len(message.a or ()) == 2
    if not two_sizes or call.op not in ("view", "reshape") or call.frame is None:
        return None
    after = next_call(call.node, call.frame)
    module: Any = value_of(after.func, call.frame) if after is not None else None
    while type(module) is nn.Sequential:
        module = next(iter((attributes(module).get("_modules") or {}).values()), None)
    return module if type(module) is nn.Linear else None


def downstream_fixes(call: FailedCall, message: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """What also fits the layer after the view: images pooled to the square that it was made for; the layer made for
    them."""
    layer, operand = _next_layer(call, message), call.operands[0]
    shape: Shape = operand.shape or ()
    features = attributes(layer)["in_features"]
    side = math.isqrt(features // shape[1]) if len(shape) == 4 and shape[1] else 0
    if side and shape[1] * side * side == features:
        result = output_shape(nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten(), layer), shape)
        code = f"F.adaptive_avg_pool2d({operand.text}, {side}).flatten(1)"
        yield ShapeFix("pooled", path, code, result is not None, result)
    actual = math.prod(shape[1:])
    new = layer_of_size(layer, actual)
    if new is not None:
        code = f"{with_method(operand)}.flatten(1)\n{new[1]}   # {path}"
        yield ShapeFix("downstream", path, code, True, output_shape(new[0], (shape[0], actual)))


def remainder(call: FailedCall) -> tuple[str, int, int] | None:
    """(text of the divisor, what is divided, by what) of a size `12 // heads` that leaves a remainder."""
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and call.frame is not None:
            whole, by = operand_value(node.left, call.frame), operand_value(node.right, call.frame)
            if type(whole) is int and type(by) is int and by > 0 and whole % by:
                return ast.unparse(node.right), whole, by
    return None


# -- attention -------------------------------------------------------------------------------------------------------

ATTENTION_SIZES = {"query": "embed_dim", "key": "kdim", "value": "vdim"}


def attention_message(call: FailedCall, message: ParsedMessage) -> ParsedMessage | None:
    """The first of query, key and value whose features the layer does not take; None where they all fit."""
    settings: Any = attributes(call.layer)
    for i, operand in enumerate(call.operands):
        expected, shape = settings.get(ATTENTION_SIZES.get(operand.role, "")), operand.shape
        if type(expected) is int and shape and shape[-1] != expected:
            axis, actual = len(shape) - 1, shape[-1]
            return dataclasses.replace(message, kind="features", axis=axis, expected=expected, actual=actual, which=i)
    return None


def attention_fixes(call: FailedCall, path: str) -> Iterator[ShapeFix]:
    """The layer made for the features that it is given, where its heads divide them; run on zeros."""
    shapes = {op.role: op.shape for op in call.operands if op.role in ATTENTION_SIZES and op.shape is not None}
    if set(shapes) != set(ATTENTION_SIZES):
        return
    settings: Any = attributes(call.layer)
    sizes = {role: shape[-1] for role, shape in shapes.items() if shape}
    arguments = [str(sizes["query"]), str(settings["num_heads"])]
    arguments += [f"{ATTENTION_SIZES[r]}={sizes[r]}" for r in ("key", "value") if sizes[r] != sizes["query"]]
    arguments += ["batch_first=True"] if settings.get("batch_first") else []
    code = f"nn.MultiheadAttention({', '.join(arguments)})"
    small = [(*(min(size, 64) for size in shapes[role][:-1]), *shapes[role][-1:]) for role in ATTENTION_SIZES]
    with quiet():
        try:
            new = eval(code, {"nn": nn})  # a text of ours, of numbers of the layer's
            result = result_shape(new(*map(torch.zeros, small)))
        except Exception:  # heads that do not divide, batches that differ: no fix
            return
    yield ShapeFix("layer", path, code, True, result)
