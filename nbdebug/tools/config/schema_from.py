"""What each setting may be: of a schema that the user has, or drafted from a config that works."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.tools.config.conventions import convention
from nbdebug.tools.config.document import Expectation, read
from nbdebug.tools.config.rules import within

NUMBERS = ("int", "float")
TYPES = ("int", "float", "str", "bool", "list", "object")
JSON_TYPES = {
    "integer": "int",
    "number": "float",
    "string": "str",
    "boolean": "bool",
    "array": "list",
    "object": "object",
}
PYTHON_TYPES = {int: "int", float: "float", str: "str", bool: "bool", list: "list", tuple: "list", dict: "object"}
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
        kind = PYTHON_TYPES.get(type(setting.value))
        within_list = any(
            key.startswith(f"{other}.") for other, entry in drafted.items() if entry.get("type") == "list"
        )
        if setting.section and not any(other.startswith(f"{key}.") for other in document.settings):
            drafted[key] = {"type": "object"}
        if setting.section or within_list:
            continue
        usual = convention(setting.name)
        drafted[key] = {"type": kind} if kind else {}  # of nothing, or a date, no type is known
        if usual is not None and usual.type in NUMBERS and kind in NUMBERS and within(setting.value, usual):
            drafted[key]["type"] = usual.type if kind == "int" else kind
            limits = {"min": usual.min, "max": usual.max, "below": usual.below}
            drafted[key] |= {name: limit for name, limit in limits.items() if limit is not None}
    return drafted


def expectations(schema: Any) -> tuple[dict[str, Expectation], bool]:
    """(what each dotted key may be, whether other keys are unknown). schema: as for `check_config`. Raises TypeError
    for what is none, ValueError for an entry that can't be understood."""
    if isinstance(schema, (str, pathlib.Path)):
        schema = read(schema).data()
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        whole = schema.model_json_schema()
        return dict(_of_json(whole, whole, "")), whole.get("additionalProperties") is not True
    if dataclasses.is_dataclass(schema):
        return dict(_of_dataclass(schema if isinstance(schema, type) else type(schema), "")), True
    if not isinstance(schema, Mapping):
        raise TypeError(
            f"schema takes a JSON Schema, a dataclass, a pydantic model, or a dict of dotted keys, each with its rules "
            f'({{"lr": {{"type": "float", "min": 0}}}}); got {type(schema).__name__}.'
        )
    if "$schema" in schema or isinstance(schema.get("properties"), Mapping):
        return dict(_of_json(schema, schema, "")), schema.get("additionalProperties") is False
    return {str(key): _entry(str(key), rules) for key, rules in schema.items()}, True


VALIDATORS = {
    "type": "wrong-type", "enum": "invalid-choice", "const": "invalid-choice", "pattern": "invalid-choice",
    "minimum": "out-of-range", "maximum": "out-of-range", "exclusiveMinimum": "out-of-range",
    "exclusiveMaximum": "out-of-range", "minItems": "out-of-range", "maxItems": "out-of-range",
    "minLength": "out-of-range", "maxLength": "out-of-range", "multipleOf": "not-divisible",
    "additionalProperties": "unknown-key", "not": "inconsistent", "dependentRequired": "inconsistent",
    "required": "inconsistent", "if": "inconsistent", "oneOf": "inconsistent", "anyOf": "wrong-type",
}  # fmt: skip
"""What a JSON Schema says → the cause."""


def violations(schema: Any, data: Any) -> list[tuple[str, str, str]]:
    """(key, code, sentence) of all that breaks a JSON Schema, by the jsonschema library; [] for another schema, and
    where the library is not installed. No reference is fetched."""
    if isinstance(schema, (str, pathlib.Path)):
        schema = read(schema).data()
    if not isinstance(schema, Mapping) or not ("$schema" in schema or isinstance(schema.get("properties"), Mapping)):
        return []
    try:
        import jsonschema
        import referencing
    except ImportError:
        return []
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        broken = list(kind(schema, registry=referencing.Registry()).iter_errors(data))
    except (jsonschema.exceptions.SchemaError, referencing.exceptions.Unresolvable, TypeError, ValueError) as error:
        raise ValueError(f"schema can't be used: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    keys = [(".".join(map(str, one.absolute_path)), one) for one in broken if one.validator in VALIDATORS]
    return [(key, f"config/{VALIDATORS[str(one.validator)]}", str(one.message)) for key, one in keys]


def _entry(key: str, rules: Any) -> Expectation:
    if not isinstance(rules, Mapping) or not set(rules) <= RULES or rules.get("type") not in (None, *TYPES):
        raise ValueError(
            f"schema[{key!r}] takes a dict of {', '.join(sorted(RULES))} (type: {', '.join(TYPES)}); got {rules!r}."
        )
    values: dict[str, Any] = {name: tuple(rule) if name == "choices" else rule for name, rule in rules.items()}
    return Expectation(**values)


def _of_json(
    part: Mapping[str, Any], whole: Mapping[str, Any], prefix: str, depth: int = 0
) -> Iterator[tuple[str, Expectation]]:
    """The properties of a JSON Schema, by dotted key."""
    for name, rules in part.get("properties", {}).items():
        rules, null = _resolved(rules, whole)
        key = f"{prefix}{name}"
        if isinstance(rules.get("properties"), Mapping) and depth < 20:
            yield from _of_json(rules, whole, f"{key}.", depth + 1)
            continue
        kind = rules.get("type")
        choices = rules.get("enum") or ([rules["const"]] if "const" in rules else None)
        yield (
            key,
            Expectation(
                type=JSON_TYPES.get(kind) if isinstance(kind, str) else None,
                min=rules.get("minimum"),
                max=rules.get("maximum"),
                below=rules.get("exclusiveMaximum"),
                choices=tuple(choices) if choices else None,
                multiple_of=rules.get("multipleOf"),
                null=null or kind is None,
            ),
        )


def _resolved(rules: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """(the rules behind a reference, or of the one type beside null; whether null is allowed)."""
    null = False
    for _ in range(10):
        if "$ref" in rules:
            target: Any = whole
            for step in str(rules["$ref"]).lstrip("#/").split("/"):
                target = target.get(step, {}) if isinstance(target, Mapping) else {}
            rules = target
        elif isinstance(rules.get("type"), list):
            kinds = [kind for kind in rules["type"] if kind != "null"]
            null = null or len(kinds) < len(rules["type"])
            rules = {**rules, "type": kinds[0] if len(kinds) == 1 else None}
        elif any(name in rules for name in ("anyOf", "oneOf", "allOf")):
            options = [rule for name in ("anyOf", "oneOf", "allOf") for rule in rules.get(name, ())]
            others = [rule for rule in options if rule.get("type") != "null"]
            null = null or len(others) < len(options)
            rules = others[0] if len(others) == 1 else {}
        else:
            break
    return rules, null


def _of_dataclass(kind: Any, prefix: str) -> Iterator[tuple[str, Expectation]]:
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # a name that is not there at run time: its fields are free
        hints = {}
    for field in dataclasses.fields(kind):
        if field.init:
            yield from _of_hint(hints.get(field.name, Any), f"{prefix}{field.name}")


def _of_hint(hint: Any, key: str) -> Iterator[tuple[str, Expectation]]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    null = False
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        null = len(others) < len(arguments)
        hint = others[0] if len(others) == 1 else Any
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield from _of_dataclass(hint, f"{key}.")
    elif origin is typing.Literal:
        yield key, Expectation(choices=arguments, null=null)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield key, Expectation(choices=tuple(one.value for one in hint), null=null)
    else:
        yield key, Expectation(type=PYTHON_TYPES.get(origin or hint), null=null or hint is Any)
