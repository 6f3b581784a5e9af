"""Bisection: two searches over expensive tests, for where a fault begins and for the smallest part that causes it.

    first_bad(lo, hi, test)   the first bad index, by halving: ceil(log2(n + 1)) tests
    ddmin(items, test)        a small part of the items that is bad by itself, of which nothing can be left out

A test is a function that returns True for "bad". Both searches call it as rarely as possible, because a test may be a
whole training step. Nothing here knows what is being searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")


def first_bad(lo: int, hi: int, test: Callable[[int], Any]) -> int:
    """The smallest i in [lo, hi) with test(i) true; `hi` when there is none.

    Takes at most ceil(log2(hi - lo + 1)) tests, and tests no index twice. `test` has to be monotone: every index after
    a bad one is bad. If it is not, the result is still a border that was tested: test(i) was true (or i is hi), and
    test(i - 1) was false (or i is lo). Raises TypeError or ValueError for bounds that are no whole numbers in order.
    """
    _check_callable(test)
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

    This is Zeller's delta debugging: try each part alone, then all but that part, with ever finer parts. It finds
    single culprits and culprits that only fail together; of several such sets it finds one. No part is tested twice.
    The empty part counts: if test([]) is true, no item is needed for the fault, and the result is [].
    Raises ValueError when test(items) is false: there is nothing to find.
    """
    pool, verdicts = list(items), {}
    _check_callable(test)

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
    """Cut `part` into pieces; go on with a bad piece, or with a bad rest without one piece; then cut finer."""
    count = 2
    while len(part) > 1:
        edges = [len(part) * k // count for k in range(count + 1)]
        pieces = [part[a:b] for a, b in itertools.pairwise(edges)]
        rests = (list(itertools.chain(*pieces[:k], *pieces[k + 1 :])) for k in range(count))
        if (smaller := next(filter(bad, pieces), None)) is not None:
            part, count = smaller, 2
        elif (smaller := next(filter(bad, rests), None)) is not None:
            part, count = smaller, max(count - 1, 2)
        elif count < len(part):
            count = min(2 * count, len(part))
        else:
            break
    return part


def _check_callable(test: Any) -> None:
    if not callable(test):
        raise TypeError(f"test must be a function that returns True for bad; got {test!r}")
