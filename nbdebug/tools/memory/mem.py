"""`mem()`: where the memory is now; `mem(step)`: what a step needs at its peak, and what every step leaves behind."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdebug.arguments import Subject, discover
from nbdebug.interrupts import interruptible
from nbdebug.observe.validation import check_count, check_step, models_of, names_used_by, optimizers_of
from nbdebug.report import Report, Table

CALL = "mem(step, model=, optimizer=)"


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
    and trains as it always does. A leak shows over several calls, so `steps=1` reports only the peak; where
    something grows, one more call is traced to find the line that stores it. model, optimizer: one, or several
    in a list or a dict; loader: a DataLoader, whose workers are checked. Left out, they are searched among `names`,
    the user's variables (default: those of the caller), and what the step uses. device: to report on ("cuda:0"); left
    out, the accelerator that the step uses most, else the CPU. progress: show a bar where it takes longer than two
    seconds.

    All sizes are bytes. The report's tables tell the peak by use, module and line, the optimizer's state by parameter,
    and what each step left. On CUDA the allocator's own peak statistics are reset before every step. Compiled code
    runs in eager meanwhile. What the step raises passes unchanged, with what was seen before it as its `report`; raises
    TypeError or ValueError for arguments that make no sense.
    """
    caller = sys._getframe(1)
    near = {**caller.f_globals, **caller.f_locals} if names is None else names
    if step is None:
        from nbdebug.tools.memory.owners.report import held_report

        return held_report(model, optimizer, near, device=device)
    check_step(step, "mem")
    check_count(steps, "steps")
    around = {**near, **names_used_by(step)}
    models = discover("model", around) if model is None else models_of(model, CALL, around)
    optimizers = discover("optimizer", around) if optimizer is None else optimizers_of(optimizer, CALL, around)
    loaders = loaders_of(loader, around)
    subject = str(Subject(models, optimizers, model is not None))
    return trace_step(step, models, optimizers, loaders, near, "mem(step)", subject, steps, device, progress)


@interruptible
def trace_step(
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
    which there is code outside functions, such as a cell."""
    from nbdebug.tools.memory.step.report import report_of
    from nbdebug.tools.memory.step.run import StepRequest, StepsTraced, trace_steps
    from nbdebug.tools.memory.step.workers import worker_copies

    request = StepRequest(
        step, models, optimizers, names, steps, None if device is None else _device(device), progress, files
    )
    course = StepsTraced()
    try:
        trace_steps(request, course)
    except Exception as raised:  # the step's own; a worker that was killed may well be why
        facts = dataclasses.replace(course.facts(), workers=worker_copies(loaders))
        raised.report = report_of(facts, question, subject)  # type: ignore[attr-defined]
        raise
    return report_of(dataclasses.replace(course.facts(), workers=worker_copies(loaders)), question, subject)


def loaders_of(loaders: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders by name: those that are given, or else every DataLoader among the variables."""
    if loaders is None:
        return discover("loader", names)
    if isinstance(loaders, Mapping):
        return {str(name): loader for name, loader in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return {str(number): loader for number, loader in enumerate(loaders)}
    return {next((name for name, value in names.items() if value is loaders), "loader"): loaders}


def _device(value: Any) -> str:
    """ "cuda" means the card that is in use. Raises ValueError for no device."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f'device is a device such as "cuda:0" or "cpu"; got {value!r}') from wrong
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


SAMPLE = 2000
"""Entries of a container that are measured; the rest is taken to be like them."""
WORTH = 1 << 20
"""Bytes by which a container of Python objects must have grown to be named."""


def container_sizes(names: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(identity, entries) of each dict, Counter, list, set and deque among the variables."""
    kinds = (dict, list, set, collections.deque)
    own = {name: value for name, value in names.items() if not name.startswith("_") and isinstance(value, kinds)}
    return {name: (id(value), len(value)) for name, value in own.items() if value is not names}


def growing_containers(before: Mapping[str, tuple[int, int]], names: Mapping[str, Any]) -> Table | None:
    """The variables that have grown by over 1 MiB of Python objects since then, largest first, by their deep size; None
    for none. Of more than SAMPLE entries, so many are measured."""
    from nbdebug.tools.memory.step.holders import plain_bytes

    rows, known = [], set[int]()
    for name, (identity, entries) in container_sizes(names).items():
        had = before[name][1] if before.get(name, (0, 0))[0] == identity else 0
        if entries <= had or identity in known:
            continue
        known.add(identity)
        thing = names[name]
        some = itertools.islice(thing.items() if isinstance(thing, dict) else thing, 0, None, max(1, entries // SAMPLE))
        items = list(some)
        each = plain_bytes(items) / len(items) - (sys.getsizeof(items[0]) if isinstance(thing, dict) else 0)
        whole = round(sys.getsizeof(thing) + each * entries)
        if whole * (entries - had) / entries >= WORTH:
            rows.append((name, type(thing).__name__, had, entries, whole, round(1000 * whole / entries)))
    rows.sort(key=lambda row: -row[4])
    columns = ("variable", "type", "entries before", "entries", "deep size (bytes)", "per 1,000 entries (bytes)")
    note = "Keep what is needed of each entry, write the rest to disk, or read the source in parts."
    return Table("Python containers that grew", columns, rows, note, open=True) if rows else None
