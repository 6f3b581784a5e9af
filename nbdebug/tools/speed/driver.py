"""The user's training, called step by step or as the loop that it is; experiments in a copy of the process.

    run = drive(training, clock, steps)      the user's own, as it always trains
    apart(training, experiment)              in a copy: what it does to models, files and generators is gone with it

In a copy nothing reaches the disk: files are written to a folder that is deleted, and nothing is removed or renamed.
Where a GPU is in use there is no copy: a step that can be wound back is, others are not experimented with.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from nbdebug.observe.snapshot import StepState
from nbdebug.observe.step_hooks import TrainingStopped, stop_training
from nbdebug.process import can_copy, in_copy
from nbdebug.tools.speed.clock import DATA, DRIVERS, Clock, Patches

FEW = 6
"""Steps that are run whatever they take."""


@dataclasses.dataclass
class Training:
    """call: a step of no arguments, a step of a batch (then with its loader), or a whole loop (`whole`). losses: what
    the steps gave, as far as they gave numbers."""

    call: Callable[..., Any]
    models: dict[str, Any]
    optimizers: dict[str, Any]
    loader: Any = None
    whole: bool = False
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[Any] = dataclasses.field(default_factory=list)

    def clock(self, ended: Callable[[int], None], looking: bool = False) -> Clock:
        return Clock(self.optimizers.values(), ended, driven=not self.whole, looking=looking)


def needs_batch(step: Callable[..., Any]) -> bool:
    """Whether a step must be given exactly one thing."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1


def drive(training: Training, clock: Clock, steps: int) -> None:
    """Call the training until `steps` steps have ended, its data have, or what the clock calls has stopped it."""
    batches = endless(training.loader) if training.loader is not None else None
    try:
        while len(clock.steps) < steps:
            before = len(clock.steps)
            if batches is not None:
                clock.enter(DATA)
                try:
                    batch = next(batches)
                finally:
                    clock.leave()
                clock.samples(batch)
                result = training.call(batch)
            else:
                result = training.call()
            _note(training, result)
            clock.updates_since = 0
            if clock.driven:
                clock.tick()
            elif training.whole or len(clock.steps) - before >= FEW or len(clock.steps) == before:
                break
    except TrainingStopped:
        pass
    except SystemExit:  # Lightning's way to end on an interrupt
        if len(clock.steps) < steps:
            raise
    except StopIteration:
        if not clock.steps:
            raise


DRIVERS.add(drive.__code__)


def endless(loader: Any) -> Iterator[Any]:
    """The batches of a loader, again from the start where they end; of an iterator until it ends."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty or isinstance(loader, Iterator):
            return


def _note(training: Training, result: Any) -> None:
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    loss = loss.get("loss") if isinstance(loss, dict) else loss
    if isinstance(loss, (int, float)):
        training.losses.append(loss)
    elif isinstance(loss, torch.Tensor) and loss.numel() == 1:
        with _disable_current_modes():
            training.losses.append(loss.detach())  # read at the end: a step has no wait of ours


def until(steps: int, seconds: float) -> Callable[[int], None]:
    """Ends a training after so many steps, or after so many seconds where FEW steps have ended."""
    begun: list[float] = []

    def ended(number: int) -> None:
        begun.append(time.monotonic())
        if number >= steps or (number >= FEW and begun[-1] - begun[0] > seconds):
            stop_training()

    return ended


def apart(training: Training, experiment: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What an experiment gives, made in a copy of this process that writes nothing; where a GPU is in use, in this one,
    with all put back that the step changes. None where neither can be, or where it failed: an experiment is no part of
    the user's training."""

    def harmless() -> Any:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.callback(_write_into(folder).undo)  # the folder itself is to be removed
            return experiment()

    try:
        return in_copy(harmless, seconds) if can_copy() else _put_back(training, harmless)
    except Exception:
        return None


def _put_back(training: Training, experiment: Callable[[], Any]) -> Any:
    """None for what can't be wound back, such as an iterator of a loader, or a generator of the loader's."""
    if isinstance(training.loader, Iterator) or getattr(training.loader, "generator", None) is not None:
        return None
    state = StepState.take(training.call, training.models, training.optimizers, writes=True)
    if state.why_not:
        return None
    before = training.loader, list(training.losses)
    try:
        state.restore()
        return experiment()
    finally:
        state.leave()
        training.loader, training.losses[:] = before


def _write_into(folder: str) -> Patches:
    """What the copy opens to write goes into this folder; it removes and renames nothing of the user's."""
    real, names = builtins.open, dict[str, str]()

    def other(path: Any) -> Any:
        if isinstance(path, (str, os.PathLike)):
            return names.setdefault(os.path.abspath(os.fspath(path)), os.path.join(folder, str(len(names))))
        return path

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = set(mode) & set("wax+")
        if isinstance(file, (str, os.PathLike)) and (writes or os.path.abspath(os.fspath(file)) in names):
            file = other(file)
        return real(file, mode, *args, **kwargs)

    save = torch.save

    def saved(thing: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return save(thing, other(f), *args, **kwargs)

    changes: list[tuple[Any, str, Any]] = [(builtins, "open", opened), (torch, "save", saved)]
    changes += [(os, name, _nothing) for name in ("remove", "unlink", "rename", "replace", "rmdir")]
    changes += [(shutil, name, _nothing) for name in ("move", "rmtree")]
    patches = Patches()
    for module, name, function in changes:
        patches.put(module, name, functools.partial(_instead, function))
    return patches


def _instead(function: Any, original: Any) -> Any:
    return function


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def workers_without_modes(patches: Patches) -> None:
    """A mode that is on while a loader's workers start would be copied into them, and break them."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                original(self, *args, **kwargs)

        return __init__

    patches.put(dataloader._MultiProcessingDataLoaderIter, "__init__", made)
