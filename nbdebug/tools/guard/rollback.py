"""Keep a bad update from parameters and buffers, where the optimizer can't be told on its device.

Known before the update: the gradients are withheld while it runs, since every optimizer leaves a parameter without a
gradient as it is. Known only after it: a copy is put back. That is so with a closure, which computes gradients inside
the step; with parameters in float16, where the update itself can divide by an eps that rounds to zero; and with a
learning rate that is not finite. Buffers are copied when a step begins, as the forward writes them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tape import Tape
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, gradients_of, largest, total_norm
from nbdebug.tools.guard.distributed import Ranks
from nbdebug.tools.guard.finite_check import CheckResult


class WithheldGradients:
    """An optimizer's gradients, taken away until `give_back`."""

    @uninterrupted
    def __init__(self, optimizer: torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None

    @uninterrupted
    def give_back(self) -> None:
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient


class UpdateBackup:
    """A copy of an optimizer's parameters and state, taken before its step. closure: the step computes gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Any):
        self.optimizer, self._closure, self.closure = optimizer, closure, closure is not None
        self.bad_ranks: tuple[int, ...] = ()
        self._before = Snapshot.take({}, {"optimizer": optimizer})

    @classmethod
    def if_needed(cls, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> UpdateBackup | None:
        """A copy where only the finished update can be judged, else None."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # a hook's args begin with the optimizer itself
        numbers = [v for group in optimizer.param_groups for v in group.values() if isinstance(v, float)]
        half = any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"])
        no_eps = any(group.get("eps") == 0 for group in optimizer.param_groups)  # nothing guards its division
        if closure is None and not half and not no_eps and all(map(math.isfinite, numbers)):
            return None
        if any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"]):  # a DTensor
            if closure is None:
                return None  # the gradients are checked before the update, as ever; its own arithmetic is not
            raise NotImplementedError("a closure with parameters that are sharded over processes is not watched")
        return cls(optimizer, closure)

    def judge(self, losses: list[torch.Tensor], ranks: Ranks | None) -> tuple[str, float | None, float | None]:
        """(what is not finite, "" if all is; the first loss and the last gradient norm where there is a closure)."""
        parameters = [
            p
            for g in self.optimizer.param_groups
            for p in g["params"]
            if dense(p) is not None and can_be_nonfinite(p) and p.numel()
        ]
        device = parameters[0].device if parameters else torch.device("cpu")
        zero, sizes = torch.zeros((), device=device), [x.to(device) for x in largest(parameters)]
        loss = losses[0].to(device, torch.float32) if self.closure and losses else zero
        gradients = gradients_of(self.optimizer)
        norm = total_norm(gradients, device) if ranks is None else ranks.own_norm(self.optimizer, gradients, device)
        bad = (~torch.isfinite(loss)).float()
        numbers = torch.stack([norm, zero, torch.stack([zero, *sizes]).sum(), loss, bad, bad, zero])
        result = CheckResult((numbers if ranks is None else ranks.combine(numbers)).tolist(), ranks, False)
        result.raise_if_left()
        self.bad_ranks = result.bad_ranks
        reason = "loss" if result.loss_bad else "" if math.isfinite(result.buffers) else "parameter"
        return reason, result.loss if self.closure and losses else None, result.norm

    def restore(self) -> None:
        """Parameters, their gradients and the optimizer's state as they were before the step."""
        self._before.restore()

    def move_to_host(self) -> None:
        """Give the device's memory back."""
        self._before.move_to_host()

    def redo(self) -> None:
        """Make the optimizer's step again; `restore` undoes it again."""
        self.optimizer.step(*([self._closure] if self.closure else []))


def restore_overwritten(tape: Tape, models: Iterable[nn.Module]) -> None:
    """Put back the parameters that the step's own code has made bad, as where it renormalizes them. Others stay: they
    may have been written at the end of the step before (targets that follow a model)."""
    with torch.no_grad():
        for parameter, before in tape.overwritten([p for model in models for p in model.parameters()]):
            if not all_finite(parameter):
                parameter.copy_(before)


@contextlib.contextmanager
def before_overwritten(tape: Tape, models: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the parameters that the step's own code writes to are as they were before that."""
    overwritten = tape.overwritten([p for model in models for p in model.parameters()])
    now = [parameter.clone() for parameter, _ in overwritten]
    for parameter, before in overwritten:
        parameter.copy_(before)
    try:
        yield
    finally:
        for (parameter, _), value in zip(overwritten, now, strict=True):
            parameter.copy_(value)


BufferCopies = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, int]]
"""By module and name: the buffer itself, a copy of it, and how often it had been written then."""
SMALL = 2**16
"""Elements up to which a copy costs less than to ask whether it is needed (256 kB in float32: some microseconds)."""


class BufferBackup:
    """Copies of buffers, taken when a step begins."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._modules = {id(m): m for model in models for m in model.modules() if m._buffers}
        self._copies: BufferCopies = {}
        self._masks: set[tuple[int, str]] = set()

    def note_masks(self) -> None:
        """Buffers that are not finite now are masks: no statistic can go bad there."""
        self._masks = {
            home
            for home, (buffer, *_) in self.take().items()
            if buffer.is_floating_point() and buffer.layout is torch.strided and not all_finite(buffer)
        }

    def take(self) -> BufferCopies:
        """The buffers as they are now."""
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for number, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is None or not _is_plain(buffer):
                    continue
                home = number, name
                known = self._copies.get(home)
                if known is None or known[0] is not buffer or _may_be_written(buffer, known[2]):
                    fresh[home] = buffer
        if fresh:
            copies = [torch.empty_like(b) for b in fresh.values()]
            with torch.no_grad():
                torch._foreach_copy_(copies, [b.detach() for b in fresh.values()])
            self._copies = self._copies | {
                home: (buffer, copy, buffer._version)
                for (home, buffer), copy in zip(fresh.items(), copies, strict=True)
            }
        return self._copies

    @uninterrupted
    def restore(self, copies: BufferCopies) -> None:
        """Put the buffers back, in place, bit for bit."""
        with torch.no_grad():
            for (number, name), (buffer, copy, _) in copies.items():
                self._modules[number]._buffers[name] = buffer
                buffer.detach().copy_(copy)

    def restore_where(self, dropped: torch.Tensor, copies: BufferCopies) -> None:
        """Put the buffers back where `dropped` (one bool on a device) is true. Nothing is read."""
        with torch.no_grad():
            for buffer, copy, version in copies.values():
                if _may_be_written(buffer, version):
                    buffer.detach().copy_(torch.where(dropped.to(buffer.device, non_blocking=True), copy, buffer))

    def written(self, copies: BufferCopies) -> list[torch.Tensor]:
        """The floating-point buffers that may have been written since they were copied."""
        return [
            b
            for home, (b, _, version) in copies.items()
            if home not in self._masks
            and b.is_floating_point()
            and b.numel()
            and (version != b._version or b.numel() <= SMALL)
        ]

    def became_nonfinite(self, copies: BufferCopies) -> bool:
        """Whether a buffer that was finite when it was copied is so no more. Reads each."""
        return any(
            all_finite(copy) and not all_finite(buffer)
            for buffer, copy, _ in copies.values()
            if buffer.is_floating_point()
        )


def _may_be_written(buffer: torch.Tensor, version: int) -> bool:
    return buffer.is_floating_point() or buffer.is_complex() or buffer.numel() <= SMALL or buffer._version != version


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether it has values of its own and torch counts how often they are written."""
    return buffer.layout is torch.strided and buffer.device.type != "meta" and not buffer.is_inference()
