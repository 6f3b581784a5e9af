"""A settings file, a mapping or an object, read as settings with their lines."""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import enum
import functools
import importlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.report import Edit
from nbdebug.text import size
from nbdebug.tools.config.mends import readings
from nbdebug.tools.config.parsers import NUMBER_12, Flaw, Node
from nbdebug.tools.config.tables import EXPONENTS


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
    paths that do not exist, with the same path without white space or invisible characters where that one does; beside:
    those with a path of nearly the same name that does; near: misspelt keys, with the usual one; others: (key, name of
    the object, its value there) where an object differs."""

    file: str | None
    format: str
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, Expectation] = dataclasses.field(default_factory=dict)
    closed: bool = False
    absent: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lines: tuple[str, ...] = ()
    near: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[tuple[str, str, Any], ...] = ()

    def edit(self, setting: Setting, old: str, new: str) -> Edit | None:
        """The setting's line with another key or value; None where the old one does not stand there, or in more than
        one place."""
        if self.file is None or setting.line is None or not old:
            return None
        line = self.lines[setting.line - 1]
        match = re.search(rf"(?<![\w-])[\"']?({re.escape(setting.name)})[\"']?\s*[:=]\s*", line)
        places = [match.start(1), match.end()] if match is not None else [line.find(old)] * (line.count(old) == 1)
        at = next((place for place in places if line.startswith(old, place)), None)
        if at is None or old == setting.word and match is not None and at != match.end():
            return None
        return Edit(self.file, setting.line, setting.line, line, line[:at] + new + line[at + len(old) :])

    def without(self, setting: Setting, number: int) -> Edit | None:
        """The setting's entry in this line removed; None where the line holds anything else, or its value goes on."""
        if self.file is None or number >= len(self.lines):
            return None
        line, after = self.lines[number - 1 : number + 1]
        name = rf"[\"']?{re.escape(setting.name)}[\"']?\s*[:=]"
        indents = [len(text) - len(text.lstrip()) for text in (line, after)]
        if not re.fullmatch(rf"\s*{name}\s*[^\s\[{{|>].*", line) or indents[1] > indents[0] and after.strip():
            return None
        if after.strip():
            return Edit(self.file, number, number + 1, f"{line}\n{after}", after)
        before = self.lines[number - 2] if number > 1 else ""
        return Edit(self.file, number - 1, number, f"{before}\n{line}", before) if before.strip() else None


@dataclasses.dataclass(frozen=True)
class OneSetting:
    """What a rule is asked about: one setting, among the others."""

    setting: Setting
    facts: ConfigFacts

    @property
    def expected(self) -> Expectation:
        return self.facts.expected.get(self.setting.key, Expectation(lenient=True))

    @property
    def kind(self) -> str:
        return "section" if self.setting.section else "key"

    @property
    def active(self) -> bool:
        """Whether its rules about other keys hold."""
        return self.expected.when is None or self.value(self.expected.when) is True

    def value(self, key: str | None) -> Any:
        other = self.facts.settings.get(key) if key else None
        return other.value if other is not None and not other.section else None


LARGEST = 10 * 2**20
"""Bytes of a file that is read."""
FORMATS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}


@dataclasses.dataclass
class Document:
    """text: as it stands; mended: with what could be mended of its syntax; root: None where it can't be read."""

    file: str | None
    format: str
    text: str
    mended: str
    root: Node | None
    flaws: list[Flaw]

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        return {setting.key: setting for setting in _settings(self)}

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.text.split("\n"))


def read(thing: Any) -> Document:
    """thing: a path, or an object with settings. Raises OSError for a file that can't be opened, ValueError for one
    that is too large or of another format, TypeError for an object without settings."""
    if isinstance(thing, (str, pathlib.PurePath)):
        path = pathlib.Path(thing)
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path.name} is larger than {size(LARGEST)}; settings are not.")
        return parsed(path.read_bytes(), str(thing), path.suffix.lower())
    return Document(None, type(thing).__name__, "", "", _of_value(_mapping(thing)), [])


def parsed(raw: bytes, file: str, suffix: str) -> Document:
    """A file's contents as a document. Raises ValueError for another format than JSON, YAML and TOML."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line, column = raw.count(b"\n", 0, error.start) + 1, error.start - raw.rfind(b"\n", 0, error.start)
        flaw = Flaw(line, column, "bytes that are no UTF-8", "Save the file as UTF-8.", False)
        text = raw.decode("latin-1")
        return Document(file, FORMATS.get(suffix, "text"), text, text, None, [flaw])
    if suffix not in (*FORMATS, "", ".txt", ".conf", ".config", ".cfg"):
        raise ValueError(f"check_config reads JSON, YAML and TOML; a file that ends in {suffix} is none of them.")
    equals = re.search(r"^\s*[\w.-]+\s*=", text, re.MULTILINE)
    braces = text.lstrip("\ufeff \t\r\n").startswith(("{", "["))
    form = FORMATS.get(suffix, "JSON" if braces else "TOML" if equals else "YAML")
    root, flaws, mended = readings(text, form)
    return Document(file, form, text, mended, root, flaws)


def _mapping(thing: Any) -> Mapping[Any, Any]:
    if type(thing).__module__.startswith("omegaconf"):
        thing = importlib.import_module("omegaconf").OmegaConf.to_container(thing, resolve=False)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        thing = {f.name: getattr(thing, f.name, None) for f in dataclasses.fields(thing) if not f.name.startswith("_")}
    elif hasattr(thing, "model_dump") and not isinstance(thing, type):
        thing = thing.model_dump()
    elif isinstance(thing, argparse.Namespace):
        thing = vars(thing)
    if isinstance(thing, Mapping):
        return thing
    takes = "a path, a dict, a dataclass, a pydantic model, an argparse Namespace or an OmegaConf config"
    raise TypeError(f"check_config takes {takes}; got {type(thing).__name__}.")


def _of_value(value: Any, depth: int = 0) -> Node:
    value = value.value if isinstance(value, enum.Enum) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _mapping(value)
    if isinstance(value, Mapping) and depth < 100:
        return Node(None, 0, 0, entries=[(str(key), 0, _of_value(inner, depth + 1)) for key, inner in value.items()])
    if isinstance(value, (list, tuple)) and depth < 100:
        return Node(None, 0, 0, items=[_of_value(inner, depth + 1) for inner in value])
    return Node(value, 0, 0, quoted=isinstance(value, str))


def _settings(document: Document) -> Iterator[Setting]:
    text, yaml = document.mended, document.format == "YAML"
    takes_exponents = yaml and re.search(EXPONENTS, text) is not None
    breaks = [match.start() for match in re.finditer("\n", text)]

    def below(prefix: str, node: Node) -> Iterator[Setting]:
        grouped = {str(n): [(item.start, item)] for n, item in enumerate(node.items or ()) if item.entries is not None}
        for name, at, inner in node.entries or ():
            grouped.setdefault(name, []).append((at, inner))
        for name, found in grouped.items():
            key, (at, one) = prefix + name, found[-1]
            word = text[one.start : one.end] if one.entries is None and one.items is None else ""
            bare = yaml and not one.quoted and isinstance(one.value, str)
            number = float(word) if bare and NUMBER_12.fullmatch(word) else None
            value = number if takes_exponents and number is not None else one.plain
            line = bisect.bisect_left(breaks, at) + 1 if document.file is not None else None
            earlier = tuple((bisect.bisect_left(breaks, at) + 1, text[n.start : n.end]) for at, n in found[:-1])
            yield Setting(key, value, line, word, one.quoted, earlier, number, one.entries is not None)
            yield from below(f"{key}.", one)

    if document.root is not None:
        yield from below("", document.root)
