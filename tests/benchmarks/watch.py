"""`python -m tests.benchmarks.watch`: what grad_watch costs a step, with and without updates, units and the live view.

    python -m tests.benchmarks.watch [--device cpu|cuda] [--size smallest|small|gpt2] [--repeats N] [--json FILE]

A pair is ten steps in a row without a watch and as many with one, right after each other; which comes first changes
from pair to pair. The median of the pairs' ratios counts; their middle half shows how sure it is. On a card a healthy
step is run with torch set to raise where it would make the host wait, and the table is compared with norms taken one
by one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
from typing import Any

import torch

import nbdebug
from tests.benchmarks.guard import ADAM, middle_half
from tests.benchmarks.nan import machine
from tests.benchmarks.timing import clock_for
from tests.benchmarks.training import SIZES, Training

ROW = 10
"""Steps in a row, on either side of a pair: updates are measured once in them. One more runs before, unmeasured."""
WAYS: dict[str, dict[str, Any]] = {
    "norms": {"ratios_every": 0, "activations_every": 0},
    "norms, updates every 10": {"ratios_every": 10, "activations_every": 0},
    "all": {},
    "all, live": {"live": True},
}


@dataclasses.dataclass
class Cost:
    """What a way of watching costs. steps: seconds of a bare step; waits: where a step made the host wait; worst: the
    largest relative difference from norms taken one by one."""

    way: str
    ratios: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)
    waits: str | None = None
    worst: float | None = None

    def __str__(self) -> str:
        low, high = middle_half(self.ratios)
        told = (
            f"{self.way}: bare step {1000 * statistics.median(self.steps):.1f} ms; watched "
            f"{statistics.median(self.ratios):.4f} times that (middle half {low:.4f}–{high:.4f})"
        )
        if self.waits is not None:
            told += f"\n    the host waits: {self.waits or 'nowhere'}"
        return told + ("" if self.worst is None else f"\n    largest difference from plain norms: {self.worst:.1e}")


def watched(training: Training, way: str) -> Any:
    given = dict(WAYS[way])
    live = given.pop("live", False)
    watch = nbdebug.grad_watch(training.model, training.optimizer, **given)
    return watch.live(lambda html: None) if live else watch


def in_a_row(training: Training, way: str | None) -> float:
    """Seconds a step, of several from an idle device to an idle device."""
    clock = clock_for(training)
    watch = None if way is None else watched(training, way)
    training.step()
    gc.collect()
    training.wait()
    began = clock()
    for _ in range(ROW):
        training.step()
    training.wait()
    seconds = (clock() - began) / ROW
    if watch is not None:
        watch.close()
    return seconds


def pair(training: Training, cost: Cost, watched_first: bool) -> None:
    """Steps without a watch and steps with one, in this order or the other."""
    ways = [cost.way, None] if watched_first else [None, cost.way]
    seconds = {way: in_a_row(training, way) for way in ways}
    cost.steps.append(seconds[None])
    cost.ratios.append(seconds[cost.way] / seconds[None])


def where_it_waits(training: Training, way: str) -> str:
    """The first place where a step makes the host wait; "" for none. The numbers of the steps before have come."""
    with watched(training, way):
        for _ in range(3):
            training.step()
        training.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def largest_difference(training: Training) -> float:
    """Of the table's norms from those taken one by one in float64, relative."""
    wanted: list[dict[str, float]] = []

    def take(optimizer: Any, args: tuple, kwargs: dict) -> None:
        wanted.append(
            {
                name: float(torch.linalg.vector_norm(p.grad.double()))
                for name, p in training.model.named_parameters()
                if p.grad is not None
            }
        )

    hook = training.optimizer.register_step_pre_hook(take)
    with nbdebug.grad_watch(training.model, training.optimizer) as watch:
        for _ in range(2):
            training.step()
    hook.remove()
    frame = watch.frame
    assert len(frame) == sum(map(len, wanted)), "a row for each gradient"
    return max(
        abs(row.norm - wanted[row.step][row.name]) / max(wanted[row.step][row.name], 1e-30)
        for row in frame.itertuples()
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.watch", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: small on a CPU, gpt2 on a card)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="pairs for each way (default 20)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to this file, too")
    args = parser.parse_args(arguments)
    on_card = args.device == "cuda"
    if args.repeats < 1:
        parser.error(f"--repeats is at least 1; got {args.repeats}")
    if on_card and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA card")
    if not on_card:
        torch.set_num_threads(1)
    size = SIZES[args.size or ("gpt2" if on_card else "small")]
    print(f"{machine(args.device)}\n{size}; {args.repeats} pairs of {ROW} steps", flush=True)
    training = Training(size, args.device, None if size.fused else ADAM)
    costs = [Cost(way) for way in WAYS]
    for cost in costs:
        in_a_row(training, None)  # the first steps of either kind are slower
        in_a_row(training, cost.way)
        for n in range(args.repeats):
            pair(training, cost, bool(n % 2))
        cost.waits = where_it_waits(training, cost.way) if on_card and "live" not in cost.way else None
        if cost is costs[0]:
            cost.worst = largest_difference(training)
        print(cost, flush=True)
    if args.json:
        numbers = {
            "machine": machine(args.device),
            "size": str(size),
            "repeats": args.repeats,
            "rows": [dataclasses.asdict(cost) for cost in costs],
        }
        args.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
