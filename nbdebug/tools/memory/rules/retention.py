"""Rules for what is held at this moment, without a step.

`CHECKS` find causes whose pages are declared in `leaks.py`, which sees them at work over several steps.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import size
from nbdebug.tools.memory.facts import Device, LoaderWorkers, MemoryFacts
from nbdebug.tools.memory.rules.wording import finding

MATTERS = 32 << 20
"""Bytes; what a notebook keeps of less than this is a convenience, and no fault."""
SHARE = 0.02
"""Of all that is held: 32 MiB beside 10 GiB are not worth naming."""
CODES = {
    "output": "cell-output-held",
    "displayed": "cell-output-held",
    "traceback": "traceback-held",
    "exception": "traceback-held",
    "hook": "hook-held",
    "loss": "graph-retained",
}
TITLES = {
    "cell-output-held": "The notebook keeps {bytes} of results that cells have shown",
    "traceback-held": "The last exception keeps {bytes}: the variables of the failed calls",
    "hook-held": "Hooks that are registered more than once keep {bytes}",
    "graph-retained": "Tensors that are kept hold {bytes} with their graphs",
}


def _of(slug: str) -> Callable[[MemoryFacts], Finding | None]:
    def check(facts: MemoryFacts) -> Finding | None:
        there = [k for k in facts.notebook if CODES.get(k.how) == slug]
        count = sum(k.bytes for k in there)
        held = sum(h.bytes for h in facts.now.holdings) if facts.now is not None else 0
        if count < MATTERS or count < SHARE * held:
            return None
        largest = max(there, key=lambda k: k.bytes)
        title = TITLES[slug].format(bytes=size(count)) + f": `{largest.name}`"
        title += f" and {len(there) - 1} more" if len(there) > 1 else ""
        words = " ".join(dict.fromkeys(k.release for k in there if k.release)) or "outputs"
        return finding(
            slug,
            title,
            largest.where or Where(),
            [k.name for k in there],
            [Fix("Free it.", f"%free {words}", None, {"would be freed": size(count)})],
            {"bytes": count, "kept": len(there)},
        )

    return check


CHECKS = tuple(_of(slug) for slug in TITLES)


RESERVED_SHARE = 0.30
"""Of what is reserved, not allocated. CUDA's allocator keeps freed memory for later; a third that no request fits into
is more than its rounding costs."""
RESERVED_MATTERS = 1 << 30
"""Bytes that lie idle; on a card with less than 20 GiB, a twentieth of it."""
PIECES = 0.5
"""Where the largest free piece is more than this share of what lies idle, a large request still fits."""


@rule(
    code="memory/fragmentation",
    title="Much of what the allocator has reserved lies in pieces that fit no request.",
    symptom='Out of memory, while the message says that much is "reserved by PyTorch but unallocated".',
    cause="The allocator keeps freed blocks and hands them out again. With sizes that change from step to step (texts "
    "of every length, pictures of every size) freed blocks lie between live ones, and none is large enough.",
    confirm='`torch.cuda.memory_summary()`: "inactive_split" bytes are large, and the largest free block is small.',
    fix="Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before torch starts. Pad batches to a few fixed sizes; "
    "run the largest batch first. `torch.cuda.empty_cache()` helps once, between phases.",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
)
def fragmentation(facts: MemoryFacts) -> Finding | None:
    devices = [
        (share, d)
        for d in (facts.now.devices if facts.now is not None else ())
        if (share := split_share(d)) is not None
    ]
    if not devices:
        return None
    share, device = max(devices, key=lambda pair: pair[0])
    idle = (device.reserved or 0) - (device.allocated or 0)
    title = (
        f"{share:.0%} of the memory reserved on {device.name} is unused and fragmented: {size(idle)} of "
        f"{size(device.reserved or 0)}"
        + (f", the largest free piece is {size(device.largest)}" if device.largest is not None else "")
    )
    fixes = [
        Fix(
            "Let reserved memory grow and shrink in place. Set it before torch starts.",
            'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before import torch',
            None,
            {"idle": size(idle)},
        ),
        Fix("Release the segments that are wholly free; this helps once, between phases.", "torch.cuda.empty_cache()"),
    ]
    return finding(
        "fragmentation",
        title,
        Where(),
        [device.name],
        fixes,
        {"reserved": device.reserved, "allocated": device.allocated, "largest free piece": device.largest},
    )


def split_share(device: Device) -> float | None:
    """The share of reserved memory that lies idle in pieces; None where it is no fault: little, or in one piece, or
    needed at the peak of the last step, or where the device has more than that to give yet: between two steps what the
    activations of one took always lies idle."""
    share = device.fragmentation
    if share is None or share <= RESERVED_SHARE:
        return None
    idle = (device.reserved or 0) - (device.allocated or 0)
    if idle < min(RESERVED_MATTERS, (device.total or RESERVED_MATTERS * 20) // 20):
        return None
    if device.largest is not None and device.largest > PIECES * idle or (device.free or 0) > idle:
        return None
    if device.largest is None and (device.peak_allocated or 0) > (1 - RESERVED_SHARE) * (device.reserved or 0):
        return None  # the last step needed nearly all of it
    return share


WORKERS_MATTER = 8 << 20
"""Bytes for each worker; 16 workers then copy 128 MiB."""
CONFIRMED = 0.25
"""Share of the estimate that a child process must really have gained, where it was measured."""


@rule(
    code="memory/loader-workers-copy",
    title="Every worker of the loader copies the data set's Python objects.",
    symptom="With `num_workers` above zero the machine's memory fills up during the first epoch, once for every "
    "worker; with `num_workers=0` it stays flat.",
    cause="A worker starts as a copy of the process that shares its memory until one of the two writes to it. Python "
    "writes into each object that it reads, to count references, so a worker that reads a list of many "
    "strings comes to own a copy of every page on which they lie.",
    confirm="`psutil.Process(pid).memory_full_info().uss` of a worker rises while it reads, up to the list's size.",
    fix="Keep the records in one array: `np.array(lines)`, a tensor, a memory-mapped file, an Arrow table; or the "
    "pickled records in one array of bytes with an array of offsets.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_workers_copy(facts: MemoryFacts) -> Finding | None:
    workers = facts.workers
    if workers is None or workers.bytes < WORKERS_MATTER:
        return None
    if workers.measured is not None and workers.measured < CONFIRMED * workers.bytes:
        return None
    each = workers.measured if workers.measured is not None else workers.bytes
    title = (
        f"`{workers.holder}` holds {workers.objects:,} Python objects, and each of the {workers.workers} workers that "
        f"reads them copies {size(each)}: {size(each * workers.workers)} in total"
    )
    evidence = {
        "objects": workers.objects,
        "workers": workers.workers,
        "bytes for each worker, estimated": workers.bytes,
    }
    if workers.measured is not None:
        evidence["bytes that a child process gained by reading them all"] = workers.measured
    return finding("loader-workers-copy", title, Where(), [workers.holder], [_packed(workers)], evidence)


def _packed(workers: LoaderWorkers) -> Fix:
    name = workers.holder.rpartition(".")[2]
    if workers.records in ("text", "numbers"):
        code = f"self.{name} = np.array({name})"
    else:
        code = (
            f"packed = [np.frombuffer(pickle.dumps(record), np.uint8) for record in {name}]\n"
            "self.ends = np.cumsum([len(one) for one in packed])\nself.data = np.concatenate(packed)"
        )
    if workers.packed is None or workers.measured is None:
        return Fix("Keep the records in one array.", code, None, {"a worker copies": size(workers.bytes)})
    return Fix(
        "Keep the records in one array.",
        code,
        workers.packed < workers.measured // 2,
        {"bytes that a child gained as it is": workers.measured, "bytes with the fix": max(0, workers.packed)},
    )
