"""`python -m tests.benchmarks.speed`: ten bottlenecks planted in the GPT-2-size model, and the healthy step.

Of each: what `bottleneck` says, the line, the cures with what was predicted and measured, and how long the answer took.
The last rows are what watching costs: pairs of ten steps without and with `%bottleneck --watch`, in turn.
"""

from __future__ import annotations

import argparse
import gc
import math
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

import nbdebug
from nbdebug.tools.speed.bottleneck import SpeedWatch
from tests.benchmarks.guard import middle_half
from tests.benchmarks.nan import machine
from tests.benchmarks.training import SIZES, Training


class Case(NamedTuple):
    """step takes a batch of loader, or nothing. code: what a right answer says, "" for nothing; text: of its line."""

    step: Callable[..., Any]
    code: str
    text: str
    loader: Any = None


class Items(Dataset):
    """Rows of tokens; slow: each is built in Python."""

    def __init__(self, training: Training, slow: bool) -> None:
        self.size, self.slow = training.size, slow
        self.rows = torch.cat([training.batch, training.batch]).cpu()

    def __len__(self) -> int:
        return 64 * self.size.batch

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index % len(self.rows)]
        if self.slow:
            tokens = sorted(range(self.size.length * 64), key=lambda n: -n)  # some milliseconds of Python
            row = row + 0 * tokens[0]
        return row


def loss_of(training: Training, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = training.model(tokens, training.keep[:1])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def update(training: Training, loss: torch.Tensor) -> torch.Tensor:
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def healthy(training: Training) -> Case:
    return Case(training.step, "", "")


def healthy_loader(training: Training) -> Case:
    loader = DataLoader(
        Items(training, slow=False), batch_size=training.size.batch, pin_memory=training.device.type == "cuda"
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(training.device, non_blocking=True)
        with training.casting():
            loss = loss_of(training, batch, batch)
        return update(training, loss)

    return Case(step, "", "", loader)


def reads(training: Training) -> Case:
    def step() -> torch.Tensor:
        loss = training.step()
        norms = []
        for parameter in training.model.parameters():
            norms.append(parameter.grad.norm().item())
        return loss

    return Case(step, "speed/host-sync", "norms.append(")


def slow_items(training: Training) -> Case:
    loader = DataLoader(Items(training, slow=True), batch_size=training.size.batch)

    def step(batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(training.device)
        with training.casting():
            loss = loss_of(training, batch, batch)
        return update(training, loss)

    return Case(step, "speed/loader-bound", "tokens = sorted(", loader)


def pageable(training: Training) -> Case:
    size = training.size
    features = torch.randn(size.batch, size.length, 16 * size.width)
    project = nn.Linear(16 * size.width, 1).to(training.device)

    def step(batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(training.device)
        with training.casting():
            loss = loss_of(training, training.batch, training.targets) + project(batch).square().mean()
        return update(training, loss)

    return Case(step, "speed/transfer-bound", "batch.to(training.device)", [features])


def small_kernels(training: Training) -> Case:
    tokens, targets = training.batch, training.targets.view(len(training.batch), -1)

    def step() -> torch.Tensor:
        with training.casting():
            logits = training.model(tokens, training.keep)
            total = 0.0
            for place in range(min(512, tokens.shape[1])):
                total = total + F.cross_entropy(logits[0, place : place + 1, :64], targets[0, place : place + 1] % 64)
        return update(training, total)

    return Case(step, "speed/small-kernels", "for place in range(")


def double(training: Training) -> Case:
    training.model.double()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    tokens, targets = training.batch[:2, :256], training.targets.view(len(training.batch), -1)[:2, :256]
    keep = training.keep[:2].double()
    model = training.model

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens, keep).flatten(0, 1), targets.flatten())
        return update(training, loss)

    return Case(step, "speed/wrong-dtype", "training.model.double()")


def one_row(training: Training) -> Case:
    loader = DataLoader(Items(training, slow=False), batch_size=1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        batch = batch[:, :16].to(training.device)
        with training.casting():
            loss = loss_of(training, batch, batch)
        return update(training, loss)

    return Case(step, "speed/launch-bound", "", loader)


def math_attention(training: Training) -> Case:
    def step() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH), training.casting():
            loss = loss_of(training, training.batch, training.targets)
        return update(training, loss)

    return Case(step, "speed/slow-attention", "mixed = F.scaled_dot_product_attention(")


def validation(training: Training) -> Case:
    model = training.model

    def validate() -> float:
        model.eval()
        with torch.no_grad(), training.casting():
            total = sum(loss_of(training, training.batch, training.targets) for _ in range(4))
        model.train()
        return float(total)

    def step() -> torch.Tensor:
        loss = training.step()
        validate()
        return loss

    return Case(step, "speed/eval-too-often", "validate()")


def saving(training: Training) -> Case:
    file = str(pathlib.Path(tempfile.mkdtemp()) / "state.pt")

    def step() -> torch.Tensor:
        loss = training.step()
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
        return loss

    return Case(step, "speed/checkpoint-too-often", "torch.save(")


def recompiles(training: Training) -> Case:
    torch._dynamo.reset()
    model, count = training.model, [0]

    @torch.compile(backend="eager")
    def weighted(tokens: torch.Tensor, targets: torch.Tensor, weight: float) -> torch.Tensor:
        return F.cross_entropy(model(tokens, training.keep).flatten(0, 1), targets) * math.exp(weight)

    def step() -> torch.Tensor:
        count[0] += 1
        with training.casting():
            loss = weighted(training.batch, training.targets, 1.0 / count[0])
        return update(training, loss)

    return Case(step, "speed/compile-recompiles", "loss = weighted(")


CASES = (
    healthy, healthy_loader, reads, slow_items, pageable, small_kernels, double, one_row, math_attention, validation,
    saving, recompiles,
)  # fmt: skip


def row(name: str, case: Case, training: Training) -> str:
    begin = time.perf_counter()
    report = nbdebug.bottleneck(case.step, loader=case.loader, model=training.model, optimizer=training.optimizer)
    took, facts = time.perf_counter() - begin, report.facts["speed"]
    found = report.findings[0] if report.findings else None
    code, text = (found.code, found.where.text or "") if found is not None else ("", "")
    right = code == case.code and case.text in text and (found is not None or "compute-bound" in report.headline)
    answer = f"{code}, {found.where.place}: {text[:60]}" if found is not None else report.headline
    busy = "" if facts["busy"] is None else f", kernels {100 * facts['busy']:.0f}%"
    judged = "right" if right else "WRONG"
    lines = [f"{name:15} {judged}, {1000 * facts['seconds']:.1f} ms{busy}, {took:.1f} s: {answer}"]
    for cure in facts["cures"]:
        ratios = [f"{word} {cure[word]:.2f}" for word in ("predicted", "measured") if cure[word]]
        lines.append(f"    {', '.join([cure['name'], *ratios, cure['why_not']])}")
    lines.append(f"    {', '.join(f'{phase} {100 * share:.0f}%' for phase, share in facts['shares'].items())}")
    return "\n".join([*lines, *(f"    {line}" for line in report.unchecked)])


def watching(training: Training, pairs: int = 20, steps: int = 10) -> tuple[float, list[float]]:
    def seconds() -> float:
        training.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            training.step()
        training.wait()
        return (time.perf_counter() - begin) / steps

    ratios, bare = [], []
    for n in range(pairs):
        times = {}
        for on in (n % 2 == 0, n % 2 == 1):
            watch = SpeedWatch().attach() if on else None
            times[on] = seconds()
            if watch is not None:
                watch.detach()
        ratios.append(times[True] / times[False])
        bare.append(times[False])
    return statistics.median(bare), ratios


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.speed", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", default=[], choices=[make.__name__ for make in CASES])
    args = parser.parse_args(arguments)
    print(f"{machine(args.device)}\n{SIZES[args.size]}", flush=True)
    for make in CASES:
        if args.only and make.__name__ not in args.only:
            continue
        training = Training(SIZES[args.size], args.device)
        print(row(make.__name__, make(training), training), flush=True)
        del training
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    training = Training(SIZES[args.size], args.device)
    bare, ratios = watching(training, pairs=20 if args.device == "cuda" else 4)
    low, high = middle_half(ratios)
    print(f"--watch: {statistics.median(ratios):.4f} times {1000 * bare:.1f} ms (middle half {low:.4f}–{high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
