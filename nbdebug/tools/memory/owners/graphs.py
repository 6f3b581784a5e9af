"""What autograd has saved for a backward, and which tensor keeps that graph.

A graph is walked from the tensors that end it, the latest first: of two ends in one graph, the later one keeps more.
The graph's nodes say what they have saved without unpacking it (`_raw_saved_*`), so that no hook that unpacks runs, and
a checkpoint recomputes nothing.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.observe.backward import graph_nodes
from nbdebug.tools.memory.owners.contents import ATOMS
from nbdebug.tools.memory.owners.names import OwnerIndex, Ownership, autograd

NAMELESS = "a tensor that has no name"
_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class Graphs:
    """One walk over all graphs."""

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
            if type(thing) not in ATOMS and not issubclass(type(thing), (type, types.ModuleType))
        )


def _raw(kind: type) -> tuple[str, ...]:
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    return _names[kind]


def _order(node: Any) -> int:
    """When it was made: autograd counts its nodes."""
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if number is not None else 0
