"""`fit(model, batch, loss_fn)`: does a training step fit, before anything is allocated, what takes the memory, what
would fit, and what would help."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.observe.modules import unwrapped
from nbdebug.observe.validation import check_count, check_loss, quoted, wrong_type
from nbdebug.report import Finding, Fix, Plot, Report, Table, Where
from nbdebug.text import bytes_of, listed, percent, size
from nbdebug.tools.memory.predict.job import FitRequest, Prediction, rows_of, tensors_of
from nbdebug.tools.memory.predict.meta_trace import CardModel
from nbdebug.tools.memory.predict.predict import (
    CHECKS,
    MOST,
    ONE_SIZE,
    Largest,
    MeasuredPrediction,
    NotMeasured,
    by_lines,
    dimensions,
    largest_batch,
    largest_size,
    measure,
    predict,
    within,
)
from nbdebug.tools.memory.predict.remedies import PredictedRemedy, remedies

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
        try:
            largest = _largest(job, prediction, limit, tick, each, measured)
        except Exception as error:  # the user's: the batch's size is written into the program
            largest = ()
            first = (str(error).strip().splitlines() or [""])[0][:160]
            unchecked += (f"The largest batch: a batch of another size fails ({type(error).__name__}: {first})",)
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
    how = f"Measured on real steps of a copy with {rows} rows"
    if rows_of(job.batch) not in measured.known:
        how += f" and extrapolated to {rows_of(job.batch)}"
    how += "" if measured.exact else " by the totals, as the steps differ: right to about 10%"
    alone = len(measured.known) == 1 and (rows_of(job.batch) or 0) > 1
    more = (f"The largest batch: {ONE_SIZE}",) if alone else ()
    return measured.prediction, how, (reason, *more), measured


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


NOUNS = {"rows": "batch (rows)", "length": "sequence (positions)", "side": "image (pixels a side)"}
STATIC = ("parameters", "gradients", "optimizer state", "buffers")
FIXES = 3
MODULES = 40


@dataclasses.dataclass(frozen=True)
class Answer:
    """The numbers of the report. needs: bytes that have to be free, near the limit those that suffice; left: remedies
    that were not predicted; card: the GPU; how: how the numbers were obtained."""

    job: FitRequest
    prediction: Prediction
    limit: int | None
    fits: bool | None
    needs: int
    largest: tuple[Largest, ...]
    remedies: tuple[PredictedRemedy, ...]
    left: tuple[str, ...]
    card: str
    how: str
    seconds: float
    unchecked: tuple[str, ...] = ()


def report_of(answer: Answer, subject: str) -> Report:
    """The report of `fit`."""
    finding = () if answer.fits is not False else (_finding(answer),)
    return Report(
        "fit(model, batch, loss_fn)",
        finding,
        (),
        _unchecked(answer),
        tuple(_notes(answer)),
        subject,
        {"fit": _numbers(answer)},
        headline=_headline(answer),
        tables=_tables(answer),
        plots=(Plot("memory", _memory(answer)),),
    )


def _headline(answer: Answer) -> str:
    prediction = answer.prediction
    need = f"{size(answer.needs)}" + (
        f" ({size(prediction.peak)} allocated at most)" if prediction.reserved is not None else ""
    )
    if answer.fits is None:
        return f"A training step needs {need}."
    there = size(answer.limit or 0)
    if answer.fits:
        close = answer.needs > 0.95 * (answer.limit or 0)
        return f"It fits{', barely' if close else ''}: a training step needs {need} of {there}."
    return f"It does not fit: a training step needs {need}, and {there} are available."


def _finding(answer: Answer) -> Finding:
    """The cause is what takes most of it."""
    prediction = answer.prediction
    moving = sum(n for name, n in prediction.at_peak.items() if name not in STATIC)
    static = prediction.peak - moving
    code = "memory/activations-dominate" if moving >= static else "memory/optimizer-state-dominates"
    what = "activations and temporaries" if moving >= static else "parameters, gradients and optimizer state"
    title = (
        f"A step needs {size(answer.needs)} and {size(answer.limit or 0)} are available: {what} take "
        f"{size(max(moving, static))} of it."
    )
    step, phase = prediction.place
    module = max(prediction.modules, key=lambda name: prediction.modules[name], default="")
    at_peak = {name: size(count) for name, count in prediction.at_peak.items() if count > 0}
    evidence: dict[str, Any] = {"allocated at most": size(prediction.peak), "in step": step + 1, "memory": at_peak}
    if prediction.reserved is not None:
        evidence["reserved at most"] = size(prediction.reserved)
    return Finding(
        code,
        title,
        Where(phase=phase, module=module or None),
        evidence,
        tuple(_fix(r, answer.needs) for r in answer.remedies[:FIXES]),
    )


def _fix(remedy: PredictedRemedy, needs: int) -> Fix:
    after = {
        "note": f"{remedy.how}: {size(remedy.needs)} instead of {size(needs)}"
        + (", which fits" if remedy.fits else ", which alone is not enough" if remedy.fits is False else "")
        + f"; time: {remedy.time}"
        + ("; it changes what is learned" if remedy.alters else "")
    }
    return Fix(remedy.title, remedy.code, None, after)


def _memory(answer: Answer) -> dict[str, Any]:
    """The data of the picture."""
    prediction = answer.prediction
    parts = sorted(((n, c) for n, c in prediction.at_peak.items() if c > 0), key=lambda p: -p[1])
    if prediction.reserved is not None:
        parts.append(("reserved, not used", max(0, answer.needs - prediction.peak)))
    starts = {f"{phase} {step + 1}": first for (step, phase), first in _starts(prediction).items()}
    return {
        "parts": [list(p) for p in parts],
        "total": answer.needs,
        "limit": answer.limit,
        "course": [list(p) for p in prediction.course()],
        "events": starts,
        "title": "A training step, predicted",
    }


def _numbers(answer: Answer) -> dict[str, Any]:
    prediction = answer.prediction
    return {
        "peak": prediction.peak,
        "reserved": prediction.reserved,
        "limit": answer.limit,
        "fits": answer.fits,
        "at_peak": dict(prediction.at_peak),
        "place": list(prediction.place),
        "device": str(answer.job.device),
        "largest": {part.what: part.most for part in answer.largest},
        "seconds": answer.seconds,
        "how": answer.how,
        "remedies": [dataclasses.asdict(r) for r in answer.remedies],
    }


def _starts(prediction: Prediction) -> dict[tuple[int, str], int]:
    from nbdebug.tools.memory.predict.meta_trace import PHASES

    return {
        (step, PHASES[phase]): first
        for step, phase, first in prediction.trace.marks
        if PHASES[phase] in ("forward", "backward", "optimizer")
    }


def _tables(answer: Answer) -> list[Table]:
    prediction = answer.prediction
    at_peak = [
        [name, count, percent(count / max(1, prediction.peak))]
        for name, count in sorted(prediction.at_peak.items(), key=lambda p: -p[1])
        if count > 0
    ]
    tables: list[Table] = [
        Table(
            "What would help",
            ("remedy", "needs (bytes)", "saves (bytes)", "fits", "time", "how"),
            [[r.name, r.needs, r.saves, _yes(r.fits), f"{100 * (r.slower - 1):+.0f}%", r.how] for r in answer.remedies],
            "Needs: memory of a step with this remedy alone. Time: of a step, estimated. The code is in "
            "`report.facts['fit']['remedies']`.",
        ),
        Table(
            "At the peak",
            ("what for", "size (bytes)", "share"),
            at_peak,
            f"In the {prediction.place[1]} of step {prediction.place[0] + 1}.",
        ),
        Table(
            "The largest that fits",
            ("what", "now", "largest", "needs (bytes)"),
            [[NOUNS[p.what], p.now, p.most or "none", p.needs] for p in answer.largest],
        ),
        Table(
            "At the peak, by module",
            ("module", "size (bytes)"),
            [
                [name or "not in a module", count]
                for name, count in sorted(prediction.modules.items(), key=lambda p: -p[1])[:MODULES]
            ],
        ),
        Table(
            "By phase",
            ("step", "phase", "at most (bytes)"),
            [[step + 1, phase, most] for step, phase, most in prediction.phases if phase != "start"],
        ),
    ]
    first = [t for t in tables if t.rows]
    return first if answer.fits is False else sorted(first, key=lambda t: t.title != "At the peak")


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _notes(answer: Answer) -> list[str]:
    job, notes = answer.job, [f"{answer.how}, in {answer.seconds:.1f} s; nothing of yours was changed."]
    if job.cuda:
        notes.append(
            f"GPU: {answer.card}. On an H200, predictions were right to 1% (allocated) and 10% (reserved). "
            "CUDA itself takes another 0.3 to 0.8 GiB."
        )
    if job.emulated:
        notes.append(
            "There is no GPU here: its kernels are chosen by torch's rules, not by a measurement. Less certain: "
            "workspaces (they differ between GPUs), attention with masks, and recurrent layers."
        )
    ops = {b.op for b in answer.prediction.trace.blocks}
    if job.cuda and any("convolution" in op for op in ops):
        notes.append("cuDNN chooses the workspaces of convolutions: the reserved peak is right to about 10%.")
    if answer.prediction.doubts:
        notes.append(f"Ops of other libraries, whose own memory is not counted: {listed(answer.prediction.doubts, 5)}.")
    for part in answer.largest:
        notes.append(
            f"The largest {NOUNS[part.what]} that fits: {part.most:,} (now {part.now:,})."
            if part.most
            else f"Not even the smallest {NOUNS[part.what]} fits."
        )
    return notes


def _unchecked(answer: Answer) -> tuple[str, ...]:
    unchecked = list(answer.unchecked)
    if answer.limit is None:
        unchecked.append('What fits: the available memory is not known; pass it, such as device_memory="24GiB"')
    if answer.left:
        unchecked.append(f"Remedies that were not predicted: {', '.join(answer.left)}")
    return tuple(unchecked)
