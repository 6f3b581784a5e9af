"""What a watch is asked to do, checked where it is asked."""

from __future__ import annotations

import dataclasses


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
