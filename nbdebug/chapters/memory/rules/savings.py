"""What would have made it fit: remedies with the bytes that each saves, computed from what was held when it failed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from nbdebug.chapters.memory.facts_failure import Failure
from nbdebug.finding import Fix
from nbdebug.sizes import size

WORTH = 1 << 20
"""Bytes below which a remedy is not worth naming."""
OTHERS = 0.1
"""The share of a card in the hands of other processes from which on they are named."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """saves: bytes; cost: of it, in words."""

    title: str
    code: str
    saves: int
    cost: str = ""


def best(failure: Failure, most: int = 3) -> tuple[Fix, ...]:
    """The remedies, those that would have been enough first; within these in the order of what they cost."""
    found = [r for r in _all(failure) if r.saves >= WORTH]
    short = failure.short
    if short is not None:
        found.sort(key=lambda r: r.saves < short)
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
        for r in found[:most]
    )


def earlier(facts: Failure) -> bool:
    """Whether it was the memory of an earlier failure that was missing. Its traceback is kept until the next error."""
    return facts.gone >= max(facts.short or WORTH, WORTH)


def _all(failure: Failure) -> Iterator[Remedy]:
    if earlier(failure):
        yield Remedy(
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


def _idle(failure: Failure) -> Iterator[Remedy]:
    """What the notebook keeps and nothing needs."""
    kept = [k for k in failure.kept if k.bytes >= WORTH]
    if not kept:
        return
    names = ", ".join(f"`{k.name}`" for k in kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
    words = " ".join(dict.fromkeys(k.release for k in kept[:6]))
    code = f"%free {words}"
    if any(k.how == "loss" for k in kept):
        code += "\nlosses.append(loss.item())  # from then on: the number, without its graph"
    yield Remedy(f"Let go of what is kept and not needed: {names}.", code, sum(k.bytes for k in kept))


def _no_grad(failure: Failure) -> Iterator[Remedy]:
    graph = sum(h.bytes for h in failure.held if h.kind == "graph")
    if failure.work.training is False and failure.work.grad and failure.where.phase == "forward":
        yield Remedy(
            "The model is in eval mode: tell autograd that no gradient is wanted.",
            "with torch.no_grad():\n    out = model(x)",
            graph,
        )


def _card(failure: Failure) -> Iterator[Remedy]:
    asked = failure.asked
    if asked.unused and asked.unused >= (asked.bytes or WORTH):
        yield Remedy(
            "Let torch's allocator join its free pieces; set it before the first use of the card.",
            'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
            asked.unused,
        )
    if asked.total and asked.free is not None and asked.process:
        others = asked.total - asked.free - asked.process
        if others > OTHERS * asked.total:
            yield Remedy(
                "Other processes hold a part of this card: another notebook whose kernel still runs, perhaps.",
                "!nvidia-smi",
                others,
            )


def _optimizer(failure: Failure) -> Iterator[Remedy]:
    work = failure.work
    name = work.optimizer or "AdamW"
    if work.parameters:
        yield Remedy(
            "Update one parameter after the other, not all at once: no copies of all of them for a moment.",
            f"optimizer = torch.optim.{name}(model.parameters(), lr=…, foreach=False)",
            work.parameters,
            "a slower optimizer step",
        )
    if name.startswith(("Adam", "NAdam", "RAdam")) and name != "Adafactor":
        yield Remedy(
            "Keep rows and columns of the second moment in place of all of it, and no first moment.",
            "optimizer = torch.optim.Adafactor(model.parameters(), lr=…)",
            2 * work.parameters,
            "it trains somewhat differently: tune its rate",
        )


def _attention(failure: Failure) -> Iterator[Remedy]:
    """A table of all pairs of moments, where a fused kernel would never hold it."""
    ran = f"{failure.where.module} {failure.where.module_type} {failure.where.text}".lower()
    if failure.asked_as.startswith("all pairs of rows") and ("att" in ran or "softmax" in ran):
        yield Remedy(
            "Let one function do the attention: it never holds the table of all pairs.",
            "torch.nn.functional.scaled_dot_product_attention(q, k, v)",
            failure.alike + (failure.asked.bytes or 0),
            "usually faster",
        )


def _smaller_batch(failure: Failure) -> Iterator[Remedy]:
    work, asked = failure.work, failure.asked.bytes or 0
    if not work.batch or work.batch < 2 or failure.where.phase == "optimizer":
        return
    whole, forward = work.batched + asked, (work.batched + asked) / (work.through or 1.0)
    parts = 2
    if failure.free is not None:  # into what there is must go the whole forward, smaller, with the blocks to come
        room = work.batched + failure.free + failure.gone
        while parts < work.batch and forward / parts > room:
            parts *= 2
    parts = min(parts, work.batch)
    rows = math.ceil(work.batch / parts)
    yield Remedy(
        f"Batches of {rows:,} row{'s' * (rows > 1)} in place of {work.batch:,}; {parts:,} of them before each "
        "optimizer step give the same gradient.",
        f"for i, batch in enumerate(loader):  # batch_size={rows}\n    (loss_of(batch) / {parts}).backward()\n"
        f"    if (i + 1) % {parts} == 0:\n        optimizer.step()\n        optimizer.zero_grad()",
        int(whole * (1 - 1 / parts)),
        "batch norm sees smaller batches",
    )


def _cheaper_activations(failure: Failure) -> Iterator[Remedy]:
    work, asked = failure.work, failure.asked.bytes or 0
    if failure.where.phase == "optimizer" or not work.activations:
        return
    kind = failure.asked.device.partition(":")[0]
    if work.activations32 * 2 > work.activations and work.batch:
        yield Remedy(
            "Compute in bfloat16; the weights stay in float32.",
            f'with torch.autocast("{kind}", dtype=torch.bfloat16):\n    loss = …',
            (work.activations32 + asked) // 2,
            "less precise activations; usually faster",
        )
    if work.blocks and work.grad and work.training:
        name, count = work.blocks
        yield Remedy(
            f"Keep only what enters each of the {count} blocks of `{name or 'the model'}`; the backward "
            "computes the rest again.",
            f"for block in {f'self.{name}' if name else 'self'}:\n"
            "    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            int(work.activations * (1 - 1 / count)),
            "about a third more time; up to so much is saved",
        )


def _pieces(failure: Failure) -> Iterator[Remedy]:
    """For one large result outside of a batch: never all of it at once."""
    asked = failure.asked.bytes
    if not asked or failure.where.phase != "forward":
        return
    room = max(failure.free or asked // 2, 1)
    parts = max(2, math.ceil(2 * asked / room))
    if parts <= 1 << 16:
        yield Remedy(
            f"Make it in {parts:,} pieces, and keep of each only what you need of it.",
            "for rows in x.split(n):\n    best.append(score(rows, y).argmin(1))  # never all of it at once",
            asked - math.ceil(asked / parts),
        )
    else:
        yield Remedy(
            "Ask for less: no machine holds this. Work on rows at a time, or on the pairs that matter.",
            "for rows in x.split(n):\n    best.append(score(rows, y).argmin(1))  # never all of it at once",
            asked,
        )
    if failure.asked_as:
        yield Remedy("Make it in half precision.", "x = x.bfloat16()", asked // 2)


def _variables(failure: Failure) -> Iterator[Remedy]:
    """The largest of the user's variables that is no part of the step."""
    own = [h for h in failure.held if h.kind == "variable" and not h.where.line]
    for holding in own[:2]:
        yield Remedy(
            f"`{holding.name}` holds {size(holding.bytes)}. If it is not needed any more:",
            f"del {holding.name}",
            holding.bytes,
        )
