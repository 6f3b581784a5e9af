"""`python -m tests.benchmarks.precision`: what a search costs, in steps, and what the mixed model gains.

    python -m tests.benchmarks.precision [--device cpu|cuda] [--size smallest|small|gpt2]

A GPT-like model is cast to float16. In some of its blocks a normalisation written by hand squares values of a few
hundred, as models with large channels do. Printed are the whole answer's time over a float32 step's, the tries, and the
time and peak memory of a step with only those modules in float32 against a step all in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nbdebug
from nbdebug.text import size as sized
from nbdebug.tools.precision.casting import CastCopies
from nbdebug.tools.precision.trial import HalfTrials
from tests.benchmarks.nan import machine
from tests.benchmarks.training import SIZES, Model

PLANTED = (0, 1, 2, 4)
REPEATS = 5


class Squares(nn.Module):
    """A norm written by hand, of values that are large on the way."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = ((x + 1) * 400).square()
        return x * energy / energy.mean(-1, keepdim=True) * self.weight


def model_of(size: Any, device: str, planted: int) -> tuple[nn.Module, set[str]]:
    """The model with `planted` sick norms, and their names."""
    torch.manual_seed(0)
    model = Model(size)
    places = [size.blocks * (2 * n + 1) // (2 * planted) for n in range(planted)]
    for place in places:
        model.blocks[place].norm2 = Squares(size.width)
    return model.to(device), {f"blocks.{place}.norm2" for place in places}


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    tokens, keep, targets = batch
    return F.cross_entropy(model(tokens, keep).float().flatten(0, 1), targets)


def measured(copies: CastCopies, trials: HalfTrials, kept: tuple[str, ...] | None) -> tuple[float, int | None]:
    """(seconds, peak bytes) of a step: in float32 (None), or in half with some modules kept; the median of several."""
    model = copies.reference(torch.float32) if kept is None else copies.half(kept)
    outcomes = [trials.run(model, copies.running) for _ in range(REPEATS + 1)][1:]
    return statistics.median(o.seconds for o in outcomes), outcomes[-1].memory


def ask(size: Any, device: str, planted: int) -> str:
    model, sick = model_of(size, device, planted)
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=draw).to(device)
    batch = (data[:, :-1].contiguous(), torch.ones(size.batch, 1, 1, device=device), data[:, 1:].reshape(-1))
    copies, trials = CastCopies(model, torch.float16, "cast"), HalfTrials(loss_fn, [batch])
    plain, plain_memory = measured(copies, trials, None)
    began = time.perf_counter()
    report = nbdebug.precision(model, batch, loss_fn, mode="cast", progress=False)
    seconds = time.perf_counter() - began
    mixed, mixed_memory = measured(copies, trials, report.fp32_modules)
    right = "right" if set(report.fp32_modules) == sick else f"WRONG: {report.fp32_modules}"
    said = (
        f"{planted} planted: {right}, {report.facts['tries']} tries; the answer took {seconds:.1f} s, "
        f"{seconds / plain:.0f} float32 steps of {1000 * plain:.0f} ms; "
        f"a mixed step takes {mixed / plain:.2f} of one"
    )
    if mixed_memory and plain_memory:
        said += f", its peak is {sized(mixed_memory)} against {sized(plain_memory)}"
    return said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: smallest on a CPU, gpt2 on a card)")
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        torch.set_num_threads(1)
    size = SIZES[args.size or ("gpt2" if args.device == "cuda" else "smallest")]
    print(f"{machine(args.device)}\n{size}", flush=True)
    for planted in PLANTED:
        if planted <= size.blocks:
            print(ask(size, args.device, planted), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
