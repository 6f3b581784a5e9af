"""The search over a model's modules: from what the measurements suspect, or else from coarse to fine.

A unit is a module, and keeping it keeps all that is in it. The search begins with small units: the innermost modules
that have code of their own, and the leaves beside them. Where keeping all of these does not help, the fault is in code
further out, and the search goes down from the top: which children of the model, then which of theirs. In both cases
what has to be kept is made finer, as far as keeping the children does as well as keeping their parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbdebug.chapters.precision.search import Search, smallest


class Tree:
    """names: of all modules, the model itself being ""; called: those that the step has called; plain: those whose own
    code only calls their children one after the other (nn.Sequential)."""

    def __init__(self, names: Iterable[str], called: Iterable[str], plain: Iterable[str] = ()):
        self.names = list(dict.fromkeys(names))
        self.called, self.plain = set(called), set(plain)
        self._below: Mapping[str, frozenset[str]] = {
            name: frozenset(n for n in self.names if not name or n == name or n.startswith(name + "."))
            for name in self.names
        }

    def spread(self, kept: frozenset[str]) -> frozenset[str]:
        """These modules and all that is in them."""
        return frozenset().union(*(self._below[name] for name in kept)) if kept else kept

    def ordered(self, kept: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(kept, key=self.names.index))

    def children(self, name: str) -> list[str]:
        """The nearest modules below that the step calls: a ModuleList is never called, what is in it is."""
        found: list[str] = []
        for below in self.names:
            if (
                below != name
                and below in self._below[name]
                and below in self.called
                and not any(below in self._below[other] for other in found)
            ):
                found.append(below)
        return found

    def units(self) -> list[str]:
        """The innermost modules with code of their own, and the leaves that are in none of them."""
        inner = [
            name
            for name in self.names
            if name
            and name in self.called
            and name not in self.plain
            and (below := self.children(name))
            and not any(map(self.children, below))
        ]
        inside = self.spread(frozenset(inner))
        return [
            name
            for name in self.names
            if name in self.called and (name in inner or (name not in inside and not self.children(name)))
        ]

    def all_in(self, units: Iterable[str]) -> bool:
        """Whether everything is done in these units: then keeping all of them is keeping the whole model."""
        return self.called | {""} <= self.plain | self.spread(frozenset(units))


def search(tree: Tree, tries: Search, suspects: Sequence[str], sure: Iterable[str] = ()) -> frozenset[str]:
    """The smallest set of modules to keep: empty when nothing has to be, {""} when only the whole model helps.

    suspects: what measurements point to, none inside another; sure: those of them that no children of theirs can stand
    in for."""
    if tries.ask(()):
        return frozenset()
    if suspects and tries.ask(suspects):
        return _finer(tree, tries, smallest(tries, list(suspects), suspects), set(sure))
    inside = tree.spread(frozenset(suspects))
    units = [*suspects, *(unit for unit in tree.units() if not tree.spread(frozenset({unit})) & inside)]
    units.sort(key=tree.names.index)
    if len(units) > 1 and (tree.all_in(units) or tries.ask(units)):
        return _finer(tree, tries, smallest(tries, units, suspects), set(sure))
    tries.best = frozenset({""})
    return _finer(tree, tries, tries.best, set())


def _finer(tree: Tree, tries: Search, kept: frozenset[str], whole: set[str]) -> frozenset[str]:
    """Replace a kept module by those of its children that have to be kept, as far as that works: from the top."""
    todo = [name for name in tree.ordered(kept) if name not in whole]
    while todo:
        parent = todo.pop(0)
        children, others = tree.children(parent), kept - {parent}
        if children and tries.ask(others | frozenset(children)):
            needed = smallest(tries, children, held=others)
            kept = others | needed
            todo += tree.ordered(needed)
    return kept
