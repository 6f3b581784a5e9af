"""The rule over asserts on a card that no copy on the host explains: what can have failed, and how to find the line."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_cuda import AssertFacts, Use
from nbdebug.finding import Finding, Fix


@rule(
    code="error/device-assert",
    title="A kernel on the card failed earlier than the line that shows it.",
    symptom="CUDA error: device-side assert triggered; an illegal memory access was encountered; CUBLAS_STATUS_… in a "
    "line that is right. Every further use of the card fails as well.",
    cause="Kernels run while the program goes on, so the error shows at a later line. On a card an index out of range "
    "(a token in an embedding, a class number in a loss, a gather) is an assert; so are probabilities outside "
    "of 0…1 in BCELoss and a broken distribution in multinomial. After it nothing on the card can be read.",
    confirm="Restart the kernel and run with CUDA_LAUNCH_BLOCKING=1, or run the same step on the CPU: it says the "
    "index.",
    fix="Hold `ids.max()` against the rows of the embedding, and `target.max()` against the number of classes, before "
    "they go to the card.",
    reference="https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
)
def device_assert(facts: AssertFacts) -> Finding | None:
    kind = {
        "assert": "An assert failed on the card",
        "library": "A library of the card's failed",
        "memory access": "A kernel read or wrote memory that is not its own",
    }[facts.kind]
    late = "" if facts.blocking else ", at this line or before it: kernels run while the program goes on"
    title = kind + late + _candidates(facts)
    rows = [
        {
            "op": use.what,
            "kind": "rows" if use.kind == "embedding" else "classes",
            "valid": f"0 to {use.size - 1}",
            "index": use.argument or "not known",
            "line": use.where.line,
            "its copy on the host": "in range" if use.checked else "not at hand",
        }
        for use in facts.uses[:12]
    ]
    evidence = {
        "what can have failed": rows,
        "CUDA_LAUNCH_BLOCKING": "1" if facts.blocking else "not set",
        "message": facts.raised.message.partition("\n")[0][:200],
    }
    return Finding("error/device-assert", title, facts.raised.where, evidence, _fixes(facts))


def _suspects(facts: AssertFacts) -> list[Use]:
    """Those whose index was not held against a copy on the host."""
    return [use for use in facts.uses if not use.checked]


def _candidates(facts: AssertFacts) -> str:
    told = [f"`{use.what}` ({use.size} {'rows' if use.kind == 'embedding' else 'classes'})" for use in _suspects(facts)]
    return f". What can fail so here: {', '.join(told[:3])}" if told and facts.kind != "memory access" else ""


def _fixes(facts: AssertFacts) -> tuple[Fix, ...]:
    restart = Fix(
        "Restart the kernel and have each kernel waited for: the error then shows at its line. Or run one "
        "step on the CPU.",
        'import os\nos.environ["CUDA_LAUNCH_BLOCKING"] = "1"   # before torch is imported',
    )
    checks = "\n".join(
        f"assert 0 <= {use.argument}.min() and {use.argument}.max() < {use.size}   # {use.what}"
        for use in _suspects(facts)[:4]
        if use.argument.replace(".", "").replace("_", "").isalnum()
    )
    check = (Fix("Check what is looked up, right before the line.", checks),) if checks else ()
    return (restart, *check)
