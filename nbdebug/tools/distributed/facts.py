"""What the ranks wrote down, as plain data: calls in order, marks passed, and further events by their kind.

An event is a dict with its kind under "k". Files write one as a line of JSON; tests write them by hand.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = tuple[str, int, str]
"""File, line, function."""


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """One call in one group. n: its number in the group, from 0; lines: the user's, from the inside out; at: how many
    marks the rank had passed; root: source, target or reduction, where the call names one."""

    n: int
    group: str
    op: str
    shape: str = ""
    dtype: str = ""
    root: str = ""
    lines: tuple[Line, ...] = ()
    at: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.op, self.shape, self.dtype, self.root

    def __str__(self) -> str:
        """ "all_reduce of float32 [4, 2]"."""
        return (
            f"{self.op}{f' of {self.dtype} {self.shape}' if self.shape else ''}{f' ({self.root})' if self.root else ''}"
        )


@dataclasses.dataclass(frozen=True)
class Place:
    """A marked place of the source. kind: "arm" or "loop"; line: of its head; first, last: lines of its body."""

    number: int
    kind: str
    file: str
    line: int
    first: int
    last: int

    def holds(self, line: Sequence[Any]) -> bool:
        return line[0] == self.file and self.first <= line[1] <= self.last


class RankLog:
    """What one rank did. events: kind → in order; trail: numbers of marks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: dict[str, list[CollectiveCall]] = collections.defaultdict(list)
        self.members: dict[str, tuple[int, ...]] = {}
        self.trail: list[int] = []
        self.events: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self.last: CollectiveCall | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        self.trail += event.get("m", ())
        if event["k"] == "call":
            group = event.get("g", "0")
            lines = tuple((str(file), int(line), str(name)) for file, line, name in event.get("lines", ()))
            op, shape, dtype, root = (str(event.get(name, "")) for name in ("op", "shape", "dtype", "root"))
            number = len(self.calls[group])
            self.last = CollectiveCall(number, group, op, shape, dtype, root, lines, len(self.trail))
            self.calls[group].append(self.last)
            if "ranks" in event:
                self.members[group] = tuple(event["ranks"])
        else:
            self.events[event["k"]].append({**event, "at": len(self.trail)})

    def one(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind."""
        return self.events[kind][-1] if self.events.get(kind) else None

    def has_left(self, group: str) -> bool:
        """Whether it ended without an error, or gave up the group: it will never call again there."""
        return self.one("end") is not None or any(e.get("g", "0") in (group, "all") for e in self.events["destroy"])


@dataclasses.dataclass
class RanksFacts:
    """The logs of all ranks. launched: how many processes were; sources: file → text; output: what the processes
    printed, its end; over: no process is left, or all have ended."""

    launched: int
    ranks: dict[int, RankLog] = dataclasses.field(default_factory=dict)
    places: dict[int, Place] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    output: str = ""
    over: bool = False

    @classmethod
    def of(cls, logs: Mapping[int, Iterable[Mapping[str, Any]]], source: str = "", **more: Any) -> RanksFacts:
        """Of events by rank; source: the text of "train.py"."""
        facts = cls(len(logs), sources={"train.py": source}, over=True, **more)
        for rank, events in logs.items():
            for event in events:
                facts.add(rank, event)
        return facts

    def add(self, rank: int, event: Mapping[str, Any]) -> None:
        if event["k"] == "place":
            names = ("number", "kind", "file", "line", "first", "last")
            self.places[event["number"]] = Place(*(event[name] for name in names))
        else:
            self.ranks.setdefault(rank, RankLog(rank)).add(event)

    def text(self, line: Sequence[Any]) -> str:
        """The text of a user's line, with its indentation."""
        lines = self.sources.get(line[0], "").split("\n")
        return lines[line[1] - 1] if 0 < line[1] <= len(lines) else ""

    def pairs(self, kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Events of a kind with equal keys ("id") on two ranks, each of the others beside the first that has it."""
        first: dict[str, dict[str, Any]] = {}
        found = []
        for rank, log in sorted(self.ranks.items()):
            for event in log.events.get(kind, ()):
                event = {**event, "rank": rank}
                if (other := first.setdefault(event["id"], event)) is not event:
                    found.append((other, event))
        return found

    def fault(self) -> str:
        """What failed in nbdebug itself while it watched a rank; "" for nothing."""
        events = [event for log in self.ranks.values() for event in log.events.get("fault", ())]
        return events[0]["error"] if events else ""
