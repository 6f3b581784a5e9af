"""What the ranks wrote down, as plain data: calls in order, marks passed, and further events by their kind.

An event is a dict with its kind under "k"; files have one as a line of JSON.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.text import figures

Line = tuple[str, int, str]
"""File, line, function."""
START = "start"
"""The group of the calls that make the default group: all processes take part."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CALLS, MARKS, EVENTS = 500, 20_000, 400
"""What is held of each rank: calls behind the last one that all ranks have made alike, marks, events of a kind."""


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """One call in one group. n: its number in the group, from 0; lines: the user's, from the inside out; at: how many
    marks the rank had passed; root: source, target or reduction, where the call names one; waits: the rank goes on only
    when the others have come; order: its number among all calls of the rank; time: seconds since the epoch."""

    n: int
    group: str
    op: str
    shape: str = ""
    dtype: str = ""
    root: str = ""
    lines: tuple[Line, ...] = ()
    at: int = 0
    waits: bool = True
    order: int = 0
    time: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        return self.group, self.op, self.shape, self.dtype, self.root

    def __str__(self) -> str:
        """ "all_reduce of float32 [4, 2]"."""
        of = f" of {f'{self.dtype} {self.shape}'.strip()}" if self.shape else ""  # a wrapper's call has no dtype
        return self.op + of + (f" ({self.root})" if self.root else "")


@dataclasses.dataclass(frozen=True)
class Place:
    """A marked place of the source. kind: "arm" or "loop"; line: of its head; first, last: lines of its body."""

    number: int
    kind: str
    file: str
    line: int
    first: int
    last: int

    @property
    def head(self) -> Line:
        return self.file, self.line, ""

    def holds(self, line: Sequence[Any]) -> bool:
        return line[0] == self.file and self.first <= line[1] <= self.last


class RankLog:
    """What one rank did. calls: of each group, the latest; events: kind → in order; trail: numbers of marks, the latest
    of `marks` in all; turns: how often each was passed; messages: ("send" or "receive", "group/tag/rank") → how many;
    message: the one that its last event waits for, or waits to get rid of."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: dict[str, list[CollectiveCall]] = collections.defaultdict(list)
        self.members: dict[str, tuple[int, ...]] = {}
        self.trail: list[int] = []
        self.turns: collections.Counter[int] = collections.Counter()
        self.events: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        self.last: CollectiveCall | None = None
        self.marks = 0
        self.messages: collections.Counter[tuple[str, str]] = collections.Counter()
        self.message: Mapping[str, Any] | None = None
        self.time = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        marks = event.get("m", ())
        self.trail += marks
        self.turns.update(marks)
        self.marks += len(marks)
        if event["k"] not in ("stack", "loops", "place"):  # these tell of a rank that stands
            self.time = event.get("t", 0.0)
            if event.get("peer") is not True:
                self.message = event if event["k"] == "message" and event["waits"] else None
        order = self.last.order + 1 if self.last else 0
        if event["k"] == "message":
            self.messages[event["way"], event["key"]] += not event.get("again")
        elif event["k"] == "call":
            group, lines = event.get("g", "0"), tuple((file, line, name) for file, line, name in event.get("lines", ()))
            op, shape, dtype, root = (event.get(name, "") for name in ("op", "shape", "dtype", "root"))
            waits, n = not event.get("async"), self.made(group)
            self.last = CollectiveCall(n, group, op, shape, dtype, root, lines, self.marks, waits, order, self.time)
            self.calls[group].append(self.last)
            if "ranks" in event:
                self.members[group] = tuple(event["ranks"])
        else:
            self.events[event["k"]].append({**event, "rank": self.rank, "at": self.marks, "order": order})

    def made(self, group: str) -> int:
        """How many calls it has made in a group."""
        own = self.calls.get(group)
        return own[-1].n + 1 if own else 0

    def call(self, group: str, n: int) -> CollectiveCall | None:
        """Number n of a group; None where it was not made, or is not held any more."""
        own = self.calls.get(group) or ()
        return own[n - own[0].n] if own and own[0].n <= n <= own[-1].n else None

    def window(self, begin: int, end: int) -> list[int]:
        """The marks passed between two of their numbers, as far as they are held."""
        dropped = self.marks - len(self.trail)
        return self.trail[max(begin - dropped, 0) : max(end - dropped, 0)]

    def one(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind."""
        return self.events[kind][-1] if self.events.get(kind) else None

    def ended(self) -> bool:
        return self.one("end") is not None or self.one("error") is not None

    def finished(self) -> bool:
        """Whether it has done all that the script asks for."""
        return (self.one("end") or {}).get("code") == 0

    def has_left(self, group: str) -> bool:
        """Whether it ended without an error, or gave up the group: it will never call again there."""
        starts = self.calls.get(START)
        begun = starts[-1].order if starts else -1  # a second group may have the name of the first
        gone = [e.get("g", "0") for e in self.events["destroy"] if e["order"] > begun]
        return self.one("end") is not None or group in gone or group != START and "all" in gone


@dataclasses.dataclass
class RanksFacts:
    """The logs of all ranks. launched: how many processes were, 0 where nothing tells yet; ranks: in order; sources:
    file → text; output: the end of what the processes printed; over: no process is left, or all have ended; alike: the
    calls of a group that all its ranks have made alike, counted; now: seconds since the epoch when the logs were last
    looked at; before: the finding about ranks that had ended before these began."""

    launched: int
    ranks: dict[int, RankLog] = dataclasses.field(default_factory=dict)
    places: dict[int, Place] = dataclasses.field(default_factory=dict)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    output: str = ""
    over: bool = False
    alike: dict[str, int] = dataclasses.field(default_factory=dict)
    now: float = 0.0
    before: Any = None

    def add(self, rank: int, event: Mapping[str, Any]) -> None:
        if event["k"] == "place":
            self.places[event["number"]] = Place(*(event[field.name] for field in dataclasses.fields(Place)))
            return
        if rank not in self.ranks:
            self.ranks = dict(sorted({**self.ranks, rank: RankLog(rank)}.items()))
        self.ranks[rank].add(event)

    def members(self, group: str) -> dict[int, RankLog]:
        """The logs of a group's ranks."""
        own = {rank for log in self.ranks.values() for rank in log.members.get(group, ())}
        return {rank: log for rank, log in self.ranks.items() if rank in own or not own}

    def absent(self, call: CollectiveCall) -> set[int]:
        """The ranks of its group that have not come to a call."""
        return {rank for rank, log in self.members(call.group).items() if log.made(call.group) <= call.n}

    def forget(self) -> None:
        """Compare what has come; drop calls that are alike and old, old marks, and of many events of a kind those in
        the middle."""
        for group in {group for log in self.ranks.values() for group in log.calls}:
            logs, n = self.members(group), self.alike.get(group, 0)
            expected = max(len(log.members.get(group, ())) for log in logs.values()) or self.launched or math.inf
            while len(logs) >= expected:
                calls = [log.call(group, n) for log in logs.values()]
                if None in calls or len({call and call.key for call in calls}) > 1:
                    break
                n += 1
            self.alike[group] = n
            for own in (log.calls[group] for log in logs.values() if log.calls.get(group)):
                del own[: max(min(n - CALLS - own[0].n, len(own) - 1), 0)]
        for log in self.ranks.values():
            if len(log.trail) > 2 * MARKS:
                del log.trail[:-MARKS]
            for events in log.events.values():
                if len(events) > 2 * EVENTS:
                    del events[EVENTS // 2 : -EVENTS // 2]

    def text(self, line: Sequence[Any]) -> str:
        """The text of a user's line, with its indentation."""
        lines = self.sources.get(line[0], "").split("\n")
        return lines[line[1] - 1] if 0 < line[1] <= len(lines) else ""

    def body(self, place: Place) -> str:
        return "\n".join(self.sources.get(place.file, "").split("\n")[place.first - 1 : place.last])

    def all(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, with their ranks under "rank"."""
        return [event for log in self.ranks.values() for event in log.events.get(kind, ())]

    def timeout(self) -> float:
        """Seconds that a call waits for the others, as the group was made."""
        return min((event.get("timeout", 1800.0) for event in self.all("init")), default=1800.0)

    def pairs(self, kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Events of a kind with equal keys ("id") on two ranks, each of the others beside the first that has it."""
        first: dict[str, dict[str, Any]] = {}
        pairs = [(first.setdefault(event["id"], event), event) for event in self.all(kind)]
        return [(one, other) for one, other in pairs if one is not other]

    def growth_of_loss(self) -> str:
        """What the losses of a rank have come to, where they end far above their beginning; "" of all others."""
        for log in self.ranks.values():
            values = [float(event["value"]) for event in log.events.get("loss", ())]
            start, end = (statistics.median(part or [0.0]) for part in (values[: len(values) // 4], values[-8:]))
            if len(values) >= 16 and start > 0 and not end <= 2 * start:
                return f"the loss grows, from {figures(start)} to {figures(end)}"
        return ""

    def fault(self) -> str:
        """What failed in nbdebug itself while it watched a rank; "" for nothing."""
        return next((event["error"] for event in self.all("fault")), "")
