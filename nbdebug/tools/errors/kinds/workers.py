"""A worker of a loader that ended, could not start or did not respond: the message, the loader, and the machine."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import signal as signals
import sys
import time
import types
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdebug.observe.sources import nodes_of
from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.rules.dataloader import WorkerDied
from nbdebug.tools.errors.values import callee_name, shape_of, value_of


def iterator_of(context: ErrorContext) -> Any:
    """The loader's iterator, whose method is in the traceback; None where there is none."""
    for frame in reversed(context.trail):
        mine = frame.names.get("self")
        if "DataLoaderIter" in type(mine).__name__:
            return mine
    return None


def loader_of(context: ErrorContext) -> tuple[str, str, int | None]:
    """(the loader's name, the data set's name or class, the number of the batch); "" and None where not known."""
    iterator = iterator_of(context)
    state = attributes(iterator) if iterator is not None else {}
    dataset = state.get("_dataset")
    loader = set_name = ""
    for name, value, _ in context.variables():
        if dataset is None:
            break
        if issubclass(type(value), DataLoader) and attributes(value).get("dataset") is dataset:
            loader = loader or name
        if value is dataset and not name.startswith("self"):
            set_name = set_name or name
    done = state.get("_rcvd_idx") if "_rcvd_idx" in state else state.get("_num_yielded")
    number = done - 1 if "_rcvd_idx" in state and type(done) is int else done
    return loader, set_name or (type(dataset).__name__ if dataset is not None else ""), number


def active_loader(context: ErrorContext) -> tuple[str, Any]:
    """(name, loader) of the active loader: the traceback's, else the first with workers among the variables (the error
    of a dead worker is raised at whatever line is running)."""
    for frame in reversed(context.trail):
        for name in ("loader", "self"):
            if issubclass(type(frame.names.get(name)), DataLoader):
                loader = frame.names[name]
                named = next((n for n, value, _ in context.variables() if value is loader and n != "self"), "loader")
                return named, loader
    iterator = iterator_of(context)
    dataset = attributes(iterator).get("_dataset") if iterator is not None else None
    for name, value, _ in context.variables():
        if issubclass(type(value), DataLoader):
            state = attributes(value)
            if state.get("dataset") is dataset if dataset is not None else state.get("num_workers"):
                return name, value
    return "", iterator


def loader_in_source(context: ErrorContext) -> tuple[str, int | None]:
    """(the data set's class or name, num_workers) of the loop over a loader around the user's line, from its source:
    the error of a dead worker is raised at whatever line is running, and such a loader may have no name."""
    for frame in context.users:
        loops = [
            node
            for node in nodes_of(frame.site.file)
            if isinstance(node, (ast.For, ast.comprehension))
            and node.iter.lineno <= frame.site.line <= (getattr(node, "end_lineno", None) or node.iter.lineno)
        ]
        for loop in sorted(loops, key=lambda node: -node.iter.lineno):
            for call in ast.walk(loop.iter):
                if isinstance(call, ast.Call) and callee_name(call).endswith("DataLoader"):
                    keywords = {one.arg: one.value for one in call.keywords}
                    source, workers = (
                        call.args[0] if call.args else keywords.get("dataset"),
                        keywords.get("num_workers"),
                    )
                    count = value_of(workers, frame) if workers is not None else None
                    name = callee_name(source) or ast.unparse(source) if source is not None else ""
                    return name, count if type(count) is int else None
    return "", None


SIGNAL = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([A-Za-z ]+)")
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("cuda after fork", re.compile(r"Cannot re-initialize CUDA in forked subprocess")),
    ("open files", re.compile(r"Too many open files|received 0 items of ancdata")),
    (
        "shared memory",
        re.compile(
            r"No space left on device|out of shared memory|unable to (mmap|allocate shared "
            r"memory)|unable to open shared memory object"
        ),
    ),
    ("timeout", re.compile(r"DataLoader timed out after")),
    ("bootstrap", re.compile(r"before the\s+current process has finished its bootstrapping phase")),
    ("exited", re.compile(r"DataLoader worker \(pid(?:\(s\))? .*\) exited unexpectedly")),
    (
        "not picklable",
        re.compile(
            r"[Cc]an(?:'t|not) (?:pickle|get local object)|not picklable|attribute lookup .* "
            r"failed"
        ),
    ),
)
BROKEN = ("ConnectionResetError", "EOFError", "BrokenPipeError")
"""The errors of a worker's broken pipe in this process."""
WAIT = 0.2
"""Seconds after which a dead process has its exit code."""
SHARED = "/dev/shm"
LOADERS = re.compile(r"[\\/]utils[\\/]data[\\/]|[\\/]multiprocessing[\\/]")
STARTING = re.compile(r"[\\/]multiprocessing[\\/](reduction|popen_\w+|process|context)\.py$|[\\/]utils[\\/]data[\\/]")


def detect(context: ErrorContext) -> WorkerDied | None:
    what, signal = _kind(context)
    if what is None:
        return None
    raised, context = context.raised(), _at_the_loader(context)
    name, loader = active_loader(context)
    state = attributes(loader) if loader is not None else {}
    dataset = state.get("dataset", state.get("_dataset"))
    total, free = _shared()
    guilty, is_a = next(_unpicklable(state, name), ("", "")) if what == "not picklable" else ("", "")
    dataset_name, count = loader_in_source(context) if dataset is None else ("", None)
    workers = _whole(state.get("num_workers", state.get("_num_workers")))
    parts = list(_parts(dataset)) if dataset is not None else []
    prefetch = state.get("prefetch_factor", state.get("_prefetch_factor"))
    return WorkerDied(
        dataclasses.replace(raised, where=context.raised().where),
        what,
        signal,
        name,
        type(dataset).__name__ if dataset is not None else dataset_name,
        count if workers is None else workers,
        _whole(prefetch),
        _timeout(state),
        _start(state),
        total,
        free,
        _memory_free(),
        sum(count for _, count in parts if count) if parts else None,
        sum(len(value) for value, _ in parts if type(value) in (list, dict, tuple)) or None,
        guilty,
        is_a,
        _in_notebook(type(dataset)) if dataset is not None else False,
        _files(),
    )


def _kind(context: ErrorContext) -> tuple[str | None, str]:
    """(what happened, the signal's name); (None, "") where the error is not about a loader's workers."""
    message = context.message
    if (killed := SIGNAL.search(message)) is not None:
        return _by(killed[1].strip())
    what = next((kind for kind, pattern in KINDS if pattern.search(message)), None)
    if what in ("timeout", "exited", "bootstrap"):
        ended = re.search(r"exit code (-?\d+)", message)
        return (what, f"exit code {ended[1]}") if ended else _ended(context) if what == "exited" else (what, "")
    if what == "not picklable":
        near = iterator_of(context) is not None or any(f.site.function == "_get_iterator" for f in context.trail)
        return (what, "") if near and any(STARTING.search(f.site.file) for f in context.trail) else (None, "")
    near = (
        context.carried is not None
        and "worker" in context.carried.where
        or iterator_of(context) is not None
        or any(LOADERS.search(frame.site.file) for frame in context.trail[-6:])
    )
    if what is None and context.type in BROKEN and iterator_of(context) is not None:
        return _ended(context)
    return (what, "") if what is not None and near else (None, "")


def _at_the_loader(context: ErrorContext) -> ErrorContext:
    """The context of the broken pipe that was being handled when torch's handler of SIGCHLD reported a dead worker, at
    whatever line was running; else the context itself."""
    before = vars(BaseException)["__context__"].__get__(context.error)
    if iterator_of(context) is not None or type(before).__name__ not in BROKEN:
        return context
    pipe = ErrorContext.of(before, context.names)
    return context if iterator_of(pipe) is None else pipe


def _by(signal: str) -> tuple[str, str]:
    return {"Killed": "killed", "Bus error": "shared memory"}.get(signal, "crashed"), signal


def _ended(context: ErrorContext) -> tuple[str, str]:
    """How a process of the iterator's ended, by the exit codes within WAIT."""
    iterator = iterator_of(context)
    processes = attributes(iterator).get("_workers") if iterator is not None else None
    workers = [one for one in processes if isinstance(one, BaseProcess)] if type(processes) is list else []
    until, codes = time.perf_counter() + WAIT, set[int]()
    try:
        while workers and not codes and time.perf_counter() < until:
            codes = {code for one in workers if (code := one.exitcode)} - {-int(signals.SIGTERM)}  # torch's own end
            if not codes:
                time.sleep(0.01)
    except RuntimeError as error:  # torch's handler of SIGCHLD reports it now, at this line
        if (killed := SIGNAL.search(str(error))) is not None:
            return _by(killed[1].strip())
    code = min(codes, default=0)
    if code < 0:
        return _by("Killed" if code == -9 else signals.strsignal(-code) or f"signal {-code}")
    return "exited", f"exit code {code}" if code else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _timeout(state: dict[str, Any]) -> float | None:
    value: Any = state.get("timeout", state.get("_timeout"))
    return float(value) if type(value) in (int, float) and value > 0 else None


def _start(state: dict[str, Any]) -> str:
    """How the loader's processes start."""
    start = state.get("_DataLoader__multiprocessing_context", state.get("_multiprocessing_context"))
    name = type(start).__name__ if start is not None else ""
    if name.endswith("Context") and name != "DefaultContext":
        return name.removesuffix("Context").lower()
    usual = torch.multiprocessing.get_start_method(allow_none=True)
    return usual or torch.multiprocessing.get_context().get_start_method()


def _parts(dataset: Any) -> Iterator[tuple[Any, int]]:
    """(value, bytes) of the data set's own attributes."""
    for value in attributes(dataset).values():
        if shape_of(value) is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            yield value, value.numel() * value.element_size()
        elif type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            yield value, int(value.nbytes)
        elif type(value) in (list, dict, tuple):
            yield value, 0


def _unpicklable(state: dict[str, Any], loader: str) -> Iterator[tuple[str, str]]:
    """(name, description) of the objects that can't be pickled for a new process."""
    dataset = state.get("dataset", state.get("_dataset"))
    arguments = {
        "dataset": dataset,
        "collate_fn": state.get("collate_fn", state.get("_collate_fn")),
        "worker_init_fn": state.get("worker_init_fn"),
        "sampler": state.get("sampler"),
    }
    for name, value in arguments.items():
        if value is not None and (reason := _why_not(value)):
            yield f"{loader or 'loader'}.{name}", reason
    for name, value in attributes(dataset).items() if dataset is not None else ():
        if reason := _why_not(value):
            yield f"{type(dataset).__name__}.{name}", reason
        for inner, thing in attributes(value).items() if type(value).__module__ not in ("builtins", "torch") else ():
            if reason := _why_not(thing):
                yield f"{type(dataset).__name__}.{name}.{inner}", reason


def _why_not(value: Any) -> str:
    kind = type(value)
    if kind is types.FunctionType:
        return (
            "a lambda"
            if "<lambda>" in value.__qualname__
            else ("a function defined inside another one" if "<locals>" in value.__qualname__ else "")
        )
    if kind in (types.GeneratorType, types.ModuleType) or kind.__module__ in ("_thread", "_io", "sqlite3", "_sqlite3"):
        return f"a `{kind.__name__}`"
    qualified = type.__dict__["__qualname__"].__get__(kind)
    return f"an object of `{kind.__name__}`, a class defined inside a function" if "<locals>" in qualified else ""


def _in_notebook(kind: type) -> bool:
    module = sys.modules.get("__main__")
    return kind.__module__ == "__main__" and getattr(module, "__file__", None) is None


def _shared() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(SHARED)
    except OSError:  # not Linux
        return None, None
    return usage.total, usage.free


def _memory_free() -> int | None:
    import psutil

    return int(psutil.virtual_memory().available)


def _files() -> int | None:
    if os.name == "nt":
        return None
    import resource

    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
