"""The smallest set that has to be kept, found with few tries. Nothing here knows what a module is.

A try asks `works(kept)`: does the step work when these units stay in float32 and all others run in half precision? It
is assumed that keeping more never hurts; then every answer about many units says something about each of them. The
search is group testing: units are run in half together, as many as work in every second case given what has been
found and cleared so far, and a group that fails is split in the same way until one culprit is left. A unit is kept
only where the step failed with it in half beside units that do no harm, so taking any one out of the answer fails:
those tries are the proof. Units that only fail together are found as well: which of them is kept then depends on the
order.

Measurements may have named suspects. If keeping these suffices, only they are searched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

FEW = {1: 0.5, 2: 0.3, 4: 0.1, 8: 0.05}
"""The prior of the number of culprits among units that are no suspects, before any try: a few, most likely one.
Every other number is taken to be `OTHER` as likely. Chosen so that tries for 1, 2, 4 and 8 of 64 are few at once: 8.2,
14.1, 24.0 and 38.4 on average, of which 1 + 6, 11, 19.3 and 32 are what there is to learn; the best choice of groups by
dynamic programming, with the same knowledge, needs 8.3, 14.0, 23.9 and 38.3."""
OTHER = 1e-4
LIKELY = (4.0, 5.0)
"""The prior of a suspect, as (culprits, units) of earlier cases."""
ALL_CLEAR = 0.35
"""With this probability that none of all that are left is a culprit, they are tried together."""


class SearchStopped(Exception):
    """Raised by a try when the time is up: the search then answers with the best that it has."""


@dataclasses.dataclass(frozen=True)
class Try:
    """One try: what was kept in float32, and whether the step worked."""

    kept: frozenset[str]
    worked: bool


@dataclasses.dataclass
class MinimalSetSearch:
    """Tries, each different one run once. spread: all that is kept along with a unit (a module's own modules), the
    unit itself included. best: the smallest kept set that is known to work. on_try: called after each try."""

    works: Callable[[frozenset[str]], bool]
    spread: Callable[[frozenset[str]], frozenset[str]] = frozenset
    on_try: Callable[[MinimalSetSearch], object] | None = None
    tries: list[Try] = dataclasses.field(default_factory=list)
    best: frozenset[str] | None = None

    def test(self, fp32: Iterable[str]) -> bool:
        """Whether the step works with these kept. What follows from an earlier try is not tried again."""
        key = frozenset(fp32)
        whole = self.spread(key)
        for known in self.tries:
            if known.worked and self.spread(known.kept) <= whole:
                return self._note_best(key)
            if not known.worked and whole <= self.spread(known.kept):
                return False
        worked = bool(self.works(key))
        self.tries.append(Try(key, worked))
        if worked:
            self._note_best(key)
        if self.on_try is not None:
            self.on_try(self)
        return worked

    def _note_best(self, fp32: frozenset[str]) -> bool:
        """This set works: keep it, if nothing smaller is known."""
        if self.best is None or self._size(fp32) < self._size(self.best):
            self.best = fp32
        return True

    def _size(self, fp32: frozenset[str]) -> tuple[int, int]:
        return len(self.spread(fp32)), len(fp32)

    def minimal(self) -> bool:
        """Whether the tries show that nothing can be taken out of the best set."""
        return self.best is not None and all(self.needed(unit) is not None for unit in self.best)

    def needed(self, unit: str) -> Try | None:
        """The failed try that shows that this unit of the best set can't be taken out."""
        rest = self.spread((self.best or frozenset()) - {unit})
        return next((t for t in self.tries if not t.worked and rest <= self.spread(t.kept)), None)


def smallest(
    search: MinimalSetSearch, units: Sequence[str], suspects: Sequence[str] = (), held: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Of `units`, those that have to be kept beside `held`; empty when none has. Keeping all of them is taken to work.

    At most about k log2(n / k) + 2 k tries for k culprits among n units, and k + 2 where the suspects are the culprits.
    A `SearchStopped` of a try passes; `search.best` then holds what is known.
    """
    if search.test(held):
        return frozenset()
    likely = [unit for unit in units if unit in set(suspects)]
    others = [unit for unit in units if unit not in set(suspects)]
    walk = _GroupTest(search, frozenset(units))
    if likely and search.test(held | frozenset(likely)):
        walk.harmless.update(others)
        return frozenset(walk.culprits(likely, held, Common(), True))
    culprits = walk.culprits(others, held | frozenset(likely), Rare(len(others)), True)
    return frozenset(culprits + walk.culprits(likely, held | frozenset(culprits), Common(), not culprits))


class Rare:
    """Units of which a few are culprits, nobody knows how many: a mixture over their number (`FEW`), any of them as
    likely as any other."""

    def __init__(self, count: int):
        self.count = count

    def clear(self, size: int, left: int, number: int) -> float:
        """How likely it is that none of `size` units is a culprit, where `left` are not known yet and `found` have been
        found among the others."""
        more = range(min(left, self.count - number) + 1)
        each = [math.log(FEW.get(number + d, OTHER)) - _ways(self.count, number + d) for d in more]
        top = max(weight + _ways(left, d) for d, weight in zip(more, each))
        whole = sum(math.exp(weight + _ways(left, d) - top) for d, weight in zip(more, each))
        none = (math.exp(weight + _ways(left - size, d) - top) for d, weight in zip(more, each) if d <= left - size)
        return sum(none) / whole


def _ways(units: int, chosen: int) -> float:
    """The logarithm of how many ways there are to choose so many of these units."""
    return math.lgamma(units + 1) - math.lgamma(chosen + 1) - math.lgamma(units - chosen + 1)


class Common:
    """Suspects: each may well be a culprit; the share among those known so far says how likely."""

    def __init__(self) -> None:
        self.count = 0

    def clear(self, size: int, left: int, number: int) -> float:
        self.count = max(self.count, left + number)
        tested = self.count - left
        return max(1 - (LIKELY[0] + number) / (LIKELY[1] + tested), 0.1) ** size


class _GroupTest:
    """Group testing among some units. harmless: those that do no harm in half together."""

    def __init__(self, search: MinimalSetSearch, units: frozenset[str]):
        self.search, self.units = search, units
        self.harmless: set[str] = set()

    def culprits(self, units: list[str], held: frozenset[str], prior: Rare | Common, known: bool) -> list[str]:
        """The culprits among `units`, with `held` kept. known: that all of them in half fail is known."""
        result: list[str] = []
        left = list(units)
        while left:
            size = len(left) if known else self._size(prior, len(left), len(result))
            group, rest = left[:size], left[size:]
            if not known and not self._fails(group, held):
                self.harmless.update(group)
                left = rest
                continue
            while len(group) > 1:
                part = self._part(prior, len(group), len(group) + len(rest), len(result))
                if self._fails(group[:part], held):
                    group, rest = group[:part], group[part:] + rest
                else:
                    self.harmless.update(group[:part])
                    group = group[part:]
            result.append(group[0])
            left, known = rest, False
        return result

    def _fails(self, group: Iterable[str], held: frozenset[str]) -> bool:
        return not self.search.test((self.units - self.harmless - frozenset(group)) | held)

    def _size(self, prior: Rare | Common, left: int, number: int) -> int:
        """How many units to run in half at once: as many as are free of culprits in every second case; or all."""
        if prior.clear(left, left, number) >= ALL_CLEAR:
            return left
        return _halving(lambda size: prior.clear(size, left, number), left)

    def _part(self, prior: Rare | Common, size: int, left: int, number: int) -> int:
        """How many of a group that is known to fail to run first: so that they fail in every second case."""
        none = prior.clear(size, left, number)
        if none >= 1:
            return size // 2
        return _halving(lambda part: (prior.clear(part, left, number) - none) / (1 - none), size - 1)


def _halving(clear: Callable[[int], float], most: int) -> int:
    """The size, of 1 to `most`, at which a likelihood that falls with the size is nearest to a half."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if clear(middle) > 0.5:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 1 and abs(clear(low - 1) - 0.5) <= abs(clear(low) - 0.5) else low


class Tree:
    """names: of all modules, the model itself being ""; called: those that the step has called; plain: those whose own
    code only calls their children one after the other (nn.Sequential)."""

    def __init__(self, names: Iterable[str], called: Iterable[str], plain: Iterable[str] = ()):
        self.names = list(dict.fromkeys(names))
        self.called, self.plain = set(called), set(plain)
        self._below: Mapping[str, frozenset[str]] = {
            name: frozenset(n for n in self.names if not name or n == name or n.startswith(name + "."))
            for name in self.names
        }

    def spread(self, names: frozenset[str]) -> frozenset[str]:
        """These modules and all that is in them."""
        return frozenset().union(*(self._below[name] for name in names)) if names else names

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.names.index))

    def children(self, name: str) -> list[str]:
        """The nearest modules below that the step calls: a ModuleList is never called, what is in it is."""
        result: list[str] = []
        for below in self.names:
            if (
                below != name
                and below in self._below[name]
                and below in self.called
                and not any(below in self._below[other] for other in result)
            ):
                result.append(below)
        return result

    def units(self) -> list[str]:
        """The innermost modules with code of their own, and the leaves that are in none of them."""
        inner = [
            name
            for name in self.names
            if name
            and name in self.called
            and name not in self.plain
            and (below := self.children(name))
            and not any(map(self.children, below))
        ]
        inside = self.spread(frozenset(inner))
        return [
            name
            for name in self.names
            if name in self.called and (name in inner or (name not in inside and not self.children(name)))
        ]

    def all_in(self, units: Iterable[str]) -> bool:
        """Whether everything is done in these units: then keeping all of them is keeping the whole model."""
        return self.called | {""} <= self.plain | self.spread(frozenset(units))


def search(tree: Tree, tries: MinimalSetSearch, suspects: Sequence[str], sure: Iterable[str] = ()) -> frozenset[str]:
    """The smallest set of modules to keep: empty when nothing has to be, {""} when only the whole model helps.

    suspects: what measurements point to, none inside another; sure: those of them that no children of theirs can stand
    in for."""
    if tries.test(()):
        return frozenset()
    if suspects and tries.test(suspects):
        return _finer(tree, tries, smallest(tries, list(suspects), suspects), set(sure))
    inside = tree.spread(frozenset(suspects))
    units = [*suspects, *(unit for unit in tree.units() if not tree.spread(frozenset({unit})) & inside)]
    units.sort(key=tree.names.index)
    if len(units) > 1 and (tree.all_in(units) or tries.test(units)):
        return _finer(tree, tries, smallest(tries, units, suspects), set(sure))
    tries.best = frozenset({""})
    return _finer(tree, tries, tries.best, set())


def _finer(tree: Tree, tries: MinimalSetSearch, fp32: frozenset[str], whole: set[str]) -> frozenset[str]:
    """Replace a kept module by those of its children that have to be kept, as far as that works: from the top."""
    todo = [name for name in tree.ordered(fp32) if name not in whole]
    while todo:
        parent = todo.pop(0)
        children, others = tree.children(parent), fp32 - {parent}
        if children and tries.test(others | frozenset(children)):
            needed = smallest(tries, children, held=others)
            fp32 = others | needed
            todo += tree.ordered(needed)
    return fp32
