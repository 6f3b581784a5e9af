"""`python -m tests.benchmarks.preflight`: how long preflight takes, on healthy models and where a fix is tried.

    python -m tests.benchmarks.preflight [--device cpu|cuda] [--model NAME...] [--repeats N] [--json FILE]

Three small models: a perceptron, a convolutional network, a transformer of four layers. Each is looked at whole, as it
is and with a softmax before a loss that has one, for which a fix is tried. A minute is what it may take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from tests.benchmarks.nan import machine

CLASSES, SAMPLES, BATCH = 10, 2000, 64


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what it is fed with."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]


class Transformer(nn.Module):
    """Four layers of width 128 over 32 tokens, and the mean of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 4), nn.Linear(128, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(tokens)).mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )


SUBJECTS = {
    "perceptron": Subject(perceptron, lambda: torch.randn(SAMPLES, 64)),
    "convolutions": Subject(convolutions, lambda: torch.randn(SAMPLES, 3, 32, 32)),
    "transformer": Subject(Transformer, lambda: torch.randint(0, 1000, (SAMPLES, 32))),
}


@dataclasses.dataclass
class Row:
    """One model, looked at: seconds of each look, what was found, what there was no time for, losses computed."""

    model: str
    parameters: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    found: list[str] = dataclasses.field(default_factory=list)
    fix: str = ""
    unlooked: list[str] = dataclasses.field(default_factory=list)
    losses: int = 0

    def __str__(self) -> str:
        told = (
            f"{self.model} ({self.parameters:,} parameters): {statistics.median(self.seconds):.1f} s "
            f"({min(self.seconds):.1f}–{max(self.seconds):.1f}), {self.losses:,} losses computed; "
            + (f"found {', '.join(self.found)}, {self.fix}" if self.found else "nothing found")
        )
        return told + "".join(f"\n    no time for: {line}" for line in self.unlooked)


def look(name: str, sick: bool, device: str, repeats: int) -> Row:
    """Preflight, so many times, each from a fresh model."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    inputs, labels = subject.inputs(), torch.randint(0, CLASSES, (SAMPLES,))
    train = DataLoader(TensorDataset(inputs[500:], labels[500:]), BATCH, shuffle=True)
    val = DataLoader(TensorDataset(inputs[:500], labels[:500]), BATCH)
    row = Row(f"{name}, softmax twice" if sick else name, 0)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        row.losses += 1
        scores = model(batch[0].to(device))
        return F.cross_entropy(scores.softmax(1) if sick else scores, batch[1].to(device))

    for _ in range(repeats):
        model = subject.make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        row.parameters, row.losses = sum(p.numel() for p in model.parameters()), 0
        began = time.perf_counter()
        report = nbdebug.preflight(model, train, loss_fn, optimizer=optimizer, val_loader=val)
        row.seconds.append(time.perf_counter() - began)
    row.found = [finding.code for finding in report]
    row.fix = next((f"fix {'works' if fix.verified else 'not proven'}" for f in report for fix in f.fixes), "")
    row.unlooked = [line for line in report.unchecked if "of this look were over" in line]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.preflight", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=SUBJECTS, nargs="+", default=list(SUBJECTS), help="which of them")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="looks at each (default 3)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to this file, too")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats is at least 1; got {args.repeats}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA card")
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(f"{machine(args.device)}\n{SAMPLES:,} samples in batches of {BATCH}, {args.repeats} looks each", flush=True)
    rows = []
    for name in args.model:
        for sick in (False, True):
            rows.append(look(name, sick, args.device, args.repeats))
            print(rows[-1], flush=True)
    if args.json:
        numbers = {
            "machine": machine(args.device),
            "repeats": args.repeats,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
