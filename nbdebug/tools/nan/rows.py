"""Which rows of the batch are at fault, where shapes can't tell: the step is replayed with rows replaced by another.

A dimension is taken for the batch by its size. That is no proof where another one (time, width) has the same size. And
of several rows that made an infinity, some may be harmless: a later op absorbs it. Both are settled by experiment: the
rows at fault are those without which the step is finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nbdebug.observe.replay import Replay
from nbdebug.observe.tape import TapeEntry
from nbdebug.observe.tensors import all_finite, can_be_nonfinite
from nbdebug.tools.nan.origins import Origin
from nbdebug.tools.nan.probe import Detection, Probe

_MOST_ROWS = 8
"""Rows that are tried one by one."""
_READS = frozenset({"local_scalar_dense"})

Rows = tuple[int, ...] | None


def settled_rows(
    probe: Probe, detection: Detection, culprit: Origin, chosen: Iterable[Origin], used: set[int], rows: Rows
) -> Rows:
    """The rows at fault. culprit: the origin to blame; chosen: all that led to what went bad; used: the ops behind it;
    rows: what the sizes of dimensions tell."""
    op, batch = culprit.op, probe.taint.origins.batch_size
    assert op is not None, "a tensor from outside has its own rows"
    together = [
        o
        for o in chosen
        if o.op is not None
        and not o.intended
        and (o.op.site, o.op.name, o.segment) == (op.site, op.name, culprit.segment)
    ]
    swaps = RowSwaps(probe, detection, batch or 0)
    if batch and _unclear(probe, together, batch):
        rows = _by_replay(swaps, together, rows)
    reached = {row for o in together for index, trail in o.trail if index in used for row in trail}
    if rows and 1 < len(rows) <= _MOST_ROWS and reached and not set(rows) <= reached:
        guilty = tuple(row for row in rows if not swaps.cure({*rows} - {row}))
        rows = guilty if guilty and not swaps.failed else rows
    return rows


def _unclear(probe: Probe, together: list[Origin], batch: int) -> bool:
    """Whether another dimension has the batch's size, or may hold the batch folded."""
    if not any(o.row_sets for o in together):
        return False
    return (
        any(rows != (o.rows or o.folded_rows) for o in together for rows in o.row_sets.values())
        or batch in probe.taint.origins.folds
        or any(batch in t.shape for t, _ in probe.names.all_tensors())
    )


def _by_replay(swaps: RowSwaps, together: list[Origin], rows: Rows) -> Rows:
    """The smallest set of rows without which the step is finite; None where there is none."""
    keys = dict.fromkeys(key for o in together for key in o.row_sets)
    sets = {tuple(sorted({row for o in together for row in o.row_sets.get(key, ())})) for key in keys}
    for candidate in sorted(sets, key=len):
        if len(candidate) < swaps.batch and swaps.cure(candidate):
            return candidate
    return rows if swaps.failed or swaps.reads_values else None


class RowSwaps:
    """Replays of the failing step with rows of the batch replaced by another row, in all tensors from outside that have
    the batch's size. failed: whether one could not be run. reads_values: whether the step's Python code reads values of
    tensors, which a replay has as numbers: other rows don't change them."""

    def __init__(self, probe: Probe, detection: Detection, batch: int):
        self.tape, self.detection, self.batch, self.failed = probe.tape, detection, batch, False
        self.reads_values = any(isinstance(e, TapeEntry) and e.op.name in _READS for e in probe.tape.entries)
        self._numbers = [
            number
            for number, held in probe.tape.externals.items()
            if not held.leaf
            and held.grad_of is None
            and held.tensor.dim()
            and len(held.tensor) == batch
            and (held.storage is None or held.storage.role not in ("parameter", "buffer"))
        ]

    def cure(self, rows: Iterable[int]) -> bool:
        """Whether what went bad is finite without these rows."""
        rows = sorted(rows)
        donor = next(row for row in range(self.batch) if row not in rows)

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.clone()
            tensor[rows] = tensor[donor].clone()
            return tensor

        kind = self.detection.target.kind
        replay = Replay(self.tape, inputs=dict.fromkeys(self._numbers, swap), keep=self.detection.ref)
        try:
            replay.run(self.detection.position, forward_only=kind == "loss")
        except Exception:  # an op that depends on how many rows there are, or little memory: no telling
            self.failed = True
            return False
        results = {"loss": replay.losses, "gradient": replay.gradients.values(), "parameter": replay.leaves.values()}
        values = results.get(kind, [] if replay.value is None else [replay.value])
        return bool(values) and all(all_finite(v) for v in values if can_be_nonfinite(v))
