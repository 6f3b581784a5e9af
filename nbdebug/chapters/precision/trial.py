"""One training step, forward and backward, on a copy of the model: did it work, and how far off was it?

Every trial starts from the same random numbers, so that dropout and sampling are the same, and leaves the generators as
it found them. The optimizer makes no step: what half precision does to a loss and its gradients is seen before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.precision.own_step import OwnStep
from nbdebug.observe.state import sources
from nbdebug.observe.tensors import all_finite


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one step came to, over all batches. losses: one for each batch; bad: parameters whose gradient is not
    finite; norms: 2-norm of each gradient of the last batch, by parameter; seconds: of all batches; memory: peak bytes
    above what was held before, on an accelerator; error: what the step raised, or ""."""

    losses: tuple[float, ...]
    bad: tuple[str, ...] = ()
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    memory: int | None = None
    error: str = ""

    @property
    def finite(self) -> bool:
        return not self.error and not self.bad and all(map(math.isfinite, self.losses))


class Trials:
    """Runs steps. loss_fn(model, batch) gives the loss of one batch, and may do backward and more itself, up to the
    optimizer's step (`own_step`); scale: the loss is multiplied by it before backward, and the norms are divided by it
    again. scaler: the GradScaler that loss_fn uses itself."""

    def __init__(self, loss_fn: Callable[[nn.Module, Any], torch.Tensor], batches: Sequence[Any]):
        self.loss_fn, self.batches = loss_fn, list(batches)
        self.scaler: Any = None
        self._random = [(write, read()) for _, read, write in sources()]

    @contextlib.contextmanager
    def same_numbers(self) -> Iterator[None]:
        """The random numbers that every trial starts with; afterwards, those that were next."""
        now = [(write, read()) for _, read, write in sources()]
        for write, state in self._random:
            write(state)
        try:
            yield
        finally:
            for write, state in now:
                write(state)

    def run(self, model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext, scale: float = 1.0) -> Outcome:
        """A step on this copy, within `around()`. What the user's code raises becomes `Outcome.error`."""
        losses: list[float] = []
        bad: dict[str, None] = {}
        norms: dict[str, float] = {}
        with self.same_numbers(), _measured() as spent:
            for batch in self.batches:
                model.zero_grad(set_to_none=True)
                try:
                    losses.append(self._step(model, batch, around, scale))
                except (RuntimeError, TypeError, ValueError, NotImplementedError) as raised:
                    return Outcome((*losses, math.nan), error=f"{type(raised).__name__}: {str(raised)[:300]}")
                known = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
                bad.update(dict.fromkeys(n for n, g in known if not all_finite(g)))
                norms = {n: float(_plain(g).norm(dtype=torch.float64)) / scale for n, g in known}
        model.zero_grad(set_to_none=True)
        return Outcome(tuple(losses), tuple(bad), norms, spent["seconds"], spent["memory"])

    def _step(self, model: nn.Module, batch: Any, around: Callable[[], Any], scale: float) -> float:
        loss: Any = None
        with torch.enable_grad(), OwnStep(scale) as own, around():
            loss = self.loss_fn(model, batch)
        self.scaler = self.scaler or own.scaler
        if own.backward:
            return own.loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"loss_fn gives a tensor with one element; it gave {type(loss).__name__}")
        if loss.requires_grad:
            (loss * (1.0 if own.scaler is not None else scale)).sum().backward()
        return float(loss.detach()) / (scale if own.scaler is not None else 1.0)


def off(outcome: Outcome, reference: Outcome) -> float:
    """How far the losses are from the reference's, relative; inf where the step failed or something is not finite."""
    if not outcome.finite:
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(outcome.losses, reference.losses))


def norm_off(outcome: Outcome, reference: Outcome) -> float:
    """How far the norm of all gradients is from the reference's, relative."""
    ours, theirs = (math.hypot(*o.norms.values()) for o in (outcome, reference))
    return abs(ours - theirs) / theirs if theirs > 0 else 0.0


@contextlib.contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    spent: dict[str, Any] = {"seconds": 0.0, "memory": None}
    on_card = torch.cuda.is_available() and torch.cuda.is_initialized()
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    began = time.perf_counter()
    try:
        yield spent
    finally:
        if on_card:
            torch.cuda.synchronize()
            spent["memory"] = torch.cuda.max_memory_allocated() - held
        spent["seconds"] = time.perf_counter() - began


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
