"""A node of a settings file with its place, and a fault of its syntax with the change that mends it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
INVISIBLE = SPACES + (
    "\u00ad\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
"""Characters that an editor does not show, or shows as a space (Unicode, general categories Cf and Zs)."""
QUOTES = {"\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'"}
"""What word processors make of straight quotes."""


@dataclasses.dataclass
class Node:
    """A value as it stands in the text. start, end: offsets; quoted: whether it is text in quotes; entries: (key,
    offset of the key, node) of a mapping; items: of a list."""

    value: Any
    start: int
    end: int
    quoted: bool = False
    entries: list[tuple[str, int, Node]] | None = None
    items: list[Node] | None = None


class Malformed(Exception):
    """The text can't be read. offset: where it must be mended; mend: (start, end, new text) of the change, or None. No
    change adds or removes a line."""

    def __init__(self, offset: int, what: str, cure: str, mend: tuple[int, int, str] | None = None) -> None:
        super().__init__(what)
        self.offset, self.what, self.cure, self.mend = offset, what, cure, mend


@dataclasses.dataclass(frozen=True)
class Flaw:
    """A fault of syntax. line, column: from 1; new: the line as mended, None where no change is known."""

    line: int
    column: int
    what: str
    cure: str
    mended: bool


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def line_span(text: str, line: int) -> tuple[int, int]:
    """Where a line begins and ends, without its line break."""
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    end = text.find("\n", start)
    return start, len(text) if end < 0 else end


def indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def readings(text: str, parse: Callable[[str], Any], most: int = 20) -> tuple[Any, list[Flaw], str]:
    """(what it says, its faults, the mended text). Each fault is mended to see the next; what it says is None where one
    can't be. The lines stay the same, in number and in order."""
    flaws: list[Flaw] = []
    for _ in range(most):
        try:
            return parse(text), flaws, text
        except Malformed as fault:
            line = line_of(text, fault.offset)
            column = fault.offset - line_span(text, line)[0] + 1
            if line not in {flaw.line for flaw in flaws}:  # two faults of a line are mended together
                flaws.append(Flaw(line, column, fault.what, fault.cure, fault.mend is not None))
            if fault.mend is None:
                break
            start, end, new = fault.mend
            text = text[:start] + new + text[end:]
    return None, flaws, text


LONGEST = 200_000
"""Characters of a text of which changes are tried: each is read whole."""
Candidate = tuple[int, str, str, str]
"""(line, the line as it would be, what is wrong, the cure)."""


def first_that_helps(
    text: str, candidates: Iterator[Candidate], reached: Callable[[str], float], before: float
) -> Malformed | None:
    """The change of a line with which the text is read whole, else the first with which it is read further than
    `before`. reached: how far a text is read, as an offset; infinite where it is read whole."""
    best: Malformed | None = None
    for line, new, what, cure in candidates if len(text) <= LONGEST else ():
        start, end = line_span(text, line)
        if new == text[start:end]:
            continue
        after = reached(text[:start] + new + text[end:])
        if after > max(before, end) + abs(len(new) - (end - start)) and (best is None or after == math.inf):
            offset = start + next((i for i, (a, b) in enumerate(zip(text[start:end], new)) if a != b), 0)
            best = Malformed(min(offset, end), what, cure, (start, end, new))
        if after == math.inf:
            return best
    return best
