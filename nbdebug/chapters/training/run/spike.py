"""A jump of the loss: at which step, and is its batch unlike the others under the same weights?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from nbdebug.chapters.training.run.bench import Bench
from nbdebug.chapters.training.run.checkup import Checkups
from nbdebug.chapters.training.watch.losses import verdicts

AROUND = 12
"""Batches on either side that a suspected one is compared with."""


def spike_of(losses: Sequence[float], numbers: Sequence[int], read_at: Sequence[int], bench: Bench
             ) -> dict[str, Any] | None:
    """The largest jump of the loss: its step, its size against the losses before it, and, where its batch is at hand,
    the batch's loss at the start of the run against its neighbours'. None where the loss never jumps."""
    record = [(i, loss) for i, loss in enumerate(losses)]
    found = [v for v in verdicts(record) if v.kind == "spike"]
    if not found:
        return None
    worst = max(found, key=lambda v: losses[v.step] if math.isfinite(losses[v.step]) else math.inf)
    at = worst.step
    before = [v for v in losses[max(0, at - 20):at] if math.isfinite(v)]
    level = statistics.median(before) if before else math.nan
    after = next((i for i in range(at + 1, len(losses)) if losses[i] <= 1.5 * level), len(losses)) - at
    spike = {"step": numbers[at], "index": at, "loss": losses[at], "before": level, "recovers after": after,
             "said": worst.said, "of": len(losses), **_batch(at, read_at, bench)}
    return spike


def _batch(at: int, read_at: Sequence[int], bench: Bench) -> dict[str, Any]:
    index = at if not read_at or not read_at[at] else read_at[at] - 1
    if index >= len(bench.batches):
        return {}
    near = [i for i in range(max(0, index - AROUND), min(len(bench.batches), index + AROUND + 1)) if i != index]
    ask = Checkups(bench.model, bench.loss_fn, [bench.batches[i] for i in [index, *near]], most=None)
    losses = ask.losses()
    if len(losses) < 4:
        return {}
    return {"batch": index, "its loss at the start": losses[0], "its neighbours'": statistics.median(losses[1:]),
            "its neighbours' largest": max(losses[1:])}
