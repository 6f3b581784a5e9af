"""Causes of the memory chapter as a notebook brings them about: what only `Out`, a traceback or a list of losses holds.

They are declared there; here they are seen in what cells have shown, and in what a cell then tried to free.
"""

from __future__ import annotations

from nbdebug.chapters.notebook.facts import Kept, NotebookFacts
from nbdebug.chapters.notebook.rules.words import cell, finding
from nbdebug.finding import Finding, Fix, Link
from nbdebug.sizes import size

DELETED = 1 << 20
"""Bytes from which on it matters that a cell deleted the variable and nothing was freed; a smaller tensor is nobody's
reason for a `del`."""
WANTED = 8 << 20
"""Bytes, where a cell asked for memory in general (`gc.collect()`, `empty_cache()`)."""
UNASKED = 16 << 20
"""Bytes, where nobody has asked for them: no variable leads to them any more. Half of `MATTERS` of the memory chapter,
which speaks unasked, where this check is about what cells left behind."""
SHARE = 0.02
"""Of all that the notebook keeps; less is beside the point."""
SLUGS = {"output": "cell-output-held", "traceback": "traceback-held", "graph": "graph-retained"}


def held(facts: NotebookFacts) -> list[Finding]:
    """One finding for each kind of holder, largest first."""
    found = []
    for how in SLUGS:
        there = [one for one in facts.kept if one.how == how and one.bytes >= _least(one)]
        if there:
            found.append(
                _FINDINGS[how](max(there, key=lambda one: (one.deleted, one.bytes)), sum(one.bytes for one in there))
            )
    return found


def _least(one: Kept) -> int:
    return DELETED if one.deleted else WANTED if one.wanted else UNASKED


def _output(one: Kept, count: int) -> Finding:
    asked = f", and `{one.wanted}` ({cell(one.freed)}) took away the variable alone" if one.deleted else ""
    what = f"`{one.variable}`" if 0 < len(one.variable) < 60 and "\n" not in one.variable else "a result"
    title = (
        f"`{one.name}` still holds {size(one.bytes)}: {cell(one.where, 'a cell')} showed {what}, and the notebook "
        f"keeps what is shown in `Out`{asked}"
    )
    fixes = [
        Fix("Let go of what the notebook keeps.", "%free outputs", None, {"would come back": size(count)}),
        Fix(
            "Show a summary, or end the line with a semicolon.",
            f"{one.variable}.shape" if (one.variable.isidentifier()) else f"{one.variable or 'scores'};",
        ),
    ]
    return _told("output", one, title, ["Out", one.name, one.variable], fixes, count)


def _traceback(one: Kept, count: int) -> Finding:
    most = f", `{one.variable}` above all" if one.variable else ""
    title = (
        f"The traceback of the last failed cell holds {size(one.bytes)}: the variables of the calls that failed"
        + most
        + (f", so `{one.wanted}` ({cell(one.freed)}) could not free them" if one.wanted else "")
    )
    return _told(
        "traceback",
        one,
        title,
        [one.name, one.variable, "traceback"],
        [
            Fix(
                "Let go of the traceback; %debug and %tb then no longer work for it.",
                "%free traceback",
                None,
                {"would come back": size(count)},
            )
        ],
        count,
    )


def _graph(one: Kept, count: int) -> Finding:
    title = f"`{one.name}` keeps {size(one.bytes)}: tensors with the graphs that made them"
    return _told(
        "graph",
        one,
        title,
        [one.name],
        [
            Fix("Keep the number.", f"{one.name}.append(loss.item())"),
            Fix("Cut the graphs of those that are there off.", f"%free {one.name}"),
        ],
        count,
    )


def _told(how: str, one: Kept, title: str, holder: list[str], fixes: list[Fix], count: int) -> Finding:
    chain = [Link(f"{cell(one.freed)} meant to free memory", one.freed)] if one.freed.cell else []
    return finding(
        f"memory/{SLUGS[how]}", title, one.where, holder, fixes, chain, bytes=one.bytes, in_all=count, what=one.what
    )


_FINDINGS = {"output": _output, "traceback": _traceback, "graph": _graph}
