"""`mem()`: where the memory is now; `mem(step)`: what a step needs at its peak, and what every step leaves behind."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdebug.arguments import Subject, found
from nbdebug.observe.validation import models_of, optimizers_of
from nbdebug.report import Report


def mem(
    step: Callable[[], Any] | None = None,
    *,
    steps: int = 3,
    model: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    names: Mapping[str, Any] | None = None,
    device: Any = None,
    progress: bool = True,
) -> Report:
    """Without a step: all that is held in memory now, by owner. With one: the step run under watch.

    step: a function of no arguments that performs one whole training or evaluation step; it is called `steps` times,
    and trains as it always does. A leak is judged over several calls, so with `steps=1` only the peak is told; where
    something grows, one more call is traced for the line that puts it where it stays. model, optimizer: one, or several
    in a list or a dict; loader: a DataLoader, whose workers are looked at. Left out, they are looked for among `names`,
    the user's variables (default: those of the caller), and what the step uses. device: to report on ("cuda:0"); left
    out, the accelerator that the step uses most, else the CPU. progress: show a bar where it takes longer than two
    seconds.

    All sizes are bytes. The report's tables tell the peak by use, module and line, the optimizer's state by parameter,
    and what each step left. On CUDA the allocator's own peak statistics are started anew with every step. Compiled code
    runs in eager meanwhile. What the step raises passes unchanged, with what was seen before it as its `report`; raises
    TypeError or ValueError for arguments that make no sense.
    """
    near = _callers(sys._getframe(1)) if names is None else names
    if step is None:
        return _held(model, optimizer, near, device)
    check(step, steps)
    around = {**near, **_used_by(step)}
    models = found("model", around) if model is None else models_of(model)
    optimizers = found("optimizer", around) if optimizer is None else optimizers_of(optimizer)
    loaders = loaders_of(loader, around)
    subject = str(Subject(models, optimizers, model is not None))
    return follow_step(step, models, optimizers, loaders, near, "mem(step)", subject, steps, device, progress)


def follow_step(
    step: Callable[[], Any],
    models: dict[str, Any],
    optimizers: dict[str, Any],
    loaders: dict[str, Any],
    names: Mapping[str, Any],
    question: str,
    subject: str,
    steps: int = 3,
    device: Any = None,
    progress: bool = True,
    files: tuple[str, ...] = (),
) -> Report:
    """What `mem(step)` and the magics do, once it is known what is meant. steps=1: a cell, which runs once. files: in
    which code stands that no function holds, such as a cell."""
    from nbdebug.tools.memory.step.report import report_of
    from nbdebug.tools.memory.step.run import StepRequest, StepsFollowed, followed
    from nbdebug.tools.memory.step.workers import look_at

    asked = StepRequest(
        step, models, optimizers, names, steps, None if device is None else _device(device), progress, files
    )
    course = StepsFollowed()
    try:
        followed(asked, course)
    except Exception as raised:  # the step's own; a worker that was killed may well be why
        facts = dataclasses.replace(course.facts(), workers=look_at(loaders))
        raised.report = report_of(facts, question, subject)  # type: ignore[attr-defined]
        raise
    return report_of(dataclasses.replace(course.facts(), workers=look_at(loaders)), question, subject)


def check(step: Any, steps: Any) -> None:
    """Raises TypeError or ValueError where the arguments make no sense."""
    if isinstance(step, torch.nn.Module):
        raise TypeError(
            f"mem takes a step to call, not a model; got {type(step).__name__}. Write mem(model=model) for "
            "what it holds, or mem(lambda: loss_fn(model(x), y).backward(), model=model)."
        )
    if not callable(step):
        raise TypeError(
            f"mem takes a step, a function of no arguments such as lambda: train_step(batch); got {step!r}."
        )
    try:
        parameters = inspect.signature(step).parameters.values()
    except ValueError:  # builtins without a signature are called as they are
        parameters = ()  # type: ignore[assignment]
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        name = getattr(step, "__name__", "step")
        raise TypeError(
            f"The step takes no arguments, but {name} wants {', '.join(needed)}. "
            f"Write mem(lambda: {name}({', '.join(needed)}))."
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps is a whole number of at least 1; got {steps!r}.")


def _held(model: Any, optimizer: Any, names: Mapping[str, Any], device: Any) -> Report:
    from nbdebug.tools.memory.owners.report import held_report

    return held_report(model, optimizer, names, device=device)


def _callers(frame: Any) -> dict[str, Any]:
    """The variables of the function that asks, and of its file or notebook."""
    return {**frame.f_globals, **frame.f_locals}


def _used_by(step: Any) -> dict[str, Any]:
    """The variables of the step's closure and the globals that it names."""
    function: Any = inspect.unwrap(getattr(step, "func", None) or getattr(step, "__func__", step))
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    held = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not given a value yet
            continue
    own = getattr(step, "__self__", None)
    return {**held, **(getattr(own, "__dict__", None) or {})}


def loaders_of(given: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders by name: those that are given, or else every DataLoader among the variables."""
    if given is None:
        kept = {
            id(v): (n, v)
            for n, v in names.items()
            if isinstance(v, torch.utils.data.DataLoader) and not n.startswith("_")
        }
        return dict(kept.values())
    several = (
        given
        if isinstance(given, Mapping)
        else dict(enumerate(given))
        if isinstance(given, (list, tuple))
        else {next((n for n, v in names.items() if v is given), "loader"): given}
    )
    return {str(name): loader for name, loader in several.items()}


def _device(given: Any) -> str:
    """ "cuda" means the card that is in use. Raises ValueError for no device."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f'device is a device such as "cuda:0" or "cpu"; got {given!r}') from wrong
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
