"""The sizes of an operand's values, as binary exponents, against what each floating point type can hold.

A value of exponent e lies in [2^e, 2^(e+1)). A type's smallest normal and largest finite numbers are the edges of what
it can hold; below the normal ones it has subnormal numbers, with fewer digits the smaller they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nbdebug.views.plots.marks import FAINT, FAULT, INK, RULE, VALUES, WIDTH, Bar, Drawing, Mark, Text, line
from nbdebug.views.wording import clean, number

TOP, TALL, LEFT, RIGHT = 54, 90, 66, WIDTH - 12
FOOT = TOP + TALL
SLOT, GAP = 44, 12
"""Width of the column of one kind of special value, and the air between these columns and the finite values."""


@dataclasses.dataclass(frozen=True)
class Span:
    """The exponents that a type holds: the smallest subnormal, the smallest normal, the largest finite number; and the
    smallest and the largest of these numbers as a person writes them."""

    subnormal: int
    normal: int
    largest: int
    least: str
    most: str


SPANS = {
    "float8_e4m3fn": Span(-9, -6, 8, "0.002", "448"),
    "float8_e5m2": Span(-16, -14, 15, "1.5e-5", "57,344"),
    "float16": Span(-24, -14, 15, "6e-8", "65,504"),
    "bfloat16": Span(-133, -126, 127, "9e-41", "3.4e38"),
    "float32": Span(-149, -126, 127, "1.4e-45", "3.4e38"),
    "float64": Span(-1074, -1022, 1023, "5e-324", "1.8e308"),
}
ALWAYS = ("float16", "bfloat16", "float32")
COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclasses.dataclass(frozen=True)
class ExponentBar:
    """Elements of exponents first to last; `bad` of the `count` are at fault."""

    first: int
    last: int
    count: int
    bad: int


@dataclasses.dataclass(frozen=True)
class Special:
    """Elements that have no exponent: zeros, infinities, NaN."""

    name: str
    count: int
    bad: bool = True


@dataclasses.dataclass(frozen=True)
class Histogram:
    operand: str
    dtype: str
    bars: tuple[ExponentBar, ...]
    specials: tuple[Special, ...]
    low: int
    high: int

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types to mark: the usual ones, and the operand's own if it is another."""
        own = (self.dtype,) if self.dtype in SPANS and self.dtype not in ALWAYS else ()
        return (*ALWAYS, *own)

    @property
    def range(self) -> tuple[int, int]:
        """The exponents from end to end of every type to mark, and of the values."""
        spans = [SPANS[d] for d in self.dtypes]
        return (min(self.low, *(s.subnormal for s in spans)), max(self.high, *(s.largest for s in spans)))

    @property
    def window(self) -> tuple[int, int]:
        """The exponents to look at closely: those of the values with some air, and a near end of their own type."""
        low, high = self.low - 2, self.high + 2
        spare = max(0, 16 - (high - low + 1))
        low, high = low - (spare + 1) // 2, high + spare // 2
        own = SPANS.get(self.dtype)
        if own:
            high = max(high, own.largest + 2) if 0 <= own.largest + 2 - high <= 8 else high
            low = min(low, own.subnormal - 2) if 0 <= low - (own.subnormal - 2) <= 8 else low
        return low, high

    @property
    def bad(self) -> int:
        return sum(b.bad for b in self.bars) + sum(s.count for s in self.specials if s.bad)

    @property
    def tallest(self) -> int:
        return max([b.count for b in self.bars] + [s.count for s in self.specials])

    def drawing(self) -> Drawing:
        """Close up, how many values have which exponent; below, from far, where these lie between the types' ends."""
        return Drawing([*_close(self), *_far(self)], FOOT + 44 + 17 * len(self.dtypes) + 20)

    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        finite, faulty = sum(b.count for b in self.bars), sum(b.bad for b in self.bars)
        text = f"{self.operand} ({self.dtype}): "
        text += f"{number(finite)} finite non-zero values" if finite else "no finite non-zero values"
        if finite:
            text += f" between {power(self.low)} and {power(self.high + 1)}"
        for special in self.specials:
            plural = "s" * (special.name == "zero" and special.count != 1)
            text += f", {number(special.count)} {special.name}{plural}"
        return text + (f"; {number(faulty)} of the finite values are at fault." if faulty else ".")


def power(exponent: int) -> str:
    """2^exponent as a person reads it: "0.125", "32", "1e-38", "1.8e308" too where a float cannot hold it."""
    if -10 <= exponent <= 16:
        return f"{2**exponent:g}" if exponent >= -4 else f"{2.0**exponent:.1g}"
    tens = math.floor(exponent * math.log10(2))
    digit = round(10 ** (exponent * math.log10(2) - tens))
    return f"{digit if digit < 10 else 1}e{tens if digit < 10 else tens + 1}"


def height(count: int, tallest: int) -> float:
    """How tall a bar is drawn, 0 to 1: logarithmic, because one bad value among a million has to be seen."""
    return math.log1p(count) / math.log1p(tallest) if count > 0 < tallest else 0.0


def levels(tallest: int) -> list[int]:
    """The counts to mark beside the bars: 1, 10, 100 …, and the tallest where there is room."""
    marks = [10**k for k in range(len(str(tallest)))]
    marks = marks[:: math.ceil(len(marks) / 4)]
    return [*marks, tallest] if height(marks[-1], tallest) < 0.82 else marks


def ticks(window: tuple[int, int], most: int) -> list[int]:
    """The exponents to mark, every fourth or more, none at the very edge."""
    low, high = window
    apart = max(4, 4 * round((high - low) / (4 * most)))
    return [e for e in range(low + 1, high + 1) if e % apart == 0]


def read(data: Mapping[str, Any]) -> Histogram | None:
    """The picture, or None when there is nothing in the data to draw.

    counts, bad_counts: {exponent: how many}, all of them and those at fault; zeros, nans, infs, neg_infs, bad_zeros:
    how many; dtype, operand: text.
    """
    counts, bad = _counts(data.get("counts")), _counts(data.get("bad_counts"))
    specials = _specials(data)
    if not counts and not specials:
        return None
    dtype = str(data.get("dtype") or "float32").removeprefix("torch.")
    low, high = (min(counts), max(counts)) if counts else (0, 0)
    width = max(1, math.ceil((high - low + 1) / 120))
    bars = []
    for first in range(low, high + 1, width):
        inside = range(first, first + width)
        count = sum(counts.get(e, 0) for e in inside)
        if count:
            bars.append(ExponentBar(first, first + width - 1, count, min(count, sum(bad.get(e, 0) for e in inside))))
    operand = clean(data.get("operand") or "operand", 60)
    return Histogram(operand, COMPLEX.get(dtype, clean(dtype, 20)), tuple(bars), specials, low, high)


def _specials(data: Mapping[str, Any]) -> tuple[Special, ...]:
    """Zeros are at fault when the facts say so (`bad_zeros`), or, where they do not say, when nothing else is."""
    named = {"zero": "zeros", "−inf": "neg_infs", "inf": "infs", "nan": "nans"}
    numbers = {name: int(data.get(key) or 0) for name, key in named.items()}
    others = _counts(data.get("bad_counts")) or any(n for name, n in numbers.items() if name != "zero")
    zeros = data["bad_zeros"] > 0 if data.get("bad_zeros") is not None else not others
    return tuple(Special(name, n, name != "zero" or zeros) for name, n in numbers.items() if n > 0)


def _counts(data: Any) -> dict[int, int]:
    """Exponents may be strings, as JSON has them."""
    return {int(e): int(n) for e, n in data.items() if int(n) > 0} if isinstance(data, Mapping) else {}


def _close(histogram: Histogram) -> list[Mark]:
    low, high = histogram.window
    zeros = sum(s.name == "zero" for s in histogram.specials)
    others = len(histogram.specials) - zeros
    left, right = LEFT + (SLOT + GAP) * zeros, RIGHT - SLOT * others - GAP * (others > 0)
    step = (right - left) / (high + 1 - low)
    at_fault = f", {number(histogram.bad)} at fault" if histogram.bad else ""
    title = Text(0, 14, f"Sizes of the values: {histogram.operand} ({histogram.dtype}){at_fault}", bold=True)
    marks: list[Mark] = [title, Text(0, TOP - 16, "how many")]
    for level in levels(histogram.tallest):
        y = FOOT - TALL * height(level, histogram.tallest)
        marks += [line(left, y, right, y, RULE), Text(LEFT - 8, y + 4, number(level), "end")]
    for bar in histogram.bars:
        x, wide = left + (bar.first - low) * step, (bar.last + 1 - bar.first) * step
        for elements, colour in ((bar.count, VALUES), (bar.bad, FAULT)):
            tall = TALL * height(elements, histogram.tallest)
            marks += [Bar(x, FOOT - tall, max(wide - min(1.5, wide / 4), 1), tall, colour)] if elements else []
    marks.append(line(left, FOOT, right, FOOT))
    for exponent in ticks(histogram.window, 9):
        x = left + (exponent - low) * step
        marks += [line(x, FOOT, x, FOOT + 4), Text(x, FOOT + 17, power(exponent), "middle")]
    return [*marks, *_special_bars(histogram, right + GAP), *_ends(histogram, left, step)]


def _special_bars(histogram: Histogram, after: float) -> list[Mark]:
    """Zeros stand left of the finite values, infinities and NaN right."""
    marks: list[Mark] = []
    for special in histogram.specials:
        x = LEFT if special.name == "zero" else after
        after += 0 if special.name == "zero" else SLOT
        tall, colour = TALL * height(special.count, histogram.tallest), FAULT if special.bad else VALUES
        marks += [
            Bar(x + 10, FOOT - tall, SLOT - 20, tall, colour),
            line(x, FOOT, x + SLOT, FOOT),
            Text(x + SLOT / 2, FOOT - tall - 5, number(special.count), "middle", colour, bold=True),
            Text(x + SLOT / 2, FOOT + 17, special.name, "middle"),
        ]
    return marks


def _ends(histogram: Histogram, left: float, step: float) -> list[Mark]:
    """Dashed lines where the window shows the end of a type."""
    low, high = histogram.window
    named: dict[int, list[str]] = {}
    for dtype in histogram.dtypes:
        for edge in (SPANS[dtype].subnormal, SPANS[dtype].largest + 1):
            if low < edge <= high:
                named.setdefault(edge, []).append(dtype)
    marks: list[Mark] = []
    for edge, dtypes in named.items():
        x = left + (edge - low) * step
        anchor = "start" if x < WIDTH / 3 else "end" if x > WIDTH * 2 / 3 else "middle"
        marks += [line(x, TOP - 8, x, FOOT, INK, (3, 3)), Text(x, TOP - 14, f"end of {', '.join(dtypes)}", anchor)]
    return marks


def _far(histogram: Histogram) -> list[Mark]:
    """One strip for each type, from its smallest to its largest number; the band shows where the values are."""
    low, high = histogram.range
    left, right, top = LEFT + 52, RIGHT - 46, FOOT + 42
    step = (right - left) / (high + 1 - low)
    marks: list[Mark] = []
    for i, dtype in enumerate(histogram.dtypes):
        span, y, own = SPANS[dtype], top + 17 * i, dtype == histogram.dtype
        start, normal, end = (left + (e - low) * step for e in (span.subnormal, span.normal, span.largest + 1))
        marks += [
            Text(LEFT - 8, y + 8, dtype, "end", bold=own),
            Bar(start, y + 3, normal - start, 3, FAINT),
            Bar(normal, y + 2, end - normal, 5, INK if own else FAINT),
            Text(start - 5, y + 8, span.least, "end"),
            Text(end + 5, y + 8, span.most),
        ]
    if histogram.bars:
        x, wide = left + (histogram.low - low) * step, max(3, (histogram.high + 1 - histogram.low) * step)
        tall = 17 * len(histogram.dtypes)
        marks += [
            Bar(x, top - 5, wide, tall + 2, VALUES + "4d", VALUES),
            Text(x + wide / 2, top + tall + 11, "the values", "middle", VALUES),
        ]
    return marks
