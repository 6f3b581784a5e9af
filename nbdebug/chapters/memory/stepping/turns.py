"""A loop that ran once, in a cell: what did each of its turns leave behind?

The loop is not run again. But each piece of memory is known by its birth, and each node of a graph by its number; and
the turns by the optimizer's steps (or the model's calls, where no optimizer steps). A container with things from nearly
all turns, or a tensor whose graph goes back through nearly all of them, is what grew.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable
from typing import Any

import torch

from nbdebug.chapters.memory.facts import Growth
from nbdebug.chapters.memory.stepping import source
from nbdebug.chapters.memory.stepping.follow import Follow
from nbdebug.chapters.memory.stepping.growing import tensors_of
from nbdebug.chapters.memory.stepping.holders import OUTPUTS, Look, Spot
from nbdebug.chapters.memory.stepping.ledger import storages_of
from nbdebug.chapters.memory.stepping.peak import at_site
from nbdebug.finding import Where
from nbdebug.observe.sites import Site

ENOUGH = 6
"""Turns; with fewer it may be a beginning."""
SHARE = 0.8
"""Of the turns, the first and the last left out, from which something must have stayed."""
LOOKED_AT = 5000
"""Nodes of a graph, or members of a container, that are looked at."""


def look_back(follow: Follow, look: Look) -> tuple[Growth, ...]:
    """What grew with nearly every turn; nothing where there were too few."""
    turns = len(follow.turns)
    if turns < ENOUGH:
        return ()
    source.forget()
    files = dict.fromkeys(
        [*look.files, *(b.op.site.file for b in follow.ledger.births if b.op is not None and b.op.site is not None)]
    )
    found = []
    for spot in look.spots.values():
        seen = _turns_of_graph(spot, follow) if spot.kind == "slot" else _turns_of_members(spot, follow)
        if len(seen & set(range(1, turns - 1))) >= SHARE * (turns - 2):
            found.append(_growth(spot, follow, files, turns))
    chained = [g for g in found if g.chained]
    return tuple(sorted(found, key=lambda g: (-g.bytes, g.chained, len(g.holder)))[:1] or chained[:1])


def _turns_of_graph(spot: Spot, follow: Follow) -> set[int]:
    """The turns in which the nodes of a tensor's graph were made."""
    ends = [number for _, number in follow.turns]
    seen: set[Any] = set()
    todo, turns = [spot.thing.grad_fn], set[int]()
    while todo and len(seen) < LOOKED_AT:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < 1 << 62:  # a node that stores a gradient has no number of its own
            turns.add(bisect.bisect_left(ends, node._sequence_nr() + 1))
        todo += [following for following, _ in node.next_functions]
    return turns


def _turns_of_members(spot: Spot, follow: Follow) -> set[int]:
    ends = [event for event, _ in follow.turns]
    return {bisect.bisect_left(ends, birth.born) for t in _members(spot) if (birth := _birth(t, follow)) is not None}


def _members(spot: Spot) -> list[torch.Tensor]:
    if spot.bound is not None or spot.kind in ("cache", "hooks", "object"):
        return []
    values = dict.values(spot.thing) if isinstance(spot.thing, dict) else spot.thing
    kept: list[torch.Tensor] = []
    for value in values if spot.size <= LOOKED_AT else ():
        kept += tensors_of([value])
    return kept


def _birth(tensor: torch.Tensor, follow: Follow) -> Any:
    """The entry of a tensor's memory, if it came in this run."""
    entries = (follow.ledger.known.get(storage._cdata) for storage in storages_of(tensor))
    return next((e for e in entries if e is not None and e.step == follow.ledger.step and not e.role), None)


def _growth(spot: Spot, follow: Follow, files: Iterable[str], turns: int) -> Growth:
    chained = spot.kind == "slot"
    tensors = [] if chained else _members(spot)
    grad = chained or any(t.requires_grad and t.grad_fn is not None for t in tensors)
    own = {b.key: b.nbytes for t in tensors if (b := _birth(t, follow)) is not None}
    kept = follow.ledger.survivors(follow.ledger.step)
    by = int(_steady(follow) if grad else sum(own.values()) / turns)
    put = source.putting(files, spot.name)
    flagged = 2 * sum(b.nbytes for b in kept if b.evaluation) > sum(b.nbytes for b in kept)
    evaluation = grad and not chained and flagged and not follow.backwards
    takers = [t for t in source.takers(files, spot.name) if source.same_variable(t, files, spot.name, put)]
    kind = "output" if spot.name in OUTPUTS else "graph" if grad else spot.kind
    if kind == "graph" and put is not None and _in_a_hook(put, follow):
        kind = "hook"
    return Growth(
        spot.name,
        kind,
        by,
        turns,
        at_site(Where(), put),
        grad,
        evaluation,
        chained=chained,
        items=round(len(tensors) / turns),
        own=int(sum(own.values()) / turns),
        names=(spot.name,),
        backward=bool(follow.backwards),
        emptied=bool(takers) and not chained,
    )


def _steady(follow: Follow) -> float:
    """Bytes that a turn leaves, in the middle."""
    ends = [event for event, _ in follow.turns]
    sums = dict.fromkeys(range(1, len(ends) - 1), 0)
    for birth in follow.ledger.survivors(follow.ledger.step):
        turn = bisect.bisect_left(ends, birth.born)
        if turn in sums:
            sums[turn] += birth.nbytes
    return statistics.median(sums.values())


def _in_a_hook(put: Site, follow: Follow) -> bool:
    """Whether a line stands in a function that is a hook of a module."""
    for model in follow.names.models.values():
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                for hook in hooks.values():
                    code = getattr(vars(type(hook)).get("__call__", hook), "__code__", getattr(hook, "__code__", None))
                    if (
                        code is not None
                        and code.co_filename == put.file
                        and put.line in {line for _, _, line in code.co_lines() if line is not None}
                    ):
                        return True
    return False
