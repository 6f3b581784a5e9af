"""What a card really allocates in a step, op by op: the measured ground that `fit`'s model of the allocator stands on.

    python -m tests.benchmarks.fit_trace FOLDER [NAME...]

Writes FOLDER/traces.pkl.xz: for each case the allocator's own trace of the first and the second step, every op with the
ordinals of the allocations made in it, and the peaks after each phase.
"""

from __future__ import annotations

import gc
import lzma
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.benchmarks.fit_models import Case, cases

STATS = (
    "allocation.all.allocated",
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "requested_bytes.all.current",
    "requested_bytes.all.peak",
    "num_alloc_retries",
)


def stats() -> dict[str, int]:
    found = torch.cuda.memory_stats()
    return {name: found.get(name, 0) for name in STATS}


class Ops(TorchDispatchMode):
    """Each op with how many allocations there were before it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = func(*args, **(kwargs or {}))
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tree_leaves(args) if isinstance(t, torch.Tensor)][:8]
        made = [(tuple(t.shape), str(t.dtype)) for t in tree_leaves(out) if isinstance(t, torch.Tensor)][:8]
        self.seen.append((str(func), before, after, shapes if len(shapes) < 8 else len(shapes), made))
        return out


def step(case: Case, model: Any, optimizer: Any, batch: Any, note: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    note("zero")
    loss = case.loss_fn(model, batch)
    note("forward")
    loss.backward()
    note("backward")
    optimizer.step()
    note("optimizer")


def traced(case: Case) -> dict[str, Any]:
    """Two plain steps for the peaks, then two more of a fresh model with every op noted."""
    torch.manual_seed(0)
    kept: dict[str, Any] = {"name": case.name, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for watched in (False, True):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        model = case.build().cuda()
        optimizer = case.optimizer(model.parameters())
        batch = tree_map_only(torch.Tensor, lambda t: t.cuda(), case.batch())
        kept[f"start {watched}"] = stats()
        for number in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            phases: list[Any] = []
            if not watched:
                step(case, model, optimizer, batch, lambda name, to=phases: to.append((name, stats())))
                kept[f"plain {number}"] = phases
                continue
            torch.cuda.memory._record_memory_history(max_entries=200000, context=None)
            old = len(torch.cuda.memory._snapshot()["device_traces"][0])
            try:
                with Ops() as ops:
                    step(
                        case,
                        model,
                        optimizer,
                        batch,
                        lambda name, to=phases, ops=ops: to.append((name, stats(), len(ops.seen))),
                    )
                kept[f"trace {number}"] = [
                    (e["action"], e["addr"], e["size"], e["stream"])
                    for e in torch.cuda.memory._snapshot()["device_traces"][0][old:]
                ]
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
            kept[f"ops {number}"], kept[f"watched {number}"] = ops.seen, phases
        del model, optimizer, batch
    return kept


def main(given: list[str]) -> None:
    folder, names = pathlib.Path(given[0]), given[1:]
    properties = torch.cuda.get_device_properties(0)
    about = {
        "properties": str(properties),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "benchmark": torch.backends.cudnn.benchmark,
        "multi_processor_count": properties.multi_processor_count,
    }
    print(about)
    found = []
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        began = time.monotonic()
        try:
            found.append(traced(case))
            peaks = {
                n: [
                    (p, s["allocated_bytes.all.peak"] >> 20, s["reserved_bytes.all.peak"] >> 20)
                    for p, s in found[-1][f"plain {n}"]
                ]
                for n in (0, 1)
            }
            print(case.name, f"{time.monotonic() - began:.1f} s", peaks, flush=True)
        except Exception:
            print(case.name, "failed", traceback.format_exc()[-600:], flush=True)
    with lzma.open(folder / "traces.pkl.xz", "wb") as file:
        pickle.dump({"about": about, "cases": found}, file)


if __name__ == "__main__":
    main(sys.argv[1:])
