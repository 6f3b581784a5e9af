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
from typing import Any

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
        self.batch = root.batch if root is not None else None
        self.runs = 0
        self._known: dict[tuple[int, ...], bool] = {}

    def find(self, hint: Sequence[int] | None = None) -> Rows:
        """`hint`: the rows that a look at the values found; if replays confirm them, fewer are needed."""
        if self.root is None or self.batch is None or self.batch < 2:
            return Rows(why="the model was not given a batch of several rows")
        every = tuple(range(self.batch))
        self._known[every] = True
        try:
            self.healthy = self._healthy_row([r for r in every if r not in (hint or ())])
            if self.healthy is None:
                return Rows(self.batch, why="the step fails with any one row in place of all others")
            self._known[()] = False
            return self._search(every, tuple(hint or ()))
        except _Enough:
            return Rows(self.batch, why=f"it was given up after {self.runs} runs of the step")

    def _search(self, every: tuple[int, ...], hint: tuple[int, ...]) -> Rows:
        rest = tuple(r for r in every if r not in hint)
        if hint and rest and self._fails(hint) and not self._fails(rest):
            return Rows(self.batch, hint, tuple(ddmin(hint, self._fails)))
        sets: list[tuple[int, ...]] = []
        rest = every
        while self._fails(rest):
            sets.append(tuple(ddmin(rest, self._fails)))
            rest = tuple(r for r in rest if r not in sets[-1])
        return Rows(self.batch, tuple(sorted(sum(sets, ()))), min(sets, key=len))

    def _healthy_row(self, rows: list[int]) -> int | None:
        spread = [rows[i * len(rows) // CANDIDATES] for i in range(CANDIDATES)] if rows else []
        return next((row for row in dict.fromkeys(spread) if not self._bad_with([row] * (self.batch or 0))), None)

    def _fails(self, rows: Sequence[int]) -> bool:
        key = tuple(rows)
        if key not in self._known:
            self._known[key] = self._bad_with([r if r in key else self.healthy for r in range(self.batch or 0)])
        return self._known[key]

    def _bad_with(self, source: list[Any]) -> bool:
        """Whether the same event is bad when row i of the batch is a copy of row source[i]."""
        if self.runs == AT_MOST:
            raise _Enough
        self.runs += 1
        run = self.replay(_Picked(self.root, source))
        return self.event < len(run.events) and bool(run.events[self.event].bad)


class _Picked(Change):
    """Row i of the batch is a copy of row source[i], in every tensor that the outermost call is given."""

    def __init__(self, root: Call | None, source: list[int]):
        super().__init__()
        self.root, self.source = root, source

    def enter(self, call: Call, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return changed((args, kwargs), self._pick) if self.root is not None and call.start == self.root.start else None

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.shape[0] != len(self.source):
            return tensor
        return tensor.index_select(0, torch.tensor(self.source, device=tensor.device))
