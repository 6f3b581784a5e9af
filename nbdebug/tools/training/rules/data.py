"""Rules over what goes in, as the loaders give it: scale, training against validation, labels, workers, shared rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.training.facts import ClassWeighting, HeldOut, TrainingFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    REREAD,
    at_line,
    confused,
    feature_name,
    finding,
    pos_weight,
    suggestion,
    tensor_of,
    tested_fix,
    wrong_call,
)
from nbdebug.tools.training.rules.signs import helps, helps_validation
from nbdebug.tools.training.static_facts import (
    AnswersAmongInputs,
    Labels,
    LossCall,
    Overlap,
    SeesAhead,
    SharedGroups,
    TellingFeature,
)

LARGE = 10.0
"""Root mean square of a feature, beyond which inputs count as not normalized (DLCheck: a mean over 10)."""
STRONG = 4.0
"""… and of the first layer's output: weights made for such inputs bring them down to about one."""
COMMON, ALONE = 0.9, 0.98
"""Share of the commonest label (SageMaker Debugger: 10 to 1): the first where a run has shown that the others are not
found, the second where only the labels are known (traintools: 95%; three in a hundred may be easy to tell apart)."""
FEW, RECALL = 10, 0.2
"""… not found: less than that share of at least so many. A rare class that is learned well is no fault."""
ENOUGH = 100
"""Labels that have to be read before their shares mean anything."""
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
NEARLY_ALL = 0.95
"""Of samples: a diffusion's last steps may be nothing but noise."""
SHARED, NEAR = 0.02, 0.2
"""Shares of validation rows that are in the training set, and that are near copies of training rows."""
SAME = 1e-9
"""A line through a column leaves less of the target's variance: it is the target itself."""
ABOVE_CHANCE, BY_CHANCE = 3.0, 4.0
"""… over the share of training rows that have a twin in training: in few bits, rows are equal by chance in both. And
the number itself has to be so many of its standard deviations (the root of what chance gives, and one) above that."""


@rule(
    code="training/input-not-normalized",
    title="Inputs are far too large for the first layer.",
    symptom="The loss starts far above that of guessing, or stays there; tanh and sigmoid layers saturate at once. The "
    "same model learns from scaled inputs.",
    cause="Initial weights are made for inputs of about one. Pixels from 0 to 255 or raw amounts make the first "
    "layer's outputs and gradients larger by the same factor, and no single learning rate suits them and the rest.",
    confirm="Print `x.mean(), x.std()` by channel or feature, right before the model.",
    fix="Subtract the training mean and divide by the training deviation, by channel or feature (for pixels: divide by "
    "255 at least), in training and validation alike.",
    reference="https://doi.org/10.1007/978-3-642-35289-8_3",
)
def input_not_normalized(facts: TrainingFacts) -> Finding | None:
    layers = facts.static.first_layers
    if facts.static.reread in REREAD:
        return finding(
            "input-not-normalized",
            REREAD[facts.static.reread],
            ["dataset", "__getitem__", "train_loader"],
            [Fix("Work on a copy.", "x = self.data[i].clone()  # or x = (x - mean) / std, which makes a new tensor")],
        )
    raw = [f for f in layers if f.rms > LARGE and f.out > STRONG and f.trained and not f.normalized]
    experiment = facts.experiment("standardized")
    if not raw and experiment is not None and helps(experiment, 0.5) and helps_validation(experiment, 0.6):
        raw = list(layers)
    if not raw:
        return None
    first = max(raw, key=lambda f: f.rms)
    what = f"feature {first.feature} of {first.features}" if first.features > 1 else "the input"
    title = (
        f"Inputs are not normalized: {what} has mean {figures(first.mean)} and deviation {figures(first.std)}, and the "
        f"output of `{first.module or first.op}` has a size of {figures(first.out)}, where about 1 is usual"
    )
    fix = Fix(
        "Scale inputs to mean 0 and deviation 1, in training and validation alike.", "x = (x - train_mean) / train_std"
    )
    return finding(
        "input-not-normalized",
        title,
        ["train_loader", "dataset", first.module],
        [fix if experiment is None else tested_fix(fix.title, fix.code, experiment)],
        module=first.module,
        evidence={
            "inputs": f"from {figures(first.low)} to {figures(first.high)}",
            "mean": first.mean,
            "deviation": first.std,
            "size of the first layer's output": first.out,
        },
    )


@rule(
    code="training/preprocessing-mismatch",
    title="Validation inputs are preprocessed differently from training inputs.",
    symptom="Training goes well, and validation is bad from the first epoch on, though the images look alike. More "
    "data or dropout do not help.",
    cause="Only one of the two transforms normalizes, they use other constants, one divides by 255 twice, or the "
    "channels come in another order.",
    confirm="Print `x.mean(), x.std()` by channel over some batches of each loader.",
    fix="Use one transform for both and add only the random augmentation to that of training.",
    reference="https://github.com/JeasunLok/ResNet-pytorch/issues/1",
)
def preprocessing_mismatch(facts: TrainingFacts) -> Finding | None:
    shift = facts.static.input_shift
    held_out = None if facts.run is None else facts.run.held_out
    if facts.run is not None and facts.run.renumbered is not None:
        return _renumbered(*facts.run.renumbered)
    if facts.static.labels is not None and facts.static.labels.unseen:
        return _unseen_labels(facts.static.labels)
    if held_out is not None and held_out.what == "unlike":
        return _unlike(held_out)
    if shift is None:
        return None
    if shift.apart and facts.run is not None and (end := signs.far_behind(facts.run)) is not None:
        return _scaled_apart(*end)
    wider = max(shift.ratio, 1 / shift.ratio if shift.ratio else math.inf)
    scaled = wider > WIDER * (1 + 2 / min(shift.samples) ** 0.5)
    far = FAR if shift.drift > STEADY else APART
    moved = shift.errors > SURE and (shift.shift > far or (shift.shift > MOVED and wider > DRIFTS))
    if shift.drift > DRIFT and shift.shift < CERTAIN and wider < CERTAIN and not shift.swapped:
        return None  # a series in time: validation comes later, and is different
    if not (shift.swapped or scaled or moved):
        return None
    train, val = (f"mean {figures(mean)}, deviation {figures(std)}" for mean, std in (shift.train, shift.val))
    title = (
        "Validation inputs have their channels in another order than training inputs (RGB and BGR)"
        if shift.swapped
        else f"Validation inputs are preprocessed differently from training inputs: {val}; in training {train}"
    )
    fix = Fix("Preprocess both in the same way.", "val_set.transform = plain_transform  # without augmentation")
    return finding(
        "preprocessing-mismatch",
        title,
        ["val_loader", "train_loader"],
        [fix],
        evidence={
            "training": train,
            "validation": val,
            "shift, in training deviations": shift.shift,
            "validation deviation over training deviation": shift.ratio,
            "samples": f"{shift.samples[0]:,} and {shift.samples[1]:,}",
        },
    )


def _unlike(held_out: HeldOut) -> Finding:
    return finding(
        "preprocessing-mismatch",
        f"Validation samples are not like training samples: a model trained on half of the training set has a loss of "
        f"{figures(held_out.unseen)} on the other half, which it has not seen, and of {figures(held_out.val)} on "
        "validation data. Inputs or labels are prepared in another way there, or come from elsewhere",
        ["val_loader", "train_loader"],
        [
            Fix(
                "Prepare inputs and labels of both in the same way; print some of each, and their outputs.",
                "for x, y in map(next, map(iter, (train_loader, val_loader))):\n    print(x[:3], y[:3], model(x[:3]))",
            )
        ],
        evidence={"samples": held_out.samples, "steps": held_out.steps, **confused(held_out)},
    )


def _scaled_apart(train: float, val: float) -> Finding:
    code = "mean, std = x_train.mean(0), x_train.std(0)\nx_train, x_val = (x_train - mean) / std, (x_val - mean) / std"
    return finding(
        "preprocessing-mismatch",
        "Validation inputs are scaled by their own mean and deviation, not by training's: both sets have mean 0 and "
        f"deviation 1 to the last digit. The loss ends at {figures(train)} on training batches, and at {figures(val)} "
        "on those of validation",
        ["val_loader", "train_loader", "mean"],
        [Fix("Take mean and deviation from the training set alone, for inputs and for targets.", code)],
        evidence={"training": train, "validation": val},
    )


def _renumbered(answers: Mapping[int, int], share: float, exchanged: float) -> Finding:
    """Validation numbers the classes otherwise. See `interventions.renumbered`."""
    others = [f"{answer} where it says {label}" for label, answer in answers.items() if label != answer]
    return finding(
        "preprocessing-mismatch",
        f"Validation numbers its classes otherwise than training: the model answers {listed(others, quote='')}; with "
        f"the numbers so exchanged {percent(exchanged)} of validation is right, and {percent(share)} as it stands",
        ["val_loader", "labels", "factorize", "LabelEncoder", "encode"],
        [
            Fix(
                "Number the classes once, by training, and use these numbers for both.",
                "codes, names = pd.factorize(train['label'])\nval_codes = names.get_indexer(val['label'])",
            )
        ],
        evidence={"label → answer": {str(label): answer for label, answer in answers.items()}},
    )


@rule(
    code="training/input-dropped",
    title="A part of the samples that the model would use never reaches it.",
    symptom="The model learns as much as the other inputs tell, and to shuffle this one changes nothing.",
    cause="What collates a batch leaves it out. transformers' Trainer drops each column that `forward` does not name "
    "in its signature, also where `forward` would take it out of its **kwargs.",
    confirm="Compare the keys of `dataset[0]` with those of a batch.",
    fix="`remove_unused_columns=False`, or name the column in the signature of `forward`.",
    reference="https://huggingface.co/docs/transformers/main_classes/trainer",
)
def input_dropped(facts: TrainingFacts) -> Finding | None:
    title = (
        "The dataset gives `{0}`, and its batches come without it: with it the loss of the same samples is {2:.4g}, "
    )
    title += "without it {1:.4g}"
    code = "TrainingArguments(..., remove_unused_columns=False)  # of a collate_fn of your own: keep it there"
    names = ["{0}", "remove_unused_columns", "collate_fn", "forward"]
    return wrong_call(facts.static, "left out", "input-dropped", title, names, Fix("Keep the column.", code))


@rule(
    code="training/same-seed-workers",
    title="The loader's workers draw the same random numbers.",
    symptom="With workers, samples of different workers get the very same augmentation, or each epoch repeats the "
    "first; with num_workers=0 they differ.",
    cause="Each worker gets a copy of the dataset, with a copy of its generator in it. A generator that the dataset "
    "holds, or a seed that worker_init_fn sets to a constant, then gives all of them the same draws.",
    confirm="Return the random draw with the item, and print it for two workers and two epochs.",
    fix="Seed the generator in the worker, from its own seed: `worker_init_fn=lambda i: "
    "torch.utils.data.get_worker_info().dataset.rng.seed(torch.initial_seed() % 2**32)`, or draw with torch.",
    reference="https://github.com/pytorch/pytorch/issues/5059",
)
def same_seed_workers(facts: TrainingFacts) -> Finding | None:
    draws = facts.static.workers
    if draws is None or not draws.random or not (draws.alike or draws.repeats):
        return None
    holder = f" (from the dataset's `{draws.holder}`)" if draws.holder else ""
    faults = " and ".join(
        [f"the loader's {draws.workers} workers draw the same random numbers"] * draws.alike
        + ["each pass repeats the first"] * draws.repeats
    )
    name = draws.holder.rpartition(".")[2] or "rng"
    fix = Fix(
        "Seed the generator in each worker, from the worker's own seed.",
        "def seed_worker(i):\n    info = torch.utils.data.get_worker_info()\n"
        f"    info.dataset.{draws.holder or name} = np.random.RandomState(info.seed % 2**32)\n\n"
        "DataLoader(dataset, num_workers=..., worker_init_fn=seed_worker)",
    )
    return finding(
        "same-seed-workers",
        f"{faults[0].upper()}{faults[1:]}{holder}: read several times, the same item gives the same series of values",
        ["train_loader", "worker_init_fn", name],
        [fix],
        evidence={"workers": draws.workers, "workers alike": draws.alike, "passes alike": draws.repeats},
    )


@rule(
    code="training/class-imbalance",
    title="Nearly all labels are of one class, and the loss gives each sample the same weight.",
    symptom="The accuracy looks excellent, and the model predicts one class for everything.",
    cause="Always predicting the common class costs little where the loss gives each sample the same weight.",
    confirm="Print `torch.bincount(labels)`: the share of the commonest is the accuracy of a constant prediction.",
    fix="Weight the loss (`F.cross_entropy(..., weight=…)`, `pos_weight`), or sample evenly "
    "(`WeightedRandomSampler`); judge by recall or F1 of each class.",
    reference="https://github.com/amanshenoy/multilogue-net/issues/8",
)
def class_imbalance(facts: TrainingFacts) -> Finding | None:
    static, run = facts.static, facts.run
    if (upside_down := _upside_down(facts)) is not None:
        return upside_down
    if run is not None and run.weighting is not None and not run.weighting.inverse:
        return _drowned(run.weighting, facts)
    if any(call.weighted for call in static.loss_calls):
        return None
    labels = static.labels
    known = labels is not None and len(labels.counts) > 1 and labels.total >= ENOUGH
    counts = dict(labels.counts) if labels is not None and known and (labels.complete or not labels.sequential) else {}
    missed = ""
    if run is not None and run.recalls:
        counts, missed = counts or {label: there for label, (there, _) in run.recalls.items()}, _missed(run.recalls)
        if not missed:
            return None  # a rare class that is found all the same
    total = sum(counts.values())
    if len(counts) < 2 or total < ENOUGH or max(counts.values()) < (COMMON if missed else ALONE) * total:
        return None
    return _imbalance(counts, missed, facts)


def _upside_down(facts: TrainingFacts) -> Finding | None:
    """The common classes have the large weights: certain where the weights are the counts, else shown by a run."""
    static, weighting = facts.static, None if facts.run is None else facts.run.weighting
    call = next((c for c in static.loss_calls if c.weights), None)
    if call is None:
        return None
    inverse = weighting if weighting is not None and weighting.inverse else None
    counts = static.labels.counts if static.labels is not None else inverse.counts if inverse is not None else {}
    follows = signs.weights_follow(call.weights, counts)
    if not follows or (follows != "exactly" and inverse is None):
        return None
    total = sum(counts.values())
    common = max(counts, key=lambda k: counts[k])
    rare = min((k for k in counts if counts[k]), key=lambda k: counts[k])
    weights = [
        f"{k} ({percent(counts[k] / total)} of the labels) {figures(call.weights[int(k)])}" for k in (common, rare)
    ]
    name = "pos_weight" if call.op.startswith("binary") else "weight"
    title = "The class weights are upside down: they grow with how common a class is. "
    title += f"Label {' and label '.join(weights)}"
    fix = Fix("Weight the classes by how rare they are.", f"{name} = 1 / {name}")
    if inverse is not None:
        title += (
            f"; the mean F1 of the other classes than {common} is {figures(inverse.before)}, and "
            f"{figures(inverse.after)} with one over each weight"
        )
        after = {"score of the other classes": inverse.before, "in the experiment": inverse.after}
        fix = suggestion(fix.title, fix.code, "with one over each weight", after)
    return finding(
        "class-imbalance",
        title,
        ["loss_fn", name, "train_loader"],
        [fix],
        place=call.where,
        evidence={"weights": list(call.weights[:8]), "labels": dict(list(counts.items())[:8])},
    )


def _drowned(weighting: ClassWeighting, facts: TrainingFacts) -> Finding:
    """A run with all classes alike has found the others."""
    total, losses = sum(weighting.counts.values()), facts.static.loss_calls
    share, common = percent(weighting.counts[weighting.common] / total), weighting.common
    if weighting.left_out:
        what = (
            f"{share} of all labels are {common}, which is most of the loss: the other labels are told apart in "
            f"{percent(weighting.before)}, and in {percent(weighting.after)} once {common} does not count"
        )
        title, code = (
            "If it stands for padding, leave it out of the loss (else weight the classes).",
            f"F.cross_entropy(output, target, ignore_index={common})",
        )
    else:
        what = (
            f"{share} of all labels are {common}, which drowns the others: their mean F1 is "
            f"{figures(weighting.before)}, and {figures(weighting.after)} once all classes weigh alike"
        )
        title, code = "Weight the classes by how rare they are.", f"weight = {tensor_of(weighting.weights)}"
        if losses and losses[0].op == "binary_cross_entropy_with_logits" and len(weighting.weights) == 2:
            code = f"pos_weight = torch.tensor([{pos_weight(weighting.weights)}])"
            code += "\nF.binary_cross_entropy_with_logits(output, target, pos_weight=pos_weight)"
        if losses and losses[0].op == "cross_entropy":
            code += "\nF.cross_entropy(output, target, weight=weight)"
    how = f"without the loss of label {common}" if weighting.left_out else "with all classes weighed alike"
    after = {"score of the other classes": weighting.before, "in the experiment": weighting.after}
    return finding(
        "class-imbalance",
        what,
        ["loss_fn", "train_loader"],
        [suggestion(title, code, how, after)],
        place=losses[0].where if losses else None,
        evidence={"labels": dict(list(weighting.counts.items())[:8])},
    )


def _missed(recalls: Mapping[str, tuple[int, int]]) -> str:
    """How few of the rare classes' samples are found, as a sentence; "" where they are found, or there are too few."""
    common = max(recalls, key=lambda label: recalls[label][0])
    rare = [pair for label, pair in recalls.items() if label != common]
    there, hits = sum(n for n, _ in rare), sum(n for _, n in rare)
    return (
        f"of {there:,} samples of the other classes, the trained model finds {hits:,}"
        if there >= FEW and hits < RECALL * there
        else ""
    )


def _imbalance(counts: Mapping[str, int], missed: str, facts: TrainingFacts) -> Finding:
    total, losses = sum(counts.values()), facts.static.loss_calls
    label, most = max(counts.items(), key=lambda pair: pair[1])
    rare, few = min(counts.items(), key=lambda pair: pair[1])
    title = (
        f"{percent(most / total)} of the labels are {label}, and the loss gives each sample the same weight: a model "
        f"that always predicts {label} is right that often (label {rare}: {few:,} of {total:,})"
    )
    if losses and losses[0].op.startswith("binary"):
        ratio = figures(counts.get("0", 0) / max(1, counts.get("1", 1)))
        code = (
            f"pos_weight = torch.tensor([{ratio.replace(',', '')}])\n"
            "F.binary_cross_entropy_with_logits(output, target, pos_weight=pos_weight)"
        )
    else:
        weights = [f"{total / (len(counts) * n):.3g}" for _, n in sorted(counts.items(), key=_as_number)]
        listing = ", ".join(weights[:8]) + (", …" if len(weights) > 8 else "")
        code = f"weight = torch.tensor([{listing}])\nF.cross_entropy(output, target, weight=weight)"
    recalls = facts.run.recalls if facts.run and missed else {}
    return finding(
        "class-imbalance",
        title + (f"; {missed}" if missed else ""),
        ["train_loader", "loss_fn"],
        [Fix("Weight the classes by how rare they are.", code)],
        place=losses[0].where if losses else None,
        evidence={
            "share of the commonest": most / total,
            "labels": dict(sorted(counts.items(), key=lambda pair: -pair[1])[:8]),
            "found of each class": {k: f"{hits:,} of {there:,}" for k, (there, hits) in sorted(recalls.items())[:8]}
            or None,
        },
    )


def _as_number(pair: tuple[str, int]) -> float:
    try:
        return float(pair[0])
    except ValueError:
        return 0.0


@rule(
    code="training/leakage",
    title="Validation samples are in the training set.",
    symptom="Validation is as good as training, and the test set or the real world is not.",
    cause="The split was made after copies were added, by rows instead of by groups, or both loaders read the same "
    "dataset.",
    confirm="Hash each sample and intersect the two sets.",
    fix="Split first, by source or group; augment and oversample training only.",
    reference="https://doi.org/10.1016/j.patter.2023.100804",
)
def leakage(facts: TrainingFacts) -> Finding | None:
    static, overlap, answers = facts.static, facts.static.overlap, facts.static.answers
    if answers is not None and answers.columns:
        return _answer_among_inputs(answers)
    if answers is not None and answers.feature is not None and answers.feature.others is not None:
        return _one_feature_tells(answers.feature, answers.feature.others)
    if static.ahead is not None and not static.ahead.twice:
        return _sees_ahead(static.ahead)
    if given := [call for call in static.loss_calls if call.given > NEARLY_ALL]:
        return _given(given[0])
    if static.groups is not None:
        return _on_both_sides(static.groups)
    if overlap is not None and overlap.near > max(NEAR, 3 * overlap.near_by_chance + 0.1) and not overlap.shared:
        return _near_copies(overlap)
    if overlap is None or not overlap.rows or overlap.shared < 3:
        return None
    share, by_chance = overlap.shared / overlap.rows, overlap.duplicates * overlap.rows
    above = overlap.shared > by_chance + BY_CHANCE * (by_chance + 1) ** 0.5
    sure = share >= ABOVE_CHANCE * overlap.duplicates and above
    if share < SHARED or not (overlap.distinctive or sure):
        return None
    both = ": both loaders read the same dataset" if overlap.same_dataset else ""
    fix = Fix(
        "Split before any copies are made, and check the split.",
        "train_set, val_set = torch.utils.data.random_split(dataset, [0.9, 0.1])",
    )
    return finding(
        "leakage",
        f"{overlap.shared:,} of {overlap.rows:,} validation samples ({percent(share)}) are in the training set too, "
        f"exactly the same{both}",
        ["val_loader", "train_loader"],
        [fix],
        evidence={
            "shared": overlap.shared,
            "validation rows": overlap.rows,
            "training rows": overlap.train,
            "share of twins within training": overlap.duplicates,
        },
    )


def _given(call: LossCall) -> Finding:
    return finding(
        "leakage",
        f"The target stands in the input: the model is given the very numbers that it is to predict in "
        f"{percent(call.given)} of the samples, drawn at random{at_line(call.where)}. It learns to copy",
        ["noise", "target", "loss_fn", "forward"],
        [Fix("Check what is mixed with them: hardly anything is left of the data.", "print(signal_rate, noise_rate)")],
        place=call.where,
        evidence={"samples": call.given},
    )


def _sees_ahead(ahead: SeesAhead) -> Finding:
    if ahead.itself:
        return finding(
            "leakage",
            "The targets are the inputs as they stand, not one place on: the model reads forwards only, and gives back "
            f"each token that it has just read{at_line(ahead.where)}. It learns to copy",
            ["target", "train_loader", "loss_fn"],
            [
                Fix(
                    "Let each output predict the next token (once: some models shift the labels themselves).",
                    "F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())",
                )
            ],
            place=ahead.where,
        )
    return finding(
        "leakage",
        f"The model sees what it is to predict: the targets are the inputs one place on, and outputs before time step "
        f"{ahead.at} change with the token at {ahead.at}{at_line(ahead.where)}. There is no causal mask, or something "
        "reads the sequence backwards",
        [ahead.where.module or "model", "forward", "mask"],
        [
            Fix(
                "Mask later positions; no bidirectional layer, no normalization over time.",
                "mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])\n"
                "encoder(x, mask=mask, is_causal=True)  # or scaled_dot_product_attention(..., is_causal=True)",
            )
        ],
        place=ahead.where,
    )


def _answer_among_inputs(answers: AnswersAmongInputs) -> Finding:
    column, left = min(answers.columns.items(), key=lambda pair: pair[1])
    columns = sorted(answers.columns)
    what = f"Column {column} of the inputs ({'flattened, ' * (answers.how == 'copied')}from 0) "
    if answers.how == "label":
        names = listed([str(c) for c in columns])
        one = len(columns) == 1
        what = f"Column{'' if one else 's'} {names} of the inputs (flattened, from 0) {'is' if one else 'are'} "
    what += {
        "label": "the label in other numbers",
        "nearly": f"tells the label in {f'all but {percent(left)}' if left else 'each'} of the training samples",
        "copied": "is a column of the target",
    }.get(
        answers.how,
        f"is the target{' in another unit' if left < SAME else ' with a little noise'}: a line through it leaves "
        f"{figures(left)} of the target's variance, and all other columns can't tell that part",
    )
    return finding(
        "leakage",
        f"{what}{': the' if answers.how == 'label' else '. The'} model reads the answer off",
        ["train_loader", "target", "features", "forward"],
        [
            Fix(
                "Take the label out of the inputs."
                if answers.how == "label"
                else "Take the target out of the inputs, and all that is only known after it.",
                f"x = x[:, [c for c in range(x.shape[1]) if c not in {columns}]]",
            )
        ],
        evidence={"columns": columns[:12], "share left open": left},
    )


def _one_feature_tells(feature: TellingFeature, others: float) -> Finding:
    code = {
        "token": f"x = x.masked_fill(x == {feature.which}, padding)",
        "column": f"x = x[:, [c for c in range(x.shape[1]) if c != {feature.which}]]",
    }.get(feature.kind, f"x = x.flatten(1).index_fill(1, torch.tensor([{feature.which}]), 0.0).view_as(x)")
    return finding(
        "leakage",
        f"{feature_name(feature)} alone tells the label in {percent(feature.share)} of the validation samples, "
        f"judged by its means in training samples; all others together tell {percent(others)}. The model reads the "
        "answer off",
        ["train_loader", "target", "features", "forward"],
        [Fix("Leave it out, unless it is known before the answer is.", code)],
        evidence={feature.kind: feature.which, "told": feature.share, "told by all others": others},
    )


def _on_both_sides(groups: SharedGroups) -> Finding:
    """Samples of one subject in training and in validation."""
    key = f"column {groups.column} of the inputs" if groups.column is not None else f"`{groups.name}`"
    code = (
        "from sklearn.model_selection import GroupShuffleSplit\nsplit = GroupShuffleSplit(n_splits=1, test_size=0.2)\n"
        f"train_rows, val_rows = next(split.split(x, y, groups={groups.name if groups.column is None else 'key'}))"
    )
    return finding(
        "leakage",
        f"The split lets groups stand on both sides: {percent(groups.seen)} of the validation samples have a value of "
        f"{key} that training samples have too ({groups.groups:,} values), and samples of one group are alike: the "
        f"nearest training sample is of the same in {percent(groups.alike)} (by chance {percent(groups.by_chance)})",
        ["val_loader", "train_loader", groups.name],
        [Fix("Split by group, so that each stands on one side only.", code)],
        evidence={"seen in training": groups.seen, "nearest of the same group": groups.alike},
    )


def _near_copies(overlap: Overlap) -> Finding:
    return finding(
        "leakage",
        f"{percent(overlap.near)} of the validation samples are near copies of training samples (or windows that "
        f"overlap with them); among training samples it is {percent(overlap.near_by_chance)}",
        ["val_loader", "train_loader"],
        [
            Fix(
                "Split by source, group or time before samples are cut or augmented.",
                "train_part, val_part = series[:cut], series[cut:]  # then make the windows of each",
            )
        ],
        evidence={"near copies": overlap.near, "by chance": overlap.near_by_chance},
    )


def _unseen_labels(labels: Labels) -> Finding:
    names, samples = list(labels.unseen), sum(labels.unseen.values())
    return finding(
        "preprocessing-mismatch",
        f"{count(samples, 'validation sample')} have labels that training does not have: {listed(names)}. "
        "The set was split in the order in which it lies, or by its classes",
        ["val_loader", "train_loader", "labels", "random_split"],
        [
            Fix(
                "Deal the samples before you split them.",
                "train, val = torch.utils.data.random_split(dataset, [0.8, 0.2])",
            )
        ],
        evidence={"labels": list(labels.counts)[:20], "only in validation": names[:20]},
    )
