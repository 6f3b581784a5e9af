"""A Report as plain text: for terminals, logs, and notebooks without HTML.

A report of one cause fits on a screen of SCREEN lines: the cause and its place, how it came about, the first fix with
its proof, the numbers, what was ruled out, and a last line that says what is left out. `report.full()` has all of it.
Lines are as wide as the terminal, 100 columns at most; only the code of a fix may be wider, as it is there to be
copied. Colours are for terminals: what a notebook keeps is plain. `show` displays a report at once, where nobody waits
for a return value: in the notebook that runs, else as text on stderr.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Link, Report
from nbdebug.text import WIDEST, clip, count, in_colour, styled, terminal_width
from nbdebug.views import wording as words

SCREEN = 30
DETAIL = "detail"
"""What is left out first: the source lines of events, their numbers, and the sizes of the values."""


@dataclasses.dataclass(frozen=True)
class Room:
    """How much is shown of each part. events: of the chain; sources: whether each of them has its line of code; lines:
    of the user's code at the cause; numbers: rows of the evidence; tables: of the report, and rows of each; remarks:
    lines of notes and of what was not checked."""

    events: int = 4
    sources: bool = True
    lines: int = 3
    numbers: int = 6
    tables: int = 1
    rows: int = 10
    remarks: int = 3
    fixes: int = 1
    causes: int = 3
    pictures: bool = True


ALL = Room(30, True, 12, 30, 30, 30, 0, 30, 30)
ROOMS = (
    Room(tables=3),
    Room(tables=2, sources=False, rows=8),
    Room(sources=False, rows=8, numbers=4, remarks=2),
    Room(3, False, 3, 3, rows=6, remarks=2),
    Room(2, False, 2, 3, rows=5, remarks=1, causes=2),
    Room(2, False, 1, 0, rows=4, remarks=1, causes=1, pictures=False),
)
"""From roomy to narrow: the first that fits on the screen is taken."""


def render(report: Report, most: int = SCREEN, colour: bool = False) -> str:
    """The text. most: its lines, unless all of it is asked for; colour: with ANSI codes."""
    text = ReportText(report.full(), ALL, colour).text()
    if not report.folded or text.count("\n") < most:
        return text
    for room in ROOMS:
        text = ReportText(report, room, colour).text()
        if text.count("\n") < most:
            break
    return text


def for_terminal(report: Report, most: int = SCREEN) -> str:
    """The text as IPython and Python show it where an expression is typed: in colour on a terminal."""
    return render(report, most, in_colour(sys.stdout))


def wrapped(text: str, columns: int, first: str = "", then: str = "") -> list[str]:
    """The lines of a paragraph; short `code` and places in it are not broken."""
    pattern = r"`[^`]+`|(In \[\d+\], )?line \d+"
    joined = re.sub(pattern, lambda part: part[0].replace(" ", "\0") if len(part[0]) < 43 else part[0], text)
    lines = textwrap.wrap(joined, columns, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


class ReportText:
    """The lines of one report, in the room that there is. left: how many things of which kind were left out."""

    def __init__(self, report: Report, room: Room, colour: bool):
        self.report, self.room, self.colour = report, room, colour
        self.columns = terminal_width(WIDEST)
        self.lines: list[str] = []
        self.left: collections.Counter[tuple[str, str]] = collections.Counter()
        if not report.findings:
            self.without_finding()
        else:
            self.with_findings()
        self.foot()

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).strip("\n")

    # -- lines --------------------------------------------------------------------------------------------------------

    def put(self, lines: Iterable[str], style: str = "") -> None:
        text = "\n".join(lines)
        if text:
            self.lines += (styled(text, style) if self.colour else text).split("\n")

    def say(self, text: str, first: str = "", then: str = "", style: str = "", most: int = 0) -> None:
        """A paragraph, wrapped. most: its lines, where it may be cut."""
        lines = wrapped(text, self.columns, first, then)
        if most and len(lines) > most:
            lines[most - 1 :] = [clip(" ".join([lines[most - 1], lines[most].strip()]), self.columns)]
        self.put(lines, style)

    def head(self, text: str) -> None:
        self.lines.append("")
        self.say(text, style="bold")

    def omit(self, number: int, noun: str, plural: str = "") -> None:
        if number > 0:
            self.left[noun, plural] += number

    # -- the whole ----------------------------------------------------------------------------------------------------

    def with_findings(self) -> None:
        first, *others = self.report.findings
        self.say(words.headline(self.report), most=2 if self.report.folded else 0)
        self.cause(first, words.of_first(self.report))
        self.pictures()
        self.chain(first.chain)
        self.fixes(first.fixes)
        self.other_causes(others)
        self.evidence(first)
        self.ruled_out()
        self.remarks()

    def without_finding(self) -> None:
        report = self.report
        style = words.tone(report) or "bold"
        self.say(f"{words.headline(report) or words.NOTHING} {words.examined(report)}", style=style)
        for line in words.symptoms(report):
            self.say(line)
        self.pictures()
        self.tables(self.room.tables, self.room.rows)
        if self.report.folded:
            self.ruled_out()
            self.remarks()
        else:
            self.remarks()
            self.ruled_out()

    def foot(self) -> None:
        question = " · ".join(words.clean(part, 300) for part in (self.report.question, self.report.subject) if part)
        details = len(self.left) == 1  # they are named where nothing else is left out
        left = [count(n, noun, plural) for (noun, plural), n in self.left.items() if noun != DETAIL or details]
        if self.lines[-1:] != [""]:
            self.lines.append("")
        self.say(question, style="pale", most=2 if self.report.folded else 0)
        if left:
            self.say(f"Left out (report.full() shows it): {', '.join(left)}.", style="pale", most=1)

    # -- its parts ----------------------------------------------------------------------------------------------------

    def cause(self, finding: Finding, word: str) -> None:
        where = finding.where
        known = [f"{head.lower()} {value}" for head, value in words.spot(where)]
        self.say(words.clean(finding.title, 600), style="bold", most=4 if self.report.folded else 0)
        self.lines.append("")
        self.put([f"{word}: {words.clean(finding.code, 80)}"])
        if where.text or words.place(where):
            self.put([f"{words.place(where) or 'Source'}:"])
            self.put(self.code(where.text, self.room.lines), "code")
        # breaks between the parts, not inside them
        spot = wrapped(" · ".join(part.replace(" ", "\xa0") for part in known), self.columns)
        self.put([line.replace("\xa0", " ") for line in spot], "pale")

    def code(self, text: str | None, most: int) -> list[str]:
        return [clip(f"    {line}", self.columns) for line in words.clean_lines(text, most)] if text else []

    def chain(self, chain: Sequence[Link]) -> None:
        if not chain:
            return
        self.head("How it came about")
        most = self.room.events
        if len(chain) <= most:
            shown = set(range(len(chain)))
        elif self.report.folded:  # the first and the last ones
            shown = {*range(most // 2), *range(len(chain) - (most + 1) // 2, len(chain))}
        else:
            shown = set(range(most))
        hidden = 0
        for i, (link, before) in enumerate(zip(chain, (None, *chain))):
            if i in shown:
                if hidden:
                    self.put([f"     … {hidden} more"])
                    hidden = 0
                self.event(i + 1, link, before)
            else:
                hidden += 1
        if hidden:
            self.put([f"  … {hidden} more"])
        self.omit(len(chain) - len(shown) if self.report.folded else 0, "event")

    def event(self, number: int, link: Link, before: Link | None) -> None:
        """What happened and where, the source on the same line when there is room; nothing that the one before says."""
        where, folded = link.where, self.report.folded
        at = words.stop(where)
        if before and where == before.where:
            at = ""
        what = words.clean(link.what, 400)
        if at and not self.room.sources:
            short = f"{what} ({words.place(where)})" if words.place(where) else what
            self.say(short, f"{number:>3}. ", "     ", most=2)
            self.omit(1, DETAIL)
            return
        self.say(what, f"{number:>3}. ", "     ", most=2 if folded else 0)
        source = words.clean_lines(where.text, 4) if where.text and at else []
        if at and len(source) == 1 and len(at) + len(source[0]) < self.columns - 7:
            self.put([f"     {at}:  {source[0]}"], "pale")
        elif at:
            self.say(at, "     ", "     ", "pale", most=1 if folded else 0)
            if not folded:
                self.put([clip(f"       {line}", self.columns) for line in source], "pale")
        if link.evidence and folded:
            self.omit(1, DETAIL)
        elif link.evidence:
            self.say(words.pairs(link.evidence), "     ", "     ", "pale")

    def fixes(self, fixes: Sequence[Fix]) -> None:
        if not fixes:
            return
        self.head("What to do")
        for i, fix in enumerate(fixes[: self.room.fixes], 1):
            mark = f"{i:>3}. " if len(fixes) > 1 else "  "
            margin = " " * len(mark)
            self.say(words.clean(fix.title, 400), mark, margin)
            if fix.edit is not None:
                self.put([f"{margin}{words.clean(fix.edit.place, 160)}:"], "pale")
            for mark, line in words.change(fix):
                style = {"-": "bad", "+": "good"}.get(mark, "code")
                self.put([f"{margin}  {mark or ' '} {line}"], style)
            style = "" if fix.verified is None else "good" if fix.verified else "bad"
            self.say(words.proof(fix) + ".", margin, margin, style, most=2 if self.report.folded else 0)
        self.omit(len(fixes) - self.room.fixes, "fix", "fixes")

    def other_causes(self, findings: Sequence[Finding]) -> None:
        if not findings:
            return
        self.head(words.of_others(self.report))
        side_by_side = self.report.independent
        most = max(self.room.causes, 6) if side_by_side else self.room.causes
        for finding in findings[:most]:
            place = words.place(finding.where)
            self.say(words.clean(finding.title, 400), "  - ", "    ", most=2 if self.report.folded else 0)
            self.say(
                " · ".join(part for part in (words.clean(finding.code, 80), place) if part), "    ", "    ", "pale"
            )
            for fix in finding.fixes[:1] if side_by_side else ():
                self.put([f"      {mark} {line}" for mark, line in words.change(fix) if mark == "+"], "good")
            if self.report.folded:
                continue
            self.put(self.code(finding.where.text, 2), "code")
            for fix in finding.fixes[:1]:
                self.say(f"{words.clean(fix.title, 300)} ({words.proof(fix)})", "    ", "    ")
        self.omit(len(findings) - most, "problem" if side_by_side else "less likely cause")

    def evidence(self, finding: Finding) -> None:
        """The numbers of the cause; where it has none, the first table of the report."""
        tables, most = words.tables(finding.evidence, 30), self.room.numbers
        if not self.report.folded:
            for table in tables:
                self.table(table)
            self.tables(self.room.tables, self.room.rows)
            for _, histogram in self.report._pictures("histogram"):
                self.head("Sizes of the values")
                self.say(histogram.sentence(), "  ", "  ")
            return
        room = bool(tables and most)
        if room:
            first = tables.pop(0)
            self.numbers(dataclasses.replace(first, body=first.body[:most], more=0))
            self.omit(first.more + len(first.body) - most, "number")
        self.omit(len(tables), "table")
        self.omit(sum(plot.kind == "histogram" for plot in self.report.plots), DETAIL)
        self.tables(0 if room else min(1, most), most)

    def numbers(self, table: words.TextTable) -> None:
        """Single numbers in two columns, where they are short."""
        half = self.columns // 2 - 2
        keys = max(len(row[0]) for row in table.body)
        pairs = [f"{row[0].ljust(keys)}  {row[1]}" for row in table.body] if len(table.head) == 2 else []
        if len(pairs) < 4 or max(map(len, pairs)) > half:
            self.table(table)
            return
        self.head(table.caption)
        middle = (len(pairs) + 1) // 2
        left = max(map(len, pairs[:middle])) + 6
        self.put(f"  {one.ljust(left)}{other}" for one, other in zip(pairs[:middle], [*pairs[middle:], ""]))

    def tables(self, most: int, rows: int) -> None:
        """So many of the report's own tables, with so many rows of the first."""
        tables = words.report_tables(self.report, 30)
        for place, (table, raw) in enumerate(tables[:most]):
            body = table.body[: rows if place == 0 else min(rows, 10)]
            self.table(dataclasses.replace(table, body=body, more=table.more + len(table.body) - len(body)))
            self.say(words.clean(raw.note, 600), "  ", "  ", "pale", most=2 if self.report.folded else 0)
        self.omit(len(tables) - most, "table")

    def pictures(self) -> None:
        for kind, picture in self.report._pictures("times", "run", "memory", "ranges", "stepper", "losses", "gallery"):
            if not self.room.pictures:
                self.omit(1, "picture")
            elif kind in ("stepper", "times"):
                self.head("Layers" if kind == "stepper" else "Where the time goes")
                self.put(clip(line, self.columns) for line in picture.lines())
            elif kind == "losses":
                names = " · ".join(panel.name for panel in picture.panels)
                self.table(dataclasses.replace(picture.table(), caption=names[:1].upper() + names[1:]))
            elif kind == "run":
                self.head("The run")
                self.say(picture.sentence(), "  ", "  ", most=3 if self.report.folded else 0)
            else:
                self.lines.append("")
                self.say(picture.sentence(), most=3 if self.report.folded else 0)

    def table(self, table: words.TextTable) -> None:
        """Columns as wide as their widest cell; the last one takes what is left, and wraps."""
        self.head(table.caption) if table.caption else self.lines.append("")
        self.put(table_lines(table, self.columns, wrap=not self.report.folded))

    def ruled_out(self) -> None:
        causes = self.report.ruled_out
        if not self.report.folded:
            self.bullets("Ruled out", [f"{words.clean(r.what, 300)}: {words.clean(r.because, 300)}" for r in causes])
            return
        names = [words.uncapitalized(words.clean(r.what, 80).rstrip(".")) for r in causes]
        for shown in range(len(names), 0, -1):
            more = f" and {len(names) - shown} more" if shown < len(names) else ""
            lines = wrapped(f"Ruled out: {', '.join(names[:shown])}{more}.", self.columns)
            if len(lines) <= 2 or shown == 1:
                self.lines.append("")
                self.put(lines[:2], "pale")
                return

    def remarks(self) -> None:
        """What was not checked, and the notes."""
        unchecked = [words.clean(text, 600) for text in self.report.unchecked]
        notes = [words.clean(text, 600) for text in self.report.notes]
        if not self.report.folded:
            self.bullets("Not checked", unchecked)
            self.bullets("Notes", notes)
            return
        room = self.room.remarks * (1 if self.report.findings else 4)
        if (unchecked or notes) and not (self.report.ruled_out):
            self.lines.append("")
        for head, texts in (("Not checked", unchecked), ("Note", notes)):
            for text in texts:
                lines = wrapped(f"{head}: {text}", self.columns)
                if room and (len(lines) <= room or len(lines) > 3):
                    self.say(f"{head}: {text}", most=room)
                    room = max(0, room - len(lines))
                else:
                    self.omit(1, *(("note",) if head == "Note" else ("thing not checked", "things not checked")))

    def bullets(self, head: str, texts: Sequence[str]) -> None:
        if not texts:
            return
        self.head(head)
        for text in texts[:30]:
            self.say(text, "  - ", "    ")
        if len(texts) > 30:
            self.put([f"  … {len(texts) - 30} more"])


NARROW = 10
"""Characters that a cell keeps where a table is too wide."""


def table_lines(table: words.TextTable, columns: int, wrap: bool = True) -> list[str]:
    """The rows under their heads, which may take several lines; the last cell of a row takes what is left of the line.
    Columns for which there is no room are named below. wrap: the last cell wraps, else it is cut."""
    heads = () if table.head == ("What", "Value") else table.head
    number = max(len(table.head), 1)
    longest = [max((len(row[i]) for row in table.body), default=0) for i in range(number)]
    longest = [min(w, 44 if number > 2 or i == 0 else columns) for i, w in enumerate(longest)]
    least = [max((len(word) for word in head.split()), default=0) for head in heads] or [0] * number
    wide = [max(w, len(head)) for w, head in zip(longest, heads or [""] * number)]
    last = min(wide[-1], 24)  # what the last column needs
    if sum(wide[:-1]) + last + 2 * number > columns:
        wide = [max(w, h) for w, h in zip(longest, least)]
    while sum(wide[:-1]) + last + 2 * number > columns:
        widest = max(range(number - 1), key=lambda i: wide[i] - max(NARROW, least[i]), default=0)
        if number < 2 or wide[widest] <= max(NARROW, least[widest]):
            break
        wide[widest] -= 1
    shown = number
    while shown > 1 and sum(wide[:shown]) - wide[shown - 1] + min(wide[shown - 1], 24) + 2 * shown > columns:
        shown -= 1
    lines = []
    for row_cells in [*_head_lines(heads[:shown], wide), *(row[:shown] for row in table.body)]:
        *cells, end = row_cells
        start = "  " + "".join(clip(cell, w).ljust(w + 2) for cell, w in zip(cells, wide))
        lines += (
            wrapped(end, columns, start, " " * len(start)) if wrap and end.strip() else [clip(start + end, columns)]
        )
    if shown < number:
        lines.append(clip(f"  … {count(number - shown, 'more column')}: {', '.join(heads[shown:])}", columns))
    return [line.rstrip() for line in lines] + ([f"  … {table.more:,} more"] if table.more else [])


def _head_lines(heads: Sequence[str], wide: Sequence[int]) -> list[list[str]]:
    """Heads over as many lines as the longest of them takes, at the foot of their space."""
    parts = [textwrap.wrap(head, max(w, NARROW)) or [""] for head, w in zip(heads, wide)]
    tall = max(map(len, parts), default=0)
    return [[part[n - tall + len(part)] if n >= tall - len(part) else "" for part in parts] for n in range(tall)]


def show(report: Report) -> None:
    """Display it as the last line of a cell would. stderr, because stdout may be what the program was run for."""
    shell = running_shell()
    if shell is None:
        print(render(report, colour=in_colour(sys.stderr)), file=sys.stderr, flush=True)
        return
    data, metadata = shell.display_formatter.format(report)
    shell.display_pub.publish(data, metadata)


def running_shell() -> Any:
    """The notebook's shell; None in a script, and in a process that a notebook has started: it can display nothing."""
    ipython = sys.modules.get("IPython")  # where nobody has imported it, nothing of it runs
    find = getattr(ipython, "get_ipython", None)
    return find() if find is not None and multiprocessing.parent_process() is None else None
