"""The rule over a loader's workers: one that died, could not start, or did not answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_workers import WorkerDied
from nbdebug.finding import Finding, Fix
from nbdebug.sizes import size

ROOM = 2 << 30
"""Shared memory below which a few workers with pictures run out of it: Docker gives 64 MiB, torch's README asks for
--ipc=host or a --shm-size."""


@rule(
    code="error/loader-worker-died",
    title="A worker of the DataLoader died, could not start, or did not answer.",
    symptom="DataLoader worker (pid …) is killed by signal, or exited unexpectedly; Bus error; can't pickle …; too "
    "many "
    "open files; DataLoader timed out; an attempt to start a new process before the bootstrapping phase.",
    cause="The machine ended it (memory, or shared memory, ran out), a library in it crashed, or it could not be "
    "started: "
    "under spawn everything that a worker needs is pickled, and the main file is imported again.",
    confirm="`num_workers=0` runs the same code in this process and shows the true error. `df -h /dev/shm` and `dmesg` "
    "show what ran out.",
    fix="Fewer workers; more shared memory (`docker run --shm-size=8g`); nothing in the data set that can't be "
    "pickled; "
    "`if __name__ == '__main__':` around the script; no CUDA inside of the data set.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_worker_died(facts: Any) -> Finding | None:
    if not isinstance(facts, WorkerDied):
        return None
    where = dataclasses.replace(facts.raised.where, phase="input", module=None, module_type=None)
    return Finding("error/loader-worker-died", _title(facts), where, _evidence(facts), tuple(_fixes(facts)))


def _title(facts: WorkerDied) -> str:
    loader = f"`{facts.loader}`" if facts.loader else "the loader"
    count = f" (`num_workers={facts.workers}`)" if facts.workers else ""
    if facts.what == "killed":
        return f"The system killed a worker of {loader}{count}: as a rule because the machine's memory ran out."
    if facts.what == "shared memory":
        total = f" of {size(facts.shared_total)}" if facts.shared_total else ""
        return (
            f"A worker of {loader}{count} found no room in shared memory{total}, through which batches are handed over."
        )
    if facts.what == "crashed":
        return (
            f"A worker of {loader}{count} crashed ({facts.signal}): in a library that the data set calls, not in "
            f"Python."
        )
    if facts.what == "timeout":
        after = f" within {facts.timeout:g} s" if facts.timeout else ""
        return f"No worker of {loader}{count} gave a batch{after}: a sample takes too long, or a worker hangs."
    if facts.what == "bootstrap":
        return (
            "The workers are started by importing your file again, and its training starts again with that: it "
            "stands "
            "outside `if __name__ == '__main__':`."
        )
    if facts.what == "not picklable":
        guilty = (
            f"`{facts.unpicklable}` is {facts.unpicklable_is}" if facts.unpicklable else "the data set holds something"
        )
        return f"The workers of {loader} can't be sent the data set: {guilty}, which can't be pickled."
    if facts.what == "open files":
        limit = f" ({facts.files} are allowed)" if facts.files else ""
        return f"The workers of {loader}{count} keep too many files open{limit}: each tensor they hand over holds one."
    if facts.what == "cuda after fork":
        return f"The data set of {loader}{count} uses CUDA, which a forked worker can't."
    return _exited(facts, loader, count)


def _exited(facts: WorkerDied, loader: str, count: str) -> str:
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return (
            f"The workers of {loader} start afresh ({facts.start}) and don't find `{facts.dataset}`, which is "
            f"defined "
            "in a cell of the notebook."
        )
    how = f" ({facts.signal})" if facts.signal else ""
    why = (
        "a crash in a library, or an exit"
        if facts.signal
        else ("killed by the system (as a rule because memory ran out), a crash in a library, or an exit")
    )
    return f"A worker of {loader}{count} ended{how} without an error of Python's: {why}."


def _evidence(facts: WorkerDied) -> dict[str, Any]:
    evidence = {
        "ended by": facts.signal or None,
        "loader": facts.loader or None,
        "data set": facts.dataset or None,
        "workers": facts.workers,
        "batches made in advance, by each": facts.prefetch,
        "processes start by": facts.start or None,
        "can't be pickled": facts.unpicklable or None,
        "shared memory": _of(facts.shared_total, facts.shared_free),
        "memory free now": size(facts.memory_free) if facts.memory_free is not None else None,
        "tensors and arrays of the data set": size(facts.dataset_bytes) if facts.dataset_bytes else None,
        "Python objects in its lists": facts.items,
        "timeout": facts.timeout,
        "files a process may open": facts.files if facts.what == "open files" else None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _of(total: int | None, free: int | None) -> str | None:
    return None if total is None or free is None else f"{size(total)}, {size(free)} free now"


def _fixes(facts: WorkerDied) -> list[Fix]:
    loader = facts.loader or "loader"
    apart = Fix(
        "Run it once without workers: the same code, in this process, with its true error.",
        f"{loader} = DataLoader(..., num_workers=0)",
    )
    fewer = (
        apart
        if facts.workers == 1
        else Fix(
            "Fewer workers, and fewer batches in advance.",
            f"{loader} = DataLoader(..., num_workers={(facts.workers or 4) // 2}, prefetch_factor=1)",
        )
    )
    if facts.what == "shared memory":
        small = facts.shared_total is not None and facts.shared_total < ROOM
        more = Fix(
            f"Give the machine more shared memory{' (Docker gives 64 MiB by itself)' if small else ''}, or hand "
            "the batches over through files.",
            "docker run --shm-size=8g ...\n# or, before the loader is made:\n"
            "torch.multiprocessing.set_sharing_strategy('file_system')",
        )
        return [more, fewer]
    if facts.what == "killed":
        return [
            fewer,
            Fix(
                "Keep the samples in arrays or tensors, not in lists of Python objects: each worker's copy "
                "of a list grows as it is read.",
                "self.paths = numpy.array(paths)   # in the data set's __init__",
            ),
        ]
    if facts.what == "not picklable":
        return [_picklable(facts)]
    if facts.what == "bootstrap":
        return [
            Fix(
                "Start the training only where the file is run, not where it is imported.",
                "if __name__ == '__main__':\n    main()",
            )
        ]
    if facts.what == "open files":
        return [
            Fix(
                "Hand tensors over by name instead of by open file.",
                "torch.multiprocessing.set_sharing_strategy('file_system')   # or: ulimit -n 65536",
            ),
            Fix("Don't keep batches of the loader in a list as they are.", "kept.append(batch.clone())"),
        ]
    if facts.what == "cuda after fork":
        return [
            Fix(
                "Keep the data set on the CPU, and move each batch in the loop.",
                "batch = batch.to('cuda', non_blocking=True)",
            ),
            Fix("Or start the workers afresh.", f"{loader} = DataLoader(..., multiprocessing_context='spawn')"),
        ]
    if facts.what == "timeout":
        return [
            apart,
            Fix(
                "Where samples are merely slow: wait longer.",
                f"{loader} = DataLoader(..., timeout={int((facts.timeout or 30) * 4)})",
            ),
        ]
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return [Fix("Put the data set's class into a file, and import it.", f"from data import {facts.dataset}"), apart]
    return [apart] if fewer is apart else [apart, fewer]


def _picklable(facts: WorkerDied) -> Fix:
    name = facts.unpicklable.rpartition(".")[2] or "transform"
    if "lambda" in facts.unpicklable_is or "function" in facts.unpicklable_is:
        code = f"def {name}(...):   # at the top level of a file\n    ..."
        return Fix(f"Make `{name}` a function at the top level of a file (or a functools.partial of one).", code)
    return Fix(
        f"Open `{name}` inside of the worker, when it is first needed.",
        f"if self.{name} is None:   # in __getitem__\n    self.{name} = ...",
    )
