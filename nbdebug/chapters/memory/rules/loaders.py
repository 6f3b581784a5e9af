"""The rule for what a loader's workers copy."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.memory.facts import MemoryFacts, Workers
from nbdebug.chapters.memory.rules.words import finding
from nbdebug.finding import Finding, Fix, Where
from nbdebug.sizes import size

MATTERS = 8 << 20
"""Bytes for each worker; 16 workers then copy 128 MiB."""
CONFIRMED = 0.25
"""Share of the estimate that a child process must really have gained, where it was measured."""


@rule(
    code="memory/loader-workers-copy",
    title="Every worker of the loader copies the data set's Python objects.",
    symptom="With `num_workers` above zero the machine's memory fills up during the first epoch, once for every "
    "worker; with `num_workers=0` it stays flat.",
    cause="A worker starts as a copy of the process that shares its memory until one of the two writes to it. Python "
    "writes into each object that it looks at, to count references, so a worker that reads a list of many "
    "strings comes to own a copy of every page on which they lie.",
    confirm="`psutil.Process(pid).memory_full_info().uss` of a worker rises while it reads, up to the list's size.",
    fix="Keep the records in one array: `np.array(lines)`, a tensor, a memory-mapped file, an Arrow table; or the "
    "pickled records in one array of bytes with an array of offsets.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_workers_copy(facts: MemoryFacts) -> Finding | None:
    told = facts.workers
    if told is None or told.bytes < MATTERS:
        return None
    if told.measured is not None and told.measured < CONFIRMED * told.bytes:
        return None
    each = told.measured if told.measured is not None else told.bytes
    title = (
        f"`{told.holder}` holds {told.objects:,} Python objects, and each of the {told.workers} workers that "
        f"reads them copies {size(each)}: {size(each * told.workers)} in all"
    )
    evidence = {"objects": told.objects, "workers": told.workers, "bytes for each worker, estimated": told.bytes}
    if told.measured is not None:
        evidence["bytes that a child process gained by reading them all"] = told.measured
    return finding("loader-workers-copy", title, Where(), [told.holder], [_packed(told)], evidence)


def _packed(told: Workers) -> Fix:
    name = told.holder.rpartition(".")[2]
    if told.records in ("text", "numbers"):
        code = f"self.{name} = np.array({name})"
    else:
        code = (
            f"packed = [np.frombuffer(pickle.dumps(record), np.uint8) for record in {name}]\n"
            "self.ends = np.cumsum([len(one) for one in packed])\nself.data = np.concatenate(packed)"
        )
    if told.packed is None or told.measured is None:
        return Fix("Keep the records in one array.", code, None, {"a worker copies": size(told.bytes)})
    return Fix(
        "Keep the records in one array.",
        code,
        told.packed < told.measured // 2,
        {"bytes that a child gained as it is": told.measured, "bytes with the fix": max(0, told.packed)},
    )
