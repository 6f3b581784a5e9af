"""All that is held at this moment: every live tensor, once for each storage, with its owner by name.

Nothing of the user's code runs, nothing is freed, and nothing that was met outlives the look.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from nbdebug.chapters.memory.facts import KINDS, Device, Held, Holding
from nbdebug.chapters.memory.holding.claims import Claim, Owned
from nbdebug.chapters.memory.holding.devices import devices, rounded
from nbdebug.chapters.memory.holding.graphs import Graphs
from nbdebug.chapters.memory.holding.naming import Naming
from nbdebug.chapters.memory.holding.storages import Key, live
from nbdebug.chapters.memory.holding.unnamed import holders
from nbdebug.observe.shell import Kept

ROUNDING = "rounding to 512 bytes"
UNMET = "allocated, and no tensor met"
NAMELESS = "(no name)"
LISTED = 1000
"""Storages that are told one by one."""


class Seen(NamedTuple):
    """What was held, and what the look could not see. largest: (holding, bytes that its tensor shows of its storage) of
    the largest storages; roots: the variable that each holding belongs to, in the order of the holdings."""

    held: Held
    largest: list[tuple[Holding, int]]
    roots: tuple[str, ...]
    unchecked: tuple[str, ...]


def look(
    models: Mapping[str, Any], optimizers: Mapping[str, Any], names: Mapping[str, Any], *, device: str | None = None
) -> Held:
    """What is held now, each storage at its first owner in the order of facts.KINDS.

    models, optimizers: by the user's names for them; names: the user's variables; device: what lies there alone
    ("cuda" means every card). Sizes are bytes."""
    with uncollected():
        return seen(models, optimizers, names, device=device or "", caller=sys._getframe(1)).held


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage stays meanwhile: what is met must not go on the way, and a collection takes its time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def seen(
    models: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    names: Mapping[str, Any],
    *,
    device: str = "",
    caller: FrameType | None = None,
    shell: Any = None,
) -> Seen:
    """The same with what the report needs besides. caller: the frame that asks; shell: IPython's, if one runs."""
    tensors = live()
    kept = Kept(shell, names)
    naming = Naming([*kept.spaces, kept.outputs, shell, tensors])
    _named(naming, models, optimizers, names, kept, caller)
    for tensor in tensors:
        for piece in naming.pieces(tensor):
            naming.met(piece)
    Graphs(naming).walk(tensors)
    _name_the_rest(naming, tensors)
    found = [owned for owned in naming.owned.values() if owned.piece.on(device)]
    told = devices(_sums(found), device)
    parts = _holdings(found)
    parts += [(holding, "") for one in told for holding in _rest(one, found)]
    parts.sort(key=lambda part: (KINDS.index(part[0].kind), -part[0].bytes))
    held = Held(tuple(holding for holding, _ in parts), told, len(tensors), len(found))
    largest = sorted(found, key=lambda owned: -owned.piece.bytes)[:LISTED]
    return Seen(
        held,
        [(_holding([owned]), owned.piece.shown) for owned in largest],
        tuple(root for _, root in parts),
        tuple(_unseen(naming, held)),
    )


def _named(
    naming: Naming,
    models: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    names: Mapping[str, Any],
    kept: Kept,
    caller: FrameType | None,
) -> None:
    """Every name that leads to something, those of the user's own first. The globals of the user's files come last:
    there may be very many, and little in them."""
    naming.models(models)
    naming.optimizers(optimizers)
    naming.variables(names)
    naming.walk()
    naming.calls(caller, names)
    for name, value, _ in kept.shown():
        naming.add(value, Claim("cell output", name, name))
    for place in kept.failed():
        naming.add(place.get(), Claim("traceback", place.name, place.name))
    naming.walk()
    naming.files(names)
    naming.walk()


def _name_the_rest(naming: Naming, tensors: list[Any]) -> None:
    """Storages that no name leads to get, as their name, what the garbage collector says."""
    rest: dict[Key, Any] = {}
    for tensor in tensors:
        for piece in naming.pieces(tensor):
            if naming.owned[piece.key].claim is None:
                rest.setdefault(piece.key, tensor)
    keys = sorted(rest, key=lambda key: -naming.owned[key].piece.bytes)
    largest = [rest[key] for key in keys]
    ours = [tensors, rest, largest, naming.made]
    for key, said in zip(keys, holders(largest, ours) if largest else ()):
        naming.owned[key].claim = Claim("unknown", f"held by {said}", NAMELESS)
    for owned in naming.owned.values():
        if owned.claim is None:
            owned.claim = Claim("unknown", NAMELESS, NAMELESS)


def _sums(found: Iterable[Owned]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for owned in found:
        sums[owned.piece.device] = sums.get(owned.piece.device, 0) + owned.piece.bytes
    return sums


def _holdings(found: Iterable[Owned]) -> list[tuple[Holding, str]]:
    """One for each owner and device, with the variable that it belongs to."""
    groups: dict[tuple[Claim, str], list[Owned]] = {}
    for owned in found:
        assert owned.claim is not None
        groups.setdefault((owned.claim, owned.piece.device), []).append(owned)
    return [(_holding(together), claim.root) for (claim, _), together in groups.items()]


def _holding(together: list[Owned]) -> Holding:
    first = max(together, key=lambda owned: owned.piece.bytes)
    claim, piece = first.claim, first.piece
    assert claim is not None
    also = tuple(dict.fromkeys(name for owned in together for name in owned.also))[:3]
    return Holding(
        claim.kind,
        claim.name,
        sum(owned.piece.bytes for owned in together),
        len(together),
        piece.device,
        piece.dtype,
        piece.shape,
        also,
        claim.where,
    )


def _rest(device: Device, found: list[Owned]) -> list[Holding]:
    """What the allocator counts beyond the storages that were met: its rounding, and what no tensor was met for."""
    if device.allocated is None:
        return []
    mine = [owned.piece.bytes for owned in found if owned.piece.device == device.name]
    rounding = sum(map(rounded, mine)) - sum(mine) if device.name.startswith("cuda") else 0
    unmet = device.allocated - sum(mine) - rounding
    return [
        Holding("unknown", name, count, 0, device.name)
        for name, count in ((ROUNDING, rounding), (UNMET, unmet))
        if count > 0
    ]


def _unseen(naming: Naming, held: Held) -> Iterable[str]:
    if not naming.whole and any(h.kind == "unknown" and h.storages for h in held.holdings):
        yield (
            "all that your variables lead to: there is too much of it, so some names are missing; the tensors are "
            "counted all the same"
        )
    if naming.unseen:
        yield "what autograd's graphs have saved: torch shows it from version 2.7 on"
    if gc.garbage:
        yield "objects that the garbage collector could not free (gc.garbage)"
