"""What every step leaves behind: who holds it, which line stores it, what would stay after the fix.

First, from several scans of the holders, what grows with every step, how much it holds, and what kind of thing it is;
then these with the source, and what no holder explains.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import re
import statistics
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import nbdebug
from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.variables import attributes, closure_variables
from nbdebug.report import Where
from nbdebug.tools.memory.facts import SMALL, Leak
from nbdebug.tools.memory.reachability import ReachabilityWalk
from nbdebug.tools.memory.step import source
from nbdebug.tools.memory.step.holders import (
    CACHE,
    OUTPUTS,
    PLAIN,
    SLOT,
    Holder,
    HolderScan,
    Key,
    kept_by_cycle,
    measure,
    parts_of,
    plain_bytes,
    table_bytes,
)
from nbdebug.tools.memory.step.source import StoringLine, Tracer
from nbdebug.tools.memory.step.trace import Allocation, StepTrace, storages_of

# -- what grows from scan to scan --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Growth:
    """What grows. holders: of it, more than one where they lie in one container; items: a step adds so many;
    nodes: so many nodes of a graph; bytes: in tensors and arrays, of a step's items alone; own: of that, what would
    stay if the items had no graph; shown: what the items are by their shapes, which is less where they are views of
    larger tensors; plain: in other Python objects; arrays: they are numpy's."""

    holders: list[Holder]
    name: str
    kind: str
    items: int = 0
    nodes: int = 0
    bytes: int = 0
    own: int = 0
    shown: int = 0
    plain: int = 0
    grad: bool = False
    errors: bool = False
    arrays: bool = False
    keys: frozenset[Any] = frozenset()

    @property
    def bounded(self) -> bool:
        return all(holder.bound is not None for holder in self.holders)

    @property
    def chain(self) -> bool:
        return self.kind == "slot"


def growths_of(last: HolderScan, sizes: list[dict[Key, int]], known: ReachabilityWalk) -> list[Growth]:
    """What was longer after each of the last steps than before it. sizes: of the scan before the first step, and of
    those after each. known: memory of models and optimizers, which is nobody's leak."""
    after = sizes[-min(3, len(sizes)) :]  # the first step may well fill things that stay as they are from then on
    growing = [holder for key, holder in last.holders.items() if _rises([s.get(key) for s in after])]
    step = {key: after[-1][key] - after[-2][key] for key in after[-1] if key in after[-2]}
    growths = []
    for holders in _by_container(growing):
        whole = _measured(holders, [step[_key_of(s)] for s in holders], known)
        if whole is not None:
            growths.append(whole)
    growths += [] if any(one.kind != "tensor" for one in growths) else _linked(last, after)
    return sorted(growths, key=lambda g: (-g.bytes, -g.nodes, -g.plain, len(g.name)))


def _linked(last: HolderScan, after: list[dict[Key, int]]) -> list[Growth]:
    """Objects that each refer to the one before (`frame.previous.previous`): tensors that lie deeper and deeper."""
    depths = [Counter(_REPEATED.sub(r"\1", key[1]) for key in sizes if key[0] == SLOT) for sizes in after]
    for name in depths[-1]:
        if not _rises([depth.get(name) for depth in depths]):
            continue
        longest = max((k[1] for k in after[-1] if k[0] == SLOT and _REPEATED.sub(r"\1", k[1]) == name), key=len)
        again = _REPEATED.search(longest)
        base = longest[: again.start()] if again is not None else ""
        first = next((h for h in last.holders.values() if h.name == base and h.kind == "object"), None)
        if again is None or first is None:
            continue
        before, now = (sum(v for k, v in s.items() if k[0] == SLOT and k[1].startswith(base)) for s in after[-2:])
        slot = Holder(first.thing, base, "tensor", 0, None, first.label, first.owner)
        return [Growth([slot], base + again[1], "linked", 1, bytes=now - before, own=now - before, shown=now - before)]
    return []


_REPEATED = re.compile(r"(\.\w+)\1+")


def _rises(values: list[int | None]) -> bool:
    return len(values) > 1 and all(b is not None and a is not None and b > a for a, b in itertools.pairwise(values))


def _key_of(holder: Holder) -> Key:
    return (SLOT, holder.name) if holder.kind in ("slot", "tensor") else (id(holder.thing), "")


def _by_container(growing: list[Holder]) -> list[list[Holder]]:
    """Those that lie in one plain container are one: `metrics["loss"]` and `metrics["accuracy"]` are `metrics`."""
    groups: dict[Any, list[Holder]] = {}
    for holder in growing:
        key: Any = (id(holder.within.thing), holder.kind) if holder.within is not None else id(holder)
        if holder.kind == "tensor":  # the keys and values of all layers are one cache
            key = re.split(r"[.\[]", holder.name)[0]
        groups.setdefault(key, []).append(holder)
    return list(groups.values())


def _measured(holders: list[Holder], added: list[int], known: ReachabilityWalk) -> Growth | None:
    first = holders[0]
    name = first.name if len(holders) == 1 or first.within is None else first.within.name
    whole = Growth(holders, name, first.kind)
    if first.kind == "tensor":
        if len(holders) > 1:
            parts = zip(*(re.findall(r"[.\[]?[^.\[]+", holder.name) for holder in holders))
            whole.name = "".join(same[0] for same in itertools.takewhile(lambda same: len(set(same)) == 1, parts))
        whole.bytes = whole.own = whole.shown = sum(added)
        whole.arrays = not isinstance(first.thing, torch.Tensor)
        return whole
    if whole.chain:
        whole.nodes, whole.grad = sum(added), True
        return whole
    if first.kind == "parts":  # a model has them, too
        whole.items, whole.keys = sum(added), frozenset()
        blocks = ReachabilityWalk(graphs=False)(*newest(first, added[0]))
        whole.bytes = whole.own = whole.shown = sum(b.bytes for b in blocks)
        return whole
    telling = [n for n, holder in enumerate(holders) if any(True for _ in tensors_of(newest(holder, added[n])))]
    if 0 < len(telling) < len(holders):  # numbers beside them take no memory
        whole.holders = holders = [holders[n] for n in telling]
        added = [added[n] for n in telling]
        whole.name = holders[0].name if len(holders) == 1 else name
    new = [item for holder, count in zip(holders, added) for item in newest(holder, count)]
    old = [item for holder, count in zip(holders, added) for item in newest(holder, 2 * count)[count:]]
    containers = [holder.thing for holder in holders]  # a frame that an item holds may lead back to them
    before = ReachabilityWalk(after=known, stop=containers)
    before(*old)
    blocks = ReachabilityWalk(after=before, stop=containers)(*new)
    bare = ReachabilityWalk(after=before, stop=containers, graphs=False, tracebacks=False)(*new)
    whole.items, whole.bytes, whole.own = sum(added), sum(b.bytes for b in blocks), sum(b.bytes for b in bare)
    whole.keys = frozenset(b.key for b in blocks)
    tensors = list(tensors_of(new))
    whole.grad = any(t.requires_grad and t.grad_fn is not None for t in tensors)
    whole.errors = any(isinstance(item, BaseException) or issubclass(type(item), BaseException) for item in flat(new))
    whole.shown = sum(t.numel() * t.element_size() for t in tensors if t.layout is torch.strided)
    arrays = [
        item.nbytes for item in flat(new) if type(item).__module__ == "numpy" and type(item).__name__ == "ndarray"
    ]
    whole.shown, whole.arrays = whole.shown + sum(arrays), bool(arrays) and not tensors
    whole.plain = plain_bytes(new, old)
    if first.name.split("[")[0] in OUTPUTS:
        whole.kind = "output"
    return whole


def newest(holder: Holder, count: int) -> list[Any]:
    """The last `count` things that were put in, the newest first; of a set, where none is the newest, some."""
    thing: Any = holder.thing
    if holder.kind == "list":
        size = list.__len__(thing)
        return [list.__getitem__(thing, i) for i in range(size - 1, max(-1, size - 1 - count), -1)]
    if holder.kind == "deque":
        return list(itertools.islice(collections.deque.__reversed__(thing), count))
    if holder.kind in ("dict", "hooks"):
        return list(itertools.islice(reversed(dict.values(thing)), count))
    if holder.kind == "cycle":
        return (kept_by_cycle(thing) or [])[::-1][:count]
    if holder.kind == "set":
        return list(itertools.islice(set.__iter__(thing), count))
    if holder.kind == "cache":
        return _cached(thing, count)
    if holder.kind == "parts":
        state = attributes(thing).get("state") or {}
        return [part for p in parts_of(thing)[-count:] for part in (p, state.get(p))]
    return list(attributes(thing).values())[-count:] if holder.kind == "object" else [thing]


def _cached(cache: Any, count: int) -> list[Any]:
    """The newest results of an lru_cache: the dict inside is found through the garbage collector."""
    import gc

    contents = [r for r in gc.get_referents(cache) if type(r) is dict and len(r) == CACHE.cache_info(cache).currsize]
    return list(itertools.islice(reversed(contents[0].values()), count)) if contents and count else []


def flat(items: Iterable[Any], depth: int = 3) -> Iterable[Any]:
    """Things, and what lies in them: containers, attributes and what a function is bound to, a few steps deep."""
    for item in itertools.islice(items, 200):
        yield item
        kind = type(item)
        base: Any = next((k for k in (list, tuple, set) if issubclass(kind, k)), None)  # namedtuples too
        if depth and base is not None:
            yield from flat(base.__iter__(item), depth - 1)
        elif depth and issubclass(kind, dict):
            yield from flat(dict.values(item), depth - 1)
        elif depth and kind is types.FunctionType:
            yield from flat([*closure_variables(item).values(), *(item.__defaults__ or ())], depth - 1)
        elif depth and kind is functools.partial:
            yield from flat([*item.args, *item.keywords.values()], depth - 1)
        elif depth and hasattr(kind, "__dict__") and not issubclass(kind, (torch.Tensor, type, BaseException)):
            yield from flat(attributes(item).values(), depth - 1)


def tensors_of(items: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (item for item in flat(items) if isinstance(item, torch.Tensor))


def watch_of(holder: Holder) -> Callable[[], Any]:
    """A function that gives the state of a holder: it changes when something is put in."""
    thing, owner, label = holder.thing, holder.owner, holder.label
    if holder.kind in ("slot", "tensor"):
        return lambda: _state(_slot(owner, label))
    if holder.kind == "cache":
        return lambda: CACHE.cache_info(thing).currsize
    if holder.kind in ("object", "parts"):
        return lambda: measure(thing)[1]
    base = next((k for k in (list, dict, collections.deque, set) if isinstance(thing, k)), None)
    return lambda: base.__len__(thing) if base is not None else 0


def _state(tensor: Any) -> tuple[int, int]:
    counts = isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    return id(tensor), tensor._version if counts else table_bytes(tensor) or 0


def _slot(owner: Any, label: str) -> Any:
    """What lies in a slot now."""
    if isinstance(owner, torch.Tensor):
        return owner.grad
    if label.startswith("."):
        own = attributes(owner)
        parts = [own, *(own.get(p) or {} for p in ("_buffers", "_parameters", "_modules"))]
        return next((part[label[1:]] for part in parts if label[1:] in part), None)
    if isinstance(owner, dict):
        return next((v for k, v in dict.items(owner) if label in (f"[{k!r}]", k)), None)
    if isinstance(owner, (list, tuple)) and label[1:-1].isdigit():
        return owner[int(label[1:-1])] if int(label[1:-1]) < len(owner) else None
    code = getattr(owner, "__code__", None)
    if code is not None and label in code.co_freevars:
        return owner.__closure__[code.co_freevars.index(label)].cell_contents
    return owner.__globals__.get(label) if code is not None else None


def still_growing(growths: list[Growth], step: Callable[[], Any], more: int) -> list[Growth]:
    """Those that are longer after each of some more steps. A record by batch of an epoch, or a cache of a few sizes,
    comes to its end; it is told from what never does by waiting a little longer."""
    for _ in range(more):
        before = [[_length(holder) for holder in one.holders] for one in growths]
        step()
        growths = [
            one
            for one, sizes in zip(growths, before)
            if any(_length(holder) > size for holder, size in zip(one.holders, sizes))
        ]
    return growths


def _length(holder: Holder) -> int:
    """Of a holder, now."""
    if holder.kind == "tensor":
        now = _slot(holder.owner, holder.label)
        return now.nbytes if isinstance(now, torch.Tensor) else table_bytes(now) or 0
    return measure(holder.thing)[1]


def distinct(growths: list[Growth], share: float = 0.05) -> list[Growth]:
    """Without those that hold nothing of their own: memory that another holds as well is reported once."""
    result: list[Growth] = []
    counted: set[Any] = set()
    for one in growths:
        if one.keys and len(one.keys & counted) >= (1 - share) * len(one.keys):
            continue
        counted |= one.keys
        result.append(one)
    return result


FUNCTION = torch._C._FunctionBase


def cycle_of_function(trace: StepTrace) -> Leak | None:
    """A function of the user's own that keeps its output on its context (`ctx.y = y`): the two hold each other, so
    that only Python's collector frees them; asked before it does. Its bytes are not known yet."""
    for context in gc.get_objects():
        made_by = getattr(type(context), "_forward_cls", None) if issubclass(type(context), FUNCTION) else None
        if made_by is None:
            continue
        for name, value in attributes(context).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is context:
                code = made_by.forward.__code__
                site = source.attribute_line(code.co_filename, code.co_firstlineno, name)
                names = (f"ctx.{name}", made_by.__name__)
                where = at_site(Where(), site or Site(code.co_filename, code.co_firstlineno, code.co_name))
                steps, backward = trace.log.step + 1, bool(trace.backwards)
                return Leak(names[0], "graph", 0, steps, where, True, names=names, backward=backward)
    return None


ENOUGH = 6
"""Iterations; with fewer, memory may still be filling up."""
SHARE = 0.8
"""Of the iterations, without the first and the last, from which something must be left."""
MOST_READ = 5000
"""Nodes of a graph, or members of a container, that are read."""


def leaks_in_loop(trace: StepTrace, scan: HolderScan) -> tuple[Leak, ...]:
    """What grew with nearly every iteration of the cell's loop; nothing where there were too few."""
    iterations = len(trace.iterations)
    if iterations < ENOUGH:
        return ()
    source.reload_sources()
    files = dict.fromkeys(
        [*scan.files, *(b.op.site.file for b in trace.log.allocations if b.op is not None and b.op.site is not None)]
    )
    leaks = []
    for holder in scan.holders.values():
        counts = _iterations_of_graph(holder, trace) if holder.kind == "slot" else _iterations_of_members(holder, trace)
        if len(counts & set(range(1, iterations - 1))) >= SHARE * (iterations - 2):
            leaks.append(_loop_leak(holder, trace, files, iterations))
    chained = [g for g in leaks if g.chained]
    return tuple(sorted(leaks, key=lambda g: (-g.bytes, g.chained, len(g.holder)))[:1] or chained[:1])


def _iterations_of_graph(holder: Holder, trace: StepTrace) -> set[int]:
    """The iterations in which the nodes of a tensor's graph were made."""
    ends = [number for _, number in trace.iterations]
    iterations = set[int]()
    for node in itertools.islice(graph_nodes([holder.thing.grad_fn]), MOST_READ):
        if node._sequence_nr() < 1 << 62:  # a node that stores a gradient has no number of its own
            iterations.add(bisect.bisect_left(ends, node._sequence_nr() + 1))
    return iterations


def _iterations_of_members(holder: Holder, trace: StepTrace) -> set[int]:
    ends = [event for event, _ in trace.iterations]
    return {
        bisect.bisect_left(ends, allocation.start)
        for t in _members(holder)
        if (allocation := _allocation(t, trace)) is not None
    }


def _members(holder: Holder) -> list[torch.Tensor]:
    if holder.bound is not None or holder.kind not in PLAIN:
        return []
    values = dict.values(holder.thing) if isinstance(holder.thing, dict) else holder.thing
    tensors: list[torch.Tensor] = []
    for value in values if holder.size <= MOST_READ else ():
        tensors += tensors_of([value])
    return tensors


def _allocation(tensor: torch.Tensor, trace: StepTrace) -> Any:
    """The entry of a tensor's memory, if it came in this run."""
    entries = (trace.log.known.get(storage._cdata) for storage in storages_of(tensor))
    return next((e for e in entries if e is not None and e.step == trace.log.step and not e.role), None)


def _loop_leak(holder: Holder, trace: StepTrace, files: Iterable[str], iterations: int) -> Leak:
    chained = holder.kind == "slot"
    tensors = [] if chained else _members(holder)
    grad = chained or any(t.requires_grad and t.grad_fn is not None for t in tensors)
    own = {b.key: b.nbytes for t in tensors if (b := _allocation(t, trace)) is not None}
    survivors = trace.log.survivors(trace.log.step)
    by = int(_steady(trace) if grad else sum(own.values()) / iterations)
    storing = source.storing_line(files, holder.name)
    flagged = 2 * sum(b.nbytes for b in survivors if b.evaluation) > sum(b.nbytes for b in survivors)
    evaluation = grad and not chained and flagged and not trace.backwards
    takers = [t for t in source.takers(files, holder.name) if source.same_variable(t, files, holder.name, storing)]
    kind = "output" if holder.name in OUTPUTS else "graph" if grad else holder.kind
    if kind == "graph" and storing is not None and _in_a_hook(storing, trace):
        kind = "hook"
    return Leak(
        holder.name,
        kind,
        by,
        iterations,
        at_site(Where(), storing),
        grad,
        evaluation,
        chained=chained,
        items=round(len(tensors) / iterations),
        own=int(sum(own.values()) / iterations),
        names=(holder.name,),
        backward=bool(trace.backwards),
        emptied=bool(takers) and not chained,
    )


def _steady(trace: StepTrace) -> float:
    """Bytes that an iteration leaves: the median."""
    ends = [event for event, _ in trace.iterations]
    sums = dict.fromkeys(range(1, len(ends) - 1), 0)
    for allocation in trace.log.survivors(trace.log.step):
        iteration = bisect.bisect_left(ends, allocation.start)
        if iteration in sums:
            sums[iteration] += allocation.nbytes
    return statistics.median(sums.values())


def _in_a_hook(storing: Site, trace: StepTrace) -> bool:
    """Whether a line is in a function that is a hook of a module."""
    for model in trace.names.models.values():
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                for hook in hooks.values():
                    code = getattr(vars(type(hook)).get("__call__", hook), "__code__", getattr(hook, "__code__", None))
                    if (
                        code is not None
                        and code.co_filename == storing.file
                        and storing.line in {line for _, _, line in code.co_lines() if line is not None}
                    ):
                        return True
    return False


# -- what every step leaves behind -------------------------------------------------------------------------------------


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


def holder_of(tensor: Any, own: Iterable[Any], named: Mapping[int, str]) -> str:
    """What holds a tensor, as a name such as "x in load" or "module.cache"; "" where nothing is found. named: the
    user's variables, by the identity of their objects: a stream that is made in C shows nothing of what it keeps."""
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
            text = named.get(id(thing)) or _described(thing, level)
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
        return "" if not named or str(module).startswith(("nbdebug.", "torch.")) else f"{module}.{named[0]}"
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
    if not growths:  # what a ring keeps of the last few steps is none: of a leak's steps each leaves something
        lasting = all(sum(b.nbytes for b in trace.log.survivors(n)) >= SMALL for n in range(1, steps - 1))
        return _unnamed_leak(summary, scan, request) if lasting else ()
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
        *(o.state for o in trace.given),
        *(b for m in trace.names.models.values() for b in m.buffers()),
    )
    return known


def _worth(one: Growth) -> bool:
    """Whether it may be a fault at all: a list of numbers for a plot is none."""
    return one.grad or one.kind == "hooks" or max(one.bytes, one.plain) >= SMALL


def _confirmed(growths: list[Growth], request: Any) -> list[Growth]:
    """Without those that stop growing in a few more steps; only containers of plain values are tested."""
    doubtful = [
        one
        for one in growths
        if one.kind in ("dict", "list", "set", "object", "tensor", "cycle", "parts") and not one.grad and not one.errors
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
        arrays=one.arrays,
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
    if one.kind in ("output", "cache", "cycle"):
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
    made = source.cycle_line(scan.files, one.name) if one.kind == "cycle" else None
    return at_site(Where(), made or source.storing_line(scan.files, one.name))


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


def _unnamed_leak(survivors: _Survivors, scan: HolderScan, request: Any) -> tuple[Leak, ...]:
    """Memory stays with each step, and no name leads to it: who refers to it?"""
    if survivors.bytes < SMALL or survivors.steps < 3:
        return ()
    with _disable_current_modes():
        tensors = tensors_on({b.key for b in survivors.kept})
        step = request.step if type(request.step) is types.FunctionType else None
        variables = {**(closure_variables(step) if step else {}), **request.names}
        named = {id(thing): name for name, thing in variables.items() if not issubclass(type(thing), torch.Tensor)}
        found = (holder_of(t, (tensors, survivors.kept, scan, variables), named) for t in tensors[:3])
        holder = next((text for text in found if text), "")
        grad = any(t.requires_grad for t in tensors)
    largest = max(survivors.kept, key=lambda b: b.nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    if holder in variables:
        made = source.storing_line(scan.files, holder) or source.cycle_line(scan.files, holder)
        where = at_site(Where(), made) if made is not None else where
    if not holder and (site := source.second_backward(scan.files)) is not None:  # weight and gradient hold each other
        holder, where = "grad", at_site(Where(), site)
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
