"""Before training: `nbdebug.check_ranks()` on each rank, or `python -m nbdebug ranks --check`. Are they fit to train
together: versions, cards, steps, samplers, and the time of an all_reduce; what a step's communication costs, and what
other buckets and `no_sync` do to it (tried on a copy of the model)."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import pickle
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nbdebug
from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, figures, listed, percent, size
from nbdebug.tools.distributed.marks import digest, is_shared_out, length_of

ELEMENTS = 1 << 20
"""Of the float32 tensor that is reduced: 4 MiB, about what a bucket of a small model holds."""
PAIRS, GAIN, PARTS = 5, 0.05, 4
"""Steps of each kind that are timed; the part of a step that is worth a change; parts of an accumulated batch."""
EFFECTS = {
    "NCCL_P2P_DISABLE": "1: cards of one machine do not write to each other, all goes through host memory",
    "NCCL_SHM_DISABLE": "1: what cannot go from card to card goes over the network, within a machine too",
    "NCCL_IB_DISABLE": "1: sockets, no InfiniBand or RoCE: a test, not to keep",
    "NCCL_SOCKET_IFNAME": "the network interfaces that ranks meet over",
    "NCCL_NVLS_ENABLE": "0: no multicast over NVLink",
    "NCCL_ALGO": "takes the choice of the algorithm from NCCL",
    "NCCL_PROTO": "takes the choice of the protocol from NCCL",
    "NCCL_DEBUG": "INFO and TRACE print what NCCL does",
    "TORCH_NCCL_BLOCKING_WAIT": "1: the host waits in each wait(), nothing overlaps",
    "CUDA_LAUNCH_BLOCKING": "1: each kernel is waited for, nothing overlaps",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL compares each call between the ranks, which takes time",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo",
}
"""Variables that change how ranks talk: NCCL's and torch.distributed's documents."""
BUCKETS = {"25 MiB, as DDP has it": 25.0, "5 MiB": 5.0, "100 MiB": 100.0, "one: nothing overlaps": 1e6}


def check_ranks(
    loader: Any = None, model: nn.Module | None = None, step: Callable[[nn.Module], Any] | None = None
) -> Report:
    """Compare the ranks of the process group. Every rank must call it; each gets the same report.

    loader: its number of batches and its sampler are compared; model: the names and shapes of its parameters are, and
    the precision of FSDP. step: a function of a model that makes the forward and the backward of one batch,
    `lambda model: loss(model(x), y).backward()`; the collectives of one step are counted by kind and bytes, and on
    copies of the model in DistributedDataParallel it is tried what part of the step waits for them, with other buckets
    and with `no_sync`. The model keeps its weights and gradients.

    Raises RuntimeError where there is no process group, ValueError for a step without a model. Takes no random number
    and nothing from the loader."""
    if step is not None and model is None:
        raise ValueError("step is tried on a model: check_ranks(model=model, step=lambda model: ...)")
    if not dist.is_initialized():
        raise RuntimeError("check_ranks compares the ranks of a process group: call init_process_group first")
    own = facts_of(loader, model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    cuda = dist.get_backend() == "nccl"
    tensor = torch.zeros(ELEMENTS, device="cuda" if cuda else "cpu")
    seconds = min([timed(lambda: dist.all_reduce(tensor), cuda) for _ in range(4)][1:])  # the first sets up connections
    symptoms = differences(everyone)
    columns = list(dict.fromkeys(name for each in everyone for name in each))
    shown = [{**each, "free": size(each["free"])} for each in everyone]
    rows = [[rank, *(each.get(name, "") for name in columns)] for rank, each in enumerate(shown)]
    rate = size(4 * ELEMENTS / seconds)
    notes = [f"An all_reduce of 4 MiB takes {figures(1000 * seconds)} ms ({rate} a second)."]
    communication = {} if step is None or model is None else communicated(model, step)
    return Report(
        "check_ranks()",
        subject=f"{count(len(everyone), 'rank')}, {dist.get_backend()}",
        headline="" if symptoms else f"{count(len(everyone), 'rank')}: nothing differs that should be the same.",
        symptoms=tuple(symptoms),
        notes=(*notes, *remarks(own, loader), *advice(communication)),
        steps=1,
        facts={"ranks": everyone, "seconds": seconds, **communication},
        tables=(Table("The ranks", ("rank", *columns), rows, open=True), *(t for t in tables(communication) if t.rows)),
    )


def facts_of(loader: Any, model: nn.Module | None) -> dict[str, Any]:
    """Of this rank, as plain values."""
    cuda, free = dist.get_backend() == "nccl", psutil.virtual_memory().available
    facts: dict[str, Any] = {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")},
        "meet at": ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")),
    }
    if variables := [f"{name}={os.environ[name]}" for name in EFFECTS if os.environ.get(name)]:
        facts["variables"] = ", ".join(variables)
    if cuda:
        free, _ = torch.cuda.mem_get_info()
        facts |= {"card": torch.cuda.get_device_name(), "index": str(torch.cuda.current_device())}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["free"] = free
    if loader is not None:
        sampler: Any = getattr(loader, "sampler", None)
        facts |= {"batches": length_of(loader), "sampler": type(sampler).__name__}
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            facts["share"] = f"{sampler.rank} of {sampler.num_replicas}"
            facts["order"] = ", ".join(f"{name} {getattr(sampler, name, '')}" for name in ("seed", "epoch"))
    if model is not None:
        shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        facts["parameters"] = f"{len(shapes)}, {digest(shapes)[:8]}"
        if policies := sorted({policy for policy in precision(model) if policy}):
            facts["precision"] = "; ".join(policies)
    return facts


def precision(model: nn.Module) -> list[str]:
    """The policies of FSDP's parts, of both kinds of FSDP: "param bfloat16, reduce float32"; "" for none."""
    states = [own() for module in model.modules() if (own := getattr(module, "_get_fsdp_state", None)) is not None]
    policies = [state._mp_policy for state in states] + [getattr(m, "mixed_precision", None) for m in model.modules()]
    kinds = [[(k, getattr(p, f"{k}_dtype", None)) for k in ("param", "reduce", "buffer", "output")] for p in policies]
    return [", ".join(f"{k} {str(dtype).removeprefix('torch.')}" for k, dtype in own if dtype) for own in kinds]


def remarks(own: dict[str, Any], loader: Any = None) -> list[str]:
    """What is the same on all ranks and may surprise: FSDP's buffers in float32 beside parameters in half precision,
    often meant for the loss; a sampler's order, of which only a second epoch would show that it is the first one's."""
    notes, sampler = [], getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", False):
        text = f"The sampler shuffles by its epoch, now {getattr(sampler, 'epoch', 0)}: "
        notes.append(text + "call sampler.set_epoch(epoch) before each epoch, or all have one order.")
    if re.search(r"param b?float16[^;]*buffer float32", own.get("precision", "")):
        text = "FSDP's buffer_dtype=torch.float32 keeps buffers (running statistics, for instance) in float32 and moves"
        notes.append(f"{text} no op there: parameters and ops are in half precision. Compute the loss with .float().")
    return notes


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
        ("order", "Give the samplers one seed, and call set_epoch on all ranks: shares of two orders overlap."),
        ("variables", "Set the same on all machines: ranks with unlike settings may not meet."),
        ("precision", "Give each rank one MixedPrecisionPolicy: what they send each other is of unlike types."),
        ("parameters", "The model is not the same on all ranks: a wrapper would refuse it."),
    ):
        values = [str(each.get(name)) for each in everyone]
        if len(set(values)) > 1:
            each_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            symptoms.append(Symptom(f"{name} differs: {each_rank}.", look))
    places = [(each["host"], each["index"]) for each in everyone if "index" in each]
    if len(set(places)) < len(places):
        symptoms.append(Symptom("Two ranks use one card.", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"))
    elif places and 2 * min(free := [each["free"] for each in everyone]) < max(free):
        text = f"Rank {free.index(min(free))} has {size(min(free))} of its card free, another rank {size(max(free))}."
        symptoms.append(Symptom(text, "nvidia-smi shows which other process holds that memory."))
    shares = [each["share"] for each in everyone if "share" in each]
    if len(set(shares)) < len(shares) or not all(share.endswith(f" of {len(everyone)}") for share in shares):
        look = "DistributedSampler(rows), made after init_process_group, reads both from the group."
        text = f"The samplers give out share {listed(shares, 8, '')}, and there are {count(len(everyone), 'rank')}."
        symptoms.append(Symptom(text, look))
    if "reduce float16" in str(everyone[0].get("precision")):
        look = "MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)"
        symptoms.append(Symptom("FSDP adds the ranks' gradients up in float16, which ends at 65,504.", look))
    kind = everyone[0].get("sampler")
    if len(everyone) > 1 and kind in ("RandomSampler", "SequentialSampler"):
        look = "DataLoader(rows, sampler=DistributedSampler(rows)), where the rows are not shared out before."
        symptoms.append(Symptom(f"The loader's sampler is a {kind}: each rank goes through all rows.", look))
    return symptoms


# -- communication ----------------------------------------------------------------------------------------------------


class BucketTimes(NamedTuple):
    """Seconds of a step and of one in no_sync: the fastest, the largest of the ranks' medians, the slowest."""

    step: tuple[float, float, float]
    no_sync: tuple[float, float, float]

    @property
    def waits(self) -> float:
        """The part of a step that is not there in no_sync."""
        return max(self.step[1] - self.no_sync[1], 0.0) / self.step[1]


def communicated(model: nn.Module, step: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """collectives: (kind, number, bytes) of one step; tried: buckets → times; empty for a model that is shared out over
    the ranks, which cannot be copied."""
    cuda = next((p.is_cuda for p in model.parameters()), False)
    gradients, tried = [p.grad for p in model.parameters()], dict[str, BucketTimes]()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
        if any(map(is_shared_out, model.parameters())):
            collectives = counted(lambda: step(model))
            for p, gradient in zip(model.parameters(), gradients):
                p.grad = gradient
            return {"collectives": collectives, "tried": tried}
        for name, megabytes in BUCKETS.items():
            wrapper = wrapped(model, megabytes)
            run = functools.partial(step, wrapper)
            for _ in range(2):  # the second forward puts the buckets in order
                timed(run, cuda)
            collectives = collectives if tried else counted(run)
            times: list[list[float]] = [[], []]
            for _ in range(PAIRS):
                times[0].append(timed(run, cuda))
                with wrapper.no_sync():
                    times[1].append(timed(run, cuda))
                wrapper.zero_grad()
            ends = [(-min(own), statistics.median(own), max(own)) for own in times]
            numbers = torch.tensor(ends, dtype=torch.float64, device="cuda" if cuda else "cpu")
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            tried[name] = BucketTimes(*((-low, middle, high) for low, middle, high in numbers.tolist()))
            del wrapper, run
    return {"collectives": collectives, "tried": tried}


def wrapped(model: nn.Module, megabytes: float) -> DistributedDataParallel:
    """A copy, with the settings of the user's own wrapper where there is one."""
    own = isinstance(model, DistributedDataParallel)
    names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    settings = {name: getattr(model, name) for name in names} if own else {}
    module: nn.Module = copy.deepcopy(model.module if own else model)  # type: ignore[assignment]
    for p in module.parameters():
        p.grad = None
    return DistributedDataParallel(module, bucket_cap_mb=megabytes, **settings)


def timed(run: Callable[[], Any], cuda: bool) -> float:
    """Seconds of what all ranks begin together."""
    finish = torch.cuda.synchronize if cuda else lambda: None
    dist.barrier()
    finish()
    began = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - began


def counted(run: Callable[[], Any]) -> list[tuple[str, int, int]]:
    """(kind, number, bytes that this rank puts in) of the collectives in a call, as torch's flight recorder has them;
    DDP's and FSDP's own are among them. Empty where torch does not record."""
    before = max((entry["record_id"] for entry in recorded()), default=-1)
    run()
    sums: dict[str, list[int]] = {}
    for entry in recorded():
        if entry["record_id"] > before:
            own = sums.setdefault(entry["profiling_name"].partition(":")[2].lstrip("_") or "?", [0, 0])
            widths = [getattr(getattr(torch, kind.lower(), None), "itemsize", 1) for kind in entry["input_dtypes"]]
            own[0] += 1
            own[1] += sum(math.prod(shape) * width for shape, width in zip(entry["input_sizes"], widths))
    return [(kind, number, total) for kind, (number, total) in sorted(sums.items())]


def recorded() -> list[dict[str, Any]]:
    with contextlib.suppress(Exception):  # another torch has no recorder, or gives it another form
        trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
        return list(trace.get("entries", ()))
    return []


def advice(communication: dict[str, Any]) -> list[str]:
    """What was measured, in sentences; of a change only where it is worth one, and all steps with it were faster than
    all without."""
    tried: dict[str, BucketTimes] = communication.get("tried", {})
    if not tried:
        return []
    usual, *others = tried.values()
    if usual.no_sync[2] >= usual.step[0]:
        low, high = (figures(1000 * seconds) for seconds in (usual.step[0], usual.step[2]))
        return [f"No part of a step that waits for communication stands out: steps took {low} to {high} ms."]
    notes = [f"{percent(usual.waits)} of a step waits for communication (tried: a step in no_sync)."]
    parts = (usual.step[1] + (PARTS - 1) * usual.no_sync[1]) / PARTS
    if parts < (1 - GAIN) * usual.step[1]:
        less = f"takes {percent(1 - parts / usual.step[1])} less time than with a reduction in each."
        notes.append(f"A batch in {PARTS} parts, all but the last in no_sync, {less}")
    name, best = min(tried.items(), key=lambda pair: pair[1].step[1])
    if best.step[2] < usual.step[0] and best.step[1] < (1 - GAIN) * usual.step[1]:
        notes.append(f"Buckets of {name} make the step {percent(1 - best.step[1] / usual.step[1])} shorter (tried).")
    late = others[-1]
    if late.step[0] > usual.step[2] and late.step[1] > (1 + GAIN) * usual.step[1]:
        saved = percent(1 - usual.step[1] / late.step[1])
        notes.append(f"That communication and backward overlap saves {saved} (tried: one bucket).")
    return notes


def tables(communication: dict[str, Any]) -> Iterator[Table]:
    rows: list[list[Any]] = [[kind, n, size(total)] for kind, n, total in communication.get("collectives", ())]
    yield Table("A step's collectives, of this rank", ("kind", "number", "bytes"), rows, open=True)
    tried: dict[str, BucketTimes] = communication.get("tried", {})
    rows = [[name, *(f"{figures(1000 * t[1])} ms" for t in one), percent(one.waits)] for name, one in tried.items()]
    yield Table("Tried on copies", ("buckets", "a step", "in no_sync", "waits"), rows, open=True)
    rows = [[name, os.environ[name], effect] for name, effect in EFFECTS.items() if os.environ.get(name)]
    yield Table("Variables that are set on this rank", ("name", "value", "effect"), rows, open=True)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    answer = nbdebug.check_ranks()
    if dist.get_rank() == 0:
        print(answer)
    dist.barrier()
    dist.destroy_process_group()
