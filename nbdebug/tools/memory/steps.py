"""The steps, one after the other, under watch; then the facts: of the last step its peak, where it was and what memory
was used for then; and what each step left behind."""

from __future__ import annotations

import bisect
import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.live import progress_range
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.modules import eager
from nbdebug.observe.recorder import Op
from nbdebug.observe.tensors import base_name
from nbdebug.report import Where
from nbdebug.tools.memory.facts import CATEGORIES, SMALL, Holding, Leak, MemoryFacts, PeakPart, StepMemory
from nbdebug.tools.memory.holders import HolderScan, Key, count_graphs
from nbdebug.tools.memory.inventory import Graphs
from nbdebug.tools.memory.leaks import ENOUGH, collected_near, cycle_of_function, leaks_in_loop, leaks_of
from nbdebug.tools.memory.owners import Key as TensorKey
from nbdebug.tools.memory.owners import OwnerIndex, Ownership, live
from nbdebug.tools.memory.trace import Allocation, StepTrace

POINTS = 240
"""Points of the course that go into the report."""
MOST = 40
"""Modules and lines that are kept, the largest first."""


def step_memory(trace: StepTrace, device: str) -> StepMemory:
    """The step that ended last, on one device."""
    log, allocator = trace.log, trace.meter.measured.get(device)
    base = log.course.get(device, [(0, 0)])[0][1]
    highest, event = log.peaks.get(device, (0, 0))
    hidden = beside = 0
    op = None
    if allocator is not None:  # the allocator's own word: workspaces count, and what no tensor of ours holds
        beside = max(0, trace.meter.base.get(device, base) - base)
        measured, event, op, hidden = allocator
        highest, hidden = measured - beside, max(0, measured - beside - _live_at(log.course[device], event))
    elif device == "cpu" and trace.host_peak[0] > highest - base:
        hidden = trace.host_peak[0] - (highest - base)
        highest += hidden
    alive = [b for b in log.allocations if b.device == device and b.start <= event and (b.end or event + 1) > event]
    uses = {id(b): use_of(b, trace) for b in alive}
    at_peak = dict.fromkeys(CATEGORIES, 0)
    for allocation in alive:
        at_peak[uses[id(allocation)]] += allocation.nbytes
    at_peak["temporaries"] += hidden
    at_peak["other"] += beside
    allocations = [b for b in log.allocations if b.device == device and b.start > log.began and b.op is not None]
    op = op or next((b.op for b in reversed(alive) if b.start == event), None)
    recorded = [b for b in alive if b.evaluation and b.needs and b.op is not None and b.op.grad]
    unused = sum(b.nbytes for b in recorded if not _met(b, trace))
    kept, kept_at = collected_near(trace.evaluated_at) if unused else ("", None)
    model, untrained, called_at = (0, "", None) if unused else trace.untrained()
    if untrained:
        kept_at, unused = called_at, sum(b.nbytes for b in recorded if b.evaluation == model)
    return StepMemory(
        base=base + beside,
        peak=highest + beside,
        after=log.live.get(device, 0) + beside,
        at_peak=at_peak,
        place=place_of(op),
        modules=_modules(allocations, uses),
        lines=_lines(allocations, uses),
        state=tuple(sorted(trace.state.items(), key=lambda pair: -pair[1])[:MOST]),
        course=downsample([(at - log.began, live + beside) for at, live in log.course.get(device, [])]),
        device=device,
        measured_peak=_measured(trace, device, base),
        phases={name: at - log.began for name, at in trace.phases.items()},
        hidden=hidden,
        hidden_in=base_name(trace.host_peak[1]) if allocator is None else (op.name if op is not None else ""),
        backwards=len(trace.backwards),
        evaluated=trace.evaluated,
        optimizers=trace.steps,
        optimizer=next((type(one).__name__ for one in trace.optimizers.values()), ""),
        total=torch.cuda.get_device_properties(device).total_memory if device.startswith("cuda") else None,
        rows=trace.rows,
        unused=unused,
        kept=kept,
        kept_at=at_site(Where(), kept_at),
        untrained=untrained,
    )


def _met(allocation: Allocation, trace: StepTrace) -> bool:
    """Whether a backward began while it was alive."""
    return any(allocation.start < at and (allocation.end is None or at < allocation.end) for at in trace.backwards)


def _measured(trace: StepTrace, device: str, base: int) -> int | None:
    measured = trace.meter.measured.get(device)
    if measured is not None:
        return measured[0]
    return base + trace.host_peak[0] if trace.host_peak[0] and device == "cpu" else None


def _live_at(course: list[tuple[int, int]], event: int) -> int:
    return course[max(0, bisect.bisect_right(course, (event, 1 << 62)) - 1)][1]


def use_of(allocation: Allocation, trace: StepTrace) -> str:
    """One of CATEGORIES: what a piece of memory that is alive at the peak is for."""
    if allocation.role:
        return allocation.role
    if allocation.step != trace.log.step or allocation.op is None:
        return (
            "inputs" if allocation.used and allocation.start <= trace.log.event and allocation.op is None else "other"
        )
    op = allocation.op
    if op.recomputed:
        return "activations"
    if op.during != "forward":
        return "temporaries"
    if not allocation.needs and op.module == "" and not trace.backwards_after(allocation):
        return "inputs" if allocation.end is None else "temporaries"
    until = trace.needed_until(allocation)
    lasts = allocation.end is None or allocation.end > until
    if not lasts:
        return "temporaries"
    if allocation.needs and op.grad:
        return "activations"
    return "activations" if op.module and op.grad else "inputs"


def place_of(op: Op | None) -> Where:
    """Where an op ran, as a report says it; in backward the forward op whose derivative ran."""
    if op is None:
        return Where()
    named = op.forward.name if op.forward is not None and not op.custom else op.name
    where = Where(phase=op.during, module=op.module, module_type=op.module_type, op=named)
    return at_site(where, op.site)


# -- by module and by line --------------------------------------------------------------------------------------------


class _Sum:
    def __init__(self, op: Op) -> None:
        self.saved = self.made = self.most = self.activations = 0
        self.op, self.largest = op, 0

    def add(self, allocation: Allocation, use: str | None) -> None:
        self.made += allocation.nbytes
        self.most = max(self.most, allocation.nbytes)
        if use is not None:
            self.saved += allocation.nbytes
            self.activations += allocation.nbytes if use == "activations" else 0
            if allocation.nbytes > self.largest and allocation.op is not None:
                self.op, self.largest = allocation.op, allocation.nbytes

    def part(self, name: str, where: Where) -> PeakPart:
        return PeakPart(name, self.saved, self.made, self.most, where, self.activations)


def _modules(allocations: Iterable[Allocation], uses: dict[int, str]) -> tuple[PeakPart, ...]:
    """By module, each with all that is inside of it."""
    sums: dict[str, _Sum] = {}
    for allocation in allocations:
        op: Any = allocation.op
        for name in _inclusive(op.module) if op.module_type else ():
            sums.setdefault(name, _Sum(op)).add(allocation, uses.get(id(allocation)))
    return _largest((s.part(name, place_of(s.op)) for name, s in sums.items()))


def _inclusive(name: str) -> list[str]:
    """ "layers.0.mlp" → "", "layers", "layers.0", "layers.0.mlp"."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]


def _lines(allocations: Iterable[Allocation], uses: dict[int, str]) -> tuple[PeakPart, ...]:
    sums: dict[Site, _Sum] = {}
    for allocation in allocations:
        op: Any = allocation.op
        if op.site is not None:
            sums.setdefault(op.site, _Sum(op)).add(allocation, uses.get(id(allocation)))
    places = ((s, at_site(place_of(s.op), site)) for site, s in sums.items())
    return _largest(s.part(where.place, where) for s, where in places)


def _largest(parts: Iterable[PeakPart]) -> tuple[PeakPart, ...]:
    return tuple(sorted(parts, key=lambda part: (-part.saved, -part.made))[:MOST])


def downsample(course: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """At most POINTS of a course, with the highest and the lowest of each stretch."""
    if len(course) <= POINTS:
        return tuple(course)
    apart = -(-len(course) // (POINTS // 2))
    points: set[tuple[int, int]] = {course[0], course[-1]}
    for start in range(0, len(course), apart):
        stretch = course[start : start + apart]
        points |= {max(stretch, key=lambda p: p[1]), min(stretch, key=lambda p: p[1])}
    return tuple(sorted(points))


KIND = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer state", "buffers": "buffer"}


def kept_by_run(trace: StepTrace, names: Mapping[str, Any]) -> tuple[Holding, ...]:
    """The largest first, by the variable that it belongs to; what has no name, by the line that made it."""
    known = _owners(trace, names)
    groups: dict[tuple[str, str, str], list[tuple[str, Allocation]]] = {}
    for allocation in trace.log.allocations:
        if allocation.step == trace.log.step and allocation.end is None and allocation.start > trace.log.began:
            owner = known.get(trace.log.place(allocation))
            kind = (
                owner.kind
                if owner is not None
                else KIND.get(allocation.role, "graph" if allocation.needs else "unknown")
            )
            name, root = (owner.name, owner.root) if owner is not None else (_line(allocation), _line(allocation))
            groups.setdefault((kind, root, allocation.device), []).append((name, allocation))
    held = [_holding(kind, device, members) for (kind, _, device), members in groups.items()]
    return tuple(sorted(held, key=lambda h: -h.bytes))


def _holding(kind: str, device: str, members: list[tuple[str, Allocation]]) -> Holding:
    name, largest = max(members, key=lambda m: m[1].nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return Holding(
        kind, name + more, sum(b.nbytes for _, b in members), len(members), device, shape=largest.shape, where=where
    )


def _line(allocation: Allocation) -> str:
    place = at_site(Where(), allocation.op.site).place if allocation.op is not None else ""
    return f"made in {place}" if place else "no name leads to it"


def _owners(trace: StepTrace, names: Mapping[str, Any]) -> dict[TensorKey, Ownership]:
    """Whose a storage is, by its place."""
    index = OwnerIndex()
    index.models(trace.names.models)
    index.optimizers(trace.optimizers)
    index.variables(names)
    index.walk()
    Graphs(index).walk(live())
    return {key: owned.owner for key, owned in index.owned.items() if owned.owner is not None}


@dataclasses.dataclass
class StepRequest:
    """What is to be traced. models, optimizers: by the user's names; names: the user's variables; steps: to run;
    device: to report on, or None for the one that is used most; files: of code that no function holds (a cell)."""

    step: Callable[[], Any]
    models: dict[str, Any]
    optimizers: dict[str, Any]
    names: Mapping[str, Any]
    steps: int = 3
    device: str | None = None
    progress: bool = True
    files: tuple[str, ...] = ()


@dataclasses.dataclass
class StepsTraced:
    """What was seen so far. sizes: of the holders before the first step and after each; after: see MemoryFacts;
    cycle: what the last step left to Python's collector alone."""

    memory: StepMemory | None = None
    sizes: list[dict[Key, int]] = dataclasses.field(default_factory=list)
    after: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    growth: tuple[Leak, ...] = ()
    cycle: Leak | None = None
    stays: tuple[Holding, ...] = ()

    def facts(self) -> MemoryFacts:
        return MemoryFacts(
            step=self.memory,
            growth=self.growth,
            after_steps=tuple(self.after),
            stays=self.stays,
            unchecked=tuple(self.unchecked),
        )


def trace_steps(request: StepRequest, course: StepsTraced) -> None:
    """Run the steps and fill in the course. What the step raises passes through; the course then tells how far it came.

    One more step runs where something grew: traced, for the line that puts it where it stays."""
    gc.collect()
    with eager() as notes, StepTrace(request.models, request.optimizers, request.names) as trace:
        scan: HolderScan | None = _scan(request, course)
        shown = request.progress and request.steps > 1
        for number in progress_range(range(request.steps), "mem", "steps", wanted=shown):
            scan = None
            if not _trace_step(request, trace, course, number):
                break
            scan = _scan(request, course)
        if scan is not None and len(course.after) > 1:
            course.growth = leaks_of(request, trace, scan, course.sizes)
            course.growth = course.growth or (() if course.cycle is None else (course.cycle,))
        elif course.memory is not None:
            with _disable_current_modes():
                course.stays = kept_by_run(trace, request.names)
                course.growth = leaks_in_loop(trace, scan) if scan is not None else ()
            if len(trace.iterations) < ENOUGH:
                course.unchecked.append("Growth from step to step: it takes two runs (mem(step), %mem step())")
        course.unchecked += notes
        if trace.recorder.disabled_by:
            course.unchecked.append(
                f"A part of the run, because of a fault of nbdebug's own: {trace.recorder.disabled_by}"
            )


def _trace_step(request: StepRequest, trace: StepTrace, course: StepsTraced, number: int) -> bool:
    """One step; False where the data have come to their end."""
    trace.begin_step(number)
    try:
        request.step()
    except StopIteration:
        if number == 0:
            raise
        return False
    finally:
        trace.end_step(last=number == request.steps - 1)
        course.memory = step_memory(trace, request.device or _busiest(trace))
    before = sum(b.nbytes for b in trace.log.survivors(number) if b.needs)
    found = cycle_of_function(trace) if number and before >= SMALL else None
    gc.collect()
    retained = sum(b.nbytes for b in trace.log.survivors(number))
    if found is not None and (by := before - sum(b.nbytes for b in trace.log.survivors(number) if b.needs)) >= SMALL:
        course.cycle = dataclasses.replace(found, bytes=by, own=by)
    course.after.append((trace.log.live.get(course.memory.device, 0), retained, psutil.Process().memory_info().rss))
    return True


def _busiest(trace: StepTrace) -> str:
    """The device whose memory the step used: an accelerator before the host."""
    peaks = {device: high - trace.log.course[device][0][1] for device, (high, _) in trace.log.peaks.items()}
    used = {device: by for device, by in peaks.items() if by > 0} or peaks
    return max(used, key=lambda device: (not device.startswith("cpu"), used[device]), default="cpu")


def _scan(request: StepRequest, course: StepsTraced) -> HolderScan:
    with _disable_current_modes():
        scan = HolderScan(request.names, request.step, request.models)
        scan.files |= dict.fromkeys(request.files)
        count_graphs(scan.holders.values())
    course.sizes.append(scan.sizes())
    return scan
