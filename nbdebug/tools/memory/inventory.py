"""All that is held at this moment: every live tensor, once for each storage, with its owner by name.

Nothing of the user's code runs, nothing is freed, and no visited object is held afterwards.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from nbdebug.interrupts import uncollected
from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.variables import ShellPlaces
from nbdebug.tools.memory.facts import KINDS, Device, HeldMemory, Holding
from nbdebug.tools.memory.owners import LEAVES, Key, Owned, OwnerIndex, Ownership, autograd, live

NAMELESS = "a tensor that has no name"
_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
BLOCK = 512
"""CUDA's allocator hands out multiples of this (`kMinBlockSize` of torch's CUDACachingAllocator)."""
BLOCKS = 200_000
"""With more blocks than this the snapshot, which tells each of them, would take seconds."""


class Graphs:
    """One walk over what autograd has saved for a backward: from the tensors that end a graph, the latest first, since
    of two ends in one graph the later one keeps more. Nodes say what they have saved without unpacking it
    (`_raw_saved_*`), so that no hook that unpacks runs, and a checkpoint recomputes nothing."""

    def __init__(self, index: OwnerIndex):
        self._naming = index
        self._keeper: dict[Any, Ownership] = {}  # holds the nodes: they are made on demand, and must stay the same

    def walk(self, live: Iterable[Any]) -> None:
        """Name what the graphs keep: of tensors with a name first, then those of all others."""
        self._named()
        nameless = Ownership("graph", f"graph of {NAMELESS}", NAMELESS)
        ends = {node: None for tensor in live if (node := autograd(tensor)[1]) is not None}
        for node in sorted(ends, key=lambda node: -_order(node)):
            self._from(node, nameless)
        self._naming.walk()
        self._named()

    def _named(self) -> None:
        """The graphs of all tensors with a name, and of those that these graphs keep (as a checkpoint does)."""
        index = self._naming
        while index.keepers:
            keepers, index.keepers = index.keepers, []
            for owner, node in sorted(keepers, key=lambda keeper: -_order(keeper[1])):
                self._from(
                    node,
                    owner
                    if owner.kind == "graph"
                    else Ownership("graph", f"graph of `{owner.name}`", owner.root, owner.where),
                )
            index.walk()

    def _from(self, end: Any, owner: Ownership) -> None:
        for node in graph_nodes([end], known=self._keeper):
            self._keeper[node] = owner
            for tensor in self._saved(node):
                self._naming.made.append(tensor)
                self._naming.add(tensor, owner)

    def _saved(self, node: Any) -> Iterator[Any]:
        for name in _raw(type(node)):
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
            yield from value if type(value) in (tuple, list) else (value,)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        yield from (
            thing
            for thing in gc.get_referents(node)
            if type(thing) not in LEAVES and not issubclass(type(thing), (type, types.ModuleType))
        )


def _raw(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    return _names[kind]


def _order(node: Any) -> int:
    """When it was made: autograd counts its nodes."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else 0


def rounded(count: int) -> int:
    """The bytes that CUDA's allocator counts for a storage of so many."""
    return -(-count // BLOCK) * BLOCK


def devices(live: Mapping[str, int], only: str = "") -> tuple[Device, ...]:
    """Every device that holds something, the accelerators first. live: bytes of the storages found on each;
    only: this one alone."""
    result = [*_cuda(live), *_mps(live)]
    listed = {device.name for device in result} | {"cpu"}
    result += [Device(name, count) for name, count in live.items() if name not in listed]
    result.append(_host(live.get("cpu", 0)))
    return tuple(d for d in result if only in ("", d.name, d.name.partition(":")[0]))


def _cuda(live: Mapping[str, int]) -> list[Device]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    result = []
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        stats = torch.cuda.memory_stats(number)
        reserved = int(stats.get("reserved_bytes.all.current", 0))
        if not reserved and name not in live:
            continue
        free, total = torch.cuda.mem_get_info(number)
        result.append(
            Device(
                name,
                live.get(name, 0),
                int(stats.get("allocated_bytes.all.current", 0)),
                reserved,
                int(stats.get("allocated_bytes.all.peak", 0)),
                int(stats.get("reserved_bytes.all.peak", 0)),
                int(total),
                int(free),
                _largest(number, stats),
            )
        )
    return result


def _largest(number: int, stats: Mapping[str, Any]) -> int | None:
    """The largest piece that lies free within what is reserved."""
    if int(stats.get("active.all.current", 0)) > BLOCKS:
        return None
    segments = [s for s in torch.cuda.memory_snapshot() if s.get("device") == number]
    return max(
        (int(block["size"]) for segment in segments for block in segment["blocks"] if block["state"] == "inactive"),
        default=0,
    )


def _mps(live: Mapping[str, int]) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    name = next((name for name in live if name.startswith("mps")), "mps:0")
    total = int(torch.mps.recommended_max_memory())
    reserved = int(torch.mps.driver_allocated_memory())
    return [
        Device(
            name,
            live.get(name, 0),
            int(torch.mps.current_allocated_memory()),
            reserved,
            total=total,
            free=max(0, total - reserved),
        )
    ]


def _host(live: int) -> Device:
    import psutil  # only where somebody asks

    machine = psutil.virtual_memory()
    try:
        process = int(psutil.Process().memory_info().rss)
    except psutil.Error:
        process = None
    return Device("cpu", live, total=int(machine.total), free=int(machine.available), process=process)


MOST = 16
"""Tensors whose referrers are searched."""
LEVELS = 4
"""From a tensor outwards: a list, the dict that holds the list, the object that holds the dict."""
NOBODY = "no Python object (a library holds it)"
_ANONYMOUS = (list, tuple, dict, set, frozenset, types.CellType)


def referrers(tensors: Sequence[Any], ours: Iterable[Any]) -> list[str]:
    """For each tensor, who holds it: "a list, in a dict, in a Recorder". ours: what this look itself holds."""
    tensors = tensors[:MOST]
    skip = {id(tensors), *(id(thing) for thing in ours)}
    chains: list[dict[int, str]] = [{} for _ in tensors]
    at: list[Any] = list(tensors)
    for _ in range(LEVELS):
        targets = {id(thing): thing for thing in at if thing is not None}
        if not targets:
            break
        above = _above(targets, skip | {id(at), id(targets)})
        at = [_step(thing, chain, above) for thing, chain in zip(at, chains)]
    return [", in ".join(chain.values()) if chain else NOBODY for chain in chains]


def _step(thing: Any, chain: dict[int, str], above: dict[int, Any]) -> Any:
    """Add who holds this one to the chain; give it back if it has no name of its own, so that one must ask on."""
    holder = above.get(id(thing)) if thing is not None else None
    if holder is None:
        return None
    if id(holder) in chain:
        chain[0] = "itself (`gc.collect()` frees it)"
        return None
    chain[id(holder)] = _description(holder)
    return holder if type(holder) in _ANONYMOUS else None


def _above(targets: dict[int, Any], skip: set[int]) -> dict[int, Any]:
    """One that refers to each; where there are several, one that says more than a list does."""
    above: dict[int, Any] = {}
    referrers = gc.get_referrers(*targets.values())
    for referrer in referrers:
        if id(referrer) in skip or referrer is referrers or _is_ours(referrer):
            continue
        for key in {id(inside) for inside in gc.get_referents(referrer)} & targets.keys():
            if key not in above or type(above[key]) in _ANONYMOUS and type(referrer) not in _ANONYMOUS:
                above[key] = referrer
    return above


def _is_ours(thing: Any) -> bool:
    return type(thing) is types.FrameType and str(thing.f_globals.get("__name__", "")).startswith("nbdebug.")


def _description(thing: Any) -> str:
    kind = type(thing)
    if kind is types.FunctionType:
        return f"the function {thing.__qualname__}"
    if kind is types.FrameType:
        return f"the call of {thing.f_code.co_name} that runs"
    if kind is types.ModuleType:
        return f"the module {vars(thing).get('__name__', '')}"
    if kind is types.CellType:
        return "the closure of a function"
    if issubclass(kind, type):
        return f"the class {type.__getattribute__(thing, '__qualname__')}"
    if kind is dict and type(thing.get("__name__")) is str and "__builtins__" in thing:
        return f"the module {thing['__name__']}"
    if kind in _ANONYMOUS:
        return f"a {kind.__name__}" + (f" of {len(thing):,}" if len(thing) > 1 else "")
    return f"an object of {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


ROUNDING = "rounding to 512 bytes"
UNMET = "allocated, in no tensor"
NAMELESS = "(no name)"
LISTED = 1000
"""Storages that are listed one by one."""


class Inventory(NamedTuple):
    """What was held, and what it could not see. largest: (holding, bytes that its tensor shows of its storage) of
    the largest storages; roots: the variable that each holding belongs to, in the order of the holdings."""

    held: HeldMemory
    largest: list[tuple[Holding, int]]
    roots: tuple[str, ...]
    unchecked: tuple[str, ...]


def held_memory(
    models: Mapping[str, Any], optimizers: Mapping[str, Any], names: Mapping[str, Any], *, device: str | None = None
) -> HeldMemory:
    """What is held now, each storage at its first owner in the order of facts.KINDS.

    models, optimizers: by the user's names for them; names: the user's variables; device: this one alone
    ("cuda" means every card). Sizes are bytes."""
    with uncollected():
        return inventory(models, optimizers, names, device=device or "", caller=sys._getframe(1)).held


def inventory(
    models: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    names: Mapping[str, Any],
    *,
    device: str = "",
    caller: FrameType | None = None,
    shell: Any = None,
) -> Inventory:
    """The same with what the report needs besides. caller: the frame that asks; shell: IPython's, if one runs."""
    tensors = live()
    places = ShellPlaces(shell, names)
    index = OwnerIndex([*places.namespaces, places.outputs, shell, tensors])
    _named(index, models, optimizers, names, places, caller)
    for tensor in tensors:
        for piece in index.pieces(tensor):
            index.record(piece)
    Graphs(index).walk(tensors)
    _name_the_rest(index, tensors)
    storages = [owned for owned in index.owned.values() if owned.piece.on(device)]
    listed = devices(_sums(storages), device)
    parts = _holdings(storages)
    parts += [(holding, "") for one in listed for holding in _rest(one, storages)]
    parts.sort(key=lambda part: (KINDS.index(part[0].kind), -part[0].bytes))
    held = HeldMemory(tuple(holding for holding, _ in parts), listed, len(tensors), len(storages))
    largest = sorted(storages, key=lambda owned: -owned.piece.bytes)[:LISTED]
    return Inventory(
        held,
        [(_holding([owned]), owned.piece.shown) for owned in largest],
        tuple(root for _, root in parts),
        tuple(_unseen(index, held)),
    )


def _named(
    index: OwnerIndex,
    models: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    names: Mapping[str, Any],
    places: ShellPlaces,
    caller: FrameType | None,
) -> None:
    """Every name that leads to something, those of the user's own first. Calls that run and the globals of the user's
    files, which come last, may hold very many things, and little in them: each has a walk of its own."""
    index.models(models)
    index.optimizers(optimizers)
    index.variables(names)
    index.walk()
    index.calls(caller, names)
    index.walk()
    for name, value, _ in places.displayed():
        index.add(value, Ownership("cell output", name, name))
    for place in places.errors():
        index.add(place.get(), Ownership("traceback", place.name, place.name))
    index.walk()
    index.files(names)
    index.walk()


def _name_the_rest(index: OwnerIndex, tensors: list[Any]) -> None:
    """Storages that no name leads to get, as their name, what the garbage collector says."""
    rest: dict[Key, Any] = {}
    for tensor in tensors:
        for piece in index.pieces(tensor):
            if index.owned[piece.key].owner is None:
                rest.setdefault(piece.key, tensor)
    keys = sorted(rest, key=lambda key: -index.owned[key].piece.bytes)
    largest = [rest[key] for key in keys]
    ours = [tensors, rest, largest, index.made]
    for key, holder in zip(keys, referrers(largest, ours) if largest else ()):
        index.owned[key].owner = Ownership("unknown", f"held by {holder}", NAMELESS)
    for owned in index.owned.values():
        if owned.owner is None:
            owned.owner = Ownership("unknown", NAMELESS, NAMELESS)


def _sums(entries: Iterable[Owned]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for owned in entries:
        sums[owned.piece.device] = sums.get(owned.piece.device, 0) + owned.piece.bytes
    return sums


def _holdings(entries: Iterable[Owned]) -> list[tuple[Holding, str]]:
    """One for each owner and device, with the variable that it belongs to."""
    groups: dict[tuple[Ownership, str], list[Owned]] = {}
    for owned in entries:
        assert owned.owner is not None
        groups.setdefault((owned.owner, owned.piece.device), []).append(owned)
    return [(_holding(together), owner.root) for (owner, _), together in groups.items()]


def _holding(together: list[Owned]) -> Holding:
    first = max(together, key=lambda owned: owned.piece.bytes)
    owner, piece = first.owner, first.piece
    assert owner is not None
    also = tuple(dict.fromkeys(name for owned in together for name in owned.also))[:3]
    return Holding(
        owner.kind,
        owner.name,
        sum(owned.piece.bytes for owned in together),
        len(together),
        piece.device,
        piece.dtype,
        piece.shape,
        also,
        owner.where,
    )


def _rest(device: Device, entries: list[Owned]) -> list[Holding]:
    """What the allocator counts beyond the storages that were found: its rounding, and memory without a tensor."""
    if device.allocated is None:
        return []
    mine = [owned.piece.bytes for owned in entries if owned.piece.device == device.name]
    rounding = sum(map(rounded, mine)) - sum(mine) if device.name.startswith("cuda") else 0
    unmet = device.allocated - sum(mine) - rounding
    return [
        Holding("unknown", name, count, 0, device.name)
        for name, count in ((ROUNDING, rounding), (UNMET, unmet))
        if count > 0
    ]


def _unseen(index: OwnerIndex, held: HeldMemory) -> Iterable[str]:
    if not index.whole and any(h.kind == "unknown" and h.storages for h in held.holdings):
        yield (
            "all that your variables lead to: there is too much of it, so some names are missing; the tensors are "
            "counted all the same"
        )
    if index.unseen:
        yield "what autograd's graphs have saved: torch shows it from version 2.7 on"
    if gc.garbage:
        yield "objects that the garbage collector could not free (gc.garbage)"
