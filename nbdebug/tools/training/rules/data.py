"""Rules over the data as the loaders give it: scale, training against validation, labels, workers, rows in both."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import FirstLayer, TrainingFacts
from nbdebug.tools.training.rules.wording import finding, short

LARGE = 10.0
"""Root mean square of a feature, beyond which inputs count as not normalised (DLCheck: a mean over 10)."""
STRONG = 4.0
"""… and of what the first layer makes of it: weights made for such inputs bring them down to about one."""
COMMON, ALONE = 0.9, 0.98
"""Share of the commonest label (SageMaker Debugger: 10 to 1): the first where a run has shown that the others are not
found, the second where nothing but the labels is known
(traintools: 95%; with three in a hundred that are plain to see a model does without weights)."""
FEW, FOUND = 10, 0.2
"""… not found: less than that share of at least so many. A rare class that is learnt well is no fault."""
ENOUGH = 100
"""Labels that have to be seen before their shares mean anything."""
MOVED, WIDER = 1.0, 2.0
"""Training deviations between the means, and the ratio of deviations, in the middle feature. Augmentation moves both by
less: noise of the data's own size widens it by 1.4. With few samples the ratio has to be larger."""
FAR, DRIFTS = 3.0, 1.5
"""Where the deviation stays the same (a ratio below the second), the difference may be a drift in time: only means that
are this many deviations apart count."""
STEADY, APART = 0.5, 2.0
"""… or that many, where the training set itself is the same from its start to its end, to that part of one."""
DRIFT, CERTAIN = 1.0, 8.0
"""Where the training set itself changes by that many deviations from its start to its end, only differences that no
drift makes count."""
SURE = 6.0
"""Standard errors between the means."""
SHARED = 0.02
"""Share of validation rows that stand in the training set."""
ABOVE_CHANCE, BY_CHANCE = 3.0, 4.0
"""… over the share of training rows that have a twin in training: in few bits, rows meet by chance in both. And the
number itself has to be so many of its standard deviations (the root of what chance gives, and one) above that."""


@rule(
    code="training/input-not-normalized",
    title="Inputs are far too large for the first layer.",
    symptom="The loss starts far above that of guessing, or stays at guessing; tanh and sigmoid layers saturate at "
    "once. The same model learns when it is fed scaled inputs.",
    cause="Initial weights are made for inputs of about one. Pixels from 0 to 255 or raw amounts make the first "
    "layer's outputs and gradients as much larger, and one learning rate can't suit them and the rest.",
    confirm="`x.mean(), x.std()` by channel or feature, right before the model.",
    fix="Subtract the training mean and divide by the training deviation, by channel or feature (for pixels: divide by "
    "255 at the least), in training and validation alike.",
    reference="https://doi.org/10.1007/978-3-642-35289-8_3",
)
def input_not_normalized(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    raw = [e for e in before.entries if _raw(e)] if before is not None else []
    if not raw:
        return None
    entry = max(raw, key=lambda e: e.rms)
    which = f"feature {entry.feature} of {entry.features}" if entry.features > 1 else "the input"
    title = (
        f"Inputs are not normalised: {which} has mean {short(entry.mean)} and deviation {short(entry.std)}, and "
        f"`{entry.module or entry.op}` makes values of size {short(entry.out)} of it, where about 1 is meant"
    )
    fix = Fix(
        "Bring inputs to mean 0 and deviation 1, in training and validation alike.", "x = (x - train_mean) / train_std"
    )
    return finding(
        "input-not-normalized",
        title,
        ["train_loader", "dataset", entry.module],
        [fix],
        module=entry.module,
        inputs=f"from {short(entry.low)} to {short(entry.high)}",
        mean=entry.mean,
        deviation=entry.std,
        size_behind_the_first_layer=entry.out,
    )


def _raw(entry: FirstLayer) -> bool:
    return entry.rms > LARGE and entry.out > STRONG and entry.trained and not entry.normalised


@rule(
    code="training/preprocessing-mismatch",
    title="Validation inputs are prepared in another way than training inputs.",
    symptom="Training goes well, and validation is bad from the first epoch on, though the pictures look alike. More "
    "data or dropout do not help.",
    cause="A normalisation that only one of the two transforms has, other constants, a division by 255 twice, "
    "channels in another order.",
    confirm="`x.mean(), x.std()` by channel over some batches of either loader.",
    fix="Use one transform for both and add only the random augmentation to training's.",
    reference="https://github.com/JeasunLok/ResNet-pytorch/issues/1",
)
def preprocessing_mismatch(facts: TrainingFacts) -> Finding | None:
    seen = None if facts.before is None else facts.before.shift
    if seen is None:
        return None
    wider = max(seen.ratio, 1 / seen.ratio if seen.ratio else math.inf)
    scaled = wider > WIDER * (1 + 2 / min(seen.samples) ** 0.5)
    far = FAR if seen.drift > STEADY else APART
    moved = seen.sure > SURE and (seen.shift > far or (seen.shift > MOVED and wider > DRIFTS))
    if seen.drift > DRIFT and seen.shift < CERTAIN and wider < CERTAIN and not seen.swapped:
        return None  # a series in time: validation comes later, and is different
    if not (seen.swapped or scaled or moved):
        return None
    numbers = (
        f"mean {short(seen.val[0])} and deviation {short(seen.val[1])}, training inputs "
        f"{short(seen.train[0])} and "
        f"{short(seen.train[1])}"
    )
    title = (
        "Validation inputs have their channels in another order than training inputs (RGB and BGR)"
        if seen.swapped
        else f"Validation inputs are prepared in another way than training inputs: they have {numbers}"
    )
    fix = Fix(
        "Prepare both in the same way.", "val_set.transform = plain_transform  # training's, without augmentation"
    )
    return finding(
        "preprocessing-mismatch",
        title,
        ["val_loader", "train_loader"],
        [fix],
        training=f"mean {short(seen.train[0])}, deviation {short(seen.train[1])}",
        validation=f"mean {short(seen.val[0])}, deviation {short(seen.val[1])}",
        shift_in_training_deviations=seen.shift,
        deviation_over_training_s=seen.ratio,
        samples=f"{seen.samples[0]:,} and {seen.samples[1]:,}",
    )


@rule(
    code="training/same-seed-workers",
    title="The loader's workers draw the same random numbers.",
    symptom="With workers, samples of different workers get the very same augmentation, or each epoch repeats the "
    "first; with num_workers=0 they differ.",
    cause="Each worker gets a copy of the dataset, with a copy of its generator in it. A generator that the dataset "
    "holds, or a seed that worker_init_fn sets to a constant, then gives all of them the same draws.",
    confirm="Return the random draw with the item, and print it for two workers and two epochs.",
    fix="Seed the generator in the worker, from its own seed: `worker_init_fn=lambda i: "
    "torch.utils.data.get_worker_info().dataset.rng.seed(torch.initial_seed() % 2**32)`, or draw from torch.",
    reference="https://github.com/pytorch/pytorch/issues/5059",
)
def same_seed_workers(facts: TrainingFacts) -> Finding | None:
    seen = None if facts.before is None else facts.before.workers
    if seen is None or not seen.random or not (seen.alike or seen.repeats):
        return None
    held = f" (the dataset's `{seen.holder}`)" if seen.holder else ""
    what = " and ".join(
        [f"the loader's {seen.workers} workers draw the same random numbers"] * seen.alike
        + ["each pass repeats the first"] * seen.repeats
    )
    title = f"{what[0].upper()}{what[1:]}{held}: asked for one item again and again, they give the same series"
    name = seen.holder.rpartition(".")[2] or "rng"
    fix = Fix(
        "Seed the generator in each worker, from the worker's own seed.",
        "def seed_worker(i):\n    info = torch.utils.data.get_worker_info()\n"
        f"    info.dataset.{seen.holder or name} = np.random.RandomState(info.seed % 2**32)\n\n"
        "DataLoader(dataset, num_workers=..., worker_init_fn=seed_worker)",
    )
    return finding(
        "same-seed-workers",
        title,
        ["train_loader", "worker_init_fn", name],
        [fix],
        workers=seen.workers,
        workers_alike=seen.alike,
        passes_alike=seen.repeats,
    )


@rule(
    code="training/class-imbalance",
    title="Nearly all labels are of one class, and the loss counts all alike.",
    symptom="The accuracy looks excellent, and one class is predicted for everything.",
    cause="Saying the common class always costs little where the loss counts each sample alike.",
    confirm="`torch.bincount(labels)`; the share of the commonest is the accuracy of a constant.",
    fix="Weight the loss (`F.cross_entropy(..., weight=…)`, `pos_weight`), or sample evenly "
    "(`WeightedRandomSampler`); judge by recall or F1 of each class.",
    reference="https://github.com/amanshenoy/multilogue-net/issues/8",
)
def class_imbalance(facts: TrainingFacts) -> Finding | None:
    before, run = facts.before, facts.run
    if before is None or any(call.weighted for call in before.losses):
        return None
    seen = before.labels
    known = seen is not None and len(seen.counts) > 1 and seen.total >= ENOUGH
    counts = dict(seen.counts) if seen is not None and known and (seen.complete or not seen.sequential) else {}
    missed = ""
    if run is not None and run.recalls:
        counts, missed = counts or {k: there for k, (there, _) in run.recalls.items()}, _missed(run.recalls)
        if not missed:
            return None  # a rare class that is found all the same
    total = sum(counts.values())
    if len(counts) < 2 or total < ENOUGH or max(counts.values()) < (COMMON if missed else ALONE) * total:
        return None
    return _imbalance(counts, missed, facts)


def _missed(recalls: Mapping[str, tuple[int, int]]) -> str:
    """How few of the rare classes' samples are found, as a sentence; "" where they are found, or too few are there."""
    common = max(recalls, key=lambda k: recalls[k][0])
    rare = [pair for label, pair in recalls.items() if label != common]
    there, found = sum(n for n, _ in rare), sum(n for _, n in rare)
    return (
        f"of the {there:,} others that were looked at, the trained model finds {found:,}"
        if (there >= FEW and found < FOUND * there)
        else ""
    )


def _imbalance(counts: Mapping[str, int], missed: str, facts: TrainingFacts) -> Finding:
    before, total = facts.before, sum(counts.values())
    label, most = max(counts.items(), key=lambda pair: pair[1])
    rare = min(counts.items(), key=lambda pair: pair[1])
    title = (
        f"{most / total:.1%} of the labels are {label}, and the loss counts every one alike: a model that "
        f"always says {label} is right that often (label {rare[0]} comes {rare[1]:,} times in {total:,})"
    )
    title += f"; {missed}" if missed else ""
    weights = [short(total / (len(counts) * count)) for _, count in sorted(counts.items(), key=_as_number)]
    listing = ", ".join(weights[:8]) + (", …" if len(weights) > 8 else "")
    losses = before.losses if before is not None else ()
    binary = bool(losses) and losses[0].op.startswith("binary")
    code = (
        f"pos_weight = torch.tensor([{short(counts.get('0', 0) / max(1, counts.get('1', 1)))}])\n"
        "F.binary_cross_entropy_with_logits(output, target, pos_weight=pos_weight)"
        if binary
        else f"weight = torch.tensor([{listing}])\nF.cross_entropy(output, target, weight=weight)"
    )
    fix = Fix("Weight the classes by how rare they are.", code)
    return finding(
        "class-imbalance",
        title,
        ["train_loader", "loss_fn"],
        [fix],
        place=losses[0].where if losses else None,
        commonest=most / total,
        labels=dict(sorted(counts.items(), key=lambda p: -p[1])[:8]),
        found_of_each_class={
            k: f"{found:,} of {there:,}" for k, (there, found) in sorted(facts.run.recalls.items())[:8]
        }
        if facts.run and missed
        else None,
    )


def _as_number(pair: tuple[str, int]) -> float:
    try:
        return float(pair[0])
    except ValueError:
        return 0.0


@rule(
    code="training/leakage",
    title="Validation samples stand in the training set.",
    symptom="Validation is as good as training, and the test set or the real world is not.",
    cause="The split was made after copies were added, by rows instead of by groups, or both loaders read the same "
    "dataset.",
    confirm="Hash each sample and intersect the two sets.",
    fix="Split first, by source or group; augment and oversample training only.",
    reference="https://doi.org/10.1016/j.patter.2023.100804",
)
def leakage(facts: TrainingFacts) -> Finding | None:
    seen = None if facts.before is None else facts.before.overlap
    if seen is None or not seen.seen or seen.shared < 3:
        return None
    share, by_chance = seen.shared / seen.seen, seen.within * seen.seen
    sure = share >= ABOVE_CHANCE * seen.within and seen.shared > by_chance + BY_CHANCE * (by_chance + 1) ** 0.5
    if share < SHARED or not (seen.unlikely or sure):
        return None
    both = ": both loaders read the same dataset" if seen.same_dataset else ""
    title = (
        f"{seen.shared:,} of {seen.seen:,} validation samples ({share:.0%}) stand in the training set too, to "
        f"the last bit{both}"
    )
    fix = Fix(
        "Split before anything is copied, and check the split.",
        "train_set, val_set = torch.utils.data.random_split(dataset, [0.9, 0.1])",
    )
    return finding(
        "leakage",
        title,
        ["val_loader", "train_loader"],
        [fix],
        shared=seen.shared,
        validation_rows=seen.seen,
        training_rows=seen.train,
        twins_within_training=seen.within,
    )
