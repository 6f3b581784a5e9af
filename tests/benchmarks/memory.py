"""`python -m tests.benchmarks.memory`: how much memory an answer takes on a GPU, over what a bare step takes.

Each fault is asked with `nan_trace` and with `guard`, while the process may reserve so many times what a bare step
reserves; the peak is of allocated memory, over the bare step's. `precision` is asked once, without a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import sys
import time

import torch

import nbdebug
from tests.benchmarks.nan import machine
from tests.benchmarks.training import SIZES, Training

FAULTS = ("forward", "backward", "optimizer")
LIMITS = (1.05, 1.25, 2.0)
UNUSED = 8
"""Positions that no batch has: their gradient and both of Adam's moments are 0."""


def training_of(size: str) -> Training:
    training = Training(dataclasses.replace(SIZES[size], length=SIZES[size].length + UNUSED), "cuda")
    training.batch = training.batch[:, :-UNUSED].contiguous()
    training.targets = training.targets.view(len(training.batch), -1)[:, :-UNUSED].reshape(-1)
    for name in ("exp_avg", "exp_avg_sq"):
        training.optimizer.state[training.model.positions.weight][name][-UNUSED:] = 0
    training._saved = [t.detach().cpu() for t in training._state()]
    return training


def plant(training: Training, fault: str | None) -> None:
    training.rewind()
    training.plant(fault if fault != "optimizer" else None)
    for group in training.optimizer.param_groups:
        group["eps"] = 0.0 if fault == "optimizer" else 1e-8


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def trace(training: Training) -> str:
    report = nbdebug.nan_trace(training.step, model=training.model, optimizer=training.optimizer)
    return place(report)


def guarded(training: Training) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            with nbdebug.guard(training.model, training.optimizer):
                for _ in range(3):  # with a fused optimizer the host learns of it later
                    training.step()
        except nbdebug.NonFiniteStep as error:
            return place(error.report) if error.report is not None else f"not located: {error}"
    return "nothing"


def loss(training: Training, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch, training.keep).flatten(0, 1), training.targets)


def place(report: nbdebug.Report) -> str:
    findings = [f"{f.code}, {f.where.module or f.where.phase}, {f.where.place}" for f in report.findings]
    return "; ".join(findings or ["nothing", *report.unchecked])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    training = training_of(args.size)
    training.step()
    clear()
    training.step()
    bare, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    print(f"{machine('cuda')}\n{training.size}\nbare step: {bare / 2**30:.2f} GiB, {reserved / 2**30:.2f} GiB reserved")
    for fault in args.faults:
        for limit in LIMITS:
            for tool in (trace, guarded):
                plant(training, fault)
                clear()
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit * reserved / total))
                begin = time.perf_counter()
                try:
                    answer = tool(training)
                except torch.OutOfMemoryError as error:
                    answer = f"OUT OF MEMORY: {str(error)[:80]}"
                took, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated() / bare
                torch.cuda.set_per_process_memory_fraction(1.0)
                print(f"{fault:10} {limit:4} {tool.__name__:8} peak {peak:.2f} in {took:5.1f} s: {answer}", flush=True)
    plant(training, None)
    clear()
    loss(training, training.model, training.batch).backward()  # precision compares with this step, in float32
    single = torch.cuda.max_memory_allocated()
    training.optimizer.zero_grad(set_to_none=True)
    peaks = []
    measured, reset = torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats
    torch.cuda.reset_peak_memory_stats = lambda *device: (peaks.append(measured()), reset())[1]  # it measures its own
    clear()
    begin = time.perf_counter()
    nbdebug.precision(training.model, training.batch, functools.partial(loss, training), "bfloat16", progress=False)
    torch.cuda.reset_peak_memory_stats = reset
    peak, took = max(*peaks[1:], measured()), time.perf_counter() - begin
    print(f"precision: peak {peak / bare:.2f}, {peak / single:.2f} of the step in float32, in {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
