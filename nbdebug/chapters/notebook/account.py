"""The report of `check_notebook()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.chapters.notebook.facts import NotebookFacts
from nbdebug.chapters.notebook.probe import seen
from nbdebug.chapters.notebook.rules import name_all, notes_of
from nbdebug.finding import Report, RuledOut


def notebook_report(names: Mapping[str, Any], shell: Any = None, memory: Iterable[Any] = ()) -> Report:
    """names: the user's variables; memory: what the notebook keeps, as the list of `free()` has it."""
    facts = seen(names, shell, memory)
    found = tuple(name_all(facts))
    cells = f"{facts.cells:,} cell{'s' * (facts.cells != 1)} that ran"
    subject = (
        f"{cells}, {facts.objects:,} objects that your variables lead to"
        if facts.cells
        else (f"{facts.objects:,} objects that your variables lead to; no record of cells, as outside a notebook")
    )
    said = {} if found else {"headline": "Nothing in this notebook is left over from a cell that ran before."}
    return Report(
        "check_notebook()",
        found,
        () if found else tuple(_ruled_out(facts)),
        facts.unchecked,
        tuple(notes_of(facts)),
        subject,
        said,
    )


def _ruled_out(facts: NotebookFacts) -> list[RuledOut]:
    return (
        [RuledOut("an old version of an edited file", "every loaded file of yours says what is loaded")]
        if not facts.stale
        else []
    )
