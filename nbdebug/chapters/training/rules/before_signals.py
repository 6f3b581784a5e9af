"""The rule over the initial weights: too large, too small, copies of each other, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

from nbdebug.catalogue import rule
from nbdebug.chapters.training.facts import TrainingFacts
from nbdebug.chapters.training.facts_before import Before, Weight
from nbdebug.chapters.training.rules.before_words import finding, listed, short
from nbdebug.finding import Finding, Fix

TIMES = 3.0
"""Deviation of a weight over that of He's scheme (SageMaker Debugger: ten times the variance). torch's own
initialisation is at 0.41, Glorot's at about 0.7, a trained layer's rarely above 2."""
SMALL = 0.1
"""… and below this part of it a signal fades by ten in each layer."""
FADED = 1e-3
"""Size of the signal at the last layer over that at the first, without normalisation."""
SURPRISED = 3.0
"""Loss at the start over that of guessing (TheDeepChecker allows twice)."""


@rule(
    code="training/bad-init",
    title="The initial weights keep the model from learning.",
    symptom="The loss starts far above guessing, or stays there; units of a layer stay copies of one another; the "
    "signal fades or grows from layer to layer.",
    cause="Weights drawn too large or too small for the layer's width, the same value in all, or zeros in two layers "
    "that follow each other, so that neither ever gets a gradient.",
    confirm="`w.std() * (w[0].numel() / 2) ** 0.5` is about 0.4 to 1.5 for each weight; `(w == w[:1]).all()` is False.",
    fix="`nn.init.kaiming_normal_(w, nonlinearity='relu')` for relu, `nn.init.xavier_uniform_(w)` for tanh; biases "
    "zero; zeros at most in the last layer of a branch.",
    reference="https://arxiv.org/abs/1502.01852",
)
def bad_init(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    if before is None or not before.weights:
        return None
    for told in (_copies, _nothing, _too_large, _too_small):
        why, layers = told(before)
        if layers:
            names = [w.module or w.name for w in layers]
            fix = Fix(
                "Draw the weights for the layer's width.",
                "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')\ntorch.nn.init.zeros_(layer.bias)",
            )
            return finding(
                "bad-init",
                why,
                [*names, *(w.name for w in layers)],
                [fix],
                module=layers[0].module,
                deviation_over_the_scheme_s={w.name: w.std / w.scheme for w in before.weights[:12]},
                loss_at_the_start=before.loss,
                loss_of_guessing=_guess(before),
            )
    return None


def _names(layers: Sequence[Weight]) -> str:
    return listed(w.module or w.name for w in layers)


def _guess(before: Before) -> float | None:
    return next((call.guess for call in before.losses if call.guess), None)


def _copies(before: Before) -> tuple[str, Sequence[Weight]]:
    same = [w for w in before.weights if w.symmetric and w.hidden and w.trained]
    return (
        f"All units of {_names(same)} have the same weights and get the same gradient: they "
        "stay copies of one another, and the layer counts for a single unit",
        same,
    )


def _nothing(before: Before) -> tuple[str, Sequence[Weight]]:
    trained = [w for w in before.weights if w.trained and w.gradient is not None]
    zero = [w for w in trained if w.std == 0 and w.constant and w.hidden]
    stuck = (
        len(trained) > 1
        and zero
        and all(w.gradient == 0 for w in trained)
        and not any((u.dead or 0.0) > 0.9 for u in before.units if not zero)
    )
    return (
        f"Every weight gets a gradient of exactly zero: {_names(zero)} hold the same value "
        "throughout, and nothing passes",
        zero if stuck else [],
    )


def _too_large(before: Before) -> tuple[str, Sequence[Weight]]:
    wide = [w for w in before.weights if w.trained and w.std > TIMES * w.scheme]
    guess, loss = _guess(before), before.loss
    surprised = (
        guess is not None
        and loss is not None
        and not any(c.op == "mse_loss" for c in before.losses)
        and (loss > SURPRISED * guess)
    )
    if not wide or not surprised:
        return "", []  # where they only saturate an activation, that is the story to tell
    worst = max(wide, key=lambda w: w.std / w.scheme)
    return (
        f"The weights of {_names(wide)} start {worst.std / worst.scheme:.0f} times as large as their width allows "
        f"(deviation {short(worst.std)}, He's scheme {short(worst.scheme)}): the loss starts at "
        f"{short(loss or 0.0)}, "
        f"where guessing gives {short(guess or 0.0)}",
        wide,
    )


def _too_small(before: Before) -> tuple[str, Sequence[Weight]]:
    thin = [w for w in before.weights if w.trained and 0 < w.std < SMALL * w.scheme]
    first, last = before.weights[0], before.weights[-1]
    faded = first.came > 0 and last.came < FADED * first.came
    if len(thin) < 2 or not faded or before.norms:
        return "", []
    worst = min(thin, key=lambda w: w.std / w.scheme)
    return (
        f"The weights of {_names(thin)} start {worst.scheme / worst.std:.0f} times smaller than "
        f"their width allows: the signal fades from {short(first.came)} at the first layer to {short(last.came)} "
        "at the last",
        thin,
    )
