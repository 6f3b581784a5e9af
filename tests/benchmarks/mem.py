"""`python -m tests.benchmarks.mem`: how long `mem()` takes among many live tensors.

    python -m tests.benchmarks.mem [--device cpu|cuda] [--tensors N] [--repeats N]

A quarter of the tensors are a model's parameters, their gradients and the optimizer's state; the others lie in the
user's lists and dicts, and in the graphs of losses that are kept. Two seconds are what it may take for 10,000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from nbdebug.tools.memory.mem import held_report


def variables(tensors: int, device: str) -> dict[str, Any]:
    """A notebook's variables, with about so many live tensors."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(max(1, tensors // 40))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8, device=device)
    sum(layer(x).sum() for layer in model).backward()
    optimizer.step()
    history = [{"loss": model[0](x).relu().sum(), "step": n} for n in range(tensors // 8)]
    cache = {n: [torch.zeros(16, device=device) for _ in range(4)] for n in range(tensors // 8)}
    return {"model": model, "optimizer": optimizer, "history": history, "cache": cache}


def main(arguments: list[str]) -> None:
    options = argparse.ArgumentParser(description="Times mem() among many live tensors.")
    options.add_argument("--device", default="cpu")
    options.add_argument("--tensors", type=int, default=10_000)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args(arguments)
    names = variables(args.tensors, args.device)
    walls, own = [], []
    for _ in range(args.repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        report = held_report(names=names)
        walls.append(time.perf_counter() - wall)
        own.append(time.process_time() - cpu)
    print(
        f"{report.facts['tensors']:,} live tensors in {report.facts['storages']:,} storages on {args.device}, torch "
        f"{torch.__version__}: {statistics.median(walls):.2f} s ({statistics.median(own):.2f} s of the processor)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
