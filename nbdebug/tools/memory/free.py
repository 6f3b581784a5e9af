"""free(): what the notebook keeps by itself, each with its bytes; and freeing what the user chooses.

free()                          list; nothing is freed
free("traceback", "Out[7]")     free these, and say how much was freed

An entry says what it is (`KeptByNotebook`, plain data), with the bytes that nothing else of the user's holds, each
counted once, and how to free it. Entries hold the things themselves and must not outlive the call that made them.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import gc
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch

from nbdebug.observe import duplicate_hooks as doubled
from nbdebug.observe.backward import input_nodes
from nbdebug.observe.frames import HANDLERS, exception_chain
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.variables import (
    LAST_ERROR_NAMES,
    ShellPlace,
    ShellPlaces,
    frame_variables,
    is_user_module,
    reachable_objects,
    running_shell,
)
from nbdebug.report import Report, Table, Where
from nbdebug.text import count, size
from nbdebug.tools.memory.facts import NOWHERE, KeptByNotebook
from nbdebug.tools.memory.reachability import HeldBlock, ReachabilityWalk, users_memory

MOST_NODES = 500_000


@dataclasses.dataclass
class GraphRecord:
    """A container of tensors that have a graph. places: (holder, key, tensor); graphs: how many that are apart;
    nodes: of all of them."""

    name: str
    places: list[tuple[Any, Any, torch.Tensor]]
    graphs: int = 0
    nodes: int = 0

    @property
    def ends(self) -> list[Any]:
        return [tensor.grad_fn for _, _, tensor in self.places]

    def detach(self) -> None:
        """Put the detached tensor in its place: the value stays, the graph can go."""
        for holder, key, tensor in self.places:
            if holder[key] is tensor:
                holder[key] = tensor.detach()


def records(objects: Iterable[tuple[str, Any]]) -> list[GraphRecord]:
    """The containers that keep the graphs of several steps, named by the outermost one. objects: by name."""
    graphs: dict[str, GraphRecord] = {}
    for name, thing in objects:
        if type(thing) in (list, dict, collections.deque, collections.OrderedDict, collections.defaultdict):
            places = [(thing, key, value) for key, value in _items(thing) if _has_graph(value)]
            if places:
                outermost = name.partition("[")[0]
                graphs.setdefault(outermost, GraphRecord(outermost, [])).places.extend(places)
    for record in graphs.values():
        record.graphs, record.nodes = _apart(record.ends)
    return [record for record in graphs.values() if record.graphs > 1]


def _items(thing: Any) -> Iterator[tuple[Any, Any]]:
    return iter(list(thing.items())) if isinstance(thing, dict) else enumerate(thing)


def _has_graph(value: Any) -> bool:
    if not issubclass(type(value), torch.Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.grad_fn is not None


def _apart(ends: list[Any]) -> tuple[int, int]:
    """How many of these graphs are apart and yet begin with a parameter that another begins with; and all nodes."""
    owner: dict[Any, int] = {}
    leaves: dict[Any, set[int]] = collections.defaultdict(set)
    joined = list(range(len(ends)))
    for place, end in enumerate(ends):
        todo = [end]
        while todo and len(owner) < MOST_NODES:
            node = todo.pop()
            if type(node).__name__ == "AccumulateGrad":
                leaves[node].add(place)
            elif node in owner:
                joined[_root(joined, place)] = _root(joined, owner[node])
            else:
                owner[node] = place
                todo += input_nodes(node)
    shared: set[int] = set()
    for places in leaves.values():
        roots = {_root(joined, place) for place in places}
        shared |= roots if len(roots) > 1 else set()
    return len(shared), len(owner)


def _root(joined: list[int], place: int) -> int:
    while joined[place] != place:
        place = joined[place]
    return place


WORDS = {
    "output": "outputs",
    "traceback": "traceback",
    "exception": "exceptions",
    "loss": "graphs",
    "hook": "hooks",
    "displayed": "figures",
}
"""The word that chooses all entries of a kind."""
_TRACEBACK: Any = vars(BaseException)["__traceback__"]  # past a `__setattr__` of the user's


@dataclasses.dataclass
class Leftover:
    """What is kept, its memory, and how to free it."""

    kept: KeptByNotebook
    blocks: list[HeldBlock]
    let_go: Callable[[], Any]

    def chosen_by(self, words: set[str]) -> bool:
        known = {"all", WORDS[self.kept.how], self.kept.release, self.kept.name, *self.kept.also}
        return bool(known & words)


@dataclasses.dataclass
class Listing:
    """entries: largest first; same: outputs that are variables of the user's as well; doubts: what was not seen."""

    entries: list[Leftover]
    same: int
    doubts: tuple[str, ...]


def listing(
    names: Mapping[str, Any],
    the_shell: Any = None,
    caller: FrameType | None = None,
    without: BaseException | None = None,
) -> Listing:
    """All that is kept. names: the user's variables; the_shell: of IPython, None in a script; caller: the frame that
    asks; without: a failure whose frames are reported elsewhere."""
    places = ShellPlaces(the_shell, names)
    objects = list(reachable_objects(names))
    twice, kept_graphs = doubled.find_duplicate_hooks(objects), records(objects)
    held = users_memory(names, places, caller, [hook for duplicate in twice for hook in duplicate.obsolete])
    entries = []
    ends = {end for record in kept_graphs for end in record.ends}
    walk = ReachabilityWalk(after=held)
    walk(*[node for node in held.nodes if node not in ends])
    walk(*trails(without))
    for record in kept_graphs:
        entries.append(_graph(record, walk))
    entries += _traceback(places.errors(), walk)
    entries += _exceptions(objects, walk)
    outputs = [_output(places, *place, walk) for place in places.displayed()]
    entries += [e for e in outputs if e.blocks] + _figures(walk) + [_hook(one, walk) for one in twice]
    entries = [e for e in entries if e.blocks or e.kept.how in ("hook", "loss")]
    same = sum(not e.blocks and e.kept.storages > 0 for e in outputs)
    doubts: tuple[str, ...] = ()
    if walk.unknown:
        doubts += ("the tensors that autograd's graph has saved: this version of torch does not show them",)
    if not (held.whole and walk.whole):
        doubts += (
            "everything that your variables hold: it is too much, so this may count memory that they hold as well",
        )
    return Listing(sorted(entries, key=lambda e: -e.kept.bytes), same, doubts)


def kept_by_notebook(
    names: Mapping[str, Any], the_shell: Any = None, without: BaseException | None = None, device: str = ""
) -> tuple[KeptByNotebook, ...]:
    """The same as plain data, largest first, for the facts of a report: it holds nothing. device: count this one alone;
    "": all."""
    result = listing(names, the_shell or running_shell(), sys._getframe(1), without)
    leftovers = [
        dataclasses.replace(e.kept, bytes=sum(b.bytes for b in e.blocks if b.on(device))) for e in result.entries
    ]
    return tuple(sorted((k for k in leftovers if k.bytes or not device), key=lambda k: -k.bytes))


def _entry(blocks: list[HeldBlock], let_go: Callable[[], Any], **fields: Any) -> Leftover:
    """An entry whose bytes and storages are those of its blocks."""
    fields.setdefault("what", _largest(blocks))
    leftover = KeptByNotebook(bytes=sum(b.bytes for b in blocks), **{"storages": len(blocks), **fields})
    return Leftover(leftover, blocks, let_go)


def _largest(blocks: list[HeldBlock]) -> str:
    if not blocks:
        return ""
    block = max(blocks, key=lambda b: b.bytes)
    more = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
    return f"{block.dtype} {block.shape}{'' if block.device == 'cpu' else f' on {block.device}'}{more}"


def _graph(record: GraphRecord, walk: ReachabilityWalk) -> Leftover:
    blocks = walk(*record.ends)
    return _entry(
        blocks,
        record.detach,
        how="loss",
        name=record.name,
        release=record.name,
        items=len(record.places),
        nodes=record.nodes,
        what=f"{count(len(record.places), 'tensor')}, {count(record.nodes, 'node')}",
    )


def _traceback(places: list[ShellPlace], walk: ReachabilityWalk) -> list[Leftover]:
    if not places:
        return []
    values = [place.get() for place in places]
    blocks = walk(*values, *(trail for value in values for trail in trails(value)))
    error = next((v for v in values if isinstance(v, BaseException)), None)
    also = tuple(dict.fromkeys(place.name for place in places))

    def let_go() -> None:
        for place in places:
            place.clear()
        for name in LAST_ERROR_NAMES:
            if hasattr(sys, name):
                delattr(sys, name)

    kind = "the frames of a failed cell" if error is None else type(error).__name__
    return [
        _entry(
            blocks,
            let_go,
            how="traceback",
            name=also[0],
            release="traceback",
            also=also[1:],
            what=f"{kind}: {_largest(blocks)}",
            where=raised_at(error),
        )
    ]


def _exceptions(objects: list[tuple[str, Any]], walk: ReachabilityWalk) -> list[Leftover]:
    """The exceptions among the user's variables, those of one container together."""
    groups: dict[str, list[BaseException]] = {}
    for name, thing in objects:
        if issubclass(type(thing), BaseException):
            groups.setdefault(name.partition("[")[0].removeprefix("an item of "), []).append(thing)
    entries = []
    for name, errors in groups.items():
        blocks = walk(*(trail for error in errors for trail in trails(error)))

        def let_go(errors: list[BaseException] = errors) -> None:
            for error in errors:
                for one in exception_chain(error):
                    traceback.clear_frames(one.__traceback__)
                    _TRACEBACK.__set__(one, None)

        entries.append(
            _entry(
                blocks,
                let_go,
                how="exception",
                name=name,
                release=name,
                items=len(errors),
                what=f"{len(errors)} with their frames: {_largest(blocks)}",
                where=raised_at(errors[-1]),
            )
        )
    return entries


def _output(places: ShellPlaces, name: str, value: Any, also: tuple[str, ...], walk: ReachabilityWalk) -> Leftover:
    before = len(ReachabilityWalk(tracebacks=False)(value))
    blocks = walk(value)
    return _entry(
        blocks,
        lambda: places.forget(value),
        how="output",
        name=name,
        release=name,
        storages=before,
        also=tuple(a for a in also if a != name),
    )


def _figures(walk: ReachabilityWalk) -> list[Leftover]:
    """pyplot keeps every figure that nobody has closed."""
    keeper = sys.modules.get("matplotlib._pylab_helpers")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if keeper is None or pyplot is None:
        return []
    figures = {number: held.canvas.figure for number, held in list(keeper.Gcf.figs.items())}
    return [
        _entry(
            walk(figure),
            lambda number=number: pyplot.close(number),  # type: ignore[misc]
            how="displayed",
            name=f"figure {number} of pyplot",
            release="figures",
        )
        for number, figure in figures.items()
    ]


def _hook(one: doubled.DuplicateHook, walk: ReachabilityWalk) -> Leftover:
    more = len(one.older)
    site = Site(one.code.co_filename, one.code.co_firstlineno, one.code.co_name)
    return _entry(
        walk(*one.obsolete),
        one.remove,
        how="hook",
        name=one.module,
        release=one.module,
        items=more,
        what=f"{one.word} `{one.hook}`, {more + 1} times",
        where=at_site(NOWHERE, site),
    )


def trails(value: Any) -> list[TracebackType]:
    """The tracebacks of an exception and of those that led to it."""
    if type(value) is TracebackType:
        return [value]
    return (
        [one.__traceback__ for one in exception_chain(value) if one.__traceback__]
        if isinstance(value, BaseException)
        else []
    )


def raised_at(error: BaseException | None) -> Where:
    """The last line of the user's own files in its traceback, above a dispatch mode that refused an op."""
    at, site = error.__traceback__ if error is not None else None, None
    while at is not None and at.tb_frame.f_code.co_name not in HANDLERS:
        if is_user_module(str(at.tb_frame.f_globals.get("__name__", ""))):
            code = at.tb_frame.f_code
            site = Site(code.co_filename, at.tb_lineno, code.co_name)
        at = at.tb_next
    return at_site(NOWHERE, site)


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """In bytes. tensors: in storages that Python's tensors have, by device; allocated, reserved: of CUDA's allocator,
    by device; process: resident set, None where the system does not say."""

    tensors: dict[str, int]
    allocated: dict[str, int]
    reserved: dict[str, int]
    process: int | None

    def rows(self, after: ProcessMemory) -> list[list[object]]:
        """What, before, after, came back; only what there is."""
        pairs = [
            (f"in tensors on {d}", self.tensors.get(d, 0), after.tensors.get(d, 0))
            for d in sorted({*self.tensors, *after.tensors})
        ]
        pairs += [(f"{device}, allocated", count, after.allocated[device]) for device, count in self.allocated.items()]
        pairs += [(f"{device}, reserved", count, after.reserved[device]) for device, count in self.reserved.items()]
        if self.process is not None and after.process is not None:
            pairs.append(("this process", self.process, after.process))
        return [[what, one, two, one - two] for what, one, two in pairs]


def process_memory() -> ProcessMemory:
    """All of them, now."""
    walk, held = ReachabilityWalk(graphs=False), dict[str, int]()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    for block in walk.storages(tensors):
        held[block.device] = held.get(block.device, 0) + block.bytes
    del tensors
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    return ProcessMemory(
        held,
        {d: torch.cuda.memory_allocated(d) for d in cuda},
        {d: torch.cuda.memory_reserved(d) for d in cuda},
        resident(),
    )


def resident() -> int | None:
    """Bytes of this process in the machine's memory."""
    import psutil  # only where somebody asks

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return None


def give_back() -> None:
    """Return what the allocators keep for later to the system: CUDA's cache, and the C library's free pages on
    Linux."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


ALL = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache", "all")
"""The words that `free` takes, beside the names of single entries."""


@dataclasses.dataclass(frozen=True)
class Release:
    """One freed entry. back: bytes of it that are free now."""

    kept: KeptByNotebook
    back: int


def check(words: tuple[str, ...], entries: list[Leftover]) -> set[str]:
    """The words as a set. Raises ValueError for one that names neither a kind nor an entry."""
    requested = {word.strip() for word in words}
    named = {name for e in entries for name in (e.kept.release, e.kept.name, *e.kept.also)}
    unknown = sorted(requested - set(ALL) - named)
    if unknown:
        there = ", ".join(dict.fromkeys(e.kept.release for e in entries if e.kept.release not in ALL))
        raise ValueError(
            f"free takes {', '.join(ALL)}"
            + (f", or the name of what it lists ({there})" if there else "")
            + f"; got {', '.join(map(repr, unknown))}."
        )
    return requested


def release(entries: list[Leftover], words: set[str]) -> tuple[list[Release], ProcessMemory, ProcessMemory]:
    """Free the chosen ones; `entries` is emptied, since it holds what is freed."""
    before = process_memory()
    chosen = [entry for entry in entries if entry.chosen_by(words)]
    entries.clear()
    chosen_blocks = [(entry.kept, entry.blocks) for entry in chosen]
    while chosen:
        chosen.pop().let_go()
    gc.collect()  # what only refers to itself
    if words & {"cache", "all"}:
        give_back()
    released = [
        Release(leftover, sum(block.bytes for block in blocks if block.gone())) for leftover, blocks in chosen_blocks
    ]
    return released, before, process_memory()


WORTH = 1 << 20
"""Bytes below which nothing is reported: a healthy notebook keeps as much in small outputs."""
TRIM = 64 << 20
"""Bytes that a process keeps after its tensors are freed: from here on a note says how the system gets them."""
HOW = {
    "output": "shown in a cell",
    "traceback": "of the last failure",
    "exception": "exceptions kept in a variable",
    "loss": "losses with their graph",
    "hook": "hook registered more than once",
    "displayed": "figure not closed",
}


def free(*what: str, names: Mapping[str, Any] | None = None, shell: Any = None) -> Report:
    """List what the notebook keeps by itself, or free what is chosen, and nothing else.

    what: nothing, to list only; or any of "traceback" (sys.last_*, and what %debug starts from: it no longer works for
    that failure afterwards), "outputs" (Out, _, __, ___; variables stay), "exceptions" (the frames of exceptions in
    variables; the exceptions stay, with their message), "graphs" (tensors in lists and dicts that keep the graphs of
    several steps are replaced by themselves, detached: values stay, a backward through them is no longer possible),
    "hooks" (all but the newest of hooks that a cell, run again, has registered again), "figures" (pyplot's), "cache"
    (what allocators keep for later goes back to the card and the system), "all"; or the name of one entry that the list
    shows: "Out[7]", "losses". names: the user's variables; left out: those that the caller sees. shell: IPython's;
    left out: the one that runs, if any.

    The bytes of an entry are those of tensors and numpy arrays that nothing of the user's holds besides, each counted
    at the first entry. Freed: bytes of them that are free now. Raises ValueError for an unknown word, TypeError for
    what is no word.
    """
    for word in what:
        if not isinstance(word, str):
            raise TypeError(
                f'free takes words, such as free("traceback"); got {type(word).__name__}. A variable is '
                "freed with `del name`."
            )
    caller = sys._getframe(1)
    shell = running_shell() if shell is None else shell
    if names is None:
        names = {**getattr(shell, "user_ns", {}), **caller.f_globals, **frame_variables(caller)}
    entries = listing(names, shell, caller)
    if not what:
        return _list(entries)
    words = check(what, entries.entries)
    doubts = entries.doubts
    return _freed(*release(entries.entries, words), words, doubts)


def _list(entries: Listing) -> Report:
    leftovers = [entry.kept for entry in entries.entries]
    total = sum(k.bytes for k in leftovers)
    telling = [k for k in leftovers if k.how in ("hook", "loss")]
    facts: dict[str, Any] = {"notebook": [dataclasses.asdict(k) for k in leftovers]}
    notes = (
        [
            f"{count(entries.same, 'output is', 'outputs are')} held by variables of yours as well, without memory "
            "of their own."
        ]
        if entries.same
        else []
    )
    if total < WORTH and not telling:
        small = f" Its small outputs hold {size(total)}." if total else ""
        headline, tables = f"There is nothing to free: the notebook keeps nothing large by itself.{small}", []
    else:
        headline = (
            f"The notebook keeps {size(total)} that none of your variables needs."
            if total >= WORTH
            else "The notebook keeps little memory so far, but some of it grows each time a cell runs."
        )
        tables = [_table(leftovers)]
        notes = [*_advice(leftovers), *notes]
    return Report("free()", notes=tuple(notes), unchecked=entries.doubts, facts=facts, headline=headline, tables=tables)


def _advice(leftovers: list[KeptByNotebook]) -> list[str]:
    word = WORDS[leftovers[0].how]
    notes = [
        f'Nothing has been freed. `%free {word}` (in a script: `free("{word}")`) frees the first, '
        "`%free --all` everything listed."
    ]
    if any(k.how == "traceback" for k in leftovers):
        notes.append("`%debug` and `%tb` work until the traceback is freed.")
    if any(k.how == "loss" for k in leftovers):
        notes.append("`losses.append(loss.item())`, or `loss.detach()`, keeps no graph.")
    return notes


def _table(leftovers: list[KeptByNotebook]) -> Table:
    rows = [
        [k.name, k.bytes, _word(k), ", ".join(part for part in (HOW[k.how], k.what, k.where.place) if part)]
        for k in leftovers
    ]
    return Table(
        "Held by the notebook",
        ("name", "held (bytes)", "word", "what"),
        rows,
        "Held: tensors and arrays that none of your variables holds, each counted once. `%free WORD` frees an entry.",
    )


def _word(leftover: KeptByNotebook) -> str:
    return WORDS[leftover.how] if leftover.how in ("traceback", "displayed", "hook") else leftover.release


def _freed(
    released: list[Release], before: ProcessMemory, after: ProcessMemory, words: set[str], doubts: tuple[str, ...]
) -> Report:
    back, held = sum(r.back for r in released), sum(r.kept.bytes for r in released)
    trimmed = bool(words & {"cache", "all"})
    facts: dict[str, Any] = {"freed": {"bytes": back, "held": held, "names": [r.kept.name for r in released]}}
    headline, tables = _headline(released, back, held, before, after, trimmed), []
    if released or trimmed:
        tables = [
            Table(
                "Before and after",
                ("memory", "before (bytes)", "after (bytes)", "freed (bytes)"),
                before.rows(after),
            )
        ]
    if released:
        tables.insert(
            0,
            Table(
                "Freed",
                ("name", "held (bytes)", "freed (bytes)", "what"),
                [[r.kept.name, r.kept.bytes, r.back, HOW[r.kept.how]] for r in released],
            ),
        )
    notes = _notes(back, held, before, after, trimmed)
    return Report(
        f"free({', '.join(map(repr, sorted(words)))})",
        notes=tuple(notes),
        unchecked=doubts,
        facts=facts,
        headline=headline,
        tables=tables,
    )


def _notes(back: int, held: int, before: ProcessMemory, after: ProcessMemory, trimmed: bool) -> list[str]:
    """Notes: what is still held, what was garbage, what allocators keep for later."""
    notes = (
        [] if back >= held else [f"{size(held - back)} of it is still held by something else; `%mem` names the holder."]
    )
    garbage = sum(before.tensors.values()) - sum(after.tensors.values()) - back
    if garbage > WORTH:
        notes.append(
            f"{size(garbage)} more were in objects that only refer to each other: the garbage collector has freed them."
        )
    if trimmed:
        return notes
    cached = sum(after.reserved.values()) - sum(after.allocated.values())
    if cached > WORTH:
        notes.append(
            f"torch keeps {size(cached)} of the GPU for your next tensors. `%free cache` frees it for other processes."
        )
    freed = before.tensors.get("cpu", 0) - after.tensors.get("cpu", 0)
    retained = freed - max(0, (before.process or 0) - (after.process or 0))
    if before.process is not None and retained > max(TRIM, freed / 2):
        notes.append(
            f"The process keeps up to {size(retained)} of it for your next tensors. `%free cache` returns it to the "
            "system."
        )
    return notes


def _headline(
    released: list[Release], back: int, held: int, before: ProcessMemory, after: ProcessMemory, trimmed: bool
) -> str:
    hooks = sum(r.kept.items for r in released if r.kept.how == "hook")
    parts = [f"{size(back)} freed" + (f", of {size(held)} that was held" if back < held else "")] if held else []
    parts += [f"{count(hooks, 'duplicate hook')} removed"] if hooks else []
    cache = sum(before.reserved.values()) - sum(after.reserved.values())
    system = max(0, (before.process or 0) - (after.process or 0))
    if trimmed:
        parts.append(
            "the system got "
            + " and ".join(
                [f"{size(system)} of this process's memory"]
                + ([f"{size(cached)} of the GPU's" for cached in [max(0, cache)] if before.reserved])
            )
        )
    text = "; ".join(parts) or "There was nothing to free: the notebook keeps nothing of that kind"
    return f"{text[0].upper()}{text[1:]}."
