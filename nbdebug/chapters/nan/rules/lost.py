"""The rule for a step that a guard stopped, and whose replay shows no place."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.nan.facts import CompiledFacts, LostStep, NanFacts
from nbdebug.finding import Finding, Where


@rule(
    code="nan/not-located",
    title="A step was not finite, and running it again did not show where.",
    symptom="The guard stopped a step, and its report names no op. Weights and optimizer state are as before it.",
    cause="Either the step does not repeat (its inputs were changed in place since, an op is not deterministic, a "
          "random number came from elsewhere, or the hardware failed), or it could not be run again: a loss in "
          "compiled code, a model that was called out of sight.",
    confirm="Run the batch once more: `error.trip.inputs` holds what the model was given. If it is finite now and you "
            "changed nothing, compare `loss` over ten runs; on one machine of many, suspect that machine.",
    fix="Look at the step while it runs: `%nan_trace step()` on the same batch, or `%%nan_trace` on the loop. Compiled "
        "loss code can be called in eager. Where only now and then a step fails, `guard(..., on_trip='skip')` "
        "drops it and counts.",
    reference="https://docs.pytorch.org/docs/stable/notes/randomness.html",
)
def not_located(facts: NanFacts | CompiledFacts | LostStep) -> Finding | None:
    if not isinstance(facts, LostStep):
        return None
    evidence = {"why no place": facts.reason, "losses before": list(facts.losses),
                "gradient norms before": list(facts.norms)}
    return Finding("nan/not-located", f"{facts.sentence}; {facts.reason}", Where(step=facts.step), evidence)
