"""From the allocation log to the facts of one step: its peak, where it was, and what memory was used for then."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.recorder import Op
from nbdebug.observe.tensors import base_name
from nbdebug.report import Where
from nbdebug.tools.memory.facts import CATEGORIES, PeakPart, StepMemory
from nbdebug.tools.memory.step.allocations import Allocation
from nbdebug.tools.memory.step.trace import StepTrace

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
    return StepMemory(
        base=base + beside,
        peak=highest + beside,
        after=log.live.get(device, 0) + beside,
        at_peak=at_peak,
        place=place_of(op),
        modules=_modules(allocations, uses, trace),
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
    )


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


def _modules(allocations: Iterable[Allocation], uses: dict[int, str], trace: StepTrace) -> tuple[PeakPart, ...]:
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
