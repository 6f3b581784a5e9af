"""The tables that a report brings along in `facts["tables"]`: shown under the findings, and as pandas DataFrames.

A table is {"title", "columns", "rows", "note"}; a column whose name ends in "(bytes)" holds sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdebug.finding import Report
from nbdebug.sizes import size
from nbdebug.views.words import Table, clean, clip, label, say

BYTES = "(bytes)"


def read(facts: Mapping[str, Any], most: int) -> list[tuple[Table, str]]:
    """Each table with as many rows as `most`, and its note."""
    return [(_table(given, most), clean(given.get("note") or "", 600)) for given in _given(facts)]


def _given(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tables = facts.get("tables")
    listed = tables if isinstance(tables, (list, tuple)) else ()
    return [t for t in listed if isinstance(t, Mapping) and t.get("columns") and t.get("rows")]


def _table(given: Mapping[str, Any], most: int) -> Table:
    columns, rows = [str(c) for c in given["columns"]], list(given["rows"])
    head = tuple(label(c.removesuffix(BYTES).strip()) for c in columns)
    body = tuple(tuple(_cell(c, v, most) for c, v in zip(columns, row)) for row in rows[:most])
    return Table(clean(given.get("title") or "", 160), head, body, max(0, len(rows) - most))


def _cell(column: str, value: Any, most: int) -> str:
    if value is None:
        return ""
    if column.endswith(BYTES) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return size(value)
    return clip(say(value), min(160, 20 * most))


def frame(report: Report, title: str | None = None) -> Any:
    """One table as a DataFrame, with raw numbers and all its rows; the first where no title is given.

    Raises ValueError when the report has no table, or none of this title."""
    import pandas  # only where somebody asks: a report is made and shown without it

    given = _given(report.facts)
    if not given:
        raise ValueError("This report holds no table.")
    titles = [str(t.get("title") or "") for t in given]
    if title is not None and title not in titles:
        raise ValueError(f"No table is called {title!r}; there are {', '.join(map(repr, titles))}.")
    table = given[titles.index(title) if title is not None else 0]
    return pandas.DataFrame([list(row) for row in table["rows"]], columns=list(table["columns"]))
