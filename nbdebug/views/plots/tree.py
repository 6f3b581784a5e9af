"""The modules of the model as a tree, with the path of a non-finite value from the module that made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.text import clip
from nbdebug.views.plots.marks import FAULT, INK, Dot, Drawing, Lines, Mark, Text
from nbdebug.views.wording import clean

TREE_WIDTH, TOP, ROW = 278, 40, 22


@dataclasses.dataclass(frozen=True)
class ModuleLine:
    """One module, or, where `more` is not 0, so many modules that are not visible."""

    depth: int
    name: str = ""
    kind: str = ""
    born: bool = False
    path: bool = False
    more: int = 0


@dataclasses.dataclass(frozen=True)
class ModuleTree:
    lines: tuple[ModuleLine, ...]

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return "The non-finite value goes through " + ", ".join(x.name for x in self.lines if x.path and x.name) + "."

    def drawing(self) -> Drawing:
        marks: list[Mark] = [Text(0, 14, "Path of the non-finite value through the modules")]
        on_path = [TOP + ROW * row for row, line in enumerate(self.lines) if line.path]
        marks.append(Lines([((9, on_path[0]), (9, on_path[-1]))], FAULT + "99", 1.5))
        for row, module in enumerate(self.lines):
            x, y, colour = 26 + 14 * module.depth, TOP + ROW * row, FAULT if module.path else INK
            if module.more:
                marks.append(Text(x, y + 4, f"… {module.more} more"))
                continue
            if module.path:
                marks.append(Dot(9, y, 5 if module.born else 3, FAULT))
            name = clip(module.name, 30)
            kind = "made here  " * module.born + clip(module.kind, 26)
            marks.append(Text(x, y + 4, name, colour=colour, bold=module.born, size=12.5))
            marks.append(Text(x + 7.8 * len(name) + 10, y + 4, kind, colour=FAULT if module.born else INK))
        return Drawing(marks, TOP + ROW * len(self.lines), TREE_WIDTH)


def read(data: Mapping[str, Any], most: int = 18) -> ModuleTree | None:
    """The tree, with at most so many modules; None when the data do not say where a bad value went.

    modules: [{"name", "type", "born", "path"}, …], the outer before the inner ones.
    """
    modules = data.get("modules")
    nodes = [n for n in modules if isinstance(n, Mapping)] if isinstance(modules, (list, tuple)) else []
    if not any(n.get("born") or n.get("path") for n in nodes):
        return None
    parents = _parents([str(n.get("name", "")) for n in nodes])
    visible = _shown(nodes, parents, most)
    depths = _depths(parents)
    lines: list[ModuleLine] = []
    hidden: list[int] = []
    for i in range(len(nodes)):
        if i not in visible:
            hidden.append(i)
            continue
        lines += [*_rest(nodes, hidden, parents, depths), _line(i, nodes, parents, depths)]
        hidden = []
    return ModuleTree((*lines, *_rest(nodes, hidden, parents, depths)))


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
    visible: set[int] = set()
    for i in [*born, *nearest]:
        line: set[int] = set()
        above: int | None = i
        while above is not None:
            line.add(above)
            above = parents[above]
        if len(visible | line) <= max(most * 2 // 3, 1) or not visible:  # the other third is for the "N more" lines
            visible |= line
    return visible


def _rest(nodes: list[Any], hidden: list[int], parents: list[int | None], depths: list[int]) -> list[ModuleLine]:
    """The line that stands for hidden modules; a single one is visible itself, as it takes no more room."""
    if len(hidden) < 2:
        return [_line(i, nodes, parents, depths) for i in hidden]
    return [
        ModuleLine(min(depths[i] for i in hidden), path=any(nodes[i].get("path") for i in hidden), more=len(hidden))
    ]


def _line(i: int, nodes: list[Any], parents: list[int | None], depths: list[int]) -> ModuleLine:
    name, parent = str(nodes[i].get("name", "")), parents[i]
    above = str(nodes[parent].get("name", "")) if parent is not None else ""
    visible = name[len(above) :].lstrip(".") if above else name
    born = bool(nodes[i].get("born"))
    return ModuleLine(
        depths[i],
        clean(visible or "the model", 40),
        clean(nodes[i].get("type") or "", 40),
        born,
        born or bool(nodes[i].get("path")),
    )
