"""A long guarded run, measured: `python -m tests.nan.guard.soak [--steps 20000]` prints the figures, and what is wrong.

The same training runs bare first. Nothing may grow between an early step (a tenth of the way) and the last one: objects
that Python knows, tensors among them, hooks, blocks of memory that Python has allocated; and both runs must end in the
same bits. Resident memory is printed with the rest; it is the machine's and is judged with some room. `--trace` counts
bytes with tracemalloc too, which makes each step some times slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
import tracemalloc
from collections import Counter
from typing import Any

import psutil
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import changed, kept
from tests.nan.leftovers import global_hooks, hooks_of

LIMITS = {"objects": 100, "tensors": 0, "hooks": 0, "blocks": 800, "traced": 256 * 1024, "resident": 24 * 2**20}
"""What a cache of Python's or torch's own may take up in the meantime. A leak of one object in a hundred steps is more
in the long run of 20,000; so is one of three bytes a step. traced and resident: bytes."""


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        x = torch.randn(6, 8)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x[:, :1].sin()).square().mean()
        loss.backward()
        self.optimizer.step()

    def hooks(self) -> int:
        on_optimizer = sum(len(v) for name, v in vars(self.optimizer).items() if name.endswith("_hooks"))
        return hooks_of(self.model) + on_optimizer + sum(map(len, global_hooks().values()))


@dataclasses.dataclass
class Count:
    """What there is at one step."""

    step: int
    objects: int
    tensors: int
    hooks: int
    blocks: int
    traced: int
    resident: int

    @classmethod
    def now(cls, step: int, training: Training) -> Count:
        gc.collect()
        tensors = sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))
        return cls(
            step,
            len(gc.get_objects()),
            tensors,
            training.hooks(),
            sys.getallocatedblocks(),
            tracemalloc.get_traced_memory()[0],
            psutil.Process().memory_info().rss,
        )


def census() -> Counter:
    """How many objects of each type there are."""
    return Counter(type(thing).__name__ for thing in gc.get_objects())


@dataclasses.dataclass
class Soak:
    """bare and guarded: seconds for the whole run. more: the types of which there are more than early on."""

    steps: int
    early: Count
    late: Count
    moved: list[str]
    watched: int
    fault: str
    bare: float
    guarded: float
    more: Counter

    def wrong(self) -> list[str]:
        """What a reader should be told of; nothing where all is well."""
        grown = {part: getattr(self.late, part) - getattr(self.early, part) for part in LIMITS}
        found = [f"{part} grew by {grown[part]:,}" for part, most in LIMITS.items() if grown[part] > most]
        if found:
            found.append(f"most: {self.more.most_common(4)}")
        found += [f"not the same bits: {', '.join(self.moved)}"] if self.moved else []
        found += [f"{self.watched} of {self.steps} steps watched"] if self.watched != self.steps else []
        return found + ([f"a fault of the guard's own: {self.fault}"] if self.fault else [])

    def __str__(self) -> str:
        columns = ["step", *LIMITS]
        rows = ["".join(f"{name:>13}" for name in columns)]
        rows += ["".join(f"{getattr(count, name):13,}" for name in columns) for count in (self.early, self.late)]
        same = "the same bits as the bare run" if not self.moved else "other bits than the bare run"
        return "\n".join([*rows, f"{self.steps:,} steps: {same}; bare {self.bare:.1f} s, guarded {self.guarded:.1f} s"])


def soak(steps: int, trace: bool = False, **given: Any) -> Soak:
    """Run `steps` steps bare and guarded. trace: with tracemalloc."""
    plain, watched = Training(), Training()
    torch.manual_seed(1)
    began = time.perf_counter()
    for _ in range(steps):
        plain.step()
    bare = time.perf_counter() - began
    torch.manual_seed(1)
    began = time.perf_counter()
    with nbdebug.guard(watched.model, watched.optimizer, **given) as guard:
        for _ in range(steps // 10 - 20):
            watched.step()
        if trace:
            tracemalloc.start(1)
        try:
            for _ in range(20):  # what is renewed every step is counted from here on
                watched.step()
            before = census()
            early = Count.now(steps // 10, watched)
            for _ in range(steps - steps // 10):
                watched.step()
            late = Count.now(steps, watched)
        finally:
            tracemalloc.stop()
    seconds = time.perf_counter() - began
    moved = changed(kept([plain.model], [plain.optimizer]), kept([watched.model], [watched.optimizer]))
    return Soak(steps, early, late, moved, guard.steps, guard.fault, bare, seconds, census() - before)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nan.guard.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trace", action="store_true", help="count bytes with tracemalloc (slow)")
    parser.add_argument("--record", help="also write a record to this folder")
    given = parser.parse_args(arguments)
    told = soak(given.steps, given.trace, **({"record": given.record} if given.record else {}))
    print(told)
    print("\n".join(told.wrong()) or "nothing grew")
    return bool(told.wrong())


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
