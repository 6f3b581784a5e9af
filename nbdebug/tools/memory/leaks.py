"""What every step leaves behind: who holds it, which line stores it, what would stay after the fix.

The line is seen by a trace of one more step, or found by reading the source: which statement puts something into the
holder, and whether any takes it out again. Then the growths with their lines, and what no holder explains.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import dataclasses
import gc
import itertools
import linecache
import os
import re
import statistics
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

import nbdebug
from nbdebug.observe import locations as sites
from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.sources import loops_around, tree_of
from nbdebug.observe.variables import attributes, closure_variables
from nbdebug.report import Where
from nbdebug.tools.memory.facts import SMALL, Leak
from nbdebug.tools.memory.holders import (
    OUTPUTS,
    PLAIN,
    Growth,
    Holder,
    HolderScan,
    Key,
    distinct,
    growths_of,
    still_growing,
    tensors_of,
    watch_of,
)
from nbdebug.tools.memory.reachability import ReachabilityWalk
from nbdebug.tools.memory.trace import Allocation, StepTrace, storages_of

# -- the line that stores it ------------------------------------------------------------------------------------------


PUTS = frozenset(
    {
        "append",
        "appendleft",
        "extend",
        "add",
        "update",
        "insert",
        "setdefault",
        "put",
        "register_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
    }
)
TAKES = frozenset({"clear", "pop", "popleft", "popitem", "remove", "discard", "cache_clear"})


def collected_near(site: Site | None) -> tuple[str, Site | None]:
    """The variable that the loop around a line adds to, with its graph, and where; ("", None) where there is none."""
    around = loops_around(site.file, site.line) if site is not None else []
    within: Iterable[Any] = ast.walk(around[-1]) if around else ()
    for node in within:
        call = node.value if isinstance(node, ast.Expr) else None
        name = ast.unparse(node.target) if isinstance(node, ast.AugAssign) else ""
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            name = ast.unparse(call.func.value)
        if name and site is not None and not _CUT.search(ast.unparse(node)):
            return name, Site(site.file, node.lineno, "")
    return "", None


_CUT = re.compile(r"\.(?:item|detach|tolist|numpy|data)\b|\b(?:float|int|len)\(|[+]= *1$")


def last_name(name: str) -> str:
    """The variable or attribute that a path ends in: `probe.seen["a"]` → "seen"."""
    plain = re.sub(r"\[.*?\]", "", name)
    return plain.split(".")[-1]


def storing_line(files: Iterable[str], name: str) -> Site | None:
    """The first statement in these files that puts something into what bears this name."""
    attribute = last_name(name)
    for file in files:
        for node in statements(file):
            if _puts(node, attribute):
                return Site(file, node.lineno, "")
    return None


def attribute_line(file: str, first: int, attribute: str) -> Site | None:
    """The last statement of the function that begins at a line, decorators included, that sets this attribute."""
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.lineno - len(node.decorator_list) <= first <= node.lineno:
            lines = [
                part.lineno
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and part.attr == attribute and isinstance(part.ctx, ast.Store)
            ]
            return Site(file, max(lines), node.name) if lines else None
    return None


def second_backward(files: Iterable[str]) -> Site | None:
    """The first statement `loss.backward(create_graph=True)`."""
    for file in files:
        for node in statements(file):
            if isinstance(node, ast.Expr) and re.search(r"\.backward\(.*create_graph=True", ast.unparse(node)):
                return Site(file, node.lineno, "")
    return None


def cycle_line(files: Iterable[str], name: str) -> Site | None:
    """The statement that calls `cycle` or `tee`, rather one that gives the result this name."""
    found = [
        (last_name(name) in ast.unparse(node).partition("=")[0], Site(file, node.lineno, ""))
        for file in files
        for node in statements(file)
        if any(
            isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) in ("cycle", "tee")
            for part in ast.walk(node)
        )
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


class Taker(NamedTuple):
    """A statement that takes something out of a holder. outer: the first line of the function or class of the file's
    top level around it, 0 outside of any. flags: plain names in the conditions around it, each with the
    value that it must have for the statement to run."""

    file: str
    line: int
    outer: int
    function: str
    flags: tuple[tuple[Any, bool], ...]


def callers(files: Iterable[str], function: str) -> list[Taker]:
    """The statements that call a function or a method of this name."""
    result: list[Taker] = []
    for file in files:
        tree = tree_of(file)
        for node in tree.body if tree is not None else ():
            outer = node.lineno if isinstance(node, _SCOPES) else 0
            result += _takers_in([node], function, Taker(file, 0, outer, "", ()), _calls_it)
    return [call for call in result if call.function != function]


def takers(files: Iterable[str], name: str) -> list[Taker]:
    """The statements that take something out of what bears this name, or empty it, after it was made."""
    attribute = last_name(name)
    result: list[Taker] = []
    for file in files:
        tree = tree_of(file)
        if tree is not None:
            for node in tree.body:
                outer = node.lineno if isinstance(node, _SCOPES) else 0
                result += _takers_in([node], attribute, Taker(file, 0, outer, "", ()))
    return [taker for taker in result if taker.function != "__init__"]


def _takers_in(
    body: list[Any], name: str, at: Taker, matches: Callable[[Any, str], bool] | None = None
) -> Iterator[Taker]:
    matches = matches or _takes
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _takers_in(node.body, name, at._replace(function=node.name, flags=()), matches)
            continue
        if matches(node, name):
            yield at._replace(line=node.lineno)
        if isinstance(node, ast.If):
            yield from _takers_in(node.body, name, at._replace(flags=(*at.flags, *_flags(node.test, True))), matches)
            yield from _takers_in(node.orelse, name, at._replace(flags=(*at.flags, *_flags(node.test, False))), matches)
            continue
        for part in ("body", "orelse", "finalbody", "handlers"):
            inner = [x for x in getattr(node, part, ()) if isinstance(x, (ast.stmt, ast.ExceptHandler))]
            yield from _takers_in(inner, name, at, matches)


def _calls_it(node: Any, name: str) -> bool:
    """Whether a simple statement, or the head of a block, calls a function or a method of this name."""
    heads = [getattr(node, part, None) for part in ("value", "test", "iter", "exc")]
    inside = (part for head in heads if isinstance(head, ast.AST) for part in ast.walk(head))
    return any(
        isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) == name
        for part in inside
    )


def same_variable(taker: Taker, files: Iterable[str], name: str, site: Site | None) -> bool:
    """Whether a statement speaks of the holder into which a line puts things, and not of another of that name: an
    attribute, a variable of the file's top level, or one of the same function."""
    if site is None or "." in name or taker.outer == 0:
        return True
    plain = last_name(name)
    trees = [tree for file in files if (tree := tree_of(file)) is not None]
    if any(
        isinstance(t, ast.Name) and t.id == plain
        for tree in trees
        for node in tree.body
        for t in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ):
        return True
    tree = tree_of(site.file)
    body = tree.body if tree is not None else []
    around = [n.lineno for n in body if isinstance(n, _SCOPES) and n.lineno <= site.line <= (n.end_lineno or 0)]
    return taker.file == site.file and taker.outer in around


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _flags(test: Any, value: bool) -> list[tuple[Any, bool]]:
    """The plain names in a condition that must have this value for the condition to have it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _flags(test.operand, not value)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if value else ast.Or):
        return [flag for part in test.values for flag in _flags(part, value)]
    plain = isinstance(test, ast.Name) or (isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name))
    return [(test, value)] if plain else []


def never_runs(taker: Taker, frame: FrameType) -> bool:
    """Whether a flag around a statement prevents it, in a call of its function."""
    for node, flag in taker.flags:
        name: str = node.value.id if isinstance(node, ast.Attribute) else node.id  # type: ignore[attr-defined]
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if isinstance(node, ast.Attribute):
            value = attributes(value).get(node.attr)
        if isinstance(value, (bool, int)) and bool(value) is not flag:
            return True
    return False


def reload_sources() -> None:
    """Read the source again: a file may have been written to since."""
    linecache.checkcache()


def statements(file: str) -> Iterator[Any]:
    """The statements of a file or a cell, as far as its source is available."""
    tree = tree_of(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node


def _puts(node: Any, attribute: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return _root(node.target) == attribute
    if isinstance(node, ast.Assign):
        return any(isinstance(t, (ast.Subscript, ast.Attribute)) and _root(t) == attribute for t in node.targets)
    return any(call.func.attr in PUTS and _root(call.func.value) == attribute for call in _calls(node))


def _takes(node: Any, attribute: str) -> bool:
    if isinstance(node, ast.Delete):
        return any(_root(target) == attribute for target in node.targets)
    if isinstance(node, ast.Assign):
        return any(
            isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Slice) and _root(t) == attribute
            for t in node.targets
        )
    if any(
        call.func.attr.startswith(("heappop", "heapreplace")) and call.args and _root(call.args[0]) == attribute
        for call in _calls(node)
    ):
        return True
    return any(call.func.attr in TAKES and _root(call.func.value) == attribute for call in _calls(node))


def _calls(node: Any) -> Iterator[Any]:
    """Calls of methods in a simple statement, or in the head of a block."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.Return)) and node.value is not None:
        for part in ast.walk(node.value):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                yield part


def _root(target: Any) -> str:
    """The name that a target ends in, past its indices: `self.seen[name]` → "seen"."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""


_MODULE = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")


class StoringLine(NamedTuple):
    """The line, and whether it runs inside a hook, on which module."""

    site: Site
    hook: bool = False
    module: Any = None


class Tracer:
    """Calls a step with every line of the user's own followed. watches: functions that give a comparable state; takers:
    statements that take things out, of which `dead` are those that a flag keeps from running."""

    def __init__(self, watches: list[Callable[[], Any]], takers: Iterable[Taker] = ()):
        self.watches, self.takers = watches, list(takers)
        self.dead: set[Taker] = set()
        self.entered: set[tuple[str, str]] = set()  # (file, name) of the functions of the user's that ran
        self.lines: list[StoringLine | None] = [None] * len(watches)
        self._before = [watch() for watch in watches]
        self._last: FrameType | None = None
        self._line = 0

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs the step, not traced where a debugger or a measure of coverage traces already."""
        if sys.gettrace() is not None:
            return step()
        sys.settrace(self._called)
        try:
            return step()
        finally:
            sys.settrace(None)
            self._last = None

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if sites.kind_of(frame.f_code) != sites.USER:
            return None
        self.entered.add((frame.f_code.co_filename, frame.f_code.co_name))
        self._check_watches()
        return self._traced

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._check_watches()
        if event == "return":
            self.dead |= {
                t
                for t in self.takers
                if t.function == frame.f_code.co_name and t.file == frame.f_code.co_filename and never_runs(t, frame)
            }
            self._set_last(_users_frame(frame.f_back))
        else:
            self._set_last(frame)
        return self._traced

    def _set_last(self, frame: FrameType | None) -> None:
        self._last, self._line = frame, frame.f_lineno if frame is not None else 0

    def _check_watches(self) -> None:
        for number, watch in enumerate(self.watches):
            now = watch()
            if now != self._before[number]:
                self._before[number] = now
                if self.lines[number] is None and self._last is not None:
                    self.lines[number] = self._storing_line(self._last)

    def _storing_line(self, frame: FrameType) -> StoringLine:
        site = Site(frame.f_code.co_filename, self._line, frame.f_code.co_name)
        inner: FrameType | None = frame
        while inner is not None and inner.f_back is not None:
            outer = inner.f_back
            if outer.f_code.co_name == "_engine_run_backward" and sites.kind_of(inner.f_code) == sites.USER:
                return StoringLine(site, True)  # a tensor's hook is called by the engine itself
            if (
                outer.f_code.co_filename == _MODULE
                and inner.f_code.co_name != "forward"
                and sites.kind_of(inner.f_code) == sites.USER
            ):
                return StoringLine(site, True, outer.f_locals.get("self"))
            inner = outer
        return StoringLine(site)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and sites.kind_of(frame.f_code) != sites.USER:
        frame = frame.f_back
    return frame


# -- what a function keeps, and what grows within a cell's loop --------------------------------------------------------


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
                site = attribute_line(code.co_filename, code.co_firstlineno, name)
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
    reload_sources()
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
    storing = storing_line(files, holder.name)
    flagged = 2 * sum(b.nbytes for b in survivors if b.evaluation) > sum(b.nbytes for b in survivors)
    evaluation = grad and not chained and flagged and not trace.backwards
    emptying = [t for t in takers(files, holder.name) if same_variable(t, files, holder.name, storing)]
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
        emptied=bool(emptying) and not chained,
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


# -- what every step leaves behind ------------------------------------------------------------------------------------


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
    reload_sources()
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
    """Weights, buffers and states. No gradients: a list that keeps those of each step has the present ones, too."""
    known = ReachabilityWalk()
    known.take([*trace.parameters(), *(b for m in trace.names.models.values() for b in m.buffers())])
    known(*(state for o in trace.given for state in o.state.values()))  # its keys are weights, which have gradients
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
    emptying = [() if one.chain or one.kind in ("hooks", "output") else takers(scan.files, one.name) for one in growths]
    calls = {t.function: callers(scan.files, t.function) for some in emptying for t in some if t.function}
    flagged = [t for some in (*emptying, *calls.values()) for t in some]
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
            same_variable(t, scan.files, one.name, line.site if line is not None else None)
            for t in some
            if t not in tracer.dead and _is_reached(t, calls, tracer)
        )
        for one, line, some in zip(growths, result.puts, emptying)
    ]
    return result


def _is_reached(taker: Taker, calls: Mapping[str, list[Taker]], tracer: Tracer) -> bool:
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
    made = cycle_line(scan.files, one.name) if one.kind == "cycle" else None
    return at_site(Where(), made or storing_line(scan.files, one.name))


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
        made = storing_line(scan.files, holder) or cycle_line(scan.files, holder)
        where = at_site(Where(), made) if made is not None else where
    if not holder and (site := second_backward(scan.files)) is not None:  # weight and gradient hold each other
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
