"""One step while it runs: what was seen of it, and what it takes to undo it."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch

from nbdebug.chapters.nan.guard.buffers import Kept
from nbdebug.chapters.nan.guard.lines import StepLine
from nbdebug.chapters.nan.guard.numbers import Numbers
from nbdebug.observe.tape import Tape
from nbdebug.observe.tensors import can_be_bad, dense, largest


@dataclasses.dataclass
class Step:
    """number: 0-based. losses: one number for each root of backward, on its device. buffers: as they were before.
    settings: the optimizers' hyperparameters then; fresh: those that had no state. stepped: optimizers that are done.
    judged: how many of the losses an optimizer's step has been judged by. reads: what has been asked of the device and
    not read yet."""

    number: int
    buffers: Kept
    tape: Tape
    settings: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    fresh: set[int] = dataclasses.field(default_factory=set)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    judged: int = 0
    stepped: set[int] = dataclasses.field(default_factory=set)
    loss: float | None = None
    norm: float | None = None
    clipped: bool = False
    outcome: str = "ok"
    lr: float | None = None
    reads: list[Any] = dataclasses.field(default_factory=list)
    bad_ranks: tuple[int, ...] = ()

    def note_loss(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Remember what backward starts from, as numbers that stay on their device."""
        for root in roots:
            values = dense(root)
            if values is None or not can_be_bad(values) or not values.numel():
                continue
            one = values.numel() == 1 and not values.is_complex()
            value = values.detach().reshape(()).to(torch.float32) if one else largest([values])[0]
            self.losses.append(value)

    def note_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer's hyperparameters, and whether it has any state yet."""
        self.settings[id(optimizer)] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if not optimizer.state:
            self.fresh.add(id(optimizer))
        lr = optimizer.param_groups[0].get("lr")
        if self.lr is None and isinstance(lr, (int, float)):
            self.lr = float(lr)

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's hyperparameters as they were before this step; no state where it had none."""
        for group, before in zip(optimizer.param_groups, self.settings.get(id(optimizer), []), strict=False):
            group.update(before)
        if id(optimizer) in self.fresh:
            optimizer.state.clear()

    def take_down(self, numbers: Numbers) -> None:
        """What a look has told. Of several optimizers the norms are joined; a look holds the losses of all so far."""
        self.loss = numbers.loss if self.losses else None
        self.norm = numbers.norm if self.norm is None else math.hypot(self.norm, numbers.norm)
        self.bad_ranks = numbers.bad_ranks

    def line(self) -> StepLine:
        """The step in numbers."""
        return StepLine(self.number, self.loss, self.norm, self.clipped, self.outcome, self.lr, time.time())
