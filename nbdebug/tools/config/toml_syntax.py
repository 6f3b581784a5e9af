"""TOML with the place of every value. `tomllib` reads it; the lines are found here."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from nbdebug.tools.config.syntax import QUOTES, Candidate, Malformed, Node, first_that_helps, line_of, line_span

PLACE = re.compile(r"\(at (?:line (\d+), column (\d+)|end of document)\)")
TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
ENTRY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=\s*""")


def loads(text: str) -> dict[str, Any]:
    """Raises ValueError for what is no TOML, ImportError where Python 3.10 lacks tomli."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name).loads(text)
        except ModuleNotFoundError:
            continue
    raise ImportError("TOML needs tomli on Python 3.10: pip install 'torch-nbdebug[config]'")


def error_offset(text: str, error: ValueError) -> int:
    match = PLACE.search(str(error))
    if match is None or match[1] is None:
        return len(text)
    return line_span(text, int(match[1]))[0] + int(match[2]) - 1


def reached(text: str) -> float:
    try:
        loads(text)
    except ValueError as error:
        return float(error_offset(text, error))
    return float("inf")


def parse_toml(text: str) -> Node:
    """The document as a node. Raises Malformed; a key that stands twice is no fault of the text, but a doubled
    entry.
    """
    if text.startswith("\ufeff"):
        cure = "Save the file as UTF-8 without a byte order mark."
        raise Malformed(0, "an invisible byte order mark (BOM) stands before the first character", cure, (0, 1, ""))
    doubled: list[tuple[int, int]] = []
    while True:
        try:
            data = loads(_without(text, doubled))
            break
        except ValueError as error:
            at = error_offset(text, error)
            span = _doubled(text, at, str(error))
            if span is None or span in doubled or len(doubled) > 50:
                raise _diagnosis(_without(text, doubled), error, at) from None
            doubled.append(span)
    places = list(_places(text))
    node = _node(data, "", places, text)
    for start, end in doubled:
        for key, offset, value in places:
            if start <= offset < end:
                _add(node, key.split("."), Node(text[value:end].strip(), value, end, quoted=True), offset)
    return node


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    for start, end in spans:
        text = text[:start] + "#" + "-" * (end - start - 1) + text[end:]
    return text


def _doubled(text: str, at: int, message: str) -> tuple[int, int] | None:
    """The line of an entry that stands a second time."""
    if "Cannot overwrite" not in message and "Cannot declare" not in message and "Cannot mutate" not in message:
        return None
    line = line_of(text, min(at, len(text) - 1))
    start, end = line_span(text, line)
    while start and not (ENTRY.match(text[start:end]) or TABLE.match(text[start:end])):
        line -= 1
        start, end = line_span(text, line)
    return (start, end) if end > start else None


def _add(node: Node, key: list[str], value: Node, offset: int) -> None:
    for part in key[:-1]:
        node = next((n for name, _, n in reversed(node.entries or []) if name == part), node)
    if node.entries is not None:
        node.entries.append((key[-1], offset, value))


def _places(text: str) -> Iterator[tuple[str, int, int]]:
    """(dotted key, where it stands, where its value begins) of each line with a key or a table."""
    table, counts, start, fence = "", dict[str, int](), 0, ""
    for line in text.split("\n"):
        if fence:
            fence = "" if fence in line else fence
        elif match := TABLE.match(line):
            table = ".".join(_parts(match[2]))
            offset = start + match.start(2)
            if match[1] == "[[":
                yield table, offset, offset
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            yield table, offset, offset
        elif match := ENTRY.match(line):
            key = ".".join([*([table] if table else []), *_parts(match[1])])
            yield key, start + match.start(1), start + match.end()
            fence = next((f for f in ('"""', "'''") if line.count(f) == 1), "")
        start += len(line) + 1


def _parts(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", key)]


def _node(value: Any, key: str, places: list[tuple[str, int, int]], text: str) -> Node:
    at, start = next(((at, begin) for name, at, begin in places if name == key), (0, 0))
    end = line_span(text, line_of(text, start))[1]
    inside = f"{key}." if key else ""
    if isinstance(value, dict):
        entries = []
        for name, inner in value.items():
            node = _node(inner, inside + name, places, text)
            known = next((at for other, at, _ in places if other == inside + name), at)
            entries.append((name, known, node))
        return Node(None, start, end, entries=entries)
    if isinstance(value, list):
        return Node(None, start, end, items=[_node(v, f"{inside}{i}", places, text) for i, v in enumerate(value)])
    stop = re.match(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^#]*", text[start:end])
    end = start + len(stop[0].rstrip()) if stop and start else end
    return Node(value, start, end, quoted=isinstance(value, str))


def _diagnosis(text: str, error: ValueError, at: int) -> Malformed:
    helped = first_that_helps(text, _candidates(text, at), reached, at)
    if helped is not None:
        return helped
    problem = PLACE.sub("", str(error)).strip()
    return Malformed(
        min(at, max(len(text.rstrip()) - 1, 0)), f"TOML cannot be read here: {problem}", "Look at this line."
    )


WORDS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "yes": "true", "no": "false"}


def _candidates(text: str, at: int) -> Iterator[Candidate]:
    lines = text.split("\n")
    line = line_of(text, at)
    openers = [n for n in range(line, 0, -1) if lines[n - 1].count("[") > lines[n - 1].count("]")]
    quotes = [n for n in range(line, 0, -1) if lines[n - 1].count('"') % 2 or lines[n - 1].count("'") % 2]
    for n in dict.fromkeys((line, *openers[:1], *quotes[:1], line - 1)):
        if 0 < n <= len(lines) and lines[n - 1].strip():
            yield from _mends(lines[n - 1], n)


def _mends(text: str, n: int) -> Iterator[Candidate]:
    if match := re.match(r"(\s*[\w.-]+)\s*:\s*(?=\S)", text):
        yield n, f"{match[1]} = {text[match.end() :]}", "a colon between key and value", "Write `=`."
    if (match := re.match(r"(\s*)(//|;|--)", text)) is not None:
        yield n, f"{match[1]}# {text[match.end() :].strip()}", f"`{match[2]}` begins no comment in TOML", "Write `#`."
    if (match := re.match(r"(.*\S)\s*//.*", text)) is not None:
        yield n, match[1], "`//` begins no comment in TOML", "Write `#`."
    if any(mark in text for mark in QUOTES):
        yield n, "".join(QUOTES.get(c, c) for c in text), "typographic quotes", "Write straight quotes."
    if text.rstrip().endswith((",", ";")):
        yield n, text.rstrip().rstrip(",;"), "a comma at the end of the line", "Remove it."
    if (table := re.fullmatch(r"(\s*\[\[?[\w. -]+?)\s*\]?\s*", text)) is not None:
        yield n, table[1] + "]" * (2 if "[[" in text else 1), "the header of a table is not closed", "Close it with ]."
    entry = ENTRY.match(text)
    if entry is None:
        if match := re.match(r"(\s*[\w.-]+)\s+(?=\S)", text):
            yield n, f"{match[1]} = {text[match.end() :]}", "no `=` behind the key", "Write `=`."
        return
    yield from _value_mends(entry[0], text[entry.end() :], n)


def _value_mends(head: str, rest: str, n: int) -> Iterator[Candidate]:
    bare = re.match(r"(.*?)\s*(#.*)?$", rest)
    value, remark = (bare[1], bare[2] or "") if bare else (rest, "")
    remark = f"  {remark}" if remark else ""
    if value in WORDS:
        new = WORDS[value]
        yield n, f"{head}{new}{remark}", f"`{value}` is no value of TOML; it writes `{new}`", f"Write {new}."
    if value in ("None", "null", "~", ""):
        yield n, f"# {head}{rest}".rstrip(), "TOML has no value for nothing", "Leave the key out."
    for opener, mark in ("[]", "{}"):
        if value.count(opener) > value.count(mark):
            yield n, f"{head}{value.rstrip(',')}{mark}{remark}", f"`{opener}` is not closed", f"Close it with {mark}."
    for quote in "\"'":
        if value.count(quote) % 2:
            yield n, f"{head}{value}{quote}{remark}", "text without its closing quote", f"Close it with {quote}."
            yield n, f"{head}{quote}{value}{remark}", "text without its opening quote", f"Write {quote} before it."
    if "\\" in value and value[:1] == '"':
        what = "a backslash that begins no escape (of a Windows path?)"
        yield n, f"{head}'{value[1:-1]}'{remark}", what, "Use single quotes, or a slash."
    if re.fullmatch(r"\.\d+(?:[eE][-+]?\d+)?|\d+\.(?:[eE][-+]?\d+)?|0\d+", value):
        yield (
            n,
            f"{head}{float(value) if '.' in value else int(value)}{remark}",
            f"`{value}` is no number in TOML",
            ("Write a digit on both sides of the point, and no zero in front."),
        )
    if value and value[0] not in "\"'[{":
        yield n, f'{head}"{value}"{remark}', "text without quotes", "Put it into double quotes."
