"""Rules: from one setting, among the others of its file, to what is wrong with it. What lies deeper comes first."""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import clip, listed
from nbdebug.tools.config.document import ConfigFacts, Expectation, OneSetting, Setting
from nbdebug.tools.config.syntax import INVISIBLE, SPACES

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "object": "a section",
}
PYTHON = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def finding(code: str, one: OneSetting, title: str, fix: Fix, **evidence: Any) -> Finding:
    """`_` in names of evidence is a space."""
    setting, facts = one.setting, one.facts
    text = (
        facts.lines[setting.line - 1].strip() if setting.line is not None and setting.line <= len(facts.lines) else None
    )
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "")}
    where = Where(file=facts.file, line=setting.line, text=clip(text, 160) if text else None)
    return Finding(
        f"config/{code}", title, where, {"where": [setting.key], "value": shown(setting.value), **rows}, (fix,)
    )


def shown(value: Any) -> str:
    return clip(repr(value), 80)


def literal(value: Any, form: str) -> str:
    """A value as the file's format writes it."""
    if isinstance(value, float) and form == "YAML":
        return yaml_number(repr(value))
    if form in ("JSON", "YAML", "TOML"):
        return json.dumps(value, ensure_ascii=False, default=str)
    return repr(value)


def yaml_number(word: str) -> str:
    """A number that YAML 1.1 and 1.2 both read as one: 1e-4 is 1.0e-4."""
    mantissa, _, exponent = word.lower().partition("e")
    if not exponent:
        return word
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def line_with(setting: Setting, value: str, form: str) -> str:
    """A line that sets the value."""
    return {"JSON": f'"{setting.name}": {value}', "YAML": f"{setting.name}: {value}"}.get(
        form, f"{setting.name} = {value}"
    )


def mended(title: str, one: OneSetting, value: str) -> Fix:
    """The setting's line with another value: as an edit where it can be found there."""
    setting, facts = one.setting, one.facts
    edit = facts.edit(setting, setting.word, value)
    return Fix.of(title, edit) if edit is not None else Fix(title, line_with(setting, value, facts.format))


def template(title: str, one: OneSetting, value: str) -> Fix:
    return Fix(title, line_with(one.setting, value, one.facts.format))


# -- the key and the characters ---------------------------------------------------------------------------------------


@rule(
    code="config/invisible-character",
    title="An invisible character stands in a key or a value.",
    symptom="A file is not found although its name is right, a key is said to be unknown although it is there, a "
    "choice is refused that is among the allowed ones.",
    cause="A no-break space, a zero-width space or a mark for the direction of writing was copied in from a web page, "
    "a chat or a word processor. An editor does not show it; a comparison of texts sees it.",
    confirm="`print(ascii(value))` shows it as \\u200b or \\xa0.",
    fix="Type the value again, or take the line that the report gives.",
    reference="https://www.unicode.org/reports/tr36/",
)
def invisible_character(one: OneSetting) -> Finding | None:
    setting, facts = one.setting, one.facts
    in_key = [c for c in setting.name if c in INVISIBLE]
    value = setting.value if isinstance(setting.value, str) else ""
    in_value = [c for c in value if c in INVISIBLE and _unmeant(c, value, one.expected)]
    spaces = facts.absent.get(setting.key) if not in_value else None
    if not in_key and not in_value and not spaces:
        return None
    if spaces:
        title = f"`{setting.key}` has white space at an end that cannot be seen: {shown(value)}"
        return finding("invisible-character", one, title, mended("Without it.", one, literal(spaces, facts.format)))
    characters = listed([f"U+{ord(c):04X}" for c in dict.fromkeys(in_key or in_value)], quote="")
    clean = (
        (setting.name if in_key else value).translate({ord(c): " " if c in SPACES else None for c in INVISIBLE}).strip()
    )
    place = "key" if in_key else "value of"
    title = f"An invisible character ({characters}) stands in the {place} `{setting.key if not in_key else clean}`"
    if in_key:
        edit = facts.edit(setting, setting.name, clean)
        fix = (
            Fix.of("The key without it.", edit)
            if edit
            else Fix("The key without it.", line_with(setting, setting.word, ""))
        )
    else:
        fix = mended("The value without it.", one, literal(clean, facts.format))
    return finding("invisible-character", one, title, fix, as_Python_shows_it=ascii(setting.name if in_key else value))


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
    cause="JSON and YAML readers keep the last of two equal keys without a word, and with it the whole section below "
    "it. (TOML refuses the file.)",
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
    what, old = "section" if setting.section else "key", facts.lines[line - 1].strip()
    title = f"The {what} `{setting.key}` stands twice, in lines {line} and {setting.line}: {kept}"
    edit = facts.without(setting, line) if len(setting.earlier) == 1 and not setting.section else None
    if edit is not None:
        fix = Fix.of(f"Remove line {line}; line {setting.line} stays.", edit)
    elif setting.section:
        fix = Fix(f"Move the entries below line {setting.line} to line {line}.", old)
    else:
        fix = Fix(f"Keep one of the two: remove line {line} or line {setting.line}.", old)
    return finding(
        "duplicate-key", one, title, fix, first=clip(word.split("\n")[0], 60), lines=f"{line} and {setting.line}"
    )


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
    near = facts.near.get(setting.key)
    if near is None and (not facts.closed or _is_known(setting, facts)):
        return None
    nearest = near or _nearest(setting, facts)
    meant = f"; did you mean `{nearest}`?" if nearest else ""
    title = f"`{setting.key}` is no known {'section' if setting.section else 'key'}{meant}"
    new = nearest.rpartition(".")[2] if nearest else ""
    edit = facts.edit(setting, setting.name, new) if nearest and _parent(nearest, setting) else None
    if edit is not None:
        fix = Fix.of("The key as the program knows it.", edit)
    else:
        fix = Fix("Write the key as the program knows it, or remove it.", new or setting.name)
    return finding("unknown-key", one, title, fix, nearest=nearest)


def _parent(key: str, setting: Setting) -> bool:
    return "." not in key or key.rpartition(".")[0] == setting.parent


def _is_known(setting: Setting, facts: ConfigFacts) -> bool:
    """Whether it is in the schema, above an entry of it, or below a free one or an unknown section (told once)."""
    key, expected = setting.key, facts.expected
    if key in expected or setting.section and any(name.startswith(f"{key}.") for name in expected):
        return True
    if not setting.section and any(name.startswith(f"{key}.") for name in expected):
        return True  # a section is expected here: that is its type
    parts = key.split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts))]
    if any(name in expected for name in above):
        return True
    return any(not any(other.startswith(f"{name}.") for other in expected) for name in above)


def _nearest(setting: Setting, facts: ConfigFacts) -> str:
    """The known key that was meant: of the same section first, and not one that the file has already."""
    wanted = [name for name in facts.expected if name not in facts.settings]
    if setting.section:
        wanted = list(
            dict.fromkeys(
                name[: len(name) - len(name.split(".", setting.key.count(".") + 1)[-1]) - 1]
                for name in wanted
                if name.count(".") > setting.key.count(".")
            )
        )
    here = {name.rpartition(".")[2]: name for name in wanted if name.rpartition(".")[0] == setting.parent}
    for name in difflib.get_close_matches(setting.name, here, n=1, cutoff=0.6):
        return here[name]
    close = difflib.get_close_matches(setting.key, wanted, n=1, cutoff=0.75)
    return close[0] if close else next((name for name in wanted if name.rpartition(".")[2] == setting.name), "")


# -- the value by itself ----------------------------------------------------------------------------------------------


@rule(
    code="config/wrong-type",
    title="A value has another type than the program takes.",
    symptom="`'<=' not supported between instances of 'float' and 'str'`, a switch that is always on, a choice that is "
    "refused although it is written as the manual says.",
    cause="Quotes make text of a number. PyYAML reads YAML 1.1: `1e-4` is text there, for its numbers have a point "
    '(`1.0e-4`), and `no`, `off`, `yes` and `on` are false and true. The text "false" is true to Python.',
    confirm="`print(type(value))` behind the loader.",
    fix="Write numbers without quotes and, in YAML, with a point and a signed exponent; put words such as `no` "
    "into quotes.",
    reference="https://yaml.org/type/float.html",
)
def wrong_type(one: OneSetting) -> Finding | None:
    setting, expected, facts = one.setting, one.expected, one.facts
    if setting.section and expected.type != "object" and setting.key in facts.expected and expected.type is not None:
        what = f"`{setting.key}` is a section; {KINDS[expected.type]} is expected"
        return finding("wrong-type", one, what, template("Write one value.", one, f"<{KINDS[expected.type]}>"))
    if not setting.section and facts.closed and any(name.startswith(f"{setting.key}.") for name in facts.expected):
        if setting.value is None or setting.key in facts.expected:
            return None
        names = [name for name in facts.expected if name.startswith(f"{setting.key}.")]
        what = f"`{setting.key}` is {shown(setting.value)}; a section with {listed(names)} is expected"
        return finding("wrong-type", one, what, template("Write a section.", one, "{}"))
    kind = expected.type
    if kind is None or setting.section or (setting.value is None and expected.null):
        return _exponent(one)
    if is_a(setting.value, kind) or expected.lenient and not _surely_wrong(one):
        return None
    return _type_finding(one, kind)


def is_a(value: Any, kind: str) -> bool:
    date = type(value).__name__ == "Date"  # a word that YAML 1.1 makes a date of
    return isinstance(value, PYTHON[kind]) and (kind == "bool" or not isinstance(value, bool)) and not date


def _surely_wrong(one: OneSetting) -> bool:
    """Without a schema: a number that is text, true for a count, a word that YAML has made a switch."""
    setting, kind = one.setting, one.expected.type
    value = setting.value
    if kind in ("int", "float"):
        if isinstance(value, str):
            habit = "seed" in setting.name or _texts_by_habit(one)  # forms write a seed, which may be empty, as text
            return setting.number is not None or bool(NUMBER.fullmatch(value)) and not habit
        return (
            value is True
            and (kind == "int" or "lr" in setting.name or "rate" in setting.name)
            or (kind == "int" and isinstance(value, float) and math.isfinite(value) and not value.is_integer())
        )
    return kind == "str" and isinstance(value, bool) and setting.word.lower() in ("no", "off", "yes", "on")


def _texts_by_habit(one: OneSetting) -> bool:
    """Whether the file writes numbers in quotes throughout, as a form does that passes them on as text."""
    return (
        sum(
            isinstance(s.value, str) and bool(NUMBER.fullmatch(s.value))
            for s in one.facts.settings.values()
            if s is not one.setting
        )
        >= 3
    )


def _exponent(one: OneSetting) -> Finding | None:
    """A word such as 1e-4 below a key of which nothing is known."""
    setting = one.setting
    text = setting.number is not None and isinstance(setting.value, str)
    small = text and re.fullmatch(r"[-+]?[\d.]+[eE]-\d+", setting.word)
    unknown = one.facts.expected.get(setting.key) is None and not one.facts.closed
    return _type_finding(one, "float") if small and unknown else None


def _type_finding(one: OneSetting, kind: str) -> Finding:
    setting, form = one.setting, one.facts.format
    value, why = setting.value, ""
    title = f"`{setting.key}` is {_kind_of(value)}; {KINDS[kind]} is expected"
    if setting.number is not None and kind in ("int", "float"):
        why = "YAML 1.1 (PyYAML) sees text in it, YAML 1.2 a number: write a point and a signed exponent"
        title = (
            f"`{setting.key}: {setting.word}` is text to PyYAML, not a number: its exponent needs a point and a sign"
        )
    elif isinstance(value, bool) and setting.word and setting.word.lower() not in ("true", "false"):
        why = f"YAML 1.1 (PyYAML) reads the word {setting.word} as {value}, YAML 1.2 as text"
        title = f"`{setting.key}: {setting.word}` is {value} to PyYAML; {KINDS[kind]} is expected"
    new = _converted(setting, kind, form)
    if new is not None:
        fix = mended(f"The same value as {KINDS[kind]}.", one, new)
    else:
        fix = template(f"Write {KINDS[kind]}.", one, f"<{KINDS[kind]}>")
    return finding("wrong-type", one, title, fix, expected=KINDS[kind], why=why, source=one.expected.source)


def _kind_of(value: Any) -> str:
    """ "the text 'high'"."""
    if value is None:
        return "empty (null)"
    if type(value).__name__ == "Date":
        return f"the date {value} to PyYAML"
    words = (("the switch", bool), ("the text", str), ("the number", (int, float)), ("the list", (list, tuple)))
    return " ".join([*(word for word, kind in words if isinstance(value, kind))][:1] + [shown(value)])


def _converted(setting: Setting, kind: str, form: str) -> str | None:
    """The same value in the type that is expected, as the file's format writes it; None where it has none."""
    value, word = setting.value, setting.word
    if kind in ("int", "float") and isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        number = float(value)
        if kind == "int":
            return str(int(number)) if number.is_integer() else None
        return (
            yaml_number(value.strip())
            if form == "YAML"
            else literal(int(value) if re.fullmatch(r"[-+]?\d+", value) else number, form)
        )
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if kind == "bool" and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        on = str(value).lower() in ("true", "yes", "on", "1")
        return repr(on) if form not in ("JSON", "YAML", "TOML") else str(on).lower()
    if kind == "str" and (isinstance(value, (bool, int, float)) or type(value).__name__ == "Date"):
        return literal(word or str(value), form)
    if kind == "list" and isinstance(value, (str, int, float)):
        return f"[{word or shown(value)}]"
    return None


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
    setting, expected = one.setting, one.expected
    if expected.choices is None or setting.section or (setting.value is None and expected.null):
        return None
    values = setting.value if isinstance(setting.value, list) and expected.type == "list" else [setting.value]
    bad = [
        v for v in values if not any(v == c and isinstance(v, bool) == isinstance(c, bool) for c in expected.choices)
    ]
    nearest = _nearest_choice(bad[0], expected) if bad else None
    if not bad or expected.lenient and not _foreign(one, bad[0], nearest):
        return None
    title = f"`{setting.key}` is {shown(bad[0])}; allowed are {listed([shown(c) for c in expected.choices], 8, '')}"
    if nearest is not None and not isinstance(setting.value, list):
        fix = mended("The nearest of the allowed values.", one, literal(nearest, one.facts.format))
    else:
        fix = template("Write one of the allowed values.", one, literal(expected.choices[0], one.facts.format))
    return finding("invalid-choice", one, title, fix, allowed=listed(expected.choices, 20, ""), source=expected.source)


FULL = {"fp32", "float32", "full", "none", "32"}
"""What people write for full precision."""


def _nearest_choice(value: Any, expected: Expectation) -> Any:
    words = {str(choice).lower(): choice for choice in expected.choices or ()}
    if str(value).lower() in FULL and "no" in words:
        return words["no"]
    bare = {re.sub(r"[\W_]", "", word): choice for word, choice in words.items()}
    for name in difflib.get_close_matches(re.sub(r"[\W_]", "", str(value).lower()), bare, n=1, cutoff=0.6):
        return bare[name]
    return None


def _foreign(one: OneSetting, value: Any, nearest: Any) -> bool:
    """Without a schema: a slip in a known word, or another word where the file is accelerate's or transformers'."""
    from nbdebug.tools.config.conventions import ACCELERATE, ARGUMENTS, CHOICES

    known = CHOICES.get(one.setting.name, ((), ""))[0]
    if not isinstance(value, str) or value.lower() in known:
        return False
    names = {s.name for s in one.facts.settings.values() if s is not one.setting}
    if one.setting.name == "mixed_precision" and names & ACCELERATE:
        return True
    if one.setting.name.endswith("_strategy") and names & ARGUMENTS:
        return True
    return nearest is not None and bool(difflib.get_close_matches(value, known, n=1, cutoff=0.85))


@rule(
    code="config/out-of-range",
    title="A number is outside of what the key can take.",
    symptom="`dropout probability has to be between 0 and 1`, a loss that explodes in the first steps, an empty "
    "loader.",
    cause="A percentage stands where a share of one is meant, a point is missing, or a sign or zero is left over.",
    confirm="Compare it with the range that the report gives.",
    fix="Write a number within the range.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html",
)
def out_of_range(one: OneSetting) -> Finding | None:
    setting, expected = one.setting, one.expected
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    value = next((each for each in values if _numbers(each) and not within(each, expected)), None)
    if value is None:
        return None
    verb = "holds" if isinstance(setting.value, list) else "is"
    title = f"`{setting.key}` {verb} {shown(value)}; allowed is {range_of(expected)}"
    guesses = [-value, value / 100, value / 10, expected.min, expected.max]
    guess = next((g for g in guesses if g is not None and g != 0 and within(g, expected) and _whole(g, expected)), None)
    if guess is None or verb == "holds":
        fix = template("Write a number within the range.", one, f"<{range_of(expected)}>")
    else:
        number = int(guess) if expected.type == "int" else guess
        fix = mended("One that is allowed; choose yours.", one, literal(number, one.facts.format))
    return finding("out-of-range", one, title, fix, allowed=range_of(expected), source=expected.source)


def _whole(value: float, expected: Expectation) -> bool:
    return expected.type != "int" or float(value).is_integer()


def within(value: float, expected: Expectation) -> bool:
    if expected.lenient and math.isinf(value):
        return True
    low, high, below = expected.min, expected.max, expected.below
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (below is None or value < below)
        and (not math.isnan(value) or (low, high, below) == (None, None, None))
    )


def range_of(expected: Expectation) -> str:
    """ "0 to below 1", "1 or more"."""
    low, high, below = (None if v is None else f"{v:g}" for v in (expected.min, expected.max, expected.below))
    end = f"{high}" if high is not None else f"below {below}" if below is not None else None
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
    setting, facts = one.setting, one.facts
    if setting.key not in facts.absent or facts.absent[setting.key]:
        return None
    kind = one.expected.exists or "file"
    title = f"`{setting.key}` names no {kind} that exists: {shown(setting.value)}"
    near = facts.beside.get(setting.key)
    if near is not None:
        fix = mended(f"The {kind} of nearly this name.", one, literal(near, facts.format))
    else:
        fix = template(f"Write the path of a {kind}.", one, f"<path of a {kind}>")
    return finding("missing-path", one, title, fix)


# -- the value and others ---------------------------------------------------------------------------------------------


@rule(
    code="config/not-divisible",
    title="A number is no multiple of another one, as it must be.",
    symptom="`embed_dim must be divisible by num_heads`, an error of view or reshape in the middle of the attention, "
    "or a trainer that refuses its arguments.",
    cause="One of the two was changed, and the other kept its value.",
    confirm="`a % b` is not zero.",
    fix="Change one of the two; the report gives the nearest numbers.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
)
def not_divisible(one: OneSetting) -> Finding | None:
    setting, expected = one.setting, one.expected
    multiple = expected.multiple_of
    if multiple is None or not active(one):
        return None
    other = one.value(multiple) if isinstance(multiple, str) else multiple
    value = setting.value
    if not all(type(v) in (int, float) and v for v in (value, other)) or not _remainder(value, other):
        return None
    name = f"`{multiple}` ({shown(other)})" if isinstance(multiple, str) else shown(other)
    title = f"`{setting.key}` ({shown(value)}) is no multiple of {name}"
    parts = (
        [n for n in range(1, int(value) + 1) if value % n == 0][:2000]
        if type(value) is int and 0 < value < 10**6
        else []
    )
    nearest = sorted(sorted(parts, key=lambda n: abs(n - other))[:2])
    below, above = math.floor(value / other) * other, math.ceil(value / other) * other
    number = above if abs(above - value) <= abs(value - below) or not below else below
    fix = mended(f"The nearest multiple of {shown(other)}.", one, literal(number, one.facts.format))
    near = listed(nearest, quote="") if isinstance(multiple, str) else None
    divisors = {f"divisors of {value} near {other}": near} if near else {}
    return finding("not-divisible", one, title, fix, source=expected.source, **divisors)


def _remainder(value: float, other: float) -> bool:
    if type(value) is int and type(other) is int:
        return value % other != 0
    share = value / other
    return abs(share - round(share)) > 1e-9 * max(1.0, abs(share))


def active(one: OneSetting) -> bool:
    """Whether its rules about other keys hold."""
    return one.expected.when is None or one.value(one.expected.when) is True


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
    setting, expected = one.setting, one.expected
    if active(one):
        for other, holds, words in (
            (expected.less_than, lambda a, b: a < b, "must be less than"),
            (expected.at_most, lambda a, b: a <= b, "must be at most"),
        ):
            value = one.value(other)
            if value is not None and _numbers(setting.value, value) and not holds(setting.value, value):
                title = f"`{setting.key}` ({shown(setting.value)}) {words} `{other}` ({shown(value)})"
                limit = value - 1 if other == expected.less_than and type(value) is int else value
                change = mended if holds(limit, value) else template
                fix = change("One that is allowed; choose yours.", one, literal(limit, one.facts.format))
                return finding(
                    "inconsistent", one, title, fix, other=f"{other} = {shown(value)}", source=expected.source
                )
        other, value = expected.not_with, one.value(expected.not_with)
        if setting.value is True and value is True:
            title = f"`{setting.key}` and `{other}` are both true; one excludes the other"
            fix = mended(
                "One of the two, off.", one, "False" if one.facts.format not in ("JSON", "YAML", "TOML") else "false"
            )
            return finding("inconsistent", one, title, fix, other=other, source=expected.source)
        if (
            expected.lenient and other is not None and setting.value in ("fp16", "16-mixed")
        ):  # a precision and its device
            title = f"`{setting.key}` is {shown(setting.value)}, which `{other}: {shown(value)}` excludes"
            half = literal("bf16-mixed" if "-" in setting.value else "bf16", one.facts.format)
            fix = mended("bfloat16 runs there.", one, half)
            return finding("inconsistent", one, title, fix, other=f"{other} = {shown(value)}", source=expected.source)
    for key, owner, value in one.facts.others:
        if key == setting.key:
            title = f"`{setting.key}` is {shown(setting.value)} in the settings and {shown(value)} in the {owner}"
            fix = mended(f"The value of the {owner}.", one, literal(value, one.facts.format))
            return finding("inconsistent", one, title, fix, other=f"{owner}: {shown(value)}")
    return None


def _numbers(*values: Any) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


ORDER = (
    invisible_character,
    duplicate_key,
    unknown_key,
    wrong_type,
    invalid_choice,
    out_of_range,
    missing_path,
    not_divisible,
    inconsistent,
)
