"""What every step leaves behind: who holds it, which line put it there, what would stay after the cure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator
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
"""Referrers followed on one level; a thing with more than that is held by everybody."""


def tensors_on(keys: set[int]) -> list[torch.Tensor]:
    """Live tensors on these storages, by the storages' `_cdata`."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            try:
                if thing.untyped_storage()._cdata in keys:
                    found.append(thing)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):
                continue
    return found


def holder_of(tensor: Any, own: Iterable[Any]) -> str:
    """What holds a tensor, told as well as can be: "a variable `x` of `load` (data.py)", "a generator …"; "" where
    nothing is found."""
    ours = {id(thing) for thing in own}
    level = [tensor]
    seen = {id(tensor), id(level)}
    for _ in range(DEEP):
        above = gc.get_referrers(*level)
        seen |= {id(above), id(level)}
        following = []
        for thing in above[:MOST]:
            if id(thing) in seen or id(thing) in ours:
                continue
            seen.add(id(thing))
            said = _described(thing, level)
            if said:
                return said
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
"""What a function is called that asks for no gradient."""

MORE = 4
"""Steps that run on top where a container grows whose items are in order by themselves."""


def leaks_of(request: Any, trace: StepTrace, scan: HolderScan, sizes: list[dict[Key, int]]) -> tuple[Leak, ...]:
    """What grew with each of the last steps, the most telling first."""
    source.reload_sources()
    with _disable_current_modes():
        found = distinct([one for one in growths_of(scan, sizes, _model_memory(trace)) if _worth(one)])
    steps = len(sizes) - 1
    kept = _survivors(trace, steps)
    seen = _Survivors(kept, len(trace.backwards), steps)
    if not found:
        return _unnamed_leak(seen, scan)
    evaluated = not trace.backwards and any(b.evaluation for b in kept)
    found = _confirmed(found, request)
    if not found:
        return ()
    traced = _traced(request, trace, scan, found, no_grad=evaluated)
    graphs = [one for one in found if one.grad or one.errors]
    return tuple(_leak(one, n, seen, scan, trace, traced, whole=len(graphs) == 1) for n, one in enumerate(found))


@dataclasses.dataclass
class _Survivors:
    """kept: memory that came in one of the last steps and stayed; backwards: in a step; steps: that were run."""

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


def _confirmed(found: list[Growth], request: Any) -> list[Growth]:
    """Without what stops growing when one waits a little: asked only of containers of things that are in order by
    themselves."""
    doubtful = [
        one for one in found if one.kind in ("dict", "list", "set", "object") and not one.grad and not one.errors
    ]
    if not doubtful:
        return found
    try:
        sure = still_growing(doubtful, request.step, MORE)
    except Exception:  # the data are at their end
        return found
    return [one for one in found if one not in doubtful or one in sure]


def _survivors(trace: StepTrace, steps: int) -> list[Allocation]:
    """Of the last step but one: what the last one holds may be gone with the next."""
    return trace.log.survivors(steps - 2 if steps > 2 else steps - 1)


@dataclasses.dataclass
class _Traced:
    """One more step. puts: for each holder the line that puts it there; emptied: whether a line takes things out again;
    after: bytes that the step left when it ran without gradients, None where it did not."""

    puts: list[StoringLine | None]
    emptied: list[bool]
    after: int | None = None


def _traced(request: Any, trace: StepTrace, scan: HolderScan, found: list[Growth], no_grad: bool) -> _Traced:
    watches = [(n, watch_of(holder)) for n, one in enumerate(found) for holder in one.holders[:8]]
    takers = [
        () if one.chain or one.kind in ("hooks", "output") else source.takers(scan.files, one.name) for one in found
    ]
    tracer = Tracer([watch for _, watch in watches], [t for some in takers for t in some])
    number = trace.log.step + 1
    trace.begin_step(number)
    told = _Traced([None] * len(found), [])
    try:
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            tracer.run(request.step)
        if no_grad:
            gc.collect()
            told.after = sum(b.nbytes for b in trace.log.survivors(number))
    except Exception:  # the data are at their end, or it needs its gradients: the source is read instead
        pass
    for (n, _), put in zip(watches, tracer.found):
        told.puts[n] = told.puts[n] or put
    told.emptied = [
        any(
            source.same_variable(t, scan.files, one.name, put.site if put is not None else None)
            for t in some
            if t not in tracer.dead
        )
        for one, put, some in zip(found, told.puts, takers)
    ]
    return told


def _leak(
    one: Growth, number: int, seen: _Survivors, scan: HolderScan, trace: StepTrace, traced: _Traced, whole: bool
) -> Leak:
    put = traced.puts[number]
    kind = _kind(one, put)
    by = max(one.bytes, seen.bytes) if whole and (one.grad or one.errors) else one.bytes
    module = trace.names.of(put.module) if put is not None and put.module is not None else None
    evaluation = kind == "graph" and _evaluates(seen, put, by, one)
    where = _where(one, put, scan)
    return Leak(
        one.name,
        kind,
        by,
        seen.steps,
        where,
        one.grad,
        evaluation,
        module or _module(seen.kept),
        one.items,
        one.nodes,
        own=min(one.own, by),
        plain=one.plain,
        chained=one.chain,
        backward=seen.backwards > 0,
        emptied=one.bounded or traced.emptied[number],
        names=_names(one),
        after=traced.after if evaluation else None,
        traced=put is not None,
    )


def _kind(one: Growth, put: StoringLine | None) -> str:
    if one.errors:
        return "exception"
    if one.kind in ("output", "cache"):
        return one.kind
    if one.kind == "hooks" or (put is not None and put.hook):
        return "hook"
    return "graph" if one.grad else one.kind


def _evaluates(seen: _Survivors, put: StoringLine | None, by: int, one: Growth) -> bool:
    """Kept from an evaluation: below a model in eval mode and with what a backward would need; or by a function that is
    called like one, in a step without any backward."""
    if one.chain:
        return False
    flagged = sum(b.nbytes for b in seen.kept if b.evaluation)
    if 2 * flagged > seen.bytes and (not seen.backwards or by > 2 * one.own):
        return True
    return not seen.backwards and put is not None and EVALUATES.search(put.site.function) is not None


def _module(kept: list[Allocation]) -> str | None:
    """The module that most of it comes from, if there is such a one."""
    sums: Counter[str] = Counter()
    for allocation in kept:
        if allocation.op is not None and allocation.op.module_type:
            sums[allocation.op.module] += allocation.nbytes
    name, most = sums.most_common(1)[0] if sums else (None, 0)
    return name if 2 * most >= sums.total() else None


def _where(one: Growth, put: StoringLine | None, scan: HolderScan) -> Where:
    """The line: of a cache, where it is declared; else as it was seen; else as the source says."""
    cached = one.holders[0].thing if one.kind == "cache" else None
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    if code is not None:
        return at_site(Where(), Site(code.co_filename, code.co_firstlineno, code.co_name))
    if put is not None:
        return at_site(Where(), put.site)
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


def _unnamed_leak(seen: _Survivors, scan: HolderScan) -> tuple[Leak, ...]:
    """Memory stays with each step, and no name leads to it: who refers to it?"""
    if seen.bytes < SMALL or seen.steps < 3:
        return ()
    with _disable_current_modes():
        tensors = tensors_on({b.key for b in seen.kept})
        holder = next((said for t in tensors[:3] if (said := holder_of(t, (tensors, seen.kept, scan)))), "")
        grad = any(t.requires_grad for t in tensors)
    largest = max(seen.kept, key=lambda b: b.nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    return (
        Leak(
            holder,
            "graph" if grad else "list",
            seen.bytes,
            seen.steps,
            where,
            grad,
            module=_module(seen.kept),
            items=len(seen.kept),
            names=(holder,) if holder else (),
        ),
    )
