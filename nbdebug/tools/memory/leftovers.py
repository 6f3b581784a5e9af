"""All that the notebook keeps by itself, with the bytes that nothing else of the user's holds, each counted once.

An entry says what it is (`KeptByNotebook`, plain data) and how to free it. Entries hold the things themselves and
must not outlive the call that made them.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch

from nbdebug.observe import duplicate_hooks as doubled
from nbdebug.observe import shell
from nbdebug.observe.backward import input_nodes
from nbdebug.observe.frames import HANDLERS, exception_chain
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.variables import is_user_module, reachable_objects
from nbdebug.report import Where
from nbdebug.text import count
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
    places = shell.ShellPlaces(the_shell, names)
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
    result = listing(names, the_shell or shell.running_shell(), sys._getframe(1), without)
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


def _traceback(places: list[shell.ShellPlace], walk: ReachabilityWalk) -> list[Leftover]:
    if not places:
        return []
    values = [place.get() for place in places]
    blocks = walk(*values, *(trail for value in values for trail in trails(value)))
    error = next((v for v in values if isinstance(v, BaseException)), None)
    also = tuple(dict.fromkeys(place.name for place in places))

    def let_go() -> None:
        for place in places:
            place.clear()
        for name in shell.LAST_ERROR_NAMES:
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


def _output(
    places: shell.ShellPlaces, name: str, value: Any, also: tuple[str, ...], walk: ReachabilityWalk
) -> Leftover:
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
