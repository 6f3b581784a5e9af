"""The clock of a training: whose time each moment of a step is, from where torch itself is entered and left; and the
training under it, called step by step or as the loop that it is.

    run(training, steps).steps               # StepTimes, one for each step, of the user's loop, or step by step
    apart(training, experiment)              # in a copy: what it does to models, files and generators is gone with it

Nothing of the models is hooked, so that compiled code stays as it is: the loader's `__next__`, autograd's engine, the
optimizers' hooks, `Module.train` (validation is what a trained model does in eval mode), and the functions that write
files or move and read tensors. On a GPU the host's time lies: there some steps are synchronised at each border, and
tell the phases; others run as always, FREE in a row, and tell how long a step takes. A thread looks where the user's
code is, each few milliseconds, and weighs a look by the time since the last one.

In a copy nothing reaches the disk: files are written to a folder that is deleted, and nothing is removed or renamed.
Where a GPU is in use there is no copy: a step that can be wound back is, others are not experimented with.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import functools
import gc
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from nbdebug.interrupts import uninterrupted
from nbdebug.observe.backward import EngineWatch, OptimizerWatch
from nbdebug.observe.locations import Site, StackLines, locate, site_of, users_frames
from nbdebug.observe.snapshot import StepState
from nbdebug.observe.step_hooks import Patches, TrainingStopped, stop_training
from nbdebug.observe.tensors import tensors_in
from nbdebug.process import can_copy, in_copy
from nbdebug.tools.speed.rules import ANOMALY, BLOCKING, DATA, DETERMINISTIC, FREE, PROFILER, StepTimes

LOOK = 0.005
"""Seconds between two looks at the user's code: 1.02 to 1.08 of a step; each millisecond would cost up to 1.3."""
ENDINGS = (os.fsync, os.replace, os.rename)
"""What ends a save: a large file that is replaced is deleted then. The time counts for the writer's line."""
WRITERS = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("pickle", "dump"),
    ("shutil", "copyfile"),
    *(("os", ending.__name__) for ending in ENDINGS),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("numpy", "save"),
    ("numpy", "savez"),
    ("numpy", "savez_compressed"),
    ("torch.distributed.checkpoint", "save"),
)
COLLECTIVES = tuple(
    ("torch.distributed", name)
    for name in "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor broadcast barrier "
    "all_to_all all_to_all_single gather scatter reduce".split()
)
MOVES, READS = ("to", "cuda", "pin_memory"), ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
FORWARD, REST = "forward", "rest"
SYNCED = 2
"""Steps with a wait at each border, after FREE ones."""
LOOP_UPDATES = 3
"""Updates of one optimizer in one call: it is a loop then, and no step."""
RECOMPILED = "torch._dynamo.convert_frame", "get_and_maybe_log_recompilation_reasons"
ASIDE = frozenset({DATA, "saving"})
"""What runs then is no part of the model's work."""


class Clock:
    """See `run`. driven: the caller says when a step ends (`tick`); else each update of the first optimizer that steps
    ends one. update: the lines on the stack of the first update; recompiles: torch's words on each compilation that it
    repeated since a guard failed, and the line that called the code, if any. aside, batch: called where work that is
    not the model's begins and ends, and with each batch. lines: seconds in which each of the user's lines
    was the innermost; stacks: of all lines on the stack, the innermost first, outside of loader, backward and
    optimizer. places: by phase the seconds that end at each of the user's lines, where files are written and tensors
    moved. modes: how often backward began with each of torch's modes for
    debugging on."""

    def __init__(
        self, training: Training, ended: Callable[[Clock, int], Any], waits: Callable[[int], int], looking: bool
    ) -> None:
        self.parameters: dict[int, Any] = {}
        self._judges_eval = True
        for optimizer in training.optimizers.values():
            self._learn(optimizer)
        self.ended, self.waits, self.driven = ended, waits, not training.whole
        self.cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.steps: list[StepTimes] = []
        self.lines: dict[Site, float] = collections.defaultdict(float)
        self.stacks: dict[tuple[Site, ...], float] = collections.defaultdict(float)
        self.places: dict[str, dict[Site, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
        self.writes: collections.Counter[str] = collections.Counter()
        self._saved: Site | None = None
        self.validations: list[tuple[Site, ...]] = []
        self.update: tuple[Site, ...] = ()
        self.recompiles: list[tuple[str, tuple[Site, ...]]] = []
        self.modes: collections.Counter[str] = collections.Counter()
        self.backwards, self.eval_batches, self.workers, self.updates_since = 0, 0, 0, 0
        self.batch: Callable[[Any], None] = lambda batch: None
        self.aside: Callable[[bool], None] = lambda aside: None
        self._patches = Patches()
        self._stack: list[str] = []
        self._phases: dict[str, float] = collections.defaultdict(float)
        self._thread = threading.get_ident()
        self._engine = EngineWatch(lambda call: self._backward(), lambda call, result: self.leave())
        self._engine.thread = self._thread
        self._updates = OptimizerWatch(self._before_update, self._after_update, self._thread)
        self._over = threading.Event()
        self._looks = threading.Thread(target=self._look, name="nbdebug-speed", daemon=True) if looking else None
        self._begin(time.perf_counter())
        self._first_optimizer: int | None = None

    def _begin(self, now: float) -> None:
        self._last, self._before_backward, self._eval, self._compiled, self._samples = now, True, False, False, 0
        self._started = False

    # -- the time between two borders belongs to the one that was entered last ---------------------------------------

    @property
    def label(self) -> str:
        own = FORWARD if self._before_backward else REST
        entered = self._stack[-1] if self._stack else own
        return "validating" if self._eval and entered in (own, DATA, "copy", "synchronisation") else entered

    def mark(self, least: int = 2) -> None:
        if self.cuda and self.waits(len(self.steps)) >= least:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._phases[self.label] += now - self._last
        self._last = now

    def enter(self, label: str) -> None:
        self.mark()
        self._stack.append(label)
        if label in ASIDE:
            self.aside(True)

    def leave(self) -> None:
        self.mark()
        if self._stack and self._stack.pop() in ASIDE:
            self.aside(not ASIDE.isdisjoint(self._stack))

    def tick(self) -> None:
        """A step has ended."""
        self.mark(1)
        if not self.backwards:
            self._phases[FORWARD] += self._phases.pop(REST, 0.0)
        if not self.steps:
            self.stacks.clear()
            self.lines.clear()  # the first step warms up; of a script it is all that comes before
        synced = self.cuda and self.waits(len(self.steps)) > 1
        self.steps.append(StepTimes(dict(self._phases), self._samples, self._compiled, self._started, synced))
        self._phases.clear()
        try:
            self.ended(self, len(self.steps))
        finally:
            self._begin(time.perf_counter())

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    # -- attach ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Clock:
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        self._begin(time.perf_counter())
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._looks is not None and self._looks.is_alive():
            self._looks.join(1.0)
        self._patches.undo()
        self._updates.detach()
        self._engine.detach()

    @uninterrupted
    def _attach(self) -> None:
        put = self._patches.put
        put(dataloader._BaseDataLoaderIter, "__next__", self._next)
        put(dataloader.DataLoader, "__iter__", self._iterated)
        put(torch.nn.Module, "train", self._train)
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        for label, functions in (("saving", WRITERS), ("communication", COLLECTIVES if ranks else ())):
            self._patches.put_loaded(functions, functools.partial(self.timed, label))
        if self.cuda:
            for name in MOVES:
                put(torch.Tensor, name, functools.partial(self.timed, "copy"))
            for name in READS:
                put(torch.Tensor, name, functools.partial(self.timed, "synchronisation"))
        self._patches.put_loaded([RECOMPILED], self._recompiling)
        self._engine.attach()
        self._updates.attach()
        if self._looks is not None:
            self._looks.start()

    def timed(self, label: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A call whose time belongs to this label."""
        inside = self._stack[-1:] == [label] or label == "copy" and DATA in self._stack  # a loader that pins
        if not self._here() or inside or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        self.writes[original.__name__] += label == "saving"
        self.enter(label)
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            if label in ("saving", "copy"):
                site = original in ENDINGS and self._saved or locate().site or Site("?", 0, "")
                self._saved = site if label == "saving" else self._saved
                self.places[label][site] += time.perf_counter() - begin
            self.leave()

    def _iterated(self, original: Callable[..., Any], loader: Any) -> Any:
        self._started |= self._here() and not self._eval and loader.num_workers > 0 and loader._iterator is None
        return self.timed(DATA, original, loader)

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = self.timed(DATA, original, iterator)
        if self._eval:
            self.eval_batches += self._here()
        elif self._here():
            self.workers = iterator._num_workers
            self._take(batch)
        return batch

    def samples(self, batch: Any) -> None:
        """A step's batch, where no loader of torch's told it yet."""
        if not self._samples:
            self._take(batch)

    def _take(self, batch: Any) -> None:
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        self._samples += len(tensors[0]) if tensors else 0
        self.batch(batch)

    def _train(self, original: Callable[..., Any], module: Any, mode: bool = True) -> Any:
        turned = self._eval is bool(mode) and module.training is not mode
        trained = turned and self._judges_eval and any(id(p) in self.parameters for p in module.parameters())
        if trained and self._here():
            self.mark()
            self._eval = not mode
            if self._eval:
                self.validations.append(users_lines())
        return original(module, mode)

    def _backward(self) -> None:
        if self._eval:  # trained in eval mode: no validation
            self.mark()
            self._eval = False
            self._phases[FORWARD] += self._phases.pop("validating", 0.0)
            self._judges_eval = False
        self.backwards += 1
        self.modes.update(debug_modes())
        self.enter("backward")
        self._before_backward = False

    def _learn(self, optimizer: Any) -> None:
        """What an optimizer trains."""
        self.parameters |= {id(p): p for group in optimizer.param_groups for p in group["params"]}

    def _before_update(self, optimizer: Any, stack: StackLines) -> None:
        self.update = self.update or users_lines()
        self.enter("optimizer")

    def _after_update(self, optimizer: Any) -> None:
        self.leave()
        if self._first_optimizer is None:
            self._first_optimizer = id(optimizer)
            self._learn(optimizer)
        if id(optimizer) == self._first_optimizer:
            self.updates_since += 1
            if self.updates_since >= LOOP_UPDATES:
                self.driven = False  # what was called is a loop of its own
            if not self.driven:
                self.tick()

    def _recompiling(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Where torch.compile repeats a compilation since a guard failed: why, and the user's line that called it."""
        result = original(*args, **kwargs)
        self.recompiles.append((str(result[-1]) if result else "", users_lines()[-1:]))
        self._compiled = True
        return result

    def _look(self) -> None:
        """The work of a thread: which of the user's lines runs. It reads frames and changes nothing."""
        last = time.perf_counter()
        while not self._over.wait(LOOK):
            frame = sys._current_frames().get(self._thread)
            now = time.perf_counter()
            stack = tuple(map(site_of, users_frames(frame, DRIVERS)))
            if stack:
                self.lines[stack[0]] += now - last
                if self.label in (FORWARD, REST, "synchronisation"):
                    self.stacks[stack] += now - last
            del frame
            last = now


def debug_modes() -> Iterator[str]:
    """Torch's modes for debugging that are on."""
    if torch.is_anomaly_enabled():
        yield ANOMALY
    if torch._C._autograd._profiler_enabled():
        yield PROFILER
    if torch.are_deterministic_algorithms_enabled():
        yield DETERMINISTIC
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" and torch.cuda.is_initialized():
        yield BLOCKING


def waits_in_turn(step: int) -> int:
    place = (step - 1) % (FREE + SYNCED)  # the first step warms up
    return 2 if place >= FREE else int(place == FREE - 1)


DRIVERS: set[CodeType] = set()
"""The functions of ours that call the user's loop: what stands above them is no part of a step."""


def users_lines() -> tuple[Site, ...]:
    """The user's lines on the stack, the outermost first."""
    return tuple(map(site_of, users_frames(sys._getframe(1), DRIVERS)))[::-1]


def branch_line(lines: tuple[Site, ...], trunk: tuple[Site, ...]) -> Site | None:
    """Of the lines on a stack the one in the innermost function that both stacks have: where a loop turns aside."""
    branch = None
    for one, other in zip(lines, trunk):
        if (one.file, one.function) != (other.file, other.function):
            break
        branch = one
        if one.line != other.line:
            break
    return branch or (lines[0] if lines else None)


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


def run(
    training: Training,
    steps: int,
    seconds: float = math.inf,
    few: int = 6,
    ended: Callable[[Clock, int], Any] = lambda clock, number: None,
    waits: Callable[[int], int] = waits_in_turn,
    looking: bool = False,
) -> Clock:
    """The training under a clock until so many steps have ended, or its data have, or so many seconds have passed since
    its first step and `few` steps are done. ended: called before the first step and after each, with their number.
    waits: by the number 2 for a step of a GPU with a wait at each border, 1 for one at its end, 0 for none. looking:
    whether a thread looks at the user's lines."""
    begun: list[float] = []

    def step_ended(clock: Clock, number: int) -> None:
        begun.append(time.monotonic())
        if number >= steps or (number >= few and begun[-1] - begun[0] > seconds):
            stop_training()
        ended(clock, number)

    with Clock(training, step_ended, waits, looking) as clock:
        ended(clock, 0)
        drive(training, clock, steps, few)
    return clock


def drive(training: Training, clock: Clock, steps: int, few: int) -> None:
    """Call the training until it has made its steps, its data have ended, or what the clock calls has stopped it."""
    batches = endless(training.loader) if training.loader is not None else None
    try:
        while len(clock.steps) < steps:
            before = len(clock.steps)
            if batches is not None:
                batch = clock.timed(DATA, next, batches)
                clock.samples(batch)
                result = training.call(batch)
            else:
                result = training.call()
            _note(training, result)
            clock.updates_since = 0
            if clock.driven:
                clock.tick()
            elif training.whole or len(clock.steps) - before >= few or len(clock.steps) == before:
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


def apart(training: Training, experiment: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What an experiment gives, made in a copy of this process that writes nothing; where a GPU is in use, in this one,
    with all put back that the step changes. None where neither can be, or where it failed: an experiment is no part of
    the user's training."""

    def harmless() -> Any:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            patches = _write_into(folder)
            stack.callback(patches.undo)  # the folder itself is to be removed
            for loader in [thing for thing in gc.get_objects() if issubclass(type(thing), dataloader.DataLoader)]:
                patches.set(loader, "_iterator", None)  # its workers are those of the original
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
    real, names, nothing = builtins.open, dict[str, str](), lambda *args, **kwargs: None

    def other(path: Any, writes: bool = True) -> Any:
        if not isinstance(path, (str, os.PathLike)):
            return path
        whole = os.path.abspath(os.fspath(path))
        return names.setdefault(whole, os.path.join(folder, str(len(names)))) if writes else names.get(whole, path)

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real(other(file, not set(mode).isdisjoint("wax+")), mode, *args, **kwargs)

    patches = Patches()
    patches.set(builtins, "open", opened)
    patches.put(torch, "save", lambda save, thing, f, *args, **kwargs: save(thing, other(f), *args, **kwargs))
    for owner, names_ in ((os, "remove unlink rename replace rmdir"), (shutil, "move rmtree")):
        for name in names_.split():
            patches.set(owner, name, nothing)
    return patches
