"""A Report from the report.json of a record: every part is looked at before it is believed.

The file may have been written by somebody else. So what has the wrong type, is endless or is nested without end raises
a ValueError that names it, and of the facts only those that the views can draw are taken. Text stays as it is: the
views escape it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nbdebug.chapters.nan.guard.lines import WORDS
from nbdebug.finding import Finding, Fix, Link, Report, RuledOut, Where

T = TypeVar("T")

MOST, DEEPEST, LONGEST = 2000, 8, 20_000
"""Of a list, of nesting, of a text in characters: several times what a report of nbdebug has."""


def report_from(given: Any) -> Report:
    """The Report that `strict(report.to_dict())` was. Raises ValueError for anything else."""
    data = _object(given, "the report")
    return Report(
        _text(data, "question"),
        _each(data, "findings", _finding),
        _each(data, "ruled_out", _ruled_out),
        _each(data, "unchecked", _said),
        _each(data, "notes", _said),
        _text(data, "subject"),
        _facts(_object(data.get("facts", {}), "facts")),
    )


def _finding(given: Any, name: str) -> Finding:
    data = _object(given, name)
    return Finding(
        _text(data, "code"),
        _text(data, "title"),
        where_from(data.get("where", {}), f"{name}.where"),
        _values(data, "evidence"),
        _each(data, "fixes", _fix),
        _each(data, "chain", _link),
    )


def _fix(given: Any, name: str) -> Fix:
    data = _object(given, name)
    verified = data.get("verified")
    if verified is not None and not isinstance(verified, bool):
        raise ValueError(f"{name}.verified is neither true nor false nor null")
    return Fix(_text(data, "title"), _text(data, "code"), verified, _values(data, "after"))


def _link(given: Any, name: str) -> Link:
    data = _object(given, name)
    return Link(_text(data, "what"), where_from(data.get("where", {}), f"{name}.where"), _values(data, "evidence"))


def _ruled_out(given: Any, name: str) -> RuledOut:
    data = _object(given, name)
    return RuledOut(_text(data, "what"), _text(data, "because"))


def where_from(given: Any, name: str) -> Where:
    """The place that `dataclasses.asdict(where)` was. Raises ValueError for anything else."""
    data = _object(given, name)
    known: dict[str, Any] = {}
    for field in dataclasses.fields(Where):
        value = data.get(field.name)
        if value is None:
            continue
        if field.name in ("step", "line", "rank"):
            known[field.name] = _whole(value, f"{name}.{field.name}")
        elif field.name == "samples":
            rows = value if isinstance(value, list) else [value]
            known["samples"] = tuple(_whole(row, f"{name}.samples") for row in rows[:100_000])
        else:
            known[field.name] = _said(value, f"{name}.{field.name}")
    return Where(**known)


# -- what the views draw ----------------------------------------------------------------------------------------------


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the facts that the views know; one that is not as it should be is left out."""
    taken: dict[str, Any] = {}
    for key, take in (
        ("steps", _count),
        ("history", _history),
        ("exponents", _exponents),
        ("tree", _tree),
        ("headline", _headline),
        ("guard", _lines),
    ):
        if data.get(key) is not None:
            try:
                taken[key] = take(data[key])
            except (ValueError, TypeError, OverflowError):
                continue
    return taken


def _history(given: Any) -> dict[str, Any]:
    losses = [plain(v) for v in _object(given, "history").get("losses", [])[:MOST]]
    return {"losses": [v for v in losses if isinstance(v, (int, float))]}


def _exponents(given: Any) -> dict[str, Any]:
    data = _object(given, "exponents")
    counts = {
        key: {str(int(e)): _count(n) for e, n in _object(data.get(key, {}), key).items() if -1100 < int(e) < 1100}
        for key in ("counts", "bad_counts")
    }
    single = {
        key: _count(data[key])
        for key in ("zeros", "nans", "infs", "neg_infs", "bad_zeros")
        if data.get(key) is not None
    }
    return {"dtype": _text(data, "dtype"), "operand": _text(data, "operand"), **counts, **single}


def _headline(given: Any) -> str:
    return _said(given, "headline")


def _lines(given: Any) -> list[dict[str, Any]]:
    """The last steps that the guard had seen."""
    keys = ("step", "loss", "norm", "clipped", "outcome")
    lines = [_object(line, "guard") for line in _list(given, "guard")]
    return [{k: plain(line[k]) for k in keys if k in line and not isinstance(line[k], (list, dict))} for line in lines]


def _tree(given: Any) -> list[dict[str, Any]]:
    nodes = [_object(node, "tree") for node in _list(given, "tree")]
    return [
        {
            "name": _text(n, "name"),
            "type": _text(n, "type"),
            "born": n.get("born") is True,
            "path": n.get("path") is True,
        }
        for n in nodes
    ]


# -- single values ----------------------------------------------------------------------------------------------------


def plain(value: Any, depth: int = 0) -> Any:
    """Plain data out of JSON, numbers that JSON lacks included. Raises ValueError where it is nested without end."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {_said(k, "a key"): plain(v, depth + 1) for k, v in list(value.items())[:MOST]}
    if isinstance(value, list):
        return [plain(v, depth + 1) for v in value[:MOST]]
    if isinstance(value, str):
        return WORDS[value] if value in WORDS else value[:LONGEST]
    return value


def _values(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    return plain(_object(data.get(key, {}), key))


def _object(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is no object of JSON, but {type(given).__name__}")
    return given


def _list(given: Any, name: str) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"{name} is no list, but {type(given).__name__}")
    return given[:MOST]


def _each(data: Mapping[str, Any], key: str, take: Callable[[Any, str], T]) -> tuple[T, ...]:
    return tuple([take(item, f"{key}[{n}]") for n, item in enumerate(_list(data.get(key, []), key))])


def _said(given: Any, name: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{name} is no text, but {type(given).__name__}")
    return given[:LONGEST]


def _text(data: Mapping[str, Any], key: str) -> str:
    return _said(data.get(key, ""), key)


def _whole(given: Any, name: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 2**63:
        raise ValueError(f"{name} is no whole number from 0")
    return given


def _count(given: Any) -> int:
    number = _whole(given, "a count")
    return min(number, math.floor(1e15))
