"""From what was seen before training to its report: findings, what was ruled out by which number, what is worth
knowing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Plot, Report, RuledOut
from nbdebug.tools.training.facts import Attempt, Experiment, Parameter, StaticFacts, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs, slug
from nbdebug.tools.training.rules.signs import ROSE
from nbdebug.tools.training.rules.wording import listed, short, short_number

POINTS = 100
"""Points of a curve that go into a report."""
CURVES_OF = "loss of one batch, learnt by heart"


def attempted(findings: Sequence[Finding], before: StaticFacts | None) -> list[Finding]:
    """The findings, each with the first of its fixes that no run has tried told as it was tried on one batch."""
    tried = {} if before is None else before.attempts
    return [_with(finding, tried[slug(finding)]) if slug(finding) in tried else finding for finding in findings]


def _with(finding: Finding, attempt: Attempt) -> Finding:
    first, *others = finding.fixes or (None,)
    if first is None or first.verified is not None:
        return finding
    return dataclasses.replace(finding, fixes=(_told(first, attempt), *others))


def _told(fix: Fix, attempt: Attempt) -> Fix:
    if not attempt.as_is and not attempt.fixed:
        return dataclasses.replace(fix, after={"why not": attempt.why})
    steps = len(attempt.as_is) - 1, len(attempt.fixed) - 1
    after: dict[str, Any] = {
        "undecided": attempt.why or None,
        "one batch": attempt.how,
        "loss as it is": _end(attempt.as_is),
        "loss with the fix": _end(attempt.fixed),
        "steps": max(steps),
        "steps with the fix": steps[1] if 0 < steps[1] < steps[0] else None,
        "optimizer": attempt.optimizer,
    }
    return dataclasses.replace(fix, verified=attempt.verified, after={k: v for k, v in after.items() if v is not None})


def _end(losses: Sequence[float]) -> float | str:
    if not losses:
        return "none: it raises"
    return losses[-1] if math.isfinite(losses[-1]) else "not finite"


def plots(findings: Sequence[Finding], before: StaticFacts) -> tuple[Plot, ...]:
    """Curves of the first finding whose fix was tried; nothing where none was."""
    found = next((a for f in findings if (a := before.attempts.get(slug(f))) is not None and a.fixed), None)
    if found is None:
        return ()
    pairs = {"as it is": points(found.as_is), "with the fix": points(found.fixed)}
    curves = {name: curve for name, curve in pairs.items() if curve}
    return (Plot("losses", {"curves": curves, "curves of": CURVES_OF}),)


def points(losses: Sequence[float], end: float = 0.0) -> list[list[Any]]:
    """A curve for a report: [step, loss] of at most a hundred steps and of the extremes, None for a loss that is not
    finite. end: the loss afterwards; where it is not finite and all of these are, one more step is."""
    values = [*losses, *[math.nan] * (not math.isfinite(end) and all(map(math.isfinite, losses)))]
    finite = [i for i, v in enumerate(values) if math.isfinite(v)]
    broke = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
    kept = {*range(0, len(values), max(1, -(-len(values) // POINTS))), *range(len(values))[-1:]}
    kept |= {max(finite, key=values.__getitem__), min(finite, key=values.__getitem__)} if finite else set()
    kept |= set() if broke is None else {broke}
    return [[i, float(f"{values[i]:.6g}") if math.isfinite(values[i]) else None] for i in sorted(kept)]


CLASHES = 0.01
"""Share of training rows that have a twin with another label, from which it is worth a word."""
SURPRISED = 1.5
"""Loss at the start over that of guessing, above which it is worth a word."""


def report_of(before: StaticFacts, findings: list[Finding], subject: str) -> Report:
    """The report of `preflight`."""
    named = {slug(f) for f in findings}
    ledger = [dataclasses.asdict(p) for p in before.parameters]
    facts = {"parameters": ledger, "loss": before.loss, "seconds": before.seconds}
    return Report(
        "preflight(model, loader, loss_fn)",
        tuple(attempted(findings, before)),
        tuple(ruled_out(before, named)),
        before.unchecked,
        tuple(_notes(before, named)),
        subject,
        facts,
        plots=plots(findings, before),
    )


def ruled_out(before: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    """What was looked for and is not there, with the number that says so."""
    yield from _of_parameters(before, named)
    yield from _of_losses(before, named)
    yield from _of_data(before, named)
    yield from _of_signals(before, named)


def _of_parameters(before: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    trained, reached = before.trained, [p for p in before.trained if p.reached]
    if before.has_optimizer and "parameters-not-in-optimizer" not in named:
        held = sum(bool(p.held) for p in reached)
        yield RuledOut("parameters that no optimizer holds", f"{held} of {len(reached)} that get a gradient are held")
    if trained and "detached-graph" not in named:
        yield RuledOut(
            "a cut graph",
            f"{len(reached)} of {len(trained)} trained parameters are reached from the loss; "
            "nothing cuts off the others",
        )


def _of_losses(before: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    for call in before.losses[:1]:
        if not named & {"double-softmax", "missing-log-softmax", "wrong-output-activation"}:
            made = f"made by `{call.activation}`" if call.activation else "of unknown origin"
            yield RuledOut(
                "output and loss that do not fit",
                f"`{call.op}` is given values from {short(call.low)} to {short(call.high)}, {made}",
            )
        if "wrong-loss-shape" not in named:
            yield RuledOut("shapes that are broadcast", f"{list(call.shape)} against {list(call.target_shape)}")
    if before.mixing_checked and before.mixing is None:
        yield RuledOut("samples that mix", "replacing one sample changes the outputs of 0 others")
    if before.ignores_input is False:
        yield RuledOut("an input that is ignored", "the loss changes when inputs are dealt to other samples")


def _of_data(before: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    if before.entries and "input-not-normalized" not in named:
        largest = max(before.entries, key=lambda e: e.rms)
        yield RuledOut(
            "inputs of the wrong scale", f"the largest feature has a root mean square of {short(largest.rms)}"
        )
    if before.shift is not None and "preprocessing-mismatch" not in named:
        yield RuledOut(
            "another preparation of validation",
            f"means differ by {short(before.shift.shift)} training "
            f"deviations, deviations by a factor of {short(before.shift.ratio)}",
        )
    if before.overlap is not None and before.overlap.seen and "leakage" not in named:
        yield RuledOut("validation samples in the training set", f"{before.overlap.shared} of {before.overlap.seen:,}")
    seen = before.labels
    if seen is not None and len(seen.counts) > 1:
        if "unshuffled-data" not in named:
            yield RuledOut(
                "sorted labels", f"{seen.runs:,} stretches of one label (shuffled: about {seen.expected:,.0f})"
            )
        if "class-imbalance" not in named:
            yield RuledOut(
                "one class only", f"the commonest is {max(seen.counts.values()) / seen.total:.0%} of {seen.total:,}"
            )
    if before.workers is not None and "same-seed-workers" not in named:
        yield RuledOut(
            "workers that draw alike",
            "draws differ between workers and passes"
            if before.workers.random
            else "the same item comes out the same each time: nothing is drawn",
        )


def _of_signals(before: StaticFacts, named: set[str]) -> Iterable[RuledOut]:
    dead = [u.dead for u in before.units if u.dead is not None]
    if dead and "dead-relu" not in named:
        yield RuledOut("dead units", f"at most {max(dead):.0%} of a layer's units are zero for every sample")
    flat = [u.saturated for u in before.units if u.saturated is not None and u.hidden]
    if flat and "saturated-activation" not in named:
        yield RuledOut("saturated units", f"at most {max(flat):.0%} of a layer's values are on the flat ends")
    trained = [w.std / w.scheme for w in before.weights if w.trained]
    if trained and "bad-init" not in named:
        yield RuledOut("weights of the wrong size", f"{short(min(trained))} to {short(max(trained))} of He's scheme")


def _notes(before: StaticFacts, named: set[str]) -> Iterable[str]:
    if before.heart is not None:
        yield f"{before.heart.verdict}. {before.heart.next_step}"
    yield from _of_start(before, named)
    if before.parameters:
        yield ledger(before)
    trained = sum(p.elements for p in before.trained)
    if before.samples and trained:
        meaning = (
            ": enough to learn all of them by heart, so watch the validation loss" if trained > before.samples else ""
        )
        yield (
            f"{trained:,} trained numbers for {before.samples:,} samples: {short(trained / before.samples)} for "
            f"each{meaning}."
        )
    if before.accumulates == "sum":
        yield (
            "The loss is a sum over the batch: its gradient, and with it the step, grows with the batch size. "
            "When you accumulate micro-batches, do not divide it; to be free of the batch size take the mean."
        )
    elif before.accumulates == "mean":
        yield "The loss is a mean over the batch: when you accumulate k micro-batches, divide each loss by k."
    elif before.accumulates == "neither":
        yield (
            "Two half batches do not add up to the whole one: samples count differently (weights, masks, pairs), "
            "so that accumulated micro-batches are not the same as one large batch."
        )
    if before.overlap is not None and before.overlap.unlikely and before.overlap.clashing >= CLASHES:
        yield (
            f"{before.overlap.clashing:.1%} of the training rows stand there twice with different labels: at "
            "least half of "
            "these labels are wrong."
        )
    if before.eval_mode:
        yield "The model is in eval mode now; your loop has to call model.train() first."
    yield from before.notes


def _of_start(before: StaticFacts, named: set[str]) -> Iterable[str]:
    guess = next((call.guess for call in before.losses if call.guess), None)
    if before.loss is not None and guess:
        compared = ", far above it: look at the scale of inputs and weights" if before.loss > SURPRISED * guess else ""
        yield f"The loss starts at {short(before.loss)}; guessing gives {short(guess)}{compared}."
    if not before.finite:
        yield "The first loss is not finite: %nan_trace names the op that makes it so."
    elif before.bad_gradients:
        yield (
            f"The gradients of {listed(before.bad_gradients)} are not finite, though the loss is: %nan_trace "
            "names the op that makes them so."
        )
    if before.ignores_input and "zero-loss" not in named:
        yield (
            "The loss is the same when inputs are dealt to other samples: at the start the output does not hang "
            "on the input (a last layer that starts at zero does that, and is no fault)."
        )


def ledger(before: StaticFacts) -> str:
    """The ledger in a sentence; the whole of it stands in `report.facts["parameters"]`."""

    def count(lines: Iterable[Parameter]) -> str:
        lines = list(lines)
        return f"{len(lines):,} ({listed((p.name for p in lines), 2)})" if lines else ""

    trained = before.trained
    kinds = {
        "frozen": [p for p in before.parameters if not p.trained],
        "not used by the forward": [p for p in trained if not p.used],
        "without a gradient": [p for p in trained if p.used and not p.reached],
        "with a gradient of exactly zero": [p for p in trained if p.reached and p.gradient == 0.0],
        "with a learning rate of zero": [p for p in trained if p.held and p.rate == 0.0],
    }
    told = [f"{count(lines)} {kind}" for kind, lines in kinds.items() if lines]
    return (
        f"Parameters: {len(trained):,} of {len(before.parameters):,} are trained"
        + (f"; {'; '.join(told)}" if told else "")
        + "."
    )


TRIALS = {
    "zero-grad-missing": ("zero_grad",),
    "gradients-cleared-before-step": ("zero_grad",),
    "clip-before-unscale": ("unscaled first",),
    "eval-mode-in-training": ("train mode",),
    "loss-spike": ("without the batch",),
    "unshuffled-data": ("shuffled",),
    "label-noise": ("without doubtful labels",),
    "plateau": ("level rate",),
    "scheduler-order": ("level rate",),
    "frozen-parameters": ("unfrozen",),
    "dead-relu": ("rescaled", "normalised"),
    "saturated-activation": ("rescaled", "normalised"),
    "vanishing-gradients": ("relu",),
    "exploding-gradients": ("clip",),
    "lr-too-high": ("lr/",),
    "lr-too-low": ("lr*",),
    "over-regularized": ("no penalty", "no weight decay", "less dropout"),
}
"""By the beginnings of their names, which trials show a cause's fix."""


CURES = {
    "zero_grad": ("gradients that pile up", "with gradients cleared"),
    "unscaled first": ("gradients that are clipped too early", "unscaled before they are clipped"),
    "train mode": ("layers in eval mode", "with all of them in train mode"),
    "without the batch": ("one bad batch", "without {batch}"),
    "shuffled": ("the order of the samples", "shuffled"),
    "level rate": ("a learning rate that falls too early", "with one rate all along"),
    "unfrozen": ("frozen parameters", "with all of them trained"),
    "without doubtful labels": ("wrong labels", "without the samples whose label the model doubts"),
    "rescaled": ("the size of the initial weights", "with each layer's output brought to size one"),
    "normalised": ("the size of the activations", "with each layer's output normalised"),
    "relu": ("squashing activations", "with relus in their place"),
    "clip": ("single large gradients", "with their norm clipped at 1"),
    "lr/": ("a learning rate that is too high", "divided by {factor}"),
    "lr*": ("a learning rate that is too low", "multiplied by {factor}"),
    "no penalty": ("a penalty on the weights", "without it"),
    "no weight decay": ("weight decay", "without it"),
    "less dropout": ("dropout", "with 0.1 at most"),
}
"""By the beginnings of their names, what a trial would cure and how it was tried, as a person would say it."""
UNREPEATED = "the run could not be repeated with this change"
"""What a rule says of a fix without a trial; the report knows more."""

HEARTS = frozenset({"overfit", "model-too-large-for-data", "train-mode-in-eval", "preprocessing-mismatch"})
"""Causes beside which nothing is said of overfitting."""


def run_report(facts: TrainingFacts, findings: list[Finding], question: str, subject: str) -> Report:
    """The report on one run."""
    run = facts.run
    assert run is not None, "diagnose has watched it"
    named = {slug(f) for f in findings}
    findings = [_with_reasons(f, run) for f in attempted(findings, facts.before)]
    notes = [_course(run)]
    if run.losses and signs.blew_up(run):
        notes.append("The loss became NaN or inf on the way: %nan_trace (or nbdebug.guard) names the op that did it.")
    before = facts.before
    unchecked = (*(before.unchecked if before is not None else ()), *run.unchecked)
    seen_before = ruled_out(before, named) if before is not None and before.loss is not None else ()
    out = (*seen_before, *_ruled_out(run, named))
    return Report(
        question,
        tuple(findings),
        tuple({r.what: r for r in out}.values()),
        tuple(dict.fromkeys(unchecked)),
        tuple(notes),
        subject,
        steps=len(run.losses),
        plots=(Plot("losses", _curves(run, findings)),),
    )


def _course(run: TrainingRunFacts) -> str:
    if not run.losses:
        return "The loop never called its callback: no loss was seen."
    val = [c.val for c in run.checkups if c.val is not None]
    said = (
        f"{len(run.losses):,} steps in {run.seconds:.1f} s; on fixed training batches the loss went from "
        f"{short_number(signs.first(run))} to {short_number(signs.last(run))}"
    )
    return said + (f", on validation batches from {short_number(val[0])} to {short_number(val[-1])}." if val else ".")


def _with_reasons(finding: Finding, run: TrainingRunFacts) -> Finding:
    """Where no experiment was possible, each fix says why."""
    why = next((line.partition(": ")[2] for line in run.unchecked if line.startswith("Experiments: ")), "")
    if not why:
        return finding
    fixes = (
        dataclasses.replace(fix, after={"why not": why})
        if fix.verified is None and fix.after.get("why not", UNREPEATED) == UNREPEATED
        else fix
        for fix in finding.fixes
    )
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _curves(run: TrainingRunFacts, findings: list[Finding]) -> dict[str, Any]:
    """Curves: the run as it is and, where a fix was tried, with it."""
    curves: dict[str, Any] = {"as it is": points(run.losses)}
    trial = next((t for f in findings[:1] if (t := _trial_of(run, slug(f))) is not None), None)
    if trial is not None and trial.changed:
        curves = {
            "as it is": points(trial.as_is or run.losses, trial.end_as_is),
            "with the fix": points(trial.changed, trial.end_changed),
        }
    return {
        "curves": curves,
        "checkups": [{"step": c.step, "training": c.train, "validation": c.val} for c in run.checkups],
    }


def _trial_of(run: TrainingRunFacts, code: str) -> Experiment | None:
    found = [t for name, t in run.trials.items() if name.startswith(TRIALS.get(code, ("nothing",)))]
    return min(found, key=lambda t: t.end_changed) if found else None


def _ruled_out(run: TrainingRunFacts, named: set[str]) -> Iterable[RuledOut]:
    """What was looked for and is not there, with the number that says so."""
    if run.stale.steps > 1 and "zero-grad-missing" not in named:
        yield RuledOut(
            "gradients that are never cleared", f"{run.stale.share:.0%} of {run.stale.steps} steps found old ones"
        )
    if run.scaler is not None and "clip-before-unscale" not in named:
        yield RuledOut("clipping before unscaling", f"{run.scaler.clipped} of {run.scaler.steps} steps did so")
    trained = [m for m in run.modes if m.trained]
    if trained and "eval-mode-in-training" not in named:
        yield RuledOut(
            "training in eval mode",
            f"`{trained[0].module}` ran in train mode in {trained[0].trained} "
            f"steps, in eval mode in {trained[0].evaluated}",
        )
    if run.order.batches >= 4 and "unshuffled-data" not in named:
        yield RuledOut(
            "unshuffled data",
            f"batch means differ {run.order.spread:.2g} times as much as by a shuffle (over 3 would count)",
        )
    updates = [la.update for la in run.layers if math.isfinite(la.update)]
    usual = bool(updates) and signs.SMALL_UPDATE < max(updates) < signs.LARGE_UPDATE
    if usual and not named & {"lr-too-low", "lr-too-high"}:
        yield RuledOut(
            "a learning rate that is far off", f"updates are {min(updates):.0e} to {max(updates):.0e} of the weights"
        )
    yield from _ruled_out_layers(run, named)
    val = [c.val for c in run.checkups if c.val is not None]
    if val and not signs.blew_up(run) and val[-1] <= ROSE * min(val) and not named & HEARTS:
        yield RuledOut(
            "overfitting",
            f"validation ends at {short_number(val[-1])}, its lowest was {short_number(min(val))}",
        )
    yield from _ruled_out_by_trial(run)


def _ruled_out_by_trial(run: TrainingRunFacts) -> Iterable[RuledOut]:
    """What an experiment has shown not to help; of several of one kind the best."""
    for start, (cause, how) in CURES.items():
        kind = [(name, t) for name, t in run.trials.items() if name.startswith(start)]
        if not kind or any(signs.helps(t) for _, t in kind) or not any(math.isfinite(t.end_changed) for _, t in kind):
            continue
        name, trial = min(kind, key=lambda item: item[1].end_changed)
        step = (run.spike or {}).get("step")
        how = how.format(factor=name[3:], batch="its batch" if step is None else f"the batch of step {step}")
        yield RuledOut(
            cause,
            f"tried: {how} the loss ends at {short_number(trial.end_changed)}, as it is at "
            f"{short_number(trial.end_as_is)}",
        )


def _ruled_out_layers(run: TrainingRunFacts, named: set[str]) -> Iterable[RuledOut]:
    dead = [u.dead for u in run.end_units if u.dead is not None]
    if dead and "dead-relu" not in named:
        yield RuledOut("dead units", f"at most {max(dead):.0%} of a layer's units are zero for every sample")
    flat = [u.saturated for u in run.end_units if u.saturated is not None and u.hidden]
    if flat and "saturated-activation" not in named:
        yield RuledOut("saturated activations", f"at most {max(flat):.0%} of a layer's values are on the flat ends")
    layers = [la for la in run.layers if la.first > 0]
    if len(layers) > 2 and "vanishing-gradients" not in named:
        weakest, strongest = min(la.first for la in layers), max(la.first for la in layers)
        yield RuledOut(
            "vanishing gradients", f"the weakest layer's gradient is {weakest / strongest:.1e} of the strongest's"
        )
