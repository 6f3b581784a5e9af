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
from torch.utils.checkpoint import checkpoint

from nbdebug.text import listed
from nbdebug.tools.memory.predict.job import FitRequest, Prediction, resized, rows_of
from nbdebug.tools.memory.predict.predict import dimensions, fits, predict, with_rows, with_size, within

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class BlockRow:
    """Blocks of one class that follow each other. kind: their class; paths: dotted names, in order; holder: of what
    holds them all ("" for the model itself), None where several do."""

    kind: str
    paths: tuple[str, ...]
    holder: str | None

    def each(self, every: int = 1) -> str:
        """The blocks as the user would write them."""
        if self.holder is None:
            each = f'[m for m in model.modules() if type(m).__name__ == "{self.kind}"]'
        elif self.holder and all(path.rpartition(".")[2].isdigit() for path in self.paths):
            each = f"model.{self.holder}"
        else:
            each = f"[{', '.join(f'model.{path}' for path in self.paths)}]"
        return f"{each}[::{every}]" if every > 1 else each


def rows(model: nn.Module) -> list[BlockRow]:
    """Repeated blocks with parameters, those that hold most of them first; none inside of another's block, and no
    container around blocks."""
    groups: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                groups.setdefault(type(child).__name__, []).append(f"{path}.{name}" if path else name)
    sized = [
        (sum(p.numel() for path in paths for p in model.get_submodule(path).parameters()), kind, paths)
        for kind, paths in groups.items()
        if len(paths) > 1
    ]
    inner = {
        path for _, _, paths in sized for path in paths if not isinstance(model.get_submodule(paths[0]), CONTAINERS)
    }
    result: list[BlockRow] = []
    for _, kind, paths in sorted(sized, key=lambda row: -row[0]):
        container = isinstance(model.get_submodule(paths[0]), CONTAINERS)
        if container and any(_within(other, paths) for other in inner):
            continue
        if not any(_within(paths[0], row.paths) for row in result):
            holders = {path.rpartition(".")[0] for path in paths}
            result.append(BlockRow(kind, tuple(paths), holders.pop() if len(holders) == 1 else None))
    return result


def _within(path: str, others: list[str] | tuple[str, ...]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def checkpointing(row: BlockRow, every: int = 1) -> Callable[[nn.Module], None]:
    """A change that keeps of each block (or every second, third … one) what it is given alone, and computes it again in
    the backward."""

    def change(model: nn.Module) -> None:
        for path in row.paths[::every]:
            block = model.get_submodule(path)
            block.forward = functools.partial(_again, block.forward)

    return change


def _again(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpoints(row: BlockRow, every: int = 1) -> str:
    """The same as the user would write it."""
    return (
        "import functools\nfrom torch.utils.checkpoint import checkpoint\n"
        f"for block in {row.each(every)}:\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    )


def freezing(row: BlockRow) -> Callable[[nn.Module], None]:
    """A change that trains the last block and what comes behind it alone."""

    def change(model: nn.Module) -> None:
        for parameter in before_last(model, row):
            parameter.requires_grad_(False)

    return change


def before_last(model: nn.Module, row: BlockRow) -> list[nn.Parameter]:
    """The parameters that are declared before the last block."""
    last = f"{row.paths[-1]}."
    named = list(model.named_parameters())
    first = next((n for n, (name, _) in enumerate(named) if name.startswith(last)), 0)
    return [parameter for _, parameter in named[:first]]


def frozen(model: nn.Module) -> list[tuple[str, int]]:
    """Outermost modules of which nothing is trained, and the bytes of their parameters and buffers; the largest first.
    Not the model itself."""
    memory: dict[str, int] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        inside = any(f"{path}.".startswith(f"{other}.") for other in memory)
        if path and parameters and not inside and not any(p.requires_grad for p in parameters):
            memory[path] = sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers()))
    return sorted(memory.items(), key=lambda pair: -pair[1])


Ask = Callable[[FitRequest], Prediction]
WORTH = 0.03
"""Share of what a step needs that a remedy has to save to be named."""
RANKS = (2, 4, 8)
SPREAD = ("parameters", "gradients", "optimizer state")


@dataclasses.dataclass(frozen=True)
class PredictedRemedy:
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
    job: FitRequest,
    here: Prediction,
    limit: int | None,
    model: nn.Module,
    until: float,
    tick: Callable[[str], None],
    ask: Ask = predict,
) -> tuple[list[PredictedRemedy], list[str]]:
    """All that save something, the best first, and the names of those that were not reached in time (or failed).

    until: by `time.monotonic()`, when to stop; model: without data or real, it is only read; ask: what predicts a
    job."""
    results: list[PredictedRemedy] = []
    left: list[str] = []
    offered: list[Offer] = []
    request = RemedyRequest(job, here, limit, ask)
    now = within(job, here, limit)[1]
    for offer in offers(request, model):
        tick(offer.name)
        offered.append(offer)
        if offer.how == "predicted" and time.monotonic() > until:
            left.append(offer.name)
            continue
        try:
            prediction = offer.make()
        except Exception:  # a remedy that this training can't take
            left.append(f"{offer.name} (this training does not take it)")
            continue
        good, needs = within(job, prediction, limit)
        if now - needs >= WORTH * now:
            results.append(
                PredictedRemedy(
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
    both = together(request, results, offered, tick)
    ranked = sorted(_best(results), key=functools.partial(_rank, any(r.fits for r in results)))
    return ([] if both is None else [both]) + ranked, left


def _best(candidates: list[PredictedRemedy]) -> list[PredictedRemedy]:
    """Of those that differ in a number alone (k×, N ranks) the smallest that fits, or the one that needs least."""
    best: dict[str, PredictedRemedy] = {}
    for remedy in candidates:
        family = remedy.name.split()[0] if remedy.name.startswith(("accumulate", "shard")) else remedy.name
        other = best.get(family)
        if other is None or not other.fits and (remedy.fits or remedy.needs < 0.97 * other.needs):
            best[family] = remedy
    return list(best.values())


def _rank(any_fits: bool, remedy: PredictedRemedy) -> tuple:
    """What makes it fit first; of those what changes least, costs least, saves most. Where nothing does, what saves
    most."""
    if not any_fits:
        return remedy.alters, remedy.name.startswith("shard"), remedy.needs
    return remedy.fits is False, remedy.alters, remedy.name.startswith("shard"), round(remedy.slower, 1), remedy.needs


@dataclasses.dataclass(frozen=True)
class RemedyRequest:
    """What the remedies are for: a job, what it needs, the limit; ask: what predicts a job."""

    job: FitRequest
    here: Prediction
    limit: int | None
    ask: Ask

    def again(self, **changed: Any) -> Callable[[], Prediction]:
        """The job predicted with something changed."""
        return lambda: self.ask(dataclasses.replace(self.job, **changed))

    def sized(self, sizes: list[int]) -> Callable[[], Prediction]:
        """The same sequence of allocations with other sizes."""
        return lambda: resized(self.here, sizes, self.job.cuda)


def offers(request: RemedyRequest, model: nn.Module) -> Iterator[Offer]:
    """The remedies that this training could take, cheap and harmless ones first."""
    row = next(iter(rows(model)), None)
    if row is not None:
        yield from _checkpoints(request, row)
    yield from _halves(request)
    yield from _accumulated(request)
    yield from _optimizers(request)
    if row is not None and request.here.trained > 1:
        yield _frozen(request, row)
    yield from _shorter(request)
    yield from _sharded(request, row)
    yield from _cached(request, model)


def _optimizers(request: RemedyRequest) -> Iterator[Offer]:
    job, trace = request.job, request.here.trace
    state = [n for n, b in enumerate(trace.blocks) if b.category == "optimizer state"]
    if job.optimizer is None:
        return
    if request.here.place[1] == "optimizer" and job.cuda and not _fused(job):
        yield Offer(
            "fused optimizer",
            "Let the optimizer step in one kernel, without lists of temporaries.",
            "none; it is faster",
            0.95,
            False,
            "optimizer = torch.optim.AdamW(model.parameters(), ..., fused=True)",
            request.again(groups={"foreach": False, "fused": True}),
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
            request.sized(sizes),
            "computed",
        )
        yield Offer(
            "SGD",
            "Use an optimizer without state.",
            "none",
            0.95,
            True,
            "optimizer = torch.optim.SGD(model.parameters(), lr=...)",
            request.again(optimizer=functools.partial(torch.optim.SGD, lr=1e-3), groups=None),
        )


def _fused(job: FitRequest) -> bool:
    optimizer = job.optimizer
    groups = (
        optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [getattr(optimizer, "keywords", {})]
    )
    kind = optimizer if isinstance(optimizer, type) else getattr(optimizer, "func", type(optimizer))
    return any(group.get("fused") for group in groups) or kind not in (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
    )


def _halves(request: RemedyRequest) -> Iterator[Offer]:
    if request.job.half is None:
        device = "cuda" if request.job.cuda else "cpu"
        yield Offer(
            "bf16 autocast",
            "Compute the loss under autocast in bfloat16.",
            "none; faster where the hardware has bfloat16",
            0.7,
            False,
            f'with torch.autocast("{device}", torch.bfloat16):\n    loss = loss_fn(model, batch)',
            request.again(half=torch.bfloat16),
        )


def _checkpoints(request: RemedyRequest, row: BlockRow) -> Iterator[Offer]:
    where = f"`{row.holder}`" if row.holder else "the model"
    count = len(row.paths)
    yield Offer(
        "checkpoint all",
        f"Checkpoint the {count} blocks ({row.kind}) in {where}.",
        "about a third more: each block's forward is computed twice",
        1.33,
        False,
        checkpoints(row),
        request.again(change=checkpointing(row)),
        change=checkpointing(row),
    )
    if count > 3:
        yield Offer(
            "checkpoint half",
            f"Checkpoint {-(-count // 2)} of the {count} blocks in {where}.",
            "about a sixth more",
            1.17,
            False,
            checkpoints(row, 2),
            request.again(change=checkpointing(row, 2)),
        )


def _accumulated(request: RemedyRequest) -> Iterator[Offer]:
    now, job = rows_of(request.job.batch), request.job
    parts = 2
    while now is not None and now % parts == 0 and parts <= 64:
        cache: list[Prediction] = []

        def make(parts: int = parts, cache: list[Prediction] = cache) -> Prediction:
            cache.append(request.ask(dataclasses.replace(with_rows(job, now // parts), accumulate=parts)))
            return cache[0]

        yield Offer(
            f"accumulate {parts}×",
            f"Split the batch into {parts} parts of {now // parts}, and step once after them.",
            "a few percent more, if a part still fills the GPU",
            1.05,
            False,
            f"for part in parts:  # {parts} parts of {now // parts} rows each\n"
            f"    (loss_fn(model, part) / {parts}).backward()\noptimizer.step()\noptimizer.zero_grad()",
            make,
        )
        if request.limit is None or not cache or fits(job, cache[0], request.limit):
            return
        parts *= 2


def _frozen(request: RemedyRequest, row: BlockRow) -> Offer:
    last = row.paths[-1]
    return Offer(
        "last block only",
        f"Freeze everything before `{last}`.",
        "about half: the backward ends there",
        0.5,
        True,
        "for name, parameter in model.named_parameters():\n"
        f'    if name.startswith("{last}."):\n        break\n    parameter.requires_grad_(False)',
        request.again(change=freezing(row)),
    )


def _shorter(request: RemedyRequest) -> Iterator[Offer]:
    for what, now in dimensions(request.job.batch):
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
            functools.partial(request.ask, with_size(request.job, now, now // 2)),
        )


def _sharded(request: RemedyRequest, row: BlockRow | None) -> Iterator[Offer]:
    """Each rank keeps its part; the blocks at work, and the one fetched ahead, are whole."""
    trace = request.here.trace
    weights = [b for b in trace.blocks if b.category == "parameters"]
    own = [
        sum(b.size for b in weights if f"{b.module}.".startswith(f"{path}."))
        for path in (row.paths if row is not None else ())
    ]
    whole = 2 * max(own, default=0) or request.here.parameters
    for ranks in RANKS:
        sizes = [-(-b.size // ranks) if b.category in SPREAD else b.size for b in trace.blocks]
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
            request.sized(sizes),
            "computed",
        )


def _cached(request: RemedyRequest, model: nn.Module) -> Iterator[Offer]:
    for path, size in frozen(model)[:1]:
        if size < WORTH * request.here.needs:
            return
        inside = [f"{b.module}.".startswith(f"{path}.") for b in request.here.trace.blocks]
        sizes = [
            0 if within and b.category in ("parameters", "buffers", "temporaries") else b.size
            for b, within in zip(request.here.trace.blocks, inside)
        ]
        yield Offer(
            "cache encoder",
            f"Compute the outputs of `{path}` once: it is not trained.",
            "less: it is not computed again in every epoch",
            0.8,
            False,
            f"with torch.no_grad():\n    cached = [model.{path}(inputs).cpu() for inputs, _ in loader]",
            request.sized(sizes),
            "computed",
        )


REMEDY_RANKS = (2, 4, 8, 16, 32, 64)


def together(
    request: RemedyRequest, results: list[PredictedRemedy], offered: list[Offer], tick: Callable[[str], None]
) -> PredictedRemedy | None:
    """Checkpointed blocks, as few rows at a time as there can be, state in 8 bits and then ranks, until it fits; None
    where not even that does. One prediction, and the rest from its sizes."""
    if request.limit is None or any(r.fits for r in results):
        return None
    by_name = {offer.name.split()[0]: offer for offer in offered if offer.name != "checkpoint half"}
    job, names = request.job, []
    rows = rows_of(job.batch)
    if (block := by_name.get("checkpoint")) is not None and block.change is not None:
        job, names = dataclasses.replace(job, change=block.change), ["checkpoint"]
    if rows is not None and rows > 1:
        job, names = dataclasses.replace(with_rows(job, 1), accumulate=rows), [*names, "accumulate"]
    tick("several at once")
    try:
        prediction = request.ask(job)
    except Exception:  # this training does not take them together
        return None
    return _largest_together(request, job, prediction, names, by_name)


def _largest_together(
    request: RemedyRequest, job: FitRequest, prediction: Prediction, names: list[str], by_name: dict[str, Offer]
) -> PredictedRemedy | None:
    """The prediction as it is, with state in 8 bits, and with that over more and more ranks: the first that fits."""
    tries: list[tuple[list[str], int, bool]] = [(names, 1, False)]
    if "8-bit" in by_name:
        tries.append(([*names, "8-bit"], 1, True))
    tries += [([*names, *["8-bit"] * ("8-bit" in by_name), "shard"], n, "8-bit" in by_name) for n in REMEDY_RANKS]
    now = within(request.job, request.here, request.limit)[1]
    for used, ranks, narrow in tries:
        sized = resized(prediction, _sizes(prediction, ranks, narrow), job.cuda)
        good, needs = within(job, sized, request.limit)
        if good and used:
            return _remedy(used, ranks, job, now, needs, by_name)
    return None


def _sizes(prediction: Prediction, ranks: int, narrow: bool) -> list[int]:
    blocks = prediction.trace.blocks
    wide = [narrow and b.category == "optimizer state" and b.size > 16384 for b in blocks]
    sizes = [round(b.size * (0.25 + 1 / 256)) if is_wide else b.size for b, is_wide in zip(blocks, wide)]
    return [-(-size // ranks) if b.category in SPREAD else size for size, b in zip(sizes, blocks)]


def _remedy(
    used: list[str], ranks: int, job: FitRequest, now: int, needs: int, by_name: dict[str, Offer]
) -> PredictedRemedy:
    labels = {
        "checkpoint": "checkpoint all blocks",
        "accumulate": f"accumulate {job.accumulate}× one row",
        "8-bit": "keep the optimizer's state in 8 bits",
        "shard": f"shard over {ranks} ranks",
    }
    words = [labels[name] for name in used]
    codes = [by_name[name].code for name in used if name in by_name and name not in ("accumulate", "shard")]
    if "accumulate" in used:
        codes.append(
            f"for row in rows:  # {job.accumulate} of one row each\n"
            f"    (loss_fn(model, row) / {job.accumulate}).backward()\n"
            "optimizer.step()\noptimizer.zero_grad()"
        )
    if "shard" in used:
        codes.append(f"fully_shard(model)  # torchrun --nproc-per-node={ranks}; each block first")
    title = listed(words, len(words), quote="")
    return PredictedRemedy(
        "all together",
        f"{title[0].upper()}{title[1:]}.",
        needs,
        now - needs,
        True,
        "about a third more, and more for many small parts",
        1.5,
        False,
        "\n".join(codes),
        "predicted" if ranks == 1 and "8-bit" not in used else "predicted, then computed",
    )
