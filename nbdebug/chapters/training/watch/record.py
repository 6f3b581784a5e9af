"""A record of losses as the loss watch reads it: steps, losses, validation losses, learning rates. Plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdebug.chapters.training.watch.robust import blocks, noise


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a record of losses shows. kind: one of KINDS; step: the user's step at which it began; said: a sentence with
    the number that shows it; evidence: the numbers."""

    kind: str
    step: int
    said: str
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


KINDS = ("nan", "zero", "spike", "divergence", "plateau", "oscillation", "gap")


@dataclasses.dataclass(frozen=True)
class Record:
    """steps and values: the finite training losses, in order; bad: those that are not finite; validation: (step, loss),
    finite; rates: the learning rate at each of steps, or empty where it is not known."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    bad: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, losses: Iterable[Sequence[Any]], rates: Mapping[int, float] | Iterable[float] | None = None) -> Record:
        """losses: (step, loss) or (step, loss, validation loss or None) in order; a loss may be None, where a step has
        a validation loss only. rates: by step, or one for each entry of losses. Raises ValueError for anything else."""
        rows = [_row(row) for row in losses]
        given = _rates(rates, rows)
        known = [(step, value, rate) for (step, value, _), rate in zip(rows, given) if value is not None]
        good = [row for row in known if math.isfinite(row[1])]
        whole = bool(good) and all(rate is not None for _, _, rate in good)
        return cls(
            tuple(s for s, _, _ in good),
            tuple(v for _, v, _ in good),
            tuple((s, v) for s, v, _ in known if not math.isfinite(v)),
            tuple((s, v) for s, _, v in rows if v is not None and math.isfinite(v)),
            tuple(rate for _, _, rate in good if rate is not None) if whole else (),
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def start(self) -> float:
        """The loss at the start: the median of the first few, of a twentieth of the record at most."""
        return statistics.median(self.values[: min(5, max(1, len(self) // 20))])

    @property
    def end(self) -> float:
        """The median of the last twentieth, of three at least."""
        return statistics.median(self.values[-max(3, len(self) // 20) :])

    @property
    def noise(self) -> float:
        """The standard deviation of one loss around its trend, over the last half."""
        return noise(self.values[len(self) // 2 :])

    def parts(self) -> list[float]:
        """Block medians of the whole record."""
        return blocks(self.values)

    def rate_moved(self, first: int, last: int, up: bool) -> bool:
        """Whether the learning rate rose (up: to 1.5 times, a restart) or fell (to a tenth of its largest, a decay)
        within these places; False where it is not known."""
        if not self.rates:
            return False
        window = self.rates[max(0, first) : last + 1]
        if up:
            return any(b > 1.5 * a for a, b in itertools.pairwise(window)) or window[-1] > 1.5 * window[0]
        return statistics.median(window) <= 0.1 * max(self.rates)


def _row(row: Sequence[Any]) -> tuple[int, float | None, float | None]:
    if not isinstance(row, (tuple, list)) or not 2 <= len(row) <= 3:
        raise ValueError(f"losses are (step, loss) or (step, loss, validation loss); got {str(row)[:80]}")
    step, value, validation = (*row, None)[:3]
    return int(step), None if value is None else float(value), None if validation is None else float(validation)


def _rates(rates: Mapping[int, float] | Iterable[float] | None, rows: list[Any]) -> list[float | None]:
    if rates is None:
        return [None] * len(rows)
    if isinstance(rates, Mapping):
        return [rates.get(step) for step, _, _ in rows]
    given = list(rates)
    if len(given) != len(rows):
        raise ValueError(f"rates are one for each loss ({len(rows)}), or a dict by step; got {len(given)}")
    return [float(rate) for rate in given]
