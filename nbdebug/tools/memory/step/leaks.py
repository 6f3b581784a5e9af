"""What every step leaves behind: who holds it, which line stores it, what would stay after the fix."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import nbdebug
from nbdebug.observe.locations import Site, at_site
from nbdebug.report import Where
from nbdebug.tools.memory.facts import SMALL, Leak
from nbdebug.tools.memory.reachability import ReachabilityWalk
from nbdebug.tools.memory.step import source
from nbdebug.tools.memory.step.allocations import Allocation
from nbdebug.tools.memory.step.growth import Growth, distinct, growths_of, still_growing, watch_of
from nbdebug.tools.memory.step.holders import HolderScan, Key
from nbdebug.tools.memory.step.source import StoringLine, Tracer
from nbdebug.tools.memory.step.trace import StepTrace

_OURS = os.path.dirname(nbdebug.__file__) + os.sep
DEEP = 7
MOST = 400
"""Referrers followed on one level; an object with more is shared by everything."""


def tensors_on(keys: set[int]) -> list[torch.Tensor]:
    """Live tensors on these storages, by the storages' `_cdata`."""
    tensors = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                if thing.untyped_storage()._cdata in keys:
                    tensors.append(thing)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):
                continue
    return tensors


def holder_of(tensor: Any, own: Iterable[Any]) -> str:
    """What holds a tensor, as a name such as "x in load" or "module.cache"; "" where nothing is found."""
    ours = {id(thing) for thing in own}
    level = [tensor]
    visited = {id(tensor), id(level)}
    for _ in range(DEEP):
        above = gc.get_referrers(*level)
        visited |= {id(above), id(level)}
        following = []
        for thing in above[:MOST]:
            if id(thing) in visited or id(thing) in ours:
                continue
            visited.add(id(thing))
            text = _described(thing, level)
            if text:
                return text
            following.append(thing)
        if not following:
            return ""
        level = following
    return ""


def _described(thing: Any, level: list[Any]) -> str:
    kind = type(thing)
    if kind is types.FrameType:
        if thing.f_globals.get("__name__", "").startswith("nbdebug."):
            return ""
        named = [n for n, v in thing.f_locals.items() if any(v is held for held in level)]
        return f"{named[0]} in {thing.f_code.co_name}" if named else thing.f_code.co_name
    if kind is dict and "__name__" in thing and "__builtins__" in thing:
        named = [n for n, v in thing.items() if any(v is held for held in level)]
        module = thing["__name__"]
        return "" if not named or str(module).startswith("nbdebug.") else f"{module}.{named[0]}"
    if issubclass(kind, types.GeneratorType) and not str(thing.gi_code.co_filename).startswith(_OURS):
        return str(thing.gi_code.co_name)
    return ""


EVALUATES = re.compile(r"eval|valid|\bval\b|val_|_val|test|predict|infer|score", re.IGNORECASE)
"""Names of functions that need no gradient."""

MORE = 4
"""Steps that run on top where a container grows whose items are in order by themselves."""


def leaks_of(request: Any, trace: StepTrace, scan: HolderScan, sizes: list[dict[Key, int]]) -> tuple[Leak, ...]:
    """What grew with each of the last steps, the most telling first."""
    source.reload_sources()
    with _disable_current_modes():
        growths = distinct([one for one in growths_of(scan, sizes, _model_memory(trace)) if _worth(one)])
    steps = len(sizes) - 1
    # of the last step but one: what the last one holds may be freed in the next
    survivors = trace.log.survivors(steps - 2 if steps > 2 else steps - 1)
    summary = _Survivors(survivors, len(trace.backwards), steps)
    if not growths:
        return _unnamed_leak(summary, scan)
    evaluated = not trace.backwards and any(b.evaluation for b in survivors)
    growths = _confirmed(growths, request)
    if not growths:
        return ()
    traced = _traced(request, trace, scan, growths, no_grad=evaluated)
    graphs = [one for one in growths if one.grad or one.errors]
    return tuple(_leak(one, n, summary, scan, trace, traced, whole=len(graphs) == 1) for n, one in enumerate(growths))


@dataclasses.dataclass
class _Survivors:
    """kept: memory that one of the last steps allocated and did not free; backwards: in a step; steps: that were
    run."""

    kept: list[Allocation]
    backwards: int
    steps: int

    @property
    def bytes(self) -> int:
        return sum(b.nbytes for b in self.kept)


def _model_memory(trace: StepTrace) -> ReachabilityWalk:
    known = ReachabilityWalk()
    known(
        *trace.parameters(),
        *(p.grad for p in trace.parameters()),
        *(o.state for o in trace.optimizers.values()),
        *(b for m in trace.names.models.values() for b in m.buffers()),
    )
    return known


def _worth(one: Growth) -> bool:
    """Whether it may be a fault at all: a list of numbers for a plot is none."""
    return one.grad or one.kind == "hooks" or max(one.bytes, one.plain) >= SMALL


def _confirmed(growths: list[Growth], request: Any) -> list[Growth]:
    """Without those that stop growing in a few more steps; only containers of plain values are tested."""
    doubtful = [
        one for one in growths if one.kind in ("dict", "list", "set", "object") and not one.grad and not one.errors
    ]
    if not doubtful:
        return growths
    try:
        sure = still_growing(doubtful, request.step, MORE)
    except Exception:  # the data are at their end
        return growths
    return [one for one in growths if one not in doubtful or one in sure]


@dataclasses.dataclass
class _Traced:
    """One more step. puts: for each holder the line that puts it there; emptied: whether a line takes things out again;
    after: bytes that the step left when it ran without gradients, None where it did not."""

    puts: list[StoringLine | None]
    emptied: list[bool]
    after: int | None = None


def _traced(request: Any, trace: StepTrace, scan: HolderScan, growths: list[Growth], no_grad: bool) -> _Traced:
    watches = [(n, watch_of(holder)) for n, one in enumerate(growths) for holder in one.holders[:8]]
    takers = [
        () if one.chain or one.kind in ("hooks", "output") else source.takers(scan.files, one.name) for one in growths
    ]
    calls = {t.function: source.callers(scan.files, t.function) for some in takers for t in some if t.function}
    flagged = [t for some in (*takers, *calls.values()) for t in some]
    tracer = Tracer([watch for _, watch in watches], flagged)
    number = trace.log.step + 1
    trace.begin_step(number)
    result = _Traced([None] * len(growths), [])
    try:
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            tracer.run(request.step)
        if no_grad:
            gc.collect()
            result.after = sum(b.nbytes for b in trace.log.survivors(number))
    except Exception:  # the data are at their end, or it needs its gradients: the source is read instead
        pass
    for (n, _), line in zip(watches, tracer.lines):
        result.puts[n] = result.puts[n] or line
    result.emptied = [
        any(
            source.same_variable(t, scan.files, one.name, line.site if line is not None else None)
            for t in some
            if t not in tracer.dead and _is_reached(t, calls, tracer)
        )
        for one, line, some in zip(growths, result.puts, takers)
    ]
    return result


def _is_reached(taker: source.Taker, calls: Mapping[str, list[source.Taker]], tracer: Tracer) -> bool:
    """Whether a line that takes things out can run: its function ran in the step, something else calls it, or a
    framework does (`on_epoch_end`, `__exit__`)."""
    function = taker.function
    if not function or function.startswith(("on_", "__")) or (taker.file, function) in tracer.entered:
        return True
    return any(call not in tracer.dead for call in calls[function])


def _leak(
    one: Growth, number: int, survivors: _Survivors, scan: HolderScan, trace: StepTrace, traced: _Traced, whole: bool
) -> Leak:
    line = traced.puts[number]
    kind = _kind(one, line)
    by = max(one.bytes, survivors.bytes) if whole and (one.grad or one.errors) else one.bytes
    module = trace.names.of(line.module) if line is not None and line.module is not None else None
    evaluation = kind == "graph" and _evaluates(survivors, line, by, one)
    where = _where(one, line, scan)
    return Leak(
        one.name,
        kind,
        by,
        survivors.steps,
        where,
        one.grad,
        evaluation,
        module or _module(survivors.kept),
        one.items,
        one.nodes,
        own=min(one.own, by),
        shown=one.shown,
        plain=one.plain,
        chained=one.chain,
        backward=survivors.backwards > 0,
        emptied=one.bounded or traced.emptied[number],
        names=_names(one),
        after=traced.after if evaluation else None,
        traced=line is not None,
    )


def _kind(one: Growth, line: StoringLine | None) -> str:
    if one.errors:
        return "exception"
    if one.kind in ("output", "cache"):
        return one.kind
    if one.kind == "hooks" or (line is not None and line.hook):
        return "hook"
    return "graph" if one.grad else one.kind


def _evaluates(survivors: _Survivors, line: StoringLine | None, by: int, one: Growth) -> bool:
    """Kept from an evaluation: below a model in eval mode and with what a backward would need; or by a function that is
    called like one, in a step without any backward."""
    if one.chain:
        return False
    flagged = sum(b.nbytes for b in survivors.kept if b.evaluation)
    if 2 * flagged > survivors.bytes and (not survivors.backwards or by > 2 * one.own):
        return True
    return not survivors.backwards and line is not None and EVALUATES.search(line.site.function) is not None


def _module(survivors: list[Allocation]) -> str | None:
    """The module that most of it comes from, if there is such a one."""
    sums: Counter[str] = Counter()
    for allocation in survivors:
        if allocation.op is not None and allocation.op.module_type:
            sums[allocation.op.module] += allocation.nbytes
    name, most = sums.most_common(1)[0] if sums else (None, 0)
    return name if 2 * most >= sums.total() else None


def _where(one: Growth, line: StoringLine | None, scan: HolderScan) -> Where:
    """The line: of a cache, where it is declared; else as it was seen; else as the source says."""
    cached = one.holders[0].thing if one.kind == "cache" else None
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    if code is not None:
        return at_site(Where(), Site(code.co_filename, code.co_firstlineno, code.co_name))
    if line is not None:
        return at_site(Where(), line.site)
    return at_site(Where(), source.storing_line(scan.files, one.name))


def _names(one: Growth) -> tuple[str, ...]:
    """The holder, what it is a part of, and the parts that grow: `probe.seen`, `probe.seen['a']`."""
    names = [one.name, *(holder.name for holder in one.holders[:8])]
    names += [n for name in names for n in _prefixes(name)]
    return tuple(dict.fromkeys(names))


def _prefixes(name: str) -> Iterator[str]:
    """`probe.seen['a']` → "probe.seen"; an attribute's owner is no holder of its own."""
    while name.endswith("]"):
        name = name[: name.rindex("[")]
        yield name


def _unnamed_leak(survivors: _Survivors, scan: HolderScan) -> tuple[Leak, ...]:
    """Memory stays with each step, and no name leads to it: who refers to it?"""
    if survivors.bytes < SMALL or survivors.steps < 3:
        return ()
    with _disable_current_modes():
        tensors = tensors_on({b.key for b in survivors.kept})
        holder = next((text for t in tensors[:3] if (text := holder_of(t, (tensors, survivors.kept, scan)))), "")
        grad = any(t.requires_grad for t in tensors)
    largest = max(survivors.kept, key=lambda b: b.nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    return (
        Leak(
            holder,
            "graph" if grad else "list",
            survivors.bytes,
            survivors.steps,
            where,
            grad,
            module=_module(survivors.kept),
            items=len(survivors.kept),
            names=(holder,) if holder else (),
        ),
    )
