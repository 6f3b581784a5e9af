"""YAML with the place of every value, as PyYAML's `safe_load` (YAML 1.1) and as YAML 1.2 read it.

ruamel.yaml gives the tree and the places; what a plain word means is decided here, once for each version. No tag is
built, and an alias is followed only so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nbdebug.tools.config.syntax import QUOTES, Candidate, Malformed, Node, first_that_helps, indent, line_of

TRUE, FALSE = ("yes", "true", "on"), ("no", "false", "off")
FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
INT = re.compile(r"[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+")
SIXTY = re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
DATE = re.compile(r"\d{4}-\d\d?-\d\d?(?:[Tt ].*)?")
"""The implicit types of YAML 1.1, as PyYAML's resolver has them (yaml/resolver.py, version 6.0)."""
NUMBER_12 = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
"""A number of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#1032-tag-resolution)."""
MOST = 100_000
"""Nodes, aliases followed; more is a file that explodes, or no settings."""


def plain(text: str) -> Any:
    """What YAML 1.1 makes of a word without quotes. A date stays text here, marked by its type: `Date`."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in TRUE + FALSE and text in (text.lower(), text.upper(), text.capitalize()):
        return text.lower() in TRUE
    bare = text.replace("_", "")
    if INT.fullmatch(text):
        sign, digits = (-1 if bare[0] == "-" else 1), bare.lstrip("+-")
        octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
        try:
            return sign * int(digits, 8 if octal else 0)
        except ValueError:
            return text
    if FLOAT.fullmatch(text):
        return float(bare.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if SIXTY.fullmatch(text):
        value = 0.0
        for part in bare.lstrip("+-").split(":"):
            value = value * 60 + float(part)
        value = -value if bare[0] == "-" else value
        return value if "." in text else int(value)
    return Date(text) if DATE.fullmatch(text) else text


def plain_12(text: str) -> Any:
    """The number that YAML 1.2, OmegaConf and jsonargparse see in a plain word; None where they see none."""
    return float(text) if NUMBER_12.fullmatch(text) else None


class Date(str):
    """A word that YAML 1.1 turns into a date."""


def composed(text: str) -> Any:
    """ruamel's tree. Raises its errors; ImportError where it is not installed."""
    try:
        import ruamel.yaml
    except ImportError:
        raise ImportError("YAML needs ruamel.yaml: pip install 'torch-nbdebug[config]'") from None
    loader = ruamel.yaml.YAML(typ="safe", pure=True)
    loader.version = (1, 1)
    return loader.compose(text)


def reached(text: str) -> float:
    """How far a text is read: the offset of the first error, infinite where there is none."""
    try:
        root = composed(text)
    except ImportError:
        raise
    except Exception as error:  # ruamel's scanner, parser, composer and reader have no common class
        return float(_places(error, text)[0])
    return float("inf") if root is None or type(root).__name__ != "ScalarNode" else -1.0


def parse_yaml(text: str) -> Node:
    """The document as a node. Raises Malformed."""
    try:
        root = composed(text)
    except ImportError:
        raise
    except Exception as error:  # ruamel's scanner, parser, composer and reader have no common class
        raise _diagnosis(text, error) from None
    if root is None:
        return Node(None, 0, 0, entries=[])
    if type(root).__name__ == "ScalarNode":
        raise _one_text(text, root)
    try:
        return _Tree(text).node(root)
    except RecursionError:
        raise Malformed(0, "it is nested too deep", "Write it flatter.") from None


class _Tree:
    def __init__(self, text: str) -> None:
        self.text, self.count, self.above = text, 0, list[int]()

    def node(self, tree: Any) -> Node:
        self.count += 1
        start, end = tree.start_mark.index, tree.end_mark.index
        kind = type(tree).__name__
        if self.count > MOST or id(tree) in self.above:
            raise Malformed(start, "aliases that repeat themselves without end", "Write the values out.")
        if kind == "ScalarNode":
            return self.scalar(tree, start, end)
        self.above.append(id(tree))
        try:
            if kind == "SequenceNode":
                return Node(None, start, end, items=[self.node(item) for item in tree.value])
            return Node(None, start, end, entries=list(self.entries(tree)))
        finally:
            self.above.pop()

    def scalar(self, tree: Any, start: int, end: int) -> Node:
        tagged = self.text[start : start + 1] == "!" or not str(tree.tag or "").startswith("tag:yaml.org,2002:")
        quoted = bool(tree.style) or tagged and not str(tree.tag).endswith((":int", ":float", ":bool", ":null"))
        return Node(tree.value if quoted else plain(tree.value), start, end, quoted=quoted)

    def entries(self, tree: Any) -> Iterator[tuple[str, int, Node]]:
        """Those of the mapping, and those that `<<` merges in where it has none of its own."""
        own = [(key, value) for key, value in tree.value if key.value != "<<" or key.style]
        names = {str(key.value) for key, _ in own}
        for key, value in tree.value:
            if key.value == "<<" and not key.style:
                bases = value.value if type(value).__name__ == "SequenceNode" else [value]
                for base in bases if all(type(b).__name__ == "MappingNode" for b in bases) else ():
                    if id(base) in self.above:
                        raise Malformed(
                            key.start_mark.index, "a mapping that is merged into itself", "Remove the merge."
                        )
                    self.above.append(id(base))
                    merged = [entry for entry in self.entries(base) if entry[0] not in names]
                    self.above.pop()
                    names |= {name for name, _, _ in merged}
                    yield from merged
            elif type(key).__name__ != "ScalarNode":
                what = "braces without quotes are a mapping to YAML, and no key can be one"
                raise Malformed(key.start_mark.index, what, "Put the whole value into quotes.")
            else:
                yield str(key.value), key.start_mark.index, self.node(value)


def _places(error: Any, text: str) -> tuple[int, int]:
    """The offsets of what failed and of what it belongs to."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = getattr(error, "position", None)
    at = mark.index if mark is not None else position if isinstance(position, int) else 0
    context = getattr(error, "context_mark", None)
    return min(at, len(text)), context.index if context is not None else at


def _one_text(text: str, root: Any) -> Malformed:
    match = re.search(r"^(\s*[\w.-]+):(?=\S)", text, re.MULTILINE)
    what, cure = "the whole file is one text, no settings", "Write a space behind each colon."
    mend = (match.end(), match.end(), " ") if match and "\n" not in text.strip() else None
    return Malformed(match.start() if match else root.start_mark.index, what, cure, mend)


def _diagnosis(text: str, error: Any) -> Malformed:
    """The change that lets the text be read further, nearest to the error; without one, what the parser says."""
    at, context = _places(error, text)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).splitlines()[0]
    line, opened = line_of(text, at), line_of(text, context)
    if re.search(r"not allowed|unacceptable", str(error)) and text[at : at + 1] and not text[at].isprintable():
        what = f"a control character (U+{ord(text[at]):04X})"
        return Malformed(at, what, "Remove it.", (at, at + 1, ""))
    helped = first_that_helps(text, _candidates(text, line, opened, problem), reached, at)
    if helped is not None:
        return helped
    late = "end of stream" in problem or "could not find expected" in problem or "',' or" in problem
    return Malformed(context if late else at, f"YAML cannot be read here: {problem}", "Look at this line and above it.")


def _candidates(text: str, line: int, opened: int, problem: str) -> Iterator[Candidate]:
    lines = text.split("\n")
    # the error's own line, what it belongs to, and the text before it
    before = next((n for n in range(line - 1, 0, -1) if lines[n - 1].strip() and lines[n - 1].strip()[0] != "#"), 0)
    near = [n for n in dict.fromkeys((line, opened, before)) if 0 < n <= len(lines)]
    for n in near:
        yield from _tabs(lines, n)
    odd = [n for n in range(1, line + 1) if _odd_quote(lines[n - 1])]
    for n in [*reversed(odd[-3:])]:
        yield from _unclosed_quote(lines, n)
    for n in near:
        yield from _brackets(lines, n)
    for n in [*dict.fromkeys((before, opened, line))]:
        if n:
            yield from _colons(lines, n)
    for n in near:
        yield from _values(lines, n)
    for n in dict.fromkeys((line, before)):
        yield from _indents(lines, n)


def _tabs(lines: list[str], n: int) -> Iterator[Candidate]:
    text = lines[n - 1]
    head = text[: len(text) - len(text.lstrip(" \t\u00a0"))]
    if "\t" in head or "\u00a0" in head:
        what = "a tab in the indentation" if "\t" in head else "an invisible no-break space in the indentation"
        cure = "Indent with spaces."
        for width in _widths(lines, n):
            yield n, " " * width + text[len(head) :], what, cure
    if "\t" in text[len(head) :]:
        yield n, head + text[len(head) :].replace("\t", " "), "a tab between key and value", "Write a space."


def _widths(lines: list[str], n: int) -> list[int]:
    """Indentations in use above a line, the nearest first, and the usual ones; in front what the next line tells: one
    that stands deeper than all above belongs to this one."""
    above = [indent(text) for text in reversed(lines[: n - 1]) if text.strip() and "\t" not in text[: indent(text)]]
    text = lines[n - 1].replace("\u00a0", " ")
    own = len(text[: indent(text)].expandtabs(4))
    below = [indent(line) for line in lines[n : n + 3] if line.strip() and "\t" not in line[: indent(line)]]
    return list(dict.fromkeys([*([own] if own in above else []), *above[:12], own, *below[:1], 2, 4, 0]))


def _odd_quote(text: str) -> bool:
    value = text.partition(": ")[2] or text
    value = re.sub(r"\s#.*", "", value).strip().removeprefix("- ")
    quote = value[:1]
    return quote in "\"'" and quote != "" and value.replace("\\" + quote, "").count(quote) % 2 == 1


def _unclosed_quote(lines: list[str], n: int) -> Iterator[Candidate]:
    text = lines[n - 1]
    quote = next(c for c in text if c in "\"'")
    bare, mark, remark = text.partition(" #")
    yield (
        n,
        bare.rstrip() + quote + (" " * bool(mark) + mark.lstrip() + remark),
        "text without its closing quote",
        (f"Close it with {quote}."),
    )


def _brackets(lines: list[str], n: int) -> Iterator[Candidate]:
    text = lines[n - 1]
    for opener, mark in ("[]", "{}"):
        if text.count(opener) > text.count(mark):
            bare = re.sub(r"\s+#.*", "", text).rstrip()
            yield n, bare.rstrip(",") + mark, f"`{opener}` is not closed", f"Close it with {mark}."
        elif text.count(opener) < text.count(mark):
            place = text.rindex(mark)
            yield n, text[:place] + text[place + 1 :], f"`{mark}` closes nothing", "Remove it."
    if text.rstrip().endswith((",", ";")):
        yield n, text.rstrip().rstrip(",;"), "a comma at the end of the line", "Remove it."


def _colons(lines: list[str], n: int) -> Iterator[Candidate]:
    text = lines[n - 1]
    if match := re.match(r"(\s*(?:- )?[\w.-]+):(?=\S)", text):
        yield n, match[0] + " " + text[match.end() :], "no space behind the colon", "Write a space behind it."
    if match := re.match(r"(\s*(?:- )?[\w.-]+)\s*=\s*(?=\S)", text):
        yield n, match[1] + ": " + text[match.end() :], "`=` between key and value", "Write a colon and a space."
    if match := re.match(r"(\s*(?:- )?[\w.-]+)\s*\uff1a\s*", text):
        yield n, match[1] + ": " + text[match.end() :], "a wide colon (U+FF1A)", "Write a plain colon and a space."
    if ":" not in text and (match := re.match(r"(\s*[\w.-]+) +(?=\S)", text)):
        yield n, match[1] + ": " + text[match.end() :], "no colon behind the key", "Write a colon behind it."
    if ":" not in text and re.fullmatch(r"\s*[\w.-]+\s*", text):
        yield n, text.rstrip() + ":", "no colon behind the key", "Write a colon behind it."


def _values(lines: list[str], n: int) -> Iterator[Candidate]:
    """Values that need quotes, and quotes that are none."""
    text = lines[n - 1]
    match = re.match(r"(\s*(?:- )?(?:[\w.-]+:\s+)?)(.*?)(\s+#.*)?$", text)
    if match is None or not match[2]:
        return
    head, value, remark = match[1], match[2], match[3] or ""
    if any(mark in value for mark in QUOTES):
        straight = "".join(QUOTES.get(c, c) for c in text)
        yield n, straight, "typographic quotes", "Write straight quotes."
    if value[0] in "\"'":
        inner = value.strip("\"'").replace("'", "''")
        yield n, f"{head}'{inner}'{remark}", "a quote inside of text", "Put the whole value into the other quotes."
        return
    if value[0] in "@`%*&!|>,]}" or ": " in value or value.endswith(":") or value[0] in "{[":
        reason = (
            f"a value that begins with `{value[0]}`" if value[0] in "@`%*&!|>,]}{[" else "a second colon in the value"
        )
        yield n, f"{head}{_quoted(value)}{remark}", f"{reason}, without quotes", "Put the value into quotes."


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _indents(lines: list[str], n: int) -> Iterator[Candidate]:
    if n:
        text = lines[n - 1]
        for width in _widths(lines, n):
            what = f"it is indented by {indent(text)} spaces, unlike the lines it belongs to"
            yield n, " " * width + text.lstrip(), what, f"Indent it by {width}."
