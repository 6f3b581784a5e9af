"""Cures for a layer that was made for another size: the layer made anew, the pictures brought to the size that it was
made for, or a pooling before the flattening that makes any picture fit."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from nbdebug.chapters.error.facts_shapes import Cure, Passed
from nbdebug.chapters.error.looks.shapes import came
from nbdebug.chapters.error.looks.shapes.bench import quiet
from nbdebug.chapters.error.looks.shapes.call import Call
from nbdebug.chapters.error.looks.shapes.came import below, entered
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.through import through
from nbdebug.chapters.error.looks.shapes.trials import Trials
from nbdebug.chapters.error.scene import Scene
from nbdebug.observe.named import attributes

Shape = tuple[int, ...]
LARGEST = 1024
"""The side of the largest picture that is looked for."""


def cures(scene: Scene, call: Call, said: Said, passed: tuple[Passed, ...], path: str) -> Iterator[Cure]:
    """What fits, likeliest first."""
    layer = call.layer
    if layer is None or not call.parts:
        return
    if call.parts[0].shape is None:  # of a compiled model the sizes stand in the message alone
        again = anew(layer, said.got) if said.a is not None and said.kind == "features" else None
        if again is not None and said.a is not None:
            fits = through(again[0], said.a)
            yield Cure("layer", path, again[1], fits is not None, fits)
        return
    yield from _pictures(scene, call)
    trials = Trials(call)
    before = next((step.shape for step in reversed(passed) if len(step.shape) > 2), None)
    if type(layer) is nn.Linear and before is not None and len(call.parts[0].shape) == 2:
        yield from _pooled(layer, before)
    made = anew(layer, said.got)
    if made is not None and said.got != said.wanted:
        yield from trials.with_layer(*made, path)


def others(call: Call, said: Said, path: str) -> Iterator[Cure]:
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
                yield from Trials(call).with_layer(eval(code, {"nn": nn}), code, path, "kind")
    if said.kind == "hidden" and call.function is not None and isinstance(call.node, ast.Call) and call.node.args:
        shape = Trials(call).without("hx")
        if shape is not None:
            called, given = ast.unparse(call.node.func), ast.unparse(call.node.args[0])
            yield Cure("state", "", f"{called}({given})   # without a state: torch begins with zeros", True, shape)


def _pooled(layer: nn.Linear, before: Shape) -> Iterator[Cure]:
    """A pooling to the square that the layer was made for, if it was made for one."""
    side = math.isqrt(layer.in_features // before[1]) if before[1] else 0
    axes = len(before) - 2
    pool = {1: "AdaptiveAvgPool1d", 2: "AdaptiveAvgPool2d", 3: "AdaptiveAvgPool3d"}.get(axes)
    if axes == 1:
        side = layer.in_features // before[1]
    if pool and side > 0 and before[1] * side ** min(axes, 2) == layer.in_features and axes < 3:
        module = getattr(nn, pool)(side)
        after = through(nn.Sequential(module, nn.Flatten(), layer), before)
        yield Cure("pool", "", f"nn.{pool}({side})   # before the flattening", after is not None, after)


def _pictures(scene: Scene, call: Call) -> Iterator[Cure]:
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
        yield Cure(
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
