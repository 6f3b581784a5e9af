"""What the watch over ranks takes: seconds from a fault to the verdict, and a step's time with and without it.

    python -m tests.benchmarks.ranks [--backend nccl] [faults] [healthy] [overhead] [--model small|gpt2] [--steps N]

faults: each program of tests/distributed/faults.py; its rank notes the moment of its fault. healthy: the programs of
tests/distributed/programs.py. overhead: a model of GPT-2's form in DistributedDataParallel (bfloat16 on a GPU): in one
run the watch is taken off and put back every 5 steps, so that what else the machine does meets both alike.
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
walls = []
for step in range(STEPS):
    switch(step // BLOCK % 2 == 1)
    wall = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    walls.append(time.perf_counter() - wall)
"""
BLOCK, FIRST = 5, 40
"""Steps with or without the watch; those at the start that are left out: the weights are compared in the first ones."""


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
        if backend == "nccl":
            text = text.replace("torch.Generator()", 'torch.Generator("cuda")')
        if backend == "nccl" and re.search(r"DataLoader\(|Accelerator", text):
            continue
        began = time.time()
        report, _, left = run(f"{head}{text}dist.destroy_process_group()\n", backend)
        silent = report.ok and not report.findings
        print(f"{'silent' if silent else 'ALARM '} {time.time() - began:6.1f} s  {name} {left}", flush=True)
        if not silent:
            print(report, flush=True)


def overhead(backend: str, model: str, steps: int) -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-bench-"))
    size, batch = {"gpt2": "(12, 50257, 768)", "small": "(4, 5000, 384)"}[model], "(1, 128)"
    text = GPT.replace("SIZE", size).replace("STEPS", str(steps)).replace("BLOCK", str(BLOCK))
    (folder / "train.py").write_text(text.replace("BATCH", "(8, 1024)" if backend == "nccl" else batch))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    process = subprocess.Popen(
        [*command, "-m", "tests.benchmarks.ranks", f"rank {folder}", "--backend", backend],
        env={**os.environ, **settings},
    )
    report = launch.Comparer(folder, 2).follow("overhead", lambda: process.poll() is not None)
    assert report.ok and not report.findings, report
    walls = json.loads((folder / "walls").read_text())
    blocks = [walls[n : n + BLOCK] for n in range(FIRST, steps, BLOCK)]
    pairs = [(sum(bare), sum(watched)) for bare, watched in zip(blocks[::2], blocks[1::2])]
    ratios = sorted(watched / bare for bare, watched in pairs)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"{1000 * statistics.median(walls):.1f} ms a step; watched / bare: {statistics.median(ratios):.4f}, median of "
        f"{len(ratios)} pairs of {BLOCK} steps (half of them within {low:.3f} and {high:.3f}); of the sums "
        f"{sum(watched for _, watched in pairs) / sum(bare for bare, _ in pairs):.4f} ({backend}, {model})",
        flush=True,
    )


def watched_rank(folder: pathlib.Path, backend: str) -> None:
    """In a rank: the training, with a watch that can be taken off."""
    import builtins
    import logging

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    from nbdebug.tools.distributed import marks
    from nbdebug.tools.distributed.agent import Agent

    data = torch.utils.data
    owners = [c10d, dist, torch, torch.Tensor, torch.autograd, DistributedDataParallel, torch.optim.Optimizer, os]
    owners += [data.DataLoader, data.dataloader._BaseDataLoaderIter, logging.Logger, c10d.Work, os._Environ, builtins]
    vars(builtins).update({marks.MARK: lambda number: None, marks.TURNS: lambda number, iterable: iterable})
    before = [dict(vars(owner)) for owner in owners]
    agent = Agent(folder, int(os.environ["RANK"]))
    agent.install()
    changed = [
        (owner, name, plain[name], noted)
        for owner, plain in zip(owners, before)
        for name, noted in list(vars(owner).items())
        if plain.get(name, noted) is not noted
    ]
    optimizers = sys.modules["torch.optim.optimizer"]
    tables = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    tables.append(nn.modules.module._global_forward_pre_hooks)
    held: list[dict] = []

    def switch(on: bool) -> None:
        for owner, name, plain, noted in changed:
            setattr(owner, name, noted if on else plain)
        if on and held:
            for table, hooks in zip(tables, held):
                table.update(hooks)
            held.clear()
        elif not on and not held:
            held.extend(map(dict, tables))
            for table in tables:
                table.clear()

    dist.init_process_group(backend)
    rank, device = dist.get_rank(), "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    names = {
        "__name__": "train",
        "torch": torch,
        "nn": nn,
        "DDP": DistributedDataParallel,
        "time": time,
        "device": device,
        "switch": switch,
    }
    path = folder / "train.py"
    exec(marks.compiled(path.read_bytes(), str(path), agent.listed), names)
    switch(True)
    dist.barrier()
    agent.left(0)
    if rank == 0:
        (folder / "walls").write_text(json.dumps(names["walls"]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["faults"])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--names", default="")
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT)
    args = parser.parse_args()
    globals()["LIMIT"] = args.limit
    for what in args.what:
        if what.startswith("rank "):
            watched_rank(pathlib.Path(what.removeprefix("rank ")), args.backend)
        elif what == "overhead":
            overhead(args.backend, args.model, args.steps)
        else:
            {"faults": faults, "healthy": healthy}[what](args.backend, args.names)


if __name__ == "__main__":
    main()
