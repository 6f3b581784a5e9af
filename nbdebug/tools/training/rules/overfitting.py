"""Rules for a model that is held down: by its own smallness, or by what is asked of its weights."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import Experiment, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules import signs as signs_data
from nbdebug.tools.training.rules.wording import run_finding as finding
from nbdebug.tools.training.rules.wording import short_number as short
from nbdebug.tools.training.rules.wording import tried

BELOW = 0.5
"""A small network of our own ends at this share of the model's loss, or below, on validation data (on training data
where there is none)."""

PENALTIES = {
    "no penalty": (
        "loss_fn",
        "the penalty on the weights in the loss",
        "Weigh the penalty less.",
        "loss = data_loss + 1e-4 * penalty",
    ),
    "no weight decay": (
        "weight_decay",
        "weight decay",
        "Lower the weight decay.",
        "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=1e-2)",
    ),
    "less dropout": ("dropout", "dropout", "Drop less.", "torch.nn.Dropout(0.1)"),
}


@rule(
    code="training/over-regularized",
    title="Regularisation outweighs the loss.",
    symptom="Training and validation loss both stop high; weights shrink towards zero; the model answers with a mean.",
    cause="Weight decay, a penalty in the loss, or dropout pulls harder than the errors do.",
    confirm="The same run without it falls far lower, on validation data as well.",
    fix="Lower it by factors of ten until training fits; then raise it until validation is best.",
    reference="https://developers.google.com/machine-learning/guides/deep-learning-tuning-playbook/faq",
)
def over_regularized(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    found = [(name, t) for name, t in run.trials.items() if name in PENALTIES and _relieves(run, name, t)]
    if not found:
        return None
    name, trial = min(found, key=lambda item: item[1].end_changed)
    argument, what, title, code = PENALTIES[name]
    amount = {
        "no weight decay": run.decay.get("weight decay"),
        "less dropout": run.decay.get("dropout"),
        "no penalty": run.penalty_end,
    }[name]
    said = (
        f"Regularisation outweighs the loss: with {what} ({short(amount or 0.0)}) the loss on the data ends at "
        f"{short(trial.end_as_is)}, without it at {short(trial.end_changed)}"
    )
    return finding(
        run,
        "over-regularized",
        said,
        [argument, "optimizer" if name == "no weight decay" else "model"],
        [tried(title, code, trial)],
        evidence={what: amount},
    )


def _relieves(run: TrainingRunFacts, name: str, trial: Experiment) -> bool:
    """It helps on training data, and does no harm on validation data."""
    harmless = trial.val_as_is is None or trial.val_changed is None or trial.val_changed < trial.val_as_is
    return signs.helps(trial) and harmless


@rule(
    code="training/underfit",
    title="The model is too simple for the data.",
    symptom="Training and validation loss stop together, far above what the data allows.",
    cause="Too few units or layers, no activation between them, inputs that the model never combines: there is no "
    "setting of its weights that fits.",
    confirm="A small network with two hidden layers, on the same batches with the same loss, gets far lower.",
    fix="Add units or layers, put activations between linear layers, feed all inputs.",
    reference="https://karpathy.github.io/2019/04/25/recipe/",
)
def underfit(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or run.reference is None or not signs.settled(run) or signs.slow(run):
        return None
    end = run.checkups[-1]
    on = "train" if end.val is None else "val"
    mine, theirs = run.reference.get(on), end.train if end.val is None else end.val
    if run.reference.get("the model with Adam", 0.0) < signs.BETTER * end.train:
        return None  # it can: its optimizer is what keeps it
    below = signs.BETTER if signs.learns_nothing(run) else BELOW
    if mine is None or theirs is None or not 0 <= mine < below * theirs or end.train < 0.5 * theirs:
        return None
    title = (
        f"The model is too simple for the data: its loss has settled at {short(theirs)}, and a network with two "
        f"hidden layers of 128 units gets to {short(mine)} with the same batches, loss and number of steps"
    )
    fix = tried(
        "Give the model more units or layers, with activations between them.",
        "nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))",
        Experiment("reference", (), (), end.train, run.reference["train"], end.val, run.reference.get("val")),
    )
    return finding(
        run,
        "underfit",
        title,
        ["model"],
        [fix],
        evidence={
            "trained parameters": run.trained_elements,
            "loss": theirs,
            "reference network's": mine,
            "steps": len(run.losses),
        },
    )


UNFAIR = 3.0
"""Variance between the batches' means over that of a fair shuffle; see run/order.py."""
DOUBTFUL = 0.08
"""Share of training samples whose label the model does not believe. Curated sets hold 3 to 6% of wrong labels
(Northcutt et al. 2021), which harms little."""
CLEANER = 0.6
"""Without the doubtful samples, the validation loss ends at this share of what it was, or below. Where labels are
uncertain by nature, validation labels are too, and leaving the unlikely ones out makes it worse."""
TOO_LARGE = 100.0
"""Trained parameters for each target value: beyond this the size of the model is told as the cause. (The story of 2.8
million parameters and 2,048 samples is at 1,400; a ratio of ten is common and harmless with early stopping.)"""
RISES = 1.1
"""The validation loss at its end over its lowest, from which on stopping earlier is worth a word."""
NOTHING = 1e-12
"""A loss below this is zero."""
ZEROS = 5
"""So many zeros in a row, from the first step on, or half of the run (TrainProof: five points)."""


@rule(
    code="training/unshuffled-data",
    title="Batches hold samples of one kind: the data is not shuffled.",
    symptom="The training loss is a saw tooth: near zero, then high, then near zero. The model that comes out knows "
    "the last class only.",
    cause="A dataset that is sorted by class, read with shuffle=False: for many steps in a row the model learns to say "
    "one thing, and forgets the rest.",
    confirm="Print the labels of ten batches in a row.",
    fix="DataLoader(..., shuffle=True); for a stream a shuffle buffer; for several sources a sampler that mixes them.",
    reference="https://github.com/pytorch/vision/issues/7818",
)
def unshuffled_data(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    trial, order = (None, None) if run is None else (run.trials.get("shuffled"), run.order)
    if (
        run is None
        or trial is None
        or order is None
        or not (signs.helps(trial) if order.spread > UNFAIR else signs_data.order_harms(run))
    ):
        return None
    seen = (
        f"a batch holds {order.classes:g} of {order.all_classes} classes"
        if order.classes is not None and order.all_classes and order.classes < 0.7 * order.all_classes
        else f"the batches' means differ {order.spread:.0f} times as much as a shuffle would let them"
        if order.spread > UNFAIR
        else "it is read in the dataset's own order, and neighbours are alike"
    )
    title = (
        f"The training data is not shuffled: {seen}; over all of it the model ends at a loss of "
        f"{short(trial.end_as_is)}, and on the same samples shuffled at {short(trial.end_changed)}"
    )
    fix = tried("Shuffle the training data.", "DataLoader(dataset, batch_size=..., shuffle=True)", trial)
    return finding(
        run,
        "unshuffled-data",
        title,
        ["train_loader"],
        [fix],
        evidence={
            "spread over a fair shuffle's": order.spread,
            "classes in a batch": order.classes,
            "classes": order.all_classes,
            "read in the dataset's order": order.sequential,
        },
    )


@rule(
    code="training/label-noise",
    title="Many training labels are wrong.",
    symptom="The training loss stops far above zero while validation goes better than training; a longer run only "
    "makes validation worse.",
    cause="A part of the annotations contradicts the rest: another convention, a shifted index, careless labelling. "
    "The model learns the truth from the rest, and pays for every wrong label.",
    confirm="Look at the training samples with the highest loss: the model's answer is right and the label wrong.",
    fix="Review or drop the doubtful samples; label smoothing and early stopping soften what is left.",
    reference="https://arxiv.org/abs/1911.00068",
)
def label_noise(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    share = run.doubts.get("share", 0.0) if run is not None else 0.0
    trial = run.trials.get("without doubtful labels") if run is not None else None
    if run is None or trial is None or share < DOUBTFUL or trial.val_as_is is None or trial.val_changed is None:
        return None
    if not trial.val_changed < CLEANER * trial.val_as_is:
        return None
    end = run.checkups[-1]
    title = (
        f"About {share:.0%} of the training labels look wrong: the loss on training data stays at "
        f"{short(end.train)} while validation is at {short(end.val or 0.0)}, and without the doubtful samples "
        f"validation falls to {short(trial.val_changed)}"
    )
    fix = Fix(
        "Review the samples whose label the model does not believe, or leave them out.",
        "doubtful = model(inputs).argmax(1) != labels",
        True,
        {
            "validation as it is": trial.val_as_is,
            "validation without them": trial.val_changed,
            "steps": len(trial.changed),
        },
    )
    return finding(
        run,
        "label-noise",
        title,
        ["train_loader", "dataset", "labels"],
        [fix],
        evidence={
            "doubtful share": share,
            "commonest (label, model's answer)": [
                f"{a} → {b}: {count}" for (a, b), count in run.doubts.get("confusions", ())
            ],
        },
    )


@rule(
    code="training/overfit",
    title="The model learns the training data by heart.",
    symptom="The training loss goes to zero; the validation loss has its lowest point early and rises for the rest of "
    "the run.",
    cause="After the lowest point what is learnt holds for the training samples only. Too few samples, too many "
    "passes, no augmentation and no regularisation bring it on.",
    confirm="Training and validation loss in eval mode on the same picture.",
    fix="Stop at the lowest validation loss; augment; add weight decay or dropout; collect more data; take a smaller "
    "model; validate more often.",
    reference="https://doi.org/10.1007/978-3-642-35289-8_5",
)
def overfit(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or _too_many(run) or signs_data.overfits(run) is None:
        return None
    return _overfit(run, "overfit", f"on {run.samples:,} samples" if run.samples else "", ["train_loader", "model"])


@rule(
    code="training/model-too-large-for-data",
    title="The model has far more parameters than the data can pin down.",
    symptom="The training loss goes to zero within a few passes; the validation loss rises from early on.",
    cause="With a hundred and more parameters for each target there are endless ways to fit the training set, and "
    "nearly all of them are wrong elsewhere.",
    confirm="Trained parameters over samples; and a model of a tenth of the size does as well in validation.",
    fix="A smaller model, or a pretrained one of which little is trained; dropout, weight decay, early stopping, "
    "augmentation.",
    reference="https://arxiv.org/abs/1611.03530",
)
def model_too_large_for_data(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not _too_many(run) or signs_data.overfits(run) is None:
        return None
    return _overfit(
        run,
        "model-too-large-for-data",
        f"with {run.trained_elements:,} parameters for {run.samples:,} samples",
        ["model", "train_loader"],
    )


def _too_many(run: TrainingRunFacts) -> bool:
    return run.samples is not None and run.trained_elements > TOO_LARGE * run.samples


def _overfit(run: TrainingRunFacts, slug: str, size: str, where: list[str]) -> Finding:
    found = signs_data.overfits(run)
    assert found is not None, "the rule has looked"
    best, lowest, end = found
    step = run.numbers[min(best, len(run.numbers) - 1)]
    size = f" {size}" if size else ""
    train = short(run.checkups[-1].train)
    if end < RISES * lowest:
        title = (
            f"The model learns its training data by heart{size}: training falls to {train}, and the validation "
            f"loss stays at {short(end)} (lowest at step {step}: {short(lowest)})"
        )
        fix = Fix(
            "More data or augmentation; a smaller model; dropout or weight decay. Stopping earlier gains nothing here.",
            "torch.optim.AdamW(model.parameters(), lr=..., weight_decay=0.1)",
        )
    else:
        title = (
            f"The model learns its training data by heart{size}: the validation loss is lowest at step {step} "
            f"({short(lowest)}) and rises to {short(end)}, while training falls to {train}"
        )
        fix = Fix(
            "Stop where validation is lowest (and regularise, augment, or take a smaller model).",
            "if val_loss < best:\n    best, kept = val_loss, copy.deepcopy(model.state_dict())",
            True,
            {"validation as it is": end, "validation when stopped": lowest, "step": step},
        )
    return finding(
        run,
        slug,
        title,
        where,
        [fix],
        step=step,
        evidence={
            "samples": run.samples,
            "trained parameters": run.trained_elements,
            "passes": run.passes,
            "lowest validation loss": lowest,
            "at the end": end,
        },
    )


@rule(
    code="training/zero-loss",
    title="The loss is exactly zero: it asks nothing of the model.",
    symptom="The loss is 0 from the first steps on, and no gradient comes back.",
    cause="A softmax over one class, a mask that leaves nothing, targets that the output equals by construction, a "
    "margin that is never missed, or the model's own output as its target.",
    confirm="Print output, target and mask that go into the loss, for one batch.",
    fix="Give the loss something to compare: as many outputs as classes, targets that do not come from the output, a "
    "mask with ones in it.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def zero_loss(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or len(run.losses) < ZEROS:
        return None
    zeros = [abs(v) <= NOTHING for v in run.losses]
    if not all(zeros[:ZEROS]) or sum(zeros) < 0.5 * len(zeros):
        return None
    norms = signs.finite(run.gradient_norms)
    title = (
        f"The loss is exactly zero from the first step on ({sum(zeros)} of {len(zeros)} steps), and the largest "
        f"gradient norm is {short(max(norms, default=0.0))}: the loss has nothing to ask of the model"
    )
    fix = Fix(
        "Look at what goes into the loss.",
        "outputs, targets = model(batch[0]), batch[1]\n"
        "print(outputs.shape, outputs.min(), outputs.max(), targets.unique())",
    )
    return finding(
        run,
        "zero-loss",
        title,
        ["loss_fn", "train_loader"],
        [fix],
        step=run.numbers[0],
        evidence={"steps with a loss of zero": sum(zeros), "largest gradient norm": max(norms, default=0.0)},
    )
