"""Memory ran out: whether it grew until it did, or one step was too large at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, listed, size
from nbdebug.tools.memory.facts import Failure

WORTH = 1 << 20
"""Bytes below which a remedy is not worth naming."""
OTHERS = 0.1
"""The share of a card in the hands of other processes from which on they are named."""


@dataclasses.dataclass(frozen=True)
class MemoryRemedy:
    """saves: bytes; cost: of it, in words."""

    title: str
    code: str
    saves: int
    cost: str = ""


def best(failure: Failure, most: int = 3) -> tuple[Fix, ...]:
    """The remedies, those that would have been enough first; within these in the order of what they cost."""
    remedies = [r for r in _all(failure) if r.saves >= WORTH]
    short = failure.short
    if short is not None:
        remedies.sort(key=lambda r: r.saves < short)
    return tuple(
        Fix(
            r.title,
            r.code,
            None,
            {
                "saves": size(r.saves),
                "enough for this allocation": None if short is None else r.saves >= short,
                "note": r.cost or None,
            },
        )
        for r in remedies[:most]
    )


def earlier(facts: Failure) -> bool:
    """Whether it was the memory of an earlier failure that was missing. Its traceback is kept until the next error."""
    return facts.gone >= max(facts.short or WORTH, WORTH)


def _all(failure: Failure) -> Iterator[MemoryRemedy]:
    if earlier(failure):
        yield MemoryRemedy(
            "Run the cell again: that memory is free now. After a failed cell, before the next try:",
            "%free traceback",
            failure.gone,
        )
    yield from _idle(failure)
    yield from _no_grad(failure)
    yield from _card(failure)
    if failure.where.phase == "optimizer":
        yield from _optimizer(failure)
    yield from _attention(failure)
    yield from _smaller_batch(failure)
    yield from _cheaper_activations(failure)
    if failure.work.batch is None or (failure.short or 0) > failure.work.batched and not earlier(failure):
        yield from _pieces(failure)
    yield from _variables(failure)


def _idle(failure: Failure) -> Iterator[MemoryRemedy]:
    """What the notebook keeps and nothing needs."""
    leftovers = [k for k in failure.kept if k.bytes >= WORTH]
    if not leftovers:
        return
    names = listed(k.name for k in leftovers)
    words = " ".join(dict.fromkeys(k.release for k in leftovers[:6]))
    code = f"%free {words}"
    if any(k.how == "loss" for k in leftovers):
        code += "\nlosses.append(loss.item())  # from then on: the number, without its graph"
    yield MemoryRemedy(f"Free what is kept but not needed: {names}.", code, sum(k.bytes for k in leftovers))


def _no_grad(failure: Failure) -> Iterator[MemoryRemedy]:
    graph = sum(h.bytes for h in failure.held if h.kind == "graph")
    if failure.work.training is False and failure.work.grad and failure.where.phase == "forward":
        yield MemoryRemedy(
            "The model is in eval mode: turn autograd off.",
            "with torch.no_grad():\n    out = model(x)",
            graph,
        )


def _card(failure: Failure) -> Iterator[MemoryRemedy]:
    request = failure.asked
    if request.unused and request.unused >= (request.bytes or WORTH):
        yield MemoryRemedy(
            "Let torch's allocator join its free pieces; set this before the first use of the GPU.",
            'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
            request.unused,
        )
    if request.total and request.free is not None and request.process:
        others = request.total - request.free - request.process
        if others > OTHERS * request.total:
            yield MemoryRemedy(
                "Other processes hold a part of this GPU, such as a notebook whose kernel still runs.",
                "!nvidia-smi",
                others,
            )


def _optimizer(failure: Failure) -> Iterator[MemoryRemedy]:
    work = failure.work
    name = work.optimizer or "AdamW"
    if work.parameters:
        yield MemoryRemedy(
            "Update one parameter at a time: no temporary copies of all of them at once.",
            f"optimizer = torch.optim.{name}(model.parameters(), lr=…, foreach=False)",
            work.parameters,
            "a slower optimizer step",
        )
    if name.startswith(("Adam", "NAdam", "RAdam")) and name != "Adafactor":
        yield MemoryRemedy(
            "Use Adafactor: it keeps rows and columns of the second moment instead of all of it, and no first moment.",
            "optimizer = torch.optim.Adafactor(model.parameters(), lr=…)",
            2 * work.parameters,
            "it trains somewhat differently: tune its learning rate",
        )


def _attention(failure: Failure) -> Iterator[MemoryRemedy]:
    """A table of all pairs of moments, where a fused kernel would never hold it."""
    ran = f"{failure.where.module} {failure.where.module_type} {failure.where.text}".lower()
    if failure.asked_as.startswith("all pairs of rows") and ("att" in ran or "softmax" in ran):
        yield MemoryRemedy(
            "Use fused attention: it never stores the table of all pairs.",
            "torch.nn.functional.scaled_dot_product_attention(q, k, v)",
            failure.alike + (failure.asked.bytes or 0),
            "usually faster",
        )


def _smaller_batch(failure: Failure) -> Iterator[MemoryRemedy]:
    work, requested = failure.work, failure.asked.bytes or 0
    if not work.batch or work.batch < 2 or failure.where.phase == "optimizer":
        return
    whole, forward = work.batched + requested, (work.batched + requested) / (work.through or 1.0)
    parts = 2
    if failure.free is not None:  # into what there is must go the whole forward, smaller, with the blocks to come
        room = work.batched + failure.free + failure.gone
        while parts < work.batch and forward / parts > room:
            parts *= 2
    parts = min(parts, work.batch)
    rows = math.ceil(work.batch / parts)
    yield MemoryRemedy(
        f"Batches of {count(rows, 'row')} instead of {work.batch:,}; {parts:,} of them before each "
        "optimizer step give the same gradient.",
        f"for i, batch in enumerate(loader):  # batch_size={rows}\n    (loss_of(batch) / {parts}).backward()\n"
        f"    if (i + 1) % {parts} == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
        int(whole * (1 - 1 / parts)),
        "batch norm sees smaller batches",
    )


def _cheaper_activations(failure: Failure) -> Iterator[MemoryRemedy]:
    work, requested = failure.work, failure.asked.bytes or 0
    if failure.where.phase == "optimizer" or not work.activations:
        return
    kind = failure.asked.device.partition(":")[0]
    if work.activations32 * 2 > work.activations and work.batch:
        yield MemoryRemedy(
            "Compute in bfloat16; the weights stay in float32.",
            f'with torch.autocast("{kind}", dtype=torch.bfloat16):\n    loss = …',
            (work.activations32 + requested) // 2,
            "less precise activations; usually faster",
        )
    if work.blocks and work.grad and work.training:
        name, count = work.blocks
        yield MemoryRemedy(
            f"Keep only what enters each of the {count} blocks of `{name or 'the model'}`; the backward "
            "computes the rest again.",
            f"for block in {f'self.{name}' if name else 'self'}:\n"
            "    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            int(work.activations * (1 - 1 / count)),
            "about a third more time; up to so much is saved",
        )


def _pieces(failure: Failure) -> Iterator[MemoryRemedy]:
    """For one large result outside of a batch: never all of it at once."""
    requested = failure.asked.bytes
    if not requested or failure.where.phase != "forward":
        return
    room = max(failure.free or requested // 2, 1)
    parts = max(2, math.ceil(2 * requested / room))
    if parts <= 1 << 16:
        yield MemoryRemedy(
            f"Compute it in {parts:,} pieces, and keep only what you need of each.",
            "for rows in x.split(n):\n    best.append(score(rows, y).argmin(1))  # never all of it at once",
            requested - math.ceil(requested / parts),
        )
    else:
        yield MemoryRemedy(
            "Request less: no machine holds this. Work on a few rows at a time, or only on the pairs that matter.",
            "for rows in x.split(n):\n    best.append(score(rows, y).argmin(1))  # never all of it at once",
            requested,
        )
    if failure.asked_as:
        yield MemoryRemedy("Compute it in half precision.", "x = x.bfloat16()", requested // 2)


def _variables(failure: Failure) -> Iterator[MemoryRemedy]:
    """The largest of the user's variables that is no part of the step."""
    own = [h for h in failure.held if h.kind == "variable" and not h.where.line]
    for holding in own[:2]:
        yield MemoryRemedy(
            f"`{holding.name}` holds {size(holding.bytes)}. If it is not needed any more:",
            f"del {holding.name}",
            holding.bytes,
        )


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
    fix="Free what is kept (`%free`), then a smaller batch with gradient accumulation, bfloat16 "
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
    requested = size(facts.asked.bytes) if facts.asked.bytes else "More"
    which = f" ({facts.asked_as})" if facts.asked_as else ""
    free = "" if facts.free is None else f" and {size(facts.free)} were free"
    leftovers, short, unused = sum(k.bytes for k in facts.kept), facts.short or 0, facts.asked.unused or 0
    if _never(facts):
        return f"{requested} were requested at once{which}, and there are only {size(facts.limit or 0)} in total."
    if (slope := growth_per_step(facts.course)) is not None:
        return f"Memory grew by {size(slope)} a step, until {requested} more did not fit{which}."
    if earlier(facts):
        return (
            f"A cell that failed earlier still held {size(facts.gone)}, which are free now; {requested} more did not "
            f"fit{which}."
        )
    if leftovers >= WORTH and (leftovers >= short > 0 or leftovers >= KEPT * max(held, 1)):
        most = facts.kept[0].name
        return (
            f"{size(leftovers)} are kept but not needed, most of it by `{most}`; {requested} more did not fit{which}."
        )
    if unused >= (facts.asked.bytes or unused + 1):
        return (
            f"{size(unused)} are free in torch's cache, but in pieces too small for the {requested} requested{which}."
        )
    if facts.work.steps == 0:
        return f"The first step is too large: {requested} more were requested{which}{free}."
    if facts.work.steps:
        return f"After {count(facts.work.steps, 'step')} that fit, {requested} more were requested{which}{free}."
    return f"{requested} {'were' if facts.asked.bytes else 'was'} requested{which}{free}; {size(held)} were in use."


def _never(facts: Failure) -> bool:
    return bool(facts.limit and facts.asked.bytes and facts.asked.bytes > facts.limit)


def growth_per_step(course: tuple[int, ...]) -> int | None:
    """Bytes a step, where each of the last steps ended with more than the one before it."""
    last = course[-(STEPS + 1) :]
    steps = [b - a for a, b in itertools.pairwise(last)]
    if len(steps) < STEPS or min(steps) <= 0 or last[-1] - last[0] <= GROWTH * course[0]:
        return None
    return sum(steps) // len(steps)


def _growth(facts: Failure) -> str:
    slope, steps = growth_per_step(facts.course), facts.work.steps
    if slope is not None:
        return f"steady: {size(slope)} a step over {count(len(facts.course), 'step')}"
    if facts.course:
        return f"none over {count(len(facts.course), 'earlier step')}"
    if earlier(facts):
        return "none in this cell: an earlier failed cell still held its tensors"
    if _never(facts):
        return "too large at once: more than the device has"
    if steps == 0:
        return "too large at once: it is the first step"
    if steps:
        return f"{count(steps, 'step')} fit before: this batch was larger, or something grows; `%%mem` says which"
    return "not known: the earlier steps were not measured; `%%mem` on the cell does that"


def _evidence(facts: Failure, held: int, growth: str) -> dict[str, Any]:
    request = facts.asked
    sizes = {
        "asked for": request.bytes,
        "free": facts.free,
        "all there is": facts.limit,
        "held, by tensors with a name": held - facts.left or None,
        "held, without a name": facts.left - facts.gone or None,
        "gone since": facts.gone or None,
        "reserved by torch, in no tensor": request.unused,
        "kept without need": sum(k.bytes for k in facts.kept) or None,
    }
    evidence: dict[str, Any] = {"error": facts.error, "device": request.device}
    evidence |= {word: size(count) for word, count in sizes.items() if count is not None}
    if facts.asked_as:
        evidence["asked for, as"] = facts.asked_as
    if facts.work.batch:
        evidence["batch"] = f"{facts.work.batch} rows"
    evidence["growth from step to step"] = growth
    return evidence
