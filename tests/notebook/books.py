"""The notebooks of books.txt: each with one hazard, beside the same notebook as it should have been; and those that are
well."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent


class Book(NamedTuple):
    """cells: sources in the order in which they ran; twin: the repaired ones; code: the cause; cell: from 0, the one
    that brings it in; names: what the report must name."""

    cells: list[str]
    twin: list[str]
    code: str
    cell: int
    names: list[str]


def _read() -> tuple[dict[str, str], dict[str, Book]]:
    """The cells that have a name, and the notebooks."""
    named: dict[str, str] = {}
    books: dict[str, Book] = {}
    for section in (HERE / "books.txt").read_text(encoding="utf-8").split("\n=== ")[2:]:
        name, _, text = section.strip("\n").partition("\n")
        if name.startswith("@"):
            named[name[1:]] = text
            continue
        head, *parts = re.split(r"^---", f"{text}\n", flags=re.MULTILINE)
        given = dict(part.split(": ", 1) for part in head.strip().split(" · ")) if head.strip() else {}
        cells = [(mark.strip(), source.rstrip("\n")) for mark, _, source in (part.partition("\n") for part in parts)]
        full = [
            (mark, re.sub(r"^@(\w+)$", lambda of: named.get(of[1], of[0]), source, flags=re.M))
            for mark, source in cells
        ]
        books[name] = Book(
            [source for mark, source in full if mark != "repaired"],
            [source for mark, source in full if mark != "broken"],
            given.get("code", ""),
            int(given.get("cell", 0)),
            given.get("names", "").split(),
        )
    return named, books


NAMED, _ALL = _read()
BOOKS = {name: book for name, book in _ALL.items() if book.code}
HEALTHY = {name: book.cells for name, book in _ALL.items() if not book.code}
HOOK, MODEL, OPT, SETUP, TRAIN = (NAMED[name] for name in ("HOOK", "MODEL", "OPT", "SETUP", "TRAIN"))
