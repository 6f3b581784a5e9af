"""The settings of a run as plain values, with the line of each, and what each of them may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.report import Edit


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value. key: dotted, as it stands in the file; line: of the key, from 1, None where there is no file; word:
    the value as it stands there; quoted: whether that is text in quotes; earlier: the lines (and words) of the same key
    further up in the same section; number: what YAML 1.2 sees in a word that is text to YAML 1.1."""

    key: str
    value: Any
    line: int | None = None
    word: str = ""
    quoted: bool = False
    earlier: tuple[tuple[int, str], ...] = ()
    number: float | None = None
    section: bool = False

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.key.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a setting may be. type: int, float, str, bool, list or object; below: exclusive; multiple_of: a number or
    another key; less_than, at_most, not_with: another key; when: a key, and the rules about other keys hold only where
    it is true; exists: file or folder; null: whether it may be left empty; lenient: only what is surely wrong counts
    (text that holds no number may be a word of the program's own, such as "auto"); source: who says so."""

    type: str | None = None
    min: float | None = None
    max: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    multiple_of: str | float | None = None
    less_than: str | None = None
    at_most: str | None = None
    not_with: str | None = None
    when: str | None = None
    exists: str | None = None
    null: bool = False
    lenient: bool = False
    source: str = "the schema"


@dataclasses.dataclass(frozen=True)
class ConfigFacts:
    """A whole file. settings: by key, sections too; expected: by key; closed: whether other keys are unknown; absent:
    paths that do not exist, with the same path without white space or invisible characters where that one does; near:
    misspelt keys, with the usual one; others: (key, name of the object, its value there) where an object differs."""

    file: str | None
    format: str
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, Expectation] = dataclasses.field(default_factory=dict)
    closed: bool = False
    absent: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    lines: tuple[str, ...] = ()
    near: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[tuple[str, str, Any], ...] = ()

    def edit(self, setting: Setting, old: str, new: str) -> Edit | None:
        """The setting's line with one piece replaced; None where the piece does not stand there once."""
        if self.file is None or setting.line is None:
            return None
        line = self.lines[setting.line - 1]
        if not old or line.count(old) != 1:
            return None
        return Edit(self.file, setting.line, setting.line, line, line.replace(old, new))


@dataclasses.dataclass(frozen=True)
class OneSetting:
    """What a rule is asked about: one setting, among the others."""

    setting: Setting
    facts: ConfigFacts

    @property
    def expected(self) -> Expectation:
        return self.facts.expected.get(self.setting.key, Expectation(lenient=True))

    def value(self, key: str | None) -> Any:
        other = self.facts.settings.get(key) if key else None
        return other.value if other is not None and not other.section else None
