"""Steps under a GradScaler: its scale, what was written into gradients that carry it, and steps that it leaves out.

Nothing is waited for: the scale is copied on its device and sent along with the norms. That a step is left out is known
on the host without asking, since the optimizer was not called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.chapters.training.watch.norms import Norms, capturing, measure, unseen
from nbdebug.chapters.training.watch.scaler import ScalerWatch


class Scaled:
    """What a scaler does with the optimizers of some rounds."""

    def __init__(self, rounds: Any):
        self.rounds, self.roster, self.gradients = rounds, rounds.roster, rounds.gradients
        self._watch: ScalerWatch | None = None
        self._looked: set[int] = set()  # optimizers whose gradients no longer carry the scale
        self._stepped: set[int] = set()  # those that have stepped since their scaler was asked
        self._written: dict[int, list[Norms]] = {}

    def attach(self, told: Callable[..., Any]) -> None:
        """told: calls a method of ours at the border of the watch."""
        self._watch = ScalerWatch(self, told)
        self._watch.attach()

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    def forget(self) -> None:
        self._written.clear()
        self._looked.clear()

    def _ours(self, optimizer: Any) -> bool:
        return any(known is optimizer for known in self.roster.optimizers.values())

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """The scale is taken out: has something written into the gradients that carry it?"""
        if not self._ours(optimizer) or id(optimizer) in self._looked or capturing():
            return
        self._looked.add(id(optimizer))
        with unseen():
            changed = self.gradients.written(self.roster.refresh(optimizer))
            self._written[id(optimizer)] = measure(changed, self.gradients.wide) if changed else []

    def asked(self, scaler: Any, optimizer: Any) -> None:
        """The scaler is to step: a fused optimizer takes the scale out itself."""
        if self._ours(optimizer):
            self._stepped.discard(id(optimizer))
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self.unscaling(scaler, optimizer)

    def parcels(self, scaler: Any, optimizer: Any, there: list[Any]) -> list[tuple[str, Norms, frozenset[int]]]:
        """The optimizer is about to step: the scale, once for each step, and what was written."""
        self._stepped.add(id(optimizer))
        self.rounds.history.scales.growth = scaler.get_growth_interval()
        ours, scale = frozenset(self.roster.held(optimizer)), scaler._scale
        found = [("written", n.over(scale), ours) for n in self._written.pop(id(optimizer), [])]
        if not any(what == "scale" for what, _, _ in there):
            found.append(("scale", Norms((), scale.detach().to(torch.float32, copy=True).reshape(())), frozenset()))
        return found

    def answered(self, scaler: Any, optimizer: Any) -> None:
        """The scaler has stepped, or left the step out."""
        if not self._ours(optimizer):
            return
        self._looked.discard(id(optimizer))
        if id(optimizer) not in self._stepped and not capturing():
            with unseen():
                self._left_out(scaler, optimizer)

    def _left_out(self, scaler: Any, optimizer: Any) -> None:
        numbers = self.roster.held(optimizer)
        held, before, _ = self.gradients.at_the_step(numbers, False)
        scale = scaler._scale.detach().to(torch.float32, copy=True).reshape(())
        self._written.pop(id(optimizer), None)
        self.rounds.dropped(numbers)
        self.rounds.post.send(
            [scale, *(n.values for n in before)],
            functools.partial(self._take, self.rounds.number, [n.numbers for n in before], frozenset(held)),
        )

    def _take(self, step: int, numbers: list[tuple[int, ...]], held: frozenset[int], values: list[list[float]]) -> None:
        norms = {n: v for group, known in zip(numbers, values[1:]) for n, v in zip(group, known) if n in held}
        self.rounds.history.scales.add(step, values[0][0], True, norms)
