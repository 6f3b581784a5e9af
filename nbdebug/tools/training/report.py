"""From the facts to the reports of preflight and diagnose: findings, causes ruled out with their numbers, notes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from nbdebug import verdict
from nbdebug.report import Finding, Fix, Plot, Report, RuledOut, Symptom, Table
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.training.edits import GONE
from nbdebug.tools.training.facts import Experiment, TrainingFacts, TrainingRunFacts, UndecidedPair
from nbdebug.tools.training.rules import signs, slug
from nbdebug.tools.training.rules.findings import CURES, EXPERIMENT, NOT_REPEATED, feature_name, in_words, suggestion
from nbdebug.tools.training.static_facts import Attempt, StaticFacts, TriedEdit, UnitsFact

NO_OPTIMIZER = "Which parameters an optimizer holds: no optimizer was given"
"""Of a run it is known all the same, where one has stepped: it was watched."""

POINTS = 100
"""Points of a curve that go into a report."""
SPAN = "tried on"
CURVES_OF = "loss of one batch, trained on alone"
CONFLICTS = 0.01
"""Share of training rows that have a twin with another label, from which it is worth a note."""
SURPRISED = 1.5
"""Loss at the start over that of guessing, above which it is worth a word."""
GAINS = 3
"""Regularizers that are told in words."""
PLACES = {
    "augment =": "it, and `x = augment(x)` into the training step, never into validation",
    "scheduler =": "it before the loop, and `scheduler.step()` behind each optimizer.step()",
    "EarlyStop": "it, `if stop(validation_loss): break` behind each validation, and `stop.restore()` at the end",
    "label_smoothing": "it in place of your loss",
    " = model": "it before the optimizer is made",
    " = nn.": "it before the optimizer is made",
}
"""By what stands in it, where a line belongs."""

EXPERIMENTS = {
    "zero-grad-missing": ("zero_grad",),
    "gradients-cleared-before-step": ("zero_grad",),
    **dict.fromkeys(("clip-before-unscale", "unscale-order"), ("unscaled first",)),
    "eval-mode-in-training": ("train mode",),
    "train-mode-in-eval": (signs.FROZEN_EVALUATED,),
    "weights-not-restored": ("weights kept",),
    "exchanged-labels": ("exchanged labels",),
    "loss-spike": ("without the batch",),
    "unshuffled-data": ("shuffled",),
    "label-noise": ("without suspect labels",),
    "plateau": ("level rate",),
    "scheduler-order": ("level rate",),
    "frozen-parameters": (signs.HEAD_UNFROZEN, "unfrozen"),
    "dead-relu": ("rescaled", "normalized"),
    "saturated-activation": ("rescaled", "normalized"),
    "vanishing-gradients": ("relu",),
    "exploding-gradients": ("clip",),
    "lr-too-high": ("lr/",),
    "lr-too-low": ("lr*",),
    "over-regularized": ("no penalty", "no weight decay", "less dropout"),
}
"""By the beginnings of their names, which experiments show a cause's fix."""
UNSCHEDULED = "Keep the first rate, or make the schedule as long as the run."
"""Title of an edit without the scheduler's step."""
OVERFITS = frozenset({"overfit", "model-too-large-for-data"})
EXPLAINS_OVERFITTING = OVERFITS | {"train-mode-in-eval", "running-statistics", "preprocessing-mismatch"}


# preflight


def preflight_report(static: StaticFacts, findings: list[Finding], subject: str) -> Report:
    named = {slug(f) for f in findings}
    facts = {
        "parameters": [dataclasses.asdict(p) for p in static.parameters],
        "loss": static.loss,
        "seconds": static.seconds,
    }
    return Report(
        "preflight(model, loader, loss_fn)",
        tuple(_with_attempts(findings, static)),
        tuple(_ruled_out_static(static, named)),
        static.unchecked,
        tuple(_notes(static, named)),
        subject,
        facts,
        symptoms=_symptoms_at_start(static),
        plots=_attempt_plots(findings, static),
    )


def _symptoms_at_start(static: StaticFacts) -> list[Symptom]:
    """What is not well before the first step."""
    if static.loss is None:
        return [verdict.blind("The loss of a batch", next(iter(static.unchecked), "it could not be computed"))]
    if not static.finite:
        return verdict.of_losses([static.loss])
    if static.bad_gradients:
        said = f"The gradients of {listed(static.bad_gradients)} are not finite, though the loss is"
        return [Symptom(f"{said} {figures(static.loss)}.", verdict.FINITE)]
    alone = static.overfit
    if alone is not None and all(last > verdict.LEVEL * first > 0 for _, _, first, last, _ in alone.tries):
        return [Symptom(f"{alone.verdict}.", alone.next_step)]
    return []


def _with_attempts(
    findings: Sequence[Finding], static: StaticFacts, run: TrainingRunFacts | None = None
) -> list[Finding]:
    """The findings, each with what came of its first fix: as an edit in the run, or on one batch."""
    result = []
    for finding in findings:
        attempt = static.attempts.get(slug(finding))
        first, *others = finding.fixes or (None,)
        edit = None if run is None else run.edits.get(slug(finding))
        if edit is not None and first is not None:
            finding = dataclasses.replace(finding, fixes=(_of_edit(first, edit), *others))
        elif attempt is not None and first is not None and (EXPERIMENT not in first.after or _cures(attempt)):
            finding = dataclasses.replace(finding, fixes=(_tested(first, attempt), *others))
        result.append(finding)
    return result


def _cures(attempt: Attempt) -> bool:
    return attempt.edit is not None and attempt.verified is True


def _tested(fix: Fix, attempt: Attempt) -> Fix:
    if not attempt.as_is and not attempt.fixed:
        return dataclasses.replace(fix, after={"why not": attempt.why})
    steps = len(attempt.as_is) - 1, len(attempt.fixed) - 1
    after: dict[str, Any] = {
        "undecided": attempt.why or None,
        "one batch": None if attempt.edit is not None else attempt.how,
        "other samples changed": attempt.others,
        "loss as it is": _end(attempt.as_is),
        "loss with the fix": _end(attempt.fixed),
        "steps": max(steps),
        "steps with the fix": steps[1] if 0 < steps[1] < steps[0] else None,
        "optimizer": attempt.optimizer,
    }
    after = {k: v for k, v in after.items() if v is not None}
    if attempt.edit is not None:
        how = "" if attempt.how == "this text" else f"{attempt.how}, "
        span = f"{how}one batch, {count(max(steps), 'step')}"
        return _of_edit(fix, TriedEdit(attempt.edit, attempt.verified, span, after))
    after["loss in the experiment"] = after.pop("loss with the fix")
    after.pop("one batch", None)
    how = f"{attempt.how}, on one batch" + (", which does not help" if attempt.verified is False else "")
    return suggestion(fix.title, fix.code, how, after)


def _of_edit(fix: Fix, tried: TriedEdit) -> Fix:
    """A fix that is called tried has an edit: the text that was run."""
    title = UNSCHEDULED if GONE in tried.edit.new else fix.title
    return Fix.of(title, tried.edit, tried.verified, {SPAN: tried.span, **tried.numbers})


def _end(losses: Sequence[float]) -> float | str:
    if not losses:
        return "none: it raises"
    return losses[-1] if math.isfinite(losses[-1]) else "not finite"


def _attempt_plots(findings: Sequence[Finding], static: StaticFacts) -> tuple[Plot, ...]:
    """Curves of the first finding whose fix was tried; nothing where none was."""
    attempts = (static.attempts.get(slug(f)) for f in findings)
    attempt = next((a for a in attempts if a is not None and a.fixed), None)
    if attempt is None:
        return ()
    pairs = {"as it is": _points(attempt.as_is), "with the fix": _points(attempt.fixed)}
    curves = {name: curve for name, curve in pairs.items() if curve}
    return (Plot("losses", {"curves": curves, "curves of": CURVES_OF}),)


def _points(losses: Sequence[float], end: float = 0.0) -> list[list[Any]]:
    """A curve for a report: [step, loss] of at most a hundred steps and of the extremes, None for a loss that is not
    finite. end: the loss afterwards; where it is not finite and all of these are, one more step is."""
    values = [*losses, *[math.nan] * (not math.isfinite(end) and all(map(math.isfinite, losses)))]
    finite = [i for i, v in enumerate(values) if math.isfinite(v)]
    broke = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    steps = {*range(0, len(values), max(1, -(-len(values) // POINTS))), *range(len(values))[-1:]}
    steps |= {max(finite, key=values.__getitem__), min(finite, key=values.__getitem__)} if finite else set()
    steps |= set() if broke is None else {broke}
    return [[i, float(f"{values[i]:.6g}") if math.isfinite(values[i]) else None] for i in sorted(steps)]


def _ruled_out_static(static: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    """Causes that were looked for and are not there, with the number that says so."""
    trained, reached = static.trained, [p for p in static.trained if p.reached]
    if static.has_optimizer and "parameters-not-in-optimizer" not in named:
        held = sum(bool(p.held) for p in reached)
        yield RuledOut("parameters missing from the optimizer", f"it holds {held} of {len(reached)} with a gradient")
    if trained and "detached-graph" not in named:
        others = "" if len(reached) == len(trained) else "; nothing cuts the others off"
        yield RuledOut("a cut graph", f"{len(reached)} of {len(trained)} trained parameters get a gradient{others}")
    for call in static.loss_calls[:1]:
        if not named & {"double-softmax", "missing-log-softmax", "wrong-output-activation"}:
            origin = f", from `{call.activation}`" if call.activation else ""
            yield RuledOut(
                "an output that does not fit the loss",
                f"`{call.op}` gets {figures(call.low)} to {figures(call.high)}{origin}",
            )
        if "wrong-loss-shape" not in named:
            yield RuledOut("broadcast shapes", f"{list(call.shape)} and {list(call.target_shape)}")
    if static.mixing_checked and static.mixing is None:
        yield RuledOut("mixed samples", "replacing one sample changes no other output")
    if static.ignores_input is False:
        yield RuledOut("an ignored input", "other inputs change the loss")
    yield from _ruled_out_data(static, named)
    yield from _ruled_out_signals(static, named)


def _ruled_out_data(static: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    if static.first_layers and "input-not-normalized" not in named:
        largest = max(f.rms for f in static.first_layers)
        yield RuledOut("inputs of the wrong scale", f"the largest feature has size {figures(largest)}")
    if static.input_shift is not None and "preprocessing-mismatch" not in named:
        yield RuledOut(
            "different preprocessing in validation", f"means differ by {figures(static.input_shift.shift)} deviations"
        )
    if static.overlap is not None and static.overlap.rows and "leakage" not in named:
        yield RuledOut("validation samples in training", f"{static.overlap.shared} of {static.overlap.rows:,}")
    labels = static.labels
    if labels is not None and len(labels.counts) > 1:
        if "unshuffled-data" not in named:
            yield RuledOut("sorted labels", f"{labels.runs:,} runs of equal labels (shuffled: {labels.expected:,.0f})")
        if "class-imbalance" not in named:
            share = percent(max(labels.counts.values()) / labels.total)
            yield RuledOut("one class only", f"the commonest has {share} of {count(labels.total, 'label')}")
    if static.workers is not None and "same-seed-workers" not in named:
        yield RuledOut(
            "workers with equal random numbers",
            "draws differ between workers and passes"
            if static.workers.random
            else "the same item comes out the same each time: nothing is drawn",
        )


def _ruled_out_units(units: Iterable[UnitsFact], named: set[str]) -> Iterable[RuledOut]:
    dead = [u.dead for u in units if u.dead is not None]
    if dead and "dead-relu" not in named and max(dead) < signs.DEAD:
        yield RuledOut("dead units", f"at most {percent(max(dead))} of a layer")
    flat = [u.saturated for u in units if u.saturated is not None and u.hidden]
    if flat and "saturated-activation" not in named and max(flat) < signs.SATURATED:
        yield RuledOut("saturated activations", f"at most {percent(max(flat))} of a layer's values")


def _ruled_out_signals(static: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    yield from _ruled_out_units(static.units, named)
    ratios = [w.std / w.he_std for w in static.weights if w.trained]
    if ratios and "bad-init" not in named:
        yield RuledOut("initial weights of the wrong size", f"{figures(min(ratios))} to {figures(max(ratios))} of He's")


def _notes(static: StaticFacts, named: set[str]) -> Iterable[str]:
    if static.overfit is not None:
        yield f"{static.overfit.verdict}. {static.overfit.next_step}"
    yield from _start_notes(static, named)
    if static.parameters:
        yield _parameter_note(static)
    elements = sum(p.elements for p in static.trained)
    if static.samples and elements:
        ratio = f"{figures(elements / static.samples)} for each"
        enough = ": enough to memorize them, so watch the validation loss" if elements > static.samples else ""
        yield f"{elements:,} trained numbers for {count(static.samples, 'sample')}: {ratio}{enough}."
    if static.reduction:
        yield REDUCTIONS[static.reduction]
    if static.overlap is not None and static.overlap.distinctive and static.overlap.conflicts >= CONFLICTS:
        yield (
            f"{percent(static.overlap.conflicts)} of the training rows occur twice with different labels: at least "
            "half of these labels are wrong."
        )
    if static.eval_mode:
        yield "The model is in eval mode now; your loop has to call model.train() first."
    yield from _feature_note(static, named)
    yield from static.notes


REDUCTIONS = {
    "sum": "The loss is a sum over the batch: its gradient, and so the step, grows with the batch size. Do not divide "
    "it when you accumulate micro-batches; use the mean to be independent of the batch size.",
    "mean": "The loss is a mean over the batch: when you accumulate k micro-batches, divide each loss by k.",
    "neither": "The losses of two half batches do not add up to that of the whole: samples count differently (weights, "
    "masks, pairs), so accumulated micro-batches are not the same as one large batch.",
}


def _start_notes(static: StaticFacts, named: set[str]) -> Iterable[str]:
    guess = next((call.guess for call in static.loss_calls if call.guess), None)
    if static.loss is not None and guess:
        high = static.loss > SURPRISED * guess
        more = ". That is far above it: check the scale of inputs and weights" if high else ""
        yield f"The loss starts at {figures(static.loss)}; guessing gives {figures(guess)}{more}."
    yield from _floor_note(static)
    if static.ignores_input and "zero-loss" not in named:
        yield (
            "The loss stays the same when the inputs are exchanged between samples: at the start the output does not "
            "depend on the input (a last layer that starts at zero does that, and is no fault)."
        )


def _parameter_note(static: StaticFacts) -> str:
    """The parameter table in a sentence; the whole of it is `report.facts["parameters"]`."""
    trained = static.trained
    kinds = {
        "frozen": [p for p in static.parameters if not p.trained],
        "not used by the forward": [p for p in trained if not p.used],
        "without a gradient": [p for p in trained if p.used and not p.reached],
        "with a gradient of exactly zero": [p for p in trained if p.reached and p.gradient == 0.0],
        "with a learning rate of zero": [p for p in trained if p.held and p.rate == 0.0],
    }
    parts = [f"{len(group):,} {kind} ({listed([p.name for p in group], 2)})" for kind, group in kinds.items() if group]
    parts += [static.placed] if static.placed else []
    return "; ".join([f"Parameters: {len(trained):,} of {len(static.parameters):,} are trained", *parts]) + "."


# diagnose


def diagnose_report(facts: TrainingFacts, findings: list[Finding], question: str, subject: str) -> Report:
    run, static = facts.run, facts.static
    assert run is not None, "diagnose has watched it"
    named = {slug(f) for f in findings}
    findings, gains = [_with_reason(f, run) for f in _with_attempts(findings, static, run)], _gains(run)
    findings = [dataclasses.replace(f, fixes=(*f.fixes, *gains)) if slug(f) in OVERFITS else f for f in findings]
    before = _ruled_out_static(static, named) if static.loss is not None else ()
    return Report(
        question,
        tuple(findings),
        tuple({r.what: r for r in (*before, *_ruled_out_run(run, named))}.values()),
        tuple(
            dict.fromkeys((*(t for t in static.unchecked if t != NO_OPTIMIZER or not run.optimizer), *run.unchecked))
        ),
        (
            _course(run),
            *[NOT_FINITE] * (bool(findings) and signs.not_finite(run)),
            *_floor_note(static, run),
            *[f"{fix.title} {fix.code}" for fix in gains if not named & OVERFITS],
            *_validation_note(run),
            *_measure_note(run),
            *_accumulation_note(run, named),
            *_both_zero(facts, named),
        ),
        subject,
        symptoms=_symptoms(facts),
        steps=len(run.losses),
        plots=(Plot("losses", _curves(run, findings)),),
        tables=_regularizers(run),
    )


def _floor_note(static: StaticFacts, run: TrainingRunFacts | None = None) -> Iterable[str]:
    """What smoothed labels leave of the loss at best, and whether the run has come down to that."""
    floor = run.floor if run is not None else static.floor[0]
    if not floor:
        return
    call, end = static.loss_calls[0], signs.last_loss(run) if run is not None and signs.at_floor(run) else 0.0
    yield verdict.floor_note(floor, call.smoothing, call.classes or 0, end)


def _regularizers(run: TrainingRunFacts) -> tuple[Table, ...]:
    """What each regularizer made of the validation loss."""
    if len(run.regularizers) < 2:
        return ()
    rows = [
        (
            trial.what or "as it is",
            trial.train,
            trial.val,
            trial.change if trial.what else None,
            trial.error if trial.what else None,
        )
        for trial in run.regularizers
    ]
    best = next(iter(signs.gains(run)), None)
    note = (
        "None lowers the validation loss by more than batches and their order explain."
        if best is None
        else f"The lowest validation loss is that with {best.what}."
    )
    columns = "regularizer", "training loss", "validation loss", "change", "give or take"
    return (Table("Regularizers, one at a time", columns, rows, f"{note} Without smoothing; one run each.", True),)


def _gains(run: TrainingRunFacts) -> list[Fix]:
    """The regularizers that help, each with the line to paste, which is the one that was run."""
    as_is = next((t.val for t in run.regularizers if not t.what), math.nan)
    fixes = []
    for trial in signs.gains(run)[:GAINS]:
        place = next((text for part, text in PLACES.items() if part in trial.code), "it before the loop")
        numbers = {"validation as it is": as_is, "validation in the experiment": trial.val}
        fixes.append(suggestion(f"With {trial.what}: paste {place}.", trial.code, "with this line, on a copy", numbers))
    return fixes


def _validation_note(run: TrainingRunFacts) -> Iterable[str]:
    """How often to validate, by how fast validation rises in this run; nothing where the loop would see it in time."""
    rise = signs.rise_of_validation(run)
    if rise is None or run.validations is None:
        return
    (best, rose), steps, times = rise, len(run.losses), len(run.validations)
    shows = next((step for step in run.validations if step >= rose), steps)
    if shows - rose <= rose - best:
        return
    how = f"reads val_loader {count(times, 'time')}" if times else "never reads val_loader"
    when = f", and sees that {count(shows - rose, 'step')} later still" if shows in run.validations else ""
    every = count((rose - best) // 2, "step") if rose - best > 3 else "step"
    yield (
        f"Validation is best at step {run.step_numbers[min(best, steps - 1)]:,} and clearly worse "
        f"{count(rose - best, 'step')} later; your loop {how} in {count(steps, 'step')}{when}. To stop in time, "
        f"validate every {every}."
    )


def _measure_note(run: TrainingRunFacts) -> Iterable[str]:
    """What stands in the place of a loss whose value is no measure."""
    if run.follows:
        yield f"`{run.follows}` follows the model and gives its targets; start and end are compared against its end."
    if run.reward is not None:
        name, values = run.reward
        ends = [figures(v) for v in verdict.ends_of(values)] if len(values) >= verdict.FEW else []
        seen = f" `{name}`, the reward, went from {ends[0]} to {ends[1]}." if ends else ""
        yield f"The loss is a policy gradient's: its value is no measure of what was learned.{seen}"


def _accumulation_note(run: TrainingRunFacts, named: set[str]) -> Iterable[str]:
    """Gradients that are added up over batches, and are not their mean."""
    every, divisor, last = run.accumulation or (1, 1.0, 0)
    if "accumulation-scale" in named or every == 1:
        return
    if divisor != every:
        share = "not divided" if divisor == 1 else f"divided by {divisor:g}"
        counts = "its steps do not depend on that" if signs.adapts(run) else "the learning rate counts as much more"
        yield (
            f"A step adds up the gradients of {every} batches, and the mean loss of each is {share}: they are "
            f"{figures(every / divisor)} times those of the mean. With {run.optimizer} {counts}."
        )
    elif last:
        yield (
            f"The last step of a pass has {count(last, 'batch', 'batches')}, each divided by {every} all the same: its "
            f"gradient is {percent(last / every)} of their mean."
        )


def _both_zero(facts: TrainingFacts, named: set[str]) -> Iterable[str]:
    run, static = facts.run, facts.static
    if run is None or not signs.both_zero(run) or named & {"leakage", "zero-loss"}:
        return
    yield (
        "Both losses end next to zero. No label among the inputs, no copied rows, no single class or target and no "
        "rounding was seen: either the task is solved, or the inputs hold the answer in another form."
    )
    yield from _feature_note(static, named)


def _feature_note(static: StaticFacts, named: set[str]) -> Iterable[str]:
    """What the leak probe says: a question, since a made-up task may well have one feature."""
    feature = static.answers.feature if static.answers is not None else None
    if feature is not None and "leakage" not in named:
        share = percent(feature.share)
        yield f"{feature_name(feature)} alone tells the label in {share} of samples: is it known before the answer is?"


NOT_FINITE = "The loss became NaN or inf during the run: %nan_trace (or nbdebug.guard) names the op."


def _symptoms(facts: TrainingFacts) -> list[Symptom]:
    """What is not well in the course of the run, or could not be seen of it."""
    run, static = facts.run, facts.static
    assert run is not None, "diagnose has watched it"
    if not run.losses and (not run.evaluations or any(text.startswith("The run: ") for text in run.unchecked)):
        why = next((text for text in run.unchecked if text.startswith("The run: ")), "The run: no loss was seen")
        return [verdict.blind("The run", why.removeprefix("The run: "))]
    rates = run.rates if len(run.rates) == len(run.losses) else None
    fixed = [(e.train, e.val, e.val_error) for e in run.evaluations]
    several = run.adversaries or bool(run.follows)
    losses = verdict.of_losses(zip(run.step_numbers, run.losses), rates=rates, several=several, at_floor=run.at_floor)
    if run.reward is not None or run.follows and fixed:
        losses = [symptom for symptom in losses if symptom.look == verdict.FINITE]
    return [
        *[Symptom(text, verdict.FINITE) for text in [run.bad_end] if text],
        *[_undecided(pair) for pair in [run.undecided] if pair is not None],
        *losses,
        *(verdict.of_rewards(*run.reward) if run.reward is not None else ()),
        *verdict.of_evaluations(
            fixed,
            guess=static.guess,
            several=run.adversaries,
            floor=(run.floor, run.at_floor),
            constant=_constant(static),
        ),
        *(() if (a := run.agreement) is None else verdict.of_agreement(a.start, a.end, a.val, a.samples)),
    ]


def _constant(static: StaticFacts) -> float | None:
    """The loss of the best answer that does not look at the input, the entropy of the labels; None of another loss. It
    is below `guess` where a model has outputs for labels that never come."""
    call, labels = static.only_call, static.labels
    if call is None or labels is None or call.op not in ("cross_entropy", "nll_loss") or static.reduction != "mean":
        return None
    return None if call.weighted or call.smoothing else verdict.entropy_of(labels.counts.values())


def _undecided(pair: UndecidedPair) -> Symptom:
    one, other = pair.labels
    return Symptom(
        f"Labels {one} and {other} are hardly told apart: the scores of {percent(pair.apart)} of pairs are in the "
        f"right order (by chance half; {pair.samples:,} samples). Of other labels {percent(pair.others)} are found.",
        "Look at samples of both: their inputs may be alike, or their labels exchanged in a part of the rows.",
    )


def _with_reason(finding: Finding, run: TrainingRunFacts) -> Finding:
    """Where no experiment was possible, each fix says why."""
    why = next((text.partition(": ")[2] for text in run.unchecked if text.startswith("Experiments: ")), "")
    if not why:
        return finding
    fixes = (
        dataclasses.replace(fix, after={"why not": why})
        if fix.verified is None and fix.after.get("why not", fix.after.get(EXPERIMENT, NOT_REPEATED)) == NOT_REPEATED
        else fix
        for fix in finding.fixes
    )
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _course(run: TrainingRunFacts) -> str:
    if not run.losses:
        return "Your loop never called its callback, so its losses are not known."
    stopped = ""
    if run.stopped_at is not None and run.batches_per_pass and run.stopped_at < run.batches_per_pass:
        stopped = f" The loop ended within a pass, after {run.stopped_at:,} of {run.batches_per_pass:,} batches."
    val = [e.val for e in run.evaluations if e.val is not None]
    validation = f", on validation batches from {figures(val[0])} to {figures(val[-1])}" if val else ""
    own = f" The loss of a batch is your loop's own: {run.loss_from}." if run.loss_from else ""
    return (
        f"{count(len(run.losses), 'step')} in {run.seconds:.1f} s; on fixed training batches the loss went from "
        f"{figures(signs.first_loss(run))} to {figures(signs.last_loss(run))}{validation}.{stopped}{own}"
    )


def _curves(run: TrainingRunFacts, findings: list[Finding]) -> dict[str, Any]:
    """Curves: the run as it is and, where a fix was tried, with it."""
    curves: dict[str, Any] = {"as it is": _points(run.losses)}
    experiment = _experiment_for(run, slug(findings[0])) if findings else None
    if experiment is not None and experiment.changed:
        curves = {
            "as it is": _points(experiment.as_is or run.losses, experiment.end_as_is),
            "with the fix": _points(experiment.changed, experiment.end_changed),
        }
    return {
        "curves": curves,
        "checkups": [{"step": e.step, "training": e.train, "validation": e.val} for e in run.evaluations],
    }


def _experiment_for(run: TrainingRunFacts, code: str) -> Experiment | None:
    starts = EXPERIMENTS.get(code, ("nothing",))
    fitting = (e for name, e in run.experiments.items() if name.startswith(starts))
    return min(fitting, key=lambda e: e.end_changed, default=None)


def _ruled_out_run(run: TrainingRunFacts, named: set[str]) -> Iterable[RuledOut]:
    """Causes that were looked for and are not there, with the number that says so."""
    if run.stale.steps > 1 and "zero-grad-missing" not in named:
        yield RuledOut("gradients never cleared", f"{percent(run.stale.share)} of {run.stale.steps} steps had old ones")
    if run.scaler is not None and run.scaler.steps and "clip-before-unscale" not in named:
        yield RuledOut("clipping before unscaling", f"{run.scaler.clipped} of {count(run.scaler.steps, 'step')}")
    mode = next((m for m in run.modes if m.train_steps), None)
    if mode is not None and "eval-mode-in-training" not in named:
        total = count(mode.train_steps + mode.eval_steps, "step")
        yield RuledOut("training in eval mode", f"`{mode.module}` was in eval mode in {mode.eval_steps} of {total}")
    if run.order.batches >= 4 and "unshuffled-data" not in named:
        spread = figures(run.order.spread, 2)
        yield RuledOut("unshuffled data", f"batch means differ {spread} times as much as after a shuffle (limit: 3)")
    updates = signs.updates(run)
    usual = bool(updates) and signs.SMALL_UPDATE < max(updates) < signs.LARGE_UPDATE
    if usual and not named & {"lr-too-low", "lr-too-high"}:
        low, high = percent(min(updates)), percent(max(updates))
        yield RuledOut("a learning rate that is far off", f"updates are {low} to {high} of the weights")
    yield from _ruled_out_layers(run, named)
    val = [e.val for e in run.evaluations if e.val is not None]
    if val and not signs.not_finite(run) and val[-1] <= signs.ROSE * min(val) and not named & EXPLAINS_OVERFITTING:
        yield RuledOut("overfitting", f"validation ends at {figures(val[-1])}, its lowest was {figures(min(val))}")
    yield from _ruled_out_by_experiment(run)


def _ruled_out_layers(run: TrainingRunFacts, named: set[str]) -> Iterable[RuledOut]:
    yield from _ruled_out_units(run.end_units, named)
    gradients = [layer.first_gradient for layer in run.layers if layer.first_gradient > 0]
    if len(gradients) > 2 and "vanishing-gradients" not in named:
        share = percent(min(gradients) / max(gradients))
        yield RuledOut("vanishing gradients", f"the weakest layer gets {share} of the strongest's")


def _ruled_out_by_experiment(run: TrainingRunFacts) -> Iterable[RuledOut]:
    """What an experiment has shown not to help; of several of one kind the best."""
    for start, (cause, _) in CURES.items():
        kind = [(name, e) for name, e in run.experiments.items() if name.startswith(start)]
        if not kind or any(signs.helps(e) for _, e in kind) or not any(math.isfinite(e.end_changed) for _, e in kind):
            continue
        name, experiment = min(kind, key=lambda pair: pair[1].end_changed)
        step = (run.spike or {}).get("step")
        how = in_words(name, "its batch" if step is None else f"the batch of step {step}")
        ends = figures(experiment.end_changed), figures(experiment.end_as_is)
        yield RuledOut(cause, f"tried: {how}, the loss ends at {ends[0]}; as it is, at {ends[1]}")
