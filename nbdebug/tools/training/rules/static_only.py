"""What can be said without a run of causes that a run shows better: their rules are declared beside the run's own.

`CHECKS` are asked only where there is no run; each gives a finding under the code of its rule.
"""

from __future__ import annotations

from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.rules.wording import finding, listed

DEAD = 0.9
"""Share of a layer's units that are zero for every sample of several batches (torch-audit: over 90% zeros)."""
SATURATED = 0.5
"""Share of values at which the slope is below a hundredth of its largest (TheDeepChecker: over 50%)."""
SORTED = 0.3
"""Stretches of one label over what a shuffled order would have."""
NOTHING = 1e-12
"""A loss below this is zero."""


def dead_relu(facts: TrainingFacts) -> Finding | None:
    """Dead at the start, over several batches, so that next to no gradient comes through."""
    before = facts.before
    dead = [u for u in before.units if (u.dead or 0.0) >= DEAD and u.units > 1] if before is not None else []
    if before is None or not dead:
        return None
    first = dead[0]
    silent = [p.name for p in before.trained if p.reached and p.gradient == 0.0]
    title = (
        f"`{first.feeds or first.module}` is dead before training begins: {first.dead:.0%} of the {first.units} "
        f"units behind its {first.op} are zero for every sample"
    )
    chain = (
        [title, f"no gradient passes it: {listed(silent)} get{'s' if len(silent) == 1 else ''} exactly zero"]
        if silent
        else []
    )
    fix = Fix(
        "Start with outputs around zero: no negative biases, He's init.",
        "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')\ntorch.nn.init.zeros_(layer.bias)",
    )
    return finding(
        "dead-relu",
        title,
        [name for u in dead for name in (u.feeds, u.module)],
        [fix],
        chain=chain,
        module=first.feeds or first.module,
        dead_by_layer={u.feeds or u.module: u.dead for u in dead},
        without_gradient=silent[:12] or None,
    )


def saturated_activation(facts: TrainingFacts) -> Finding | None:
    """On the flat ends at the start, where a layer follows."""
    before = facts.before
    flat = [u for u in before.units if u.hidden and (u.saturated or 0.0) >= SATURATED] if before is not None else []
    if not flat:
        return None
    first = flat[0]
    title = (
        f"`{first.feeds or first.module}` saturates its {first.op} before training begins: at "
        f"{first.saturated:.0%} of "
        "the values the slope is below a hundredth of its largest"
    )
    fix = Fix(
        "Bring what goes into the activation to a size of about one.",
        "torch.nn.init.xavier_uniform_(layer.weight)\ntorch.nn.init.zeros_(layer.bias)",
    )
    return finding(
        "saturated-activation",
        title,
        [name for u in flat for name in (u.feeds, u.module)],
        [fix],
        module=first.feeds or first.module,
        saturated_by_layer={u.feeds or u.module: u.saturated for u in flat},
    )


def unshuffled_data(facts: TrainingFacts) -> Finding | None:
    """Labels in long stretches: read in the order of the dataset, or one stretch for each class."""
    seen = None if facts.before is None else facts.before.labels
    if seen is None or len(seen.counts) < 2 or seen.batches < 4 or seen.total < 8 * len(seen.counts):
        return None
    kinds = len(seen.counts)
    sorted_wholly = seen.runs <= 2 * kinds
    in_stretches = sorted_wholly or seen.sequential and seen.runs < SORTED * seen.expected
    if not in_stretches or seen.per_batch > max(1, kinds / 2):
        return None
    title = (
        f"The training data is not shuffled: {seen.total:,} labels come in {seen.runs:,} stretches of one kind, "
        f"where a shuffled order has about {seen.expected:,.0f}; a batch holds {seen.per_batch:g} of {kinds} "
        "classes"
    )
    fix = Fix("Shuffle the training data.", "DataLoader(dataset, batch_size=..., shuffle=True)")
    return finding(
        "unshuffled-data",
        title,
        ["train_loader"],
        [fix],
        stretches=seen.runs,
        expected=round(seen.expected),
        classes=kinds,
        classes_in_a_batch=seen.per_batch,
    )


def zero_loss(facts: TrainingFacts) -> Finding | None:
    """Exactly zero at the start with no gradient at all, or every label the same."""
    before = facts.before
    if before is None or before.loss is None:
        return None
    gradients = [p.gradient for p in before.trained if p.gradient]
    seen = before.labels
    if abs(before.loss) <= NOTHING and not gradients and before.trained:
        call = next((c for c in before.losses), None)
        why = (
            "its softmax runs over a single class"
            if call is not None and (call.classes == 1 or call.over == 1)
            else "all targets are ignored"
            if call is not None and call.ignored == 1
            else "nothing is left to compare"
        )
        title = f"The loss is exactly zero before training begins, and no parameter gets a gradient: {why}"
    elif seen is not None and len(seen.counts) == 1 and seen.complete and seen.total >= 32:
        title = f"All {seen.total:,} labels are {next(iter(seen.counts))}: the loss goes to zero and nothing is learnt"
    else:
        return None
    fix = Fix(
        "Look at what goes into the loss.",
        "outputs, targets = model(batch[0]), batch[1]\n"
        "print(outputs.shape, outputs.min(), outputs.max(), targets.unique())",
    )
    place = before.losses[0].where if before.losses else None
    return finding("zero-loss", title, ["loss_fn", "train_loader"], [fix], place=place, loss=before.loss)


CHECKS = (zero_loss, dead_relu, saturated_activation, unshuffled_data)
