"""A node of a settings file with its place, and a fault of its syntax with the change that mends it."""

from __future__ import annotations

import dataclasses
from typing import Any


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

    @property
    def plain(self) -> Any:
        if self.entries is not None:
            return {key: node.plain for key, _, node in self.entries}
        return [node.plain for node in self.items] if self.items is not None else self.value


class Malformed(Exception):
    """The text can't be read. offset: where it must be mended; mend: (start, end, new text) of the change, or None. No
    change adds or removes a line."""

    def __init__(self, offset: int, what: str, cure: str, mend: tuple[int, int, str] | None = None) -> None:
        super().__init__(what)
        self.offset, self.what, self.cure, self.mend = offset, what, cure, mend


@dataclasses.dataclass(frozen=True)
class Flaw:
    """A fault of syntax. line, column: from 1; mended: whether a change is known."""

    line: int
    column: int
    what: str
    cure: str
    mended: bool


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def line_span(text: str, line: int) -> tuple[int, int]:
    """Where a line begins and ends, without its line break."""
    lines = text.split("\n", line)[:line]
    end = len("\n".join(lines))
    return end - len(lines[-1]), end


def indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
