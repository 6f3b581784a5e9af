"""`python -m tests.benchmarks.guard`: what a guard costs a healthy step; how long it takes from a trip to the report.

    python -m tests.benchmarks.guard [--device cpu|cuda] [--size smallest|small|gpt2] [--repeats N] [--json FILE]

A pair is a few steps in a row without a guard and as many with one, right after each other; which comes first changes
from pair to pair. The median of the pairs' ratios counts; their middle half shows how sure it is. A guard on a fused
optimizer on a card must not make the host wait: a healthy step runs with torch set to raise where it would.

From the trip to the report: the step is run again, the place found, the fix tried, the report written as text.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import nbdebug
from tests.benchmarks.nan import machine
from tests.benchmarks.timing import clock_for
from tests.benchmarks.tools import said
from tests.benchmarks.training import SIZES, Training

ROW = 4
"""Steps in a row, on either side of a pair; one more runs before them, unmeasured."""
LATE = 6
"""A trip is told at most so many steps after the fault was planted."""
ADAM, SGD = torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    f"{kind} {name}": functools.partial(made, **given)
    for name, made in (("AdamW", ADAM), ("SGD", SGD))
    for kind, given in (("plain", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True}))
}


@dataclasses.dataclass
class Cost:
    """What a guard costs with one optimizer. steps: seconds of a bare step; waits: where a healthy step made the host
    wait, "" if it did not; trips: by fault, the seconds from each trip to its report, and what the report says."""

    optimizer: str
    ratios: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)
    waits: str | None = None
    trips: dict[str, tuple[list[float], str]] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    def __str__(self) -> str:
        low, high = middle_half(self.ratios)
        told = [
            f"{self.optimizer}: bare step {1000 * self.step:.1f} ms; with the guard "
            f"{statistics.median(self.ratios):.3f} times that (middle half {low:.3f}–{high:.3f})"
        ]
        if self.waits is not None:
            told.append(f"    a healthy step with the guard makes the host wait: {self.waits or 'nowhere'}")
        for fault, (seconds, named) in self.trips.items():
            steps = sorted(s / self.step for s in seconds)
            told.append(
                f"    from the trip to the report, NaN in the {fault}: {statistics.median(steps):.2f} step "
                f"times ({steps[0]:.2f}–{steps[-1]:.2f}, first {seconds[0] / self.step:.2f}): {named}"
            )
        return "\n".join(told)


def middle_half(ratios: list[float]) -> tuple[float, float]:
    """The quartiles."""
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high


def pair(training: Training, cost: Cost, guarded_first: bool) -> None:
    """Steps without a guard and steps with one, in this order or the other."""
    seconds = {guarded: in_a_row(training, guarded) for guarded in (guarded_first, not guarded_first)}
    cost.steps.append(seconds[False])
    cost.ratios.append(seconds[True] / seconds[False])


def in_a_row(training: Training, guarded: bool) -> float:
    """Seconds a step, of several from an idle device to an idle device."""
    clock = clock_for(training)
    guard = nbdebug.guard(training.model, training.optimizer) if guarded else None
    training.step()
    gc.collect()
    training.wait()
    began = clock()
    for _ in range(ROW):
        training.step()
    training.wait()
    seconds = (clock() - began) / ROW
    if guard is not None:
        guard.close()
    return seconds


def where_it_waits(training: Training) -> str:
    """The first place where a healthy step with a guard makes the host wait; "" for none."""
    with nbdebug.guard(training.model, training.optimizer):
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


def located(training: Training, fault: str) -> tuple[float, str]:
    """Seconds from the trip to the report, and what that says in a few words."""
    clock = clock_for(training)
    gc.collect()  # the rubbish of the one before is not this one's
    try:
        with nbdebug.guard(training.model, training.optimizer, on_trip="raise"):
            for n in range(ROW + LATE):
                if n == ROW:
                    training.plant(fault)
                training.step()
    except nbdebug.NonFiniteStep as error:
        training.wait()
        began = clock()
        report = error.trip.locate()
        str(report)
        training.wait()
        return clock() - began, said(report)
    finally:
        training.plant(None)
        training.rewind()
    raise AssertionError(f"the guard did not trip on a NaN in the {fault}")


def measure(name: str, training: Training, repeats: int, trips: int) -> Cost:
    """All numbers for one optimizer."""
    cost = Cost(name)
    for _ in range(2):  # the first steps of either kind are slower
        in_a_row(training, False)
        in_a_row(training, True)
    for n in range(repeats):
        pair(training, cost, bool(n % 2))
    if training.device.type == "cuda":
        cost.waits = where_it_waits(training)
    for fault in ("forward", "backward") if trips else ():
        found = [located(training, fault) for _ in range(trips)]
        cost.trips[fault] = [seconds for seconds, _ in found], found[0][1]
    return cost


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.guard", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: small on a CPU, gpt2 on a card)")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="pairs for each optimizer (default 30)")
    parser.add_argument("--trips", type=int, default=5, metavar="N", help="trips for each fault (default 5)")
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
    print(f"{machine(args.device)}\n{str(size).rpartition(', ')[0]}; {args.repeats} pairs of {ROW} steps", flush=True)
    costs: list[dict[str, Any]] = []
    for name, optimizer in OPTIMIZERS.items():
        if on_card and name != "fused AdamW":
            continue
        cost = measure(
            name,
            Training(size, args.device, optimizer),
            args.repeats,
            args.trips if "AdamW" in name and "foreach" not in name else 0,
        )
        print(cost, flush=True)
        costs.append(dataclasses.asdict(cost))
    if args.json:
        numbers = {"machine": machine(args.device), "size": str(size), "repeats": args.repeats, "rows": costs}
        args.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
