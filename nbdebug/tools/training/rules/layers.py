"""Rules for single layers: dead, saturated, without a gradient, not trained at all."""

from __future__ import annotations

from collections.abc import Sequence

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.training.facts import FrozenParameter, SmallFactor, TrainingFacts, TrainingRunFacts, UnitsFact
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.wording import GLOROT_INIT, HE_INIT, at_line, finding, tested_fix

WHOLE = 0.98
"""A layer in which no unit is alive passes no gradient; no experiment is needed to tell."""


@rule(
    code="training/dead-relu",
    title="A layer is dead: its units are zero for every sample.",
    symptom="The model predicts the same for every sample; the loss stays where a constant prediction leaves it; most "
    "gradients are exactly zero.",
    cause="A ReLU whose input is negative for every sample passes no gradient, so its weights never change again. A "
    "large negative bias does it at the start, a step that was too long does it later.",
    confirm="`(activation > 0).any(0).float().mean()` over some batches is the share of units that are alive.",
    fix="Initialize biases with zero and weights with He initialization; lower the learning rate where units die "
    "during training; or use LeakyReLU or GELU, which keep a slope.",
    reference="https://arxiv.org/abs/1903.06733",
)
def dead_relu(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.flat_units_matter(run):
        return None
    early = bool(signs.dead(run.start_units))
    places = signs.dead(run.start_units) or signs.dead(run.end_units)
    if signs.units_died(run) and signs.lower_rate_helps(run):
        return None  # the learning rate killed it
    experiment = signs.rescaling(run)
    if signs.units_died(run) and not signs.lower_rates(run) and not signs.helps(experiment):
        return None  # nothing tells what killed it
    if not places or not (max(p.dead or 0.0 for p in places) >= WHOLE or signs.helps(experiment)):
        return None
    first = places[0]
    layer, share = first.layer or first.module, percent(first.dead or 0.0)
    title = (
        f"`{layer}` is dead {'from the start' if early else 'at the end of the run'}: {share} of its {first.units} "
        "units are zero after the ReLU for every sample"
    )
    if not early:
        before = next((u.dead for u in run.start_units if (u.module, u.op) == (first.module, first.op)), None)
        title += f" ({percent(before) if before else 'none'} of them at the start: the others died during training)"
    return finding(
        "dead-relu",
        title,
        _names(places),
        [tested_fix(*HE_INIT, experiment)],
        run=run,
        chain=[
            f"{share} of the units after `{layer}` are zero for every sample",
            "they pass no gradient, so the layers before them are not trained",
            _loss_stays(run),
        ],
        evidence=_by_layer(places, "dead"),
    )


def _names(places: list[UnitsFact]) -> list[str]:
    return [name for place in places for name in (place.layer, place.module)]


def _by_layer(places: list[UnitsFact], what: str) -> dict[str, object]:
    return {f"{what}, by layer": {f"{p.layer or p.module} ({p.op})": getattr(p, what) for p in places[:8]}}


def _loss_stays(run: TrainingRunFacts) -> str:
    return f"the loss stays at {figures(signs.last_loss(run))} (first: {figures(signs.first_loss(run))})"


@rule(
    code="training/saturated-activation",
    title="A layer's activations are saturated.",
    symptom="The loss hardly moves; layers before the activation get gradients near zero, layers after it learn.",
    cause="Beyond ±3 the slope of tanh, beyond ±6 that of a sigmoid is below a hundredth of its maximum. Inputs or "
    "weights that are too large push values there at the start; a step that was too long does it later.",
    confirm="Plot a histogram of the activation: it piles up at -1 and 1 (tanh) or at 0 and 1 (sigmoid).",
    fix="Scale the inputs to about one, use Glorot initialization, normalize before the activation, or use ReLU.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def saturated_activation(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.flat_units_matter(run) or not signs.helps(signs.rescaling(run)):
        return None
    places = signs.saturated(run.start_units) or signs.saturated(run.end_units)
    if not places:
        return None
    first, when = places[0], "from the start" if signs.saturated(run.start_units) else "at the end of the run"
    layer, share = first.layer or first.module, percent(first.saturated or 0.0)
    title = (
        f"`{layer}` saturates its {first.op} {when}: at {share} of the values the slope is below a hundredth of its "
        "maximum"
    )
    return finding(
        "saturated-activation",
        title,
        _names(places),
        [tested_fix(*GLOROT_INIT, signs.rescaling(run))],
        run=run,
        evidence=_by_layer(places, "saturated"),
        chain=[
            f"{share} of the values of the {first.op} after `{layer}` are saturated",
            "it passes next to no gradient",
            _loss_stays(run),
        ],
    )


@rule(
    code="training/vanishing-gradients",
    title="Gradients vanish before they reach the first layers.",
    symptom="The loss soon settles where predicting the mean of the targets leaves it; only the last layer's weights "
    "move.",
    cause="A sigmoid passes at most a quarter of the gradient, a tanh less than all of it: after several layers "
    "nothing is left. Weights that are too small, or a constant near zero behind an adapter, do the same.",
    confirm="Print the root mean square of each weight's gradient, from the last layer to the first: it shrinks by a "
    "factor in each.",
    fix="Use ReLU or GELU with He initialization, residual connections, or normalization between the layers.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def vanishing_gradients(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and run.factor is not None and signs.helps(run.experiments.get("factor 1"), signs.MUCH_BETTER):
        return _scaled_down(run, run.factor)
    if run is None or not signs.learns_nothing(run) or signs.lower_rate_helps(run):
        return None
    experiment = run.experiments.get("relu")
    if run.optimizers > 1 and not signs.helps(experiment):
        return None  # the losses of adversaries need not fall
    weak = signs.vanishing(run, signs.VANISHES_SOMEWHAT if signs.helps(experiment) else signs.VANISHES)
    if not weak:
        return _in_time(run)
    strongest = max(run.layers, key=lambda layer: layer.first_gradient)
    times = strongest.first_gradient / weak[0].first_gradient
    title = (
        f"Gradients vanish on the way back: that of `{weak[0].name}` is {times:,.0f} times smaller than that of "
        f"`{strongest.name}`, and {_loss_stays(run)}"
    )
    squashing = any(units.saturated is not None for units in run.start_units)
    advice, code = "Draw the weights for the layers' width, or normalize between the layers.", HE_INIT[1]
    if squashing:
        advice = "Use ReLU with He initialization, or normalize between the layers."
        code = f"torch.nn.ReLU()  # in place of sigmoid and tanh\n{HE_INIT[1]}"
    fix = tested_fix(advice, code, experiment)
    return finding(
        "vanishing-gradients",
        title,
        [layer.name for layer in weak],
        [fix],
        run=run,
        evidence={
            "gradient, by layer": {layer.name: layer.first_gradient for layer in run.layers[:16]},
            "update over weight, by layer": {layer.name: layer.update for layer in run.layers[:16]},
        },
    )


def _scaled_down(run: TrainingRunFacts, small: SmallFactor) -> Finding:
    """A constant in the forward, such as alpha / rank of an adapter."""
    experiment, names = run.experiments["factor 1"], listed(small.parameters, 3)
    return finding(
        "vanishing-gradients",
        f"What {names} make is multiplied by {small.factor:g}{at_line(small.where)}, which leaves next to nothing of "
        f"it and of its gradient: the loss stays at {figures(experiment.end_as_is)}; without the factor the same steps "
        f"end at {figures(experiment.end_changed)}",
        [*small.parameters, small.where.module or "", "forward"],
        [
            tested_fix(
                "Let the factor be about 1 (an adapter's alpha of the size of its rank).", "scale = 1.0", experiment
            )
        ],
        run=run,
        place=small.where,
        evidence={"factor": small.factor},
    )


def _in_time(run: TrainingRunFacts) -> Finding | None:
    """The same through the time steps of a sequence, where a network that sees all of them at once does learn."""
    gradient, reference = signs.vanishing_in_time(run), (run.reference or {}).get("train")
    loss = run.evaluations[-1].train if run.evaluations else None
    if gradient is None or reference is None or loss is None or not reference < signs.MUCH_BETTER * loss:
        return None
    title = (
        f"Gradients vanish on the way back through time: in `{gradient.module}` the gradient at the first of "
        f"{gradient.steps} time steps is {gradient.last / max(gradient.first, 1e-38):.1e} times smaller than at the "
        f"last, and the loss stays at {figures(signs.last_loss(run))}; a network that sees all time steps at once "
        f"reaches {figures(reference)}"
    )
    fix = Fix(
        "Use a gated cell (GRU, LSTM), attention, or shorter sequences.",
        "torch.nn.GRU(...)  # in place of RNN",
        None,
        {"why not": "another cell changes more of the model than can be tried automatically"},
    )
    return finding(
        "vanishing-gradients",
        title,
        [gradient.module],
        [fix],
        run=run,
        evidence={"gradient at the first time step": gradient.first, "at the last": gradient.last},
    )


def frozen_in_run(facts: TrainingFacts) -> Finding | None:
    """training/frozen-parameters, as a run shows it; the rule is declared beside what preflight sees of it."""
    run = facts.run
    if run is None or not run.frozen or not signs.has_room(run):
        return None
    experiment, zeros = run.experiments.get("unfrozen"), [f for f in run.frozen if f.zero and f.matrix]
    matrices = [f for f in run.frozen if f.matrix and f.held]
    fresh = bool(matrices) and all(f.fresh for f in matrices)  # what has been trained is frozen on purpose
    if not zeros and not (fresh and signs.helps(experiment)):
        return None
    blamed = [f.name for f in (_with_neighbours(run, zeros) if zeros else run.frozen)]
    why = (
        f"`{zeros[0].name}` is frozen at zero, so that the part of the model that it belongs to does nothing"
        if zeros
        else f"{count(len(run.frozen), 'parameter')} with requires_grad=False (`{blamed[0]}` and others) still have "
        "their random initial values, and the optimizer holds them"
    )
    code = "\n".join(f"model.get_parameter({name!r}).requires_grad_(True)" for name in blamed[:4])
    return finding(
        "frozen-parameters",
        f"{why}; {_loss_stays(run)}",
        blamed,
        [tested_fix("Train them.", code, experiment)],
        run=run,
        evidence={
            "frozen": blamed[:12],
            "trained elements": run.trained_elements,
            "frozen elements": sum(f.elements for f in run.frozen),
        },
    )


def _with_neighbours(run: TrainingRunFacts, zeros: Sequence[FrozenParameter]) -> list[FrozenParameter]:
    """The zero ones, and the frozen parameters of the same modules."""
    owners = {f.name.rpartition(".")[0] for f in zeros}
    return [*zeros, *(f for f in run.frozen if f not in zeros and f.name.rpartition(".")[0] in owners)]
