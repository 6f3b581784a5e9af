"""Where tensors without data fail (`.item()`, a mask of unknown size, a library's own kernels): small real batches, and
lines through them.

A copy of the model takes real steps with 1, 2 and 4 of the given rows while the same recorder notes what is allocated.
Each piece of memory is a straight line in the rows where the steps are the same sequence of allocations; else the
totals are."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.memory.fitting.asking import mapped, rows_of, tensors_of
from nbdebug.chapters.memory.fitting.hidden import Card, OnCuda
from nbdebug.chapters.memory.fitting.job import Job, Prediction, resized
from nbdebug.chapters.memory.fitting.mirror import unwrapped
from nbdebug.chapters.memory.fitting.predict import run, said, undisturbed
from nbdebug.chapters.memory.fitting.trace import Recorder

ROWS = (1, 2, 4)


class NotMeasured(Exception):
    """Real steps can't be taken: the model is a function that builds one, or the batch has no data."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """found: what the job needs, by the lines; known: what was measured, by rows; exact: the pieces could be followed
    one by one."""

    found: Prediction
    known: dict[int, Prediction]
    exact: bool


def measure(job: Job, data: Any = None) -> Measured:
    """Real steps with a few rows of `data` (a batch with values; the job's own where none is given), extended to the
    rows of the job's batch.

    Raises NotMeasured where there is nothing real to run; what the user's own code raises passes unchanged."""
    data = job.batch if data is None else data
    if not isinstance(job.model, nn.Module):
        raise NotMeasured("the model is given as a function, so there is no real one to run")
    rows, there = rows_of(job.batch), rows_of(data)
    if rows is None or there is None:
        raise NotMeasured("the tensors of the batch do not share their first dimension")
    if [t.shape[1:] for t in tensors_of(job.batch)] != [t.shape[1:] for t in tensors_of(data)]:
        raise NotMeasured("there is no batch with data of that size")
    known = {n: _steps(dataclasses.replace(job, batch=_part(data, n))) for n in sorted({min(n, there) for n in ROWS})}
    return _extended(job, known, rows)


def _extended(job: Job, known: dict[int, Prediction], rows: int) -> Measured:
    sizes = sorted(known)
    last = known[sizes[-1]]
    if len(sizes) == 1 or sizes[-1] == rows:
        return Measured(last, known, True)
    before = known[sizes[-2]]
    steps = (rows - sizes[-1]) / (sizes[-1] - sizes[-2])
    if [b.op for b in before.trace.blocks] == [b.op for b in last.trace.blocks]:
        wide = [
            max(0, round(b.size + (b.size - a.size) * steps)) for a, b in zip(before.trace.blocks, last.trace.blocks)
        ]
        return Measured(resized(last, wide, job.cuda), known, True)
    grown = ("activations", "temporaries", "inputs")
    part = sum(last.at_peak[name] for name in grown) or 1
    factor = max(0.0, 1 + (last.peak - before.peak) * steps / part)
    wide = [round(b.size * factor) if b.category in grown else b.size for b in last.trace.blocks]
    return Measured(resized(last, wide, job.cuda), known, False)


def _part(batch: Any, rows: int) -> Any:
    def first(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise NotMeasured("the batch has shapes and no data")
        return tensor[:rows] if tensor.dim() else tensor

    return mapped(first, batch)


def _steps(job: Job) -> Prediction:
    """Real steps of a copy, recorded."""
    model, optimizer = _copies(unwrapped(job.model)[0], job.optimizer)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = tree_map_only(torch.Tensor, lambda t: t.to(device), job.batch)
    if job.change is not None:
        job.change(model)
    recorder = Recorder(device.type, OnCuda(Card.here(job.device)) if job.cuda else None)
    with undisturbed():
        run(job, recorder, model, optimizer, batch, lambda loss: loss.backward())
    return said(job, recorder, model)


def _copies(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Raises NotMeasured for a model that can't be copied."""
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            return copy.deepcopy((model, optimizer))
        model = copy.deepcopy(model)
    except Exception as error:
        raise NotMeasured(f"the model can't be copied ({type(error).__name__})") from error
    return model, optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer is not None else None
