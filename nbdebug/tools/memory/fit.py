"""`fit(model, batch, loss_fn)`: does a training step fit, before anything is allocated, and what would make it fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.observe.validation import check_count, check_loss, quoted, wrong_type
from nbdebug.report import Report
from nbdebug.text import bytes_of
from nbdebug.tools.memory.predict.job import FitRequest, Prediction, rows_of, tensors_of
from nbdebug.tools.memory.predict.largest import (
    CHECKS,
    MOST,
    Largest,
    by_lines,
    dimensions,
    largest_batch,
    largest_size,
    within,
)
from nbdebug.tools.memory.predict.meta_copy import unwrapped
from nbdebug.tools.memory.predict.predict import MeasuredPrediction, NotMeasured, measure, predict
from nbdebug.tools.memory.predict.remedies import remedies
from nbdebug.tools.memory.predict.report import Answer, report_of
from nbdebug.tools.memory.predict.workspaces import CardModel

CALL = "fit(model, batch, loss_fn)"
SECONDS, SLOW = 40.0, 3.0
"""After so long no further remedy is begun, so that a large model has its answer in a minute; a prediction that takes
longer than SLOW is not repeated to make sure of the last row."""
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@interruptible
def fit(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any = None,
    device: Any = None,
    device_memory: int | str | None = None,
    autocast: Any = None,
    steps: int = 2,
    progress: bool = True,
) -> Report:
    """Predict what a training step takes, what fits, and what each remedy would save. Nothing is allocated, and nothing
    of the user's is changed.

    model: a Module, or a function without arguments that builds one (for a model that fits nowhere: it is built without
    data). batch: as the loop gives it; tensors may be on "meta", and torch.Size means a float32 tensor. loss_fn:
    `loss_fn(model, batch)`, or a criterion of (outputs, targets) for batches that are pairs. optimizer: an optimizer, a
    class or partial that makes one from parameters, or None for forward and backward alone.

    device: "cuda" or "cpu"; left out: where the model is, or a card where there is one or `device_memory` is given.
    device_memory: what torch may take, in bytes or as "24GiB"; left out: what is free on the card, and on a machine
    without one nothing is known. autocast: a dtype ("bfloat16") that the loss is computed under, where loss_fn does not
    do it itself. steps: how many are recorded; an optimizer allocates its state in the first.

    `report.facts["fit"]` holds the numbers, in bytes: peak, reserved, at_peak, largest, remedies.

    Raises TypeError or ValueError for arguments that make no sense; what the model or the loss raise passes
    unchanged."""
    began = time.monotonic()
    job = _request(model, batch, loss_fn, optimizer, device, device_memory, autocast, steps)
    with progress_bar("fit", "predictions", wanted=progress) as bar:

        def tick(what: str) -> None:
            bar.set_description_str(f"fit: {what}", refresh=False)
            bar.update()

        tick("a step")
        prediction, how, unchecked, measured = _prediction(job)
        each = time.monotonic() - began
        limit = _limit(job, device_memory, prediction)
        good, needs = within(job, prediction, limit)
        largest = _largest(job, prediction, limit, tick, each, measured)
        ask = predict if measured is None else lambda changed: measure(changed, job.batch).prediction
        until = began + SECONDS - each
        helping, left = remedies(job, prediction, limit, _model_of(job), until, tick, ask)
    card = CardModel.here(job.device).name
    answer = Answer(
        job,
        prediction,
        limit,
        good,
        needs,
        largest,
        tuple(helping),
        tuple(left),
        card,
        how,
        time.monotonic() - began,
        unchecked,
    )
    return report_of(answer, _subject(job))


PREDICTED = "Predicted with tensors that have no data"


def _request(
    model: Any, batch: Any, loss_fn: Any, optimizer: Any, device: Any, memory: Any, autocast: Any, steps: int
) -> FitRequest:
    """The arguments, checked."""
    builds = callable(model) and not (isinstance(model, type) and not issubclass(model, nn.Module))
    if not isinstance(model, nn.Module) and not builds:
        raise wrong_type(CALL, "model", "a torch.nn.Module, or a function without arguments that builds one", model)
    check_loss(loss_fn, CALL)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        expected = "a torch.optim.Optimizer, or a class or function that makes one from parameters"
        raise wrong_type(CALL, "optimizer", expected, optimizer)
    if not tensors_of(batch):
        raise ValueError(f"{CALL}: batch must hold tensors, to predict from; got {quoted(batch)}.")
    check_count(steps, "steps")
    if memory is not None:
        bytes_of(memory)
    half = HALVES.get(str(autocast).removeprefix("torch.")) if autocast is not None else None
    if autocast is not None and half is None:
        raise ValueError(f'autocast must be "bfloat16" or "float16"; got {autocast!r}')
    return FitRequest(model, batch, loss_fn, optimizer, _device(model, device, memory), half, steps)


def _device(model: Any, device: Any, memory: Any) -> torch.device:
    """Raises ValueError for a device of another kind."""
    if device is None:
        own = next((p.device for p in model.parameters()), None) if isinstance(model, nn.Module) else None
        if own is not None and own.type == "cuda":
            return own
        return torch.device("cuda" if memory is not None or torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cuda", "cpu"):
        raise ValueError(f'device must be "cuda" or "cpu"; got {device!r}')
    return chosen


def _prediction(job: FitRequest) -> tuple[Prediction, str, tuple[str, ...], MeasuredPrediction | None]:
    """The prediction, or where that fails the measurement of small real batches; how it was made; what was not
    checked."""
    reason, failed = "", None
    try:
        if not recurrent(job.model):
            return predict(job), PREDICTED, (), None
        reason = "Recurrent layers keep buffers that tensors without data do not show"
    except Exception as error:
        failed = error
        first = (str(error).strip().splitlines() or [""])[0][:160]
        reason = f"With tensors that have no data the step fails ({type(error).__name__}: {first})"
    try:
        measured = measure(job)
    except NotMeasured as why:
        if failed is None:
            return predict(job), PREDICTED, (f"{reason}, and nothing could be measured: {why}",), None
        raise RuntimeError(f"{reason}, and it can't be measured: {why}") from failed
    rows = ", ".join(map(str, measured.known))
    how = f"Measured on real steps of a copy with {rows} rows and extrapolated to {rows_of(job.batch)}" + (
        "" if measured.exact else " by the totals, as the steps differ: right to about 10%"
    )
    return measured.prediction, how, (reason,), measured


def recurrent(model: Any) -> bool:
    """Whether a model has layers of an RNN: their kernels keep what no op shows."""
    return isinstance(model, nn.Module) and any(isinstance(m, nn.RNNBase) for m in model.modules())


def _limit(job: FitRequest, memory: Any, prediction: Prediction) -> int | None:
    """What torch may take: as passed, or what is free on the GPU and what torch has reserved already, less what others
    than this training hold of it."""
    if memory is not None:
        return bytes_of(memory)
    if not job.cuda or job.emulated:
        return None
    free, _ = torch.cuda.mem_get_info(job.device)
    own = sum(b.size for b in prediction.trace.blocks if b.step == 0 and b.phase == 0)
    on_card = isinstance(job.model, nn.Module) and any(p.is_cuda for p in job.model.parameters())
    others = torch.cuda.memory_allocated(job.device) - (own if on_card else 0)
    return free + torch.cuda.memory_reserved(job.device) - max(0, others)


def _largest(
    job: FitRequest,
    prediction: Prediction,
    limit: int | None,
    tick: Callable[[str], None],
    each: float,
    measured: MeasuredPrediction | None,
) -> tuple[Largest, ...]:
    now = rows_of(job.batch)
    if limit is None or now is None:
        return ()
    tick("the largest batch")
    if measured is not None:
        most = by_lines(job, measured.known, limit, 0, MOST) if len(measured.known) > 1 else 0
        return (Largest("rows", now, most),) if most else ()
    parts = [largest_batch(job, limit, {now: prediction}, CHECKS if each < SLOW else 0)]
    for what, here in dimensions(job.batch):
        tick(f"the largest {what}")
        if each < SLOW:  # it takes some predictions
            parts.append(largest_size(job, limit, what, here, prediction))
    return tuple(part for part in parts if part is not None)


def _model_of(job: FitRequest) -> nn.Module:
    """The model, to look for blocks in it."""
    if isinstance(job.model, nn.Module):
        return unwrapped(job.model)[0]
    with torch.device("meta"):
        return job.model()


def _subject(job: FitRequest) -> str:
    if isinstance(job.model, nn.Module):
        inner, wrappers = unwrapped(job.model)
        model = f"a model of type {type(inner).__name__}" + (f" (taken out of {wrappers})" if wrappers else "")
    else:
        model = f"a model built by {getattr(job.model, '__name__', type(job.model).__name__)}"
    optimizer = job.optimizer
    name = (
        type(optimizer).__name__
        if isinstance(optimizer, torch.optim.Optimizer)
        else getattr(getattr(optimizer, "func", optimizer), "__name__", "")
    )
    rows = rows_of(job.batch)
    parts = [
        model,
        f"trained by {name}" if optimizer is not None else "without an optimizer",
        f"{rows} rows" if rows else "",
        f"on {job.device.type}",
    ]
    return ", ".join(part for part in parts if part)
