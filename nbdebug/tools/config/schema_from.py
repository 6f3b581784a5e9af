"""What each setting may be: of a schema that the user has, drafted from a config that works, or as it is usual."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdebug.tools.config import tables
from nbdebug.tools.config.document import Expectation, Setting, read
from nbdebug.tools.config.rules import within
from nbdebug.tools.config.tables import JSON_TYPES, LIMITS, PYTHON_TYPES, VALIDATORS

RULES = frozenset(field.name for field in dataclasses.fields(Expectation)) - {"lenient", "source", "null"}


def schema_from(path_or_mapping: Any) -> dict[str, dict[str, Any]]:
    """A first schema, drafted from a config that works: for each dotted key its type, and the range where the field has
    one. Look it over, then give it to `check_config(other, schema=…)`.

    path_or_mapping: as for `check_config`. Raises ValueError where the file can't be read.
    """
    document = read(path_or_mapping)
    if document.root is None or document.flaws:
        raise ValueError("schema_from needs a config that can be read; check_config says what is wrong with this one.")
    drafted: dict[str, dict[str, Any]] = {}
    for key, setting in document.settings.items():
        if setting.section and not any(other.startswith(f"{key}.") for other in document.settings):
            drafted[key] = {"type": "object"}
        in_list = any(key.startswith(f"{k}.") for k, entry in drafted.items() if entry.get("type") == "list")
        if setting.section or in_list:
            continue
        kind, usual = PYTHON_TYPES.get(type(setting.value)), convention(setting.name)
        drafted[key] = {"type": kind} if kind else {}  # of nothing, or a date, no type is known
        if usual is not None and {usual.type, kind} <= {"int", "float"} and within(setting.value, usual):
            drafted[key]["type"] = usual.type if kind == "int" else kind
            drafted[key] |= {n: getattr(usual, n) for n in ("min", "max", "below") if getattr(usual, n) is not None}
    return drafted


def expectations(schema: Any) -> tuple[dict[str, Expectation], bool]:
    """(what each dotted key may be, whether other keys are unknown). schema: as for `check_config`. Raises TypeError
    for what is none, ValueError for an entry that can't be understood."""
    if is_pydantic := hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if dataclasses.is_dataclass(schema):
        return dict(_of_dataclass(schema if isinstance(schema, type) else type(schema), "")), True
    if not isinstance(schema, Mapping):
        takes = 'a JSON Schema, a dataclass, a pydantic model, or a dict of dotted keys such as {"lr": {"min": 0}}'
        raise TypeError(f"schema takes {takes}; got {type(schema).__name__}.")
    if is_pydantic or _is_json_schema(schema):
        return dict(_of_json(schema, schema, "")), schema.get("additionalProperties", not is_pydantic) is False
    return {str(key): _entry(str(key), rules) for key, rules in schema.items()}, True


def _is_json_schema(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("$schema" in schema or isinstance(schema.get("properties"), Mapping))


def violations(schema: Any, data: Any) -> list[tuple[str, str, str]]:
    """(key, code, sentence) of all that breaks a JSON Schema, by the jsonschema library; [] for another schema, and
    where the library is not installed. No reference is fetched."""
    try:
        import jsonschema
        import referencing
    except ImportError:
        return []
    if not _is_json_schema(schema):
        return []
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        broken = list(kind(schema, registry=referencing.Registry()).iter_errors(data))
    except (jsonschema.exceptions.SchemaError, referencing.exceptions.Unresolvable, TypeError, ValueError) as error:
        raise ValueError(f"schema can't be used: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    keys = [(".".join(map(str, one.absolute_path)), one) for one in broken if one.validator in VALIDATORS]
    return [(key, f"config/{VALIDATORS[str(one.validator)]}", str(one.message)) for key, one in keys]


def _entry(key: str, rules: Any) -> Expectation:
    types = tuple(JSON_TYPES.values())
    if not isinstance(rules, Mapping) or not set(rules) <= RULES or rules.get("type", "int") not in types:
        takes = f"a dict of {', '.join(sorted(RULES))} (type: {', '.join(types)})"
        raise ValueError(f"schema[{key!r}] takes {takes}; got {rules!r}.")
    values: dict[str, Any] = {name: tuple(rule) if name == "choices" else rule for name, rule in rules.items()}
    return Expectation(**values)


def _of_json(
    part: Mapping[str, Any], whole: Mapping[str, Any], prefix: str, depth: int = 0
) -> Iterator[tuple[str, Expectation]]:
    """The properties of a JSON Schema, by dotted key."""
    for name, rules in part.get("properties", {}).items():
        rules, null = _resolved(rules, whole)
        kind, choices = rules.get("type"), rules.get("enum") or ([rules["const"]] if "const" in rules else None)
        if isinstance(rules.get("properties"), Mapping) and depth < 20:
            yield from _of_json(rules, whole, f"{prefix}{name}.", depth + 1)
            continue
        limits: dict[str, Any] = {own: rules.get(theirs) for own, theirs in LIMITS.items()}
        own_type, allowed = JSON_TYPES.get(str(kind)), tuple(choices) if choices else None
        yield prefix + name, Expectation(own_type, choices=allowed, null=null or kind is None, **limits)


def _resolved(rules: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """(the rules behind a reference, or of the one type beside null; whether null is allowed)."""
    null = False
    for _ in range(10):
        options = [rule for name in ("anyOf", "oneOf", "allOf") for rule in rules.get(name, ())]
        if "$ref" in rules:
            steps = str(rules["$ref"]).lstrip("#/").split("/")
            rules = functools.reduce(lambda at, step: at.get(step, {}) if isinstance(at, Mapping) else {}, steps, whole)
        elif isinstance(rules.get("type"), list):
            options = [{**rules, "type": kind} for kind in rules["type"]]
        elif not options:
            break
        if options:
            others = [rule for rule in options if rule.get("type") != "null"]
            null = null or len(others) < len(options)
            rules = others[0] if len(others) == 1 else {}
    return rules, null


def _of_dataclass(kind: Any, prefix: str) -> Iterator[tuple[str, Expectation]]:
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a name that is not there at run time: its fields are free
        hints = typing.get_type_hints(kind)
    for field in (field for field in dataclasses.fields(kind) if field.init):
        hint, key = hints.get(field.name, Any), f"{prefix}{field.name}"
        arguments, null = typing.get_args(hint), hint is Any
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            others = [argument for argument in arguments if argument is not type(None)]
            null, hint = len(others) < len(arguments) or len(others) > 1, others[0] if len(others) == 1 else Any
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _of_dataclass(hint, f"{key}.")
            continue
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            choices = tuple(one.value for one in hint)
        yield key, Expectation(PYTHON_TYPES.get(typing.get_origin(hint) or hint), choices=choices, null=null)


@functools.cache
def convention(name: str) -> Expectation | None:
    """What a setting of this name may be; None where nothing is known."""
    name = name.lower()
    usual = functools.partial(Expectation, lenient=True, null=True)
    for names, rules, source in tables.PAGES:
        if name in names.split():
            return usual(**rules, source=source)
    if re.fullmatch(tables.DROPOUT, name):
        return usual(type="float", min=0, max=1, source="torch.nn.Dropout: a probability")
    if name in tables.CHOICES:
        return usual(type="str", choices=tuple(tables.CHOICES[name][0].split()), source=tables.CHOICES[name][1])
    return None


def conventions(settings: Mapping[str, Setting]) -> dict[str, Expectation]:
    """What the settings of a file may be, by their names and by each other."""
    expected: dict[str, Expectation] = {}
    for key, setting in settings.items():
        usual = convention(setting.name)
        if usual is None or setting.section:
            continue
        counts = usual.type == "int" or "epoch" in setting.name or "step" in setting.name
        if setting.value != tables.OFF or not counts:
            expected[key] = usual
    for key, relation in _relations(settings):
        usual = expected.get(key, Expectation(lenient=True, null=True))
        expected[key] = dataclasses.replace(usual, **relation)
    return expected


def _relations(settings: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    sections: dict[str, dict[str, Setting]] = {}
    for setting in settings.values():
        sections.setdefault(setting.parent, {})[setting.name] = setting
    for here in sections.values():
        yield from _beside(here)
    for first, second in tables.EXCLUDING:
        for key in settings:
            other = key.removesuffix(first) + second
            if f".{key}".endswith(f".{first}") and other in settings:
                yield key, {"not_with": other, "source": "transformers and DeepSpeed refuse both"}
    warmups, totals = (
        [s for s in settings.values() if s.name in names.split()] for names in (tables.WARMUPS, tables.TOTALS)
    )
    if len(warmups) == len(totals) == 1 and _positive(totals):  # the file has one of each
        yield warmups[0].key, {"at_most": totals[0].key, "source": "the warm-up is a part of the training"}


def _beside(here: Mapping[str, Setting]) -> Iterator[tuple[str, dict[str, Any]]]:
    """In one section."""
    for names, relation, others, beside, source in tables.RELATIONS:
        one, two = (_positive(here.get(name) for name in group.split()) for group in (names, others))
        if relation == "multiple_of" and {type(s.value) for s in (*one, *two)} != {int}:
            continue
        needed, unless = beside.get("when", ""), [name for name in beside.get("unless", "").split() if name in here]
        clear = len(one) == 1 and len({s.value for s in two}) == 1 and (not needed or needed in here)
        if clear and all(here[name].value in (None, "steps") for name in unless):
            yield one[0].key, {relation: two[0].key, "source": source, "when": here[needed].key if needed else None}
    micro, steps = (here.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    for total in _positive([here.get("train_batch_size")]) if _positive([micro]) else ():
        factor = math.prod(s.value for s in _positive([micro, steps]))
        yield total.key, {"multiple_of": factor, "source": "DeepSpeed: micro batch x accumulation steps x GPUs"}
    for name, halves, place, asked, source in tables.DEVICES:
        if name in here and place in here and here[name].value in halves and here[place].value == asked:
            yield here[name].key, {"not_with": here[place].key, "source": source}


def _positive(settings: Iterable[Setting | None]) -> list[Setting]:
    return [s for s in settings if s is not None and type(s.value) in (int, float) and s.value > 0]


def misspelt(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Keys that differ from a long, usual one by two letters swapped, or one missing or too many. They are no usual key
    and no plural, and the usual one does not stand beside them."""
    near: dict[str, str] = {}
    siblings = {(setting.parent, setting.name) for setting in settings.values()}
    for key, setting in settings.items():
        name = setting.name
        if len(name) < 9 or name in tables.KNOWN or name in tables.USUAL or not re.fullmatch(r"[a-z_]+", name):
            continue
        for usual in difflib.get_close_matches(name, tables.KNOWN, n=1, cutoff=0.88):
            if len(usual) > 8 and (setting.parent, usual) not in siblings and _slip(name, usual):
                near[key] = usual
    return near


def _slip(name: str, usual: str) -> bool:
    """Whether a slip of the finger leads from one to the other; a plural or another word is none, and another letter
    may be another word: patch_size, batch_size."""
    if name.rstrip("s") == usual.rstrip("s") or name.count("_") != usual.count("_") or re.search(r"\d", usual):
        return False
    short, long = sorted((name, usual), key=len)
    swapped = (name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1))
    return usual in swapped or any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
