"""A prediction: a copy of the training without data, a few steps of it recorded, and what the recording says.

Nothing is computed and nothing is allocated on a device; the user's model, optimizer, batch and random numbers are as
before afterwards.
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
from nbdebug.observe.validation import loss_call, wrong_type
from nbdebug.tools.memory.predict.allocator import as_on_cuda
from nbdebug.tools.memory.predict.job import (
    FitRequest,
    Prediction,
    mapped,
    prediction,
    resized,
    root,
    rows_of,
    tensors_of,
)
from nbdebug.tools.memory.predict.meta_copy import MetaCopy, converting, unwrapped
from nbdebug.tools.memory.predict.meta_trace import MetaRecorder
from nbdebug.tools.memory.predict.workspaces import CardModel, OnCuda, on_cpu


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


def _steps(job: FitRequest) -> Prediction:
    """Real steps of a copy, recorded."""
    model, optimizer = _copies(unwrapped(job.model)[0], job.optimizer)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = tree_map_only(torch.Tensor, lambda t: t.to(device), job.batch)
    if job.change is not None:
        job.change(model)
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
