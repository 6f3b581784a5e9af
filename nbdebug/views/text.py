"""A Report as plain text, for terminals, logs and notebooks without HTML: at most 100 columns, no colours.

Only the code of a fix may be wider: it is there to be copied, so it is neither wrapped nor cut.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable

from nbdebug.report import Finding, Fix, Link, Report
from nbdebug.views import wording as words
from nbdebug.views.plots import pictures

COLUMNS = 98
MOST = 30


def render(report: Report) -> str:
    lines = _silent(report) if report.ok else _found(report)
    asked = [words.clean(part, 300) for part in (report.question, report.subject) if part]
    return "\n".join([*lines, "", *_wrapped(" · ".join(asked))]).rstrip() if asked else "\n".join(lines).rstrip()


def _found(report: Report) -> list[str]:
    first, *others = report.findings
    lines = [*_wrapped(words.headline(report)), *_headline(first, "Most likely" if others else "Cause")]
    lines += [*_pictures(report), *_chain(first), *_fixes(first)]
    lines += _others(others)
    return lines + _evidence(first, report) + _rest(report) + _notes(report)


def _silent(report: Report) -> list[str]:
    lines = _wrapped(f"{words.headline(report) or words.NOTHING} {words.looked_at(report)}")
    return lines + _pictures(report) + _listed(report) + _notes(report) + _rest(report)


def _headline(finding: Finding, word: str) -> list[str]:
    where = finding.where
    known = [value if value == words.OUTSIDE else f"{head.lower()} {value}" for head, value in words.spot(where)]
    lines = [*_wrapped(words.clean(finding.title, 600)), "", f"{word}: {words.clean(finding.code, 80)}"]
    if where.text or words.place(where):
        lines += [f"{words.place(where) or 'Source'}:", *_code(where.text)]
    spot = _wrapped(" · ".join(k.replace(" ", "\xa0") for k in known))  # breaks between the parts, not inside them
    return lines + [line.replace("\xa0", " ") for line in spot]


def _chain(finding: Finding) -> list[str]:
    if not finding.chain:
        return []
    lines = ["", "How it came about"]
    for i, (link, before) in enumerate(zip(finding.chain[:MOST], (None, *finding.chain)), 1):
        lines += [*_wrapped(words.clean(link.what, 400), f"{i:>3}. ", "     "), *_link(link, before)]
    return lines + _more(finding.chain, MOST)


def _link(link: Link, before: Link | None) -> list[str]:
    """Where an event happened, its source on the same line when there is room; nothing that the link before it says."""
    where = link.where
    if before and where == before.where:
        return _wrapped(words.pairs(link.evidence), "     ", "     ") if link.evidence else []
    at = ", ".join(part for part in (words.place(where), words.module(where)) if part)
    source = words.clean_lines(where.text, 4) if where.text else []
    if at and len(source) == 1 and len(at) + len(source[0]) < COLUMNS - 9:
        lines = [f"     {at}:  {source[0]}"]
    else:
        lines = _wrapped(at, "     ", "     ") if at else []
        lines += [words.clip(f"       {line}", COLUMNS) for line in source]
    return lines + (_wrapped(words.pairs(link.evidence), "     ", "     ") if link.evidence else [])


def _fixes(finding: Finding) -> list[str]:
    lines = ["", "What to do"] if finding.fixes else []
    for i, fix in enumerate(finding.fixes[:MOST], 1):
        lines += _fix(fix, f"{i:>3}. ")
    return lines + _more(finding.fixes, MOST)


def _fix(fix: Fix, mark: str) -> list[str]:
    lines = _wrapped(words.clean(fix.title, 400), mark, "     ")
    if fix.code:
        lines += [f"         {line}" for line in words.clean_lines(fix.code, 60, 2000)]
    return lines + _wrapped(words.proof(fix) + ".", "     ", "     ")


def _others(findings: list[Finding]) -> list[str]:
    lines = ["", "Less likely"] if findings else []
    for finding in findings[:MOST]:
        place = words.place(finding.where)
        lines += _wrapped(words.clean(finding.title, 400), "  - ", "    ")
        lines += _wrapped(" · ".join(part for part in (words.clean(finding.code, 80), place) if part), "    ", "    ")
        lines += [words.clip(f"    {line}", COLUMNS) for line in _code(finding.where.text, 2)]
        for fix in finding.fixes[:1]:
            lines += _wrapped(f"{words.clean(fix.title, 300)} ({words.proof(fix)})", "    ", "    ")
    return lines + _more(findings, MOST)


def _evidence(finding: Finding, report: Report) -> list[str]:
    lines: list[str] = []
    for table in words.tables(finding.evidence, MOST):
        lines += ["", table.caption, *_table(table)]
    lines += _listed(report)
    for _, _, histogram in pictures(report, "histogram"):
        lines += ["", "Sizes of the values", *_wrapped(histogram.sentence(), "  ", "  ")]
    return lines


def _listed(report: Report) -> list[str]:
    lines: list[str] = []
    for place, (table, raw) in enumerate(words.report_tables(report, MOST)):
        rows = table.body if place == 0 else table.body[:10]
        shorter = dataclasses.replace(table, body=rows, more=table.more + len(table.body) - len(rows))
        lines += ["", table.caption, *_table(shorter), *_wrapped(words.clean(raw.note, 600), "  ", "  ")]
    return lines


def _pictures(report: Report) -> list[str]:
    lines: list[str] = []
    for kind, _, picture in pictures(report, "run", "memory", "ranges", "stepper", "losses"):
        if kind == "run":
            lines += ["", "The run", *_wrapped(picture.sentence(), "  ", "  ")]
        elif kind == "stepper":
            lines += ["", "Layers", *(words.clip(line, COLUMNS) for line in picture.lines())]
        elif kind == "losses":
            head = " · ".join(panel.name for panel in picture.panels)
            lines += ["", *_wrapped(head[:1].upper() + head[1:]), *_table(picture.table())]
        else:
            lines += ["", *_wrapped(picture.sentence())]
    return lines


def _table(table: words.TextTable) -> list[str]:
    """Columns as wide as their widest cell; the last one takes what is left and wraps."""
    body = table.body if table.head == ("What", "Value") else (table.head, *table.body)
    room = max(12, (COLUMNS - 6) // max(1, len(table.head)) if len(table.head) > 2 else 44)
    body = tuple(tuple(words.clip(cell, room) for cell in row[:-1]) + row[-1:] for row in body)
    wide = [max(len(row[i]) for row in body) for i in range(len(table.head) - 1)]
    lines = []
    for row in body:
        start = "  " + "".join(cell.ljust(w + 2) for cell, w in zip(row, wide))
        narrow = bool(row[-1].strip()) and len(start) < COLUMNS - 10
        lines += _wrapped(row[-1], start, " " * len(start)) if narrow else [words.clip(start + row[-1], COLUMNS)]
    return [line.rstrip() for line in lines] + ([f"  … {table.more} more"] if table.more else [])


def _rest(report: Report) -> list[str]:
    ruled_out = [f"{words.clean(r.what, 300)}: {words.clean(r.because, 300)}" for r in report.ruled_out]
    return _bullets("Ruled out", ruled_out) + _bullets("Not checked", [words.clean(u, 600) for u in report.unchecked])


def _notes(report: Report) -> list[str]:
    return _bullets("Notes", [words.clean(n, 600) for n in report.notes])


def _bullets(head: str, said: list[str]) -> list[str]:
    if not said:
        return []
    return ["", head, *(line for s in said[:MOST] for line in _wrapped(s, "  - ", "    ")), *_more(said, MOST)]


def _more(what: Iterable[object], most: int) -> list[str]:
    left = len(list(what)) - most
    return [f"  … {left} more"] if left > 0 else []


def _code(text: str | None, most: int = 12) -> list[str]:
    return [words.clip(f"    {line}", COLUMNS) for line in words.clean_lines(text, most)] if text else []


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)
