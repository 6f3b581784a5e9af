"""The module tree, cut down to what matters: the modules that the bad value passed through, and the one that made it.

`prune` takes the plain facts of a report (all modules, in the order of `named_modules`) and gives the lines to draw.
Where not all fit, the branches without the bad value go first, then the parts of its path furthest from its birth;
"N more" stands where something was left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.views.words import clean


@dataclasses.dataclass(frozen=True)
class Line:
    """One module, or, where `more` is not 0, so many modules that are not shown."""

    depth: int
    name: str = ""
    kind: str = ""
    born: bool = False
    path: bool = False
    more: int = 0


def prune(facts: Mapping[str, Any], most: int = 18) -> list[Line]:
    """The lines to draw; none when the facts do not say where a bad value went."""
    given = facts.get("tree")
    nodes = [n for n in given if isinstance(n, Mapping)] if isinstance(given, (list, tuple)) else []
    if not any(n.get("born") or n.get("path") for n in nodes):
        return []
    parents = _parents([str(n.get("name", "")) for n in nodes])
    shown = _shown(nodes, parents, most)
    depths = _depths(parents)
    lines: list[Line] = []
    hidden: list[int] = []
    for i in range(len(nodes)):
        if i not in shown:
            hidden.append(i)
            continue
        lines += [*_rest(nodes, hidden, parents, depths), _line(i, nodes, parents, depths)]
        hidden = []
    return lines + _rest(nodes, hidden, parents, depths)


def _parents(names: list[str]) -> list[int | None]:
    """The index of the nearest module above each, None at the top."""
    at = {name: i for i, name in reversed(list(enumerate(names)))}
    parents: list[int | None] = []
    for i, name in enumerate(names):
        above = name
        while above:
            above = above.rpartition(".")[0]
            if above in at and at[above] < i:
                break
        parents.append(at[above] if name and at.get(above, i) < i else None)
    return parents


def _depths(parents: list[int | None]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    return depths


def _shown(nodes: list[Any], parents: list[int | None], most: int) -> set[int]:
    """Which modules get a line: all if they fit; else the birth, then its path by nearness, and what is above these."""
    if len(nodes) <= most:
        return set(range(len(nodes)))
    born = [i for i, n in enumerate(nodes) if n.get("born")] or [i for i, n in enumerate(nodes) if n.get("path")][:1]
    path = [i for i, n in enumerate(nodes) if n.get("path") and i not in born]
    nearest = sorted(path, key=lambda i: min(abs(i - b) for b in born))
    shown: set[int] = set()
    for i in [*born, *nearest]:
        line: set[int] = set()
        above: int | None = i
        while above is not None:
            line.add(above)
            above = parents[above]
        if len(shown | line) <= max(most * 2 // 3, 1) or not shown:  # the other third is for the "N more" lines
            shown |= line
    return shown


def _rest(nodes: list[Any], hidden: list[int], parents: list[int | None], depths: list[int]) -> list[Line]:
    """The line that stands for hidden modules; a single one is shown itself, as it takes no more room."""
    if len(hidden) < 2:
        return [_line(i, nodes, parents, depths) for i in hidden]
    return [Line(min(depths[i] for i in hidden), path=any(nodes[i].get("path") for i in hidden), more=len(hidden))]


def _line(i: int, nodes: list[Any], parents: list[int | None], depths: list[int]) -> Line:
    name, parent = str(nodes[i].get("name", "")), parents[i]
    above = str(nodes[parent].get("name", "")) if parent is not None else ""
    shown = name[len(above) :].lstrip(".") if above else name
    born = bool(nodes[i].get("born"))
    return Line(
        depths[i],
        clean(shown or "the model", 40),
        clean(nodes[i].get("type") or "", 40),
        born,
        born or bool(nodes[i].get("path")),
    )
