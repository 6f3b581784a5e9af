"""The steps of a record that were not finite, read back from their folders as plain data."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from nbdebug.report import Finding, Fix, Item, LibraryLine, Link, Plot, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import figures
from nbdebug.tools.guard.record.files import WORDS, StepLine, TripFolder, decode, last_steps, read_plain

T = TypeVar("T")

MOST, DEEPEST, LONGEST = 2000, 8, 20_000
"""Of a list, of nesting, of a text in characters: several times what a report of nbdebug has."""


def report_from(raw: Any) -> Report:
    """The Report that `strict(report.to_dict())` was. Raises ValueError for anything else."""
    data = _object(raw, "the report")
    facts = _object(data.get("facts", {}), "facts")
    return Report(
        _field(data, "question"),
        _each(data, "findings", _finding),
        _each(data, "ruled_out", _ruled_out),
        _each(data, "unchecked", _text),
        _each(data, "notes", _text),
        _field(data, "subject"),
        **(_drawings(data) if "plots" in data else _drawings_of_facts(facts)),
    )


def _finding(raw: Any, name: str) -> Finding:
    data = _object(raw, name)
    return Finding(
        _field(data, "code"),
        _field(data, "title"),
        where_from(data.get("where", {}), f"{name}.where"),
        _values(data, "evidence"),
        _each(data, "fixes", _fix),
        _each(data, "chain", _link),
    )


def _fix(raw: Any, name: str) -> Fix:
    data = _object(raw, name)
    verified = data.get("verified")
    if verified is not None and not isinstance(verified, bool):
        raise ValueError(f"{name}.verified is neither true nor false nor null")
    return Fix(_field(data, "title"), _field(data, "code"), verified, _values(data, "after"))


def _link(raw: Any, name: str) -> Link:
    data = _object(raw, name)
    return Link(_field(data, "what"), where_from(data.get("where", {}), f"{name}.where"), _values(data, "evidence"))


def _ruled_out(raw: Any, name: str) -> RuledOut:
    data = _object(raw, name)
    return RuledOut(_field(data, "what"), _field(data, "because"))


def where_from(raw: Any, name: str) -> Where:
    """The place that `dataclasses.asdict(where)` was. Raises ValueError for anything else."""
    data = _object(raw, name)
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
        elif field.name == "library":
            line = _object(value, f"{name}.library")
            known["library"] = LibraryLine(
                _field(line, "file"), _whole(line.get("line"), name), _field(line, "function")
            )
        elif field.name == "items":
            items = [_object(item, name) for item in _items(value, name)]
            known["items"] = tuple(Item(_whole(item.get("index"), name), _field(item, "name")) for item in items)
        else:
            known[field.name] = _text(value, f"{name}.{field.name}")
    return Where(**known)


# -- what the views draw ----------------------------------------------------------------------------------------------


def _drawings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a report that the views draw; one that is not as it should be is left out."""
    readers = {
        "headline": _headline,
        "symptoms": _symptoms,
        "steps": _count,
        "losses": _losses,
        "tables": _tables,
        "plots": _plots,
    }
    return {key: value for key, read in readers.items() if (value := _readable(read, data.get(key))) is not None}


def _drawings_of_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same from a record of before reports had fields for them: there they are keys of the facts."""
    plots = (("histogram", facts.get("exponents")), ("tree", {"modules": facts.get("tree")}))
    lines = _readable(lambda raw: [StepLine.from_json(line) for line in _items(raw, "guard")], facts.get("guard"))
    data = {
        "headline": facts.get("headline"),
        "steps": facts.get("steps"),
        "losses": _readable(lambda raw: _object(raw, "history").get("losses"), facts.get("history")),
        "plots": [{"kind": kind, "data": value} for kind, value in plots if value],
    }
    return {**_drawings(data), "tables": last_steps(lines or [])}


def _readable(read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return None if value is None else read(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _headline(value: Any) -> str:
    return _text(value, "headline")


def _symptoms(value: Any) -> tuple[Symptom, ...]:
    rows = (_object(symptom, "a symptom") for symptom in _items(value, "symptoms"))
    return tuple(Symptom(_field(row, "what"), _field(row, "look")) for row in rows)


def _losses(value: Any) -> tuple[float, ...]:
    losses = [plain(v) for v in _items(value, "losses")]
    return tuple(v for v in losses if isinstance(v, (int, float)))


def _tables(value: Any) -> tuple[Table, ...]:
    tables = (_object(table, "a table") for table in _items(value, "tables"))
    return tuple(
        Table(
            _field(table, "title"),
            _each(table, "columns", _text),
            tuple(tuple(plain(row)) for row in _items(table.get("rows"), "rows") if isinstance(row, list)),
            _field(table, "note"),
            table["open"] if isinstance(table.get("open"), bool) else None,
        )
        for table in tables
    )


def _plots(value: Any) -> tuple[Plot, ...]:
    """The pictures that a trip can have; a record's own course is drawn from its steps."""
    plots = []
    for raw in _items(value, "plots"):
        plot = _object(raw, "a plot")
        read = {"histogram": _exponents, "tree": _tree}.get(str(plot.get("kind")))
        data = _readable(read, plot.get("data")) if read is not None else None
        plots += [Plot(plot["kind"], data)] if data is not None else []
    return tuple(plots)


def _exponents(raw: Any) -> dict[str, Any]:
    data = _object(raw, "exponents")
    counts = {
        key: {str(int(e)): _count(n) for e, n in _object(data.get(key, {}), key).items() if -1100 < int(e) < 1100}
        for key in ("counts", "bad_counts")
    }
    single = {
        key: _count(data[key])
        for key in ("zeros", "nans", "infs", "neg_infs", "bad_zeros")
        if data.get(key) is not None
    }
    return {"dtype": _field(data, "dtype"), "operand": _field(data, "operand"), **counts, **single}


def _tree(raw: Any) -> dict[str, Any]:
    nodes = [_object(node, "tree") for node in _items(_object(raw, "tree").get("modules"), "modules")]
    modules = [
        {
            "name": _field(n, "name"),
            "type": _field(n, "type"),
            "born": n.get("born") is True,
            "path": n.get("path") is True,
        }
        for n in nodes
    ]
    return {"modules": modules}


# -- single values ----------------------------------------------------------------------------------------------------


def plain(value: Any, depth: int = 0) -> Any:
    """Plain data out of JSON, numbers that JSON lacks included. Raises ValueError where it is nested without end."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {_text(k, "a key"): plain(v, depth + 1) for k, v in list(value.items())[:MOST]}
    if isinstance(value, list):
        return [plain(v, depth + 1) for v in value[:MOST]]
    if isinstance(value, str):
        return WORDS[value] if value in WORDS else value[:LONGEST]
    return value


def _values(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    return plain(_object(data.get(key, {}), key))


def _object(raw: Any, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is not a JSON object, but {type(raw).__name__}")
    return raw


def _items(raw: Any, name: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError(f"{name} is not a list, but {type(raw).__name__}")
    return raw[:MOST]


def _each(data: Mapping[str, Any], key: str, take: Callable[[Any, str], T]) -> tuple[T, ...]:
    return tuple([take(item, f"{key}[{n}]") for n, item in enumerate(_items(data.get(key, []), key))])


def _text(raw: Any, name: str) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{name} is not a text, but {type(raw).__name__}")
    return raw[:LONGEST]


def _field(data: Mapping[str, Any], key: str) -> str:
    return _text(data.get(key, ""), key)


def _whole(raw: Any, name: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw < 2**63:
        raise ValueError(f"{name} is not a whole number from 0")
    return raw


def _count(raw: Any) -> int:
    number = _whole(raw, "a count")
    return min(number, math.floor(1e15))


FORM = 1
"""Of step.json; a later nbdebug that writes it otherwise gives it another number."""

REASONS = {
    "loss": "the loss",
    "gradient": "the gradient norm",
    "parameter": "a parameter after the update",
    "buffer": "a running statistic",
}
_LARGEST = {"report.json": 8 * 2**20, "step.json": 64 * 2**20}
"""Bytes; a report has some 20,000, a step with 4,000 ops a few millions."""


@dataclasses.dataclass(repr=False)
class RecordedTrip:
    """One step that was stopped, as the record has it.

    step: 0-based. rank: of the process that wrote it. folder: where. run: the id of its run. time: when, in seconds
    since the epoch, None if not known. reason: what was not finite, a key of REASONS, or "". loss, norm: of the step.
    lines: the last steps, this one last. bad_ranks: the processes that were bad themselves. report: what was found
    then, None where nobody searched. problems: what could not be read. no_replay: why it can't be replayed, "".
    """

    step: int
    rank: int
    folder: pathlib.Path
    run: str = ""
    time: float | None = None
    reason: str = ""
    loss: float | None = None
    norm: float | None = None
    lines: tuple[StepLine, ...] = ()
    bad_ranks: tuple[int, ...] = ()
    report: Report | None = None
    problems: tuple[str, ...] = ()
    no_replay: str = ""
    no_weights: str = ""

    def sentence(self) -> str:
        """What happened, in one sentence."""
        what = REASONS.get(self.reason, "something")
        value = {"loss": self.loss, "gradient": self.norm}.get(self.reason)
        state = "was not finite" if value is None or self.reason == "parameter" else f"was {figures(value, 4)}"
        return f"In step {self.step} {what} {state}"

    def __repr__(self) -> str:
        return f"<RecordedTrip: {self.sentence()}{f', rank {self.rank}' if self.rank else ''}>"


def read_trips(record: pathlib.Path, folders: Iterable[TripFolder]) -> list[RecordedTrip]:
    """The trips in these folders, in the order of time. What is damaged is left out, and `problems` says so."""
    trips = [_read(record / folder.name, folder) for folder in folders]
    return sorted(trips, key=lambda trip: (math.inf if trip.time is None else trip.time, trip.step))


def step_data(folder: pathlib.Path) -> dict[str, Any]:
    """What step.json holds. Raises ValueError or OSError where that can't be read."""
    data = decode(read_plain(folder / "step.json", _LARGEST["step.json"]))
    if not isinstance(data, dict):
        raise ValueError("step.json is not a JSON object")
    return data


def _read(folder: pathlib.Path, name: TripFolder) -> RecordedTrip:
    problems: list[str] = []
    report = (
        _try(
            problems,
            "its report",
            lambda: report_from(decode(read_plain(folder / "report.json", _LARGEST["report.json"]))),
        )
        if _exists(folder / "report.json")
        else None
    )
    data = _try(problems, "what a replay needs", lambda: step_data(folder)) if _exists(folder / "step.json") else None
    if data is None:
        why = "its step.json is missing" if not problems else problems[-1]
        return RecordedTrip(name.step, name.rank, folder, report=report, problems=tuple(problems), no_replay=why)
    lines = _try(
        problems,
        "the steps before it",
        lambda: tuple(StepLine.from_json(line) for line in _short_list(data.get("lines"))),
    )
    if data.get("form") != FORM:
        data["no_replay"] = f"nbdebug {_short_text(data, 'nbdebug') or 'of another version'} wrote it in another form"
    ranks = tuple(r for r in _short_list(data.get("bad_ranks")) if isinstance(r, int) and 0 <= r < 10**6)
    return RecordedTrip(
        name.step,
        name.rank,
        folder,
        _short_text(data, "run"),
        _number(data, "time"),
        _short_text(data, "reason"),
        _number(data, "loss"),
        _number(data, "norm"),
        lines or (),
        ranks,
        report,
        tuple(problems),
        _short_text(data, "no_replay") if "tape" in data else _short_text(data, "no_replay") or "it was not written",
        _short_text(data, "no_weights"),
    )


def _exists(path: pathlib.Path) -> bool:
    return path.exists() or path.is_symlink()


def _try(problems: list[str], what: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (ValueError, OSError) as reason:
        problems.append(f"{what} can't be read ({reason})")
        return None


def _short_list(raw: Any) -> list[Any]:
    return raw[:1000] if isinstance(raw, list) else []


def _short_text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    return value[:1000] if isinstance(value, str) else ""


def _number(data: dict[str, Any], key: str) -> float | None:
    value = plain(data.get(key)) if isinstance(data.get(key), (str, int, float)) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e300 or value != value or abs(value) == math.inf else None
