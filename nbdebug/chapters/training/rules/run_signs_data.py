"""Signs of what the data does: a batch unlike the others, an order that harms, training samples learnt by heart."""

from __future__ import annotations

import math
import statistics

from nbdebug.chapters.training.facts_run import RunFacts
from nbdebug.chapters.training.rules.run_signs import MUCH_BETTER, first, has_room, helps

OUTLIER = 5.0
"""The suspected batch's loss over the largest of its neighbours', under the same weights."""


def odd_batch(run: RunFacts) -> str:
    """Whether the batch at which the loss jumps is unlike its neighbours: "start" or "end", by the weights with which
    it is seen; "" where it is not."""
    spike = run.spike or {}
    own, others = spike.get("its loss at the start"), spike.get("its neighbours' largest")
    if own is not None and others is not None and (not math.isfinite(own) or own > OUTLIER * max(others, 1e-8)):
        return "start"
    own, others = spike.get("its loss at the end"), spike.get("its neighbours' largest at the end")
    return (
        "end"
        if own is not None and others is not None and (own > OUTLIER * max(others, 0.2 * spike["before"], 1e-8))
        else ""
    )


def order_in_doubt(run: RunFacts) -> bool:
    """The samples come in the order of the dataset, and that may be an order that shows in nothing that is counted."""
    return run.order.sequential and has_room(run, 0.05)


def order_harms(run: RunFacts) -> bool:
    """Dealt out afresh, the same samples teach far more, on validation data too."""
    trial = run.trials.get("shuffled")
    if trial is None or not order_in_doubt(run) or odd_batch(run) or not helps(trial, MUCH_BETTER):
        return False
    return trial.val_as_is is None or trial.val_changed is None or trial.val_changed < MUCH_BETTER * trial.val_as_is


def overfits(run: RunFacts) -> tuple[int, float, float] | None:
    """(step of the lowest validation loss, that loss, the last one) where the validation loss rose for good while the
    training loss kept falling."""
    seen = [c for c in run.checkups if c.val is not None and math.isfinite(c.val)]
    if len(seen) < 6:
        return None
    values = [c.val or 0.0 for c in seen]
    best = min(range(len(seen)), key=values.__getitem__)
    end = statistics.median(values[-3:])
    by_heart = seen[-1].train < 0.02 * seen[0].train and end > 0.5 * values[0] and len(seen) >= 10
    matters = end - values[best] > OF_START * abs(values[0])
    sure = min(values[-3:]) > values[best] + SURE * seen[best].spread
    rose = by_heart or matters and sure and end > ROSE * values[best]
    fell = by_heart or seen[-1].train < 0.8 * seen[best].train and seen[-1].train < 0.5 * end
    early = by_heart or seen[best].step <= 0.6 * seen[-1].step
    return (seen[best].step, values[best], values[-1]) if rose and fell and early else None


ROSE = 1.25
"""The validation loss at the end over its lowest (TrainProof: 1.2, after at least four evaluations)."""
OF_START = 0.02
"""… and by that share of the first validation loss at least: from nothing to next to nothing is a large multiple."""
SURE = 2.0
"""Standard errors between the lowest validation loss and the last ones. The batches are the same ones each time, so the
spread between them overstates the doubt."""


AHEAD = 0.85
"""Validation over training loss from which on wrong training labels are thought of."""


def ahead_on_val(run: RunFacts) -> bool:
    """The validation set is predicted far better than what was trained on, both in eval mode."""
    if not run.checkups or run.checkups[-1].val is None:
        return False
    end = run.checkups[-1]
    return end.val is not None and end.val < AHEAD * end.train and 0.25 * first(run) < end.train < first(run)
