"""Two ways to keep a bad update from the parameters, where the optimizer can't be told on its device.

Known before the update: the gradients are taken away for its length, since every optimizer leaves a parameter without a
gradient as it is. Known only after it: a copy is put back. That is so with a closure, which computes gradients inside
the step; with parameters in float16, where the update itself can divide by an eps that rounds to zero; and with a
learning rate that is not finite.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nbdebug.chapters.nan.guard.norms import gradients_of, total_norm
from nbdebug.chapters.nan.guard.numbers import Numbers
from nbdebug.chapters.nan.guard.ranks import Ranks
from nbdebug.observe.state import Snapshot
from nbdebug.observe.tensors import can_be_bad, dense, largest


class Aside:
    """An optimizer's gradients, taken away until `give_back`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._held = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None

    def give_back(self) -> None:
        for parameter, gradient in self._held:
            if parameter.grad is None:
                parameter.grad = gradient


class Undo:
    """A copy of an optimizer's parameters and state, taken before its step. closure: the step computes gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Any):
        self.optimizer, self._closure, self.closure = optimizer, closure, closure is not None
        self.bad_ranks: tuple[int, ...] = ()
        self._before = Snapshot.take({}, {"optimizer": optimizer})

    @classmethod
    def needed(cls, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> Undo | None:
        """A copy where only the finished update can be judged, else None."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # a hook's args begin with the optimizer itself
        numbers = [v for group in optimizer.param_groups for v in group.values() if isinstance(v, float)]
        half = any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"])
        bare = any(group.get("eps") == 0 for group in optimizer.param_groups)  # nothing guards its division
        if closure is None and not half and not bare and all(map(math.isfinite, numbers)):
            return None
        if any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"]):  # a DTensor
            if closure is None:
                return None  # the gradients are looked at before the update, as ever; its own arithmetic is not
            raise NotImplementedError("a closure, with parameters that are spread over processes, is not watched")
        return cls(optimizer, closure)

    def judge(self, losses: list[torch.Tensor], ranks: Ranks | None) -> tuple[str, float | None, float | None]:
        """(what is not finite, "" if all is; the first loss and the last gradient norm where there is a closure)."""
        parameters = [
            p
            for g in self.optimizer.param_groups
            for p in g["params"]
            if dense(p) is not None and can_be_bad(p) and p.numel()
        ]
        device = parameters[0].device if parameters else torch.device("cpu")
        zero, sizes = torch.zeros((), device=device), [x.to(device) for x in largest(parameters)]
        loss = losses[0].to(device) if self.closure and losses else zero
        gradients = gradients_of(self.optimizer)
        norm = total_norm(gradients, device) if ranks is None else ranks.own_norm(self.optimizer, gradients, device)
        bad = (~torch.isfinite(loss)).float()
        told = torch.stack([norm, zero, torch.stack([zero, *sizes]).sum(), loss, bad, bad, zero])
        numbers = Numbers((told if ranks is None else ranks.agreed(told)).tolist(), ranks, False)
        numbers.check()
        self.bad_ranks = numbers.bad_ranks
        seen = numbers.loss if self.closure and losses else None
        if numbers.loss_bad:
            return "loss", seen, numbers.norm
        return "" if math.isfinite(numbers.buffers) else "parameter", seen, numbers.norm

    def restore(self) -> None:
        """Parameters, their gradients and the optimizer's state as they were before the step."""
        self._before.restore()

    def redo(self) -> None:
        """Make the optimizer's step again; `restore` undoes it again."""
        self.optimizer.step(*([self._closure] if self.closure else []))
