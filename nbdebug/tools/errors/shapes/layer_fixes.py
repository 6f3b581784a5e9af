"""Cures for a layer that was made for another size: the layer made anew, the pictures brought to the size that it was
made for, or a pooling before the flattening that makes any picture fit."""

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
from nbdebug.tools.errors.shapes import history as came
from nbdebug.tools.errors.shapes.call import CallPart, FailedCall, look_up, taken_by
from nbdebug.tools.errors.shapes.facts import Shape, ShapeFix, ShapeStep, ViewDownstream
from nbdebug.tools.errors.shapes.history import below, entered, path_of, through
from nbdebug.tools.errors.shapes.messages import ParsedMessage
from nbdebug.tools.errors.shapes.trials import CallTrials, named, shape_of
from nbdebug.tools.errors.values import value_of

LARGEST = 1024
"""The side of the largest picture that is looked for."""


def cures(
    scene: ErrorContext, call: FailedCall, said: ParsedMessage, passed: tuple[ShapeStep, ...], path: str
) -> Iterator[ShapeFix]:
    """What fits, likeliest first."""
    layer = call.layer
    if layer is None or not call.parts:
        return
    if call.parts[0].shape is None:  # of a compiled model the sizes stand in the message alone
        again = anew(layer, said.got) if said.a is not None and said.kind == "features" else None
        if again is not None and said.a is not None:
            fits = through(again[0], said.a)
            yield ShapeFix("layer", path, again[1], fits is not None, fits)
        return
    yield from _pictures(scene, call)
    trials = CallTrials(call)
    before = next((step.shape for step in reversed(passed) if len(step.shape) > 2), None)
    if type(layer) is nn.Linear and before is not None and len(call.parts[0].shape) == 2:
        yield from _pooled(layer, before)
    made = anew(layer, said.got)
    if made is not None and said.got != said.wanted:
        yield from trials.with_layer(*made, path)


def others(call: FailedCall, said: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """The layer of the same family for as many axes; a recurrent layer without the state that does not fit."""
    layer, first = call.layer, call.parts[0] if call.parts else None
    if layer is None or first is None or first.shape is None:
        return
    kind = type(layer).__name__
    if kind.endswith("d") and kind[-2:-1].isdigit() and len(first.shape) in (3, 4, 5):
        family = getattr(nn, f"{kind[:-2]}{len(first.shape) - 2}d", None)
        maker = MAKERS.get(family) if family is not None and family is not type(layer) else None
        size = came.sizes(layer).get("num_features") or came.sizes(layer).get("in_channels")
        if maker is not None and type(size) is int:
            code = maker(attributes(layer), size)
            with quiet():
                yield from CallTrials(call).with_layer(eval(code, {"nn": nn}), code, path, "kind")
    if said.kind == "hidden" and call.function is not None and isinstance(call.node, ast.Call) and call.node.args:
        shape = CallTrials(call).without("hx")
        if shape is not None:
            called, given = ast.unparse(call.node.func), ast.unparse(call.node.args[0])
            yield ShapeFix("state", "", f"{called}({given})   # without a state: torch begins with zeros", True, shape)


def _pooled(layer: nn.Linear, before: Shape) -> Iterator[ShapeFix]:
    """A pooling to the square that the layer was made for, if it was made for one."""
    side = math.isqrt(layer.in_features // before[1]) if before[1] else 0
    axes = len(before) - 2
    pool = {1: "AdaptiveAvgPool1d", 2: "AdaptiveAvgPool2d", 3: "AdaptiveAvgPool3d"}.get(axes)
    if axes == 1:
        side = layer.in_features // before[1]
    if pool and side > 0 and before[1] * side ** min(axes, 2) == layer.in_features and axes < 3:
        module = getattr(nn, pool)(side)
        after = through(nn.Sequential(module, nn.Flatten(), layer), before)
        yield ShapeFix("pool", "", f"nn.{pool}({side})   # before the flattening", after is not None, after)


def _pictures(scene: ErrorContext, call: FailedCall) -> Iterator[ShapeFix]:
    """The size of picture that the layer was made for: found by sending sizes through the formulas of the layers."""
    start, levels = entered(call), [f for f in below(scene) if type(f.module) is nn.Sequential and "input" in f.names]
    shape, layer = start.shape if start else None, call.layer
    if start is None or shape is None or len(shape) < 3 or not levels or layer is None:
        return
    axes = 2 if len(shape) > 3 else 1
    fits = [
        side for side in range(1, LARGEST + 1) if _arrives(levels, (*shape[:-axes], *(side,) * axes), layer) is not None
    ]
    if fits and shape[-axes:] not in [(side,) * axes for side in fits]:
        near = [abs(side - max(shape[-axes:])) for side in fits]
        best = min(fits, key=_even) if type(layer) is nn.Linear else fits[near.index(min(near))]
        size = (best,) * axes
        yield ShapeFix(
            "pictures",
            start.name,
            f"{start.name} = F.interpolate({start.name}, size={size})",
            True,
            _arrives(levels, (*shape[:-axes], *size), layer),
        )


def _even(side: int) -> int:
    """Of several sizes that fit, the roundest: 32 rather than 33."""
    return -(side & -side)


def _arrives(levels: list[Any], shape: Shape, layer: nn.Module) -> Shape | None:
    """What the layer gives for that shape at the entrance of the Sequentials; None where it does not fit."""
    at: Shape | None = shape
    for level in levels:
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is level.names.get("module") or at is None:
                break
            at = through(child, at)
    return through(layer, at) if at is not None else None


def anew(layer: nn.Module, size: int | None) -> tuple[nn.Module, str] | None:
    """The layer made for inputs of this size, and the text that makes it."""
    maker = MAKERS.get(type(layer))
    if maker is None or size is None or size <= 0:
        return None
    code = maker(attributes(layer), size)
    with quiet():
        try:
            made = eval(code, {"nn": nn})  # a text of ours, of numbers of the layer's
        except Exception:
            return None
    return made, code


def _linear(told: dict[str, Any], size: int) -> str:
    return f"nn.Linear({size}, {told['out_features']}" + (
        ")" if told["_parameters"].get("bias") is not None else ", bias=False)"
    )


def _conv(name: str) -> Callable[[dict[str, Any], int], str]:
    def code(told: dict[str, Any], size: int) -> str:
        given = [f"nn.{name}({size}, {told['out_channels']}, {_short(told['kernel_size'])}"]
        for key, usual in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = _short(told[key])
            given += [f"{key}={value!r}"] if value != usual else []
        return ", ".join(given) + ")"

    return code


def _short(value: Any) -> Any:
    return value[0] if type(value) is tuple and len(set(value)) == 1 else value


def _norm(name: str) -> Callable[[dict[str, Any], int], str]:
    return lambda told, size: f"nn.{name}({size})"


def _recurrent(name: str) -> Callable[[dict[str, Any], int], str]:
    def code(told: dict[str, Any], size: int) -> str:
        more = f", {told['num_layers']}" if told.get("num_layers", 1) > 1 else ""
        more += ", batch_first=True" if told.get("batch_first") else ""
        more += ", bidirectional=True" if told.get("bidirectional") else ""
        return f"nn.{name}({size}, {told['hidden_size']}{more})"

    return code


MAKERS: dict[type, Callable[[dict[str, Any], int], str]] = {
    nn.Linear: _linear,
    **{
        kind: _conv(kind.__name__)
        for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
    **{
        kind: _norm(kind.__name__)
        for kind in (
            nn.BatchNorm1d,
            nn.BatchNorm2d,
            nn.BatchNorm3d,
            nn.LayerNorm,
            nn.InstanceNorm1d,
            nn.InstanceNorm2d,
            nn.InstanceNorm3d,
        )
    },
    nn.GroupNorm: lambda told, size: f"nn.GroupNorm({told['num_groups']}, {size})",
    nn.MultiheadAttention: lambda told, size: f"nn.MultiheadAttention({size}, {told['num_heads']})",
    **{kind: _recurrent(kind.__name__) for kind in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)},
}


def count(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Iterator[ShapeFix | None]:
    """One of the sizes left to torch (-1); for a flattening view, flatten itself."""
    part, sizes = call.parts[0], said.a
    if call.op not in ("view", "reshape") or call.inner is not None or sizes is None or part.shape is None:
        return
    if uneven(call) is not None or behind(call, said) is not None:
        return
    name = named(part)
    texts = [t for t, _ in call.numbers] if len(call.numbers) == len(sizes) else [str(size) for size in sizes]
    if -1 not in sizes:
        for i in range(len(sizes)):
            new = [*sizes[:i], -1, *sizes[i + 1 :]]
            yield _as(part, "count", new, f"{name}.{call.op}({', '.join([*texts[:i], '-1', *texts[i + 1 :]])})")
    elif len(sizes) == 2 and len(part.shape) > 2:
        yield ShapeFix("flatten", part.text, f"{name}.flatten(1)", True, (part.shape[0], math.prod(part.shape[1:])))


def _as(part: CallPart, slug: str, sizes: list[int], code: str) -> ShapeFix | None:
    """Whether the elements can be dealt out so."""
    fixed, left = math.prod(size for size in sizes if size > 0), math.prod(part.shape or ())
    if left % fixed or left == 0:
        return None
    return ShapeFix(slug, part.text, code, True, tuple(left // fixed if size == -1 else size for size in sizes))


def behind(call: FailedCall, said: ParsedMessage, names: OperandNames | None = None) -> ViewDownstream | None:
    """The layer that comes next, where it could not take the rows that there are."""
    layer, shape = _next(call, said), call.parts[0].shape if call.parts else None
    if layer is None or not shape:
        return None
    wants, gets = attributes(layer)["in_features"], math.prod(shape[1:])
    return ViewDownstream(path_of(layer, names) if names is not None else "", wants, gets) if wants != gets else None


def _next(call: FailedCall, said: ParsedMessage) -> Any:
    """The Linear that is given what a flattening gives."""
    if said.kind != "count" or call.op not in ("view", "reshape") or call.frame is None or len(said.a or ()) != 2:
        return None
    then = taken_by(call.node, call.frame)
    module: Any = value_of(then.func, call.frame) if then is not None else None
    while type(module) is nn.Sequential:
        module = next(iter((attributes(module).get("_modules") or {}).values()), None)
    return module if type(module) is nn.Linear else None


def flattened(call: FailedCall, said: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """What fits the layer behind as well: pictures pooled to the square that it was made for; the layer made anew."""
    layer, part = _next(call, said), call.parts[0]
    shape: Shape = part.shape or ()
    told = attributes(layer)
    side = math.isqrt(told["in_features"] // shape[1]) if len(shape) == 4 and shape[1] else 0
    if side and shape[1] * side * side == told["in_features"]:
        pooled = through(nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten(), layer), shape)
        code = f"F.adaptive_avg_pool2d({part.text}, {side}).flatten(1)"
        yield ShapeFix("pooled", path, code, pooled is not None, pooled)
    gets = math.prod(shape[1:])
    made = anew(layer, gets)
    if made is not None:
        code = f"{named(part)}.flatten(1)\n{made[1]}   # {path}"
        yield ShapeFix("behind", path, code, True, through(made[0], (shape[0], gets)))


def uneven(call: FailedCall) -> tuple[str, int, int] | None:
    """(text of the divisor, what is divided, by what) of a size `12 // heads` that leaves a rest."""
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and call.frame is not None:
            whole, by = look_up(node.left, call.frame), look_up(node.right, call.frame)
            if type(whole) is int and type(by) is int and by > 0 and whole % by:
                return ast.unparse(node.right), whole, by
    return None


SIZES = {"query": "embed_dim", "key": "kdim", "value": "vdim"}


def measured(call: FailedCall, said: ParsedMessage) -> ParsedMessage | None:
    """The first of the three whose features the layer does not take; None where they all fit."""
    told: Any = attributes(call.layer)
    for i, part in enumerate(call.parts):
        wanted = told.get(SIZES.get(part.role, ""))
        if type(wanted) is int and part.shape and part.shape[-1] != wanted:
            return dataclasses.replace(
                said, kind="features", axis=len(part.shape) - 1, wanted=wanted, got=part.shape[-1], which=i
            )
    return None


def attention_fixes(call: FailedCall, path: str) -> Iterator[ShapeFix]:
    """The layer made for the features that it is given, where its heads can share them; run on zeros."""
    parts = {part.role: part for part in call.parts if part.role in SIZES and part.shape is not None}
    if set(parts) != set(SIZES):
        return
    told: Any = attributes(call.layer)
    sizes = {role: part.shape[-1] for role, part in parts.items() if part.shape}
    given = [str(sizes["query"]), str(told["num_heads"])]
    given += [f"{SIZES[role]}={sizes[role]}" for role in ("key", "value") if sizes[role] != sizes["query"]]
    given += ["batch_first=True"] if told.get("batch_first") else []
    code = f"nn.MultiheadAttention({', '.join(given)})"
    with quiet():
        try:
            made = eval(code, {"nn": nn})  # a text of ours, of numbers of the layer's
            found = shape_of(made(*(_zeros(parts[role]) for role in SIZES)))
        except Exception:  # heads that do not divide, batches that differ: no cure
            return
    yield ShapeFix("layer", path, code, True, found)


def _zeros(part: CallPart) -> Any:
    return torch.zeros(
        [min(size, 64) if i < len(part.shape or ()) - 1 else size for i, size in enumerate(part.shape or ())]
    )
