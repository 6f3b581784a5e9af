"""Before training: `nbdebug.check_ranks()` on each rank, or `python -m nbdebug ranks --check`. Are they fit to train
together: versions, cards, steps, samplers, and the time of an all_reduce."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import nbdebug
from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, figures, size

ELEMENTS = 1 << 20
"""Of the float32 tensor that is reduced: 4 MiB, about what a bucket of a small model holds."""


def check_ranks(loader: Any = None, model: torch.nn.Module | None = None) -> Report:
    """Compare the ranks of the process group. Every rank must call it; each gets the same report.

    loader: its number of batches and its sampler are compared; model: the names and shapes of its parameters are.
    Raises RuntimeError where there is no process group. Takes no random number and nothing from the loader."""
    if not dist.is_initialized():
        raise RuntimeError("check_ranks compares the ranks of a process group: call init_process_group first")
    own = facts_of(loader, model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    seconds = reduced()
    symptoms = differences(everyone)
    columns = list(everyone[0])
    rows = [[rank, *(each[name] for name in columns)] for rank, each in enumerate(everyone)]
    rate = size(4 * ELEMENTS / seconds)
    return Report(
        "check_ranks()",
        subject=f"{count(len(everyone), 'rank')}, {dist.get_backend()}",
        headline="" if symptoms else f"The {count(len(everyone), 'rank')} agree.",
        symptoms=tuple(symptoms),
        notes=(f"An all_reduce of 4 MiB takes {figures(1000 * seconds)} ms ({rate} a second).",),
        steps=1,
        facts={"ranks": everyone, "seconds": seconds},
        tables=(Table("The ranks", ("rank", *columns), rows, open=True),),
    )


def facts_of(loader: Any, model: torch.nn.Module | None) -> dict[str, Any]:
    """Of this rank, as plain values."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "RANK": os.environ.get("RANK", ""),
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", ""),
        "card": "",
    }
    if dist.get_backend() == "nccl":
        free, _ = torch.cuda.mem_get_info()
        facts |= {"card": torch.cuda.get_device_name(), "index": str(torch.cuda.current_device()), "free (bytes)": free}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if loader is not None:
        sampler = getattr(loader, "sampler", None)
        facts |= {"batches": len(loader), "sampler": type(sampler).__name__}
        facts["replica"] = str(getattr(sampler, "rank", ""))
    if model is not None:
        shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        facts["parameters"] = f"{len(shapes)}, {hash_of(shapes)}"
    return facts


def hash_of(value: object) -> str:
    import hashlib

    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def reduced() -> float:
    """Seconds of an all_reduce: the fastest of three, after one that sets up connections."""
    cuda = dist.get_backend() == "nccl"
    tensor = torch.zeros(ELEMENTS, device="cuda" if cuda else "cpu")
    best = float("inf")
    for turn in range(4):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began) if turn else best
    return best


def differences(everyone: Sequence[dict[str, Any]]) -> list[Symptom]:
    """What should be alike on all ranks and is not, or unlike and is not."""
    symptoms = []
    for name, look in (
        ("torch", "Install the same version everywhere."),
        ("python", "Objects that are pickled on one rank may not open on another."),
        ("NCCL", "Ranks with other versions of NCCL do not connect, or stand still."),
        ("WORLD_SIZE", "Start all ranks with one launcher."),
        ("batches", "The ranks will not end an epoch together: share out evenly, or train within `model.join()`."),
        ("sampler", "Use one kind of sampler on all ranks."),
        ("parameters", "The model is not the same on all ranks: a wrapper would refuse it."),
    ):
        values = [str(each.get(name)) for each in everyone]
        if len(set(values)) > 1:
            each_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            symptoms.append(Symptom(f"{name} differs: {each_rank}.", look))
    places = [(each["host"], each["index"]) for each in everyone if "index" in each]
    if len(set(places)) < len(places):
        symptoms.append(Symptom("Two ranks use one card.", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"))
    kind = everyone[0].get("sampler")
    if len(everyone) > 1 and kind in ("RandomSampler", "SequentialSampler"):
        look = "DataLoader(rows, sampler=DistributedSampler(rows)), where the rows are not shared out before."
        symptoms.append(Symptom(f"The loader's sampler is a {kind}: each rank goes through all rows.", look))
    return symptoms


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    answer = nbdebug.check_ranks()
    if dist.get_rank() == 0:
        print(answer)
    dist.barrier()
    dist.destroy_process_group()
