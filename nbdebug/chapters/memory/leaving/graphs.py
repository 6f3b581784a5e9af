"""Losses that are kept with their graph: `losses.append(loss)`.

A list of the outputs of one forward has graphs as well, and is no fault. What tells a record over many steps from it:
its tensors come from graphs that share no node except the parameters they begin with.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

MOST_NODES = 500_000


@dataclasses.dataclass
class Record:
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


def records(met: Iterable[tuple[str, Any]]) -> list[Record]:
    """The containers that keep the graphs of several steps, named by the outermost one. met: things by name."""
    found: dict[str, Record] = {}
    for name, thing in met:
        if type(thing) in (list, dict, collections.deque, collections.OrderedDict, collections.defaultdict):
            places = [(thing, key, value) for key, value in _items(thing) if _has_graph(value)]
            if places:
                outermost = name.partition("[")[0]
                found.setdefault(outermost, Record(outermost, [])).places.extend(places)
    for record in found.values():
        record.graphs, record.nodes = _apart(record.ends)
    return [record for record in found.values() if record.graphs > 1]


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
                _join(joined, place, owner[node])
            else:
                owner[node] = place
                todo += [n for n, _ in node.next_functions if n is not None]
    shared: set[int] = set()
    for places in leaves.values():
        roots = {_root(joined, place) for place in places}
        shared |= roots if len(roots) > 1 else set()
    return len(shared), len(owner)


def _root(joined: list[int], place: int) -> int:
    while joined[place] != place:
        place = joined[place]
    return place


def _join(joined: list[int], one: int, other: int) -> None:
    joined[_root(joined, one)] = _root(joined, other)
