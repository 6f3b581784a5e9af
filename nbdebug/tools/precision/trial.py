"""One training step, forward and backward, on a copy of the model: does it work, and how far off is it?

Every trial starts from the same random numbers, so that dropout and sampling are the same, and leaves the generators as
they were. The optimizer makes no step: what half precision does to a loss and its gradients is seen before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdebug.interrupts import Uninterrupted, undone_by, uninterrupted
from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.snapshot import random_sources
from nbdebug.observe.tensors import all_finite, plain_values


class OptimizerReached(BaseException):
    """The place where the optimizer would step: it ends the call of `loss_fn`. No Exception, so that no `except` of
    the user's catches it."""


class OwnStep:
    """Around one call of `loss_fn`. loss: the sum of what its backwards began with, without the scale; backward:
    whether it has called backward itself; scaler: the GradScaler that it has used."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.backward, self.scaler, self.loss = scale, False, None, 0.0
        self._engine = EngineWatch(self._began, self._ended)
        self._engine.thread = here = threading.get_ident()
        self._optimizers = OptimizerWatch(self._stepping, lambda optimizer: None, here)
        self._scaler_methods: dict[str, Any] = {}

    scaler: Any

    @undone_by("__exit__")
    def __enter__(self) -> OwnStep:
        self._engine.attach()
        self._optimizers.attach()
        kind: Any = torch.amp.GradScaler
        ours: dict[str, Callable[..., Any]] = {
            "scale": self._scaled,
            "unscale_": lambda scaler, optimizer: self.unscaling(optimizer),
            "step": self._step_of,
            "update": lambda scaler, *new: None,
            "get_scale": lambda scaler: self.scale,
        }
        for name, method in ours.items():
            self._scaler_methods[name] = getattr(kind, name)
            setattr(kind, name, _of_enabled(self._scaler_methods[name], method))
        return self

    @uninterrupted
    def __exit__(self, kind: Any = None, error: Any = None, traceback: Any = None) -> bool:
        for name, method in self._scaler_methods.items():
            setattr(torch.amp.GradScaler, name, method)
        self._optimizers.detach()
        self._engine.detach()
        return kind is OptimizerReached

    def _began(self, call: Backward) -> None:
        if call.accumulate:
            self.backward = True
            self.loss += sum(float(root.detach()) for root in call.roots if root.numel() == 1) / (
                1.0 if self.scaler is None else self.scale
            )

    def _ended(self, call: Backward, result: Any) -> None:
        if call.accumulate:
            self.backward_ended()

    def _scaled(self, scaler: Any, outputs: Any) -> Any:
        self.scaler = scaler
        return tree_map(lambda t: t * self.scale if isinstance(t, torch.Tensor) else t, outputs)

    def _step_of(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.unscaling(optimizer)
        self._stepping(optimizer, None)

    def _stepping(self, optimizer: Any, place: Any) -> None:
        self.stepping(optimizer)
        raise OptimizerReached

    def backward_ended(self) -> None:
        """A backward of the step has filled gradients."""

    def unscaling(self, optimizer: Any) -> None:
        """The scaler is to divide the gradients by its scale, explicitly or since it steps."""

    def stepping(self, optimizer: Any) -> None:
        """The optimizer is about to step."""


def _of_enabled(original: Callable, ours: Callable) -> Callable:
    """A scaler that is switched off stays as it is."""

    def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if scaler.is_enabled() else original)(scaler, *args, **kwargs)

    return method


@contextlib.contextmanager
def same_dropout() -> Iterator[None]:
    """Within, the same elements are dropped in every dtype. On a GPU the kernel draws other numbers for half precision
    than for float32, from the same seed: here all masks are drawn in float32. Attention's own dropout, which is part of
    its kernels, is left out there."""
    functional = nn.functional
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def masked(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: A002
        if not training or not p:
            return dropout(input, p, training, inplace)
        mask = dropout(torch.ones(input.shape, dtype=torch.float32, device=input.device), p).to(input.dtype)
        return input.mul_(mask) if inplace else input * mask

    def undropped(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **more: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, dropout_p * (query.device.type == "cpu"), *args, **more)

    functional.dropout, functional.scaled_dot_product_attention = masked, undropped
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention


@contextlib.contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Within, the user's model has no gradients: a step of its own could clear or use them. Then the same again."""
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in saved:
            parameter.grad = None
        yield
    finally:
        with Uninterrupted():
            for parameter, gradient in saved:
                parameter.grad = gradient


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
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


class HalfTrials:
    """Runs steps. loss_fn(model, batch) gives the loss of one batch, and may do backward and more itself, up to the
    optimizer's step (`own_step`); scale: the loss is multiplied by it before backward, and the norms are divided by it
    again. scaler: the GradScaler that loss_fn uses itself."""

    def __init__(self, loss_fn: Callable[[nn.Module, Any], torch.Tensor], batches: Sequence[Any]):
        self.loss_fn, self.batches = loss_fn, list(batches)
        self.scaler: Any = None
        self._random = [(write, read()) for _, read, write in random_sources()]

    @contextlib.contextmanager
    def same_numbers(self) -> Iterator[None]:
        """The random numbers that every trial starts with; afterwards, those that were next."""
        now = [(write, read()) for _, read, write in random_sources()]
        try:
            for write, state in self._random:
                write(state)
            yield
        finally:
            with Uninterrupted():
                for write, state in now:
                    write(state)

    def run(
        self,
        model: nn.Module,
        around: Callable[[], Any] = contextlib.nullcontext,
        scale: float = 1.0,
        backward: bool = True,
    ) -> TrialOutcome:
        """A step on this copy, within `around()`. What the user's code raises becomes `Outcome.error`. backward: else
        the forward alone, which fails where loss_fn runs backward itself."""
        losses: list[float] = []
        bad: dict[str, None] = {}
        norms: dict[str, float] = {}
        with self.same_numbers(), _measured_cost() as spent:
            for batch in self.batches:
                model.zero_grad(set_to_none=True)
                try:
                    losses.append(self._step(model, batch, around, scale, backward))
                except (RuntimeError, TypeError, ValueError, NotImplementedError) as raised:
                    return TrialOutcome((*losses, math.nan), error=f"{type(raised).__name__}: {str(raised)[:300]}")
                known = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
                bad.update(dict.fromkeys(n for n, g in known if not all_finite(g)))
                norms = {n: float(plain_values(g).norm(dtype=torch.float64)) / scale for n, g in known}
        model.zero_grad(set_to_none=True)
        return TrialOutcome(tuple(losses), tuple(bad), norms, spent["seconds"], spent["memory"])

    def _step(self, model: nn.Module, batch: Any, around: Callable[[], Any], scale: float, backward: bool) -> float:
        loss: Any = None
        with same_dropout():  # in backward, too: a checkpointed part runs again there
            with torch.set_grad_enabled(backward), OwnStep(scale) as own, around():
                loss = self.loss_fn(model, batch)
            self.scaler = self.scaler or own.scaler
            if own.backward:
                return own.loss
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(f"loss_fn gives a tensor with one element; it gave {type(loss).__name__}")
            if loss.requires_grad:
                (loss * (1.0 if own.scaler is not None else scale)).sum().backward()
        return float(loss.detach()) / (scale if own.scaler is not None else 1.0)


def off(outcome: TrialOutcome, reference: TrialOutcome) -> float:
    """How far the losses are from the reference's, relative; inf where the step failed or something is not finite."""
    if not outcome.finite:
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(outcome.losses, reference.losses))


def norm_off(outcome: TrialOutcome, reference: TrialOutcome) -> float:
    """How far the norm of all gradients is from the reference's, relative."""
    ours, theirs = (math.hypot(*o.norms.values()) for o in (outcome, reference))
    return abs(ours - theirs) / theirs if theirs > 0 else 0.0


@contextlib.contextmanager
def _measured_cost() -> Iterator[dict[str, Any]]:
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
