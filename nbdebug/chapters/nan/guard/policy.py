"""What a guard is asked to do, checked where it is asked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

ON_TRIP = ("trace", "raise", "skip", "record")


@dataclasses.dataclass(frozen=True)
class Policy:
    """on_trip: one of ON_TRIP. max_grad_norm: gradients are clipped to this 2-norm. skip_above: a step whose norm is
    above this after clipping is dropped. keep: how many steps' numbers are kept at hand."""

    on_trip: str = "trace"
    max_grad_norm: float | None = None
    skip_above: float | None = None
    keep: int = 8

    def __post_init__(self) -> None:
        if self.on_trip not in ON_TRIP:
            raise ValueError(f"on_trip is one of {', '.join(ON_TRIP)}; got {self.on_trip!r}.")
        for name in ("max_grad_norm", "skip_above"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} is a norm, a number above 0; got {value!r}.")
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise ValueError(f"keep is a whole number of at least 1; got {self.keep!r}.")

    def clips(self, norm: float | None) -> bool:
        """Whether gradients of this norm are clipped."""
        return self.max_grad_norm is not None and norm is not None and norm > self.max_grad_norm

    def above(self, norm: float) -> bool:
        """Whether a step with this norm is dropped, clipped or not."""
        after = self.max_grad_norm if self.max_grad_norm is not None and self.clips(norm) else norm
        return self.skip_above is not None and after > self.skip_above

    @property
    def changes(self) -> bool:
        """Whether an update may be changed, or dropped while training goes on."""
        return self.max_grad_norm is not None or self.skip_above is not None or self.on_trip in ("skip", "record")

    @property
    def stops(self) -> bool:
        """Whether a bad step ends the run, or has to be looked at before it goes on."""
        return self.on_trip != "skip"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
