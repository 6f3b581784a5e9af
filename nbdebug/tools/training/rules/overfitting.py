"""Rules over what a run reaches: a loss that stays up (regularization, a model that is too simple, the order of the
data), one that only falls on the training data, one that is zero."""

from __future__ import annotations

from collections.abc import Sequence

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, percent
from nbdebug.tools.training.facts import (
    Experiment,
    TrainingFacts,
    TrainingRunFacts,
)
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    at_line,
    finding,
    suggestion,
    tested_fix,
    wrong_call,
)
from nbdebug.tools.training.static_facts import Labels, StaticFacts

SHUFFLE = ("Shuffle the training data.", "DataLoader(dataset, batch_size=..., shuffle=True)")
OTHER_CLASS = Fix("Add samples of another class, such as pairs that nobody chose.", "label = torch.zeros(len(drawn))")
PRINT_LOSS_INPUTS = Fix(
    "Print what goes into the loss.",
    "outputs, targets = model(batch[0]), batch[1]\n"
    "print(outputs.shape, outputs.min(), outputs.max(), targets.unique())",
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
SORTED = 0.3
"""Runs of equal labels over what a shuffled order would have."""
DECIMALS = 5
"""A loss with fewer is rounded."""
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
        f"{figures(experiment.end_as_is)} and hardly use the inputs; with a hundredth of its gradient or less they "
        f"fall to {figures(experiment.end_changed)}",
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
    if run is not None and 0 < run.first_alone < (run.samples or 0) and run.losses[-1] < 0.5 * signs.last_loss(run):
        return _first_alone(run)
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


def _first_alone(run: TrainingRunFacts) -> Finding:
    """A pass that is begun for each step, over a loader that gives the same batch first each time."""
    rows, end = run.first_alone, signs.last_loss(run)
    return finding(
        "unshuffled-data",
        f"Each of {count(run.passes, 'step')} begins a pass over `train_loader` and reads its first batch, the same "
        f"one each time: {rows:,} of {run.samples or 0:,} samples are seen. On them the loss ends at "
        f"{figures(run.losses[-1])}, on others of the training data at {figures(end)}",
        ["train_loader", "iter", "next", *run.stale.functions],
        [Fix("Begin a pass once, and take its batches one after the other.", "for batch in train_loader: ...")],
        run=run,
        place=run.places.get("backward"),
        evidence={"samples seen": rows, "samples": run.samples},
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
        fix = OTHER_CLASS if "class" in why else PRINT_LOSS_INPUTS
        return finding("zero-loss", title, ["loss_fn", "train_loader"], [fix], run=run)
    if not all(zeros[:ZEROS]) or sum(zeros) < 0.5 * len(zeros):
        return None
    norm, bound = max(signs.finite(run.gradient_norms), default=0.0), facts.static.at_bound
    why = f". `{bound.op}` moves all values to its bound{at_line(bound)}" if bound is not None else ""
    return finding(
        "zero-loss",
        f"The loss is exactly zero from the first step on ({sum(zeros)} of {len(zeros)} steps), and the largest "
        f"gradient norm is {figures(norm)}: the model has nothing to learn{why}",
        ["loss_fn", "train_loader"],
        [PRINT_LOSS_INPUTS],
        run=run,
        place=bound,
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
