"""Rules: from one setting, among the others of its file, to what is wrong with it. What lies deeper comes first."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from typing import Any

from nbdebug.registry import declared, rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import clip, listed
from nbdebug.tools.config.document import ConfigFacts, Expectation, OneSetting, Setting
from nbdebug.tools.config.parsers import NUMBER_12
from nbdebug.tools.config.tables import FULL, HALVES, INVISIBLE, KINDS, OWNERS, SPACES, SWITCHES

COMMA = re.compile(r"[-+]?(?:0,\d+|\d,\d*[eE][-+]?\d+)")
"""A number with a comma for its point; 1,5 may be a list."""


def finding(code: str, one: OneSetting, title: str, fix: Fix, **evidence: Any) -> Finding:
    """`_` in names of evidence is a space."""
    setting, facts = one.setting, one.facts
    text = facts.lines[setting.line - 1].strip() if setting.line and setting.line <= len(facts.lines) else ""
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "")}
    where = Where(file=facts.file, line=setting.line, text=clip(text, 160) or None)
    own = {"where": [setting.key], "value": shown(setting.value)}
    return Finding(f"config/{code}", title, where, own | rows, (fix,))


def shown(value: Any) -> str:
    return clip(repr(value), 80)


def literal(value: Any, form: str) -> str:
    """A value as the file's format writes it."""
    if isinstance(value, float) and form == "YAML":
        return yaml_number(repr(value))
    return json.dumps(value, ensure_ascii=False, default=str) if form in ("JSON", "YAML", "TOML") else repr(value)


def yaml_number(word: str) -> str:
    """A number that YAML 1.1 and 1.2 both read as one: 1e-4 is 1.0e-4."""
    mantissa, _, exponent = word.lower().partition("e")
    if not exponent:
        return word
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def mended(title: str, one: OneSetting, new: str, old: str | None = None) -> Fix:
    """The setting's line with `new` in the place of its value, or of `old`: an edit where that stands there, else a
    line to write (always where old is "")."""
    setting, facts = one.setting, one.facts
    edit = facts.edit(setting, setting.word if old is None else old, new)
    if edit is not None:
        return Fix.of(title, edit)
    name, value = (new, setting.word or shown(setting.value)) if old == setting.name else (setting.name, new)
    form = {"JSON": '"{}": {}', "YAML": "{}: {}"}.get(facts.format, "{} = {}")
    return Fix(title, form.format(name, value))


# -- the key and the characters ---------------------------------------------------------------------------------------


@rule(
    code="config/invisible-character",
    title="An invisible character stands in a key or a value.",
    symptom="A file is not found, a key is unknown, a choice is refused, although each is written as it should be.",
    cause="A no-break space, a zero-width space or a mark for the direction of writing was copied in from a web page, "
    "a chat or a word processor. An editor does not show it; a comparison of texts sees it.",
    confirm="`print(ascii(value))` shows it as \\u200b or \\xa0.",
    fix="Type the value again, or take the line that the report gives.",
    reference="https://www.unicode.org/reports/tr36/",
)
def invisible_character(one: OneSetting) -> Finding | None:
    setting, form = one.setting, one.facts.format
    value = setting.value if isinstance(setting.value, str) else ""
    in_key = [c for c in setting.name if c in INVISIBLE]
    found = in_key or [c for c in value if c in INVISIBLE and _unmeant(c, value, one.expected)]
    spaces = one.facts.absent.get(setting.key)
    if not found and spaces:
        title = f"`{setting.key}` has white space at an end that cannot be seen: {shown(value)}"
        return finding("invisible-character", one, title, mended("Without it.", one, literal(spaces, form)))
    if not found:
        return None
    text = setting.name if in_key else value
    clean = text.translate({ord(c): " " if c in SPACES else None for c in INVISIBLE}).strip()
    characters = listed([f"U+{ord(c):04X}" for c in dict.fromkeys(found)], quote="")
    place = f"the key `{clean}`" if in_key else f"the value of `{setting.key}`"
    title = f"An invisible character ({characters}) stands in {place}"
    new, old = (clean, setting.name) if in_key else (literal(clean, form), None)
    fix = mended("The same without it.", one, new, old)
    return finding("invisible-character", one, title, fix, as_Python_shows_it=ascii(text))


def _unmeant(character: str, value: str, expected: Expectation) -> bool:
    """Whether it was surely not written on purpose: prose has no-break spaces, and some scripts need joiners."""
    rest = "".join(c for c in value if c not in INVISIBLE)
    word = bool(expected.choices or expected.exists) or not re.search(r"\s", rest.strip())
    if character in SPACES:
        return bool(rest) and word and (rest.isascii() or bool(expected.exists)) or not value.strip()
    return rest.isascii() or bool(expected.choices or expected.exists) and character not in "\u200c\u200d"


@rule(
    code="config/duplicate-key",
    title="A key stands twice in one section.",
    symptom="A value in the file has no effect: the program uses another, or its default.",
    cause="JSON and YAML keep the last of two equal keys, and the whole section below it. TOML refuses the file.",
    confirm="Print the settings that the program has read, and compare them with the file.",
    fix="Keep one of them. Two sections of one name become one, with the entries of both.",
    reference="https://docs.python.org/3/library/json.html#repeated-names-within-an-object",
)
def duplicate_key(one: OneSetting) -> Finding | None:
    setting, facts = one.setting, one.facts
    if not setting.earlier:
        return None
    line, word = setting.earlier[0]
    kept = "TOML refuses the file" if facts.format == "TOML" else f"line {setting.line} counts alone"
    title = f"The {one.kind} `{setting.key}` stands twice, in lines {line} and {setting.line}: {kept}"
    edit = facts.without(setting, line) if len(setting.earlier) == 1 and not setting.section else None
    way = f"Move the entries below line {setting.line} to line {line}." if setting.section else "Keep one of them."
    fix = Fix(way, facts.lines[line - 1].strip())
    if edit is not None:
        fix = Fix.of(f"Remove line {line}; line {setting.line} stays.", edit)
    return finding("duplicate-key", one, title, fix, first=clip(word.split("\n")[0], 60))


@rule(
    code="config/unknown-key",
    title="A key is none that the program knows.",
    symptom="A setting changes nothing; no error and no warning.",
    cause="Most programs look up the keys that they know, and pass over all others: a misspelt key leaves the default.",
    confirm="Search the program for the key.",
    fix="Write the key that is meant; the report names the nearest.",
    reference="https://docs.pydantic.dev/latest/api/config/#pydantic.config.ConfigDict.extra",
)
def unknown_key(one: OneSetting) -> Finding | None:
    setting, facts = one.setting, one.facts
    nearest = facts.near.get(setting.key, "")
    if not nearest and (not facts.closed or _is_known(setting, facts)):
        return None
    nearest = nearest or _nearest(setting, facts)
    parent, _, name = nearest.rpartition(".")
    title = f"`{setting.key}` is no known {one.kind}" + (f"; did you mean `{nearest}`?" if nearest else "")
    fix = Fix("Write the key as the program knows it, or remove it.", name or setting.name)
    if nearest and parent in ("", setting.parent):
        fix = mended("The key as the program knows it.", one, name, setting.name)
    return finding("unknown-key", one, title, fix, nearest=nearest)


def _is_known(setting: Setting, facts: ConfigFacts) -> bool:
    """Whether it is in the schema, above an entry of it (where it is no section, that is its type), or below a free one
    or an unknown section (told once)."""
    sections = {name[: dot.start()] for name in facts.expected for dot in re.finditer(r"\.", name)}
    above = {setting.key[: dot.start()] for dot in re.finditer(r"\.", setting.key)}
    known = setting.key in sections or not facts.expected.keys().isdisjoint({setting.key, *above})
    return known or not above <= sections


def _nearest(setting: Setting, facts: ConfigFacts) -> str:
    """The known key that was meant: of the same section first, and not one that the file has already."""
    depth = setting.key.count(".") + 1
    wanted = [name for name in facts.expected if name not in facts.settings]
    if setting.section:
        wanted = list(dict.fromkeys(".".join(n.split(".")[:depth]) for n in wanted if n.count(".") >= depth))
    here = {name.rpartition(".")[2]: name for name in wanted if name.rpartition(".")[0] == setting.parent}
    for name in difflib.get_close_matches(setting.name, here, n=1, cutoff=0.6):
        return here[name]
    close = difflib.get_close_matches(setting.key, wanted, n=1, cutoff=0.75)
    return next((name for name in (*close, *wanted) if name in close or name.rpartition(".")[2] == setting.name), "")


# -- the value by itself ----------------------------------------------------------------------------------------------


@rule(
    code="config/wrong-type",
    title="A value has another type than the program takes.",
    symptom="`'<=' not supported between instances of 'float' and 'str'`, a switch that is always on, a choice that is "
    "refused although it is written as the manual says.",
    cause="Quotes make text of a number. PyYAML reads YAML 1.1: `1e-4` is text there, for its numbers have a point "
    '(`1.0e-4`), and `no`, `off`, `yes` and `on` are false and true. The text "false" is true to Python.',
    confirm="`print(type(value))` behind the loader.",
    fix="Write numbers without quotes, in YAML with a point and a signed exponent; words such as `no` in quotes.",
    reference="https://yaml.org/type/float.html",
)
def wrong_type(one: OneSetting) -> Finding | None:
    setting, expected, facts = one.setting, one.expected, one.facts
    kind, value, lenient = expected.type, setting.value, expected.lenient
    below = () if setting.section or not facts.closed else facts.expected
    if inside := [name for name in below if name.startswith(f"{setting.key}.")]:
        if value is None or setting.key in facts.expected:
            return None
        title = f"`{setting.key}` is {shown(value)}; a section with {listed(inside)} is expected"
        return finding("wrong-type", one, title, mended("Write a section.", one, "{}", ""))
    if setting.key not in facts.expected and not facts.closed:  # 1e-4 below a key of which nothing is known
        small = isinstance(value, str) and setting.number is not None and re.search(r"\d[eE]-\d+$", setting.word)
        kind, lenient = "float" if small else None, False
    if kind is None or value is None and expected.null or setting.section and kind == "object":
        return None
    if not setting.section and (is_a(value, kind) or lenient and not _surely_wrong(one)):
        return None
    name, why = KINDS[kind][0], ""
    title = f"`{setting.key}` is {_kind_of(setting)}; {name} is expected"
    if setting.number is not None and kind in ("int", "float"):
        why = "YAML 1.1 (PyYAML) sees text in it, YAML 1.2 a number: write a point and a signed exponent"
        title = f"`{setting.key}: {setting.word}` is text to PyYAML: the exponent of a number needs a point and a sign"
    elif isinstance(value, bool) and setting.word and setting.word.lower() not in ("true", "false"):
        why = f"YAML 1.1 (PyYAML) reads the word {setting.word} as {value}, YAML 1.2 as text"
        title = f"`{setting.key}: {setting.word}` is {value} to PyYAML; {name} is expected"
    new = _converted(setting, kind, facts.format) if not setting.section else None
    fix = mended(f"Write {name}.", one, f"<{name}>", "")
    if new is not None:
        fix = mended(f"The same value as {name}.", one, new)
    return finding("wrong-type", one, title, fix, expected=name, why=why, source=expected.source)


def is_a(value: Any, kind: str) -> bool:
    date = type(value).__name__ == "Date"  # a word that YAML 1.1 makes a date of
    return isinstance(value, KINDS[kind][1]) and (kind == "bool" or not isinstance(value, bool)) and not date


def _surely_wrong(one: OneSetting) -> bool:
    """Without a schema: a number that is text, true for a count, a word that YAML has made a switch. Forms write all
    numbers as text, and a seed, which may be empty."""
    setting, kind, value = one.setting, one.expected.type, one.setting.value
    if kind == "str":
        return isinstance(value, bool) and setting.word.lower() in SWITCHES
    if kind == "float" and value is True:
        return "lr" in setting.name or "rate" in setting.name
    if not isinstance(value, str):
        broken = isinstance(value, float) and math.isfinite(value) and not value.is_integer()
        return value is True or broken and kind == "int"
    others = [s.value for s in one.facts.settings.values() if s is not setting and isinstance(s.value, str)]
    habit = "seed" in setting.name or sum(bool(NUMBER_12.fullmatch(other)) for other in others) >= 3
    comma = kind == "float" and COMMA.fullmatch(value) is not None
    return setting.number is not None or comma or bool(NUMBER_12.fullmatch(value)) and not habit


def _kind_of(setting: Setting) -> str:
    """ "the text 'high'"."""
    value = setting.value
    if setting.section or value is None:
        return "a section" if setting.section else "empty (null)"
    if type(value).__name__ == "Date":
        return f"the date {value} to PyYAML"
    words = (("the switch", bool), ("the text", str), ("the number", (int, float)), ("the list", (list, tuple)))
    return " ".join([*(word for word, kind in words if isinstance(value, kind))][:1] + [shown(value)])


def _converted(setting: Setting, kind: str, form: str) -> str | None:
    """The same value in the type that is expected, as the file's format writes it; None where it has none."""
    value, word = setting.value, setting.word
    text = str(value).strip().lower()
    if kind == "float" and COMMA.fullmatch(text):
        text = text.replace(",", ".")
    if kind in ("int", "float") and not isinstance(value, bool) and NUMBER_12.fullmatch(text):
        number = float(text)
        if kind == "int":
            return str(int(number)) if number.is_integer() else None
        whole = re.fullmatch(r"[-+]?\d+", text)
        return yaml_number(text) if form == "YAML" else literal(int(text) if whole else number, form)
    if kind == "bool" and text in ("true", "false", "1", "0", *SWITCHES):
        return literal(text in ("true", "yes", "on", "1"), form)
    if kind == "str" and (isinstance(value, (bool, int, float)) or type(value).__name__ == "Date"):
        return literal(word or str(value), form)
    return f"[{word or shown(value)}]" if kind == "list" and isinstance(value, (str, int, float)) else None


@rule(
    code="config/invalid-choice",
    title="A value is none of the allowed ones.",
    symptom="`invalid choice`, a KeyError in a table of optimizers or schedules, or a default that is taken instead.",
    cause="The key takes one of a few words, and this is another: misspelt, in other letters, or of another program.",
    confirm="The program's help lists the choices.",
    fix="Write one of the allowed values.",
    reference="https://docs.python.org/3/library/argparse.html#choices",
)
def invalid_choice(one: OneSetting) -> Finding | None:
    setting, expected, form = one.setting, one.expected, one.facts.format
    if expected.choices is None or setting.section or (setting.value is None and expected.null):
        return None
    several = isinstance(setting.value, list) and expected.type == "list"
    allowed = [(choice, type(choice) is bool) for choice in expected.choices]
    bad = [v for v in (setting.value if several else [setting.value]) if (v, type(v) is bool) not in allowed]
    nearest = _nearest_choice(bad[0], expected.choices) if bad else None
    if not bad or expected.lenient and not _foreign(one, bad[0], nearest):
        return None
    title = f"`{setting.key}` is {shown(bad[0])}; allowed are {listed([shown(c) for c in expected.choices], 8, '')}"
    fix = mended("Write one of the allowed values.", one, literal(expected.choices[0], form), "")
    if nearest is not None and not isinstance(setting.value, list):
        fix = mended("The nearest of the allowed values.", one, literal(nearest, form))
    return finding("invalid-choice", one, title, fix, allowed=listed(expected.choices, 20, ""), source=expected.source)


def _nearest_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if str(value).lower() in FULL and "no" in choices:
        return "no"
    bare = {re.sub(r"[\W_]", "", str(choice).lower()): choice for choice in choices}
    near = difflib.get_close_matches(re.sub(r"[\W_]", "", str(value).lower()), bare, n=1, cutoff=0.6)
    return bare[near[0]] if near else None


def _foreign(one: OneSetting, value: Any, nearest: Any) -> bool:
    """Without a schema: a slip in a known word, or another word where the file is accelerate's or transformers'."""
    known = one.expected.choices or ()
    if not isinstance(value, str) or value.lower() in known:
        return False
    if {s.name for s in one.facts.settings.values()} & OWNERS.get(one.setting.name, set()):
        return True
    return nearest is not None and bool(difflib.get_close_matches(value, known, n=1, cutoff=0.85))


@rule(
    code="config/out-of-range",
    title="A number is outside of what the key can take.",
    symptom="`dropout probability has to be between 0 and 1`, a loss that explodes at once, an empty loader.",
    cause="A percentage stands where a share of one is meant, a point is missing, or a sign or zero is left over.",
    confirm="Compare it with the range that the report gives.",
    fix="Write a number within the range.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html",
)
def out_of_range(one: OneSetting) -> Finding | None:
    setting, expected = one.setting, one.expected
    several = isinstance(setting.value, list)
    values = setting.value if several else [setting.value]
    value = next((each for each in values if is_a(each, "float") and not within(each, expected)), None)
    if value is None:
        return None
    span = range_of(expected)
    title = f"`{setting.key}` {'holds' if several else 'is'} {shown(value)}; allowed is {span}"
    fix = mended("Write a number within the range.", one, f"<{span}>", "")
    for guess in (-value, value / 100, value / 10, expected.min, expected.max) if not several else ():
        if guess and within(guess, expected) and (expected.type != "int" or float(guess).is_integer()):
            new = literal(int(guess) if expected.type == "int" else guess, one.facts.format)
            fix = mended("One that is allowed; choose yours.", one, new)
            break
    return finding("out-of-range", one, title, fix, allowed=span, source=expected.source)


def within(value: float, expected: Expectation) -> bool:
    low, high, below = expected.min, expected.max, expected.below
    if expected.lenient and math.isinf(value) or (low, high, below) == (None, None, None):
        return True
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    return least <= value <= most and (below is None or value < below)


def range_of(expected: Expectation) -> str:
    """ "0 to below 1", "1 or more"."""
    low, high, below = (None if v is None else f"{v:g}" for v in (expected.min, expected.max, expected.below))
    end = high if high is not None else f"below {below}" if below is not None else None
    if low is None:
        return f"at most {high}" if high is not None else str(end)
    return f"{low} or more" if end is None else f"{low} to {end}"


@rule(
    code="config/missing-path",
    title="A path leads to nothing.",
    symptom="FileNotFoundError, often only after the model was loaded, or an empty data set.",
    cause="The file was moved, the name is misspelt, or the path is seen from another folder.",
    confirm="`ls` in the folder that the report names.",
    fix="Correct the path, or create what it names.",
    reference="https://docs.python.org/3/library/pathlib.html#pathlib.Path.exists",
)
def missing_path(one: OneSetting) -> Finding | None:
    setting, facts, kind = one.setting, one.facts, one.expected.exists
    if setting.key not in facts.absent or facts.absent[setting.key]:
        return None
    title = f"`{setting.key}` names no {kind} that exists: {shown(setting.value)}"
    fix = mended(f"Write the path of a {kind}.", one, f"<path of a {kind}>", "")
    if setting.key in facts.beside:
        near = literal(facts.beside[setting.key], facts.format)
        fix = mended(f"The {kind} of nearly this name.", one, near)
    return finding("missing-path", one, title, fix)


# -- the value and others ---------------------------------------------------------------------------------------------


@rule(
    code="config/not-divisible",
    title="A number is no multiple of another one, as it must be.",
    symptom="`embed_dim must be divisible by num_heads`, an error of view in the attention, refused arguments.",
    cause="One of the two was changed, and the other kept its value.",
    confirm="`a % b` is not zero.",
    fix="Change one of the two; the report gives the nearest numbers.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
)
def not_divisible(one: OneSetting) -> Finding | None:
    setting, expected, value = one.setting, one.expected, one.setting.value
    multiple = expected.multiple_of
    other: Any = one.value(multiple) if isinstance(multiple, str) else multiple
    if not one.active or not all(type(v) in (int, float) and 0 < abs(v) < math.inf for v in (value, other)):
        return None
    whole = type(value) is type(other) is int  # of any size
    if not (value % other if whole else abs(math.remainder(value, other)) > 1e-9 * max(abs(value), abs(other))):
        return None
    of = f"`{multiple}` ({shown(other)})" if isinstance(multiple, str) else shown(other)
    title = f"`{setting.key}` ({shown(value)}) is no multiple of {of}"
    below = (value // other if whole else math.floor(value / other)) * other
    above = below + other
    number = above if abs(above - value) <= abs(value - below) or not below else below
    fix = mended(f"The nearest multiple of {shown(other)}.", one, literal(number, one.facts.format))
    more = {}
    if isinstance(multiple, str) and type(value) is int and 0 < value < 10**6:
        divisors = sorted((n for n in range(1, value + 1) if value % n == 0), key=lambda n: abs(n - other))
        more = {f"divisors of {value} near {other}": listed(sorted(divisors[:2]), quote="")}
    return finding("not-divisible", one, title, fix, source=expected.source, **more)


@rule(
    code="config/inconsistent",
    title="Two settings cannot stand together.",
    symptom="A trainer refuses its arguments, or the learning rate never reaches what was set.",
    cause="Each value is allowed, and they exclude each other, or are in the wrong order: two half precisions at once, "
    "a warm-up that is longer than the training, a minimum above the maximum.",
    confirm="Read the two lines that the report names side by side.",
    fix="Change one of the two.",
    reference="https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments",
)
def inconsistent(one: OneSetting) -> Finding | None:
    setting, expected, form, value = one.setting, one.expected, one.facts.format, one.setting.value
    told = functools.partial(finding, "inconsistent", one)
    for other, strict in ((expected.less_than, True), (expected.at_most, False)) if one.active else ():
        limit = one.value(other)
        if is_a(limit, "float") and is_a(value, "float") and (value >= limit if strict else value > limit):
            words = f"must be {'less than' if strict else 'at most'} `{other}` ({shown(limit)})"
            whole = type(limit) is int
            new = literal(limit - 1 if strict and whole else limit, form)
            fix = mended("One that is allowed; choose yours.", one, new, None if whole or not strict else "")
            source = {"other": f"{other} = {shown(limit)}", "source": expected.source}
            return told(f"`{setting.key}` ({shown(value)}) {words}", fix, **source)
    other, beside = expected.not_with, one.value(expected.not_with)
    if other and one.active and value is True and beside is True:
        fix = mended("One of the two, off.", one, literal(False, form))
        title = f"`{setting.key}` and `{other}` are both true; one excludes the other"
        return told(title, fix, other=other, source=expected.source)
    if other and expected.lenient and value in HALVES:  # a precision and its device
        title = f"`{setting.key}` is {shown(value)}, which `{other}: {shown(beside)}` excludes"
        fix = mended("bfloat16 runs there.", one, literal("bf16" if value == "fp16" else "bf16-mixed", form))
        return told(title, fix, other=f"{other} = {shown(beside)}", source=expected.source)
    for key, owner, beside in one.facts.others:
        if key == setting.key:
            title = f"`{setting.key}` is {shown(value)} in the settings and {shown(beside)} in the {owner}"
            fix = mended(f"The value of the {owner}.", one, literal(beside, form))
            return told(title, fix, other=f"{owner}: {shown(beside)}")
    return None


ORDER = declared(__name__)
