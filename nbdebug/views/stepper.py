"""Where a stepper stands, as the HTML and the text draw it: the layers around it with what they have made, and the
values of the layer's tensors.

`read` takes the plain facts of a report and gives a Stepping, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.views.words import clean, number

MOST = 16
"""Layers that are shown: the one it stands at, those around it, those inside it, its neighbours."""
HISTOGRAMS = 6
HERE = "▶"


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer, or, where `more` is not 0, so many that are not shown. made: the range of its last output; bad: that, or
    its gradient, is not finite."""

    depth: int
    name: str = ""
    kind: str = ""
    here: bool = False
    ran: bool = False
    made: str = ""
    gradient: str = ""
    bad: bool = False
    more: int = 0

    def cells(self) -> tuple[str, str, str, str]:
        if self.more:
            return f"… {self.more} more", "", "", ""
        return self.name, self.kind, self.made, self.gradient


@dataclasses.dataclass(frozen=True)
class Values:
    """How the finite elements of a tensor are spread: counts of equal parts of low to high. beside: what else it
    holds, such as "3 NaN"."""

    name: str
    low: float | None
    high: float | None
    counts: tuple[int, ...]
    beside: str
    bad: bool

    def sentence(self) -> str:
        spread = (
            "no finite value"
            if self.low is None or self.high is None
            else f"all {number(self.low)}"
            if self.low == self.high
            else f"from {number(self.low)} to {number(self.high)}"
        )
        return f"{self.name}: {spread}" + (f", {self.beside}" if self.beside else "")


@dataclasses.dataclass(frozen=True)
class Stepping:
    """rows: layers; values: of the tensors; state: waits, runs, over, failed or abandoned."""

    state: str
    rows: tuple[Row, ...]
    values: tuple[Values, ...]

    def lines(self) -> list[str]:
        """The layers as text, in columns."""
        named = [("  " * row.depth + (f"{HERE} " if row.here else "  ") + row.cells()[0], row) for row in self.rows]
        wide = max((len(name) for name, _ in named), default=0)
        kinds = max((len(row.kind) for row in self.rows), default=0)
        said = ["; ".join(cell for cell in row.cells()[2:] if cell) for row in self.rows]
        return [
            f"  {name.ljust(wide + 2)}{row.kind.ljust(kinds + 2)}{made}".rstrip()
            for (name, row), made in zip(named, said)
        ]

    def sentence(self) -> str:
        """The histograms in words, for those who do not see them."""
        return "; ".join(v.sentence() for v in self.values) + "." if self.values else ""


def read(facts: Mapping[str, Any]) -> Stepping | None:
    """The Stepping of `facts["stepper"]`, or None when there is nothing in it to draw."""
    given = facts.get("stepper")
    if not isinstance(given, Mapping):
        return None
    layers = [layer for layer in _list(given.get("layers")) if isinstance(layer, Mapping)]
    values = [v for v in map(_values, _list(given.get("histograms"))[:HISTOGRAMS]) if v is not None]
    at = given.get("at")
    name = str(at.get("name", "")) if isinstance(at, Mapping) else None
    return Stepping(str(given.get("state", "")), tuple(_rows(layers, name)), tuple(values)) if layers else None


def _rows(layers: Sequence[Mapping[str, Any]], name: str | None) -> list[Row]:
    names = [str(layer.get("name", "")) for layer in layers]
    at = names.index(name) if name is not None and name in names else None
    shown = _shown(names, at)
    rows: list[Row] = []
    hidden: list[int] = []
    for i in range(len(layers)):
        if i not in shown:
            hidden.append(i)
            continue
        rows += [*_rest(layers, hidden), _row(layers[i], i == at)]
        hidden = []
    return rows + _rest(layers, hidden)


def _shown(names: list[str], at: int | None) -> set[int]:
    """Which layers get a row: all if they fit, else the nearest kin."""
    if len(names) <= MOST:
        return set(range(len(names)))
    here = names[at] if at is not None else ""
    above = {here.rsplit(".", k)[0] for k in range(1, here.count(".") + 1)} | {""}
    around = here.rpartition(".")[0]

    def distance(i: int) -> tuple[int, int]:
        name = names[i]
        parent = name.rpartition(".")[0] if name else None
        kin = 0 if name in above or i == at else 1 if parent == around else 2 if parent == here else 3
        return kin, abs(i - (at or 0))

    order = sorted(range(len(names)), key=distance)
    first = [i for i in order if distance(i)[0] == 0]
    inside = [i for i in order if distance(i)[0] == 2][:4]  # some of these before distant neighbours
    return set(list(dict.fromkeys([*first, *inside, *order]))[:MOST])


def _rest(layers: Sequence[Mapping[str, Any]], hidden: list[int]) -> list[Row]:
    if not hidden:
        return []
    return [Row(min(_depth(layers[i]) for i in hidden), more=len(hidden))]


def _row(layer: Mapping[str, Any], here: bool) -> Row:
    name, calls = str(layer.get("name", "")), layer.get("calls") or 0
    made, gradient = layer.get("finite"), layer.get("gradient")
    low, high = layer.get("low"), layer.get("high")
    said = (
        ""
        if made is None
        else "not finite"
        if made is False
        else "ran"
        if low is None
        else number(low)
        if low == high
        else f"{number(low)} … {number(high)}"
    )
    times = f", {calls} calls" if said and calls > 1 else ""
    handed_on = "" if gradient is None else "gradient finite" if gradient else "gradient not finite"
    return Row(
        _depth(layer),
        clean(name.rpartition(".")[2] or "the model", 60),
        clean(layer.get("type") or "", 60),
        here,
        bool(calls),
        said + times,
        handed_on,
        made is False or gradient is False,
    )


def _values(given: Any) -> Values | None:
    if not isinstance(given, Mapping):
        return None
    counts = [c for c in _list(given.get("counts")) if isinstance(c, int) and c >= 0]
    beside = [f"{number(given[kind])} {kind}" for kind in ("NaN", "inf") if given.get(kind)]
    low, high = given.get("low"), given.get("high")
    return Values(
        clean(given.get("name") or "", 60),
        low if _number(low) else None,
        high if _number(high) else None,
        tuple(counts),
        " and ".join(beside),
        bool(beside),
    )


def _depth(layer: Mapping[str, Any]) -> int:
    depth = layer.get("depth")
    return min(depth, 20) if isinstance(depth, int) and depth > 0 else 0


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
