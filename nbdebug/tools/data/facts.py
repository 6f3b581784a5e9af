"""The problems of a data set as plain values: what was measured of each item, and what the set is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """One item with one problem. code: as in the catalogue; item: a path below the root, a folder, `table.csv#row` or
    `table.csv#column`, or the number of a row; detail: what was measured, in a few words; file: the picture that shows
    it, a whole path, or ""; guess: by the majority alone, so that any other problem of the item comes first."""

    code: str
    item: str | int
    detail: str
    file: str = ""
    guess: bool = False


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """All problems of a set, one for each item. root: the folder, "" in memory; total: how many items were looked at,
    by kind ("picture", "row" …); expected: the fields that the user gave."""

    problems: tuple[Problem, ...] = ()
    root: str = ""
    total: Mapping[str, int] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, code: str) -> list[Problem]:
        return [problem for problem in self.problems if problem.code == code]


def first_of_each(problems: Iterator[Problem], order: Mapping[str, int]) -> tuple[Problem, ...]:
    """One problem for each item: that whose code comes first in the order of the catalogue."""
    best: dict[str | int, Problem] = {}
    for problem in problems:
        known = best.get(problem.item)
        if known is None or (problem.guess, order[problem.code]) < (known.guess, order[known.code]):
            best[problem.item] = problem
    return tuple(best.values())
