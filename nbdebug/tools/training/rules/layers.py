"""Rules for single layers: dead, saturated, out of the gradient's reach, not trained at all."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import TrainingFacts, TrainingRunFacts, UnitsFact
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.wording import run_finding as finding
from nbdebug.tools.training.rules.wording import short_number as short
from nbdebug.tools.training.rules.wording import tried

WHOLE = 0.98
"""A layer in which nothing lives passes no gradient; no experiment is needed to tell."""


@rule(
    code="training/dead-relu",
    title="A layer is dead: its units are zero for every sample.",
    symptom="The model gives every sample the same answer; the loss is that of the base rate; most gradients are "
    "exactly zero.",
    cause="A relu whose input is negative for every sample passes no gradient, so its weights never change again. A "
    "bias far below zero does it at the start, one step that was too long does it later.",
    confirm="`(activation > 0).any(0).float().mean()` over some batches: the share of living units.",
    fix="Initialise biases with zero and weights with He's init; lower the learning rate where units die on the way; "
    "or use LeakyReLU or GELU, which keep a slope.",
    reference="https://arxiv.org/abs/1903.06733",
)
def dead_relu(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.held_by_flat(run):
        return None
    early = bool(signs.dead(run.start_units))
    places = signs.dead(run.start_units) or signs.dead(run.end_units)
    if signs.died(run) and signs.lower_rate_cures(run):
        return None  # the learning rate killed it
    if not places or not (max(p.dead or 0.0 for p in places) >= WHOLE or signs.helps(signs.cured(run))):
        return None
    first = places[0]
    when = "from the start" if early else "at the end of the run"
    died = (
        ""
        if early
        else (
            f" (of {first.units} units {_share(run.start_units, first)} were dead at the start: they died on the way)"
        )
    )
    title = (
        f"`{first.feeds or first.module}` is dead {when}: {first.dead:.0%} of its {first.units} units are zero "
        f"after the relu for every sample{died}"
    )
    chain = [
        f"{first.dead:.0%} of the units behind `{first.feeds or first.module}` are zero for every sample",
        "they pass no gradient: what lies before them is not trained",
        f"the loss stays at {short(signs.last(run))} (first: {short(signs.first(run))})",
    ]
    fix = tried(
        "Start with outputs around zero: no negative biases, He's init.",
        "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')\ntorch.nn.init.zeros_(layer.bias)",
        signs.cured(run),
    )
    return finding(run, "dead-relu", title, _names(places), [fix], chain=chain, evidence=_evidence(places, "dead"))


def _share(units: tuple[UnitsFact, ...], place: UnitsFact) -> str:
    before = next((u.dead for u in units if (u.module, u.op) == (place.module, place.op)), None)
    return "none" if not before else f"{before:.0%}"


def _names(places: list[UnitsFact]) -> list[str]:
    return [name for p in places for name in (p.feeds, p.module)]


def _evidence(places: list[UnitsFact], what: str) -> dict[str, object]:
    return {f"{what}, by layer": {f"{p.feeds or p.module} ({p.op})": getattr(p, what) for p in places[:12]}}


@rule(
    code="training/saturated-activation",
    title="A layer's activations sit on the flat ends.",
    symptom="The loss hardly moves; layers before the activation get gradients near zero, though those behind learn.",
    cause="Beyond ±3 a tanh, beyond ±6 a sigmoid is flat to a hundredth of its slope. Inputs or weights that are too "
    "large push values there at the start; a step that was too long does it later.",
    confirm="Histogram of the activation: it piles up at -1 and 1 (tanh) or 0 and 1 (sigmoid).",
    fix="Scale inputs to about one, initialise with Glorot's init, normalise before the activation, or use relu.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def saturated_activation(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.held_by_flat(run) or not signs.helps(signs.cured(run)):
        return None
    places = signs.saturated(run.start_units) or signs.saturated(run.end_units)
    if not places:
        return None
    first, when = places[0], "from the start" if signs.saturated(run.start_units) else "at the end of the run"
    title = (
        f"`{first.feeds or first.module}` saturates its {first.op} {when}: at {first.saturated:.0%} of the "
        "values the slope is below a hundredth of its largest"
    )
    fix = tried(
        "Bring what goes into the activation to a size of about one.",
        "torch.nn.init.xavier_uniform_(layer.weight)\ntorch.nn.init.zeros_(layer.bias)",
        signs.cured(run),
    )
    return finding(
        run,
        "saturated-activation",
        title,
        _names(places),
        [fix],
        evidence=_evidence(places, "saturated"),
        chain=[
            f"{first.saturated:.0%} of the {first.op} behind `{first.feeds or first.module}` is flat",
            "it passes on next to no gradient",
            f"the loss stays at {short(signs.last(run))} (first: {short(signs.first(run))})",
        ],
    )


@rule(
    code="training/vanishing-gradients",
    title="Gradients fade before they reach the first layers.",
    symptom="The loss settles at once at what the mean of the targets gives; only the last layer's weights move.",
    cause="A sigmoid passes on a quarter of the gradient at most, a tanh less than all of it: through several layers "
    "nothing is left. Weights that are too small do the same.",
    confirm="Root mean square of each weight's gradient, from the last layer to the first: it falls by a factor each.",
    fix="Use relu or GELU with He's init, residual connections, or normalisation between the layers.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def vanishing_gradients(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None or not signs.learns_nothing(run) or signs.lower_rate_cures(run):
        return None
    trial = run.trials.get("relu")
    weak = signs.fading(run, signs.FADES_SOMEWHAT if signs.helps(trial) else signs.FADES)
    if not weak:
        return _in_time(run)
    strongest = max(run.layers, key=lambda la: la.first)
    title = (
        f"Gradients fade on their way back: `{weak[0].name}` gets {strongest.first / weak[0].first:,.0f} times "
        f"less than `{strongest.name}`, and the loss stays at {short(signs.last(run))} (first: "
        f"{short(signs.first(run))})"
    )
    fix = tried(
        "Use relu with He's init, or normalise between the layers.",
        "torch.nn.ReLU()  # in place of the squashing activations\n"
        "torch.nn.init.kaiming_uniform_(layer.weight, nonlinearity='relu')",
        trial,
    )
    return finding(
        run,
        "vanishing-gradients",
        title,
        [la.name for la in weak],
        [fix],
        evidence={
            "gradient, by layer": {la.name: la.first for la in run.layers[:16]},
            "update over weight, by layer": {la.name: la.update for la in run.layers[:16]},
        },
    )


def _in_time(run: TrainingRunFacts) -> Finding | None:
    """The same through the moments of a sequence, where a network that sees all of them at once does learn."""
    way, reference = signs.fades_in_time(run), run.reference
    mine, theirs = (reference or {}).get("train"), run.checkups[-1].train if run.checkups else None
    if way is None or mine is None or theirs is None or not mine < signs.MUCH_BETTER * theirs:
        return None
    title = (
        f"Gradients fade on their way back through time: at the first of {way.moments} moments `{way.module}` "
        f"gets {way.last / max(way.first, 1e-38):.1e} times less than at the last, and the loss stays at "
        f"{short(signs.last(run))}; a network that sees all moments at once gets to {short(mine)}"
    )
    fix = Fix(
        "Use a gated cell (GRU, LSTM), attention, or shorter sequences.",
        "torch.nn.GRU(...)  # in place of RNN",
        None,
        {"why not": "the exchange of a cell changes more than can be tried unseen"},
    )
    return finding(
        run,
        "vanishing-gradients",
        title,
        [way.module],
        [fix],
        evidence={"gradient at the first moment": way.first, "at the last": way.last},
    )


def frozen_in_run(facts: TrainingFacts) -> Finding | None:
    """training/frozen-parameters, as a run shows it; the rule is declared beside what preflight sees of it."""
    run = facts.run
    if run is None or not run.frozen or not signs.has_room(run):
        return None
    trial, zeros = run.trials.get("unfrozen"), [f for f in run.frozen if f.zero and f.matrix]
    matrices = [f for f in run.frozen if f.matrix and f.held]
    fresh = bool(matrices) and all(f.fresh for f in matrices)  # what is trained already is kept so on purpose
    if not zeros and not (fresh and signs.helps(trial)):
        return None
    blamed = [f.name for f in _beside(run, zeros)] if zeros else [f.name for f in run.frozen]
    why = (
        f"`{zeros[0].name}` is frozen at zero, so that what it is a part of does nothing"
        if zeros
        else f"{len(run.frozen)} parameters have requires_grad=False (`{blamed[0]}` and others): they are as they were "
        "drawn, by chance, and the optimizer holds them"
    )
    title = f"{why}; the loss stays at {short(signs.last(run))} (first: {short(signs.first(run))})"
    code = "\n".join(f"model.get_parameter({n!r}).requires_grad_(True)" for n in blamed[:4])
    fix = tried("Let them be trained.", code, trial)
    return finding(
        run,
        "frozen-parameters",
        title,
        blamed,
        [fix],
        evidence={
            "frozen": blamed[:12],
            "trained elements": run.trained_elements,
            "frozen elements": sum(f.elements for f in run.frozen),
        },
    )


def _beside(run: TrainingRunFacts, zeros: list) -> list:
    """The zero ones, and the frozen parameters that stand beside them in the same module."""
    owners = {f.name.rpartition(".")[0] for f in zeros}
    return zeros + [f for f in run.frozen if f not in zeros and f.name.rpartition(".")[0] in owners]
