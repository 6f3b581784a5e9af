"""Where no remedy is enough alone: several of them at once, in the order in which they do least harm, until it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nbdebug.chapters.memory.fitting.asking import rows_of
from nbdebug.chapters.memory.fitting.job import Job, Prediction, resized
from nbdebug.chapters.memory.fitting.remedies import Asked, Offer, Remedy
from nbdebug.chapters.memory.fitting.sizes import with_rows, within

SPREAD = ("parameters", "gradients", "optimizer state")
RANKS = (2, 4, 8, 16, 32, 64)


def together(asked: Asked, found: list[Remedy], offered: list[Offer], tick: Callable[[str], None]) -> Remedy | None:
    """Checkpointed blocks, as few rows at a time as there can be, state in 8 bits and then ranks, until it fits; None
    where not even that does. One prediction, and the rest from its sizes."""
    if asked.limit is None or any(r.fits for r in found):
        return None
    by_name = {offer.name.split()[0]: offer for offer in offered if offer.name != "checkpoint half"}
    job, names = asked.job, []
    rows = rows_of(job.batch)
    if (block := by_name.get("checkpoint")) is not None and block.change is not None:
        job, names = dataclasses.replace(job, change=block.change), ["checkpoint"]
    if rows is not None and rows > 1:
        job, names = dataclasses.replace(with_rows(job, 1), accumulate=rows), [*names, "accumulate"]
    tick("several at once")
    try:
        made = asked.ask(job)
    except Exception:  # this training does not take them together
        return None
    return _grown(asked, job, made, names, by_name)


def _grown(asked: Asked, job: Job, made: Prediction, names: list[str], by_name: dict[str, Offer]) -> Remedy | None:
    """The prediction as it is, with state in 8 bits, and with that over more and more ranks: the first that fits."""
    tries: list[tuple[list[str], int, bool]] = [(names, 1, False)]
    if "8-bit" in by_name:
        tries.append(([*names, "8-bit"], 1, True))
    tries += [([*names, *["8-bit"] * ("8-bit" in by_name), "shard"], n, "8-bit" in by_name) for n in RANKS]
    now = within(asked.job, asked.here, asked.limit)[1]
    for used, ranks, narrow in tries:
        sized = resized(made, _sizes(made, ranks, narrow), job.cuda)
        good, needs = within(job, sized, asked.limit)
        if good and used:
            return _remedy(used, ranks, job, now, needs, by_name)
    return None


def _sizes(made: Prediction, ranks: int, narrow: bool) -> list[int]:
    blocks = made.trace.blocks
    wide = [narrow and b.category == "optimizer state" and b.size > 16384 for b in blocks]
    sizes = [round(b.size * (0.25 + 1 / 256)) if is_wide else b.size for b, is_wide in zip(blocks, wide)]
    return [-(-size // ranks) if b.category in SPREAD else size for size, b in zip(sizes, blocks)]


def _remedy(used: list[str], ranks: int, job: Job, now: int, needs: int, by_name: dict[str, Offer]) -> Remedy:
    said = {
        "checkpoint": "checkpoint all blocks",
        "accumulate": f"accumulate {job.accumulate}× one row",
        "8-bit": "keep the optimizer's state in 8 bits",
        "shard": f"shard over {ranks} ranks",
    }
    words = [said[name] for name in used]
    codes = [by_name[name].code for name in used if name in by_name and name not in ("accumulate", "shard")]
    if "accumulate" in used:
        codes.append(
            f"for row in rows:  # {job.accumulate} of one row each\n"
            f"    (loss_fn(model, row) / {job.accumulate}).backward()\n"
            "optimizer.step()\noptimizer.zero_grad()"
        )
    if "shard" in used:
        codes.append(f"fully_shard(model)  # torchrun --nproc-per-node={ranks}; each block first")
    title = ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]
    return Remedy(
        "all together",
        f"{title[0].upper()}{title[1:]}.",
        needs,
        now - needs,
        True,
        "about a third more, and what many small parts cost",
        1.5,
        False,
        "\n".join(codes),
        "predicted" if ranks == 1 and "8-bit" not in used else "predicted, then computed",
    )
