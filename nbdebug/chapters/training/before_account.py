"""From what was seen before training to its report: findings, what was ruled out by which number, what is worth
knowing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nbdebug.chapters.training.attempted import attempted, drawn
from nbdebug.chapters.training.facts_before import Before, Parameter
from nbdebug.chapters.training.rules import slug
from nbdebug.chapters.training.rules.before_words import listed, short
from nbdebug.finding import Finding, Report, RuledOut

CLASHES = 0.01
"""Share of training rows that have a twin with another label, from which it is worth a word."""
SURPRISED = 1.5
"""Loss at the start over that of guessing, above which it is worth a word."""


def report_of(before: Before, findings: list[Finding], subject: str) -> Report:
    """The report of `preflight`."""
    named = {slug(f) for f in findings}
    ledger = [dataclasses.asdict(p) for p in before.parameters]
    facts = {"parameters": ledger, "loss": before.loss, "seconds": before.seconds, **drawn(findings, before)}
    return Report(
        "preflight(model, loader, loss_fn)",
        tuple(attempted(findings, before)),
        tuple(ruled_out(before, named)),
        before.unchecked,
        tuple(_notes(before, named)),
        subject,
        facts,
    )


def ruled_out(before: Before, named: set[str]) -> Iterable[RuledOut]:
    """What was looked for and is not there, with the number that says so."""
    yield from _of_parameters(before, named)
    yield from _of_losses(before, named)
    yield from _of_data(before, named)
    yield from _of_signals(before, named)


def _of_parameters(before: Before, named: set[str]) -> Iterable[RuledOut]:
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


def _of_losses(before: Before, named: set[str]) -> Iterable[RuledOut]:
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


def _of_data(before: Before, named: set[str]) -> Iterable[RuledOut]:
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


def _of_signals(before: Before, named: set[str]) -> Iterable[RuledOut]:
    dead = [u.dead for u in before.units if u.dead is not None]
    if dead and "dead-relu" not in named:
        yield RuledOut("dead units", f"at most {max(dead):.0%} of a layer's units are zero for every sample")
    flat = [u.saturated for u in before.units if u.saturated is not None and u.hidden]
    if flat and "saturated-activation" not in named:
        yield RuledOut("saturated units", f"at most {max(flat):.0%} of a layer's values are on the flat ends")
    trained = [w.std / w.scheme for w in before.weights if w.trained]
    if trained and "bad-init" not in named:
        yield RuledOut("weights of the wrong size", f"{short(min(trained))} to {short(max(trained))} of He's scheme")


def _notes(before: Before, named: set[str]) -> Iterable[str]:
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


def _of_start(before: Before, named: set[str]) -> Iterable[str]:
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


def ledger(before: Before) -> str:
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
