"""Two searches over tests that cost something: where a fault begins, and what it needs.

    first_bad(lo, hi, test)   the first index at which the test says "bad", by halving: ceil(log2(n + 1)) tests
    ddmin(items, test)        a small part of the items that is bad by itself, of which nothing can be left out

A test is a function that answers True for "bad". Both searches run it as rarely as they can, because a test may be a
whole training step; wrap it in `Counted` to see how often it ran. Nothing here knows what is being searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


class CallCounter:
    """A test that counts its calls.

    >>> test = Counted(lambda i: i >= 3)
    >>> first_bad(0, 8, test), test.calls
    (3, 3)
    """

    def __init__(self, test: Callable[[Any], Any]) -> None:
        self.test, self.calls = _callable(test), 0

    def __call__(self, argument: Any) -> bool:
        self.calls += 1
        return bool(self.test(argument))


def first_bad(lo: int, hi: int, test: Callable[[int], Any]) -> int:
    """The smallest i in [lo, hi) with test(i) true; `hi` when there is none.

    Takes at most ceil(log2(hi - lo + 1)) tests, and tests no index twice. `test` has to be monotone: once bad, bad ever
    after. If it is not, the answer is still a border that was seen: test(i) was true there (or i is hi), and
    test(i - 1) was false (or i is lo).
    """
    _callable(test)
    for name, value in (("lo", lo), ("hi", hi)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"first_bad takes whole numbers; got {name}={value!r}")
    if lo > hi:
        raise ValueError(f"first_bad searches [lo, hi), so lo must not be above hi; got lo={lo}, hi={hi}")
    while lo < hi:
        middle = (lo + hi) // 2
        if test(middle):
            hi = middle
        else:
            lo = middle + 1
    return hi


def ddmin(items: Iterable[Item], test: Callable[[list[Item]], Any]) -> list[Item]:
    """A part of the items, in their order, for which test(part) is true and leaving out any one of them makes it false.

    This is Zeller's delta debugging: try one part alone, then all but one part, with ever finer parts. It finds single
    culprits and culprits that only fail together; where several sets would do, it finds one. No part is tested twice.
    The empty part counts: if test([]) is true the items are not to blame, and the answer is [].
    Raises ValueError when test(items) is false: there is nothing to find.
    """
    pool, verdicts = list(items), {}
    _callable(test)

    def bad(part: list[int]) -> bool:
        key = tuple(part)
        if key not in verdicts:
            verdicts[key] = bool(test([pool[i] for i in part]))
        return verdicts[key]

    whole = list(range(len(pool)))
    if not bad(whole):
        raise ValueError(f"ddmin needs a test that is true for all {len(pool)} items together; it is false for them")
    return [] if bad([]) else [pool[i] for i in _shrink(whole, bad)]


def _shrink(part: list[int], bad: Callable[[list[int]], bool]) -> list[int]:
    """Cut `part` into pieces; keep a piece, or what is left without one, as long as it is bad; then cut finer."""
    pieces = 2
    while len(part) > 1:
        cut = _cut(part, pieces)
        if (smaller := next(filter(bad, cut), None)) is not None:
            part, pieces = smaller, 2
        elif (smaller := next(filter(bad, _without_each(cut)), None)) is not None:
            part, pieces = smaller, max(pieces - 1, 2)
        elif pieces < len(part):
            pieces = min(2 * pieces, len(part))
        else:
            break
    return part


def _cut(part: list[int], pieces: int) -> list[list[int]]:
    """`part` in so many pieces of nearly the same length."""
    edges = [len(part) * k // pieces for k in range(pieces + 1)]
    return [part[a:b] for a, b in itertools.pairwise(edges)]


def _without_each(cut: list[list[int]]) -> Iterator[list[int]]:
    """All pieces joined but one, for each of them."""
    for left_out in range(len(cut)):
        yield list(itertools.chain(*cut[:left_out], *cut[left_out + 1 :]))


def _callable(test: Any) -> Any:
    """The test, if it is one."""
    if not callable(test):
        raise TypeError(f"test must be a function that answers True for bad; got {test!r}")
    return test
