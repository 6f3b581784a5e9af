"""What is known of a loader's worker that died, could not start or did not answer."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised


@dataclasses.dataclass(frozen=True)
class WorkerDied:
    """what: "killed" (by the system), "shared memory", "crashed" (a signal), "exited", "timeout", "bootstrap" (no main
    guard), "not picklable", "open files", "cuda after fork".

    signal: its name. workers, prefetch, timeout: of the loader. start: how its processes start ("fork", "spawn").
    shared_total, shared_free, memory_free, dataset_bytes: in bytes; dataset_bytes counts tensors and arrays, items the
    Python objects in its lists. unpicklable: by the user's name ("dataset.transform"), and what it is. in_notebook: the
    data set's class, or the function, is defined in a cell. files: how many a process may open.
    """

    raised: Raised
    what: str
    signal: str = ""
    loader: str = ""
    dataset: str = ""
    workers: int | None = None
    prefetch: int | None = None
    timeout: float | None = None
    start: str = ""
    shared_total: int | None = None
    shared_free: int | None = None
    memory_free: int | None = None
    dataset_bytes: int | None = None
    items: int | None = None
    unpicklable: str = ""
    unpicklable_is: str = ""
    in_notebook: bool = False
    files: int | None = None
