"""The names that lead to a storage, and which of them is its owner: the first in the order of facts.KINDS."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from nbdebug.chapters.memory.facts import KINDS, NOWHERE
from nbdebug.chapters.memory.holding.storages import Piece
from nbdebug.finding import Where

RANK = {kind: rank for rank, kind in enumerate(KINDS)}


class Claim(NamedTuple):
    """A name that leads to a storage: `head`, and `tail`, which stays behind whatever is written further: "x[0]" and
    " in step, line 3". root: the variable, the output or the function that it begins with."""

    kind: str
    head: str
    root: str
    where: Where = NOWHERE
    tail: str = ""

    @property
    def name(self) -> str:
        return self.head + self.tail

    def then(self, path: str) -> Claim:
        """The claim on a part."""
        return Claim(self.kind, self.head + path, self.root, self.where, self.tail)

    def of(self, kind: str) -> Claim:
        """The claim as one of this kind. What only an output, a traceback or a graph leads to stays theirs."""
        if self.kind in ("cell output", "traceback", "graph"):
            return self
        return Claim(kind, self.head, self.root, self.where, self.tail)


@dataclasses.dataclass
class Owned:
    """A storage: as the one of its tensors with a name shows it that shows most, its owner, and other names."""

    piece: Piece
    claim: Claim | None = None
    also: list[str] = dataclasses.field(default_factory=list)

    def claimed(self, claim: Claim) -> None:
        """One more name that leads here. That a graph holds a weight as well is not worth telling."""
        mine = self.claim
        if mine is None:
            self.claim = claim
            return
        if RANK[claim.kind] < RANK[mine.kind]:
            self.claim, claim, mine = claim, mine, claim
        known = claim.name == mine.name or claim.name in self.also
        if not known and len(self.also) < 3 and (claim.kind != "graph" or RANK[mine.kind] >= RANK["variable"]):
            self.also.append(claim.name)
