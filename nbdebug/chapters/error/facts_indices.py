"""What an error about an index needs: what was indexed, how large it is, which entry goes beyond it, and where."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised
from nbdebug.chapters.error.facts_parts import Cure, Origin, Part
from nbdebug.finding import Where


@dataclasses.dataclass(frozen=True)
class Beyond:
    """The entries of an index that are out of range. value, place: of the first in memory; count of total entries;
    low, high: the least and the largest of all entries; values: the different bad ones, at most six. total is 0 where
    the index itself is not at hand (it stayed in a worker); value is then the first that would be too large."""

    value: int
    place: tuple[int, ...] = ()
    count: int = 1
    total: int = 1
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class IndexFacts:
    """kind: "embedding", "target" (class numbers of a loss), "tensor" (x[i], gather, index_select …), "one_hot",
    "negative" (bincount, one_hot), "sequence" (list, tuple, array, data set), "random" (an empty range).

    table: what is indexed, as the user would write it; module: the path of the module that owns it; size: how many
    entries it has; dim: along which dimension; least: the lowest index that is allowed. index: the tensor of indices;
    key: the text of an index that is no tensor. head: the module that makes the scores of a loss, or what a data set's
    `__len__` returns; sample: which sample it was asked for, where that is not the key; data_set: its name; promised:
    how many samples its loader was told that it has; fits: what `__len__` should return. counted: the text of the
    `arange` that made the index (a position); along: the tensor whose length that counts. vocabulary: a dict of the
    user's that has more entries. grown, shifted, ignored: cures that were tried (a larger table, classes from 0, the
    label left out). late: the line that showed it, where a card said so only later than at the line of `raised`.
    """

    raised: Raised
    kind: str
    table: str = ""
    module: str = ""
    size: int | None = None
    dim: int | None = None
    least: int = 0
    shape: tuple[int, ...] = ()
    index: Part | None = None
    key: str = ""
    beyond: Beyond | None = None
    head: str = ""
    sample: str = ""
    data_set: str = ""
    promised: int | None = None
    fits: str = ""
    counted: str = ""
    along: str = ""
    vocabulary: tuple[str, int] | None = None
    width: int | None = None
    origin: Origin | None = None
    grown: Cure | None = None
    shifted: Cure | None = None
    ignored: Cure | None = None
    late: Where | None = None
