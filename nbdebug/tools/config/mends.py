"""What people write wrong in JSON, YAML and TOML, and the change that mends it, found by reading the mended text.

In JSON a line tells by itself what is no JSON in it: all such lines are mended at once. What a comma or a bracket is
missing from, and what is wrong in YAML and TOML, is tried: of the changes near the error the first with which the whole
text is read is taken, else the first with which it is read further.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from nbdebug.tools.config import parsers, tables
from nbdebug.tools.config.parsers import Flaw, Malformed, Node, Unknown, indent, line_of, line_span

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

FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[str, Any], Node], Callable[..., Iterator[Candidate]]]] = {
    "JSON": (parsers.load_json, parsers.json_tree, json_candidates),
    "YAML": (parsers.load_yaml, parsers.yaml_tree, yaml_candidates),
    "TOML": (parsers.load_toml, parsers.toml_tree, toml_candidates),
}
LONGEST = 200_000
"""Characters of YAML or TOML of which changes are tried: each is read whole, and slowly."""


def readings(text: str, form: str, most: int = 20) -> tuple[Node | None, list[Flaw], str]:
    """(what it says, its faults, the mended text). Each fault is mended to see the next; what it says is None where one
    can't be. The lines stay the same, in number and in order."""
    load, tree, _ = FORMATS[form]
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
    load, _, candidates = FORMATS[form]
    best: Malformed | None = None
    for start, end, new, what, cure in candidates(text, fault) if form == "JSON" or len(text) <= LONGEST else ():
        after = _reached(text[:start] + new + text[end:], load)
        if after > max(fault.reached, end) + abs(len(new) - (end - start)) and (best is None or after == math.inf):
            offset = start + next((i for i, (a, b) in enumerate(zip(text[start:end], new)) if a != b), 0)
            best = Malformed(min(offset, end), what, cure, (start, end, new))
        if after == math.inf:
            return best
    return best
