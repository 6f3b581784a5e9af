"""Experiments in a copy of the process: the same steps with one thing changed and without, in turn, in one run.

Steps with and without follow each other as off, on, on, off, …, so that what else the machine does falls on both; how
many times longer the steps without take is the speed-up, see `longer`, and the ratio of means for what not every step
does. On a GPU, which is behind the host, rows of steps do so. The first step of either kind warms up. None of it
touches the user's own objects: see `clock`.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import dataclasses
import functools
import gc
import linecache
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, dataloader

from nbdebug.observe.items import loader_like
from nbdebug.observe.locations import USER, Site, at_site, code_kind, other_cells, site_of, users_frames
from nbdebug.observe.modules import eager
from nbdebug.observe.snapshot import accelerators_in_use
from nbdebug.observe.sources import edit_of, edited_functions, function_at, nodes_of
from nbdebug.observe.sources import source as text_of
from nbdebug.observe.step_hooks import Patches
from nbdebug.observe.tensors import fingerprint, tensors_in
from nbdebug.observe.variables import is_user_module
from nbdebug.report import Finding, Where
from nbdebug.robust_stats import longer
from nbdebug.tools.speed import rules
from nbdebug.tools.speed.clock import MOVES, READS, WRITERS, Clock, Training, apart, endless, run, users_lines
from nbdebug.tools.speed.ops import OpWatch, attention_refused
from nbdebug.tools.speed.rules import DATA, SpeedCure, SpeedFacts, WorkShare

PAIRS, SECONDS = 20, 2.5
"""Of an experiment: steps with and without, at most; and the time after which three of each are enough."""
OBSERVED, OBSERVED_SECONDS = 3, 8.0
"""Steps whose ops are followed, and the time after which the first must do."""
SAME, BESIDE = 6, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)
"""Steps whose weights are compared, and the statements that a step may do without."""
LOADED, LOADING_SECONDS = 100, 1.0
"""Batches, and seconds, in which the lines of a loader are followed."""
TURNED_ON = {
    rules.ANOMALY: re.compile(
        r"\bdetect_anomaly *[(=](?! *False)|\bset_(detect_anomaly|anomaly_enabled) *\((?! *False)"
    ),
    rules.DETERMINISTIC: re.compile(r"\buse_deterministic_algorithms *\((?! *False)"),
    rules.PROFILER: re.compile(r"(?<!def )\b(profile|emit_nvtx|emit_itt) *\("),
}
"""What is called for a mode, or the argument of a trainer's for it."""
DOUBLE = (".double()", "float64", "torch.double", "set_default_dtype", "DoubleTensor")
NUMPY = ("from_numpy", "np.", "numpy.")
"""What makes a value double, and what may: numpy's usual floats are."""
NOT_TRIED = "it could not be tried on a copy of this process"


def observe(training: Training, first: int = 0) -> dict[str, Any]:
    """What the ops of some steps show: attributes of SpeedFacts, by name. first: how many steps are left out before."""
    loaders = any(isinstance(value, DataLoader) for value in training.names.values())
    watch = OpWatch(salted=training.loader is None and not training.whole and not loaders)

    def ended(clock: Clock, number: int) -> None:
        if number == first:
            watch.first = first
            stack.enter_context(watch)
            clock.batch, clock.aside = watch.batch, watch.step_aside
        watch.begin_step(number, clock.parameters)
        if number == 1 and training.whole:
            watch.begin_anew()

    def without_modes(begin: Callable[..., Any], /, *args: Any) -> None:  # else the workers would have them, and break
        with _disable_current_modes():
            begin(*args)

    patches = Patches()
    with eager(), contextlib.ExitStack() as stack:
        stack.callback(patches.undo)
        patches.put(dataloader._MultiProcessingDataLoaderIter, "__init__", without_modes)
        watch.watch_calls(patches)
        clock = run(training, first + OBSERVED, OBSERVED_SECONDS, first + 1, ended)
    if clock.steps and watch.step >= len(clock.steps):
        watch.step = len(clock.steps) - 1
    watch.drop_waits()
    return _seen(watch, training)


def _seen(watch: OpWatch, training: Training) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(watch, name)() for name in ("reads", "repeated", "growth", "loop")}
    facts["table"] = watch.embedding(lambda weight: embedding_line(weight, watch, training))
    facts["double"] = WorkShare(double_origin(watch, training), watch.double(), "float64")
    by_line: collections.Counter[Site] = collections.Counter()
    for op in watch.last:
        if op.line is not None:
            by_line[op.line] += op.elements
    site = max(by_line, key=by_line.__getitem__, default=None)
    work = {"elements": by_line.total(), "ops": len(watch.last)}
    if watch.cut == watch.first:
        work = {}
    return {**facts, "attention": slow_attention(watch), "work": work, "largest": at_site(Where(), site)}


# -- where data take their time ----------------------------------------------------------------------------------------


def loading_line(training: Training) -> Where:
    """The user's line at which the time of the loader ends: its lines are followed for a second, in this process."""
    times: dict[Site, float] = collections.defaultdict(float)
    patches = Patches()
    last: tuple[Site | None, float] = (None, 0.0)

    def note(site: Site | None) -> None:
        nonlocal last
        if last[0] is not None:
            times[last[0]] += time.perf_counter() - last[1]
        last = site, time.perf_counter()

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        users = users_frames(frame.f_back if event == "return" else frame, (__file__,))
        note(next(map(site_of, users), None))
        return local

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return local if code_kind(frame.f_code) == USER else None

    def aside(aside: bool) -> None:
        note(None)
        sys.settrace(called if aside else None)

    def here(begin: Callable[..., Any], loader: Any) -> Any:
        for name in ("num_workers", "timeout"):
            patches.set(loader, name, 0)
        return begin(loader)

    try:
        patches.put(DataLoader, "__iter__", here)
        run(training, LOADED, LOADING_SECONDS, 1, ended=lambda clock, number: setattr(clock, "aside", aside))
    finally:
        sys.settrace(None)
        patches.undo()
    return at_site(Where(phase="input"), max(times, key=times.__getitem__, default=None))


def line_with(pattern: re.Pattern[str], lines: Iterable[Site], where: Where) -> Where:
    """The user's first line with this text: in the files of these lines, in other cells, or in other modules."""
    files = dict.fromkeys(line.file for line in lines)
    files |= dict.fromkeys(cell for file in files for cell in other_cells(file))
    modules = [module for name, module in list(sys.modules.items()) if is_user_module(name)]
    files |= dict.fromkeys(getattr(module, "__file__", None) or "" for module in modules)
    for file in files:
        for number, text in enumerate(linecache.getlines(file), 1):
            if pattern.search(text.partition("#")[0]):
                return at_site(where, Site(file, number, ""))
    return where


def embedding_line(weight: Any, watch: OpWatch, training: Training) -> Where:
    """The user's line that makes an embedding, or else that of the optimizer's step."""
    parts = [part for model in training.models.values() for part in model.named_modules()]
    names = [re.escape(name.rpartition(".")[2]) for name, part in parts if getattr(part, "weight", None) is weight]
    lines = [op.line for op in watch.last if op.line is not None]
    where = at_site(Where(), next((op.line for op in reversed(watch.last) if op.phase == "optimizer"), None))
    for name in (r"\w+", "|".join(names)):
        made = re.compile(rf"^\s*(\w+\.)*({name})\b[^'\"=]*= *[\w.]*\bEmbedding(Bag)? *\(")
        where = line_with(made, lines, where)
    return where


# -- double precision, attention ---------------------------------------------------------------------------------------


def double_origin(watch: OpWatch, training: Training) -> Where:
    """The user's line that makes values double: an op of the step's own, else an assignment that speaks of it."""
    where = Where(phase="forward")
    first = next((op for op in watch.last if op.double and op.phase == "forward" and op.line is not None), None)
    if first is not None and first.name in ("to_copy", "scalar_tensor", "arange", "full", "linspace"):
        return at_site(where, first.line)  # else what the step begins with is double
    held = {name for name, value in training.names.items() if _is_double(value)}
    ranked: dict[int, Site] = {}
    for file in dict.fromkeys(op.line.file for op in watch.last if op.line is not None):
        for node in nodes_of(file):
            if isinstance(node, (ast.Assign, ast.Expr, ast.AnnAssign, ast.Return)) and node.value is not None:
                text = text_of(file, node)
                rank = 4 * any(word in text for word in DOUBLE) or any(word in text for word in NUMPY)
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                if rank:
                    ranked.setdefault(rank + 2 * bool(names & held), Site(file, node.lineno, ""))
    return at_site(where, ranked[max(ranked)] if ranked else first.line if first is not None else None)


def _is_double(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float64
    return isinstance(value, torch.nn.Module) and any(p.dtype == torch.float64 for p in value.parameters())


def slow_attention(watch: OpWatch) -> WorkShare:
    """Attention that runs as plain products on a GPU, and why."""
    slow = [call for call in watch.attentions if call[1]]
    if not slow:
        return rules.NOTHING
    site, why = slow[-1]
    forward = [op for op in watch.last if op.phase == "forward"]
    inside = sum(op.seconds for op in forward if op.line == site) / (sum(op.seconds for op in forward) or 1.0)
    return WorkShare(at_site(Where(phase="forward"), site), len(slow) / len(watch.attentions), why, inside)


def kernels(training: Training, steps: int = 3) -> tuple[float, float]:
    """Of a step on a GPU: how many kernels run, and the seconds in which at least one of them does."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def ended(clock: Clock, number: int) -> None:
        if number == 1:
            stack.enter_context(profile)

    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # the profiler's own
        clock = run(training, steps + 1, ended=ended, waits=lambda step: 1)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    cuda = [e for e in events if e.device_type() == torch._C._autograd.DeviceType.CUDA]
    spans = sorted((e.start_ns(), e.end_ns()) for e in cuda if not e.name().startswith(("Memcpy", "Memset")))
    busy, last, ran = 0, 0, max(len(clock.steps) - 1, 1)
    for start, end in spans:
        busy += max(0, end - max(start, last))
        last = max(last, end)
    return len(spans) / ran, busy / 1e9 / ran


# -- with and without --------------------------------------------------------------------------------------------------


class Switch(Patches):
    """on: whether the change is in place; used: how often it changed something; turns: how often it was turned on or
    off, which it is before each step; turned: called each time."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.used, self.turns = False, 0, 0
        self.turned: Callable[[bool], Any] = bool

    def turn(self, on: bool) -> None:
        self.on = on
        self.turns += 1
        self.turned(on)

    def answering(self, key_of: Callable[..., Any]) -> Callable[..., Any]:
        """For a function that answers what it answered before to an equal key of its arguments; it is asked again where
        that is None."""
        answers: dict[Any, Any] = {}

        def answer(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            key = key_of(original, *args, **kwargs) if self.on else None
            if key is None:
                return original(*args, **kwargs)
            self.used += key in answers
            if key not in answers:
                answers[key] = original(*args, **kwargs)
            return answers[key]

        return answer

    def exchange(self, function: FunctionType, key_of: Callable[..., Any]) -> None:
        """`answering` for a function that has names nobody knows of: its code becomes one that calls a constant."""
        code, stub = function.__code__, (lambda *args, **kwargs: "".__call__(*args, **kwargs)).__code__  # type: ignore[operator]  # noqa: PLW0108
        own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        answer = functools.partial(self.answering(key_of), own)
        consts = tuple(answer if value == "" else value for value in stub.co_consts)
        self._undo.append(functools.partial(setattr, function, "__code__", code))
        function.__code__ = stub.replace(co_consts=consts, co_freevars=code.co_freevars)


@dataclasses.dataclass(frozen=True)
class SpeedTrial:
    """An experiment: its name, what it changes, and the phase that it takes away, by which part. predicted: where no
    phase tells how many times faster a step should be; rows: how many times more rows a step has with it; seconds:
    after which three steps of each kind are enough. inside: makes a context of all steps, for what can't be turned on
    and off from step to step; base: seconds of a step without, where these steps can't be run again."""

    name: str
    change: Callable[[Training, Switch], None] | None = None
    phase: str = ""
    part: float = 1.0
    predicted: float | None = None
    rows: float = 1.0
    seconds: float = SECONDS
    inside: Callable[[], AbstractContextManager[Any]] | None = None
    base: float | None = None


def try_cure(training: Training, what: SpeedTrial, facts: SpeedFacts) -> SpeedCure:
    """The cure with its predicted and its measured speed-up, on a CPU from the same steps, and the last losses."""
    predicted = facts.faster(what.phase, what.part) if what.phase else what.predicted
    if what.inside is not None:
        base, fast = what.base or mean_step(training), mean_step(training, what.inside)
        if not base or not fast:
            return SpeedCure(what.name, predicted, why_not=NOT_TRIED)
        return SpeedCure(what.name, predicted, base / fast)
    on_gpu = facts.device != "cpu"
    block = rules.FREE if on_gpu and facts.seconds() < 0.25 else 1
    tried: SpeedCure | None = apart(training, lambda: _paired(training, what, block), 10 * SECONDS)
    if tried is None:
        return SpeedCure(what.name, predicted, why_not=NOT_TRIED)
    return dataclasses.replace(tried, predicted=predicted) if on_gpu else tried


def _paired(training: Training, what: SpeedTrial, block: int) -> SpeedCure:
    switch, few = Switch(), 2 + 4 * block + 2 * (block == 1)

    def is_on(step: int) -> bool:
        return step == 1 or (step > 1 and (step - 2) // block % 4 in (1, 2))

    def ended(clock: Clock, number: int) -> None:
        switch.turn(is_on(number))

    def at_ends(step: int) -> int:
        return int((step - 2) % block == block - 1)

    assert what.change is not None
    try:
        what.change(training, switch)
        clock = run(training, 2 * PAIRS + 2, what.seconds, few, ended, at_ends)
    finally:
        if switch.on:
            switch.turn(False)
        switch.undo()
    if not switch.used:
        raise LookupError("it changes nothing in these steps")
    rows = [(clock.steps[i : i + block], is_on(i)) for i in range(2, len(clock.steps) - block + 1, block)]
    off, on = ([steps for steps, flag in rows if flag is wanted] for wanted in (False, True))
    steady = all(s.phases.get(what.phase) for steps in off for s in steps) or not what.phase
    ratio = longer if steady else lambda less, more: statistics.fmean(more) / statistics.fmean(less)
    without, with_it = ([statistics.fmean(s.total for s in steps) for steps in part] for part in (off, on))
    left = [s.total - what.part * s.phases.get(what.phase, 0.0) for steps in off for s in steps]
    predicted = ratio(left, [s.total for steps in off for s in steps]) if what.phase else what.predicted
    last = [[loss for i, loss in enumerate(training.losses) if is_on(i) is wanted][-1:] for wanted in (False, True)]
    pair = (float(last[0][0]), float(last[1][0])) if all(last) else None
    return SpeedCure(what.name, predicted, what.rows * ratio(with_it, without), pair)


def through(training: Training, switch: Switch, fetch: Callable[[Callable[[], Any]], Any]) -> None:
    """Each batch is what `fetch(read)` gives, where `read()` reads the loader."""

    def following(original: Callable[..., Any], iterator: Any) -> Any:
        return fetch(lambda: original(iterator))

    def again(own: Iterator[Any]) -> Iterator[Any]:
        with contextlib.suppress(StopIteration):
            while True:
                yield fetch(lambda: next(own))

    switch.put(dataloader._BaseDataLoaderIter, "__next__", following)
    if training.loader is not None and not isinstance(training.loader, DataLoader):
        training.loader = again(endless(training.loader))


def same_batch(training: Training, switch: Switch) -> None:
    through(training, switch, switch.answering(lambda read: "the batch"))


def no_saving(training: Training, switch: Switch) -> None:
    def dropped(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        switch.used += switch.on
        return None if switch.on else original(*args, **kwargs)

    switch.put_loaded(WRITERS, dropped)


def _without(names: Iterable[str], applies: Callable[[Any], bool], training: Training, switch: Switch) -> None:
    """A read, or a copy of a tensor of the host, gives what it gave before at its line."""

    def key_of(original: Callable[..., Any], tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        return (original, users_lines()[-1:], tuple(tensor.shape)) if applies(tensor) else None

    for name in names:
        switch.put(torch.Tensor, name, switch.answering(key_of))


no_reads = functools.partial(_without, READS, lambda tensor: True)
no_copies = functools.partial(_without, MOVES, lambda tensor: tensor.device.type == "cpu")


def no_validation(training: Training, switch: Switch) -> None:
    """A loader gives one batch to a model in eval mode; without a loader the model answers what it answered before."""
    read, models = False, list[Any]()

    def following(original: Callable[..., Any], iterator: Any) -> Any:
        nonlocal read
        if not all(m.training for m in models):
            read = True
            if switch.on and iterator._num_yielded:
                switch.used += 1
                raise StopIteration
        return original(iterator)

    def found() -> list[Any]:
        models[:] = learners(training)
        return models

    def key_of(module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked = module.training or read or torch.is_grad_enabled()
        return None if asked else tuple(tuple(tensor.shape) for tensor in tensors_in([args, kwargs]))

    switch.put(dataloader._BaseDataLoaderIter, "__next__", following)
    _memory(switch, found, key_of)


def learners(training: Training) -> Iterator[Any]:
    """The models that are trained. Of a script, whose names nobody knows, modules that are no part of another one."""
    models = list(training.models.values())
    if not models:
        modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
        parts = {id(part) for m in modules for part in m.children()}
        models = [m for m in modules if id(m) not in parts]
    held = {id(p) for o in training.optimizers.values() for group in o.param_groups for p in group["params"]}
    return (m for m in models if any(id(p) in held or p.grad is not None for p in m.parameters()))


def memoised(where: Where, training: Training, switch: Switch) -> None:
    """A module with equal inputs and weights, or a function that is called at this line with equal arguments, answers
    what it answered before; a graph serves its own step."""

    def modules() -> Iterator[Any]:
        known = (*learners(training), *training.models.values(), *training.names.values())
        parts = (part for thing in known if isinstance(thing, torch.nn.Module) for part in thing.modules())
        return (part for part in parts if next(part.parameters(), None) is not None)

    def key_of(module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        graph = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        versions = tuple(p._version for p in module.parameters())
        return tuple(map(fingerprint, tensors_in([args, kwargs]))), versions, graph and switch.turns

    def arguments(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if [(site.file, site.line) for site in users_lines()[-1:]] != [(where.file, where.line)]:
            return None
        leaves = tree_leaves((args, kwargs))
        return function, tuple(fingerprint(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)

    called = set(re.findall(r"(\w+)\(", where.text or ""))
    for function in [f for f in gc.get_objects() if type(f) is FunctionType and f.__name__ in called]:
        if code_kind(function.__code__) == USER:
            switch.exchange(function, arguments)
    _memory(switch, modules, key_of)


def _memory(switch: Switch, modules: Callable[[], Iterable[Any]], key_of: Callable[..., Any]) -> None:
    """These modules, which the first step has made, answer what they answered before."""

    def turned(on: bool) -> None:
        for module in dict.fromkeys(modules()) if switch.turns == 2 else ():
            switch.put(module, "forward", switch.answering(functools.partial(key_of, module)))

    switch.turned = turned


def single_precision(training: Training, switch: Switch) -> None:
    """Weights, the optimizer's state, the step's own tensors and the batches in float32."""
    tensors = [t for model in training.models.values() for t in (*model.parameters(), *model.buffers())]
    tensors += [value for value in training.names.values() if isinstance(value, torch.Tensor)]
    tensors = [t for t in tensors if t.dtype == torch.float64]

    def cast(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        return value.float() if wide and switch.on else value

    def turned(on: bool) -> None:
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

    through(training, switch, lambda read: tree_map(cast, read()))
    switch.turned, switch.used = turned, 1


def sparse_gradients(rows: int, training: Training, switch: Switch) -> None:
    """The embedding with so many rows gets sparse gradients; SparseAdam, or SGD, updates it, and its optimizer the
    others."""

    def of(kind: type) -> Iterator[Any]:
        return (thing for thing in gc.get_objects() if issubclass(type(thing), kind))

    tables = [m for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag) for m in of(kind) if len(m.weight) == rows]
    ids, groups = {id(m.weight) for m in tables}, list[tuple[dict[str, Any], list[Any], list[Any]]]()

    def stepped(other: Any, *_: Any) -> None:
        if switch.on:
            other.step()
            other.zero_grad()

    for optimizer in list(of(torch.optim.Optimizer)):
        kind = torch.optim.SGD if isinstance(optimizer, torch.optim.SGD) else torch.optim.SparseAdam
        for group in optimizer.param_groups:
            held, others = ([p for p in group["params"] if (id(p) in ids) is wanted] for wanted in (True, False))
            if held:
                other = functools.partial(stepped, kind(held, lr=group["lr"]))
                switch._undo.append(optimizer.register_step_post_hook(other).remove)
                groups.append((group, group["params"], others))

    def turned(on: bool) -> None:
        for group, every, others in groups:
            group["params"] = others if on else every
        for module in tables:
            module.sparse, module.weight.grad = on, None

    switch.turned, switch.used = turned, len(groups)


def without_line(site: Site, node: Any, training: Training, switch: Switch) -> None:
    """A loop of the user's runs for nothing, or an expression keeps the value that it first had."""
    kept: list[Any] = []

    def value(compute: Callable[[], Any]) -> Any:
        if switch.on and kept:
            switch.used += 1
            return kept[0]
        kept[:] = [compute()]
        if any(tensor.requires_grad for tensor in tensors_in(kept)):
            raise LookupError("the step learns from it")
        return kept[0]

    def items(given: Any) -> Any:
        switch.used += switch.on
        return () if switch.on else given

    loop = isinstance(node, ast.For)
    expression, new = (node.iter, "_nbdebug_items({raw})") if loop else (node.value, "_nbdebug_value(lambda: {raw})")
    edit, stack = edit_of(site.file, {expression: new}), contextlib.ExitStack()
    if edit is None:
        raise LookupError("its text is not known")
    switch._undo.append(stack.close)
    stack.enter_context(edited_functions(edit))
    lines = linecache.getlines(site.file)
    script = "".join([*lines[: edit.line - 1], edit.new, "\n", *lines[edit.end_line :]])

    def compiled(original: Callable[..., Any], text: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        return original(script if file == site.file else text, file, *args, **kwargs)

    switch.put(builtins, "compile", compiled)
    switch.set(builtins, "_nbdebug_items", items)
    switch.set(builtins, "_nbdebug_value", value)


def beside(training: Training, clock: Clock, facts: SpeedFacts) -> tuple[WorkShare, SpeedCure] | None:
    """The dearest statement of the user's without which the same steps give the same weights, and what it costs."""
    for site, node, share in _dear_statements(clock):
        change = functools.partial(without_line, site, node)
        weights = [
            apart(training, functools.partial(_weights, training, change, on), 10 * SECONDS) for on in (False, True)
        ]
        if weights[0] is None or weights[0] != weights[1]:
            continue
        cure = try_cure(training, SpeedTrial(rules.WITHOUT_LINE, change, predicted=1 / max(1 - share, 0.01)), facts)
        if cure.measured is not None:
            return WorkShare(at_site(Where(), site), share), cure
    return None


def _dear_statements(clock: Clock) -> list[tuple[Site, Any, float]]:
    """The statements beside the update that take much of the time, the outermost first, with their shares."""
    spent: dict[Any, float] = collections.defaultdict(float)
    depth: dict[Any, tuple[int, int]] = {}
    for stack, seconds in clock.stacks.items():
        for place, site in enumerate(reversed(stack)):
            begin = getattr(function_at(site.file, site.line), "lineno", 0)
            for node in nodes_of(site.file):
                if isinstance(node, BESIDE) and begin <= node.lineno <= site.line <= (node.end_lineno or 0):
                    key = site.file, node
                    spent[key] += seconds
                    depth[key] = min(depth.get(key, (place, 0)), (place, node.lineno - (node.end_lineno or 0)))
    whole = sum(clock.lines.values()) or 1.0
    trunk = {(f, n) for f, n in spent for s in clock.update if s.file == f and n.lineno <= s.line <= n.end_lineno}
    dear = [key for key, seconds in spent.items() if seconds >= rules.WAITS * whole and key not in trunk]
    return [(Site(f, n.lineno, ""), n, spent[f, n] / whole) for f, n in sorted(dear, key=depth.__getitem__)][:3]


def _weights(training: Training, change: Callable[..., Any], on: bool) -> Any:
    """What the weights and losses are after some steps with a change, or without it."""
    switch = Switch()
    try:
        change(training, switch)
        switch.turn(on)
        clock = run(training, SAME, SECONDS, 3)
    finally:
        switch.undo()
    if not clock.parameters or not clock.backwards or len(clock.steps) < 3:
        return None
    return [fingerprint(p.detach()) for p in clock.parameters.values()], [float(loss) for loss in training.losses]


def autocast(training: Training, switch: Switch) -> None:
    device = next((d.type for d in accelerators_in_use()), "cpu")
    stack = contextlib.ExitStack()

    def turned(on: bool) -> None:
        stack.close()  # in each step: weights that were cast are forgotten then
        if on:
            stack.enter_context(torch.autocast(device, torch.bfloat16))

    switch.turned, switch.used = turned, 1


def no_anomaly_detection(training: Training, switch: Switch) -> None:
    asked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def setting(original: Callable[..., Any], mode: bool, check_nan: bool = True) -> None:
        nonlocal asked
        asked = mode, check_nan
        original(mode and not switch.on, check_nan)

    switch.put(torch, "set_anomaly_enabled", setting)
    switch.turned, switch.used = lambda on: torch.set_anomaly_enabled(*asked), 1


def no_determinism(training: Training, switch: Switch) -> None:
    warns, switch.used = torch.is_deterministic_algorithms_warn_only_enabled(), 1
    switch.turned = lambda on: torch.use_deterministic_algorithms(not on, warn_only=warns)


def tf32(training: Training, switch: Switch) -> None:
    products, switch.used = torch.backends.cuda.matmul, 1
    try:
        before = torch.get_float32_matmul_precision()
        switch.turned = lambda on: torch.set_float32_matmul_precision("high" if on else before)
    except RuntimeError:  # torch tells none where the newer switch by backend was set
        own = products.fp32_precision
        switch.turned = lambda on: setattr(products, "fp32_precision", "tf32" if on else own)


def fused_attention(training: Training, switch: Switch) -> None:
    """The fused kernels may run, in bfloat16 where they refuse float32."""

    def attention(original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return original(query, key, value, *args, **kwargs)
        switch.used += 1
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            if query.dtype != torch.float64 and not attention_refused((query, key, value, *args), kwargs):
                return original(query, key, value, *args, **kwargs)
            half = [t.to(torch.bfloat16) for t in (query, key, value)]
            return original(*half, *args, **kwargs).to(query.dtype)

    switch.put(torch.nn.functional, "scaled_dot_product_attention", attention)


def doubled(training: Training, switch: Switch) -> None:
    """Each batch with its rows twice."""

    def twice(value: Any) -> Any:
        if not switch.on or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        switch.used += 1
        return torch.cat([value, value])

    through(training, switch, lambda read: tree_map(twice, read()))


def trial_of(cause: Finding, facts: SpeedFacts) -> SpeedTrial | None:
    """The experiment that decides about a cause; None where there is none, or where this machine can't tell."""
    mode = cause.evidence.get("mode", "")
    if mode == rules.BLOCKING or (cause.code == "speed/host-sync" and facts.device == "cpu"):
        return None
    if "workers started" in cause.evidence:
        return SpeedTrial(rules.STAYING, predicted=facts.faster(DATA, 1.0), inside=staying_workers)
    if mode == rules.PROFILER:
        return SpeedTrial(f"without {mode}", inside=unprofiled)
    slow, quick = ([step.total for step in facts.steps if step.compiled is kind] for kind in (True, False))
    base = statistics.median(slow) if slow else None
    of_modes = {rules.ANOMALY: no_anomaly_detection, rules.DETERMINISTIC: no_determinism}
    kept = facts.validations / facts.eval_batches if facts.eval_batches else 0.0
    busy, work = facts.busy or 1.0, facts.share("forward") + facts.share("backward")
    rows = facts.table.rows if facts.table is not None else 0
    fused = 1 / (1 - 0.9 * facts.attention.of_forward * work)
    trials = {
        "compile-recompiles": SpeedTrial(
            "no torch.compile",
            predicted=base / statistics.median(quick) if base and quick else None,
            inside=lambda: torch.compiler.set_stance("force_eager"),
            base=base,
        ),
        "loader-bound": SpeedTrial("the same batch again", same_batch, DATA),
        "debug-mode": SpeedTrial(f"without {mode}", of_modes.get(mode, no_anomaly_detection)),
        "checkpoint-too-often": SpeedTrial("no saving", no_saving, "saving"),
        "transfer-bound": SpeedTrial("batches that are on the GPU", no_copies, "copy"),
        "eval-too-often": SpeedTrial(
            "one batch of validation" if kept else "no validation", no_validation, "validating", 1 - kept
        ),
        "dense-embedding-update": SpeedTrial(
            rules.SPARSE, functools.partial(sparse_gradients, rows), predicted=1 / (1 - rules.table_cost(facts))
        ),
        "redundant-work": SpeedTrial(
            "equal results remembered",
            functools.partial(memoised, facts.repeated.where),
            "forward",
            facts.repeated.of_forward,
        ),
        "wrong-dtype": SpeedTrial("float32", single_precision, predicted=1 / (1 - facts.double.share / 2 * busy)),
        "host-sync": SpeedTrial("reads dropped", no_reads, predicted=1 / busy),
        "slow-attention": SpeedTrial("fused attention", fused_attention, predicted=fused),
        "launch-bound": twice_the_batch(facts),
    }
    return trials.get(cause.code.removeprefix("speed/"))


def twice_the_batch(facts: SpeedFacts) -> SpeedTrial:
    rows = min(2.0, 1 / facts.busy) if facts.busy else None  # kernels take twice the time, their launches the same
    return SpeedTrial("twice the batch", doubled, predicted=rows, rows=2.0, seconds=1.0)


def with_workers(training: Training, number: int, base: float) -> SpeedCure:
    """A loader like the user's with this many workers, which stay; base: seconds of a step without them."""
    loader, name = training.loader, f"num_workers={number}, persistent_workers=True"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return SpeedCure(name, why_not="the loader is not known")
    other = loader_like(loader, sampler=loader.sampler, num_workers=number, persistent_workers=True)
    measured = mean_step(dataclasses.replace(training, loader=other), middle=statistics.median)
    return SpeedCure(name, None, base / measured) if measured else SpeedCure(name, why_not=NOT_TRIED)


@contextlib.contextmanager
def staying_workers() -> Iterator[None]:
    """For a copy alone: the workers of all loaders stay."""

    def begin(original: Callable[..., Any], loader: Any) -> Any:
        vars(loader)["persistent_workers"] = loader.num_workers > 0
        return original(loader)

    patches = Patches()
    patches.put(DataLoader, "__iter__", begin)
    yield
    patches.undo()


@contextlib.contextmanager
def unprofiled() -> Iterator[None]:
    """For a copy alone: a profiler that is on does not go on."""
    torch._C._autograd._disable_profiler()
    yield


def mean_step(
    training: Training,
    inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    middle: Callable[[Any], float] = statistics.fmean,
) -> Any:
    """Seconds of a step of a copy, after one that warms up; None where it can't be tried. inside: a context of all."""

    def seconds() -> float:
        with inside():
            clock = run(training, PAIRS, 2 * SECONDS, waits=lambda step: 1)
        return middle([step.total for step in clock.steps[1:]])

    return apart(training, seconds, 10 * SECONDS)
