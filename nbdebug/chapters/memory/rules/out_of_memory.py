"""Memory ran out: whether it grew until it did, or one step was too large at once."""

from __future__ import annotations

import itertools
from typing import Any

from nbdebug.catalogue import rule
from nbdebug.chapters.memory.facts_failure import Failure
from nbdebug.chapters.memory.rules.savings import WORTH, best, earlier
from nbdebug.finding import Finding
from nbdebug.sizes import size

STEPS = 3
"""Steps that must have grown, one after the other, for memory to count as growing."""
GROWTH = 0.01
"""The share of what was held at first by which these steps together must have grown: less is an allocator's noise."""
KEPT = 0.25
"""The share of what is held from which on what is kept without need is the cause."""


@rule(
    code="error/out-of-memory",
    title="Memory ran out.",
    symptom="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …; on a CPU: DefaultCPUAllocator: can't "
    "allocate memory; or a bare MemoryError. The kernel lives on, and the next cell fails as well.",
    cause="Either one step is too large at once (batch, sequence or image size, or one result over all pairs), or "
    "something grows from step to step until nothing is left (losses with their graph, outputs in a list, hooks "
    "that record), or the notebook keeps what failed before: the traceback of a failed cell holds its tensors.",
    confirm="`%explain` after the failed cell shows who held what. `%%mem` on the training cell shows whether memory "
    "grows; `%fit` says what would fit, before anything is allocated.",
    fix="Let go of what is kept (`%free`), then a smaller batch with gradient accumulation, bfloat16 "
    "(`torch.autocast`), checkpointed blocks (`torch.utils.checkpoint`), or an optimizer with less state.",
    reference="https://docs.pytorch.org/docs/stable/notes/faq.html",
)
def out_of_memory(facts: Failure) -> Finding | None:
    if not isinstance(facts, Failure):  # asked about a step that did not fail
        return None
    held = sum(h.bytes for h in facts.held) + facts.left
    growth = _growth(facts)
    return Finding("error/out-of-memory", _title(facts, held), facts.where, _evidence(facts, held, growth), best(facts))


def _title(facts: Failure, held: int) -> str:
    asked = size(facts.asked.bytes) if facts.asked.bytes else "More"
    which = f" ({facts.asked_as})" if facts.asked_as else ""
    free = "" if facts.free is None else f" and {size(facts.free)} were free"
    kept, short, unused = sum(k.bytes for k in facts.kept), facts.short or 0, facts.asked.unused or 0
    if _never(facts):
        return f"{asked} were asked for at once{which}: there are {size(facts.limit or 0)} in all."
    if (slope := grown(facts.course)) is not None:
        return f"Memory grew by {size(slope)} a step, until {asked} more did not fit{which}."
    if earlier(facts):
        return (
            f"{size(facts.gone)} of what was in use are free by now: a cell that had failed before still held "
            f"them, and {asked} more did not fit{which}."
        )
    if kept >= WORTH and (kept >= short > 0 or kept >= KEPT * max(held, 1)):
        return f"{size(kept)} are kept without need, most by `{facts.kept[0].name}`; {asked} more did not fit{which}."
    if unused >= (facts.asked.bytes or unused + 1):
        return f"{size(unused)} lie free in torch's memory, in pieces too small for the {asked} asked for{which}."
    if facts.work.steps == 0:
        return f"The first step is too large: {asked} more were asked for{which}{free}."
    if facts.work.steps:
        return f"After {_counted(facts.work.steps)} that fit, {asked} more were asked for{which}{free}."
    return f"{asked} {'were' if facts.asked.bytes else 'was'} asked for{which}{free}; {size(held)} were held."


def _counted(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _never(facts: Failure) -> bool:
    return bool(facts.limit and facts.asked.bytes and facts.asked.bytes > facts.limit)


def grown(course: tuple[int, ...]) -> int | None:
    """Bytes a step, where each of the last steps ended with more than the one before it."""
    last = course[-(STEPS + 1) :]
    steps = [b - a for a, b in itertools.pairwise(last)]
    if len(steps) < STEPS or min(steps) <= 0 or last[-1] - last[0] <= GROWTH * course[0]:
        return None
    return sum(steps) // len(steps)


def _growth(facts: Failure) -> str:
    slope, steps = grown(facts.course), facts.work.steps
    if slope is not None:
        return f"steady: {size(slope)} a step over {len(facts.course)} steps"
    if facts.course:
        return f"none over the {len(facts.course)} steps before"
    if earlier(facts):
        return "none of this cell's own: an earlier failed cell had left its tensors behind"
    if _never(facts):
        return "too large at once: it would not fit into an empty machine"
    if steps == 0:
        return "too large at once: it is the first step"
    if steps:
        return f"{_counted(steps)} fit before: a larger batch came, or something grows. %%mem on the cell tells which"
    return "not known: nothing counted the steps before. %%mem on the cell tells"


def _evidence(facts: Failure, held: int, growth: str) -> dict[str, Any]:
    asked = facts.asked
    sizes = {
        "asked for": asked.bytes,
        "free": facts.free,
        "all there is": facts.limit,
        "held, by tensors with a name": held - facts.left or None,
        "held, without a name": facts.left - facts.gone or None,
        "gone since": facts.gone or None,
        "reserved by torch, in no tensor": asked.unused,
        "kept without need": sum(k.bytes for k in facts.kept) or None,
    }
    evidence: dict[str, Any] = {"error": facts.error, "device": asked.device}
    evidence |= {word: size(count) for word, count in sizes.items() if count is not None}
    if facts.asked_as:
        evidence["asked for, as"] = facts.asked_as
    if facts.work.batch:
        evidence["batch"] = f"{facts.work.batch} rows"
    evidence["growth from step to step"] = growth
    return evidence
