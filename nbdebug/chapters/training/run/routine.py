"""How the user's loop trains: which optimizer steps after which batch, and for how many batches one loss is told.

A loop may step once for several batches (accumulation), may step one of several optimizers now and another one later,
may tell its loss now and then only. What the watched run did, batch by batch, is done again in experiments. Whether
that is the same training is for `Bench.repeats` to say.
"""

from __future__ import annotations

import dataclasses
import inspect
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

NEAR = 0.15
"""Relative difference up to which a loss counts as divided by that number: dropout may draw otherwise."""
MORE = 0.05
"""Share of the batches that were read by which there may be more calls of backward. Fewer are no riddle: an evaluation
reads batches too."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda losses: losses[-1],
    "first": lambda losses: losses[0],
    "mean": statistics.fmean,
    "sum": sum,
}
"""What a loop may tell of several batches (or of several calls of a closure)."""


@dataclasses.dataclass(frozen=True)
class Routine:
    """stepped: for each batch, the optimizers by position that step behind its backward (empty: all, after each).
    told: for each loss that was told, the batches by then (empty: one each). share: what a loss is multiplied by before
    its backward. emptied: gradients are cleared before each batch, whoever has stepped; else where one has stepped.
    closure: the optimizer calls the loss itself. reduce: one of REDUCTIONS, and whether the share is in it."""

    stepped: tuple[tuple[int, ...], ...] = ()
    told: tuple[int, ...] = ()
    share: float = 1.0
    emptied: bool = False
    closure: bool = False
    reduce: str = "last"
    shared: bool = False

    def until(self, step: int) -> int:
        """How many batches there are by the end of this step, counted from 0."""
        return self.told[min(step, len(self.told) - 1)] if self.told else step + 1

    def steps_within(self, most: int, told: int) -> int:
        """How many losses are told of at most so many batches; `told` at most."""
        return sum(count <= most for count in self.told[:told]) if self.told else min(most, told)

    def stepping(self, batch: int, optimizers: int) -> Sequence[int]:
        """The optimizers that step behind this batch."""
        return self.stepped[batch] if batch < len(self.stepped) else range(optimizers)

    @property
    def every(self) -> int:
        """Batches for one step of the optimizer that steps most seldom, as a rule."""
        gaps = []
        for optimizer in {o for row in self.stepped for o in row}:
            at = [i for i, row in enumerate(self.stepped) if optimizer in row]
            gaps += [Counter(b - a for a, b in zip([-1, *at], at)).most_common(1)[0][0]] if at else []
        return max(gaps, default=1)

    def tell(self, losses: Sequence[float]) -> float:
        """What the loop would tell of these losses, one of each batch (or call) since it last told one."""
        return REDUCTIONS[self.reduce](losses) * (self.share if self.shared else 1.0)


def routine_of(
    stepped: Sequence[Sequence[int]], told: Sequence[int], read: int, optimizers: Sequence[Any], emptied: bool
) -> tuple[Routine | None, str]:
    """(the routine, "") or (None, why this loop can't be done again).

    stepped: for each call of backward, the optimizers that stepped behind it; told: calls of backward by each loss that
    was told; read: batches that were read by then (0: not known)."""
    if any(wants_closure(o) for o in optimizers):
        if len(optimizers) > 1:
            return None, (
                "one of several optimizers takes a closure: which loss it is given, and when the others "
                "step, only your own loop knows"
            )
        return Routine(closure=True), ""
    calls = told[-1] if told else 0
    if not calls:
        return Routine(), ""  # backward was called where nobody could see it
    if read and calls - read > 2 + MORE * read:
        several = (
            "several optimizers step on losses of their own"
            if len(optimizers) > 1
            else "a step is more than one batch and one backward"
        )
        return None, (
            f"your loop calls backward {calls:,} times for {read:,} batches: {several}, which only your own loop can do"
        )
    plain = tuple(range(len(optimizers)))
    if list(told) == list(range(1, len(told) + 1)) and all(tuple(sorted(row)) == plain for row in stepped[:calls]):
        return Routine(), ""
    if any(b <= a for a, b in zip([0, *told], told)):
        return None, "your loop tells its callback more losses than it calls backward"
    return Routine(tuple(tuple(row) for row in stepped[:calls]), tuple(told), emptied=emptied), ""


def wants_closure(optimizer: Any) -> bool:
    """LBFGS and the like, which call the loss themselves."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def share_of(root: float | None, loss: float, every: int) -> float:
    """What a loss was multiplied by, where `root` is what backward was given: 1, or one over the batches of a step."""
    if root is None or not loss or every < 2:
        return 1.0
    return 1 / every if abs(root / loss * every - 1) <= NEAR else 1.0
