"""Is the loss scale taken out before gradients are changed? Two runs of the user's own step with two scales tell.

What an optimizer gets must not depend on the loss scale. Where it does, gradients were clipped while they still carried
it, or it was never taken out. A third run, with the scale taken out right after backward, shows what the optimizer
would have got. The step runs on the user's model, ends before the optimizer's, and all is put back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbdebug.observe.locations import StackLines, at_site, locate
from nbdebug.observe.ops import WatchMode
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import plain_values
from nbdebug.report import Where
from nbdebug.tools.precision.rules import UnscaleOrder
from nbdebug.tools.precision.trial import HalfTrials, OwnStep

APART = 16.0
"""The second scale is so many times smaller: far beyond any rounding, and four halvings, as a scaler makes them."""
SHRUNK, DEPENDS = 0.99, 1.05
"""Clipped: the norm fell by more than rounding does. Depends on the scale: by more than a twentieth."""
FIRST, HALVINGS = 2.0**16, 24
"""GradScaler's first scale; how often it is halved until gradients are finite, as the scaler would."""


@dataclasses.dataclass
class ScaledRun:
    """One run of the step. left, written, got: the norm of all gradients after backward, when the scale is taken out,
    and when the optimizer steps (both at the end, where the step stops short of it); unscaled: whether it was taken
    out; at: the line that changed gradients before."""

    left: float = 0.0
    written: float = 0.0
    got: float | None = None
    unscaled: bool = False
    at: StackLines | None = None


class GradientMeter(OwnStep):
    """Measures gradients at the turns of a step. soon: take the scale out right after backward, before the user's
    code."""

    def __init__(self, parameters: Iterable[Any], scale: float, soon: bool = False):
        super().__init__(scale)
        self.parameters, self.soon, self.run = list(parameters), soon, ScaledRun()

    def gradients(self) -> list[torch.Tensor]:
        return [plain_values(p.grad) for p in self.parameters if p.grad is not None and p.grad.numel()]

    def norm(self) -> float:
        norms = [float(torch.linalg.vector_norm(g.double())) for g in self.gradients()]
        return math.hypot(*norms) if all(map(math.isfinite, norms)) else math.inf

    def backward_ended(self) -> None:
        if self.scaler is None:
            return
        if self.soon:
            self._divide()
        self.run.left = self.norm()

    def unscaling(self, optimizer: Any) -> None:
        if not self.run.unscaled:
            self.run.written, self.run.unscaled = self.norm(), True
            if not self.soon:
                self._divide()

    def stepping(self, optimizer: Any) -> None:
        self.run.got = self.norm()

    def ended(self) -> None:
        """A step that stops short of the optimizer's leaves the scale to be taken out later."""
        if self.run.got is None:
            self.unscaling(None)
            self.run.got = self.norm()

    def _divide(self) -> None:
        with torch.no_grad():
            for gradient in self.gradients():
                gradient.div_(self.scale)


class Writes(WatchMode):
    """Where gradients are first changed in place between backward and the scaler."""

    def __init__(self, meter: GradientMeter):
        super().__init__()
        self.watched = meter

    def __torch_dispatch__(self, op: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        meter = self.watched
        if (
            meter.run.at is None
            and meter.run.left
            and not meter.run.unscaled
            and op._schema.is_mutable
            and torch._C._current_autograd_node() is None
        ):
            held = {g.data_ptr() for g in meter.gradients()}
            if any(isinstance(t, torch.Tensor) and t.data_ptr() in held for t in tree_leaves(args[:1])):
                meter.run.at = locate()
        return op(*args, **(kwargs or {}))


def check_unscale_order(
    step: Callable[[], Any], model: nn.Module, trials: HalfTrials, scaler: Any
) -> UnscaleOrder | None:
    """What is wrong with the order of a step; None where nothing is, it uses no scaler, or it does not repeat. scaler:
    that it uses, where that is known."""
    before = Snapshot.take((model,))

    def run(scale: float, soon: bool = False) -> GradientMeter:
        meter = GradientMeter(model.parameters(), scale, soon)
        try:
            with trials.same_numbers(), torch.enable_grad(), meter, Writes(meter):
                step()
            meter.ended()
        finally:
            before.restore()
        return meter

    scaler = scaler or run(1.0).scaler
    if scaler is None:
        return None
    scale = float(scaler.get_scale()) or FIRST
    for _ in range(HALVINGS):
        one = run(scale).run
        if math.isfinite(one.left + (one.got or 0.0)):
            break
        scale /= 2
    other = run(scale / APART).run
    if not _depends_on_scale(one, other):
        return None
    mended = run(scale, True).run
    return UnscaleOrder(
        scale,
        one.left,
        one.written,
        one.got or 0.0,
        other.got or 0.0,
        mended.got or 0.0,
        not one.unscaled,
        at_site(Where(phase="backward"), one.at),
    )


def _depends_on_scale(one: ScaledRun, other: ScaledRun) -> bool:
    """Whether what the optimizer gets depends on the scale, since gradients were changed while they carried it, or
    since nobody has taken it out."""
    if one.got is None or other.got is None or not one.left or not other.left:
        return False
    if not 1 / DEPENDS < one.left / (APART * other.left) < DEPENDS:  # another batch, perhaps: no answer
        return False
    ratio = max(one.got, other.got) / max(min(one.got, other.got), 1e-300)
    early = one.unscaled and one.written < SHRUNK * one.left
    never = not one.unscaled and one.got > 0.5 * one.left
    return ratio > DEPENDS and (early or never)
