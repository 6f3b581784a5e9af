"""What would make a step smaller: each remedy predicted again with it applied, with its cost in time and its code.

checkpoint      of the repeated blocks only what they are given is kept; the rest is computed again
accumulate      the batch in k parts, one step of the optimizer behind them
autocast        bfloat16 where it does no harm
optimizer       one kernel instead of lists of temporaries; state in 8 bits; none at all
freeze          the last block alone is trained
shorter         half of the sequence, or of the image's side
shard           parameters, gradients and state spread over N ranks (FSDP): computed from the sizes
cache           outputs of a frozen encoder computed once: computed from the sizes
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.memory.fitting import blocks
from nbdebug.chapters.memory.fitting.asking import rows_of
from nbdebug.chapters.memory.fitting.job import Job, Prediction, resized
from nbdebug.chapters.memory.fitting.predict import predict
from nbdebug.chapters.memory.fitting.sizes import dimensions, fits, with_rows, with_size, within

Ask = Callable[[Job], Prediction]
WORTH = 0.03
"""Share of what a step needs that a remedy has to save to be named."""
RANKS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """name: short; title: what to do, in a sentence; needs, saves: bytes; fits: within the limit (None: no limit is
    known); time: what it costs, in words; slower: the same as a factor of a step's time, roughly; alters: it changes
    what is learned; code: what to write; how: "predicted" again with it applied, or "computed" from the sizes."""

    name: str
    title: str
    needs: int
    saves: int
    fits: bool | None
    time: str
    slower: float
    alters: bool
    code: str
    how: str = "predicted"


@dataclasses.dataclass(frozen=True)
class Offer:
    """A remedy that is still to be predicted. make: gives its Prediction."""

    name: str
    title: str
    time: str
    slower: float
    alters: bool
    code: str
    make: Callable[[], Prediction]
    how: str = "predicted"
    change: Callable[[nn.Module], None] | None = None


def remedies(
    job: Job,
    here: Prediction,
    limit: int | None,
    model: nn.Module,
    until: float,
    tick: Callable[[str], None],
    ask: Ask = predict,
) -> tuple[list[Remedy], list[str]]:
    """All that save something, the best first, and the names of those that were not reached in time (or failed).

    until: by `time.monotonic()`, when to stop; model: without data or real, it is only looked at; ask: what predicts a
    job."""
    from nbdebug.chapters.memory.fitting.together import together  # it builds on what stands here

    found: list[Remedy] = []
    left: list[str] = []
    offered: list[Offer] = []
    asked = Asked(job, here, limit, ask)
    now = within(job, here, limit)[1]
    for offer in offers(asked, model):
        tick(offer.name)
        offered.append(offer)
        if offer.how == "predicted" and time.monotonic() > until:
            left.append(offer.name)
            continue
        try:
            made = offer.make()
        except Exception:  # a remedy that this training can't take
            left.append(f"{offer.name} (this training does not take it)")
            continue
        good, needs = within(job, made, limit)
        if now - needs >= WORTH * now:
            found.append(
                Remedy(
                    offer.name,
                    offer.title,
                    needs,
                    now - needs,
                    good,
                    offer.time,
                    offer.slower,
                    offer.alters,
                    offer.code,
                    offer.how,
                )
            )
    both = together(asked, found, offered, tick)
    ranked = sorted(_best(found), key=functools.partial(_rank, any(r.fits for r in found)))
    return ([] if both is None else [both]) + ranked, left


def _best(found: list[Remedy]) -> list[Remedy]:
    """Of those that differ in a number alone (k×, N ranks) the smallest that fits, or the one that needs least."""
    kept: dict[str, Remedy] = {}
    for remedy in found:
        family = remedy.name.split()[0] if remedy.name.startswith(("accumulate", "shard")) else remedy.name
        other = kept.get(family)
        if other is None or not other.fits and (remedy.fits or remedy.needs < 0.97 * other.needs):
            kept[family] = remedy
    return list(kept.values())


def _rank(any_fits: bool, remedy: Remedy) -> tuple:
    """What makes it fit first; of those what changes least, costs least, saves most. Where nothing does, what saves
    most."""
    if not any_fits:
        return remedy.alters, remedy.name.startswith("shard"), remedy.needs
    return remedy.fits is False, remedy.alters, remedy.name.startswith("shard"), round(remedy.slower, 1), remedy.needs


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the remedies are for: a job, what it needs, the limit; ask: what predicts a job."""

    job: Job
    here: Prediction
    limit: int | None
    ask: Ask

    def again(self, **changed: Any) -> Callable[[], Prediction]:
        """The job predicted with something changed."""
        return lambda: self.ask(dataclasses.replace(self.job, **changed))

    def sized(self, sizes: list[int]) -> Callable[[], Prediction]:
        """The same sequence of allocations with other sizes."""
        return lambda: resized(self.here, sizes, self.job.cuda)


def offers(asked: Asked, model: nn.Module) -> Iterator[Offer]:
    """The remedies that this training could take, cheap and harmless ones first."""
    row = next(iter(blocks.rows(model)), None)
    if row is not None:
        yield from _checkpoints(asked, row)
    yield from _halves(asked)
    yield from _accumulated(asked)
    yield from _optimizers(asked)
    if row is not None and asked.here.trained > 1:
        yield _frozen(asked, row)
    yield from _shorter(asked)
    yield from _sharded(asked, row)
    yield from _cached(asked, model)


def _optimizers(asked: Asked) -> Iterator[Offer]:
    job, trace = asked.job, asked.here.trace
    state = [n for n, b in enumerate(trace.blocks) if b.category == "optimizer state"]
    if job.optimizer is None:
        return
    if asked.here.place[1] == "optimizer" and job.cuda and not _fused(job):
        yield Offer(
            "fused optimizer",
            "Let the optimizer step in one kernel, without lists of temporaries.",
            "none; it is faster",
            0.95,
            False,
            "optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True)",
            asked.again(groups={"foreach": False, "fused": True}),
        )
    if state:
        sizes = [b.size for b in trace.blocks]
        for number in state:  # one byte for each number, and a float32 for each 256 of them
            wide = sizes[number] > 16384
            sizes[number] = round(sizes[number] * (0.25 + 1 / 256)) if wide else sizes[number]
        yield Offer(
            "8-bit state",
            "Keep the optimizer's state in 8 bits.",
            "about the same",
            1.0,
            False,
            "import bitsandbytes as bnb\noptimizer = bnb.optim.AdamW8bit(model.parameters(), lr=...)",
            asked.sized(sizes),
            "computed",
        )
        yield Offer(
            "SGD",
            "Use an optimizer without state.",
            "none",
            0.95,
            True,
            "optimizer = torch.optim.SGD(model.parameters(), lr=...)",
            asked.again(optimizer=functools.partial(torch.optim.SGD, lr=1e-3), groups=None),
        )


def _fused(job: Job) -> bool:
    given = job.optimizer
    groups = given.param_groups if isinstance(given, torch.optim.Optimizer) else [getattr(given, "keywords", {})]
    kind = given if isinstance(given, type) else getattr(given, "func", type(given))
    return any(group.get("fused") for group in groups) or kind not in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
    )


def _halves(asked: Asked) -> Iterator[Offer]:
    if asked.job.half is None:
        device = "cuda" if asked.job.cuda else "cpu"
        yield Offer(
            "bf16 autocast",
            "Compute the loss under autocast in bfloat16.",
            "none; faster where the hardware has bfloat16",
            0.7,
            False,
            f'with torch.autocast("{device}", torch.bfloat16):\n    loss = loss_fn(model, batch)',
            asked.again(half=torch.bfloat16),
        )


def _checkpoints(asked: Asked, row: blocks.Row) -> Iterator[Offer]:
    where = f"`{row.holder}`" if row.holder else "the model"
    count = len(row.paths)
    yield Offer(
        "checkpoint all",
        f"Checkpoint the {count} blocks ({row.kind}) in {where}.",
        "about a third more: each block's forward is computed twice",
        1.33,
        False,
        blocks.checkpoints(row),
        asked.again(change=blocks.checkpointing(row)),
        change=blocks.checkpointing(row),
    )
    if count > 3:
        yield Offer(
            "checkpoint half",
            f"Checkpoint {-(-count // 2)} of the {count} blocks in {where}.",
            "about a sixth more",
            1.17,
            False,
            blocks.checkpoints(row, 2),
            asked.again(change=blocks.checkpointing(row, 2)),
        )


def _accumulated(asked: Asked) -> Iterator[Offer]:
    now, job = rows_of(asked.job.batch), asked.job
    parts = 2
    while now is not None and now % parts == 0 and parts <= 64:
        made: list[Prediction] = []

        def make(parts: int = parts, made: list[Prediction] = made) -> Prediction:
            made.append(asked.ask(dataclasses.replace(with_rows(job, now // parts), accumulate=parts)))
            return made[0]

        yield Offer(
            f"accumulate {parts}×",
            f"Give the batch in {parts} parts of {now // parts} and step once behind them.",
            "a few percent more, if a part still fills the card",
            1.05,
            False,
            f"for part in parts:  # {parts} parts of {now // parts} rows each\n"
            f"    (loss_fn(model, part) / {parts}).backward()\noptimizer.step()\noptimizer.zero_grad()",
            make,
        )
        if asked.limit is None or not made or fits(job, made[0], asked.limit):
            return
        parts *= 2


def _frozen(asked: Asked, row: blocks.Row) -> Offer:
    last = row.paths[-1]
    return Offer(
        "last block only",
        f"Freeze what comes before `{last}`.",
        "about half: the backward ends there",
        0.5,
        True,
        "for name, parameter in model.named_parameters():\n"
        f'    if name.startswith("{last}."):\n        break\n    parameter.requires_grad_(False)',
        asked.again(change=blocks.freezing(row)),
    )


def _shorter(asked: Asked) -> Iterator[Offer]:
    for what, now in dimensions(asked.job.batch):
        noun = "sequences" if what == "length" else "images"
        yield Offer(
            f"half the {what}",
            f"Use {noun} of {now // 2} instead of {now}.",
            "less than half",
            0.5,
            True,
            f"batch = batch[:, :{now // 2}]"
            if what == "length"
            else f'images = torch.nn.functional.interpolate(images, size={now // 2}, mode="bilinear")',
            functools.partial(asked.ask, with_size(asked.job, now, now // 2)),
        )


def _sharded(asked: Asked, row: blocks.Row | None) -> Iterator[Offer]:
    """Each rank keeps its part; the blocks at work, and the one fetched ahead, are whole."""
    spread = ("parameters", "gradients", "optimizer state")
    trace = asked.here.trace
    weights = [b for b in trace.blocks if b.category == "parameters"]
    own = [
        sum(b.size for b in weights if f"{b.module}.".startswith(f"{path}."))
        for path in (row.paths if row is not None else ())
    ]
    whole = 2 * max(own, default=0) or asked.here.parameters
    for ranks in RANKS:
        sizes = [-(-b.size // ranks) if b.category in spread else b.size for b in trace.blocks]
        largest = max(
            (n for n, b in enumerate(trace.blocks) if b.category == "parameters"),
            default=None,
            key=lambda n: trace.blocks[n].size,
        )
        if largest is None:
            return
        sizes[largest] += whole
        each = row.each() if row is not None else "model.children()"
        yield Offer(
            f"shard over {ranks}",
            f"Spread parameters, gradients and state over {ranks} ranks (FSDP).",
            "parameters are sent twice in each step",
            1.15,
            False,
            "from torch.distributed.fsdp import fully_shard\n"
            f"for block in {each}:\n    fully_shard(block)\n"
            f"fully_shard(model)  # torchrun --nproc-per-node={ranks}",
            asked.sized(sizes),
            "computed",
        )


def _cached(asked: Asked, model: nn.Module) -> Iterator[Offer]:
    for path, size in blocks.frozen(model)[:1]:
        if size < WORTH * asked.here.needs:
            return
        inside = [f"{b.module}.".startswith(f"{path}.") for b in asked.here.trace.blocks]
        sizes = [
            0 if within and b.category in ("parameters", "buffers", "temporaries") else b.size
            for b, within in zip(asked.here.trace.blocks, inside)
        ]
        yield Offer(
            "cache encoder",
            f"Compute the outputs of `{path}`, of which nothing is trained, once.",
            "less: it is not computed again in every epoch",
            0.8,
            False,
            f"with torch.no_grad():\n    cached = [model.{path}(inputs).cpu() for inputs, _ in loader]",
            asked.sized(sizes),
            "computed",
        )
