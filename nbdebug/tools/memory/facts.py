"""All that the memory rules know: sizes in bytes, names and places; no tensors.

MemoryFacts
├── now: HeldMemory      what is held at this moment, by owner
│   ├── holdings         one for each owner: kind, name, bytes
│   └── devices          what the allocator says, one for each device
├── step: StepMemory     one step: its peak and what it is made of, by category, module and line
├── growth: Leak …       what every step leaves behind, with its holder
├── notebook: KeptByNotebook …  what the notebook keeps by itself: outputs, tracebacks, displayed objects
└── workers: LoaderWorkers      what a loader's worker processes copy
"""

from __future__ import annotations

import dataclasses

from nbdebug.report import Where

NOWHERE = Where()
SMALL = 64 << 10
"""Bytes that a step adds: below this a thousand steps keep less than 64 MiB, and nobody runs out of memory by it."""
KINDS = (
    "parameter",
    "gradient",
    "optimizer state",
    "buffer",
    "variable",
    "cell output",
    "traceback",
    "closure",
    "graph",
    "unknown",
)
"""What an owner can be. "graph": saved by autograd for a backward that has not come; "unknown": allocated, without a
name."""
CATEGORIES = ("parameters", "gradients", "optimizer state", "buffers", "activations", "inputs", "temporaries", "other")
"""What memory is used for in a step. activations: made in the forward and still needed by the backward."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """An owner and what it holds. kind: one of KINDS; name: as the user would write it ("model.head.weight",
    "history[3].loss", "Out[7]"); bytes: of its storages, each counted once, at the first owner in the order of KINDS;
    storages: how many; device: "cpu", "cuda:0"; dtype, shape: of its largest tensor; also: other names of the same
    memory; where: the line that has put it there, if known."""

    kind: str
    name: str
    bytes: int
    storages: int = 1
    device: str = "cpu"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Device:
    """What the allocator of one device says, in bytes; None: it does not say. live: in tensors that were found; total:
    of the card or the machine; free: still to be had; largest: the largest piece that lies free within what is
    reserved. process: of this process as the system sees it (on the CPU: resident set)."""

    name: str
    live: int
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    total: int | None = None
    free: int | None = None
    largest: int | None = None
    process: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """The share of what is reserved that is not allocated; None where there is no such allocator."""
        if not self.reserved or self.allocated is None:
            return None
        return 1.0 - self.allocated / self.reserved


@dataclasses.dataclass(frozen=True)
class HeldMemory:
    """What is held at one moment. tensors: live tensors; storages: of them, each counted once."""

    holdings: tuple[Holding, ...] = ()
    devices: tuple[Device, ...] = ()
    tensors: int = 0
    storages: int = 0


@dataclasses.dataclass(frozen=True)
class PeakPart:
    """A module or a line, and what it made. saved: bytes that it made and that were alive at the peak; made: all bytes
    that it allocated in the step; most: the largest single allocation; activations: of `saved`, what the backward
    needs."""

    name: str
    saved: int
    made: int
    most: int = 0
    where: Where = NOWHERE
    activations: int = 0


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """One step. base, peak, after: live bytes when it began, at most, when it ended. at_peak: bytes by one of
    CATEGORIES; place: where the peak was; modules, lines: largest first; state: optimizer state by parameter, largest
    first; course: (event, live bytes) as drawn; device; measured_peak: what the allocator says (None: it does not
    say); phases: the event at which each began; hidden: of the peak, what an op took for itself and no tensor held, and
    hidden_in: that op; backwards: how often backward ran; evaluated: calls of a model in eval mode that recorded a
    graph; optimizers: steps of optimizers; optimizer: the class of the first of them; rows: of the largest table of
    parameters (name, rows that had a gradient, rows); total: bytes of the card (None: the host); unused: of the peak,
    what a model in eval mode recorded and no backward met, and kept: the variable that adds up or collects around its
    call, at kept_at. untrained: a model in eval mode that no optimizer trains and that was called with gradients on, at
    kept_at; `unused` is then what it recorded."""

    base: int
    peak: int
    after: int
    at_peak: dict[str, int]
    place: Where = NOWHERE
    modules: tuple[PeakPart, ...] = ()
    lines: tuple[PeakPart, ...] = ()
    state: tuple[tuple[str, int], ...] = ()
    course: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"
    measured_peak: int | None = None
    phases: dict[str, int] = dataclasses.field(default_factory=dict)
    hidden: int = 0
    hidden_in: str = ""
    backwards: int = 0
    evaluated: int = 0
    optimizers: int = 0
    rows: tuple[str, int, int] | None = None
    total: int | None = None
    optimizer: str = ""
    unused: int = 0
    kept: str = ""
    kept_at: Where = NOWHERE
    untrained: str = ""


@dataclasses.dataclass(frozen=True)
class Leak:
    """What grows from step to step. holder: by name; kind: "graph", "hook", "cache", "exception", "output", "list" …;
    bytes: a step adds so many; steps: seen to grow in so many; where: the line that puts it there; grad: what is kept
    still has its graph; evaluation: it was made in an evaluation that needs no gradient; module: that the kept tensors
    come from, if one; items: a step adds so many; nodes: so many nodes of a graph; own: of the bytes, what would stay
    without the graph; shown: what the kept tensors are by their shapes; arrays: they are numpy's; plain: bytes in
    Python objects that are no tensors; chained: one tensor whose graph grows; backward: the step runs a backward;
    emptied: some line of the source takes things out again; names: what the holder is called, as a part of what; after:
    bytes that a step added when the fix was tried; traced: the line was seen at work (else it was found by reading the
    source)."""

    holder: str
    kind: str
    bytes: int
    steps: int
    where: Where = NOWHERE
    grad: bool = False
    evaluation: bool = False
    module: str | None = None
    items: int = 0
    nodes: int = 0
    own: int = 0
    shown: int = 0
    arrays: bool = False
    plain: int = 0
    chained: bool = False
    backward: bool = False
    emptied: bool = False
    names: tuple[str, ...] = ()
    after: int | None = None
    traced: bool = False


@dataclasses.dataclass(frozen=True)
class KeptByNotebook:
    """What the notebook keeps by itself. how: "output", "traceback", "displayed", "hook", "loss"; name: "Out[7]",
    "sys.last_value", …; bytes: that nothing else of the user's holds, so that would come back; storages; release: the
    word for `free` that frees it; also: further places that keep the same; where: the line at which it came about;
    what: in a few words ("float32 (512, 2048)"); items: things in it; nodes: of autograd's graph."""

    how: str
    name: str
    bytes: int
    storages: int = 0
    release: str = ""
    also: tuple[str, ...] = ()
    where: Where = NOWHERE
    what: str = ""
    items: int = 0
    nodes: int = 0


@dataclasses.dataclass(frozen=True)
class LoaderWorkers:
    """A loader's workers. holder: the data set's attribute; objects: Python objects in it; bytes: that every worker
    copies once it has read them all; workers: how many; measured: private bytes that a child process really gained by
    reading them (None: not measured); packed: the same with the records in one array (None: not tried); records: what
    they are: "text", "numbers" or "records"."""

    holder: str
    objects: int
    bytes: int
    workers: int
    measured: int | None = None
    packed: int | None = None
    records: str = "records"


@dataclasses.dataclass(frozen=True)
class MemoryFacts:
    """See the top of the file. after_steps: after each step (live bytes, bytes that came in it and stayed, resident set
    of the process); stays: what a single run has added and left; unchecked: what was not checked, and why."""

    now: HeldMemory | None = None
    step: StepMemory | None = None
    growth: tuple[Leak, ...] = ()
    notebook: tuple[KeptByNotebook, ...] = ()
    workers: LoaderWorkers | None = None
    after_steps: tuple[tuple[int, int, int], ...] = ()
    stays: tuple[Holding, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RefusedRequest:
    """What the error says of itself. bytes: requested; device: "cpu", "cuda:0", …; total: of the card; free: then;
    allowed: of the card to this process, where it has a limit; allocated: in tensors; unused: reserved by
    torch, in no tensor; process: in use by this process, beyond torch too. None: it does not say."""

    device: str
    bytes: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    allocated: int | None = None
    unused: int | None = None
    process: int | None = None


@dataclasses.dataclass(frozen=True)
class FailedWork:
    """What the failed call was doing, as far as its frames show. batch: rows of the outermost module's input, and
    batched: bytes of held activations that grow with them; activations: all held activations, and of these in float32;
    training: the module was in training mode; grad: autograd was recording; blocks: (name, count) of the module's
    repeated blocks; parameters, state: bytes; steps: that the optimizer has done before, None where it does not count;
    optimizer: its class; through: which share of the blocks the forward had come through."""

    batch: int | None = None
    batched: int = 0
    activations: int = 0
    activations32: int = 0
    training: bool | None = None
    grad: bool = False
    blocks: tuple[str, int] | None = None
    parameters: int = 0
    state: int = 0
    steps: int | None = None
    optimizer: str = ""
    through: float | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed allocation. error: the exception's class; where: the user's line, and the module that ran; asked_as:
    what it was for, in words, with its shape; held: by owner, largest first; kept: what the notebook keeps besides;
    course: live bytes after each earlier step, where a watch has counted; limit: all that there is for this device;
    free: what was still to be had, as far as it is known; left: bytes in use that no name was found for; gone: of
    these, what is in use no longer: something held it then, an earlier failure's frames, and has let it go; alike:
    of held activations that have the requested shape."""

    error: str
    asked: RefusedRequest
    where: Where = NOWHERE
    asked_as: str = ""
    held: tuple[Holding, ...] = ()
    kept: tuple[KeptByNotebook, ...] = ()
    work: FailedWork = FailedWork()
    course: tuple[int, ...] = ()
    limit: int | None = None
    free: int | None = None
    left: int = 0
    gone: int = 0
    alike: int = 0
    unchecked: tuple[str, ...] = ()

    @property
    def short(self) -> int | None:
        """How much was missing; None where it is not known."""
        if self.asked.bytes is None or self.free is None:
            return None
        return max(0, self.asked.bytes - self.free)
