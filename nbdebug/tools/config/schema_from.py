"""What each setting may be: of a schema that the user has, or drafted from a config that works."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.tools.config.conventions import convention
from nbdebug.tools.config.document import Expectation, read
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
