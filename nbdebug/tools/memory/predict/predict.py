"""A prediction: a copy of the training without data, a few steps of it recorded, and what the recording says.

Nothing is computed and nothing is allocated on a device; the user's model, optimizer, batch and random numbers are as
before afterwards.

The largest batch, sequence or image that fits is searched on predictions (second part). Every piece of memory of a step
is a straight line in the number of rows, as long as the step stays the same sequence of allocations. So two predictions
give the sizes of all pieces for any number of rows, and the allocator's model is asked for each; the answer is then
predicted once more in full, and searched again from there where it was wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.observe.backward import graph_leaves
from nbdebug.observe.modules import unwrapped
from nbdebug.observe.ops import RowsByNumber
from nbdebug.observe.validation import loss_call, wrong_type
from nbdebug.tools.memory.predict import allocator
from nbdebug.tools.memory.predict.allocator import as_on_cuda
from nbdebug.tools.memory.predict.job import (
    FitRequest,
    MetaCopy,
    Prediction,
    converting,
    mapped,
    prediction,
    resized,
    resized_argument,
    root,
    rows_of,
    tensors_of,
)
from nbdebug.tools.memory.predict.meta_trace import CardModel, MetaRecorder, OnCuda, on_cpu


def predict(job: FitRequest) -> Prediction:
    """The steps of a job over tensors without data. Raises what the user's code raises there (see `failed`)."""
    with unchanged_state(), unlogged(), contextlib.ExitStack() as stack:
        pretended = torch.device("cpu") if job.emulated else _indexed(job.device)
        if job.emulated:
            stack.enter_context(as_on_cuda())
        stack.enter_context(converting())
        meta = MetaCopy(pretended)
        try:
            return _recorded(job, meta, copied=True)
        except _Refused:
            return _recorded(job, MetaCopy(pretended), copied=False)


class _Refused(Exception):
    """The model can't be copied, or the loss is not that of the copy."""


def _indexed(device: torch.device) -> torch.device:
    bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if bare else device


def _recorded(job: FitRequest, meta: MetaCopy, copied: bool) -> Prediction:
    workspaces = OnCuda(CardModel.here(job.device)) if job.cuda else on_cpu
    recorder = MetaRecorder(meta.device.type, workspaces)
    with contextlib.ExitStack() as stack:
        model = _model(job, meta, copied, stack)
        if job.change is not None:
            job.change(model)
        with meta.mode:
            optimizer = meta.optimizer(job.optimizer, model.parameters(), job.cuda)
        batch = meta.batch(job.batch)
        stack.enter_context(meta.mode)
        guard = functools.partial(_backward, model=model, original=job.model if copied else None)
        run(job, recorder, model, optimizer, batch, guard)
    return prediction_of(job, recorder, model)


def run(
    job: FitRequest,
    recorder: MetaRecorder,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    backward: Callable[[torch.Tensor], None],
) -> None:
    """The steps of a job under the recorder: tensors with or without data."""
    for group in optimizer.param_groups if optimizer is not None and job.groups else ():
        group.update(job.groups)
    recorder.mark(0, "start")
    _record_parameters(recorder, model)
    for tensor in tensors_of(batch):
        recorder.record(tensor, category="inputs")
    _states(recorder, optimizer)
    away = _track_modules(recorder, model)
    try:
        with recorder:
            for step in range(job.steps):
                _step(job, recorder, model, optimizer, batch, step, backward)
    finally:
        recorder.closed = True
        away()


def prediction_of(job: FitRequest, recorder: MetaRecorder, model: nn.Module) -> Prediction:
    """The prediction that a recording gives."""
    parameters = {id(p): p for p in model.parameters()}.values()
    return prediction(
        recorder.trace,
        job.cuda,
        sum(p.numel() * p.element_size() for p in parameters),
        sum(p.requires_grad for p in parameters),
        tuple(sorted(recorder.doubts)),
    )


def _model(job: FitRequest, meta: MetaCopy, copied: bool, stack: contextlib.ExitStack) -> nn.Module:
    if not isinstance(job.model, nn.Module):
        with meta.mode, meta.device:
            model = job.model()
        if not isinstance(model, nn.Module):
            raise wrong_type("fit(model, batch, loss_fn)", "what model() builds", "a torch.nn.Module", model)
        return model
    model = unwrapped(job.model)[0]
    if not copied:
        return stack.enter_context(meta.exchanged(model))
    try:
        return meta.copied(model)
    except Exception as error:  # locks, handles, what else a user's module holds
        raise _Refused from error


def _record_parameters(recorder: MetaRecorder, model: nn.Module) -> None:
    """Parameters and buffers are there before the first step, each at its module, as `model.to(device)` makes them."""
    for name, module in model.named_modules():
        recorder.modules.append(name)
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            for tensor in tensors.values():
                if tensor is not None and recorder.number_of(tensor) is None:
                    recorder.record(tensor, category=kind)
        recorder.modules.pop()


def _track_modules(recorder: MetaRecorder, model: nn.Module) -> Callable[[], None]:
    """Hooks that tell the recorder which module is at work; returns what takes them away."""
    handles = []

    def enter(name: str, *_: Any) -> None:
        recorder.modules.append(name)

    def leave(name: str, *_: Any) -> None:
        if name in recorder.modules:
            del recorder.modules[len(recorder.modules) - 1 - recorder.modules[::-1].index(name) :]

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(functools.partial(enter, name)))
        handles.append(module.register_forward_hook(functools.partial(leave, name), always_call=True))

    def away() -> None:
        for handle in handles:
            handle.remove()

    return away


def _step(
    job: FitRequest,
    recorder: MetaRecorder,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    step: int,
    backward: Callable[[torch.Tensor], None],
) -> None:
    ask = loss_call(job.loss_fn)[0]
    recorder.mark(step, "zero_grad")
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(min(job.accumulate, 2)):  # from the second on all are alike
        recorder.mark(step, "forward")
        loss = _loss(job, ask, model, batch)
        recorder.modules.clear()
        recorder.mark(step, "backward")
        backward(loss)
        recorder.modules.clear()
        for parameter in model.parameters():
            if parameter.grad is not None:
                recorder.belongs(recorder.record(parameter.grad, category="gradients"), parameter)
    recorder.mark(step, "optimizer")
    if optimizer is not None:
        optimizer.step()
        _states(recorder, optimizer)


def _loss(job: FitRequest, ask: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> torch.Tensor:
    casting = contextlib.nullcontext() if job.half is None else torch.autocast(job.device.type, job.half)
    with torch.enable_grad(), casting:
        loss = root(ask(model, batch))
    return (loss.float().mean() if loss.dim() else loss) / job.accumulate if job.accumulate > 1 or loss.dim() else loss


def _states(recorder: MetaRecorder, optimizer: Any) -> None:
    """Name the memory of the optimizer's state."""
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value is not parameter:
                recorder.belongs(recorder.record(value, category="optimizer state"), parameter)


def _backward(loss: torch.Tensor, model: nn.Module, original: Any) -> None:
    """The backward; real tensors that the loss leads to get no gradient from it. original: the user's model where
    `model` is a copy: a loss that leads to the parameters of the original is not that of the copy."""
    own = {id(p) for p in model.parameters()}
    strangers = [leaf for leaf in graph_leaves(loss) if id(leaf) not in own]
    if isinstance(original, nn.Module) and {id(p) for p in original.parameters()} & {id(s) for s in strangers}:
        raise _Refused
    before = [(leaf, leaf.grad) for leaf in strangers]
    try:
        loss.backward()
    finally:
        for leaf, grad in before:
            leaf.grad = grad


@contextlib.contextmanager
def unchanged_state() -> Iterator[None]:
    """Random numbers are as before afterwards; compiled code runs in eager, where there is such."""
    states = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with stance, torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy:
            numpy.random.set_state(state)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Without torch's log of an op that fails on tensors without data: it prints a traceback, and the error is raised
    all the same. A remedy that the model does not take (half the image's side) is no error at all."""
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)


ROWS = (1, 2, 4)
ONE_SIZE = "the step can be run with a batch of one size alone"


class NotMeasured(Exception):
    """Real steps can't be taken: the model is a function that builds one, or the batch has no data."""


@dataclasses.dataclass(frozen=True)
class MeasuredPrediction:
    """prediction: what the job needs, by the lines; known: what was measured, by rows; exact: the pieces could be
    followed one by one."""

    prediction: Prediction
    known: dict[int, Prediction]
    exact: bool


def measure(job: FitRequest, data: Any = None) -> MeasuredPrediction:
    """Real steps with a few rows of `data` (a batch with values; the job's own where none is given), extended to the
    rows of the job's batch.

    Where the user's own code raises with a few rows, the whole batch alone is measured; what it raises then passes
    unchanged. Raises NotMeasured where there is nothing real to run."""
    data = job.batch if data is None else data
    if not isinstance(job.model, nn.Module):
        raise NotMeasured("the model is given as a function, so there is no real one to run")
    rows, there = rows_of(job.batch), rows_of(data)
    if rows is None or there is None:
        raise NotMeasured("the tensors of the batch do not share their first dimension")
    if [t.shape[1:] for t in tensors_of(job.batch)] != [t.shape[1:] for t in tensors_of(data)]:
        raise NotMeasured("there is no batch with data of that size")
    known: dict[int, Prediction] = {}
    whole = dataclasses.replace(job, batch=_part(data, there))
    for n in (there,) if _has_rows_by_number(whole, there) else sorted({min(n, there) for n in ROWS}):
        try:
            known[n] = _steps(dataclasses.replace(job, batch=_part(data, n)))
        except NotMeasured:
            raise
        except Exception:  # the user's: the batch's size is written into the program
            if there != rows or n == there:
                raise
            known = {there: _steps(whole)}
            break
    if len(known) == 1 and rows not in known:
        raise NotMeasured(ONE_SIZE)
    return _extended(job, known, rows)


def _has_rows_by_number(job: FitRequest, rows: int) -> bool:
    """Whether, on an accelerator, the job must not be run with fewer rows (see `RowsByNumber`)."""
    if all(p.device.type == "cpu" for p in job.model.parameters()):
        return False
    model, _, batch = _placed(job)
    quiet = contextlib.suppress(torch.OutOfMemoryError)
    with unchanged_state(), torch.no_grad(), RowsByNumber(model, rows) as watch, quiet:
        loss_call(job.loss_fn)[0](model, batch)
    return watch.seen


def _extended(job: FitRequest, known: dict[int, Prediction], rows: int) -> MeasuredPrediction:
    sizes = sorted(known)
    last = known[sizes[-1]]
    if len(sizes) == 1 or sizes[-1] == rows:
        return MeasuredPrediction(last, known, True)
    before = known[sizes[-2]]
    steps = (rows - sizes[-1]) / (sizes[-1] - sizes[-2])
    if [b.op for b in before.trace.blocks] == [b.op for b in last.trace.blocks]:
        wide = [
            max(0, round(b.size + (b.size - a.size) * steps)) for a, b in zip(before.trace.blocks, last.trace.blocks)
        ]
        return MeasuredPrediction(resized(last, wide, job.cuda), known, True)
    growing = ("activations", "temporaries", "inputs")
    part = sum(last.at_peak[name] for name in growing) or 1
    factor = max(0.0, 1 + (last.peak - before.peak) * steps / part)
    wide = [round(b.size * factor) if b.category in growing else b.size for b in last.trace.blocks]
    return MeasuredPrediction(resized(last, wide, job.cuda), known, False)


def _part(batch: Any, rows: int) -> Any:
    def first(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise NotMeasured("the batch has shapes and no data")
        return tensor[:rows] if tensor.dim() else tensor

    return mapped(first, batch)


def _placed(job: FitRequest) -> tuple[nn.Module, Any, Any]:
    """Copies of model and optimizer, and the batch where they are."""
    model, optimizer = _copies(unwrapped(job.model)[0], job.optimizer)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if job.change is not None:
        job.change(model)
    return model, optimizer, tree_map_only(torch.Tensor, lambda t: t.to(device), job.batch)


def _steps(job: FitRequest) -> Prediction:
    """Real steps of a copy, recorded."""
    model, optimizer, batch = _placed(job)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    recorder = MetaRecorder(device.type, OnCuda(CardModel.here(job.device)) if job.cuda else None)
    with unchanged_state():
        run(job, recorder, model, optimizer, batch, lambda loss: loss.backward())
    return prediction_of(job, recorder, model)


def _copies(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Raises NotMeasured for a model that can't be copied."""
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            return copy.deepcopy((model, optimizer))
        model = copy.deepcopy(model)
    except Exception as error:
        raise NotMeasured(f"the model can't be copied ({type(error).__name__})") from error
    return model, optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer is not None else None


MOST = 1 << 22
CHECKS = 3


@dataclasses.dataclass(frozen=True)
class Largest:
    """what: "rows", "length" or "side"; now: as it is given; most: that fits (0: not even one); peak: bytes allocated
    there; needs: what has to be there (None where nothing fits)."""

    what: str
    now: int
    most: int
    peak: int | None = None
    needs: int | None = None


def within(job: FitRequest, prediction: Prediction, limit: int | None) -> tuple[bool | None, int]:
    """(whether a predicted step runs through within a limit of bytes, what it needs there). On a card that is what the
    allocator reserves; near the limit it gives segments back, and so may do with less than it would take."""
    if limit is None or not job.cuda:
        return None if limit is None else prediction.peak <= limit, prediction.needs
    held = allocator.replay(prediction.trace.events, [b.size for b in prediction.trace.blocks], limit)
    return held.failed is None, prediction.needs if held.failed is not None else held.reserved


def fits(job: FitRequest, prediction: Prediction, limit: int) -> bool:
    """Whether a predicted step runs through within a limit of bytes."""
    return bool(within(job, prediction, limit)[0])


def with_rows(job: FitRequest, rows: int) -> FitRequest:
    """The same job with another number of samples. Raises ValueError where the batch's tensors do not share their first
    dimension."""
    now = rows_of(job.batch)
    if now is None:
        raise ValueError(
            "the tensors of the batch do not share their first dimension, so that the number of samples is not known"
        )
    return dataclasses.replace(job, batch=resized_argument(job.batch, lambda s: (rows, *s[1:]) if s else s))


def largest_batch(job: FitRequest, limit: int, known: dict[int, Prediction], checks: int = CHECKS) -> Largest | None:
    """The most rows that fit. known: predictions by rows, extended here; checks: how often an answer by lines is
    predicted in full (0: it is taken as it is). None where the batch can't be changed."""
    now = rows_of(job.batch)
    if now is None or now < 1:
        return None

    def at(rows: int) -> Prediction:
        if rows not in known:
            known[rows] = predict(with_rows(job, rows))
        return known[rows]

    at(now), at(2 * now)
    best, floor, ceiling = 0, 0, MOST
    if not checks:
        best = by_lines(job, known, limit, floor, ceiling)
    for _ in range(checks):
        guess = by_lines(job, known, limit, floor, ceiling)
        if guess <= floor:
            break
        if not fits(job, at(guess), limit):
            ceiling = guess - 1
            continue
        best = floor = guess
        further = guess + max(1, guess // 25)  # fragmentation is no straight line: is there room for a little more?
        if further > ceiling or not fits(job, at(further), limit):
            break
        best = floor = further
    result = known.get(best)
    return Largest(
        "rows", now, best, result.peak if result else None, within(job, result, limit)[1] if result else None
    )


def by_lines(job: FitRequest, known: dict[int, Prediction], limit: int, floor: int, ceiling: int) -> int:
    """The most rows between floor and ceiling that fit if sizes are straight lines through the two predictions that are
    nearest to where the limit lies."""
    order = sorted(known, key=lambda rows: abs((known[rows].reserved or known[rows].peak) - limit))
    pair = next(
        ((a, b) for n, a in enumerate(order) for b in order[n + 1 :] if same_sequence(known[a], known[b])), None
    )
    if pair is None:
        return _by_peak(known, limit, floor, ceiling)
    first, second = (known[rows] for rows in pair)
    lines = [(a.size, (b.size - a.size) / (pair[1] - pair[0])) for a, b in zip(first.trace.blocks, second.trace.blocks)]
    events = first.trace.events

    def good(rows: int) -> bool:
        sizes = [max(0, round(size + slope * (rows - pair[0]))) for size, slope in lines]
        if not job.cuda:
            return first.trace.replay(sizes).bytes <= limit
        return allocator.replay(events, sizes, limit).failed is None

    return most(good, floor, ceiling)


def same_sequence(first: Prediction, second: Prediction) -> bool:
    """Whether two predictions are the same sequence of allocations; some frees may change places."""
    return [b.op for b in first.trace.blocks] == [b.op for b in second.trace.blocks]


def _by_peak(known: dict[int, Prediction], limit: int, floor: int, ceiling: int) -> int:
    """Where the sequences differ: a straight line through the two largest totals."""
    (low, a), (high, b) = sorted((rows, p.reserved or p.peak) for rows, p in known.items())[-2:]
    slope = (b - a) / (high - low)
    return ceiling if slope <= 0 else max(floor, min(ceiling, int(low + (limit - a) / slope)))


def most(good: Callable[[int], bool], floor: int, ceiling: int) -> int:
    """The largest whole number that is good, if all smaller ones are too. floor is taken to be good."""
    low, high = floor, max(floor, 1)
    while high < ceiling and good(high):
        low, high = high, high * 2
    high = min(high, ceiling + 1)
    if high > ceiling and good(ceiling):
        return ceiling
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def dimensions(batch: Any) -> list[tuple[str, int]]:
    """What else of a batch has a size of its own: ("length", 1024) of token ids, ("side", 224) of images."""
    sizes: list[tuple[str, int]] = []
    for tensor in tensors_of(batch):
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > 8:
            sizes.append(("length", tensor.shape[1]))
        if tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] and tensor.shape[2] > 8:
            sizes.append(("side", tensor.shape[3]))
    return list(dict.fromkeys(sizes))[:1]


def with_size(job: FitRequest, now: int, size: int) -> FitRequest:
    """The same job with a sequence or an image of another size: every dimension behind the first that has it."""
    return dataclasses.replace(
        job, batch=resized_argument(job.batch, lambda s: (*s[:1], *(size if n == now else n for n in s[1:])))
    )


def largest_size(job: FitRequest, limit: int, what: str, now: int, here: Prediction) -> Largest | None:
    """The longest sequence or largest image that fits, by a few predictions; to within 3%. None where the model does
    not take another size."""
    known: dict[int, Prediction | None] = {now: here}
    step = 32 if what == "side" else 1

    def at(size: int) -> Prediction | None:
        if size not in known:
            try:
                known[size] = predict(with_size(job, now, size))
            except Exception:  # a model that takes one size alone refuses: then this is no remedy
                known[size] = None
        return known[size]

    def good(size: int) -> bool:
        result = at(size)
        return result is not None and fits(job, result, limit)

    low, high = (now, 4 * now) if good(now) else (0, now)
    if low and not good(low + step):
        high = low + step
    while high - low > max(step, low // 32):
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        if good(middle):
            low = middle
        else:
            high = middle
    if not low and not any(p for size, p in known.items() if size != now):
        return None
    result = known.get(low)
    return Largest(what, now, low, result.peak if result else None, within(job, result, limit)[1] if result else None)
