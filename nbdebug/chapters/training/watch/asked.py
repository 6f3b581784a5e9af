"""What a watch is asked to do and told, checked where it is asked and told. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Pace:
    """In steps: every: between measurements of gradients; ratios_every: of updates; activations_every: of units (0:
    never); keep: how many steps are kept whole."""

    every: int = 1
    ratios_every: int = 10
    activations_every: int = 10
    keep: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = {"every": 1, "keep": 10}.get(field.name, 0)
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name} is a whole number of steps, {least} or more; got {value!r}.")


def loss_of(value: Any) -> float:
    """A loss told by hand, a number or a tensor, as a number. Raises TypeError for what is none."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a loss is a number or a tensor of one; got {str(value)[:80]}.") from None
