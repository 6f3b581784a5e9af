"""Rules over labels: those that are wrong, stand beside other samples, mean the opposite, are ignored, or are out of
range."""

from __future__ import annotations

import math

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, percent
from nbdebug.tools.training.facts import (
    Experiment,
    HeldOut,
    PairedAnew,
    TeacherAnswers,
    TrainingFacts,
    TrainingRunFacts,
    UndecidedPair,
)
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    at_line,
    confused,
    finding,
    suggestion,
    tested_fix,
)
from nbdebug.tools.training.static_facts import LossCall, MixedSamples, StaticFacts, Twins

TOLD_APART = 0.9
"""Of pairs of validation samples with two labels, whose scores come in one order (or as often in the other)."""
SEVERAL = 2
"""Mixtures with a wrong target; a cut by area and the pixels in it differ by a few percent."""
LEFT_BY_TWINS = 0.1
"""Nats that right answers among the wrong ones leave of a loss; of a few in a batch less is left."""
LOOKED_AT, BY_FAR, SURELY_OTHERS = 100, 6.0, 0.8
"""Samples with a teacher's answer; standard errors; the share of equal answers from which on they may be its own."""
BINARY, NO_SHARE = ("binary_cross_entropy", "binary_cross_entropy_with_logits"), 0.4
"""How far beyond 0 and 1 a target is no label: those of a discriminator are drawn from -0.3 to 1.3 on purpose
(https://github.com/soumith/ganhacks)."""
SIGNED = {
    "cosine_embedding_loss": "a pair with a target of 0 adds 0 to the loss, however alike it is",
    "hinge_embedding_loss": "a row with a target of 0 adds the same whatever its distance",
    "margin_ranking_loss": "a pair with a target of 0 adds the margin, in whatever order it is",
    "soft_margin_loss": "a row with a target of 0 adds ln 2, whatever its score",
}
"""What 0 means to a loss of targets 1 and -1."""


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
    flips = facts.experiment("no flips")
    if run is not None and flips is not None and signs.helps(flips, signs.MUCH_BETTER):
        return _flipped(run, flips)
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


def _flipped(run: TrainingRunFacts, tried: Experiment) -> Finding | None:
    """Pictures that are flipped with their labels left, where a flip makes one label's samples those of another."""
    place, pair = run.places["no flips"], run.undecided
    if tried.val_changed is not None and not tried.val_changed < signs.BETTER * (tried.val_as_is or 0.0):
        return None
    one, other = ("one", "another") if pair is None else pair.labels
    return finding(
        "label-noise",
        f"Samples are flipped at random{at_line(place)}, and a flip makes those of label {one} look like those of "
        f"{other}: the loss ends at {figures(tried.end_as_is)}, and read without flips at {figures(tried.end_changed)}",
        ["__getitem__", "train_loader", place.op or "flip"],
        [
            tested_fix("Leave the flip out.", f"# {place.text or 'x = x.flip(-1)'}", tried),
            Fix("Or exchange the two labels where a sample is flipped.", "label = 1 - label  # with the flip"),
        ],
        run=run,
        place=place,
        evidence={"validation as it is": tried.val_as_is, "validation without flips": tried.val_changed},
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
        return _resized_masks() if static.reread == "resized" else None
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
    code="training/target-wraps",
    title="An angle is learned as a plain number.",
    symptom="Most predictions are about right, those near one direction are far off, and a larger model does not help.",
    cause="359 and 1 degrees are two apart, and their squared difference counts 358. An average of both points the "
    "other way. Hours of a day and days of a year wrap, too.",
    confirm="Plot the error over the target: it is large at both ends of its range.",
    fix="Let the model give the sine and the cosine, and take `torch.atan2` of them.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.atan2.html",
)
def target_wraps(facts: TrainingFacts) -> Finding | None:
    wraps = facts.static.wraps
    call = next((call for call in facts.static.loss_calls if call.target is not None), None)
    if wraps is None or call is None:
        return None
    low, high, ends = wraps
    code = (
        "angle = 2 * torch.pi * target / period\nloss = F.mse_loss(output, torch.stack([angle.sin(), angle.cos()], 1))"
    )
    return finding(
        "target-wraps",
        f"The targets, {figures(low)} to {figures(high)}, come round to their start: inputs with the highest are like "
        f"those with the lowest ({percent(ends)} of the nearest that are in another tenth, by chance 11%), and not "
        f"like others. `{call.op}` counts these as {figures(high - low)} apart{at_line(call.where)}",
        ["loss_fn", "target", call.op],
        [Fix("Learn the sine and the cosine: two outputs.", code)],
        place=call.where,
        evidence={"lowest": low, "highest": high, "neighbours at the other end": ends},
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
    code="training/label-out-of-range",
    title="A target is beyond the classes that the output has.",
    symptom="`IndexError: Target … is out of bounds` on the CPU, a device-side assert on a GPU; a binary cross entropy "
    "falls below zero without end; all pairs come to look alike.",
    cause="Labels count from 1, a class was added, or the padding label is not the loss's ignore_index. For a binary "
    "cross entropy: masks of 0 and 255, labels of -1 and 1, pictures that are normalized to another range than 0 to 1. "
    "For losses of 1 and -1 (CosineEmbeddingLoss, MarginRankingLoss): labels of 1 and 0.",
    confirm="`target.min(), target.max()` must lie in 0 to `output.shape[1] - 1`; in 0 to 1 for a binary one.",
    fix="Make the output as wide as there are classes, or map the labels to 0 … K - 1; mark padding with "
    "`ignore_index=…`. Map the targets of a binary cross entropy to 0 … 1.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def label_out_of_range(facts: TrainingFacts) -> Finding | None:
    for call in facts.static.loss_calls:
        low, high = call.target_low or 0.0, call.target_high or 0.0
        if call.op in BINARY and not (call.weighted and not call.weights) and (low < -NO_SHARE or high > 1 + NO_SHARE):
            return _beyond_one(call, low, high)
        if call.op in SIGNED and call.outside and low == 0 and high in (0, 1):
            return _not_signed(call)
        if call.outside and call.classes:
            title = (
                f"{call.outside:,} of {math.prod(call.target_shape):,} targets lie outside 0 to {call.classes - 1}, "
                f"the classes of the output{at_line(call.where)}: they range from {figures(low)} to {figures(high)}"
            )
            fix = (
                Fix("Count the labels from 0.", "target = target - 1")
                if call.from_one
                else Fix("Make room for all labels, or map them.", f"nn.Linear(…, {int(high) + 1})")
            )
            return finding(
                "label-out-of-range",
                title,
                ["train_loader", "loss_fn", call.op],
                [fix],
                place=call.where,
                evidence={"targets outside": call.outside, "classes": call.classes},
            )
    return None


def _not_signed(call: LossCall) -> Finding:
    return finding(
        "label-out-of-range",
        f"`{call.op}` takes targets of 1 and -1, and {call.outside:,} of {math.prod(call.target_shape):,} are 0"
        f"{at_line(call.where)}: {SIGNED[call.op]}, so that they teach nothing",
        ["target", "train_loader", "loss_fn", call.op],
        [Fix("Map 0 to -1.", "target = 2 * target - 1")],
        place=call.where,
        evidence={"targets of 0": call.outside},
    )


def _beyond_one(call: LossCall, low: float, high: float) -> Finding:
    """A binary cross entropy is linear in its scores: beyond 0 and 1 it has no lowest value."""
    code = "target / 255" if high > 2 else "(target > 0).float()" if low < 0 else "target - 1"
    return finding(
        "label-out-of-range",
        f"`{call.op}` takes targets of 0 to 1, and these range from {figures(low)} to {figures(high)}"
        f"{at_line(call.where)}: with them the loss has no lowest value, and falls below zero without end",
        ["target", "train_loader", "loss_fn", call.op],
        [Fix("Map the targets to 0 … 1.", f"target = {code}")],
        place=call.where,
        evidence={"lowest target": low, "highest target": high},
    )


def _resized_masks() -> Finding:
    title = "Masks were resized by averages of class numbers: at borders lie pixels of a class between the two"
    fix = Fix("Resize masks by the nearest pixel.", 'F.interpolate(mask, size=size, mode="nearest")')
    return finding("label-noise", title, ["mask", "interpolate", "dataset", "train_loader"], [fix])
