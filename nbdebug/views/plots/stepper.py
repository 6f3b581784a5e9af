"""A stepper: the layers around the one where it waits with their outputs, and the values of that layer's tensors."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.text import clip
from nbdebug.views.plots.marks import FAULT, WIDTH, Bar, Drawing, Mark, Text, image, line
from nbdebug.views.wording import clean, number

ACROSS, TALL, HEAD, FOOT = 3, 58, 20, 24
CELL = WIDTH / ACROSS
PLAIN = "border:0;background:none;text-align:left;padding:.06em 1.6em .06em 0;font-weight:400;white-space:nowrap"
PALE = "opacity:.72"
MOST = 16
"""Layers that are shown: the one it stands at, those around it, those inside it, its neighbours."""
HISTOGRAMS = 6
HERE = "▶"


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """A layer, or, where `more` is not 0, so many that are hidden. output: the range of its last output; bad: that, or
    its gradient, is not finite."""

    depth: int
    name: str = ""
    kind: str = ""
    here: bool = False
    ran: bool = False
    output: str = ""
    gradient: str = ""
    bad: bool = False
    more: int = 0

    def cells(self) -> tuple[str, str, str, str]:
        if self.more:
            return f"… {self.more} more", "", "", ""
        return self.name, self.kind, self.output, self.gradient


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
    rows: tuple[LayerRow, ...]
    values: tuple[Values, ...]

    def lines(self) -> list[str]:
        """The layers as text, in columns."""
        named = [("  " * row.depth + (f"{HERE} " if row.here else "  ") + row.cells()[0], row) for row in self.rows]
        wide = max((len(name) for name, _ in named), default=0)
        kinds = max((len(row.kind) for row in self.rows), default=0)
        text = ["; ".join(cell for cell in row.cells()[2:] if cell) for row in self.rows]
        return [
            f"  {name.ljust(wide + 2)}{row.kind.ljust(kinds + 2)}{output}".rstrip()
            for (name, row), output in zip(named, text)
        ]

    def html(self) -> str:
        """A table of the layers, and the histograms where there are values."""
        drawn = image(self.drawing(), self.sentence()) if self.values else ""
        return _table(self) + (f'<div style="margin:.8em 0 0">{drawn}</div>' if drawn else "")

    def drawing(self) -> Drawing:
        """The histograms."""
        rows = math.ceil(len(self.values) / ACROSS)
        tall = rows * (HEAD + TALL + FOOT) + 14
        marks: list[Mark] = []
        for i, values in enumerate(self.values):
            marks += _histogram(values, CELL * (i % ACROSS), (HEAD + TALL + FOOT) * (i // ACROSS))
        note = "How many elements have which value; heights grow with the square root."
        return Drawing([*marks, Text(0, tall - 4, note, size=10)], tall)

    def sentence(self) -> str:
        """The histograms in words, for those who do not see them."""
        return "; ".join(v.sentence() for v in self.values) + "." if self.values else ""


def read(data: Mapping[str, Any]) -> Stepping | None:
    """The picture, or None when there is nothing in the data to draw.

    state; at: {"name"}; layers: [{"name", "type", "depth", "calls", "finite", "gradient", "low", "high"}, …];
    histograms: [{"name", "low", "high", "counts", "NaN", "inf"}, …].
    """
    layers = [layer for layer in _list(data.get("layers")) if isinstance(layer, Mapping)]
    values = [v for v in map(_values, _list(data.get("histograms"))[:HISTOGRAMS]) if v is not None]
    at = data.get("at")
    name = str(at.get("name", "")) if isinstance(at, Mapping) else None
    return Stepping(str(data.get("state", "")), tuple(_rows(layers, name)), tuple(values)) if layers else None


def _rows(layers: Sequence[Mapping[str, Any]], name: str | None) -> list[LayerRow]:
    names = [str(layer.get("name", "")) for layer in layers]
    at = names.index(name) if name is not None and name in names else None
    shown = _shown(names, at)
    rows: list[LayerRow] = []
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


def _rest(layers: Sequence[Mapping[str, Any]], hidden: list[int]) -> list[LayerRow]:
    if not hidden:
        return []
    return [LayerRow(min(_depth(layers[i]) for i in hidden), more=len(hidden))]


def _row(layer: Mapping[str, Any], here: bool) -> LayerRow:
    name, calls = str(layer.get("name", "")), layer.get("calls") or 0
    output, gradient = layer.get("finite"), layer.get("gradient")
    low, high = layer.get("low"), layer.get("high")
    text = (
        ""
        if output is None
        else "not finite"
        if output is False
        else "ran"
        if low is None
        else number(low)
        if low == high
        else f"{number(low)} … {number(high)}"
    )
    times = f", {calls} calls" if text and calls > 1 else ""
    gradient_text = "" if gradient is None else "gradient finite" if gradient else "gradient not finite"
    return LayerRow(
        _depth(layer),
        clean(name.rpartition(".")[2] or "the model", 60),
        clean(layer.get("type") or "", 60),
        here,
        bool(calls),
        text + times,
        gradient_text,
        output is False or gradient is False,
    )


def _values(data: Any) -> Values | None:
    if not isinstance(data, Mapping):
        return None
    counts = [c for c in _list(data.get("counts")) if isinstance(c, int) and c >= 0]
    beside = [f"{number(data[kind])} {kind}" for kind in ("NaN", "inf") if data.get(kind)]
    low, high = data.get("low"), data.get("high")
    return Values(
        clean(data.get("name") or "", 60),
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


def _table(stepping: Stepping) -> str:
    gradient = any(row.gradient for row in stepping.rows)
    heads = ("Layer", "Type", "Output") + (("Gradient handed on",) if gradient else ())
    head = "".join(
        f'<th scope="col" style="{PLAIN};{PALE};border-bottom:1px solid rgba(128,128,128,.25)">{h}</th>' for h in heads
    )
    rows = "".join(_value_row(row, gradient) for row in stepping.rows)
    return (
        '<div style="overflow-x:auto;max-width:100%"><table style="border-collapse:collapse;border:0;'
        f'font-size:.92em;line-height:1.4;margin:0"><thead><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _value_row(row: LayerRow, gradient: bool) -> str:
    name, kind, output, gradient_text = map(html.escape, row.cells())
    mark = f"{HERE}&nbsp;" if row.here else "&nbsp;&nbsp;&nbsp;"
    weight = "font-weight:700" if row.here else "font-weight:400" if row.ran else PALE
    colour = f"color:{FAULT}"
    bad = (output.startswith("not finite"), "not finite" in gradient_text)
    cells = [
        f'<td style="{PLAIN};{colour if wrong else PALE if not row.here else ""}">{text}</td>'
        for text, wrong in zip((kind, output), (False, bad[0]))
    ]
    if gradient:
        cells.append(f'<td style="{PLAIN};{colour if bad[1] else PALE}">{gradient_text.removeprefix("gradient ")}</td>')
    return (
        f'<tr style="background:none"><th scope="row" style="{PLAIN};{weight};'
        f'padding-left:{1.1 * row.depth:.1f}em">{mark}{name}</th>{"".join(cells)}</tr>'
    )


def _histogram(values: Values, left: float, top: float) -> list[Mark]:
    """One tensor: its name, what is not finite in it, bars, and both ends."""
    right, foot = left + CELL - 24, top + HEAD + TALL
    marks: list[Mark] = [Text(left, top + 13, clip(values.name, 20 if values.bad else 30), bold=True)]
    if values.bad:
        marks.append(Text(right, top + 13, clip(values.beside, 16), "end", FAULT, bold=True))
    if values.counts:
        tallest, step = max(values.counts) or 1, (right - left) / len(values.counts)
        for i, elements in enumerate(values.counts):
            tall = max(1, TALL * math.sqrt(elements / tallest))
            marks += [Bar(left + i * step, foot - tall, step - 1, tall)] if elements else []
    marks.append(line(left, foot, right, foot))
    middle = (left + right) / 2
    if values.low is None or values.high is None:
        return [*marks, Text(middle, foot - TALL / 2, "no finite value", "middle", FAULT)]
    if values.low == values.high:
        return [*marks, Text(middle, foot - TALL / 2, f"all {number(values.low)}", "middle")]
    if values.low < 0 < values.high:
        share = -values.low / (values.high - values.low)
        x = left + (right - left) * share
        marks.append(line(x, foot, x, foot + 4))
        marks += [Text(x, foot + 15, "0", "middle")] if 0.3 < share < 0.7 else []
    ends = [Text(left, foot + 15, number(values.low)), Text(right, foot + 15, number(values.high), "end")]
    return [*marks, *ends]
