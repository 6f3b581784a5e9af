"""The steps, one after the other, under watch; then the facts: the last step, and what each of them left behind."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from typing import Any

import psutil
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.live import progress_range
from nbdebug.observe.locations import at_site
from nbdebug.observe.modules import eager
from nbdebug.report import Where
from nbdebug.tools.memory.facts import Holding, Leak, MemoryFacts, StepMemory
from nbdebug.tools.memory.owners.inventory import Graphs
from nbdebug.tools.memory.owners.names import OwnerIndex, Ownership
from nbdebug.tools.memory.owners.storages import Key as TensorKey
from nbdebug.tools.memory.owners.storages import live
from nbdebug.tools.memory.step.allocations import Allocation
from nbdebug.tools.memory.step.growth import ENOUGH, leaks_in_loop
from nbdebug.tools.memory.step.holders import HolderScan, Key, count_graphs
from nbdebug.tools.memory.step.leaks import leaks_of
from nbdebug.tools.memory.step.peak import step_memory
from nbdebug.tools.memory.step.trace import StepTrace

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
    """What was seen so far. sizes: of the holders before the first step and after each; after: see MemoryFacts."""

    memory: StepMemory | None = None
    sizes: list[dict[Key, int]] = dataclasses.field(default_factory=list)
    after: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    growth: tuple[Leak, ...] = ()
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
    with eager() as compiled, StepTrace(request.models, request.optimizers, request.names) as trace:
        course.unchecked += compiled
        scan: HolderScan | None = _scan(request, course)
        shown = request.progress and request.steps > 1
        for number in progress_range(range(request.steps), "mem", "steps", wanted=shown):
            scan = None
            if not _trace_step(request, trace, course, number):
                break
            scan = _scan(request, course)
        if scan is not None and len(course.after) > 1:
            course.growth = leaks_of(request, trace, scan, course.sizes)
        elif course.memory is not None:
            with _disable_current_modes():
                course.stays = kept_by_run(trace, request.names)
                course.growth = leaks_in_loop(trace, scan) if scan is not None else ()
            if len(trace.iterations) < ENOUGH:
                course.unchecked.append("Growth from step to step: it takes two runs (mem(step), %mem step())")
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
    gc.collect()
    retained = sum(b.nbytes for b in trace.log.survivors(number))
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
