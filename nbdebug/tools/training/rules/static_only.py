"""What can be said without a run of causes that a run shows better: their rules are declared beside the run's own.

`CHECKS` are used only where there is no run; each gives a finding under the code of its rule.
"""

from __future__ import annotations

from nbdebug.report import Finding, Fix
from nbdebug.text import listed, percent
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.wording import GLOROT_INIT, HE_INIT, PRINT_LOSS_INPUTS, SHUFFLE, finding

SORTED = 0.3
"""Runs of equal labels over what a shuffled order would have."""
NOTHING = 1e-12
"""A loss below this is zero."""


def dead_relu(facts: TrainingFacts) -> Finding | None:
    """Dead at the start, over several batches, so that next to no gradient comes through."""
    static = facts.static
    dead = [u for u in static.units if (u.dead or 0.0) >= signs.DEAD and u.units > 1] if static is not None else []
    if static is None or not dead:
        return None
    first = dead[0]
    layer = first.layer or first.module
    silent = [p.name for p in static.trained if p.reached and p.gradient == 0.0]
    title = (
        f"`{layer}` is dead before training begins: {percent(first.dead or 0.0)} of the {first.units} units after its "
        f"{first.op} are zero for every sample"
    )
    chain = [title, f"no gradient passes: that of {listed(silent)} is exactly zero"] if silent else []
    return finding(
        "dead-relu",
        title,
        [name for u in dead for name in (u.layer, u.module)],
        [Fix(*HE_INIT)],
        chain=chain,
        module=layer,
        evidence={
            "dead by layer": {u.layer or u.module: u.dead for u in dead},
            "without gradient": silent[:12] or None,
        },
    )


def saturated_activation(facts: TrainingFacts) -> Finding | None:
    """On the flat ends at the start, where a layer follows."""
    static = facts.static
    flat = (
        [u for u in static.units if u.hidden and (u.saturated or 0.0) >= signs.SATURATED] if static is not None else []
    )
    if not flat:
        return None
    first = flat[0]
    layer = first.layer or first.module
    title = (
        f"`{layer}` saturates its {first.op} before training begins: at {percent(first.saturated or 0.0)} of the "
        "values the slope is below a hundredth of its maximum"
    )
    return finding(
        "saturated-activation",
        title,
        [name for u in flat for name in (u.layer, u.module)],
        [Fix(*GLOROT_INIT)],
        module=layer,
        evidence={"saturated by layer": {u.layer or u.module: u.saturated for u in flat}},
    )


def unshuffled_data(facts: TrainingFacts) -> Finding | None:
    """Labels in long runs: read in the order of the dataset, or one run for each class."""
    labels = None if facts.static is None else facts.static.labels
    if labels is None or len(labels.counts) < 2 or labels.batches < 4 or labels.total < 8 * len(labels.counts):
        return None
    classes = len(labels.counts)
    in_runs = labels.runs <= 2 * classes or labels.sequential and labels.runs < SORTED * labels.expected
    if not in_runs or labels.per_batch > max(1, classes / 2):
        return None
    title = (
        f"The training data is not shuffled: {labels.total:,} labels come in {labels.runs:,} runs of equal labels, "
        f"and a shuffled order has about {labels.expected:,.0f}; a batch holds {labels.per_batch:g} of {classes} "
        "classes"
    )
    return finding(
        "unshuffled-data",
        title,
        ["train_loader"],
        [Fix(*SHUFFLE)],
        evidence={
            "runs of equal labels": labels.runs,
            "expected when shuffled": round(labels.expected),
            "classes": classes,
            "classes in a batch": labels.per_batch,
        },
    )


def zero_loss(facts: TrainingFacts) -> Finding | None:
    """Exactly zero at the start with no gradient at all, or every label the same."""
    static = facts.static
    if static is None or static.loss is None:
        return None
    labels = static.labels
    if abs(static.loss) <= NOTHING and static.trained and not any(p.gradient for p in static.trained):
        call = next(iter(static.loss_calls), None)
        why = (
            "its softmax runs over a single class"
            if call is not None and (call.classes == 1 or call.softmax_size == 1)
            else "all targets are ignored"
            if call is not None and call.ignored == 1
            else "nothing is left to compare"
        )
        title = f"The loss is exactly zero before training begins, and no parameter gets a gradient: {why}"
    elif labels is not None and len(labels.counts) == 1 and labels.complete and labels.total >= 32:
        label = next(iter(labels.counts))
        title = f"All {labels.total:,} labels are {label}: the loss goes to zero and the model learns nothing"
    else:
        return None
    return finding(
        "zero-loss",
        title,
        ["loss_fn", "train_loader"],
        [PRINT_LOSS_INPUTS],
        place=static.loss_calls[0].where if static.loss_calls else None,
        evidence={"loss": static.loss},
    )


CHECKS = (zero_loss, dead_relu, saturated_activation, unshuffled_data)
