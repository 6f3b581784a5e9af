"""The rule for a step that a guard stopped, and of which nobody knows yet where it went wrong."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.nan.facts import CompiledFacts, LostStep, NanFacts
from nbdebug.finding import Finding, Fix, Where


@rule(
    code="nan/not-located",
    title="A step was not finite, and it is not known where.",
    symptom="The guard stopped a step and names no op. Weights and optimizer state are as before it: nothing is lost, "
    "and training can go on.",
    cause="The guard runs the step again to find the place. Run again, some steps are finite: a number came from "
    "outside (the clock, `os.urandom`, a random generator of your own), the batch was changed in place after it "
    "was used, an op is not deterministic, or the hardware failed. Some can't be run again: the loss is "
    "compiled, or the model is called where nbdebug does not see it. With `on_trip='raise'` nobody has looked "
    "yet.",
    confirm="`name, args, kwargs = error.trip.inputs[0]` is what the model was given (not a copy). Compute the loss of "
    "that batch ten times: if it changes, the step does not repeat. If all ten are finite and the same, think "
    "of the batch as it was then, and of the machine.",
    fix="Not looked for yet: `error.trip.locate()` does it. Else look while it runs: `%%nan_trace` above the loop, or "
    "`%nan_trace step()` on that batch. To make steps repeat: seed every generator, "
    "`torch.use_deterministic_algorithms(True)`, `.clone()` a batch before you write into it. To live with a "
    "rare one: `guard(..., on_trip='skip')` leaves it out and counts.",
    reference="https://docs.pytorch.org/docs/stable/notes/randomness.html",
)
def not_located(facts: NanFacts | CompiledFacts | LostStep) -> Finding | None:
    if not isinstance(facts, LostStep):
        return None
    evidence = {
        f"{what} before": [x for x in values if x is not None]
        for what, values in (("losses", facts.losses), ("gradient norms", facts.norms))
    }
    asked = Fix(
        "Look for its cause: the step is still at hand.",
        facts.look,
        None,
        {"why not": "it takes the time of a few steps"},
    )
    watched = Fix(
        "Watch it while it runs, from the start or from your last checkpoint.",
        "nbdebug.nan_trace(step, model=model, max_steps=1000)",
        None,
        {"why not": "it needs the run from its start"},
    )
    skipped = Fix(
        "If it is only now and then a step: leave it out, and count.",
        'nbdebug.guard(model, optimizer, on_trip="skip")',
        None,
        {"why not": "whether it may be left out is yours to decide"},
    )
    return Finding(
        "nan/not-located",
        f"{facts.sentence}; {facts.reason}",
        Where(step=facts.step),
        {key: values for key, values in evidence.items() if values},
        (asked,) if facts.look else (watched, skipped),
    )
