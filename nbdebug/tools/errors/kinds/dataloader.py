"""A data loader that fails: a worker that ended, could not start or did not respond, by the message, the loader and the
machine; and a batch that can't be collated, by the samples in the frame of the loader's fetcher.

For a worker of the loader these frames no longer exist: then the message, the number of the batch, the order of the
sampler and the lists of the data set are the evidence.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import inspect
import linecache
import math
import multiprocessing
import os
import re
import shutil
import signal as signals
import sys
import textwrap
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import source_text
from nbdebug.observe.sources import edit_of, nodes_of, parse, statement_at, tree_of, with_keyword
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import module_name
from nbdebug.tools.errors.autograd.functions import function_source
from nbdebug.tools.errors.context import ErrorContext, callee_name, kind_of_message, shape_of, value_of
from nbdebug.tools.errors.rules.dataloader import CollateMismatch, WorkerDied
from nbdebug.tools.errors.sandbox import Run, quiet

# -- the loader and its workers ----------------------------------------------------------------------------------------


def iterator_of(context: ErrorContext) -> Any:
    """The loader's iterator, whose method is in the traceback; None where there is none."""
    for frame in reversed(context.trail):
        mine = frame.names.get("self")
        if "DataLoaderIter" in type(mine).__name__:
            return mine
    return None


def iterator_state(context: ErrorContext) -> dict[str, Any]:
    """The attributes of the same; {} where there is none."""
    iterator = iterator_of(context)
    return attributes(iterator) if iterator is not None else {}


def loader_of(context: ErrorContext) -> tuple[str, str, int | None]:
    """(the loader's name, the data set's name or class, the number of the batch); "" and None where not known."""
    state = iterator_state(context)
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
    dataset = iterator_state(context).get("_dataset")
    for name, value, _ in context.variables():
        if issubclass(type(value), DataLoader):
            state = attributes(value)
            if state.get("dataset") is dataset if dataset is not None else state.get("num_workers"):
                return name, value
    return "", iterator_of(context)


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
                    source = call.args[0] if call.args else keywords.get("dataset")
                    workers = keywords.get("num_workers")
                    count = value_of(workers, frame) if workers is not None else None
                    name = callee_name(source) or ast.unparse(source) if source is not None else ""
                    return name, count if type(count) is int else None
    return "", None


SIGNAL = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([A-Za-z ]+)")
ENDS = {
    "cuda after fork": "Cannot re-initialize CUDA in forked subprocess",
    "open files": "Too many open files|received 0 items of ancdata",
    "shared memory": "No space left on device|out of shared memory|unable to (mmap|(allocate|open) shared memory)",
    "timeout": "DataLoader timed out after",
    "bootstrap": r"before the\s+current process has finished its bootstrapping phase",
    "exited": r"DataLoader worker \(pid(?:\(s\))? .*\) exited unexpectedly",
    "not picklable": "[Cc]an(?:'t|not) (?:pickle|get local object)|not picklable|attribute lookup .* failed",
}
BROKEN = ("ConnectionResetError", "EOFError", "BrokenPipeError")
"""The errors of a worker's broken pipe in this process."""
WAIT = 0.2
"""Seconds after which a dead process has its exit code."""
SHARED = "/dev/shm"
LOADERS = re.compile(r"[\\/]utils[\\/]data[\\/]|[\\/]multiprocessing[\\/]")
STARTING = re.compile(r"[\\/]multiprocessing[\\/](reduction|popen_\w+|process|context)\.py$|[\\/]utils[\\/]data[\\/]")


def detect_dead_worker(context: ErrorContext) -> WorkerDied | None:
    import psutil

    what, signal = _kind(context)
    if what is None:
        return None
    raised, context = context.raised(), _at_the_loader(context)
    name, loader = active_loader(context)
    state = attributes(loader) if loader is not None else {}
    dataset = state.get("dataset", state.get("_dataset"))
    total = free = None
    with contextlib.suppress(OSError):  # not Linux
        total, _, free = shutil.disk_usage(SHARED)
    guilty, is_a = next(_unpicklable(state, name), ("", "")) if what == "not picklable" else ("", "")
    dataset_name, count = loader_in_source(context) if dataset is None else ("", None)
    workers = _whole(state.get("num_workers", state.get("_num_workers")))
    parts = list(_parts(dataset)) if dataset is not None else []
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    in_notebook = dataset is not None and type(dataset).__module__ == "__main__" and script is None
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
        int(psutil.virtual_memory().available),
        sum(count for _, count in parts if count) if parts else None,
        sum(len(value) for value, _ in parts if type(value) in (list, dict, tuple)) or None,
        guilty,
        is_a,
        in_notebook,
        _files(),
    )


def _kind(context: ErrorContext) -> tuple[str | None, str]:
    """(what happened, the signal's name); (None, "") where the error is not about a loader's workers."""
    message = context.message
    if (killed := SIGNAL.search(message)) is not None:
        return _by(killed[1].strip())
    what = kind_of_message(ENDS, message)
    if what in ("timeout", "exited", "bootstrap"):
        ended = re.search(r"exit code (-?\d+)", message)
        return (what, f"exit code {ended[1]}") if ended else _ended(context) if what == "exited" else (what, "")
    if what == "not picklable":
        near = iterator_of(context) is not None or any(f.site.function == "_get_iterator" for f in context.trail)
        return (what, "") if near and any(STARTING.search(f.site.file) for f in context.trail) else (None, "")
    in_worker = context.carried is not None and "worker" in context.carried.where
    loading = any(LOADERS.search(frame.site.file) for frame in context.trail[-6:])
    near = in_worker or loading or iterator_of(context) is not None
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
    processes = iterator_state(context).get("_workers")
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
    if kind is types.FunctionType and "<lambda>" in value.__qualname__:
        return "a lambda"
    if kind is types.FunctionType:
        return "a function defined inside another one" if "<locals>" in value.__qualname__ else ""
    if kind in (types.GeneratorType, types.ModuleType) or module_name(kind) in (
        "_thread",
        "_io",
        "sqlite3",
        "_sqlite3",
    ):
        return f"a `{kind.__name__}`"
    qualified = type.__dict__["__qualname__"].__get__(kind)
    return f"an object of `{kind.__name__}`, a class defined inside a function" if "<locals>" in qualified else ""


def _files() -> int | None:
    if os.name == "nt":
        return None
    import resource

    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


# -- a batch that can't be collated ------------------------------------------------------------------------------------


Path = tuple[Any, ...]
SAMPLE_ENTRIES = 2000
DEEPEST = 6
NUMBERS = (bool, int, float, complex)
DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class Field(NamedTuple):
    """A part of a path: the field of a named tuple."""

    place: int
    name: str


@dataclasses.dataclass(frozen=True)
class SampleEntry:
    """kind: "tensor", "array", "number", "list", "dict", "None", or the name of a class; shape: of a tensor or an
    array, (length,) of a list; keys: of a dict."""

    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    keys: tuple[Any, ...] = ()
    value: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.kind in ("tensor", "array"):
            return f"{self.dtype} {list(self.shape or ())}" + (" (NumPy)" if self.kind == "array" else "")
        if self.kind == "list" and self.shape:
            return f"a list of {self.shape[0]}"
        return {
            "number": "a number",
            "dict": "a dict",
            "None": "None",
            "str": "a string",
            "Image": "a PIL `Image`",
            "sparse tensor": "a sparse tensor",
        }.get(self.kind, f"a `{self.kind}`")

    @property
    def sort(self) -> str:
        """The kind, one for tensors and arrays, which can be collated together."""
        return "tensor" if self.kind == "array" else self.kind


@dataclasses.dataclass(frozen=True)
class Difference:
    """what: as CollateMismatch.what. positions: of the odd samples. odd, usual: their entry and the others'."""

    what: str
    path: Path
    positions: tuple[int, ...]
    odd: SampleEntry | None
    usual: SampleEntry | None
    lacking: tuple[Any, ...] = ()


def flat(sample: Any, path: Path = ()) -> Iterator[tuple[Path, SampleEntry]]:
    """(path, entry) of a sample and everything in it, the outer before the inner."""
    kind, dtype = type(sample), ""
    if (shape := shape_of(sample)) is not None:
        yield path, SampleEntry("tensor", shape, str(sample.dtype).removeprefix("torch."), value=sample)
    elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        dtype = str(sample.dtype)
        yield path, SampleEntry("array", tuple(sample.shape), dtype, value=sample)
    elif kind in NUMBERS or kind.__module__ == "numpy" and hasattr(kind, "dtype"):
        yield path, SampleEntry("number")
    elif sample is None or kind in (str, bytes):
        yield path, SampleEntry("None" if sample is None else kind.__name__)
    elif kind in DICTS:
        keys = tuple(key for key in dict.keys(sample) if type(key) in (str, int))
        yield path, SampleEntry("dict", None, "", keys, sample)
        for key in keys[:SAMPLE_ENTRIES] if len(path) < DEEPEST else ():
            yield from flat(dict.__getitem__(sample, key), (*path, key))
    elif issubclass(kind, (list, tuple)):
        inside = list.__iter__(sample) if issubclass(kind, list) else tuple.__iter__(sample)
        values = list(inside)
        yield path, SampleEntry("list", (len(values),), value=sample)
        names = fields_of(kind)
        for i, value in enumerate(values[:SAMPLE_ENTRIES] if len(path) < DEEPEST else ()):
            yield from flat(value, (*path, Field(i, names[i]) if i < len(names) else i))
    else:
        yield path, SampleEntry(kind.__name__, value=sample)


def fields_of(kind: type) -> tuple[str, ...]:
    """The fields of a named tuple; () of another class."""
    fields = next((vars(one)["_fields"] for one in kind.__mro__ if "_fields" in vars(one)), ())
    return fields if issubclass(kind, tuple) and type(fields) is tuple and all(type(n) is str for n in fields) else ()


def differences(samples: Sequence[Any]) -> list[Difference]:
    """The entries at which the samples can't be collated, in their order."""
    entries: list[dict[Path, SampleEntry]] = [dict(flat(sample)) for sample in samples]
    results: list[Difference] = []
    for path in dict.fromkeys(path for one in entries for path in one):
        if any(path[: len(other.path)] == other.path for other in results):
            continue  # below an entry that differs already
        difference = _at(path, [one.get(path) for one in entries])
        results += [difference] if difference is not None else []
    return results


def _at(path: Path, there: list[SampleEntry | None]) -> Difference | None:
    present = [entry for entry in there if entry is not None]
    if not present or len(present) < len(there):
        return None  # its parent differs, in keys or length, and is reported
    sorts = collections.Counter(entry.sort for entry in present)
    usual = (
        present[0] if len(sorts) == len(present) else next(e for e in present if e.sort == sorts.most_common(1)[0][0])
    )
    if len(sorts) > 1:
        others = [i for i, entry in enumerate(present) if entry.sort != usual.sort]
        what = "none" if all(present[i].kind == "None" for i in others) else "type"
        return Difference(what, path, tuple(others), present[others[0]], usual)
    if usual.kind == "dict":
        lacks = {i: tuple(key for key in present[0].keys if key not in entry.keys) for i, entry in enumerate(present)}
        short = [i for i, missing in lacks.items() if missing]
        return Difference("keys", path, tuple(short), present[short[0]], present[0], lacks[short[0]]) if short else None
    shapes = collections.Counter(entry.shape for entry in present)
    if len(shapes) < 2 or usual.kind not in ("tensor", "array", "list"):
        return None
    most = shapes.most_common(1)[0][0]
    odd = [i for i, entry in enumerate(present) if entry.shape != most]
    what, other = "shape" if usual.sort == "tensor" else "length", next(e for e in present if e.shape == most)
    return Difference(what, path, tuple(odd), present[odd[0]], other)


def unsupported(samples: Sequence[Any]) -> Difference | None:
    """The first entry of a class that can't be collated: an image, an object array, None in every sample."""
    for path, entry in flat(samples[0]) if samples else ():
        if entry.kind == "tensor" and entry.value.layout is not torch.strided:
            entry = dataclasses.replace(entry, kind="sparse tensor")
        if entry.kind in ("tensor", "number", "list", "dict", "str", "bytes"):
            continue
        if entry.kind == "array" and not (entry.dtype == "object" or "U" in entry.dtype[:2]):
            continue
        what = "none" if entry.kind == "None" else "unsupported"
        return Difference(what, path, tuple(range(len(samples))), entry, None)
    return None


COLLATE = re.compile(r"[\\/]utils[\\/]data[\\/]_utils[\\/]collate\.py$")
FETCH = re.compile(r"[\\/]utils[\\/]data[\\/]_utils[\\/]fetch\.py$")
STACKED = re.compile(
    r"Unable to create tensor|"
    r"stack expects each tensor to be equal size|each element in list of batch should be of equal "
    r"size|Trying to resize storage that is not resizable|must have same number of dimensions|"
    r"all input arrays must have the same shape|expected Tensor as element|"
    r"inhomogeneous (shape|part)|expected sequence of length|could not determine the shape of object"
)
ENTRIES = re.compile(r"got \[([\d, ]*)\] at entry 0 and \[([\d, ]*)\] at entry (\d+)")
CLASS = re.compile(r"found <class '([\w.]+)'>|found (object|<U\d+|\w+)\s*$")
ELEMENT = re.compile(r"expected Tensor as element (\d+) in argument 0, but got (\w+)")
NO_ATTRIBUTE = re.compile(r"'(\w+)' object (?:has no attribute|is not (?:iterable|subscriptable))")
SPARSE = re.compile(r"Batches of sparse tensors are not")
NAMED = {"NoneType": "None", "str": "a string", "int": "a number", "float": "a number", "Image": "a PIL `Image`"}
SMALL = 4_000_000
"""Elements of all samples with which a fix is tried: some milliseconds."""


def detect_collate(context: ErrorContext) -> CollateMismatch | None:
    fetch = _fetching(context)
    collating = [frame for frame in context.trail if COLLATE.search(frame.site.file)]
    own = _own_collate(context)
    if not collating and not (own and (STACKED.search(context.message) or context.type in ("KeyError", "TypeError"))):
        return None
    samples = _samples(fetch, collating)
    if samples is None and not own:
        read = read_samples(context, _batch_indices(context, loader_of(context)[2]))
        samples = read if read is not None and differences(read) else None
        collating = [] if samples is not None else collating
        if samples is not None:
            facts = _mismatch_facts(context, differences(samples)[0], samples)
            indices = list(_batch_indices(context, facts.batch))
            message = _from_message(context, own)
            stored = message.stored_at if message is not None else ""
            return dataclasses.replace(facts, indices=tuple(indices[i] for i in facts.positions), stored_at=stored)
    if samples is None:
        return _from_message(context, own) if collating or STACKED.search(context.message) else None
    difference = _difference(context, samples, collating)
    if (
        difference is None
        or not collating
        and not STACKED.search(context.message)
        and difference.what not in ("keys", "none")
    ):
        return None  # the collate function fails by itself
    facts = _mismatch_facts(context, difference, samples)
    indices = _indices(fetch, len(samples))
    return dataclasses.replace(
        facts, own=own, indices=tuple(indices[i] for i in difference.positions if i < len(indices))
    )


def _fetching(context: ErrorContext) -> Frame | None:
    """The frame of the loader's fetcher."""
    return next((frame for frame in reversed(context.trail) if FETCH.search(frame.site.file)), None)


def _own_collate(context: ErrorContext) -> str:
    """The collate function that the fetcher called, where it is not torch's."""
    for fetch, callee in zip(context.trail, context.trail[1:]):
        if FETCH.search(fetch.site.file) and "collate_fn(" in (source_text(fetch.site) or ""):
            if COLLATE.search(callee.site.file):
                return ""
            mine = callee.names.get("self")
            return callee.site.function if callee.site.function != "__call__" else type(mine).__name__
    return ""


def _samples(fetch: Frame | None, collating: Sequence[Frame]) -> Sequence[Any] | None:
    """The samples of the batch, from the fetcher or from the arguments of `default_collate`."""
    data: Any = fetch.names.get("data") if fetch is not None else None
    if data is None and collating:
        data = collating[0].names.get("batch")
    return data if type(data) in (list, tuple) and len(data) > 0 else None


def _difference(context: ErrorContext, samples: Sequence[Any], collating: Sequence[Frame]) -> Difference | None:
    """The difference at the entry that was being collated, else the first one."""
    if SPARSE.search(context.message):
        return unsupported(samples)
    results = differences(samples)
    path = _path_of(collating[-1].names.get("batch"), samples) if collating else None
    if path is not None:
        results = [d for d in results if d.path[: len(path)] == path or path[: len(d.path)] == d.path] or results
    if results:
        return results[0]
    return unsupported(samples) if collating and CLASS.search(context.message) else None


def _path_of(batch: Any, samples: Sequence[Any]) -> Path | None:
    """The path in a sample of the values that `default_collate` was collating."""
    first = batch[0] if type(batch) in (list, tuple) and batch else None
    if first is None:
        return None
    return next((path for path, entry in flat(samples[0]) if entry.value is first), None)


def _indices(fetch: Frame | None, count: int) -> list[int]:
    indices: Any = fetch.names.get("possibly_batched_index") if fetch is not None else None
    dataset = attributes(fetch.names.get("self")).get("dataset") if fetch is not None else None
    if issubclass(type(dataset), torch.utils.data.IterableDataset):
        return []
    known = type(indices) in (list, tuple) and len(indices) == count
    return [i for i in indices if type(i) is int] if known else []


def _mismatch_facts(context: ErrorContext, difference: Difference, samples: Sequence[Any]) -> CollateMismatch:
    loader, dataset, batch = loader_of(context)
    odd, usual, path = difference.odd, difference.usual, difference.path
    last = path[-1] if path else ""
    sample = "nested" if len(path) > 1 else ""
    if len(path) == 1:
        sample = "named tuple" if isinstance(last, Field) else "dict" if type(last) is str else "tuple"
    return CollateMismatch(
        context.raised(),
        difference.what,
        "".join(f".{part.name}" if isinstance(part, Field) else f"[{part!r}]" for part in path),
        last.name if isinstance(last, Field) else str(last),
        str(odd or ""),
        str(usual or ""),
        odd.shape if odd else None,
        usual.shape if usual else None,
        difference.positions,
        batch=batch,
        rows=len(samples),
        lacking=tuple(map(str, difference.lacking)),
        dataset=dataset,
        loader=loader,
        tried=_tried(difference, samples),
        sample=sample,
        trainer=_trainer(context),
    )


def _trainer(context: ErrorContext) -> str:
    """The name of the trainer that makes the loader and collates by its `data_collator`; "" for none."""
    dataset = iterator_state(context).get("_dataset")
    for name, value, _ in context.variables():
        own = attributes(value)
        sets = own.get("train_dataset"), own.get("eval_dataset")
        if name != "self" and "data_collator" in own and dataset is not None and any(one is dataset for one in sets):
            return name
    return ""


# -- in a worker ------------------------------------------------------------------------------------------------------


def _from_message(context: ErrorContext, own: str) -> CollateMismatch | None:
    """The facts from a worker's message, with the order in which its parent requested the samples."""
    loader, dataset, batch = loader_of(context)
    worker = context.carried.where if context.carried else ""
    sizes, kind, element = (pattern.search(context.message) for pattern in (ENTRIES, CLASS, ELEMENT))
    facts = CollateMismatch(context.raised(), "shape", batch=batch, dataset=dataset, loader=loader, own=own)
    facts = dataclasses.replace(facts, worker=worker, entries=_entries(context))
    indices = _batch_indices(context, batch)
    if kind is not None and "default_collate" in context.message:
        name = (kind[1] or kind[2]).rpartition(".")[2]
        return _of_class(facts, name)
    if element is not None:
        place, odd = int(element[1]), NAMED.get(element[2], f"a `{element[2]}`")
        return dataclasses.replace(
            facts,
            what="none" if odd == "None" else "type",
            odd=odd,
            usual="" if odd == "None" else "a tensor",
            positions=(place,),
            indices=tuple(indices[place : place + 1]),
        )
    if (lacks := NO_ATTRIBUTE.search(context.message)) is not None:
        return _of_class(facts, lacks[1])
    if sizes is not None:
        return _shape_mismatch(facts, context, sizes, indices)
    if context.type == "KeyError":
        return dataclasses.replace(facts, what="keys", lacking=(context.message.strip("'"),))
    what = "shape" if STACKED.search(context.message) else "type"
    return dataclasses.replace(facts, what="length" if "each element" in context.message else what)


def _of_class(facts: CollateMismatch, name: str) -> CollateMismatch:
    """An entry of a class that can't be collated."""
    return dataclasses.replace(
        facts, what="none" if name == "NoneType" else "unsupported", odd=NAMED.get(name, f"a `{name}`")
    )


def _shape_mismatch(
    facts: CollateMismatch, context: ErrorContext, match: re.Match[str], indices: Sequence[int]
) -> CollateMismatch:
    shapes = [tuple(int(n) for n in re.findall(r"\d+", text)) for text in match.groups()[:2]]
    place, position = _odd_in_dataset(context, indices, int(match[3]), shapes[0], shapes[1])
    unknown = position is None
    position = int(match[3]) if position is None else position
    usual, odd = shapes if position else shapes[::-1]
    tried = None
    if sum(map(math.prod, shapes)) <= SMALL:
        tried = _tried_on_shapes([torch.zeros(shape, device="cpu") for shape in shapes])
    result = dataclasses.replace(
        facts,
        odd=str(list(odd)),
        usual=str(list(usual)),
        odd_shape=odd,
        usual_shape=usual,
        stored_at=place,
        rows=len(indices) or None,
        tried=tried,
    )
    if unknown:  # of two samples neither is the odd one
        return dataclasses.replace(result, positions=(0, position), indices=tuple(indices[:2]))
    return dataclasses.replace(result, positions=(position,), indices=tuple(indices[position : position + 1]))


def _batch_indices(context: ErrorContext, batch: int | None) -> Sequence[int]:
    """The data set's indices of a batch, where the sampler runs through it in order."""
    sampler = iterator_state(context).get("_index_sampler")
    state = attributes(sampler) if type(sampler) is BatchSampler else {}
    size = state.get("batch_size")
    if type(state.get("sampler")) is not SequentialSampler or type(size) is not int or batch is None:
        return ()
    return range(batch * size, (batch + 1) * size)


def _odd_in_dataset(
    context: ErrorContext, indices: Sequence[int], position: int, first: tuple[int, ...], other: tuple[int, ...]
) -> tuple[str, int | None]:
    """("images[5]", 0 where it is the first that is odd) from a list of tensors, or of their sizes, in the
    data set, or from a batch before it; None where the odd one of the first two is not known."""
    dataset = iterator_state(context).get("_dataset")
    for name, value in attributes(dataset).items() if dataset is not None and position < len(indices) else ():
        if (
            type(value) is list
            and len(value) > indices[position]
            and shape_of(value[indices[position]]) == other
            and shape_of(value[indices[0]]) == first
        ):
            shapes = [shape_of(item) for item in value[:200]]
            odd = 0 if shapes.count(first) < shapes.count(other) else position
            return f"{name}[{indices[odd]}]", odd
    if position > 1:
        return "", position  # those between have the shape of the first
    for name, value in attributes(dataset).items() if dataset is not None and position < len(indices) else ():
        if type(value) is list and len(value) > indices[position] and all(type(item) is int for item in value):
            mine, its = value.count(value[indices[0]]), value.count(value[indices[position]])
            if mine != its and (value[indices[0]], value[indices[position]]) in list(zip(first, other)):
                odd = 0 if mine < its else position
                return f"{name}[{indices[odd]}]", odd
    return "", _unlike_batches(context, position, first, other)


def _unlike_batches(context: ErrorContext, position: int, first: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    """Which is odd, by the previous batch in a variable."""
    shapes = [
        entry.shape
        for _, value, frame in context.variables()
        if frame is not None
        for _, entry in flat(value)
        if entry.kind == "tensor"
    ]
    usual = {shape[1:] for shape in shapes if shape}
    return None if (first in usual) == (other in usual) else 0 if other in usual else position


def _entries(context: ErrorContext) -> tuple[str, ...]:
    """The keys of the samples, from the source of the data set's `__getitem__`."""
    dataset = iterator_state(context).get("_dataset")
    method = next((vars(kind)["__getitem__"] for kind in type(dataset).__mro__ if "__getitem__" in vars(kind)), None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method))) if inspect.isfunction(method) else None
    except (OSError, SyntaxError, TypeError):  # no source
        return ()
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)] if tree is not None else []
    return tuple(
        key.value
        for value in returned
        if isinstance(value, ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


# -- a fix, tried on the samples ------------------------------------------------------------------------------------


def _tried(difference: Difference, samples: Sequence[Any]) -> Mapping[str, Any] | None:
    """Collate the entry after resizing or padding, on detached tensors; None where that is not tried."""
    values: list[Any] = [next((e.value for at, e in flat(sample) if at == difference.path), None) for sample in samples]
    if difference.what != "shape" or any(
        type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided for value in values
    ):
        return None
    if sum(value.numel() for value in values) > SMALL or len({value.dim() for value in values}) > 1:
        return None
    with torch.no_grad():
        plain, size = [value.detach() for value in values], difference.usual.shape if difference.usual else ()
        if values[0].dim() >= 3 and size and all(value.shape[:-2] == size[:-2] for value in values):
            resize = torch.nn.functional.interpolate
            whole = torch.stack([resize(v[None].float(), size=size[-2:])[0] for v in plain if v.dim() == 3])
            return {"the batch then has": str(list(whole.shape))} if len(whole) == len(values) else None
        return _tried_padded(plain)


def _tried_on_shapes(values: list[torch.Tensor]) -> Mapping[str, Any] | None:
    """The same on tensors of the two shapes in a worker's message."""
    images = values[0].dim() >= 3 and values[0].shape[:-2] == values[1].shape[:-2]
    if images or len({value.dim() for value in values}) > 1:
        return None
    with torch.no_grad():
        result = _tried_padded(values)
    return {"two such, padded": result["the batch then has"]} if result else None


def _tried_padded(values: list[torch.Tensor]) -> dict[str, Any] | None:
    """Along the one axis that differs, as the fix does it."""
    axes = [axis for axis in range(values[0].dim()) if len({value.shape[axis] for value in values}) > 1]
    if axes == [0]:
        whole = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    elif len(axes) == 1:
        behind, longest = (0, 0) * (values[0].dim() - 1 - axes[0]), max(value.shape[axes[0]] for value in values)
        whole = torch.stack(
            [torch.nn.functional.pad(value, (*behind, 0, longest - value.shape[axes[0]])) for value in values]
        )
    else:
        return None
    return {"the batch then has": str(list(whole.shape))}


# -- fixes as edits ----------------------------------------------------------------------------------------------------


def _dataset_of(context: ErrorContext) -> Any:
    fetch = _fetching(context)
    if fetch is not None and "self" in fetch.names:
        return attributes(fetch.names["self"]).get("dataset")
    return iterator_state(context).get("_dataset")


def read_samples(context: ErrorContext, indices: Sequence[int], edit: Edit | None = None) -> list[Any] | None:
    """The samples of these indices, as the user's `__getitem__` makes them by torch's functions alone, with an edit of
    it; None where it needs more. Nothing of the user's is run."""
    from nbdebug.tools.errors.training import TRAINING_SECONDS, TrainingSandbox

    dataset = _dataset_of(context)
    method = class_attribute(dataset, "__getitem__", None)
    if type(method) is not FunctionType or not indices or not context.users:
        return None
    sandbox = TrainingSandbox(context.users[0], edit)
    sandbox.run = Run(time.monotonic() + TRAINING_SECONDS, sandbox)
    try:
        with quiet():
            samples = [sandbox.call(method, dataset, i) for i in indices[:64]]
    except Exception:  # what it needs is not torch's alone, or the data refuses it
        return None
    return samples if edit is None or sandbox.covered else None


def cured(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with a collate function of the fixes written at the user's own `DataLoader`, and a new size in their
    `__getitem__`; both tried on the samples of the batch."""
    fixes = []
    for fix in finding.fixes:
        edit = _of_loader(context, fix.code) if fix.code.startswith("def collate(") else _of_item(context, fix.code)
        after = _batch_with(context, fix.code, edit) if edit is not None else None
        fixes.append(Fix.of(fix.title, edit, True, after) if edit is not None and after is not None else fix)
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _of_loader(context: ErrorContext, code: str) -> Edit | None:
    """The statement that makes the loader, with the collate function before it."""
    function = code.rpartition("\n\n")[0] if "DataLoader(" in code else code
    name = loader_of(context)[0]
    for file in dict.fromkeys(frame.site.file for frame in context.users):
        calls = [n for n in nodes_of(file) if isinstance(n, ast.Call) and callee_name(n) == "DataLoader"]
        lines = [(statement_at(file, call.lineno), call) for call in calls]
        named = [p for p in lines if isinstance(p[0], ast.Assign) and ast.unparse(p[0].targets[0]) == name]
        for line, call in named or lines if len(named or lines) == 1 else ():
            if line is not None and not any(k.arg == "collate_fn" for k in call.keywords):
                pad = "\n" + " " * line.col_offset
                text = function.replace("\n", pad).replace(pad + "\n", "\n\n")
                here = with_keyword(file, call, "collate_fn", "collate")
                workers = any(k.arg == "num_workers" for k in call.keywords)
                if line.col_offset and workers and multiprocessing.get_start_method() != "fork":
                    return _above(file, edit_of(file, here), function)
                return edit_of(file, {line: f"{text}{pad}{{raw}}", **here})
    return None


def _above(file: str, edit: Edit | None, function: str) -> Edit | None:
    """The edit with a function of the file's own before the one that it stands in: workers that are started anew can't
    be given a local one."""
    tree, lines = tree_of(file), [line.rstrip("\n") for line in linecache.getlines(file)]
    if edit is None or tree is None:
        return None
    first = max(n.lineno for n in tree.body if n.lineno <= edit.line)
    between = lines[first - 1 : edit.line - 1]
    old, new = "\n".join([*between, edit.old]), "\n".join([*function.split("\n"), "", "", *between, edit.new])
    return dataclasses.replace(edit, line=first, old=old, new=new)


def _of_item(context: ErrorContext, code: str) -> Edit | None:
    """An assignment before the only `return` of `__getitem__`, where that returns what it assigns."""
    source = function_source(class_attribute(_dataset_of(context), "__getitem__", None))
    tree = parse(code)
    lines = [n for n in source.statements() if isinstance(n, ast.Return)] if source is not None else []
    if source is None or len(lines) != 1 or tree is None or len(tree.body) != 1 or "#" in code:
        return None
    new, line = tree.body[0], lines[0]
    if not isinstance(new, ast.Assign) or ast.unparse(new.targets[0]) not in [
        n.id for n in ast.walk(line) if isinstance(n, ast.Name)
    ]:
        return None
    return edit_of(source.source.file, {line: code + "\n" + " " * line.col_offset + "{raw}"})


def _batch_with(context: ErrorContext, code: str, edit: Edit) -> dict[str, Any] | None:
    """What the batch becomes with an edit; None where it can't be told, or still can't be collated."""
    fetch = _fetching(context)
    collating = [frame for frame in context.trail if COLLATE.search(frame.site.file)]
    samples = _samples(fetch, collating)
    indices = _indices(fetch, len(samples)) if samples else _batch_indices(context, loader_of(context)[2])
    try:
        with quiet():
            if code.startswith("def collate("):
                samples = samples if samples is not None else read_samples(context, indices)
                names: dict[str, Any] = {"torch": torch}
                exec(code.rpartition("\n\n")[0], names)  # a text of ours: torch's functions, on the samples
                batch = names["collate"](samples)
            else:
                batch = torch.utils.data.default_collate(read_samples(context, indices, edit) or [])
    except Exception:
        return None
    shapes = [str(list(entry.shape or ())) for _, entry in flat(batch) if entry.kind == "tensor"]
    return {"the batch then has": ", ".join(shapes[:4])} if shapes else None
