"""Which rows of the batch make the step fail? Found by replacing the others.

The step is run again with every row outside a chosen set replaced, where the batch enters the outermost module, by a
copy of one healthy row: in every tensor argument whose first dimension is the batch's. If the step still fails in the
same way, the set is enough. `ddmin` shrinks it to a set of which no row can be left out; what remains of the batch is
then searched for further sets, until it no longer fails. So rows that fail alone are found, and rows that only fail
together.

A row is healthy if the step is finite when it fills the whole batch. If none of a few is, rows are not told apart:
either every row fails, or the cause does not come in through the model's arguments (labels, weights), or it needs rows
that differ from one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from nbdebug.bisect import ddmin
from nbdebug.observe.rerun import Call, Change, Rerun, changed

CANDIDATES = 4
"""How many rows are tried as the healthy one."""
AT_MOST = 64
"""Replays spent on rows before the search gives up: with rows that interact the number grows with their square."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The answer. at_fault: all rows that have a part in a failure; smallest: one set that is enough; both None when
    rows could not be told apart, and then `why` says why."""

    batch: int | None = None
    at_fault: tuple[int, ...] | None = None
    smallest: tuple[int, ...] | None = None
    why: str = ""

    @property
    def samples(self) -> tuple[int, ...] | None:
        """The rows to name: a proper part of the batch, or None."""
        return self.at_fault if self.at_fault and self.batch and len(self.at_fault) < self.batch else None


class _Enough(Exception):
    """The number of replays allowed is used up."""


class RowSearch:
    """The search for one bad event. root: the outermost call that the batch enters; `replay(change)` runs the step."""

    def __init__(self, root: Call | None, event: int, replay: Callable[[Change], Rerun]):
        self.root, self.event, self.replay = root, event, replay
        self.every = tuple(range(root.batch or 0)) if root else ()
        self.healthy, self.runs = 0, 0
        self._known = {self.every: True}  # whether it fails, by the rows that the batch is made of
        self._failed = False  # whether any replay did

    def find(self, hint: Sequence[int] | None = None) -> Rows:
        """`hint`: the rows that a look at the values found; if replays confirm them, fewer are needed."""
        batch = len(self.every)
        if batch < 2:
            return Rows(why="the model was not given a batch of several rows")
        try:
            if why := self._why_no_healthy([row for row in self.every if row not in (hint or ())]):
                return Rows(batch, why=why)
            at_fault, smallest = self._confirmed(hint or ()) or self._searched()
            if not self._failed and not self._run(self.every):
                return Rows(batch, why="the step did not fail again with the rows that it failed with")
        except _Enough:
            return Rows(batch, why=f"it was given up after {self.runs} runs of the step")
        return Rows(batch, at_fault, smallest)

    def _confirmed(self, hint: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        rest = [row for row in self.every if row not in hint]
        if not hint or not self._fails(hint) or self._fails(rest):
            return None
        return tuple(sorted(hint)), tuple(ddmin(sorted(hint), self._fails))

    def _searched(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sets, rest = [], self.every
        while self._fails(rest):
            sets.append(tuple(ddmin(rest, self._fails)))
            rest = tuple(row for row in rest if row not in sets[-1])
        return tuple(sorted(sum(sets, ()))), min(sets, key=len)

    def _why_no_healthy(self, rows: list[int]) -> str:
        """Try a few rows, spread over the batch, each in place of all. "" when one is healthy."""
        if not rows:
            return "the op tracer saw the fault in every row"
        spread = list(dict.fromkeys(rows[i * len(rows) // CANDIDATES] for i in range(CANDIDATES)))
        for row in spread:
            self.healthy = row
            if not self._fails([]):
                return ""
        return f"the step fails too with row {' or '.join(map(str, spread))} in place of all other rows"

    def _fails(self, rows: Sequence[int]) -> bool:
        """Whether it fails when all but these rows are copies of the healthy one."""
        source = tuple(row if row in rows else self.healthy for row in self.every)
        if source not in self._known:
            self._known[source] = self._run(source)
        return self._known[source]

    def _run(self, source: tuple[int, ...]) -> bool:
        if self.runs == AT_MOST:
            raise _Enough
        self.runs += 1
        run = self.replay(_Picked(self.root, source))
        bad = self.event < len(run.events) and bool(run.events[self.event].bad)
        self._failed = self._failed or bad
        return bad


class _Picked(Change):
    """Row i of the batch is a copy of row source[i], in every tensor that the outermost call is given."""

    def __init__(self, root: Call | None, source: tuple[int, ...]):
        super().__init__()
        self.root, self.source = root, source

    def enter(self, call: Call, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return changed((args, kwargs), self._pick) if self.root is not None and call.start == self.root.start else None

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.shape[0] != len(self.source):
            return tensor
        return tensor.index_select(0, torch.tensor(self.source, device=tensor.device))
