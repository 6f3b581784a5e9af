"""A settings file, a mapping or an object, read as settings with their lines; and what people write wrong in JSON, YAML
and TOML, with the change that mends it, found by reading the mended text.

In JSON a line tells by itself what is no JSON in it: all such lines are mended at once. What a comma or a bracket is
missing from, and what is wrong in YAML and TOML, is tried: of the changes near the error the first with which the whole
text is read is taken, else the first with which it is read further.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import enum
import functools
import importlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbdebug.report import Edit
from nbdebug.text import module_name, size
from nbdebug.tools.config import parsers, tables
from nbdebug.tools.config.parsers import NUMBER_12, Flaw, Malformed, Node, Unknown, indent, line_of, line_span
from nbdebug.tools.config.tables import EXPONENTS

Candidate = tuple[int, int, str, str, str]
"""(start, end, the new text, what is wrong, the cure). No change adds or removes a line."""
Mend = tuple[str, str, str]
"""(a line as it would be, what is wrong, the cure)."""

WORDS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "yes": "true", "no": "false"}
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
SOUND = re.compile(
    rf'(?:[ \t{{}}\[\],:]|"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"|(?:true|false|null|{NUMBER.pattern})(?![\w.+-]))*'
)
"""Most lines of right JSON."""
CLOSED = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def quoted(text: str) -> str:
    return json.dumps(text.strip('"'), ensure_ascii=False)


def number(text: str) -> str:
    """One in another language's form, or text."""
    bare = text.replace("_", "").lstrip("+")
    try:
        value: float = int(bare, 16) if bare.lower().startswith("0x") else float(bare)
    except ValueError:
        return quoted(text)
    new = repr(int(value) if re.fullmatch(r"-?0*\d+|0[xX].*", bare) else value)
    return text if NUMBER.fullmatch(text) or text == "-Infinity" else new


def escaped(text: str) -> str:
    """Text in quotes with two backslashes for each that begins no escape, and for those beside it."""
    if not re.search(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})', text):
        return text
    return re.sub(r'\\(?!")', r"\\\\", text.replace("\\\\", "\\"))


FORMS: dict[str, Callable[[str], str]] = {
    "<quoted>": quoted,
    "<inner>": lambda text: json.dumps(text[1:-1], ensure_ascii=False),
    "<closed>": lambda text: escaped(text + '"'),
    "<single>": lambda text: "'" + text.strip("\"'").replace("'", "''") + "'",
    "<number>": number,
    "<word>": lambda text: WORDS.get(text, "null"),
    "<straight>": lambda text: tables.QUOTES[text],
}


def masked(text: str) -> str:
    """Its texts in quotes replaced by as many characters that stand nowhere else."""
    return CLOSED.sub(lambda match: "\ue000" * len(match[0]), text)


def changed(rows: tuple[tables.Row, ...], line: str, shown: str = "") -> Iterator[Mend]:
    """What the rows find in a line, or where `shown` has it, one after the other."""
    for pattern, form, what, cure in rows:
        mended, old, new = line, "", ""
        for match in reversed([*re.finditer(pattern, shown or line)]):
            start, end = match.span("x")
            old = line[start:end]
            new = FORMS[form](old) if form in FORMS else form.replace("{}", old)
            mended = mended[:start] + new + mended[end:]
        if mended != line:
            names = {"old": old.strip('"'), "new": new, "first": old[:1]}
            yield mended, what.format(**names), cure.format(**names)


# -- JSON -------------------------------------------------------------------------------------------------------------


def json_lines(text: str) -> tuple[str, list[Flaw]]:
    """(the text with all that no line of JSON can hold mended, the faults)."""
    flaws: dict[int, Flaw] = {}

    def told(line: int, column: int, what: str, cure: str) -> None:
        flaws.setdefault(line, Flaw(line, column + 1, what, cure, True))

    def blank(match: re.Match[str]) -> str:
        if match[0][0] == '"':
            return match[0]
        line = line_of(text, match.start())
        told(line, match.start() - line_span(text, line)[0], *tables.COMMENT)
        return "\n" * match[0].count("\n")

    def sound(match: re.Match[str]) -> str:
        new = re.sub(r"[\x00-\x1f]", lambda c: json.dumps(c[0])[1:-1], match[0])
        if new != match[0]:
            told(n, match.start(), "a tab or control character inside of text", "Write it as an escape, such as \\t.")
        elif (new := escaped(match[0])) != match[0]:
            told(n, match.start(), tables.PATH, "Write two, or a slash.")
        return new

    lines = re.sub(rf"{CLOSED.pattern}|/\*(?s:.*?)(?:\*/|\Z)", blank, text).split("\n")
    for n, line in enumerate(lines, 1):
        for row in (*tables.JSON_KEYS, *tables.JSON_ROWS) if SOUND.fullmatch(line) is None else ():
            line = CLOSED.sub(sound, line)
            for new, what, cure in changed((row,), line, masked(line) if row in tables.JSON_ROWS else ""):
                told(n, next((i for i, (a, b) in enumerate(zip(line, new)) if a != b), len(new)), what, cure)
                line = new
        lines[n - 1] = line
    return "\n".join(lines), list(flaws.values())


def json_candidates(text: str, fault: Unknown) -> Iterator[Candidate]:
    """Commas, colons and brackets, where the reader stops and where the indentation tells."""
    at, shown = fault.reached, masked(text)
    before, here = len(text[:at].rstrip()), text[at : at + 1]
    if text[before - 1 : before] == ":":
        return  # a value is missing
    left, dedents = _nesting(shown)
    opener, where, mark = _nesting(shown[:at])[0]
    comma = before - 1 if text[before - 1] == "," else at
    if here and here in "}],":
        if text[comma] == ",":
            yield comma, comma + 1, "", "a comma that no entry follows", "Remove it."
        else:
            yield at, at + 1, "", f"`{here}` closes nothing", "Remove it."
            what = f"`{here}` stands where `{mark}` closes line {where}"
            yield at, at + 1, mark + here if left[2] else mark, what, f"Write {mark}."
    never, cure = f"the `{opener}` of line {where} is not closed", f"Close it with {mark}."
    if left[2]:
        for end, line, close in dedents[:50]:
            what = f"the bracket of line {line} is not closed before the next entry"
            yield end, end, close, what, f"Close it with {close}."
        last = max(shown.rfind(c, 0, before) for c in ",[{")
        if here == ":" and mark == "]":
            yield last, last, mark, never, cure
    if mark == "]" and re.match(rf"{CLOSED.pattern}\s*:", text[at:]):
        yield before, before, "],", never, cure
    if not here and mark:
        yield min(comma, before), before, mark, never, cure
    yield before, before, ",", "no comma between this entry and the next", "Write a comma at its end."
    yield before, before, ":", "no colon between key and value", "Write a colon."
    yield before, before, f"{mark},", never, cure


def _nesting(shown: str) -> tuple[tuple[str, int, str], list[tuple[int, int, str]]]:
    """((bracket, its line, its closing mark) of the last that is open at the end; (where one closes, its line, its
    mark) for each with an entry below that stands no deeper than its line)."""
    start, last, stack, dedents = 0, 0, [("", 0, "", -1)], []
    for n, line in enumerate(shown.split("\n"), 1):
        _, opened, mark, depth = stack[-1]
        if line.strip() and line.strip()[0] not in "]}," and len(stack) > 2 and indent(line) <= depth:
            dedents.append((last, opened, mark))
        for bracket in re.findall(r"[\[\]{}]", line):
            if bracket in "[{":
                stack.append((bracket, n, "]" if bracket == "[" else "}", indent(line)))
            elif len(stack) > 1:
                stack.pop()
        last = start + len(line.rstrip().rstrip(",")) if line.strip() else last
        start += len(line) + 1
    return stack[-1][:3], dedents


# -- YAML and TOML ----------------------------------------------------------------------------------------------------


def yaml_candidates(text: str, fault: Unknown) -> Iterator[Candidate]:
    """In the error's own line, in what it belongs to, and in the text before it."""
    lines, line, opened = text.split("\n"), line_of(text, fault.reached), line_of(text, fault.context)
    before = next((n for n in range(line - 1, 0, -1) if lines[n - 1].strip() and lines[n - 1].strip()[0] != "#"), 0)
    odd = [n for n in range(line, 0, -1) if _odd_quote(lines[n - 1])]
    for numbers, mends in (
        ((line, opened, before), _tabs),
        (odd[:3], _unclosed_quote),
        ((line, opened, before), lambda lines, n: _brackets(lines[n - 1])),
        ((before, opened, line), lambda lines, n: changed(tables.YAML_COLONS, lines[n - 1])),
        ((line, opened, before), lambda lines, n: changed(tables.YAML_VALUES, lines[n - 1])),
        ((line, before), _indents),
    ):
        for n in dict.fromkeys(numbers):
            if 0 < n <= len(lines):
                yield from ((*line_span(text, n), *mend) for mend in mends(lines, n))


def toml_candidates(text: str, fault: Unknown) -> Iterator[Candidate]:
    lines, line = text.split("\n"), line_of(text, fault.reached)
    openers = [n for n in range(line, 0, -1) if next(_brackets(lines[n - 1]), ("", "", "Remove"))[2] != "Remove it."]
    quotes = [n for n in range(line, 0, -1) if any(lines[n - 1].count(quote) % 2 for quote in "\"'")]
    braces = re.compile(r"=\s*\{[ \t]*\n[^{}]*\}").search(text, line_span(text, (openers or [line])[0])[0])
    if braces is not None:
        inner = re.sub(r"\s+#.*|,\s*(?=\}$)", "", braces[0])
        new = re.sub(r"\s+", " ", inner) + "\n" * braces[0].count("\n")
        yield *braces.span(), new, "a table in braces goes over several lines", "Write it in one line."
    for n in dict.fromkeys((line, *openers[:1], *quotes[:1], line - 1)):
        if 0 < n <= len(lines) and (text_of := lines[n - 1]).strip():
            for mend in (*changed(tables.TOML_ROWS, text_of), *_brackets(text_of), *changed(tables.TOML_TEXT, text_of)):
                yield *line_span(text, n), *mend


def _tabs(lines: list[str], n: int) -> Iterator[Mend]:
    text = lines[n - 1]
    head = text[: len(text) - len(text.lstrip(" \t\u00a0"))]
    for odd, what in (("\t", "a tab"), ("\u00a0", "an invisible no-break space")):
        if odd in head:
            for width in _widths(lines, n):
                yield " " * width + text[len(head) :], f"{what} in the indentation", "Indent with spaces."
    if "\t" in text[len(head) :]:
        yield head + text[len(head) :].replace("\t", " "), "a tab between key and value", "Write a space."


def _indents(lines: list[str], n: int) -> Iterator[Mend]:
    text = lines[n - 1]
    for width in _widths(lines, n):
        what = f"it is indented by {indent(text)} spaces, unlike the lines it belongs to"
        yield " " * width + text.lstrip(), what, f"Indent it by {width}."


def _widths(lines: list[str], n: int) -> list[int]:
    """Indentations in use above a line, the nearest first, and the usual ones; in front what the next line tells: one
    that stands deeper than all above belongs to this one."""
    above = [indent(text) for text in reversed(lines[: n - 1]) if text.strip() and "\t" not in text[: indent(text)]]
    text = lines[n - 1].replace("\u00a0", " ")
    own = len(text[: indent(text)].expandtabs(4))
    below = [indent(line) for line in lines[n : n + 3] if line.strip() and "\t" not in line[: indent(line)]]
    return list(dict.fromkeys([*([own] if own in above else []), *above[:12], own, *below[:1], 2, 4, 0]))


def _odd_quote(text: str) -> bool:
    value = re.sub(r"\s#.*", "", text.partition(": ")[2] or text).strip().removeprefix("- ")
    quote = value[:1]
    return quote in ("'", '"') and value.replace("\\" + quote, "").count(quote) % 2 == 1


def _unclosed_quote(lines: list[str], n: int) -> Iterator[Mend]:
    bare, mark, remark = lines[n - 1].partition(" #")
    quote = next(c for c in bare if c in "\"'")
    new = bare.rstrip() + quote + (f"  #{remark}" if mark else "")
    yield new, "text without its closing quote", f"Close it with {quote}."


def _brackets(text: str) -> Iterator[Mend]:
    bare = re.sub(r"\s+#.*", "", text).rstrip()
    for opener, mark in ("[]", "{}"):
        if text.count(opener) > text.count(mark):
            yield bare.rstrip(",") + mark, f"`{opener}` is not closed", f"Close it with {mark}."
        elif text.count(opener) < text.count(mark):
            place = text.rindex(mark)
            yield text[:place] + text[place + 1 :], f"`{mark}` closes nothing", "Remove it."
    if bare.endswith((",", ";")):
        yield bare.rstrip(",;"), "a comma at the end of the line", "Remove it."


# -- reading ----------------------------------------------------------------------------------------------------------

SYNTAXES: dict[str, tuple[Callable[[str], Any], Callable[[str, Any], Node], Callable[..., Iterator[Candidate]]]] = {
    "JSON": (parsers.load_json, parsers.json_tree, json_candidates),
    "YAML": (parsers.load_yaml, parsers.yaml_tree, yaml_candidates),
    "TOML": (parsers.load_toml, parsers.toml_tree, toml_candidates),
}
LONGEST = 200_000
"""Characters of YAML or TOML of which changes are tried: each is read whole, and slowly."""


def readings(text: str, form: str, most: int = 20) -> tuple[Node | None, list[Flaw], str]:
    """(what it says, its faults, the mended text). Each fault is mended to see the next; what it says is None where one
    can't be. The lines stay the same, in number and in order."""
    load, tree, _ = SYNTAXES[form]
    flaws: dict[int, Flaw] = {}
    root, by_line = None, form == "JSON"
    for _ in range(most):
        try:
            if text.startswith("\ufeff") and form != "YAML":
                what = "an invisible byte order mark (BOM) stands before the first character"
                raise Malformed(0, what, "Save the file as UTF-8 without a byte order mark.", (0, 1, ""))
            root = tree(text, load(text))
            break
        except (Malformed, RecursionError) as error:
            deep = Malformed(0, "it is nested too deep", "Write it flatter.")
            fault = error if isinstance(error, Malformed) else deep
            if by_line and isinstance(fault, Unknown):
                text, found = json_lines(text)
                by_line, flaws = False, {**{flaw.line: flaw for flaw in found}, **flaws}
                continue
            best = (_helped(text, form, fault) if isinstance(fault, Unknown) else None) or fault
            line = line_of(text, best.offset)
            column = best.offset - line_span(text, line)[0] + 1
            flaws.setdefault(line, Flaw(line, column, best.what, best.cure, best.mend is not None))
            if best.mend is None:
                break
            start, end, new = best.mend
            text = text[:start] + new + text[end:]
    return root, [flaws[line] for line in sorted(flaws)], text


def _reached(text: str, load: Callable[[str], Any]) -> float:
    """How far a text is read, as an offset; infinite where it is read whole."""
    try:
        load(text)
    except Unknown as fault:
        return fault.reached
    except (Malformed, RecursionError):
        return -1
    return math.inf


def _helped(text: str, form: str, fault: Unknown) -> Malformed | None:
    load, _, candidates = SYNTAXES[form]
    best: Malformed | None = None
    for start, end, new, what, cure in candidates(text, fault) if form == "JSON" or len(text) <= LONGEST else ():
        after = _reached(text[:start] + new + text[end:], load)
        if after > max(fault.reached, end) + abs(len(new) - (end - start)) and (best is None or after == math.inf):
            offset = start + next((i for i, (a, b) in enumerate(zip(text[start:end], new)) if a != b), 0)
            best = Malformed(min(offset, end), what, cure, (start, end, new))
        if after == math.inf:
            return best
    return best


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
    if module_name(type(thing)).startswith("omegaconf"):
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
