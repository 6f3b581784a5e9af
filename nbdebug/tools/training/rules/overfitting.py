"""Rules over what a run reaches: a loss that stays up (regularization, a model that is too simple, the order or the
labels of the data), one that only falls on the training data, one that is zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.training.facts import (
    Experiment,
    HeldOut,
    Labels,
    MixedSamples,
    PairedAnew,
    StaticFacts,
    TeacherAnswers,
    TrainingFacts,
    TrainingRunFacts,
    Twins,
    UndecidedPair,
)
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.signs import (
    PRINT_LOSS_INPUTS,
    SHUFFLE,
    at_line,
    confused,
    finding,
    suggestion,
    tested_fix,
    wrong_call,
)

BELOW = 0.5
"""A small network of our own ends at this share of the model's loss, or below, on validation data (on training data
where there is none)."""
NO_BETTER = 0.95
"""Share of the loss of a constant answer, from which on the model has learned nothing."""
TOO_LARGE = 100.0
"""Trained parameters for each sample: beyond this the size of the model is named as the cause. (The story of 2.8
million parameters and 2,048 samples is at 1,400; a ratio of ten is common and harmless with early stopping.)"""
RISES = 1.1
"""The validation loss at its end over its lowest, from which on stopping earlier is worth a word."""
NOTHING = 1e-12
"""A loss below this is zero."""
TOLD_APART = 0.9
"""Of pairs of validation samples with two labels, whose scores come in one order (or as often in the other)."""
SORTED = 0.3
"""Runs of equal labels over what a shuffled order would have."""
DECIMALS = 5
"""A loss with fewer is rounded."""
SEVERAL = 2
"""Mixtures with a wrong target; a cut by area and the pixels in it differ by a few percent."""
LEFT_BY_TWINS = 0.1
"""Nats that right answers among the wrong ones leave of a loss; of a few in a batch less is left."""
LOOKED_AT, BY_FAR, SURELY_OTHERS = 100, 6.0, 0.8
"""Samples with a teacher's answer; standard errors; the share of equal answers from which on they may be its own."""
ZEROS = 5
"""So many zeros in a row, from the first step on, or half of the run (TrainProof: five points)."""

PENALTIES = {
    "no penalty": (
        "loss_fn",
        "the penalty on the weights in the loss",
        "Give the penalty a smaller weight.",
        "loss = data_loss + 1e-4 * penalty",
    ),
    "no weight decay": (
        "weight_decay",
        "weight decay",
        "Lower the weight decay.",
        "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=1e-2)",
    ),
    "weaker term": (
        "loss_fn",
        "a term of the loss",
        "Give the term a smaller weight.",
        "loss = error + 0.01 * term  # raise the weight later, if at all",
    ),
    "less dropout": ("dropout", "dropout", "Lower the dropout.", "torch.nn.Dropout(0.1)"),
}
"""By the experiment: the argument to blame, its name in a sentence, title and code of the fix."""


@rule(
    code="training/over-regularized",
    title="Regularization outweighs the loss.",
    symptom="Training and validation loss both stop high; weights shrink towards zero; the model predicts a mean.",
    cause="Weight decay, a penalty in the loss, or dropout pulls harder than the errors do.",
    confirm="Run the same training without it: the loss falls much lower, on validation data as well.",
    fix="Lower it by factors of ten until the training data fits; then raise it until validation is best.",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def over_regularized(facts: TrainingFacts) -> Finding | None:
    title = "`{op}` sets {:.0%} of the outputs to zero before the loss compares them{line}: no weights can mend that"
    fix = Fix(
        "Drop hidden units, before the last layer.", "nn.Sequential(…, nn.Dropout(0.1), nn.Linear(width, outputs))"
    )
    if dropped := wrong_call(facts.static, "dropped outputs", "over-regularized", title, ["dropout"], fix):
        return dropped
    run = facts.run
    if run is None:
        return None
    done = ((name, e) for name, e in run.experiments.items() if name in PENALTIES)
    helpful = [(name, e) for name, e in done if signs.helps(e) and signs.helps_validation(e)]
    if not helpful:
        return None
    name, experiment = min(helpful, key=lambda pair: pair[1].end_changed)
    argument, what, title, code = PENALTIES[name]
    amount = {
        "no weight decay": run.regularization.get("weight decay"),
        "less dropout": run.regularization.get("dropout"),
        "no penalty": run.penalty_end,
        "weaker term": run.outweighs,
    }[name]
    if name == "weaker term":
        return _outweighing_term(run, experiment)
    return finding(
        "over-regularized",
        f"Regularization outweighs the loss: with {what} ({figures(amount or 0.0)}) the loss on the data ends at "
        f"{figures(experiment.end_as_is)}, without it at {figures(experiment.end_changed)}",
        [argument, "optimizer" if name == "no weight decay" else "model"],
        [tested_fix(title, code, experiment)],
        run=run,
        evidence={what: amount},
    )


def _outweighing_term(run: TrainingRunFacts, experiment: Experiment) -> Finding:
    place = run.places.get("outweighing term")
    return finding(
        "over-regularized",
        f"A term of the loss outweighs the others{at_line(place) if place else ''}: with it they stay at "
        f"{figures(experiment.end_as_is)} and hardly use the inputs; with a hundredth of its gradient they fall "
        f"to {figures(experiment.end_changed)}",
        ["loss_fn", "model"],
        [tested_fix(*PENALTIES["weaker term"][2:], experiment)],
        run=run,
        place=place,
        evidence={"the term at the end": run.outweighs, "the others": experiment.end_as_is},
    )


@rule(
    code="training/underfit",
    title="The model is too simple for the data.",
    symptom="Training and validation loss stop together, far above what the data allows.",
    cause="Too few units or layers, no activation between them, inputs that the model never combines: no setting of "
    "its weights fits.",
    confirm="A small network with two hidden layers reaches a much lower loss on the same batches.",
    fix="Compare the two networks: put activations between linear layers, use all inputs, widen a narrow place.",
    reference="https://karpathy.github.io/2019/04/25/recipe/",
)
def underfit(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and run.lost_level > signs.LEARNS_LITTLE:
        return _level(run)
    if run is None or run.reference is None or not signs.settled(run) or signs.updates_are_small(run):
        return None
    if signs.at_floor(run):
        return None
    end = run.evaluations[-1]
    reference = run.reference.get("train" if end.val is None else "val")
    loss = end.train if end.val is None else end.val
    if run.reference.get("the model with Adam", 0.0) < signs.BETTER * end.train:
        return None  # the model can fit: its optimizer is what keeps it from doing so
    nothing = signs.learns_nothing(run) or _is_a_guess(facts, end.train)
    below = signs.BETTER if nothing or run.linear and len(run.layers) > 1 else BELOW
    if reference is None or not 0 <= reference < below * loss or end.train < 0.5 * loss:
        return None
    linear = run.linear and len(run.layers) > 1
    fix = tested_fix(
        "Put an activation between the layers: without one they are a single linear layer."
        if linear
        else "Compare the model with that network: look for inputs that it never combines, a narrow place, a cut, a "
        "missing activation. More units help only where one batch can't be memorized.",
        "nn.Sequential(nn.Linear(…), nn.ReLU(), nn.Linear(…))" if linear else "print(model)  # %preflight: one batch",
        Experiment("reference", (), (), end.train, run.reference["train"], end.val, run.reference.get("val")),
    )
    return finding(
        "underfit",
        f"The model is too simple for the data: its loss has settled at {figures(loss)}; a network with two hidden "
        f"layers of 128 units reaches {figures(reference)} with the same batches, loss function and number of steps",
        ["model"],
        [fix],
        run=run,
        evidence={
            "trained parameters": run.trained_elements,
            "loss": loss,
            "loss of the other network": reference,
            "steps": len(run.losses),
        },
    )


def _level(run: TrainingRunFacts) -> Finding:
    return finding(
        "underfit",
        "The outputs do not know the level of their inputs: with each sample moved by a number of its own they stay "
        f"as they are, and the mean of the inputs explains {percent(run.lost_level)} of the squared errors. What was "
        "taken off each sample is not given back",
        ["forward", "mean", "std", "loss_fn"],
        [Fix("Scale the outputs back.", "y = y * std + mean  # of each sample's own inputs")],
        run=run,
        evidence={"share of squared errors": run.lost_level},
    )


def _is_a_guess(facts: TrainingFacts, loss: float) -> bool:
    """The loss is that of an answer that does not look at the inputs."""
    return any(call.guess is not None and loss > NO_BETTER * call.guess for call in facts.static.loss_calls)


@rule(
    code="training/unshuffled-data",
    title="Batches hold samples of one kind: the data is not shuffled.",
    symptom="The training loss is a saw tooth: near zero, then high, then near zero. The final model knows the last "
    "class only.",
    cause="A dataset that is sorted by class is read with shuffle=False: for many steps in a row the model learns one "
    "answer, and forgets the others.",
    confirm="Print the labels of ten batches in a row.",
    fix="DataLoader(..., shuffle=True); for a stream a shuffle buffer; for several sources a sampler that mixes them.",
    reference="https://github.com/pytorch/vision/issues/7818",
)
def unshuffled_data(facts: TrainingFacts) -> Finding | None:
    run, experiment = facts.run, facts.experiment("shuffled")
    if facts.static.drawn is not None:
        return _partly_drawn(*facts.static.drawn)
    if run is None:
        return _in_runs(facts.static.labels)
    if experiment is None:
        return None
    order = run.order
    if not (signs.helps(experiment) if order.spread > signs.UNFAIR else signs.order_harms(run)):
        return None
    how = (
        f"a batch holds {order.classes:g} of {order.all_classes} classes"
        if order.classes is not None and order.all_classes and order.classes < 0.7 * order.all_classes
        else f"the batches' means differ {order.spread:.0f} times as much as after a shuffle"
        if order.spread > signs.UNFAIR
        else "it is read in the dataset's own order, and neighbours are alike"
    )
    return finding(
        "unshuffled-data",
        f"The training data is not shuffled: {how}. The model ends at a loss of {figures(experiment.end_as_is)}; on "
        f"the same samples, shuffled, at {figures(experiment.end_changed)}",
        ["train_loader"],
        [tested_fix(*SHUFFLE, experiment)],
        run=run,
        evidence={
            "spread of batch means (shuffled: 1)": order.spread,
            "classes in a batch": order.classes,
            "classes": order.all_classes,
            "read in the dataset's order": order.sequential,
        },
    )


def _in_runs(labels: Labels | None) -> Finding | None:
    """Before training: labels in long runs, read in the order of the dataset, or one run for each class."""
    if labels is None or len(labels.counts) < 2 or labels.batches < 4 or labels.total < 8 * len(labels.counts):
        return None
    classes = len(labels.counts)
    in_runs = labels.runs <= 2 * classes or labels.sequential and labels.runs < SORTED * labels.expected
    if not in_runs or labels.per_batch > max(1, classes / 2):
        return None
    return finding(
        "unshuffled-data",
        f"The training data is not shuffled: {labels.total:,} labels come in {labels.runs:,} runs of equal labels, "
        f"and a shuffled order has about {labels.expected:,.0f}; a batch holds {labels.per_batch:g} of {classes} "
        "classes",
        ["train_loader"],
        [Fix(*SHUFFLE)],
        evidence={
            "runs of equal labels": labels.runs,
            "expected when shuffled": round(labels.expected),
            "classes": classes,
            "classes in a batch": labels.per_batch,
        },
    )


def _partly_drawn(weights: int, samples: int) -> Finding:
    return finding(
        "unshuffled-data",
        f"The sampler draws the first {count(weights, 'sample')} of {samples:,} and no others: it has "
        f"{count(weights, 'weight')}, and takes one for each sample, not for each class",
        ["sampler", "train_loader", "weights"],
        [
            Fix(
                "Give each sample the weight of its class.",
                "sampler = torch.utils.data.WeightedRandomSampler(class_weights[labels], len(labels))",
            )
        ],
        evidence={"weights": weights, "samples": samples},
    )


@rule(
    code="training/label-noise",
    title="Many training labels are wrong.",
    symptom="The training loss stops far above zero while validation is better than training; a longer run only makes "
    "validation worse.",
    cause="A part of the annotations contradicts the rest: another convention, a shifted index, careless labelling. "
    "The model learns the truth from the rest, and each wrong label costs loss.",
    confirm="Look at the training samples with the highest loss: the model is right and the label is wrong.",
    fix="Review or drop the suspect samples; label smoothing and early stopping soften what is left.",
    reference="https://arxiv.org/abs/1911.00068",
)
def label_noise(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    held_out = run.held_out if run is not None else None
    if (unknown := _unknowable(facts.static)) is not None:
        return unknown
    if run is not None and run.paired_anew is not None:
        return _paired_anew(run, run.paired_anew)
    if run is not None and run.teacher is not None and (other := _of_other_samples(run, run.teacher)) is not None:
        return other
    matched = facts.experiment("matched")
    if run is not None and matched is not None and signs.helps(matched, signs.MUCH_BETTER):
        return _unmatched(run, matched)
    pair = None if run is None else run.undecided
    apart = None if pair is None else pair.val_apart
    if run is not None and pair is not None and apart is not None and not 1 - TOLD_APART < apart < TOLD_APART:
        return _exchanged(run, pair)
    if run is None or held_out is None or held_out.what not in ("noise", "unrelated"):
        return None
    if held_out.what == "unrelated":
        return _unrelated(run, held_out)
    experiment = run.experiments["without suspect labels"]
    as_is, without = experiment.val_as_is or 0.0, experiment.val_changed or 0.0
    fix = suggestion(
        "Review the samples that a model without them contradicts, or leave them out.",
        "suspect = loss_of_each_sample > validation_losses.quantile(0.97)  # by a model that has not seen them",
        "without them",
        {"validation as it is": as_is, "validation without them": without, "steps": len(experiment.changed)},
    )
    return finding(
        "label-noise",
        f"About {percent(held_out.share)} of the training labels look wrong: a model trained on the other half of the "
        f"samples has a loss of {figures(held_out.unseen)} on those that it has not seen, and of "
        f"{figures(held_out.val)} on validation data; without the suspect ones validation falls from {figures(as_is)} "
        f"to {figures(without)}",
        ["train_loader", "dataset", "labels"],
        [fix],
        run=run,
        evidence={"share of suspect labels": held_out.share, **confused(held_out)},
    )


def _unmatched(run: TrainingRunFacts, matched: Experiment) -> Finding:
    return finding(
        "label-noise",
        "The rows of a sample's targets are in no order of their own, and each row of the output is held against the "
        "one at its place: all learn the middle. The loss ends at "
        f"{figures(matched.end_as_is)}, and at {figures(matched.end_changed)} against the order that is nearest",
        ["loss_fn", "target", "boxes", "train_loader"],
        [
            tested_fix(
                "Match the rows of each sample before they are compared.",
                "rows, columns = scipy.optimize.linear_sum_assignment(torch.cdist(output[i], boxes[i]).detach())",
                matched,
            )
        ],
        run=run,
        evidence={"loss": matched.end_as_is, "with matched rows": matched.end_changed},
    )


def _of_other_samples(run: TrainingRunFacts, teacher: TeacherAnswers) -> Finding | None:
    """Answers that fit the labels no better than chance, where the model's own do, or where an input that comes again
    gets another one."""
    agrees, by_chance, samples = teacher.agrees, teacher.by_chance, teacher.samples
    error, again = (by_chance * (1 - by_chance) / samples) ** 0.5, max(teacher.again, 1)
    limit = teacher.same_by_chance + signs.AMONG_TEN * (teacher.same_by_chance / again) ** 0.5
    unlike = teacher.again >= LOOKED_AT and teacher.same < min(limit, SURELY_OTHERS)
    if samples < LOOKED_AT or agrees > by_chance + signs.AMONG_TEN * error:
        return None
    if not unlike and teacher.own < by_chance + BY_FAR * error:
        return None
    more = f"the model's own answers do in {percent(teacher.own)}"
    if unlike:
        more = f"an input that comes again gets its former answer in {percent(teacher.same)} of {again:,} times"
    return finding(
        "label-noise",
        f"The soft targets (a teacher's answers) are not of the samples that they are compared with: they agree with "
        f"the labels in {percent(agrees)} of {samples:,} samples, by chance {percent(by_chance)}; {more}",
        ["teacher", "train_loader", "loss_fn", *run.stale.functions],
        [
            Fix(
                "Ask the teacher about the batch at hand, or store its answers by the sample's index.",
                "with torch.no_grad():\n    answers = teacher(x)",
            )
        ],
        run=run,
        place=run.places.get("backward"),
        evidence={"samples": samples, "teacher's answers that are the label": agrees, "by chance": by_chance},
    )


def _unknowable(static: StaticFacts) -> Finding | None:
    """Targets that have nothing to do with what the model is given, by the way in which they come about."""
    if static.mixed is not None and static.mixed.wrong >= SEVERAL:
        return _mixed(static.mixed)
    if static.twins is not None and static.twins.floor > LEFT_BY_TWINS:
        return _twins(static.twins)
    call = next((c for c in static.loss_calls if c.noise), None)
    if call is None and static.reread != "apart":
        return signs.resized_masks() if static.reread == "resized" else None
    title = "A sample that is read again comes with the same inputs and another target: each is drawn for itself"
    if call is not None:
        title = f"`{call.op}` compares the outputs with random numbers that are in nothing that the model is given"
    fix = Fix("Draw once, and use the same for input and target.", "noise = torch.randn_like(x)  # or: flip = …")
    place = call.where if call is not None else None
    return finding("label-noise", title, ["target", "noise", "dataset", "train_loader"], [fix], place=place)


def _twins(twins: Twins) -> Finding:
    return finding(
        "label-noise",
        f"Right answers count as wrong ones: {twins.samples} of {twins.batch} samples have their own key in other "
        f"columns of the scores as well, since the batch holds it several times{at_line(twins.where)}. The loss "
        f"can't fall below {figures(twins.floor)}",
        ["loss_fn", "scores", "train_loader"],
        [
            Fix(
                "Take equal keys out of the other columns, or draw batches without them.",
                "same = (keys[:, None] == keys[None]).fill_diagonal_(False)\n"
                "scores = scores.masked_fill(same, -torch.inf)",
            )
        ],
        place=twins.where,
        evidence={"samples with twins": twins.samples, "lowest loss possible": twins.floor},
    )


def _mixed(mixed: MixedSamples) -> Finding:
    share, counted = map(percent, mixed.shares)
    return finding(
        "label-noise",
        f"Samples are mixed, and their targets are not mixed alike: in {mixed.wrong} of {mixed.draws} mixtures the row "
        f"that is most of a sample is not trained on most of its target (of the first of these it has {share} of the "
        f"sample and {counted} of its target)",
        ["target", "loss_fn", "train_loader", "collate_fn"],
        [
            Fix(
                "Mix the targets of the same two samples with the same weights.",
                "x = lam * x + (1 - lam) * x[order]\n"
                "loss = lam * criterion(model(x), y) + (1 - lam) * criterion(model(x), y[order])",
            )
        ],
        evidence={"mixtures": mixed.draws, "with another target": mixed.wrong},
    )


def _paired_anew(run: TrainingRunFacts, pairs: PairedAnew) -> Finding:
    if pairs.order:
        return _out_of_step(run, pairs)
    same, by_chance = percent(pairs.same), percent(pairs.other)
    return finding(
        "label-noise",
        f"Each pass gives the inputs the targets of other samples: an input that came again had the same target in "
        f"{same} of {pairs.again:,} times, which is what any order gives ({by_chance}). The one is shuffled or sorted "
        "without the other",
        ["train_loader", "dataset", "target", *run.stale.functions],
        [
            Fix(
                "Deal both in one and the same order.",
                "order = torch.randperm(len(x))\nx, y = x[order], y[order]  # of lists: shuffle the pairs",
            )
        ],
        run=run,
        place=pairs.where if pairs.where.line else run.places.get("backward"),
        evidence={"came again": pairs.again, "with the same target": pairs.same, "by chance": pairs.other},
    )


def _out_of_step(run: TrainingRunFacts, pairs: PairedAnew) -> Finding:
    same, other = percent(pairs.same), percent(pairs.other)
    fix = Fix(
        "Keep each input and its target together while they are made: one list of pairs.", "pairs = list(zip(x, y))"
    )
    if "as text" in pairs.order:
        fix = Fix(
            "Sort the names by their numbers, or look each target up by its name.",
            "names.sort(key=lambda name: int(pathlib.Path(name).stem))",
        )
    return finding(
        "label-noise",
        f"Inputs and targets are out of step: the inputs tell {same} of what the targets vary as they are paired, and "
        f"{other} with the targets in the order {pairs.order}",
        ["train_loader", "dataset", "target", "labels"],
        [fix],
        run=run,
        evidence={"samples": pairs.again, "told as paired": pairs.same, "told in the other order": pairs.other},
    )


def _exchanged(run: TrainingRunFacts, pair: UndecidedPair) -> Finding:
    """The scores tell the two apart in validation, and its own training labels contradict them."""
    one, other = pair.labels
    return finding(
        "label-noise",
        f"Labels {one} and {other} are exchanged in about half of the training samples: the model knows them from each "
        f"other in validation ({percent(max(pair.val_apart or 0.0, 1 - (pair.val_apart or 0.0)))} of pairs in the same "
        f"order), and training labels follow its scores no better than chance ({percent(pair.apart)})",
        ["train_loader", "target", "labels"],
        [
            Fix(
                "Review how these two labels get into the training set; put back what was exchanged.",
                f"rows = (labels == {one}) | (labels == {other})  # compare them with their sources",
            )
        ],
        run=run,
        evidence={"labels": list(pair.labels), "samples": pair.samples, "other labels found": pair.others},
    )


def _unrelated(run: TrainingRunFacts, held_out: HeldOut) -> Finding:
    return finding(
        "label-noise",
        "The training labels have nothing to do with the inputs: a model trained on half of the samples has a loss of "
        f"{figures(held_out.own)} on these, and on the others of {figures(held_out.unseen)} (with the labels of other "
        f"samples {figures(held_out.dealt)}). What it learns is memorized",
        ["train_loader", "dataset", "labels"],
        [
            Fix(
                "Join inputs and labels by a key, not by their order, and look at some pairs.",
                "table = inputs.merge(labels, on='id', validate='one_to_one')",
            ),
            Fix(
                "Where both are shuffled, give both the same order.",
                "order = rng.permutation(len(x))\nx, y = x[order], y[order]",
            ),
        ],
        run=run,
        evidence={"samples": held_out.samples, "steps": held_out.steps},
    )


def scaled_apart(train: float, val: float) -> Finding:
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


def renumbered(answers: Mapping[int, int], share: float, exchanged: float) -> Finding:
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
    code="training/exchanged-labels",
    title="Labels of pairs mean the opposite of what the loss takes them for.",
    symptom="A Siamese network, or another that compares pairs, learns slowly, and pairs that belong together end far "
    "apart.",
    cause="In one place 1 stands for alike, in another for unlike: the first paper on contrastive losses takes 0 for "
    "alike, CosineEmbeddingLoss takes 1 for alike and -1 for unlike.",
    confirm="Print the mean distance of pairs with either label before the first step: alike ones are mostly nearer.",
    fix="Exchange the labels: `1 - label`, or `-label`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CosineEmbeddingLoss.html",
)
def exchanged_labels(facts: TrainingFacts) -> Finding | None:
    tried = facts.experiment("exchanged labels")
    if tried is None or not signs.helps(tried, signs.MUCH_BETTER):
        return None
    if tried.val_changed is not None and tried.val_changed > signs.MUCH_BETTER * (tried.val_as_is or 0.0):
        return None
    fix = tested_fix("Exchange the labels of the pairs.", "label = 1 - label  # of -1 and 1: -label", tried)
    return finding(
        "exchanged-labels",
        "The labels of the pairs mean the opposite of what the loss takes them for: the loss ends at "
        f"{figures(tried.end_as_is)}, and with the two labels exchanged at {figures(tried.end_changed)}",
        ["train_loader", "label", "loss_fn"],
        [fix],
        run=facts.run,
        evidence={"validation as it is": tried.val_as_is, "validation with labels exchanged": tried.val_changed},
    )


@rule(
    code="training/class-ignored",
    title="The loss ignores a class.",
    symptom="One class is never predicted, and the loss is low all the same.",
    cause="`ignore_index` is the number of a real class, often 0, which is padding or void in other data sets; or "
    "`pad_token = eos_token`, and what collates the batch leaves out the ends together with the padding.",
    confirm="Count the labels that equal `ignore_index`, and look at their samples.",
    fix="Leave `ignore_index` at its default, and give padding a number of its own, such as -100.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def class_ignored(facts: TrainingFacts) -> Finding | None:
    ignored, end = None if facts.run is None else facts.run.ignored, facts.static.silent_end
    if end is not None:
        return finding(
            "class-ignored",
            f"Token {end[0]} ends each of {end[1]:,} sequences and is never a target: it also fills the "
            "shorter ones up, and the targets leave it out everywhere. What is generated never ends",
            ["pad_token", "eos_token", "collate_fn", "labels", "train_loader"],
            [Fix("Fill up with a token of its own.", "tokenizer.add_special_tokens({'pad_token': '<pad>'})")],
            evidence={"token": end[0], "sequences": end[1]},
        )
    if ignored is None:
        return None
    place = next((call.where for call in facts.static.loss_calls if call.ignored), None)
    score, found = percent(ignored.score), percent(ignored.found)
    numbers = {"F1 of the others, as it is": ignored.others[0], "in the experiment": ignored.others[1]}
    return finding(
        "class-ignored",
        f"The loss ignores class {ignored.label}, {percent(ignored.share)} of the labels, by ignore_index="
        f"{ignored.label}: {found} of its samples are found. They are no padding: counted, the class has an F1 of "
        f"{score} after {count(ignored.steps, 'step')}",
        ["loss_fn", "ignore_index", "cross_entropy"],
        [suggestion("Count every class.", "ignore_index=-100  # the default", "with no class ignored", numbers)],
        run=facts.run,
        place=place,
        evidence={"share of the labels": ignored.share, "found": ignored.found, "F1 once it is counted": ignored.score},
    )


@rule(
    code="training/overfit",
    title="The model memorizes the training data.",
    symptom="The training loss goes to zero; the validation loss is lowest early and rises for the rest of the run.",
    cause="After the lowest point the model only learns what holds for the training samples. Too few samples, too many "
    "passes, no augmentation and no regularization lead to it.",
    confirm="Plot training and validation loss, both in eval mode, in one figure.",
    fix="Stop at the lowest validation loss; augment; add weight decay or dropout; collect more data; use a smaller "
    "model; validate more often. `%diagnose --regularize` tries each on your run.",
    reference="https://doi.org/10.1007/978-3-642-35289-8_5",
)
def overfit(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or _too_large(run):
        return None
    return _overfit(run, "overfit", f" ({run.samples:,} samples)" if run.samples else "", ["train_loader", "model"])


@rule(
    code="training/model-too-large-for-data",
    title="The model has far more parameters than the data can determine.",
    symptom="The training loss goes to zero within a few passes; the validation loss rises from early on.",
    cause="With a hundred and more parameters for each sample there are endless ways to fit the training set, and "
    "nearly all of them are wrong elsewhere.",
    confirm="Divide the number of trained parameters by the number of samples; train a model of a tenth of the size: "
    "it does as well in validation.",
    fix="Use a smaller model, or a pretrained one of which little is trained; dropout, weight decay, early stopping, "
    "augmentation. `%diagnose --regularize` tries each on your run.",
    reference="https://arxiv.org/abs/1611.03530",
)
def model_too_large_for_data(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not _too_large(run):
        return None
    size = f" ({run.trained_elements:,} parameters for {run.samples:,} samples)"
    return _overfit(run, "model-too-large-for-data", size, ["model", "train_loader"])


def _too_large(run: TrainingRunFacts) -> bool:
    return run.samples is not None and run.trained_elements > TOO_LARGE * run.samples


def _overfit(run: TrainingRunFacts, slug: str, size: str, names: list[str]) -> Finding | None:
    overfitting = signs.overfits(run)
    if overfitting is None:
        return None
    best, lowest, end = overfitting
    step = run.step_numbers[min(best, len(run.step_numbers) - 1)]
    title = f"The model memorizes its training data{size}: "
    train = figures(run.evaluations[-1].train)
    if end < RISES * lowest:
        title += (
            f"the training loss falls to {train}, and the validation loss stays at {figures(end)} (lowest at step "
            f"{step}: {figures(lowest)})"
        )
        fix = Fix(
            "Get more data or augment it, use a smaller model, dropout or weight decay. Stopping earlier gains "
            "nothing.",
            "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=0.1)",
        )
    else:
        title += (
            f"the validation loss is lowest at step {step} ({figures(lowest)}) and rises to {figures(end)}, while the "
            f"training loss falls to {train}"
        )
        fix = suggestion(
            "Stop where the validation loss is lowest (and regularize, augment, or use a smaller model).",
            "if val_loss < best:\n    best, weights = val_loss, copy.deepcopy(model.state_dict())",
            "that stops there",
            {"validation as it is": end, "validation when stopped": lowest, "step": step},
        )
    return finding(
        slug,
        title,
        names,
        [fix],
        run=run,
        step=step,
        evidence={
            "samples": run.samples,
            "trained parameters": run.trained_elements,
            "passes": run.passes,
            "lowest validation loss": lowest,
            "validation loss at the end": end,
        },
    )


@rule(
    code="training/zero-loss",
    title="The loss is exactly zero: the model has nothing to learn.",
    symptom="The loss is 0 from the first steps on, and every gradient is zero; or training and validation go to 0.",
    cause="A softmax over one class, a mask that leaves nothing, targets that equal the output by construction, a "
    "margin that is always met, the model's own output as its target, one class or one value for all targets, or a "
    "loss that is rounded where it is printed. Zero on validation data as well is no overfitting.",
    confirm="Print output, target and mask that go into the loss, for one batch.",
    fix="Give the loss something to compare: as many outputs as classes, targets that do not come from the output, a "
    "mask with ones in it.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def zero_loss(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return _zero_before_training(facts.static)
    if len(run.losses) < ZEROS:
        return None
    zeros = [abs(v) <= NOTHING for v in run.losses]
    if _rounded(run, zeros):
        return _rounding(run, sum(zeros))
    if run.one_label is not None:
        title = f"Both adversaries are told one label, {figures(run.one_label)}, of all that they see: none can learn"
        fix = Fix("Give what is generated another label.", "loss = real_loss + criterion(D(fake.detach()), zeros)")
        return finding(
            "zero-loss", title, ["label", "loss", "discriminator"], [fix], run=run, place=run.places.get("backward")
        )
    if why := _one_target(facts.static, run):
        title = f"The loss goes to zero because {why}"
        fix = signs.OTHER_CLASS if "class" in why else PRINT_LOSS_INPUTS
        return finding("zero-loss", title, ["loss_fn", "train_loader"], [fix], run=run)
    if not all(zeros[:ZEROS]) or sum(zeros) < 0.5 * len(zeros):
        return None
    norm = max(signs.finite(run.gradient_norms), default=0.0)
    return finding(
        "zero-loss",
        f"The loss is exactly zero from the first step on ({sum(zeros)} of {len(zeros)} steps), and the largest "
        f"gradient norm is {figures(norm)}: the model has nothing to learn",
        ["loss_fn", "train_loader"],
        [PRINT_LOSS_INPUTS],
        run=run,
        step=run.step_numbers[0],
        evidence={"steps with a loss of zero": sum(zeros), "largest gradient norm": norm},
    )


def _zero_before_training(static: StaticFacts) -> Finding | None:
    """Exactly zero at the start with no gradient at all, or every label the same."""
    call = next(iter(static.loss_calls), None)
    if static.loss is None:
        return None
    if abs(static.loss) <= NOTHING and static.trained and not any(p.gradient for p in static.trained):
        why = "nothing is left to compare"
        if call is not None and 1 in (call.classes, call.softmax_size):
            why = "its softmax runs over a single class"
        elif call is not None and call.ignored == 1:
            why = "all targets are ignored"
        title = f"The loss is exactly zero before training begins, and no parameter gets a gradient: {why}"
    elif why := signs.one_label(static):
        title = f"{why.capitalize()}. The loss goes to zero and the model learns nothing"
    else:
        return None
    place = None if call is None else call.where
    evidence = {"loss": static.loss}
    return finding("zero-loss", title, ["loss_fn", "train_loader"], [PRINT_LOSS_INPUTS], place=place, evidence=evidence)


def _one_target(static: StaticFacts, run: TrainingRunFacts) -> str:
    """What all targets are, in a sentence; "" where they differ, or the loss does not fall towards zero."""
    if signs.loss_left(run) < signs.HALF_DONE and (sentence := signs.one_label(static)):
        return sentence
    call, few = next(iter(static.loss_calls), None), (static.batch_size or 0) < signs.TARGETS // 4
    if few or call is None or call.target_low is None or not signs.both_zero(run):
        return ""
    same = call.target_low == call.target_high and not call.ignored
    return f"all targets are {figures(call.target_low)}" if same else ""


def _rounded(run: TrainingRunFacts, zeros: Sequence[bool]) -> bool:
    """Zeros while the gradients of these steps are none, and the loss on fixed batches is not zero either; and every
    loss has few decimals. (Cross entropy of float32 is exactly zero where a whole batch is certain.)"""
    if sum(zeros) < max(ZEROS, len(zeros) // 10) or len(run.gradient_norms) != len(zeros) or not run.evaluations:
        return False
    norms = [norm for norm, zero in zip(run.gradient_norms, zeros) if zero]
    end = run.evaluations[-1].train
    losses = signs.finite(run.losses)
    few = any(all(abs(loss * 10**n - round(loss * 10**n)) < 1e-6 for loss in losses) for n in range(DECIMALS))
    return few and all(norm > NOTHING for norm in norms) and end > NOTHING and end == end


def _rounding(run: TrainingRunFacts, zeros: int) -> Finding:
    end = run.evaluations[-1]
    val = "" if end.val is None else f", on validation batches {figures(end.val)}"
    return finding(
        "zero-loss",
        f"The loss is rounded to zero where it is reported ({zeros} of {len(run.losses)} steps): on fixed training "
        f"batches it is {figures(end.train)}{val}, and every step has a gradient",
        ["callback", "round", "train", "loss_fn"],
        [Fix("Report the loss as it is, in float32.", "callback(step, loss.item())  # no round(), int() or half()")],
        run=run,
        evidence={"steps reported as zero": zeros, "loss at the end": end.train, "validation loss": end.val},
    )


WORSE, MATTERS = 3.0, 0.1
"""Validation in eval mode over that in train mode; the difference, as a share of the first loss."""
BEHIND = 0.01
"""Share of the statistics of the start that is left in running ones: (1 - momentum) to the power of the steps."""
FOLLOWED = 44
"""Steps after which torch's own momentum, 0.1, leaves no more than that."""


@rule(
    code="training/running-statistics",
    title="The running statistics of batch normalization are not those of the data.",
    symptom="In eval mode the loss is far worse than in train mode, or jumps between evaluations; an average of the "
    "model (EMA, SWA), or a teacher made of it, is hardly better than guessing.",
    cause="An average of the parameters leaves out the buffers. Or the momentum has the sense of another library: in "
    "torch it is the share of the new batch (0.1), in Keras that of the old value (0.99).",
    confirm="Compute the loss in eval mode, with statistics that are taken anew over the training batches.",
    fix="Copy the buffers, too, or call `torch.optim.swa_utils.update_bn(loader, model)`; `momentum=1 - momentum`.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#taking-care-of-batch-normalization",
)
def running_statistics(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    if run.statistics is None or not run.statistics[4] < signs.BETTER * run.statistics[3]:
        return _far_behind(run)
    name, source, momentum, loss, new = run.statistics
    if loss - new < MATTERS / 2 * signs.first_loss(run):
        return _far_behind(run)
    what = f"`{name}` has averaged weights, and the statistics that it began with" if name else ""
    what = what or f"with momentum={momentum:g} the running statistics are those of the last batch alone"
    fix = Fix("Take torch's momentum, the share of the new batch.", f"momentum={1 - (momentum or 0.0):.2g}")
    if name:
        code = f"for own, b in zip({name}.buffers(), {source}.buffers()):\n    own.copy_(b)"
        fix = Fix("Copy the buffers as well.", code)
    return finding(
        "running-statistics",
        f"Batch normalization: {what}. In eval mode the loss is {figures(loss)}, and {figures(new)} with statistics "
        "that are taken anew from training batches",
        [name or "momentum", "BatchNorm", "buffers", *run.stale.functions],
        [fix],
        run=run,
        place=run.places.get("backward") if name else None,
        evidence={"loss": loss, "with the statistics of the data": new, "momentum": momentum},
    )


def _far_behind(run: TrainingRunFacts) -> Finding | None:
    """Validation is far worse in eval mode than in train mode, where dropout can only harm."""
    if run.mode_losses is None:
        return None
    (in_train, in_eval), first = run.mode_losses, signs.first_loss(run)
    matters = in_eval > WORSE * in_train >= 0 and in_eval - in_train > MATTERS * first > 2 * MATTERS * in_train
    behind = [m for m in run.modes if m.momentum is not None and (1 - m.momentum) ** m.train_steps > BEHIND]
    own = [m.module for m in behind if "BatchNorm" in m.kind and m.train_steps >= FOLLOWED]
    if not own or not matters:
        return None
    return finding(
        "running-statistics",
        f"After {count(behind[0].train_steps, 'step')} with momentum={behind[0].momentum:g} the running statistics of "
        f"batch normalization are not yet those of the data: the validation loss is {figures(in_eval)} in eval mode, "
        f"and {figures(in_train)} with the statistics of each batch",
        ["momentum", "running_mean", "BatchNorm", *own],
        [Fix("Let them follow the data: torch's momentum is the share of the new batch.", "momentum=0.1")],
        run=run,
    )
