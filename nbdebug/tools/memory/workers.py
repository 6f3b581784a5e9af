"""A loader's data set of many small Python objects, and what each worker process copies of it.

A worker starts as a copy of this process that shares its memory until one of the two writes. Python writes into every
object that it only reads (its count of references), so a worker that reads all records owns a copy of all of them in
the end. An array has one such count for all its numbers.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from nbdebug.observe.variables import attributes
from nbdebug.process import in_copy
from nbdebug.tools.memory.facts import LoaderWorkers
from nbdebug.tools.memory.holders import PLAIN, measure

MANY = 10_000
"""Objects; fewer take less than some hundreds of pages."""
SAMPLE = 400
DEPTH = 4
HEADER = 16
"""What the allocator rounds an object's size up to."""


def worker_copies(loaders: Mapping[str, Any], trial: bool = True) -> LoaderWorkers | None:
    """The loader whose workers copy most; None where none does. trial: let a child process read the records once and
    measure what it then owns."""
    matches = []
    for name, loader in loaders.items():
        workers = getattr(loader, "num_workers", 0)
        if isinstance(loader, torch.utils.data.DataLoader) and workers > 0 and _forks(loader):
            matches += [(n, thing, workers) for n, thing in _containers(f"{name}.dataset", loader.dataset)]
    estimates = [(_estimated(n, thing, workers), thing) for n, thing, workers in matches]
    estimates = [pair for pair in estimates if pair[0].objects >= MANY]
    if not estimates:
        return None
    most, thing = max(estimates, key=lambda pair: pair[0].bytes)
    return _measured(most, thing) if trial else most


def _forks(loader: Any) -> bool:
    """A worker that is a new process gets the data set as a pickle, and owns it all from the start."""
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=False)
    return sys.platform.startswith("linux") and str(method) in ("fork", "forkserver")


def _containers(name: str, thing: Any, depth: int = DEPTH) -> list[tuple[str, Any]]:
    """Long containers in the attributes of a data set, and in those of what it wraps."""
    containers: list[tuple[str, Any]] = []
    kind, size, _ = measure(thing)
    if issubclass(type(thing), tuple):
        kind, size = "tuple", tuple.__len__(thing)
    if kind in (*PLAIN, "tuple") and kind != "set":
        if size >= 100:
            return [(name, thing)]
        parts = dict.items(thing) if kind == "dict" else enumerate(thing)
        inside = [(f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, value) for key, value in parts]
    elif isinstance(thing, (torch.Tensor, torch.nn.Module, type)):
        inside = []
    else:
        inside = [(f"{name}.{key}", value) for key, value in attributes(thing).items()]
    for part, value in inside if depth else ():
        containers += _containers(part, value, depth - 1)
    return containers


def _members(thing: Any) -> Any:
    """What a container holds, read as the plain container that it is."""
    if isinstance(thing, dict):
        return itertools.chain(dict.keys(thing), dict.values(thing))
    base = list if isinstance(thing, list) else tuple if isinstance(thing, tuple) else type(thing)
    return base.__iter__(thing)


def _estimated(name: str, thing: Any, workers: int) -> LoaderWorkers:
    """Objects and bytes, from a sample of evenly spread members."""
    size = len(thing) * (2 if isinstance(thing, dict) else 1)
    sample = list(itertools.islice(_members(thing), 0, None, max(1, size // SAMPLE)))
    objects = count = 0
    visited: set[int] = set()
    for member in sample:
        inside, weight = _weight(member, visited)
        objects, count = objects + inside, count + weight
    share = size / max(1, len(sample))
    return LoaderWorkers(name, int(objects * share), int(count * share), workers)


def _weight(member: Any, visited: set[int]) -> tuple[int, int]:
    """How many objects a record is, and their bytes; what is shared by many records, once."""
    objects = count = 0
    todo = [member]
    while todo and objects < 1000:
        thing = todo.pop()
        if (
            id(thing) in visited
            or thing is None
            or isinstance(thing, (bool, type))
            or (type(thing) is int and -6 < thing < 257)
        ):
            continue
        visited.add(id(thing))
        objects += 1
        if isinstance(thing, torch.Tensor) or type(thing).__module__ == "numpy":
            count += 64  # the object alone: its numbers are not written to
            continue
        count += -(-sys.getsizeof(thing) // HEADER) * HEADER
        todo += gc.get_referents(thing)
    return objects, count


# -- the trial: a child that reads all records ------------------------------------------------------------------------


def _measured(estimate: LoaderWorkers, thing: Any) -> LoaderWorkers:
    measured = bytes_gained(lambda: _touch(thing))
    packed, kind = _packed(thing) if measured is not None and estimate.bytes < 1 << 29 else (None, "")
    after = bytes_gained(lambda: _touch_array(packed)) if packed is not None else None
    return LoaderWorkers(estimate.holder, estimate.objects, estimate.bytes, estimate.workers, measured, after, kind)


def _touch(thing: Any) -> None:
    """Read every object once, as a worker does in an epoch."""
    todo = [_members(thing)]
    while todo:
        for member in todo.pop():
            if type(member) in (list, tuple):
                todo.append(iter(member))
            elif type(member) is dict:
                todo.append(itertools.chain(dict.keys(member), dict.values(member)))


def _touch_array(array: Any) -> None:
    for start in range(0, len(array), 1000):
        array[start : start + 1000].tolist()


def _packed(thing: Any) -> tuple[Any, str]:
    """The records as one array, and how a person would write that."""
    import numpy

    values = list(dict.values(thing)) if isinstance(thing, dict) else thing
    if not isinstance(values, (list, tuple)) or not values:
        return None, ""
    kinds = {type(v) for v in itertools.islice(values, 0, None, max(1, len(values) // SAMPLE))}
    if kinds <= {int, float} or kinds <= {str}:
        try:
            return numpy.array(values), "text" if kinds == {str} else "numbers"
        except (ValueError, OverflowError):
            return None, ""
    return None, "records"


def bytes_gained(work: Callable[[], Any]) -> int | None:
    """Bytes that a copy of this process owns alone once it has done the work, more than before it; None where it can't
    be tried."""

    def measured() -> int:
        gc.disable()
        before = psutil.Process().memory_full_info().uss
        work()
        return int(psutil.Process().memory_full_info().uss - before)

    if not hasattr(os, "fork"):
        return None
    try:
        return int(in_copy(measured))
    except Exception:  # what fails in the copy is no error of the user's
        return None
