"""A prediction: the mirror of a training, a few steps recorded, and what the recording says.

Nothing is computed and nothing is allocated on a device; the user's model, optimizer, batch and random numbers are as
before afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.memory.fitting.asking import Ask, asked, tensors_of
from nbdebug.chapters.memory.fitting.hidden import Card, OnCuda, on_cpu
from nbdebug.chapters.memory.fitting.job import Job, Prediction, prediction
from nbdebug.chapters.memory.fitting.mirror import Mirror, converting, unwrapped
from nbdebug.chapters.memory.fitting.steering import as_on_cuda
from nbdebug.chapters.memory.fitting.trace import Recorder


def predict(job: Job) -> Prediction:
    """The steps of a job over tensors without data. Raises what the user's code raises there (see `failed`)."""
    with undisturbed(), contextlib.ExitStack() as stack:
        pretended = torch.device("cpu") if job.emulated else _indexed(job.device)
        if job.emulated:
            stack.enter_context(as_on_cuda())
        stack.enter_context(converting())
        mirror = Mirror(pretended)
        try:
            return _recorded(job, mirror, copied=True)
        except _Refused:
            return _recorded(job, Mirror(pretended), copied=False)


class _Refused(Exception):
    """The model can't be copied, or the loss is not that of the copy."""


def _indexed(device: torch.device) -> torch.device:
    bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if bare else device


def _recorded(job: Job, mirror: Mirror, copied: bool) -> Prediction:
    hidden = OnCuda(Card.here(job.device)) if job.cuda else on_cpu
    recorder = Recorder(mirror.device.type, hidden)
    with contextlib.ExitStack() as stack:
        model = _model(job, mirror, copied, stack)
        if job.change is not None:
            job.change(model)
        with mirror.mode:
            optimizer = mirror.optimizer(job.optimizer, model.parameters(), job.cuda)
        batch = mirror.batch(job.batch)
        stack.enter_context(mirror.mode)
        guard = functools.partial(_backward, model=model, given=job.model if copied else None)
        run(job, recorder, model, optimizer, batch, guard)
    return said(job, recorder, model)


def run(
    job: Job, recorder: Recorder, model: nn.Module, optimizer: Any, batch: Any, backward: Callable[[torch.Tensor], None]
) -> None:
    """The steps of a job under the recorder: tensors with or without data."""
    for group in optimizer.param_groups if optimizer is not None and job.groups else ():
        group.update(job.groups)
    recorder.mark(0, "start")
    _present(recorder, model)
    for tensor in tensors_of(batch):
        recorder.born(tensor, category="inputs")
    _states(recorder, optimizer)
    away = _named(recorder, model)
    try:
        with recorder:
            for step in range(job.steps):
                _step(job, recorder, model, optimizer, batch, step, backward)
    finally:
        recorder.closed = True
        away()


def said(job: Job, recorder: Recorder, model: nn.Module) -> Prediction:
    """The prediction that a recording gives."""
    parameters = {id(p): p for p in model.parameters()}.values()
    return prediction(
        recorder.trace,
        job.cuda,
        sum(p.numel() * p.element_size() for p in parameters),
        sum(p.requires_grad for p in parameters),
        tuple(sorted(recorder.doubts)),
    )


def _model(job: Job, mirror: Mirror, copied: bool, stack: contextlib.ExitStack) -> nn.Module:
    if not isinstance(job.model, nn.Module):
        with mirror.mode, mirror.device:
            model = job.model()
        if not isinstance(model, nn.Module):
            raise TypeError(
                "model has to be a torch.nn.Module or a function that builds one; the function returned "
                f"{type(model).__name__}"
            )
        return model
    model = unwrapped(job.model)[0]
    if not copied:
        return stack.enter_context(mirror.exchanged(model))
    try:
        return mirror.copied(model)
    except Exception as error:  # locks, handles, what else a user's module holds
        raise _Refused from error


def _present(recorder: Recorder, model: nn.Module) -> None:
    """Parameters and buffers are there before the first step, each at its module, as `model.to(device)` makes them."""
    for name, module in model.named_modules():
        recorder.modules.append(name)
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            for tensor in tensors.values():
                if tensor is not None and recorder.number_of(tensor) is None:
                    recorder.born(tensor, category=kind)
        recorder.modules.pop()


def _named(recorder: Recorder, model: nn.Module) -> Callable[[], None]:
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
    job: Job,
    recorder: Recorder,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    step: int,
    backward: Callable[[torch.Tensor], None],
) -> None:
    ask = asked(job.loss_fn)
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
                recorder.belongs(recorder.born(parameter.grad, category="gradients"), parameter)
    recorder.mark(step, "optimizer")
    if optimizer is not None:
        optimizer.step()
        _states(recorder, optimizer)


def _loss(job: Job, ask: Ask, model: nn.Module, batch: Any) -> torch.Tensor:
    casting = contextlib.nullcontext() if job.half is None else torch.autocast(job.device.type, job.half)
    with torch.enable_grad(), casting:
        loss = ask(model, batch)
    return (loss.float().mean() if loss.dim() else loss) / job.accumulate if job.accumulate > 1 or loss.dim() else loss


def _states(recorder: Recorder, optimizer: Any) -> None:
    """Name the memory of the optimizer's state."""
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value is not parameter:
                recorder.belongs(recorder.born(value, category="optimizer state"), parameter)


def _backward(loss: torch.Tensor, model: nn.Module, given: Any) -> None:
    """The backward; real tensors that the loss leads to get no gradient from it. given: the user's model where this one
    is a copy of it: a loss that leads to its parameters is not that of the copy."""
    own = {id(p) for p in model.parameters()}
    strangers = [leaf for leaf in _leaves(loss) if id(leaf) not in own]
    if isinstance(given, nn.Module) and {id(p) for p in given.parameters()} & {id(s) for s in strangers}:
        raise _Refused
    before = [(leaf, leaf.grad) for leaf in strangers]
    try:
        loss.backward()
    finally:
        for leaf, grad in before:
            leaf.grad = grad


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node: Any = todo.pop()
        if node is None:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers are as before afterwards; compiled code runs in eager, where there is such."""
    states = random.getstate(), torch.get_rng_state()
    numpy = _numpy()
    kept = numpy.random.get_state() if numpy else None
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with stance, torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy:
            numpy.random.set_state(kept)


def _numpy() -> Any:
    return sys.modules.get("numpy")
