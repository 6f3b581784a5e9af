"""The catalogue: every cause that nbdebug can name, declared once.

A rule is one declaration: what is wrong, how it shows, why it happens, how to make sure, what to do, where to read
more, and the function that recognises it in a chapter's facts. The catalogue page, `nbdebug explain CODE`, the
notebooks' appendix and the tests all read that declaration; nothing is written twice. `add_pages` puts pages of the
user's own beside them.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nbdebug.report import Finding
from nbdebug.text import styled, terminal_width

CHAPTERS = (
    "nan",
    "training",
    "precision",
    "memory",
    "error",
    "notebook",
    "config",
    "checkpoint",
    "environment",
    "data",
    "speed",
    "quality",
    "distributed",
    "run",
)
"""The chapters with a package of rules, in the order of the catalogue: the first part of most codes."""
ELSEWHERE = {
    "error": ("memory", "error", "notebook"),
    "checkpoint": ("error", "checkpoint"),
    "config": ("error", "config"),
    "data": ("error", "data"),
}
"""Chapters of which some codes are declared by another one, which measures what they need."""

_HOMES = {
    "nan": "nbdebug.tools.nan.rules",
    "training": "nbdebug.tools.training.rules",
    "precision": "nbdebug.tools.precision.rules",
    "memory": "nbdebug.tools.memory.rules",
    "error": "nbdebug.tools.errors.rules",
    "notebook": "nbdebug.tools.notebook.rules",
    "config": "nbdebug.tools.config.rules",
    "checkpoint": "nbdebug.tools.checkpoint.rules",
    "environment": "nbdebug.tools.environment.rules",
    "data": "nbdebug.tools.data.rules",
    "speed": "nbdebug.tools.speed.rules",
    "quality": "nbdebug.tools.quality.rules",
    "distributed": "nbdebug.tools.distributed.rules",
    "run": "nbdebug.tools.monitor.rules",
}
Check = TypeVar("Check", bound=Callable[..., "Finding | None"])
_rules: dict[str, Rule] = {}
_added: dict[str, tuple[str, Rule]] = {}
"""Pages of the user's own, by code, each with the file that it comes from."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One cause. `check(facts)` returns a Finding, or None where the facts do not show it."""

    code: str
    title: str
    symptom: str
    cause: str
    confirm: str
    fix: str
    reference: str
    check: Callable[[Any], Finding | None]

    @property
    def chapter(self) -> str:
        return self.code.split("/")[0]

    @property
    def _parts(self) -> dict[str, str]:
        return {
            "What you see": self.symptom,
            "Why": self.cause,
            "How to confirm": self.confirm,
            "What to do": self.fix,
            "Read more": self.reference,
        }

    def page(self) -> str:
        """The catalogue page, in Markdown."""
        parts = "".join(f"\n**{head}.** {text}\n" for head, text in self._parts.items())
        return f"**{self.code}**: {self.title}\n{parts}"

    def text(self, columns: int | None = None, colour: bool = False) -> str:
        """The same page for a terminal: without markup, in lines of so many characters (as wide as the terminal).
        colour: with ANSI codes."""
        columns = columns or terminal_width()
        style = styled if colour else lambda text, name="": text
        parts = [
            f"{style(head + ':', 'bold')}\n{style(_filled(text, columns, '  '))}" for head, text in self._parts.items()
        ]
        return "\n\n".join([style(_filled(f"{self.code}: {self.title}", columns), "bold"), *parts]) + "\n"


def rule(**page: str) -> Callable[[Check], Check]:
    """Declare the function below as the rule of `code`. Raises ValueError when a code is declared twice."""

    def declare(check: Check) -> Check:
        declared = Rule(check=check, **page)
        known = _rules.get(declared.code)
        if known is not None and _name(known.check) != _name(check):
            raise ValueError(f"The code {declared.code!r} is declared twice: {_name(known.check)}, {_name(check)}")
        _rules[declared.code] = declared
        return check

    return declare


def _name(check: Callable[[Any], Finding | None]) -> str:
    return f"{check.__module__}.{check.__qualname__}"


def declared(module: str) -> tuple[Callable[[Any], Finding | None], ...]:
    """The checks that a module has declared so far, in their order."""
    return tuple(rule.check for rule in _rules.values() if rule.check.__module__ == module)


def rules(chapter: str | None = None) -> tuple[Rule, ...]:
    """All rules, or those of one chapter, in the order in which they are declared."""
    # a chapter asks for its own, and waits for no other
    for name in CHAPTERS if chapter is None else ELSEWHERE.get(chapter, (chapter,)):
        package = importlib.import_module(_HOMES[name])
        for part in getattr(package, "DECLARED", ()):
            if isinstance(part, str):  # a chapter that imports its rules one by one, as they are needed
                importlib.import_module(f"nbdebug.tools.errors.{part}")
    own = [page for _, page in _added.values()] if chapter is None else []
    return (*(r for r in _rules.values() if chapter in (None, r.chapter)), *own)


def look_up(code: str) -> Rule:
    """The rule of a code ("nan/overflow"; "overflow" will do). Raises KeyError, with the nearest codes, for others."""
    matches = [r for r in rules() if code in (r.code, r.code.split("/")[1])]
    if matches:
        return matches[0]
    near = difflib.get_close_matches(code, [r.code for r in rules()], n=3, cutoff=0.4)
    raise KeyError(f"No cause is called {code!r}." + (f" Did you mean {', '.join(near)}?" if near else ""))


def listing(columns: int | None = None) -> str:
    """Each cause with its title, in two columns; one below the other where there is little room (columns: as wide as
    the terminal)."""
    columns, first = columns or terminal_width(), max(len(rule.code) for rule in rules()) + 2
    lines = []
    for rule in rules():
        if columns - first < 30:
            lines += [rule.code, _filled(rule.title, columns, "    ")]
        else:
            head, *more = textwrap.wrap(rule.title, columns - first)
            lines += [f"{rule.code:{first}}{head}", *(" " * first + line for line in more)]
    return "\n".join(lines)


# -- pages of one's own -----------------------------------------------------------------------------------------------

FORM = """\
# team/old-labels: The labels are those of last year
## Symptom
Validation is good, and the users complain.
## Cause
`labels.csv` was not exported again.
## Confirm
Compare its date with that of the images.
## Fix
Run `export_labels.py`.
"""
"""A page of one's own. A file may have several."""
_SECTIONS = {"Symptom": "symptom", "Cause": "cause", "Confirm": "confirm", "Fix": "fix", "Read more": "reference"}
_CODE = re.compile(r"# ([a-z][a-z0-9-]*/[a-z0-9][a-z0-9-]*): (\S.*)")


def add_pages(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Add causes of one's own to the catalogue, beside nbdebug's, and return their codes.

    path: a Markdown file of pages. Each begins with `# chapter/what-is-wrong: One sentence`, and has the sections
    `## Symptom`, `## Cause`, `## Confirm`, `## Fix`, and, where you like, `## Read more`; `nbdebug.registry.FORM` is an
    example. `%explain CODE`, `%nbdebug catalogue` and the functions show them as any other page; `explain` offers a
    page where an error has no known cause and one of the symptoms stands in its message, a sentence of 18 letters or
    more. A file that is added again replaces its pages.

    Raises OSError for a file that can't be read, ValueError with the line for a page that has another form, or the code
    of another page.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no UTF-8 text: {error}") from None
    pages = list(_pages(path.name, lines))
    if not pages:
        raise ValueError(f"{path.name} has no page: a page begins with `# chapter/what-is-wrong: One sentence`")
    file = str(path.resolve())
    others = {r.code for r in rules()} - {code for code, (source, _) in _added.items() if source == file}
    for number, page in pages:
        if page.code in others:
            raise ValueError(f"{path.name}, line {number}: there is a page {page.code!r} already")
        others.add(page.code)
    for code in [code for code, (source, _) in _added.items() if source == file]:
        del _added[code]
    _added.update({page.code: (file, page) for _, page in pages})
    return tuple(page.code for _, page in pages)


def added(code: str) -> bool:
    """Whether this is a page of the user's own."""
    return code in _added


def _pages(name: str, lines: Sequence[str]) -> Iterator[tuple[int, Rule]]:
    """(line, page) of each page. Raises ValueError, with the line."""
    begins, fenced = [], False
    for number, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("# ") and not fenced:
            begins.append(number)
    for number in range(begins[0] if begins else len(lines)):
        if lines[number].strip() and not lines[number].lstrip().startswith("<!--"):
            raise ValueError(f"{name}, line {number + 1}: a page begins with `# chapter/what-is-wrong: One sentence`")
    for begin, end in zip(begins, [*begins[1:], len(lines)]):
        yield begin + 1, _page(name, begin + 1, lines[begin:end])


def _page(name: str, number: int, lines: Sequence[str]) -> Rule:
    head = _CODE.fullmatch(lines[0].strip())
    if head is None:
        raise ValueError(f"{name}, line {number}: a page begins with `# chapter/what-is-wrong: One sentence`")
    texts: dict[str, list[str]] = {}
    began: dict[str, int] = {}
    section, fenced = "", False
    for at, line in enumerate(lines[1:], number + 1):
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("## ") and not fenced:
            section = line[3:].strip().capitalize()
            if section not in _SECTIONS or section in texts:
                what = "stands twice" if section in texts else f"is none of {', '.join(_SECTIONS)}"
                raise ValueError(f"{name}, line {at}: the section {line[3:].strip()!r} {what}")
            texts[section], began[section] = [], at
        elif section:
            texts[section].append(line.strip())
        elif line.strip():
            raise ValueError(f"{name}, line {at}: text before the first section, `## Symptom`")
    for section in _SECTIONS:
        if section not in texts and section != "Read more":
            raise ValueError(f"{name}, line {number}: the page {head[1]!r} has no section `## {section}`")
        if section in texts and not "".join(texts[section]):
            raise ValueError(f"{name}, line {began[section]}: the section {section!r} is empty")
    parts = {field: " ".join(filter(None, texts.get(section, [name]))) for section, field in _SECTIONS.items()}
    return Rule(head[1], head[2].strip(), **parts, check=_never)


def _never(facts: Any) -> None:
    """A page of the user's own: no facts show it."""


def _filled(text: str, columns: int, indent: str = "") -> str:
    return textwrap.fill(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
