"""What the allocators and the system say of each device, in bytes. Nothing is freed, no statistic started anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbdebug.chapters.memory.facts import Device

BLOCK = 512
"""CUDA's allocator hands out multiples of this (`kMinBlockSize` of torch's CUDACachingAllocator)."""
BLOCKS = 200_000
"""With more blocks than this the snapshot, which tells each of them, would take seconds."""


def rounded(count: int) -> int:
    """The bytes that CUDA's allocator counts for a storage of so many."""
    return -(-count // BLOCK) * BLOCK


def devices(live: Mapping[str, int], wanted: str = "") -> tuple[Device, ...]:
    """Every device that holds something, the accelerators first. live: bytes of the storages that were met on each;
    wanted: this one alone."""
    found = [*_cuda(live), *_mps(live)]
    told = {device.name for device in found} | {"cpu"}
    found += [Device(name, count) for name, count in live.items() if name not in told]
    found.append(_host(live.get("cpu", 0)))
    return tuple(d for d in found if wanted in ("", d.name, d.name.partition(":")[0]))


def _cuda(live: Mapping[str, int]) -> list[Device]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        stats = torch.cuda.memory_stats(number)
        reserved = int(stats.get("reserved_bytes.all.current", 0))
        if not reserved and name not in live:
            continue
        free, total = torch.cuda.mem_get_info(number)
        found.append(
            Device(
                name,
                live.get(name, 0),
                int(stats.get("allocated_bytes.all.current", 0)),
                reserved,
                int(stats.get("allocated_bytes.all.peak", 0)),
                int(stats.get("reserved_bytes.all.peak", 0)),
                int(total),
                int(free),
                _largest(number, stats),
            )
        )
    return found


def _largest(number: int, stats: Mapping[str, Any]) -> int | None:
    """The largest piece that lies free within what is reserved."""
    if int(stats.get("active.all.current", 0)) > BLOCKS:
        return None
    segments = [s for s in torch.cuda.memory_snapshot() if s.get("device") == number]
    return max(
        (int(block["size"]) for segment in segments for block in segment["blocks"] if block["state"] == "inactive"),
        default=0,
    )


def _mps(live: Mapping[str, int]) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    name = next((name for name in live if name.startswith("mps")), "mps:0")
    total = int(torch.mps.recommended_max_memory())
    reserved = int(torch.mps.driver_allocated_memory())
    return [
        Device(
            name,
            live.get(name, 0),
            int(torch.mps.current_allocated_memory()),
            reserved,
            total=total,
            free=max(0, total - reserved),
        )
    ]


def _host(live: int) -> Device:
    import psutil  # only where somebody asks

    machine = psutil.virtual_memory()
    try:
        process = int(psutil.Process().memory_info().rss)
    except psutil.Error:
        process = None
    return Device("cpu", live, total=int(machine.total), free=int(machine.available), process=process)
