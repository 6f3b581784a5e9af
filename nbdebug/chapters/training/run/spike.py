"""A jump of the loss: at which step, and is its batch unlike the others under the same weights?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.chapters.training.run.bench import Bench
from nbdebug.chapters.training.run.checkup import Checkups

JUMP = 3.0
"""A loss over the median of the ten before it. Most heavy-tailed losses stay below; a jump alone accuses nobody."""
BEFORE = 10
FLOOR = 0.02
"""Below this share of the first losses no jump is one: from nothing to next to nothing is a large multiple."""
AROUND = 12
"""Batches on either side that a suspected one is compared with."""


def spike_of(
    losses: Sequence[float], numbers: Sequence[int], read_at: Sequence[int], bench: Bench
) -> dict[str, Any] | None:
    """The largest jump of the loss: its step, its size against the losses before it, and, where its batch is at hand,
    the batch's loss at the start of the run against its neighbours'. None where the loss never jumps."""
    at = _jump(losses)
    if at is None:
        return None
    before = [v for v in losses[max(0, at - 20) : at] if math.isfinite(v)]
    level = statistics.median(before) if before else math.nan
    after = next((i for i in range(at + 1, len(losses)) if losses[i] <= 1.5 * level), len(losses)) - at
    return {
        "step": numbers[at],
        "index": at,
        "loss": losses[at],
        "before": level,
        "recovers after": after,
        "of": len(losses),
        **_batch(at, read_at, bench),
    }


def _jump(losses: Sequence[float]) -> int | None:
    """The index at which the largest jump began; None where no loss is JUMP times those before it. What follows a jump
    may be larger still: of jumps in consecutive steps the first counts."""
    ratios = {}
    floor = FLOOR * statistics.median(losses[:3]) if losses else 0.0
    for i in range(BEFORE, len(losses)):
        level = max(statistics.median(losses[i - BEFORE : i]), floor)
        if level > 0 and math.isfinite(level) and math.isfinite(losses[i]) and losses[i] > JUMP * level:
            ratios[i] = losses[i] / level
    if not ratios:
        return None
    at = max(ratios, key=lambda i: ratios[i])
    while at - 1 in ratios:
        at -= 1
    return at


def _batch(at: int, read_at: Sequence[int], bench: Bench) -> dict[str, Any]:
    index = at if not read_at or not read_at[at] else read_at[at] - 1
    if index >= len(bench.batches):
        return {}
    losses = beside(index, bench)
    if len(losses) < 4:
        return {}
    return {
        "batch": index,
        "its loss at the start": losses[0],
        "its neighbours'": statistics.median(losses[1:]),
        "its neighbours' largest": max(losses[1:]),
    }


def beside(index: int, bench: Bench) -> list[float]:
    """The loss of a batch, and those of the batches around it, under the weights as they are now. The very next ones
    are left out: what has spoilt a stretch of the data may reach into them."""
    around = range(max(0, index - AROUND), min(len(bench.batches), index + AROUND + 1))
    near = [i for i in around if abs(i - index) > 1]
    return Checkups(bench.model, bench.loss_fn, [bench.batches[i] for i in [index, *near]], most=None).losses()


def at_the_end(spike: Mapping[str, Any], losses: Sequence[float]) -> dict[str, Any]:
    """What is known of a jump, with the losses that its batch and its neighbours have after a run without it."""
    if len(losses) < 4:
        return dict(spike)
    return {
        **spike,
        "its loss at the end": losses[0],
        "its neighbours' at the end": statistics.median(losses[1:]),
        "its neighbours' largest at the end": max(losses[1:]),
    }
