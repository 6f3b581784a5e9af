"""The steps of a record that were not finite, read back from their folders as plain data."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nbdebug.chapters.nan.guard.lines import StepLine, decoded
from nbdebug.chapters.nan.guard.record_files import TripFolder, whole
from nbdebug.chapters.nan.guard.record_report import plain, report_from
from nbdebug.finding import Report

FORM = 1
"""Of step.json; a later nbdebug that writes it otherwise gives it another number."""
T = TypeVar("T")

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
    then, None where nothing was looked for. problems: what could not be read. no_replay: why it can't be replayed, "".
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
        said = "was not finite" if value is None or self.reason == "parameter" else f"was {value:.4g}"
        return f"In step {self.step} {what} {said}"

    def __repr__(self) -> str:
        return f"<RecordedTrip: {self.sentence()}{f', rank {self.rank}' if self.rank else ''}>"


def read_trips(record: pathlib.Path, folders: Iterable[TripFolder]) -> list[RecordedTrip]:
    """The trips in these folders, in the order of time. What is damaged is left out and said in `problems`."""
    trips = [_read(record / folder.name, folder) for folder in folders]
    return sorted(trips, key=lambda trip: (math.inf if trip.time is None else trip.time, trip.step))


def step_data(folder: pathlib.Path) -> dict[str, Any]:
    """What step.json holds. Raises ValueError or OSError where that can't be read."""
    data = decoded(whole(folder / "step.json", _LARGEST["step.json"]))
    if not isinstance(data, dict):
        raise ValueError("step.json is no object of JSON")
    return data


def _read(folder: pathlib.Path, name: TripFolder) -> RecordedTrip:
    problems: list[str] = []
    report = (
        _tried(
            problems, "its report", lambda: report_from(decoded(whole(folder / "report.json", _LARGEST["report.json"])))
        )
        if _there(folder / "report.json")
        else None
    )
    data = _tried(problems, "what a replay needs", lambda: step_data(folder)) if _there(folder / "step.json") else None
    if data is None:
        why = "its step.json is missing" if not problems else problems[-1]
        return RecordedTrip(name.step, name.rank, folder, report=report, problems=tuple(problems), no_replay=why)
    lines = _tried(
        problems, "the steps before it", lambda: tuple(StepLine.from_json(line) for line in _list(data.get("lines")))
    )
    if data.get("form") != FORM:
        data["no_replay"] = f"nbdebug {_text(data, 'nbdebug') or 'of another version'} wrote it in another form"
    ranks = tuple(r for r in _list(data.get("bad_ranks")) if isinstance(r, int) and 0 <= r < 10**6)
    return RecordedTrip(
        name.step,
        name.rank,
        folder,
        _text(data, "run"),
        _number(data, "time"),
        _text(data, "reason"),
        _number(data, "loss"),
        _number(data, "norm"),
        lines or (),
        ranks,
        report,
        tuple(problems),
        _text(data, "no_replay") if "tape" in data else _text(data, "no_replay") or "it was not written down",
        _text(data, "no_weights"),
    )


def _there(path: pathlib.Path) -> bool:
    return path.exists() or path.is_symlink()


def _tried(problems: list[str], what: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (ValueError, OSError) as reason:
        problems.append(f"{what} can't be read ({reason})")
        return None


def _list(given: Any) -> list[Any]:
    return given[:1000] if isinstance(given, list) else []


def _text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    return value[:1000] if isinstance(value, str) else ""


def _number(data: dict[str, Any], key: str) -> float | None:
    value = plain(data.get(key)) if isinstance(data.get(key), (str, int, float)) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e300 or value != value or abs(value) == math.inf else None
