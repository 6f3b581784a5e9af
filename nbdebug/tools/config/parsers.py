"""JSON, YAML (1.1, as PyYAML's `safe_load` reads it) and TOML with the place of every value.

The standard library and ruamel.yaml read; the places, which they keep to themselves, are found here. No tag is built,
and an alias is followed only so far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import json.scanner
import re
from collections.abc import Callable, Iterator
from typing import Any

from nbdebug.tools.config.tables import JSON_SAYS


@dataclasses.dataclass
class Node:
    """A value as it stands in the text. start, end: offsets; quoted: whether it is text in quotes; entries: (key,
    offset of the key, node) of a mapping; items: of a list."""

    value: Any
    start: int
    end: int
    quoted: bool = False
    entries: list[tuple[str, int, Node]] | None = None
    items: list[Node] | None = None

    @property
    def plain(self) -> Any:
        if self.entries is not None:
            return {key: node.plain for key, _, node in self.entries}
        return [node.plain for node in self.items] if self.items is not None else self.value


class Malformed(Exception):
    """The text can't be read. offset: where it must be mended; mend: (start, end, new text) of the change, or None. No
    change adds or removes a line."""

    def __init__(self, offset: int, what: str, cure: str, mend: tuple[int, int, str] | None = None) -> None:
        super().__init__(what)
        self.offset, self.what, self.cure, self.mend = offset, what, cure, mend


@dataclasses.dataclass(frozen=True)
class Flaw:
    """A fault of syntax. line, column: from 1; mended: whether a change is known."""

    line: int
    column: int
    what: str
    cure: str
    mended: bool


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def line_span(text: str, line: int) -> tuple[int, int]:
    """Where a line begins and ends, without its line break."""
    lines = text.split("\n", line)[:line]
    end = len("\n".join(lines))
    return end - len(lines[-1]), end


def indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


MOST = 100_000
"""Nodes, aliases followed; more is a file that explodes, or no settings."""


class Unknown(Malformed):
    """A fault of which no cure is known yet. reached: the offset where the parser stopped; context: of what it belongs
    to, which is shown where that is the fault (late)."""

    def __init__(self, reached: int, what: str, context: int = -1, late: bool = False, cure: str = "") -> None:
        self.reached, self.context = reached, reached if context < 0 else context
        super().__init__(self.context if late else reached, what, cure or "Look at this line and above it.")


# -- JSON -------------------------------------------------------------------------------------------------------------


def load_json(text: str) -> None:
    try:
        if not text.strip():
            raise Malformed(0, "the file is empty", "Write {} for no settings at all.")
        json.loads(text)
    except json.JSONDecodeError as error:
        what, cure = JSON_SAYS.get(error.msg, (f"JSON cannot be read here: {error.msg}", ""))
        missing = error.msg == "Expecting value" and text[error.pos : error.pos + 1] in ",}]:"
        raise Unknown(error.pos, what, max(len(text[: error.pos].rstrip()) - 1, 0), missing, cure) from None
    except ValueError as error:  # a number of more than 4300 digits
        raise Malformed(0, str(error), "Write a smaller number.") from None


def json_tree(text: str, _: None) -> Node:
    """Python's own reader, whose values note their place."""
    decoder: Any = json.JSONDecoder()
    own: Any = json.decoder

    def one(text: str, at: int) -> tuple[Node, int]:
        value, end = scan(text, at)
        return value if isinstance(value, Node) else Node(value, at, end, isinstance(value, str)), end

    def mapping(at: tuple[str, int], *_: Any) -> tuple[Node, int]:
        pairs, end = own.JSONObject(at, True, one, None, list, {})
        entries, before = [], at[1]
        for key, node in pairs:
            entries.append((key, text.index('"', before), node))
            before = node.end
        return Node(None, at[1] - 1, end, entries=entries), end

    def sequence(at: tuple[str, int], *_: Any) -> tuple[Node, int]:
        items, end = own.JSONArray(at, one)
        return Node(None, at[1] - 1, end, items=items), end

    decoder.parse_object, decoder.parse_array = mapping, sequence
    scan = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return one(text, len(text) - len(text.lstrip(" \t\r\n")))[0]


# -- YAML -------------------------------------------------------------------------------------------------------------

NUMBER_12 = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
"""A number of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#1032-tag-resolution), which OmegaConf and
jsonargparse see, too."""


class Date(str):
    """A word that YAML 1.1 turns into a date."""


def _yaml() -> Any:
    try:
        yaml = importlib.import_module("ruamel.yaml").YAML(typ="safe", pure=True)
    except ImportError:
        raise ImportError("YAML needs ruamel.yaml: pip install 'torch-nbdebug[config]'") from None
    yaml.version = (1, 1)
    return yaml


WORDS = functools.cache(_yaml)
"""For single words: one that has read a file knows that file's version."""


def plain(text: str) -> Any:
    """What PyYAML makes of a word without quotes; a date stays text here, marked by its type. ruamel's YAML 1.1 takes
    more words for floats, and y and n for switches (yaml/resolver.py of PyYAML 6.0)."""
    node = importlib.import_module("ruamel.yaml.nodes").ScalarNode("", text)
    kind = str(WORDS().resolver.resolve(type(node), text, (True, False))).rpartition(":")[2]
    if kind == "timestamp":
        return Date(text)
    other = kind == "float" and ("." not in text or text[:2] == "._" or re.search(r"[eE]\d", text))
    if other or text in tuple("yYnN") or kind not in ("bool", "int", "float", "null"):
        return text
    try:
        return getattr(WORDS().constructor, f"construct_yaml_{kind}")(node)
    except ValueError:
        return text


def load_yaml(text: str) -> Any:
    """ruamel's tree. ImportError where it is not installed."""
    yaml = _yaml()
    try:
        root = yaml.compose(text)
    except RecursionError:
        raise
    except Exception as error:  # ruamel's scanner, parser, composer and reader have no common class
        fault: Any = error
        belongs, position = getattr(fault, "context_mark", None), getattr(fault, "position", 0)
        mark = getattr(fault, "problem_mark", None) or belongs
        at = min(mark.index if mark is not None else position, len(text))
        problem = str(getattr(fault, "problem", None) or getattr(fault, "reason", None) or fault).splitlines()[0]
        late = re.search("end of stream|could not find expected|',' or", problem) is not None
        context = belongs.index if belongs is not None else at
        raise Unknown(at, f"YAML cannot be read here: {problem}", context, late) from None
    if type(root).__name__ == "ScalarNode":
        match = re.search(r"^(\s*[\w.-]+):(?=\S)", text, re.MULTILINE)
        mend = (match.end(), match.end(), " ") if match and "\n" not in text.strip() else None
        at = match.start() if match else root.start_mark.index
        raise Malformed(at, "the whole file is one text, no settings", "Write a space behind each colon.", mend)
    return root


def yaml_tree(text: str, root: Any) -> Node:
    count, above = 0, list[int]()

    @contextlib.contextmanager
    def inside(tree: Any, at: int, what: str, cure: str) -> Iterator[None]:
        if count > MOST or id(tree) in above:
            raise Malformed(at, what, cure)
        above.append(id(tree))
        yield
        above.pop()

    def one(tree: Any) -> Node:
        nonlocal count
        start, end, kind = tree.start_mark.index, tree.end_mark.index, type(tree).__name__
        count += 1
        with inside(tree, start, "aliases that repeat themselves without end", "Write the values out."):
            items = [one(item) for item in tree.value] if kind == "SequenceNode" else None
            pairs = [*entries(tree)] if kind == "MappingNode" else None
        if kind != "ScalarNode":
            return Node(None, start, end, entries=pairs, items=items)
        tagged = text[start : start + 1] == "!" or not str(tree.tag or "").startswith("tag:yaml.org,2002:")
        quoted = bool(tree.style) or tagged and not str(tree.tag).endswith((":int", ":float", ":bool", ":null"))
        return Node(tree.value if quoted else plain(tree.value), start, end, quoted)

    def entries(tree: Any) -> Iterator[tuple[str, int, Node]]:
        """Those of the mapping, and those that `<<` merges in where it has none of its own."""
        names = {str(key.value) for key, _ in tree.value if key.value != "<<" or key.style}
        for key, value in tree.value:
            at = key.start_mark.index
            if type(key).__name__ != "ScalarNode":
                what = "braces without quotes are a mapping to YAML, and no key can be one"
                raise Malformed(at, what, "Put the whole value into quotes.")
            if key.value != "<<" or key.style:
                yield str(key.value), at, one(value)
                continue
            bases = value.value if type(value).__name__ == "SequenceNode" else [value]
            for base in bases if all(type(b).__name__ == "MappingNode" for b in bases) else ():
                with inside(base, at, "a mapping that is merged into itself", "Remove the merge."):
                    merged = [entry for entry in entries(base) if entry[0] not in names]
                names |= {name for name, _, _ in merged}
                yield from merged

    return one(root) if root is not None else Node(None, 0, 0, entries=[])


# -- TOML -------------------------------------------------------------------------------------------------------------

KEY = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
ENTRY = re.compile(rf"\s*({KEY}(?:\s*\.\s*{KEY})*)\s*=\s*")
AGAIN = "stands-again-in-line-{}"
"""In the place of a table's name that was there before: a doubled key is no fault of the text, but a doubled entry."""


def load_toml(text: str) -> tuple[dict[str, Any], list[int]]:
    """(what tomllib makes of it, the lines of doubled entries). ImportError where Python 3.10 lacks tomli."""
    lines, doubled = text.split("\n"), list[int]()
    while True:
        try:
            return _toml()("\n".join(lines)), doubled
        except ValueError as error:
            place = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
            at = line_span(text, int(place[1]))[0] + int(place[2]) - 1 if place and place[1] else len(text)
            last = first = line_of(text, min(at, len(text) - 1))
            while first > 1 and not (ENTRY.match(lines[first - 1]) or TABLE.match(lines[first - 1])):
                first -= 1
            if first in doubled or not re.match("Cannot (?:overwrite|declare|mutate)", str(error)):
                end = max(len(text.rstrip()) - 1, 0)
                what = f"TOML cannot be read here: {str(error)[: place.start() if place else None]}"
                raise Unknown(at, what, min(at, end), True) from None
            lines[first - 1 : last] = ["#"] * (last - first + 1)
            if TABLE.match(text.split("\n")[first - 1]):
                lines[first - 1] = f"[{AGAIN.format(first)}]"
            doubled.append(first)


def _toml() -> Callable[[str], dict[str, Any]]:
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name).loads
    raise ImportError("TOML needs tomli on Python 3.10: pip install 'torch-nbdebug[config]'")


def toml_tree(text: str, loaded: tuple[dict[str, Any], list[int]]) -> Node:
    data, doubled = loaded
    places: dict[str, tuple[int, int]] = {}
    again = []
    for key, at, start in _places(text):
        places.setdefault(key, (at, start))
        if (line := line_of(text, at)) in doubled:
            again.append((key, at, start, data.pop(AGAIN.format(line), None)))

    def one(value: Any, key: str) -> Node:
        at, start = places.get(key, (0, 0))
        end, inside = line_span(text, line_of(text, start))[1], f"{key}." if key else ""
        if isinstance(value, dict):
            parts = [(name, places.get(inside + name, (at, 0))[0], one(v, inside + name)) for name, v in value.items()]
            return Node(None, start, end, entries=parts)
        if isinstance(value, list):
            return Node(None, start, end, items=[one(v, f"{inside}{i}") for i, v in enumerate(value)])
        stop = re.match(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^#]*", text[start:end])
        return Node(value, start, start + len(stop[0].rstrip()) if stop and start else end, isinstance(value, str))

    root = one(data, "")
    for key, at, start, table in again:
        node, (*above, name) = root, key.split(".")
        for part in above:
            node = next((n for other, _, n in reversed(node.entries or []) if other == part), node)
        word = text[start : line_span(text, line_of(text, start))[1]].strip()
        entry = one(table, key) if table is not None else Node(word, start, start + len(word), True)
        node.entries = [*(node.entries or ()), (name, at, entry)]
    return root


def _places(text: str) -> Iterator[tuple[str, int, int]]:
    """(dotted key, where it stands, where its value begins) of each line with a key or a table."""
    table, counts, start, fence = list[str](), dict[str, int](), 0, ""
    for line in text.split("\n"):
        if fence:
            fence = "" if fence in line else fence
        elif match := TABLE.match(line):
            table, at = _parts(match[2]), start + match.start(2)
            if match[1] == "[[":
                key = ".".join(table)
                yield key, at, at
                counts[key] = counts.get(key, -1) + 1
                table.append(str(counts[key]))
            yield ".".join(table), at, at
        elif match := ENTRY.match(line):
            yield ".".join([*table, *_parts(match[1])]), start + match.start(1), start + match.end()
            fence = next((f for f in ('"""', "'''") if line.count(f) == 1), "")
        start += len(line) + 1


def _parts(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", key)]
