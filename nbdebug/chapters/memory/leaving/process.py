"""The numbers before and after: bytes in tensors, what the allocators hold, what the system sees of the process."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import platform
import sys

import torch

from nbdebug.chapters.memory.leaving.reach import Walk


@dataclasses.dataclass(frozen=True)
class Numbers:
    """In bytes. tensors: in storages that Python's tensors have, by device; allocated, reserved: of CUDA's allocator,
    by device; process: resident set, None where the system does not say."""

    tensors: dict[str, int]
    allocated: dict[str, int]
    reserved: dict[str, int]
    process: int | None

    def rows(self, after: Numbers) -> list[list[object]]:
        """What, before, after, came back; only what there is."""
        pairs = [
            (f"in tensors on {d}", self.tensors.get(d, 0), after.tensors.get(d, 0))
            for d in sorted({*self.tensors, *after.tensors})
        ]
        pairs += [(f"{device}, allocated", count, after.allocated[device]) for device, count in self.allocated.items()]
        pairs += [(f"{device}, reserved", count, after.reserved[device]) for device, count in self.reserved.items()]
        if self.process is not None and after.process is not None:
            pairs.append(("this process", self.process, after.process))
        return [[what, one, two, one - two] for what, one, two in pairs]


def numbers() -> Numbers:
    """All of them, now."""
    walk, held = Walk(graphs=False), dict[str, int]()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    for block in walk.storages(tensors):
        held[block.device] = held.get(block.device, 0) + block.bytes
    del tensors
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    return Numbers(
        held,
        {d: torch.cuda.memory_allocated(d) for d in cuda},
        {d: torch.cuda.memory_reserved(d) for d in cuda},
        resident(),
    )


def resident() -> int | None:
    """Bytes of this process in the machine's memory."""
    import psutil  # only where somebody asks

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return None


def collect() -> None:
    """Let go of what only refers to itself."""
    gc.collect()


def give_back() -> None:
    """Give what the allocators keep for later to the system: CUDA's cache, and the C library's free pages on Linux."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
