"""The rule for memory that the allocator has and can't use."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.memory.facts import Device, MemoryFacts
from nbdebug.chapters.memory.rules.words import finding
from nbdebug.finding import Finding, Fix, Where
from nbdebug.sizes import size

SHARE = 0.30
"""Of what is reserved, not allocated. CUDA's allocator keeps freed memory for later; a third that no request fits into
is more than its rounding costs."""
MATTERS = 1 << 30
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
    found = [
        (share, d)
        for d in (facts.now.devices if facts.now is not None else ())
        if (share := split_share(d)) is not None
    ]
    if not found:
        return None
    share, device = max(found, key=lambda pair: pair[0])
    idle = (device.reserved or 0) - (device.allocated or 0)
    title = (
        f"{share:.0%} of what is reserved on {device.name} lies idle in pieces: {size(idle)} of "
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
        Fix("Give back what is free as a whole; helps once, between phases.", "torch.cuda.empty_cache()"),
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
    needed at the peak of the last step."""
    share = device.fragmentation
    if share is None or share <= SHARE:
        return None
    idle = (device.reserved or 0) - (device.allocated or 0)
    if idle < min(MATTERS, (device.total or MATTERS * 20) // 20):
        return None
    if device.largest is not None and device.largest > PIECES * idle:
        return None
    if device.largest is None and (device.peak_allocated or 0) > (1 - SHARE) * (device.reserved or 0):
        return None  # the last step needed nearly all of it
    return share
