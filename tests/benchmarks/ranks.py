"""What the watch over ranks takes: seconds from a fault to the verdict, and a step's time with and without it.

    python -m tests.benchmarks.ranks [--backend nccl] [faults] [healthy] [overhead] [--model small|gpt2] [--steps N]

faults: each program of tests/distributed/faults.py; its rank notes the moment of its fault. healthy: the programs of
tests/distributed/programs.py. overhead: a model of GPT-2's size in DistributedDataParallel (bfloat16 on a GPU), runs
with and without the watch in turns; the median of the steps after the tenth part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from nbdebug.report import Report
from nbdebug.tools.distributed import launch
from tests.distributed.faults import FAULTS, HEAD
from tests.distributed.programs import HEAD as HEALTHY_HEAD
from tests.distributed.programs import PROGRAMS

LIMIT = 100.0
"""Seconds after which a program is ended."""
GPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("BACKEND")
rank, device = dist.get_rank(), "DEVICE"
if device == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.m = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.m(self.n2(x))
class GPT(nn.Module):
    def __init__(self, layers=12, vocabulary=50257, d=768):
        super().__init__()
        self.e, self.p = nn.Embedding(vocabulary, d), nn.Embedding(1024, d)
        self.b, self.n = nn.ModuleList(Block(d, 12) for _ in range(layers)), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.e.weight
    def forward(self, x):
        h = self.e(x) + self.p(torch.arange(x.shape[1], device=x.device))
        for block in self.b:
            h = block(h)
        return self.head(self.n(h))
model = DDP(GPT(*SIZE).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randint(0, SIZE[1], BATCH, device=device)
walls, cpus = [], []
for step in range(STEPS):
    wall, cpu = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
if rank == 0:
    with open(os.environ["NBDEBUG_FAULT"], "w") as file:
        json.dump([walls, cpus], file)
dist.barrier()
dist.destroy_process_group()
"""


class Timed(launch.Comparer):
    """Notes when the ranks are told to stop: the verdict is there."""

    verdict = 0.0

    def stop(self) -> None:
        Timed.verdict = Timed.verdict or time.time()
        super().stop()


def run(text: str, backend: str) -> tuple[Report, pathlib.Path, str]:
    """The report, the file the program wrote its numbers to, and what is left running."""
    device = "cuda" if backend == "nccl" else "cpu"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-bench-"))
    (folder / "train.py").write_text(text.replace("BACKEND", backend).replace("DEVICE", device))
    os.environ["NBDEBUG_FAULT"] = str(folder / "fault")
    Timed.verdict, launch.Comparer = 0.0, Timed  # type: ignore[misc]
    report = launch.run_script(str(folder / "train.py"), echo="--echo" in sys.argv, limit=LIMIT)
    return report, folder / "fault", running(str(folder))


def running(text: str) -> str:
    """The processes that have this text in their command line."""
    numbers = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            numbers += [path.parent.name] if text.encode() in path.read_bytes() else []
    return " ".join(numbers)


def faults(backend: str, names: str) -> None:
    print(f"{'fault':<32}{'verdict':>9}{'all gone':>10}  code, rank, line   ({backend}; seconds after the fault)")
    for name, (text, code, rank, line) in FAULTS.items():
        if names and not re.search(names, name):
            continue
        report, file, left = run(HEAD + text, backend)
        gone = time.time()
        at = float(file.read_text()) if file.exists() else float("nan")
        where = report.findings[0].where if report.findings else None
        right = bool(where) and (report.findings[0].code, where.rank) == (f"distributed/{code}", rank)
        right = right and line in (where.text or "")
        shown = f"{report.findings[0].code}, rank {where.rank}: {where.text}" if where else report.verdict
        print(
            f"{name:<32}{Timed.verdict - at:>9.2f}{gone - at:>10.2f}  {'right' if right else 'WRONG'} {shown}"
            f"{'  LEFT: ' + left if left else ''}",
            flush=True,
        )
        if not right:
            print(report, flush=True)


def healthy(backend: str, names: str) -> None:
    if backend == "nccl":  # the programs are written for a CPU: their tensors are made on the card
        head = HEALTHY_HEAD.replace('"gloo"', '"nccl"').replace(
            "torch.manual_seed(0)",
            'torch.cuda.set_device(rank)\ntorch.set_default_device("cuda")\ntorch.manual_seed(0)',
        )
    else:
        head = HEALTHY_HEAD
    for name, text in PROGRAMS.items():
        if names and not re.search(names, name):
            continue
        if backend == "nccl" and re.search(r"DataLoader\(|Accelerator", text):
            continue
        began = time.time()
        report, _, left = run(f"{head}{text}dist.destroy_process_group()\n", backend)
        silent = report.ok and not report.findings
        print(f"{'silent' if silent else 'ALARM '} {time.time() - began:6.1f} s  {name} {left}", flush=True)
        if not silent:
            print(report, flush=True)


def overhead(backend: str, model: str, steps: int, rounds: int = 2) -> None:
    size = {"gpt2": "(12, 50257, 768)", "small": "(4, 5000, 384)"}[model]
    text = GPT.replace("SIZE", size).replace("STEPS", str(steps))
    text = text.replace("BATCH", "(8, 1024)" if backend == "nccl" else "(1, 128)")
    times: dict[str, list[list[float]]] = {"bare": [[], []], "watched": [[], []]}
    for _ in range(rounds):
        for kind in times:
            if kind == "watched":
                report, file, _ = run(text, backend)
                assert report.ok and not report.findings, report
            else:
                file = pathlib.Path(tempfile.mkdtemp()) / "times"
                script = file.parent / "train.py"
                device = "cuda" if backend == "nccl" else "cpu"
                script.write_text(text.replace("BACKEND", backend).replace("DEVICE", device))
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
                subprocess.run(command, check=True, env={**os.environ, "NBDEBUG_FAULT": str(file)}, capture_output=True)
            walls, cpus = json.loads(file.read_text())
            for into, numbers in zip(times[kind], (walls, cpus)):
                into += numbers[max(10, steps // 10) if steps > 20 else 2 :]
    for number, name in enumerate(("wall", "CPU of rank 0")):
        bare, watched = (statistics.median(times[kind][number]) for kind in ("bare", "watched"))
        low = [min(times[kind][number]) for kind in ("bare", "watched")]
        print(
            f"{name}: {1000 * bare:.2f} → {1000 * watched:.2f} ms a step, ratio {watched / bare:.4f}; of the fastest "
            f"{low[1] / low[0]:.4f} ({backend}, {model}, {len(times['bare'][number])} steps each)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["faults"])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--names", default="")
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT)
    args = parser.parse_args()
    globals()["LIMIT"] = args.limit
    for what in args.what:
        if what == "overhead":
            overhead(args.backend, args.model, args.steps)
        else:
            {"faults": faults, "healthy": healthy}[what](args.backend, args.names)


if __name__ == "__main__":
    main()
