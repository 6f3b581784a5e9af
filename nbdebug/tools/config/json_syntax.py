"""JSON with the place of every value, and with the cure where it is none: as Python's `json` reads it."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from nbdebug.tools.config.syntax import INVISIBLE, QUOTES, Malformed, Node, indent, line_of, line_span

SPACE = re.compile(r"[ \t\r\n]*")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
NUMBER = re.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|-?Infinity|NaN)(?![\w.+-])")
WORD = re.compile(r'[^\s",:\[\]{}][^\n",\[\]{}:]*')
LITERALS = {"true": True, "false": False, "null": None}
OTHER = {
    "True": "true",
    "TRUE": "true",
    "False": "false",
    "FALSE": "false",
    "None": "null",
    "nil": "null",
    "NULL": "null",
}
DEEPEST = 100


def parse_json(text: str) -> Node:
    """The document as a node. Raises Malformed."""
    if text.startswith("\ufeff"):
        cure = "Save the file as UTF-8 without a byte order mark."
        raise Malformed(0, "an invisible byte order mark (BOM) stands before the first character", cure, (0, 1, ""))
    return _Reader(text).document()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)
        self.open = sum(map(bare.count, "{[")) - sum(map(bare.count, "}]"))  # brackets that are never closed

    def document(self) -> Node:
        self.skip()
        if self.at == len(self.text):
            raise Malformed(0, "the file is empty", "Write {} for no settings at all.")
        node = self.value()
        self.skip()
        if self.at < len(self.text):
            extra = self.text[self.at]
            what = f"`{extra}` closes nothing" if extra in "}]" else "more text stands behind the end of the document"
            mend = (self.at, self.at + 1, "") if extra in "}]," else None
            raise Malformed(self.at, what, "Remove it.", mend)
        return node

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self) -> None:
        """Pass white space. Comments and invisible characters are none to a JSON parser."""
        text = self.text
        self.at = at = SPACE.match(text, self.at).end()  # type: ignore[union-attr]
        head = text[at : at + 2]
        if head == "//" or head[:1] == "#":
            end = line_span(text, line_of(text, at))[1]
            begin = len(text[:at].rstrip(" \t"))
            raise Malformed(at, "a comment, which JSON does not have", "Remove the comment.", (begin, end, ""))
        if head == "/*":
            end = text.find("*/", at)
            end = len(text) if end < 0 else end + 2
            mend = (at, end, "\n" * text.count("\n", at, end))
            raise Malformed(at, "a comment, which JSON does not have", "Remove the comment.", mend)
        if head and head[0] in INVISIBLE:
            what = f"an invisible character (U+{ord(head[0]):04X}) stands between the entries"
            raise Malformed(at, what, "Replace it with a plain space.", (at, at + 1, " "))

    def value(self) -> Node:
        self.skip()
        text, at, head = self.text, self.at, self.peek()
        if head in ("{", "["):
            if self.depth == DEEPEST:
                raise Malformed(at, f"it is nested more than {DEEPEST} levels deep", "Write it flatter.")
            self.depth += 1
            node = self.mapping() if head == "{" else self.sequence()
            self.depth -= 1
            return node
        if head == '"':
            return self.string(False)
        if (number := NUMBER.match(text, at)) is not None:
            self.at = number.end()
            return Node(json.loads(number[0]), at, self.at)
        for word, value in LITERALS.items():
            if re.compile(rf"{word}(?!\w)").match(text, at):
                self.at += len(word)
                return Node(value, at, self.at)
        return self.no_value(at, head)

    def no_value(self, at: int, head: str) -> NoReturn:
        """What stands where a value should be."""
        if head in ("", ",", "}", "]", ":"):
            back = len(self.text[:at].rstrip())
            raise Malformed(max(back - 1, 0), "a value is missing", "Write the value, or null for none.")
        self.quotes(at, head)
        word = WORD.match(self.text, at)
        if word is None:
            raise Malformed(at, f"`{head}` can't begin a value", "Put text into double quotes.")
        name = word[0].rstrip()
        end = at + len(name)
        if name in OTHER:
            new = OTHER[name]
            raise Malformed(at, f"`{name}` is Python; JSON writes `{new}`", f"Write {new}.", (at, end, new))
        if re.match(r"[-+.\d]", name):
            self.number(at, end, name)
        end += self.text[end : end + 1] == '"'
        raise Malformed(
            at, f"the text `{name}` has no opening quote", "Put it into double quotes.", (at, end, json.dumps(name))
        )

    def number(self, at: int, end: int, name: str) -> NoReturn:
        """A number in another language's form."""
        bare = name.replace("_", "").lstrip("+")
        try:
            value = int(bare, 16) if bare.lower().startswith("0x") else float(bare)
        except ValueError:
            value = None
        if value is None:
            raise Malformed(
                at, f"`{name}` is no number and no text", "Put text into double quotes.", (at, end, json.dumps(name))
            )
        new = repr(int(value) if re.fullmatch(r"-?0*\d+|0[xX].*", bare) else value)
        raise Malformed(at, f"`{name}` is no number in JSON", f"Write {new}.", (at, end, new))

    def quotes(self, at: int, head: str) -> None:
        """Single and typographic quotes."""
        if head != "'" and head not in QUOTES:
            return
        close = "'" if head == "'" else "".join(QUOTES)
        end = next((i for i in range(at + 1, len(self.text)) if self.text[i] in close + "\n"), at)
        name = "single quotes" if head == "'" else "typographic quotes"
        closed = end > at and self.text[end] != "\n"
        mend = (at, end + 1, json.dumps(self.text[at + 1 : end], ensure_ascii=False)) if closed else None
        raise Malformed(at, f"text in {name}", "JSON takes straight double quotes alone.", mend)

    def string(self, key: bool) -> Node:
        text, at = self.text, self.at
        if (match := STRING.match(text, at)) is not None:
            self.at = match.end()
            return Node(json.loads(match[0]), at, self.at, quoted=True)
        whole = re.compile(r'"(?:[^"\\\n]|\\.)*"').match(text, at)
        if whole is None:
            self.unclosed(at, key)
        bad = re.search(r"[\x00-\x1f]", whole[0])
        if bad is not None:
            new = json.dumps(bad[0])[1:-1]
            where = at + bad.start()
            raise Malformed(
                where, "a tab or control character inside of text", f"Write {new}.", (where, where + 1, new)
            )
        inner = re.sub(r"\\(?![\"])", r"\\\\", whole[0].replace("\\\\", "\\"))
        what = "a backslash that begins no escape (of a Windows path?)"
        escape = re.search(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})', whole[0])
        raise Malformed(
            at + (escape.start() if escape else 0), what, "Write two, or a slash.", (at, whole.end(), inner)
        )

    def unclosed(self, at: int, key: bool) -> NoReturn:
        end = line_span(self.text, line_of(self.text, at))[1]
        line = self.text[at:end].rstrip()
        name = re.match(r'"([^":]+?)\s*:', line) if key else None
        place = at + (1 + len(name[1]) if name else len(line.rstrip(",")))
        raise Malformed(at, "text without its closing quote", 'Close it with ".', (place, place, '"'))

    def mapping(self) -> Node:
        start, entries, comma = self.at, list[tuple[str, int, Node]](), -1
        self.at += 1
        while True:
            self.skip()
            if self.closes("}", "{", start, comma):
                return Node(None, start, self.at, entries=entries)
            self.dedent(start, comma, "}")
            name = self.key()
            entries.append((name.value, name.start, self.value()))
            comma = self.separator("}", start, self.at)

    def sequence(self) -> Node:
        start, items, comma = self.at, list[Node](), -1
        self.at += 1
        while True:
            self.skip()
            if self.closes("]", "[", start, comma):
                return Node(None, start, self.at, items=items)
            self.dedent(start, comma, "]")
            items.append(self.value())
            end = self.at
            self.skip()
            if self.peek() == ":" and items[-1].quoted and self.open > 0:
                end = len(self.text[: items[-1].start].rstrip().rstrip(","))
                raise Malformed(end - 1, "the `[` above is not closed", "Close it with ].", (end, end, "]"))
            comma = self.separator("]", start, end)

    def closes(self, mark: str, opener: str, start: int, comma: int) -> bool:
        """Whether the bracket closes here."""
        head = self.peek()
        if head == mark:
            if comma >= 0:
                raise Malformed(
                    comma, f"a comma before `{mark}`, behind the last entry", "Remove it.", (comma, comma + 1, "")
                )
            self.at += 1
            return True
        if head == "":
            self.end_of_file(opener, mark, start, comma)
        if head == ",":
            raise Malformed(self.at, "a comma without an entry before it", "Remove it.", (self.at, self.at + 1, ""))
        return False

    def end_of_file(self, opener: str, mark: str, start: int, comma: int) -> NoReturn:
        end = len(self.text.rstrip())
        begin = comma if comma == end - 1 else end
        what = f"the `{opener}` of line {line_of(self.text, start)} is never closed"
        raise Malformed(max(end - 1, 0), what, f"Close it with {mark}.", (begin, end, mark))

    def dedent(self, start: int, comma: int, mark: str) -> None:
        """An entry that stands no deeper than the line with the opening bracket, where one is not closed."""
        if self.open <= 0 or comma < 0 or self.depth < 2:
            return
        here, opener = (line_span(self.text, line_of(self.text, at)) for at in (self.at, start))
        if here != opener and indent(self.text[slice(*here)]) <= indent(self.text[slice(*opener)]):
            what = f"the `{self.text[start]}` of line {line_of(self.text, start)} is not closed before the next entry"
            raise Malformed(comma, what, f"Close it with {mark}.", (comma, comma, mark))

    def key(self) -> Node:
        text, at, head = self.text, self.at, self.peek()
        if head != '"':
            self.quotes(at, head)
            word = re.compile(r"[\w.-]+").match(text, at)
            if word is None:
                raise Malformed(at, f"`{head}` stands where a key should be", "Put the key into double quotes.")
            end = word.end() + (text[word.end() : word.end() + 1] == '"')
            raise Malformed(at, f"the key `{word[0]}` has no quotes", "Use double quotes.", (at, end, f'"{word[0]}"'))
        name = self.string(True)
        self.skip()
        if self.peek() == ":":
            self.at += 1
            return name
        if self.peek() == "=":
            raise Malformed(self.at, "`=` between key and value", "Write a colon.", (self.at, self.at + 1, ":"))
        if ":" in name.value:  # "name: "value"
            word, end = name.value.partition(":")[0], name.end
            what = f"the key `{word}` has no closing quote"
            raise Malformed(at, what, 'Close it with ".', (at, end, f'"{word}": "'))
        what = f"no colon follows the key `{name.value}`"
        raise Malformed(name.end - 1, what, "Write a colon between key and value.", (name.end, name.end, ":"))

    def separator(self, mark: str, start: int, end: int) -> int:
        """The offset of the comma behind an entry that ends at `end`; -1 where the bracket closes."""
        self.skip()
        head = self.peek()
        if head == ",":
            self.at += 1
            return self.at - 1
        if head in (mark, ""):
            return -1
        if head in "}]":
            what = f"`{head}` stands where `{mark}` closes line {line_of(self.text, start)}"
            new = mark if self.open == 0 else mark + head
            raise Malformed(self.at, what, f"Write {mark}.", (self.at, self.at + 1, new))
        if head == ";":
            raise Malformed(self.at, "a semicolon between entries", "Write a comma.", (self.at, self.at + 1, ","))
        if mark == "]" and re.compile(rf"{STRING.pattern}\s*:").match(self.text, self.at):
            what = f"the `[` of line {line_of(self.text, start)} is not closed before the next key"
            raise Malformed(end - 1, what, "Close it with ].", (end, end, "]"))
        if self.at == end and head not in '"{[':
            raise Malformed(end - 1, "a double quote inside of text", 'Write \\" for a quote inside of text.')
        raise Malformed(
            end - 1, "no comma between this entry and the next", "Write a comma at its end.", (end, end, ",")
        )
