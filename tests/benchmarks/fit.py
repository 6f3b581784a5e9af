"""`fit` against the truth: predicted and real peak, allocated and reserved; the largest batch against trying; a giant.

    python -m tests.benchmarks.fit [--device cuda] [--only WORD...] [--skip table|largest|giant ...]

On a card the truth is the allocator's own (`max_memory_allocated`, `max_memory_reserved`); on the CPU that of the
profiler's allocation events, on smaller models.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from nbdebug.tools.memory.predict.job import FitRequest, Prediction
from nbdebug.tools.memory.predict.predict import largest_batch, predict
from tests.benchmarks.fit_models import CNN, GPT, MLP, Case, adamw, cases, classified, images, next_token, sgd
from tests.memory.real_steps import peak_of, training

MIB, GIB = 1 << 20, 1 << 30
PHASES = ("forward", "backward", "optimizer")
LIMITED = (("GPT-2 bf16 8 AdamW", 16 * GIB), ("CNN fp32 32 SGD", 6 * GIB), ("GPT-2 bf16 checkpointed 8 SGD", 12 * GIB))
"""Rows whose largest batch is looked for, and on how much of a card."""


def predicted(case: Case, device: str) -> Prediction:
    """From a real model, which is never moved, and a batch without data."""
    with torch.device("meta"):
        batch = case.batch()
    return predict(FitRequest(case.build, batch, case.loss_fn, case.optimizer, torch.device(device)))


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """An allocator that holds nothing, before and after."""
    for last in (False, True):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if not last:
            yield


def real(case: Case, steps: int = 3) -> dict[str, Any]:
    """Peaks on the card: at most, and after each phase of the last step."""
    with fresh():
        model = case.build().cuda()
        optimizer = case.optimizer(model.parameters())
        batch = tree_map_only(torch.Tensor, lambda t: t.cuda(), case.batch())
        most, phases = 0, {}
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            loss = case.loss_fn(model, batch)
            phases["forward"] = torch.cuda.max_memory_allocated()
            loss.backward()
            phases["backward"] = torch.cuda.max_memory_allocated()
            optimizer.step()
            phases["optimizer"] = torch.cuda.max_memory_allocated()
            del loss
            most = max(most, *phases.values())
        torch.cuda.synchronize()
        return {"peak": most, "reserved": torch.cuda.memory_reserved(), "phases": phases}


def table(only: list[str]) -> None:
    """A row for each model, batch size and optimizer."""
    print(f"{'':34s} {'pred':>8} {'real':>8} {'err %':>6} {'res.pred':>8} {'res.real':>8} {'err %':>6} {'s':>5}  MiB")
    for case in cases():
        if only and not any(word in case.name for word in only):
            continue
        try:
            began = time.monotonic()
            said = predicted(case, "cuda")
            seconds = time.monotonic() - began
            true = real(case)
            off, wide = said.peak / true["peak"] - 1, (said.reserved or 0) / true["reserved"] - 1
            wrong = abs(off) > case.within or abs(wide) > 0.1
            print(
                f"{case.name:34s} {said.peak / MIB:8.1f} {true['peak'] / MIB:8.1f} {100 * off:+6.2f} "
                f"{(said.reserved or 0) / MIB:8.0f} {true['reserved'] / MIB:8.0f} {100 * wide:+6.1f} {seconds:5.1f}"
                + (" WRONG" if wrong else ""),
                flush=True,
            )
            if wrong:
                mine = {p: round(most / MIB) for s, p, most in said.phases if s == 1 and p in PHASES}
                print("    split", {k: round(v / MIB) for k, v in said.at_peak.items() if v}, "at", said.place)
                print(
                    "    phases predicted",
                    mine,
                    "real",
                    {k: round(v / MIB) for k, v in true["phases"].items()},
                    flush=True,
                )
        except Exception:  # the other rows are wanted as well
            print(f"{case.name:34s} FAILED {traceback.format_exc()[-700:]}", flush=True)


def on_cpu() -> None:
    """Small models against the profiler's allocation events."""
    small = functools.partial(GPT, layers=4, width=128, heads=4, vocabulary=2000, length=128)
    tokens = functools.partial(torch.randint, 2000, (8, 129))
    rows = {
        "MLP": (
            functools.partial(MLP, 256, 1024),
            lambda: (torch.randn(256, 256), torch.randint(1000, (256,))),
            classified,
        ),
        "CNN": (functools.partial(CNN, 16), lambda: images(8, 64), classified),
        "GPT": (small, tokens, next_token),
        "GPT checkpointed": (functools.partial(small, checkpointed=True), tokens, next_token),
    }
    for name, (build, make, loss_fn) in rows.items():
        for kind, optimizer in (("AdamW", adamw), ("SGD", sgd)):
            model, batch = build(), make()
            said = predict(FitRequest(model, batch, loss_fn, optimizer, torch.device("cpu"))).peak
            true = peak_of(model, batch, training(model, batch, loss_fn, optimizer(model.parameters())))
            off = 100 * (said / true - 1)
            print(f"{name + ' ' + kind:34s} {said / MIB:8.2f} {true / MIB:8.2f} {off:+6.2f}", flush=True)


def tried(case: Callable[[int], Case], start: int) -> int:
    """The most rows that run through three steps, to within 1%."""

    def runs(rows: int) -> bool:
        try:
            real(case(rows))
        except torch.OutOfMemoryError:
            return False
        return True

    low, high = 0, start
    while runs(high):
        low, high = high, int(high * 1.15) + 1
    low = low or int(high * 0.7)
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def largest(only: list[str]) -> None:
    """The largest batch on a card that is made small."""
    total = torch.cuda.get_device_properties(0).total_memory
    for name, limit in LIMITED:
        if only and not any(word in name for word in only):
            continue
        case = next(c for c in cases() if c.name == name)
        make = case.batch.func  # type: ignore[attr-defined]
        try:
            began = time.monotonic()
            with torch.device("meta"):
                batch = case.batch()
            found = largest_batch(
                FitRequest(case.build, batch, case.loss_fn, case.optimizer, torch.device("cuda")), limit, {}
            )
            seconds = time.monotonic() - began
            torch.cuda.set_per_process_memory_fraction(limit / total)
            truth = tried(
                lambda rows, case=case, make=make: dataclasses.replace(case, batch=functools.partial(make, rows)),
                found.most,
            )
            print(
                f"largest batch, {name.rsplit(' ', 2)[0]}, {limit // GIB} GiB: predicted {found.most}, tried "
                f"{truth}, {100 * (found.most / truth - 1):+.1f}%, {seconds:.1f} s",
                flush=True,
            )
        except Exception:
            print(f"largest batch, {name}: FAILED {traceback.format_exc()[-700:]}", flush=True)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def giant(device: str) -> None:
    """A model of 6.5 billion parameters, answered without it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    build = functools.partial(GPT, layers=32, width=4096, heads=32, vocabulary=32000, length=2048)
    with torch.device("meta"):
        batch = torch.randint(32000, (8, 2049))
    case = Case("giant", build, lambda: batch, next_token, adamw, half=True)
    said = predict(FitRequest(build, batch, case.loss_fn, adamw, torch.device(device)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"giant: {said.parameters / 4e9:.2f} billion parameters, peak {said.peak / GIB:.1f} GiB, "
        f"{time.monotonic() - began:.1f} s, host memory {after // 1024} MiB ({(after - before) // 1024} more)",
        flush=True,
    )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[], choices=("table", "largest", "giant"))
    asked = parser.parse_args(given)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if asked.device == 'cuda' else 'CPU'}")
    if asked.device == "cuda" and "table" not in asked.skip:
        table(asked.only)
    if asked.device == "cuda" and "largest" not in asked.skip:
        largest(asked.only)
    if asked.device == "cpu" and "table" not in asked.skip:
        on_cpu()
    if "giant" not in asked.skip:
        giant(asked.device)


if __name__ == "__main__":
    main()
