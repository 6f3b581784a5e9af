"""What nbdebug has found in this notebook so far, as plain data: the reports themselves are not kept alive."""

from __future__ import annotations

from typing import Any

from nbdebug.finding import Report

MOST = 100
"""Findings remembered; the oldest go."""


class Told:
    """Reports that cells returned, assigned, or raised with an error."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.rows: list[list[Any]] = []
        self._known: set[int] = set()

    @property
    def count(self) -> int:
        return len(self.rows)

    def close(self) -> None:
        self.rows, self._known = [], set()

    def after(self, result: Any) -> None:
        """A cell is over: note what it has found. result: IPython's, or None."""
        given = [
            getattr(result, "result", None),
            _raised_with(getattr(result, "error_in_exec", None)),
            *(v for n, v in list(self.shell.user_ns.items()) if type(v) is Report and not n.startswith("_")),
        ]
        cell = f"In [{getattr(result, 'execution_count', None) or self.shell.execution_count - 1}]"
        now: set[int] = set()
        for report in given:
            if isinstance(report, Report) and id(report) not in now:
                now.add(id(report))
                if id(report) not in self._known:
                    self._note(report, cell)
        self._known = now  # a report that is gone may leave its number to another

    def _note(self, report: Report, cell: str) -> None:
        rows = [[cell, f.title, f.where.place, f.code] for f in report.findings]
        self.rows = [*self.rows, *(row for row in rows if row[1:] not in [r[1:] for r in self.rows])][-MOST:]

    def table(self) -> dict[str, Any] | None:
        """Newest first; None while there is none."""
        return (
            {"title": "Found so far", "columns": ["cell", "what", "where", "cause"], "rows": list(reversed(self.rows))}
            if self.rows
            else None
        )


def _raised_with(error: BaseException | None) -> Any:
    """The report that nbdebug has left with an error, read as it lies there: the error may be the user's own."""
    if error is None:
        return None
    if type(error).__module__.startswith("nbdebug."):
        return getattr(error, "report", None)
    return BaseException.__getattribute__(error, "__dict__").get("report")
