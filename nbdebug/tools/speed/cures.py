"""Experiments in a copy of the process: the same steps with one thing changed and without, in turn, in one run.

Steps with and without follow each other as off, on, on, off, …, so that what else the machine does falls on both; the
ratio of the medians is the speed-up. The first step warms up. None of it touches the user's own objects: see `driver`.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, dataloader

from nbdebug.observe.locations import USER, Site, at_site
from nbdebug.observe.modules import eager
from nbdebug.observe.snapshot import accelerators_in_use
from nbdebug.observe.sources import nodes_of
from nbdebug.observe.sources import source as text_of
from nbdebug.observe.step_hooks import stop_training
from nbdebug.observe.tensors import fingerprint, tensors_in
from nbdebug.report import Where
from nbdebug.tools.speed.clock import READS, WRITERS, Patches, code_kind, module_of, users_lines
from nbdebug.tools.speed.driver import Training, apart, drive, workers_without_modes
from nbdebug.tools.speed.facts import LongerInput, Loop, Reads, SpeedCure, WorkShare
from nbdebug.tools.speed.ops import OpWatch

PAIRS, SECONDS = 20, 2.5
"""Of an experiment: steps with and without, at most; and the time after which three of each are enough."""
LOADING_SECONDS = 1.0
Change = Callable[[Training, Patches], Callable[[bool], None]]


class Observation:
    """What the ops of a few steps showed, fit for pickle."""

    reads: tuple[Reads, ...] = ()
    double: WorkShare | None = None
    repeated: WorkShare | None = None
    growth: LongerInput | None = None
    loop: Loop | None = None
    attention: WorkShare | None = None
    loading: Where = Where()
    size: tuple[int, int] = (0, 0)
    """Ops of the last step, and the elements that they gave."""
    largest: tuple[Where, int] = (Where(), 0)
    """The line that gave most elements."""


def observe(training: Training, first: int = 0, steps: int = 3, seconds: float = 8.0) -> Observation:
    """The ops of some steps. first: how many are left out before."""
    watch = OpWatch(salted=training.loader is None and not training.whole and not _loaders(training))
    begun, last = time.monotonic(), [first + steps]

    def ended(number: int) -> None:
        late = number > first and time.monotonic() - begun > seconds
        if number >= last[0] or late:
            stop_training()
        if number == first:
            stack.enter_context(watch)
        watch.begin_step(number, clock.parameters)

    patches = Patches()
    with eager(), contextlib.ExitStack() as stack:
        stack.callback(patches.undo)
        workers_without_modes(patches)
        clock = stack.enter_context(training.clock(ended))
        hooks = watch.watch_calls(patches)
        stack.callback(lambda: [hook.remove() for hook in hooks])
        clock.batch = watch.batch

        def aside(aside: bool) -> None:
            watch.paused = aside
            if aside:
                watch.loading()

        clock.aside = aside
        watch.begin_step(0, clock.parameters)
        if first == 0:
            stack.enter_context(watch)
        drive(training, clock, first + steps)
    if clock.steps and watch.step >= len(clock.steps):
        watch.step = len(clock.steps) - 1
    return _observation(watch, training, clock.source)


def _loaders(training: Training) -> bool:
    return any(isinstance(value, DataLoader) for value in training.names.values())


def _observation(watch: OpWatch, training: Training, source: Any) -> Observation:
    seen = Observation()
    seen.reads, seen.repeated, seen.growth, seen.loop = watch.reads(), watch.repeated(), watch.growth(), watch.loop()
    seen.double = WorkShare(double_origin(watch, training), watch.double(), "float64")
    by_line: collections.Counter[Site] = collections.Counter()
    for op in watch.last:
        if op.line is not None:
            by_line[op.line] += op.elements
    seen.size = len(watch.last), sum(by_line.values())
    if by_line:
        site, elements = by_line.most_common(1)[0]
        seen.largest = at_site(Where(), site), elements
    seen.attention = slow_attention(watch)
    return seen


# -- where data take their time ----------------------------------------------------------------------------------------


def loading_line(training: Training, source: Any) -> Where:
    """The user's line at which the loader's time ends, by following its lines for a second."""
    times: collections.Counter[Site] = collections.Counter()
    last: list[Any] = [None, 0.0]

    def spend(now: float) -> None:
        if last[0] is not None:
            times[last[0]] += now - last[1]

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        spend(time.perf_counter())
        place = _users(frame.f_back) if event == "return" else frame
        last[0] = (
            Site(place.f_code.co_filename, place.f_lineno or 0, place.f_code.co_name) if place is not None else None
        )
        last[1] = time.perf_counter()
        return local

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return local if code_kind(frame.f_code) == USER else None

    items, begun = _items(training, source), time.monotonic()
    sys.settrace(called)
    try:
        for _ in items:
            if time.monotonic() - begun > LOADING_SECONDS:
                break
    finally:
        sys.settrace(None)
    site = max(times, key=lambda s: times[s], default=None)
    return at_site(Where(phase="input"), site)


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and code_kind(frame.f_code) != USER:
        if frame.f_code in (loading_line.__code__, _items.__code__):
            return None
        frame = frame.f_back
    return None if frame is not None and frame.f_code.co_filename == __file__ else frame


def _items(training: Training, source: Any) -> Iterator[Any]:
    """What the loader does for its batches, in this process and without its workers."""
    if source is None:
        yield from training.loader or ()
        return
    dataset, collate, indices = source
    if isinstance(dataset, IterableDataset):
        for item in dataset:
            yield collate([item])
        return
    for chosen in indices:
        rows = chosen if isinstance(chosen, (list, tuple)) else [chosen]
        batch = dataset.__getitems__(rows) if hasattr(dataset, "__getitems__") else [dataset[i] for i in rows]
        yield collate(batch if isinstance(chosen, (list, tuple)) else batch[0])


# -- double precision, attention ---------------------------------------------------------------------------------------


def double_origin(watch: OpWatch, training: Training) -> Where:
    """The user's line that makes values double: an op of the step's own, else an assignment that speaks of it."""
    makers = ("to_copy", "scalar_tensor", "arange", "full", "linspace")
    for op in watch.last:
        if op.double and op.phase == "forward" and op.name in makers and op.line is not None:
            return at_site(Where(phase="forward"), op.line)
    files = dict.fromkeys(op.line.file for op in watch.last if op.line is not None)
    held = {name for name, value in training.names.items() if _is_double(value)}
    ranked: list[tuple[int, Site]] = []
    for file in files:
        for node in nodes_of(file):
            if isinstance(node, (ast.Assign, ast.Expr, ast.AnnAssign, ast.Return)) and node.value is not None:
                text = text_of(file, node)
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                rank = _double_rank(text) + 2 * bool(names & held)
                if _double_rank(text):
                    ranked.append((rank, Site(file, node.lineno, "")))
    best = max(ranked, key=lambda each: each[0], default=None)
    line = next((op.line for op in watch.last if op.double and op.phase == "forward" and op.line is not None), None)
    return at_site(Where(phase="forward"), best[1] if best else line)


def _double_rank(text: str) -> int:
    if any(word in text for word in (".double()", "float64", "torch.double", "set_default_dtype", "DoubleTensor")):
        return 4
    return 1 if "from_numpy" in text or "np." in text or "numpy." in text else 0


def _is_double(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float64
    return isinstance(value, torch.nn.Module) and any(p.dtype == torch.float64 for p in value.parameters())


def slow_attention(watch: OpWatch) -> WorkShare | None:
    """Attention that runs as plain products, where a fused kernel would take the same call."""
    math, where, what = 0, None, ""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    choose: Any = torch._fused_sdp_choice
    for args, kwargs, _, _, site in watch.attentions:
        with contextlib.suppress(Exception):
            given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, **dict(zip(names, args)), **kwargs}
            query = given["query"]
            if query.is_cuda and query.shape[-2] > 1 and choose(**given) == 0:
                masked = "a mask" if given["attn_mask"] is not None else "no mask"
                math, where = math + 1, site
                what = f"{str(query.dtype).removeprefix('torch.')}, heads of {query.shape[-1]}, {masked}"
    if not math:
        return None
    return WorkShare(at_site(Where(phase="forward"), where), math / len(watch.attentions), what)


# -- with and without --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SpeedTrial:
    """An experiment: its name, what it changes, and the phase that it takes away, by which part. predicted: where no
    phase tells how many times faster a step should be; rows: how many times more rows a step has with it."""

    name: str
    change: Change
    phase: str = ""
    part: float = 1.0
    predicted: float | None = None
    rows: float = 1.0
    seconds: float = SECONDS


def try_cure(training: Training, what: SpeedTrial) -> SpeedCure:
    """The cure with its predicted and its measured speed-up, both from the same steps, and the last losses."""
    return apart(training, lambda: _paired(training, what), 10 * SECONDS) or SpeedCure(
        what.name, what.predicted, why_not="it could not be tried on a copy of this process"
    )


def _paired(training: Training, what: SpeedTrial) -> SpeedCure:
    patches, flags = Patches(), [False]
    switch, begun = what.change(training, patches), time.monotonic()

    def ended(number: int) -> None:
        if number > 2 * PAIRS or (number > 6 and time.monotonic() - begun > what.seconds):
            stop_training()
        flags.append(number % 4 in (2, 3))
        switch(flags[-1])

    clock = training.clock(ended)
    try:
        with clock:
            drive(training, clock, 2 * PAIRS + 1)
    finally:
        switch(False)
        patches.undo()
    if getattr(switch, "uses", None) == []:
        raise LookupError("no module does the repeated work alone")
    rows = list(zip(clock.steps, flags))[1:]
    off, on = ([step for step, flag in rows if flag is wanted] for wanted in (False, True))
    usual = statistics.median if all(step.phases.get(what.phase) for step in off) else statistics.fmean
    without, with_it = (usual([step.total for step in steps]) for steps in (off, on))
    left = usual([step.total - what.part * step.phases.get(what.phase, 0.0) for step in off])
    predicted = without / left if what.phase else what.predicted
    losses = list(zip(training.losses, flags))
    last = [[loss for loss, flag in losses if flag is wanted][-1:] for wanted in (False, True)]
    pair = (float(last[0][0]), float(last[1][0])) if all(last) else None
    return SpeedCure(what.name, predicted, what.rows * without / with_it, pair)


def same_batch(training: Training, patches: Patches) -> Callable[[bool], None]:
    """The loader gives a batch that it gave before."""
    state: dict[str, Any] = {"on": False}

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            if not state["on"] or "batch" not in state:
                state["batch"] = original(iterator)
            return state["batch"]

        return __next__

    patches.put(dataloader._BaseDataLoaderIter, "__next__", following)
    if training.loader is not None:
        own = training.loader

        def again() -> Iterator[Any]:
            batches: Any = iter(own)
            while True:
                if not state["on"] or "whole" not in state:
                    try:
                        state["whole"] = next(batches)
                    except StopIteration:
                        batches = iter(own)
                        state["whole"] = next(batches)
                yield state["whole"]

        training.loader = again()
    return lambda on: state.update(on=on)


def no_saving(training: Training, patches: Patches) -> Callable[[bool], None]:
    state = {"on": False}

    def dropped(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if state["on"] else original(*args, **kwargs)

    for module, name in WRITERS:
        if hasattr(module_of(module), name):
            patches.put(module_of(module), name, dropped)
    return lambda on: state.update(on=on)


def no_reads(training: Training, patches: Patches) -> Callable[[bool], None]:
    """A read gives what it gave the last time at its line."""
    state: dict[str, Any] = {"on": False}
    before: dict[Any, Any] = {}

    def remembered(name: str) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Any, *args: Any) -> Any:
                lines = users_lines()
                key = name, lines[-1] if lines else None
                if not state["on"] or key not in before:
                    before[key] = original(tensor, *args)
                return before[key]

            return read

        return wrap

    for name in READS:
        patches.put(torch.Tensor, name, remembered(name))
    return lambda on: state.update(on=on)


def no_validation(training: Training, patches: Patches) -> Callable[[bool], None]:
    """A loader gives one batch to a model in eval mode; without a loader the model answers what it answered before."""
    state: dict[str, Any] = {"on": False, "read": False, "models": []}
    remember = _memory(training, patches, lambda m: not (m.training or state["read"] or torch.is_grad_enabled()), False)

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            if not all(m.training for m in state["models"]):
                state["read"] = True
                if state["on"] and iterator._num_yielded:
                    raise StopIteration
            return original(iterator)

        return __next__

    def switch(on: bool) -> None:
        state.update(on=on, models=state["models"] or list(learners(training)))
        remember(on)

    patches.put(dataloader._BaseDataLoaderIter, "__next__", following)
    return switch


def learners(training: Training) -> Iterator[Any]:
    """The models that are trained. Of a script, whose names nobody knows, modules that are no part of another one."""
    models = list(training.models.values())
    if not models:
        modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
        parts = {id(part) for m in modules for part in m.children()}
        models = [m for m in modules if id(m) not in parts]
    held = {id(p) for o in training.optimizers.values() for group in o.param_groups for p in group["params"]}
    return (m for m in models if any(id(p) in held or p.grad is not None for p in m.parameters()))


def memoised(training: Training, patches: Patches) -> Callable[[bool], None]:
    """A module with equal inputs and weights answers what it answered before."""
    return _memory(training, patches, lambda module: True, content=True)


def _memory(
    training: Training, patches: Patches, applies: Callable[[Any], bool], content: bool
) -> Callable[[bool], None]:
    """Modules that answer what they answered before: all of them to equal inputs (content), or the models to inputs of
    equal shapes. A graph serves its own step. uses: one entry for each answer that was not computed."""
    state: dict[str, Any] = {"on": False, "step": 0}
    answers: dict[Any, Any] = {}
    uses: list[int] = []

    def key_of(module: Any, values: list[Any]) -> Any:
        graph = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if not content:
            return id(module), tuple(tuple(t.shape) for t in tensors_in(values)), graph
        inputs = tuple(fingerprint(t) for t in tensors_in(values))
        return id(module), inputs, tuple(p._version for p in module.parameters()), graph and state["step"]

    def remembering(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not state["on"] or not applies(module):
                return forward(*args, **kwargs)
            key = key_of(module, [*args, *kwargs.values()])
            uses.extend([1] * (key in answers))
            if key not in answers:
                answers[key] = forward(*args, **kwargs)
            return answers[key]

        return answer

    def switch(on: bool) -> None:
        if not state["step"]:
            known = [*training.models.values(), *training.names.values()] if content else []
            others = [thing for thing in known if isinstance(thing, torch.nn.Module)]
            for module in dict.fromkeys(part for m in (*learners(training), *others) for part in _parts(m, content)):
                patches.put(module, "forward", functools.partial(remembering, module))
        state.update(on=on, step=state["step"] + 1)

    switch.uses = uses  # type: ignore[attr-defined]
    return switch


def _parts(model: Any, content: bool) -> list[Any]:
    return [m for m in (model.modules() if content else [model]) if any(True for _ in m.parameters())]


def single_precision(training: Training, patches: Patches) -> Callable[[bool], None]:
    """Weights, the optimizer's state, the step's own tensors and the batches in float32."""
    tensors = [t for model in training.models.values() for t in (*model.parameters(), *model.buffers())]
    tensors += [value for value in training.names.values() if isinstance(value, torch.Tensor)]
    tensors = [t for t in tensors if t.dtype == torch.float64]
    state = {"on": False}

    def cast(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        return value.float() if wide and state["on"] else value

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda iterator: tree_map(cast, original(iterator))

    patches.put(dataloader._BaseDataLoaderIter, "__next__", following)

    def switch(on: bool) -> None:
        state["on"] = on
        kind = torch.float32 if on else torch.float64
        torch.set_default_dtype(torch.float32)
        for tensor in tensors:
            tensor.data = tensor.data.to(kind)
            tensor.grad = None
        for optimizer in training.optimizers.values():
            for values in optimizer.state.values():
                for name, value in values.items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                        values[name] = value.to(kind)

    return switch


def autocast(training: Training, patches: Patches) -> Callable[[bool], None]:
    device = next((d.type for d in accelerators_in_use()), "cpu")
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def switch(on: bool) -> None:
        torch.set_autocast_enabled(device, on or before[0])
        torch.set_autocast_dtype(device, torch.bfloat16 if on else before[1])

    return switch


def tf32(training: Training, patches: Patches) -> Callable[[bool], None]:
    before = torch.get_float32_matmul_precision()
    return lambda on: torch.set_float32_matmul_precision("high" if on else before)


def doubled(training: Training, patches: Patches) -> Callable[[bool], None]:
    """Each batch with its rows twice."""
    state = {"on": False}

    def twice(value: Any) -> Any:
        return torch.cat([value, value]) if isinstance(value, torch.Tensor) and value.dim() else value

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            return tree_map(twice, batch) if state["on"] else batch

        return __next__

    patches.put(dataloader._BaseDataLoaderIter, "__next__", following)
    return lambda on: state.update(on=on)


def with_workers(training: Training, number: int, base: float) -> SpeedCure:
    """A loader like the user's with this many workers, which stay: seconds of a step, once they run."""
    loader = training.loader
    name = f"num_workers={number}, persistent_workers=True"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return SpeedCure(name, None, why_not="the loader is not known")

    def run() -> float:
        training.loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=loader.sampler,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            num_workers=number,
            persistent_workers=True,
        )
        begun = time.monotonic()

        def ended(count: int) -> None:
            if count > 14 or (count > 5 and time.monotonic() - begun > 2 * SECONDS):
                stop_training()

        clock = training.clock(ended)
        with clock:
            drive(training, clock, 15)
        return statistics.median(step.total for step in clock.steps[3:])

    measured = apart(training, run, 10 * SECONDS)
    if measured is None:
        return SpeedCure(name, None, why_not="it could not be tried on a copy of this process")
    return SpeedCure(name, None, base / measured)


def eager_steps(training: Training) -> float:
    """Seconds of a step without torch.compile."""

    def run() -> float:
        with torch.compiler.set_stance("force_eager"):
            clock = training.clock(lambda number: stop_training() if number > 6 else None)
            with clock:
                drive(training, clock, 7)
        return statistics.median(step.total for step in clock.steps[1:])

    return apart(training, run, 10 * SECONDS) or 0.0
