"""The catalogue: every cause that nbdebug can name, declared once.

A rule is one declaration: what is wrong, how it shows, why it happens, how to make sure, what to do, where to read
more, and the function that recognises it in a chapter's facts. The catalogue page, `nbdebug explain CODE`, the
notebooks' appendix and the tests all read that declaration; nothing is written twice.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import textwrap
from collections.abc import Callable
from typing import Any

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
_rules: dict[str, Rule] = {}


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


def rule(**page: str) -> Callable[[Callable[[Any], Finding | None]], Callable[[Any], Finding | None]]:
    """Declare the function below as the rule of `code`. Raises ValueError when a code is declared twice."""

    def declare(check: Callable[[Any], Finding | None]) -> Callable[[Any], Finding | None]:
        declared = Rule(check=check, **page)
        known = _rules.get(declared.code)
        if known is not None and _name(known.check) != _name(check):
            raise ValueError(f"The code {declared.code!r} is declared twice: {_name(known.check)}, {_name(check)}")
        _rules[declared.code] = declared
        return check

    return declare


def _name(check: Callable[[Any], Finding | None]) -> str:
    return f"{check.__module__}.{check.__qualname__}"


def rules(chapter: str | None = None) -> tuple[Rule, ...]:
    """All rules, or those of one chapter, in the order in which they are declared."""
    # a chapter asks for its own, and waits for no other
    for name in CHAPTERS if chapter is None else ELSEWHERE.get(chapter, (chapter,)):
        package = importlib.import_module(_HOMES[name])
        for part in getattr(package, "DECLARED", ()):
            if isinstance(part, str):  # a chapter that imports its rules one by one, as they are needed
                importlib.import_module(f"nbdebug.tools.errors.{part}")
    return tuple(r for r in _rules.values() if chapter in (None, r.chapter))


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


def _filled(text: str, columns: int, indent: str = "") -> str:
    return textwrap.fill(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
