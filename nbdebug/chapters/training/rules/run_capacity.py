"""Rules for a model that is held down: by its own smallness, or by what is asked of its weights."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.training.facts import TrainingFacts
from nbdebug.chapters.training.facts_run import RunFacts, Trial
from nbdebug.chapters.training.rules import run_signs as signs
from nbdebug.chapters.training.rules.run_words import finding, short, tried
from nbdebug.finding import Finding

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


def _relieves(run: RunFacts, name: str, trial: Trial) -> bool:
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
        Trial("reference", (), (), end.train, run.reference["train"], end.val, run.reference.get("val")),
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
