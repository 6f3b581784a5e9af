"""From the facts of a run to its report: findings, what was ruled out by which number, curves, what was not checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from nbdebug.chapters.training.attempted import attempted, points
from nbdebug.chapters.training.before_account import ruled_out
from nbdebug.chapters.training.facts import TrainingFacts
from nbdebug.chapters.training.facts_run import RunFacts, Trial
from nbdebug.chapters.training.rules import run_signs as signs
from nbdebug.chapters.training.rules import slug
from nbdebug.chapters.training.rules.run_signs_data import ROSE
from nbdebug.chapters.training.rules.run_words import short
from nbdebug.finding import Finding, Report, RuledOut

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


def report_of(facts: TrainingFacts, findings: list[Finding], question: str, subject: str) -> Report:
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
        _drawn(run, findings),
    )


def _course(run: RunFacts) -> str:
    if not run.losses:
        return "The loop never called its callback: no loss was seen."
    val = [c.val for c in run.checkups if c.val is not None]
    said = (
        f"{len(run.losses):,} steps in {run.seconds:.1f} s; on fixed training batches the loss went from "
        f"{short(signs.first(run))} to {short(signs.last(run))}"
    )
    return said + (f", on validation batches from {short(val[0])} to {short(val[-1])}." if val else ".")


def _with_reasons(finding: Finding, run: RunFacts) -> Finding:
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


def _drawn(run: RunFacts, findings: list[Finding]) -> dict[str, Any]:
    """Curves: the run as it is and, where a fix was tried, with it."""
    curves: dict[str, Any] = {"as it is": points(run.losses)}
    trial = next((t for f in findings[:1] if (t := _trial_of(run, slug(f))) is not None), None)
    if trial is not None and trial.changed:
        curves = {
            "as it is": points(trial.as_is or run.losses, trial.end_as_is),
            "with the fix": points(trial.changed, trial.end_changed),
        }
    return {
        "steps": len(run.losses),
        "curves": curves,
        "checkups": [{"step": c.step, "training": c.train, "validation": c.val} for c in run.checkups],
    }


def _trial_of(run: RunFacts, code: str) -> Trial | None:
    found = [t for name, t in run.trials.items() if name.startswith(TRIALS.get(code, ("nothing",)))]
    return min(found, key=lambda t: t.end_changed) if found else None


def _ruled_out(run: RunFacts, named: set[str]) -> Iterable[RuledOut]:
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
        yield RuledOut("overfitting", f"validation ends at {short(val[-1])}, its lowest was {short(min(val))}")
    yield from _ruled_out_by_trial(run)


def _ruled_out_by_trial(run: RunFacts) -> Iterable[RuledOut]:
    """What an experiment has shown not to help; of several of one kind the best."""
    for start, (cause, how) in CURES.items():
        kind = [(name, t) for name, t in run.trials.items() if name.startswith(start)]
        if not kind or any(signs.helps(t) for _, t in kind) or not any(math.isfinite(t.end_changed) for _, t in kind):
            continue
        name, trial = min(kind, key=lambda item: item[1].end_changed)
        step = (run.spike or {}).get("step")
        how = how.format(factor=name[3:], batch="its batch" if step is None else f"the batch of step {step}")
        yield RuledOut(
            cause, f"tried: {how} the loss ends at {short(trial.end_changed)}, as it is at {short(trial.end_as_is)}"
        )


def _ruled_out_layers(run: RunFacts, named: set[str]) -> Iterable[RuledOut]:
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
