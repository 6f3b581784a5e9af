"""The modules of the model as a tree, with the path of a non-finite value from the module that made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.views import wording as words
from nbdebug.views.plots.histogram import FAULT, INK
from nbdebug.views.wording import clean


@dataclasses.dataclass(frozen=True)
class ModuleLine:
    """One module, or, where `more` is not 0, so many modules that are not shown."""

    depth: int
    name: str = ""
    kind: str = ""
    born: bool = False
    path: bool = False
    more: int = 0


def read(data: Mapping[str, Any], most: int = 18) -> list[ModuleLine] | None:
    """The lines of the modules; None when the data do not say where a bad value went."""
    modules = data.get("modules")
    nodes = [n for n in modules if isinstance(n, Mapping)] if isinstance(modules, (list, tuple)) else []
    if not any(n.get("born") or n.get("path") for n in nodes):
        return None
    parents = _parents([str(n.get("name", "")) for n in nodes])
    shown = _shown(nodes, parents, most)
    depths = _depths(parents)
    lines: list[ModuleLine] = []
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


def _rest(nodes: list[Any], hidden: list[int], parents: list[int | None], depths: list[int]) -> list[ModuleLine]:
    """The line that stands for hidden modules; a single one is shown itself, as it takes no more room."""
    if len(hidden) < 2:
        return [_line(i, nodes, parents, depths) for i in hidden]
    return [
        ModuleLine(min(depths[i] for i in hidden), path=any(nodes[i].get("path") for i in hidden), more=len(hidden))
    ]


def _line(i: int, nodes: list[Any], parents: list[int | None], depths: list[int]) -> ModuleLine:
    name, parent = str(nodes[i].get("name", "")), parents[i]
    above = str(nodes[parent].get("name", "")) if parent is not None else ""
    shown = name[len(above) :].lstrip(".") if above else name
    born = bool(nodes[i].get("born"))
    return ModuleLine(
        depths[i],
        clean(shown or "the model", 40),
        clean(nodes[i].get("type") or "", 40),
        born,
        born or bool(nodes[i].get("path")),
    )


def draw(axes: Any, lines: list[ModuleLine]) -> None:
    axes.set_axis_off()
    axes.set_facecolor("none")
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(lines), 14) - 0.2, -0.8)
    on_path = [row for row, line in enumerate(lines) if line.path]
    axes.plot([0.03, 0.03], [on_path[0], on_path[-1]], color=FAULT, linewidth=1.5, alpha=0.6)
    for row, line in enumerate(lines):
        x = 0.08 + 0.045 * line.depth
        if line.more:
            axes.text(x, row, f"… {line.more} more", va="center", fontsize=9, color=INK, style="italic")
            continue
        if line.path:
            axes.plot(0.03, row, "o", markersize=8 if line.born else 5, color=FAULT, clip_on=False)
        name = axes.text(
            x,
            row,
            words.clip(line.name, 34),
            va="center",
            fontsize=9.5,
            parse_math=False,
            color=FAULT if line.path else INK,
            fontweight="bold" if line.born else "normal",
        )
        kind = ("made here   " if line.born else "") + words.clip(line.kind, 26)
        axes.annotate(
            kind,
            (1, 0.5),
            xycoords=name,
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=FAULT if line.born else INK,
            annotation_clip=False,
            parse_math=False,
        )
    for text in axes.texts:
        text.set_in_layout(False)  # a long name runs out of the picture rather than squeezing it
    axes.set_title("Where the non-finite value was made, and where it went", loc="left", fontsize=9.5, color=INK, pad=8)
