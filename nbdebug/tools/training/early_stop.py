"""EarlyStop: end a loop of one's own where the validation loss has stopped falling, with the best weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch


class EarlyStop:
    """Says when a training of your own should end.

        stop = nbdebug.EarlyStop(patience=5, min_delta=1e-3, model=model)
        for epoch in range(100):
            train_epoch()
            if stop(validate()):
                break
        stop.restore()  # the weights of the best validation

    patience: validations in a row without an improvement after which it stops; min_delta: what counts as one, in the
    value's own unit; better: "lower" (a loss) or "higher" (a score). model: a copy of its state dict is kept at each
    improvement. A value that is not finite is no improvement. Give it the unsmoothed validation loss in eval mode: one
    of a smoothed loss has a floor above zero. `state_dict` and `load_state_dict` let it go on from a checkpoint. Raises
    ValueError for a patience below 1 or a negative min_delta. Defaults: Keras and Lightning have no common ones;
    patience 5 and 0.001 are those of this project's founding documents.
    """

    def __init__(
        self, patience: int = 5, min_delta: float = 1e-3, *, better: str = "lower", model: torch.nn.Module | None = None
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ValueError(f"EarlyStop takes a patience from 1 and a min_delta from 0; got {patience}, {min_delta}")
        if better not in ("lower", "higher"):
            raise ValueError(f'better takes "lower" or "higher"; got {better!r}')
        self.patience, self.min_delta, self.better, self.model = patience, min_delta, better, model
        self.best: float | None = None
        self.best_at, self.count, self.stopped_at = 0, 0, None
        self._weights: dict[str, Any] | None = None

    best_at: int
    """The validation of the best value, from 0."""
    count: int
    """Validations so far."""
    stopped_at: int | None
    """The validation at which it said to stop, from 0; None: not yet."""

    def __call__(self, value: float | torch.Tensor) -> bool:
        """Take the value of one validation; True says: stop."""
        number = float(value)
        sign = 1.0 if self.better == "lower" else -1.0
        if math.isfinite(number) and (self.best is None or sign * (self.best - number) > self.min_delta):
            self.best, self.best_at = number, self.count
            if self.model is not None:
                self._weights = {name: _copy(part) for name, part in self.model.state_dict().items()}
        waited = self.count - self.best_at if self.best is not None else self.count + 1
        self.count += 1
        if waited >= self.patience and self.stopped_at is None:
            self.stopped_at = self.count - 1
        return waited >= self.patience

    def restore(self) -> None:
        """Load the weights of the best validation into the model. Raises RuntimeError where none were kept."""
        if self.model is None or self._weights is None:
            raise RuntimeError("no weights were kept: give EarlyStop the model, and a finite value")
        self.model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_at", "count", "stopped_at")
        return {**{name: getattr(self, name) for name in names}, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("best", "best_at", "count", "stopped_at"):
            setattr(self, name, state[name])
        self._weights = state["weights"]

    @classmethod
    def of(
        cls, values: Iterable[float], patience: int = 5, min_delta: float = 1e-3, better: str = "lower"
    ) -> EarlyStop:
        """What it would have said of validations that are over: `EarlyStop.of(history).stopped_at`."""
        stop = cls(patience, min_delta, better=better)
        for value in values:
            if stop(value):
                break
        return stop

    def __repr__(self) -> str:
        best = "no finite value yet" if self.best is None else f"best {self.best:.4g} at validation {self.best_at}"
        end = "" if self.stopped_at is None else f", stopped at {self.stopped_at}"
        return f"EarlyStop({best}{end}, patience {self.patience}, min_delta {self.min_delta:g})"


def _copy(part: Any) -> Any:
    return part.detach().clone() if isinstance(part, torch.Tensor) else part
