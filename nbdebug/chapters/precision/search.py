"""The smallest set that has to be kept, found with few tries. Nothing here knows what a module is.

A try asks `works(kept)`: does the step work when these units stay in float32 and all others run in half precision? It
is assumed that keeping more never hurts; then every answer about many units says something about each of them. The
search is group testing: units are run in half together, more of them at once the rarer culprits have turned out to be,
and a group that fails is halved until one culprit is left. A unit is kept only where the step failed with it in half
beside units that do no harm, so taking any one out of the answer fails: those tries are the proof. Units that only
fail together are met as well: which of them is kept then depends on the order.

Measurements may have named suspects. If keeping these suffices, only they are searched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

RARE, COMMON = (0.5, 16.0), (4.0, 5.0)
"""What is thought of a unit before any try, as (culprits, units) seen: without a suspicion, and with one."""
SETTLED = 1.2
"""So few culprits expected among all that are left: they are tried together."""


class Stopped(Exception):
    """Raised by a try when the time is up: the search then answers with the best that it has."""


@dataclasses.dataclass(frozen=True)
class Try:
    """One try: what was kept in float32, and whether the step worked."""

    kept: frozenset[str]
    worked: bool


@dataclasses.dataclass
class Search:
    """Tries, each different one run once. spread: all that is kept along with a unit (a module's own modules), the
    unit itself included. best: the smallest kept set that is known to work. on_try: told after each try."""

    works: Callable[[frozenset[str]], bool]
    spread: Callable[[frozenset[str]], frozenset[str]] = frozenset
    on_try: Callable[[Search], object] | None = None
    tries: list[Try] = dataclasses.field(default_factory=list)
    best: frozenset[str] | None = None

    def ask(self, kept: Iterable[str]) -> bool:
        """Whether the step works with these kept. What follows from an earlier try is not tried again."""
        wanted = frozenset(kept)
        whole = self.spread(wanted)
        for known in self.tries:
            if known.worked and self.spread(known.kept) <= whole:
                return self._noted(wanted)
            if not known.worked and whole <= self.spread(known.kept):
                return False
        worked = bool(self.works(wanted))
        self.tries.append(Try(wanted, worked))
        if worked:
            self._noted(wanted)
        if self.on_try is not None:
            self.on_try(self)
        return worked

    def _noted(self, kept: frozenset[str]) -> bool:
        """This set works: remember it, if nothing smaller is known."""
        if self.best is None or self._size(kept) < self._size(self.best):
            self.best = kept
        return True

    def _size(self, kept: frozenset[str]) -> tuple[int, int]:
        return len(self.spread(kept)), len(kept)

    def minimal(self) -> bool:
        """Whether the tries show that nothing can be taken out of the best set."""
        return self.best is not None and all(self.needed(unit) is not None for unit in self.best)

    def needed(self, unit: str) -> Try | None:
        """The failed try that shows that this unit of the best set can't be taken out."""
        rest = self.spread((self.best or frozenset()) - {unit})
        return next((t for t in self.tries if not t.worked and rest <= self.spread(t.kept)), None)


def smallest(search: Search, units: Sequence[str], suspects: Sequence[str] = (),
             held: frozenset[str] = frozenset()) -> frozenset[str]:
    """Of `units`, those that have to be kept beside `held`; empty when none has. Keeping all of them is taken to work.

    At most about k log2(n / k) + 2 k tries for k culprits among n units, and k + 2 where the suspects are the culprits.
    A `Stopped` of a try passes; `search.best` then holds what is known.
    """
    if search.ask(held):
        return frozenset()
    likely = [unit for unit in units if unit in set(suspects)]
    others = [unit for unit in units if unit not in set(suspects)]
    walk = _Walk(search, frozenset(units))
    if likely and search.ask(held | frozenset(likely)):
        walk.harmless.update(others)
        return frozenset(walk.culprits(likely, held, COMMON, True))
    found = walk.culprits(others, held | frozenset(likely), RARE, True)
    return frozenset(found + walk.culprits(likely, held | frozenset(found), COMMON, not found))


class _Walk:
    """Group testing among some units. harmless: those that do no harm in half together."""

    def __init__(self, search: Search, units: frozenset[str]):
        self.search, self.units = search, units
        self.harmless: set[str] = set()

    def culprits(self, units: list[str], held: frozenset[str], prior: tuple[float, float], known: bool) -> list[str]:
        """The culprits among `units`, with `held` kept. known: that all of them in half fail is known."""
        found: list[str] = []
        left, cleared = list(units), 0
        while left:
            one = prior is RARE and len(found) == 1  # most often there is but one culprit: all others go together
            size = len(left) if known or one else _group(
                len(left), len(found) + prior[0], cleared + len(found) + prior[1])
            group, rest = left[:size], left[size:]
            if not known and not self._fails(group, held):
                self.harmless.update(group)
                cleared, left = cleared + len(group), rest
                continue
            while len(group) > 1:
                half = len(group) // 2
                if self._fails(group[:half], held):
                    group, rest = group[:half], group[half:] + rest
                else:
                    self.harmless.update(group[:half])
                    cleared, group = cleared + half, group[half:]
            found.append(group[0])
            left, known = rest, False
        return found

    def _fails(self, group: Iterable[str], held: frozenset[str]) -> bool:
        return not self.search.ask((self.units - self.harmless - frozenset(group)) | held)


def _group(left: int, culprits: float, seen: float) -> int:
    """How many units to run in half at once: as many as are free of culprits in every second case."""
    share = min(culprits / seen, 0.9)
    if share * left < SETTLED:
        return left
    return max(1, min(left, round(math.log(0.5) / math.log(1 - share))))
