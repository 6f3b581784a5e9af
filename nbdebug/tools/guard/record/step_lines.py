"""One step of a guarded run in numbers, and its form as a line of JSON.

JSON has no NaN and no infinity, and Python writes them as words that other readers refuse. So they are written as the
strings "nan", "inf" and "-inf": the file is strict JSON, and a guard's record is about nothing but such numbers.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from nbdebug.live import progress_bar
from nbdebug.report import Table
from nbdebug.tools.guard.record.files import MOST_BYTES, StepsFile, open_plain

OUTCOMES = ("ok", "tripped", "skipped", "above", "scaler")
"""What became of a step: the update was made; the guard tripped; a non-finite step was dropped (on_trip="skip"); the
gradient norm was above `skip_above`, and the step was dropped; GradScaler found inf gradients and skipped it."""

TOO_OFTEN = 0.5
"""Where more than this share of the steps is clipped, clipping sets the size of the steps, and not the learning rate
(Google's tuning playbook)."""
ENOUGH = 10
"""Steps before a share says anything."""
CLIPPED_TOO_OFTEN = (
    "More than half of the steps were clipped: the learning rate is too high for this model (or max_grad_norm is too "
    "low). Clipping sets the size of the steps then, not the learning rate."
)

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""The numbers that JSON lacks, by the strings that stand for them."""

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: a line must cost next to nothing


@dataclasses.dataclass(frozen=True)
class StepLine:
    """One step. step: 0-based. loss: the sum of the roots of backward, None where the guard could not see it. norm: of
    all gradients together, before they were clipped. clipped: whether they were. outcome: one of OUTCOMES. lr: of the
    first parameter group. time: in seconds since the epoch."""

    step: int
    loss: float | None = None
    norm: float | None = None
    clipped: bool = False
    outcome: str = "ok"
    lr: float | None = None
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dict that strict JSON can hold."""
        return {
            "step": self.step,
            "loss": _word(self.loss),
            "norm": _word(self.norm),
            "clipped": self.clipped,
            "outcome": self.outcome,
            "lr": _word(self.lr),
            "time": _word(self.time),
        }

    @classmethod
    def from_json(cls, value: Any) -> StepLine:
        """The step of such a dict; keys that are not known are ignored. Raises ValueError for nonsense."""
        if not isinstance(value, Mapping):
            raise ValueError(f"a step is a JSON object, not {type(value).__name__}")
        step, clipped, outcome, time = map(value.get, ("step", "clipped", "outcome", "time"))
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise ValueError("`step` is a whole number from 0")
        if not isinstance(clipped, bool):
            raise ValueError("`clipped` is true or false")
        if outcome not in OUTCOMES:
            raise ValueError(f"`outcome` is one of {', '.join(OUTCOMES)}")
        if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < 2**53:
            raise ValueError("`time` is in seconds since the epoch")
        loss, norm, lr = (_number(value, key) for key in ("loss", "norm", "lr"))
        return cls(step, loss, norm, clipped, outcome, lr, float(time))


def too_often_clipped(clipped: int, steps: int) -> bool:
    return steps >= ENOUGH and clipped > TOO_OFTEN * steps


DROPPED = {
    "tripped": "not finite, stopped",
    "skipped": "not finite, dropped",
    "above": "norm too large, dropped",
    "scaler": "skipped by GradScaler",
}
"""Why a step made no update, by its outcome."""
SHOWN = 30
"""Steps of the table of the last ones."""


def last_steps(lines: Sequence[StepLine]) -> tuple[Table, ...]:
    """The table of the last steps; none where there is no step."""
    rows = []
    for line in list(lines)[-SHOWN:]:
        words = ("clipped" * line.clipped, DROPPED.get(line.outcome, ""))
        rows.append((line.step, line.loss, line.norm, "; ".join(filter(None, words)) or "updated"))
    title = "The last step" if len(rows) == 1 else f"The last {len(rows)} steps"
    return (Table(title, ("step", "loss", "gradient norm", "what was done"), rows, open=False),) if rows else ()


def encode(values: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Raises ValueError for a bare NaN or infinity, TypeError for what is no plain data."""
    return _encoder.encode(values).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """What a line of strict JSON holds. Raises ValueError for anything else, endless numbers and nesting included."""
    try:
        return _decoder.decode(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def salvage(line: bytes) -> Iterator[Any]:
    """The whole objects in a line that is damaged: one before its damage, or one that ran together with it."""
    text = line.decode("utf-8", "replace")
    start = text.find('{"')
    while start >= 0:
        try:
            value, end = _decoder.raw_decode(text, start)
            yield value
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find('{"', end)


def strict(value: Any) -> Any:
    """Plain data with the numbers that JSON lacks written as words; what is no plain data becomes its text."""
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, float):
        return _word(float(value))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _word(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def _number(values: Mapping[str, Any], key: str) -> float | None:
    """A number of any size, or None. Raises ValueError for anything else; a key must be there."""
    value = values.get(key, "")
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    if value is None or type(value) in (int, float):
        try:
            number = None if value is None else float(value)
        except OverflowError:
            raise ValueError(f"`{key}` is larger than a number can be") from None
        if number is None or math.isfinite(number):
            return number
    raise ValueError(f"`{key}` is a number, null, or one of {', '.join(WORDS)}")


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)


_LONGEST = 2**16
"""Bytes of a line; those of a step have about 130, those of a header a few hundred."""
_MOST_SALVAGED = 4 * 1024
"""Of a damaged line, so many bytes are searched: two lines and more."""
_RUNS = 10_000
_SLOW = 32 * 2**20
"""Bytes that take longer than about two seconds to read: then a bar shows how far it is."""
_NAN = float("nan")


class Columns:
    """Steps as columns: a night of a million steps fits into 50 MB. What is None becomes NaN."""

    def __init__(self) -> None:
        self.step = array.array("q")
        self.loss, self.norm, self.lr, self.time = (array.array("d") for _ in range(4))
        self.clipped, self.outcome = array.array("b"), array.array("b")

    def __len__(self) -> int:
        return len(self.step)

    def add(self, line: StepLine) -> None:
        self.step.append(line.step)
        self.loss.append(_NAN if line.loss is None else line.loss)
        self.norm.append(_NAN if line.norm is None else line.norm)
        self.lr.append(_NAN if line.lr is None else line.lr)
        self.time.append(line.time)
        self.clipped.append(line.clipped)
        self.outcome.append(OUTCOMES.index(line.outcome))


@dataclasses.dataclass
class RecordedRun:
    """One run of one process. about: what its guard was given. began: when, in seconds since the epoch, None where its
    header is gone. lost: lines that could never be written."""

    id: str
    rank: int
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    began: float | None = None
    lost: int = 0
    columns: Columns = dataclasses.field(default_factory=Columns, repr=False)

    @property
    def steps(self) -> int:
        return len(self.columns)

    @property
    def alarms(self) -> list[int]:
        """Which of its steps, by their places in the columns, were not finite. Those that the user wanted skipped in
        silence (on_trip="skip") are none."""
        codes = [OUTCOMES.index("tripped")] + [OUTCOMES.index("skipped")] * (self.about.get("on_trip") != "skip")
        return [n for n, code in enumerate(self.columns.outcome) if code in codes]


def read_runs(folder: pathlib.Path, files: Iterable[StepsFile]) -> tuple[list[RecordedRun], int]:
    """The runs in these files, by rank and in order, and how many lines could not be read. Raises OSError, and
    ValueError for what is no plain file."""
    runs: dict[tuple[int, str], RecordedRun] = {}
    unreadable = 0
    total = sum(min((folder / file.name).stat().st_size, MOST_BYTES) for file in files)
    with progress_bar("record", "B", total, wanted=total >= _SLOW, unit_scale=True) as bar:
        for name in files:
            with open_plain(folder / name.name) as file:
                for line in _lines(file):
                    unreadable += not _read_line(line, name.rank, runs)
                    bar.update(len(line))
    ordered = sorted(runs.values(), key=lambda run: run.rank)  # stable: in the order of the files
    return ordered, unreadable


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not empty, endless ones cut; no more than MOST bytes of them."""
    while file.tell() < MOST_BYTES and (line := file.readline(_LONGEST)):
        cut = line
        while len(cut) == _LONGEST and not cut.endswith(b"\n"):
            cut = file.readline(_LONGEST)
        if line.strip():
            yield line


def _read_line(line: bytes, rank: int, runs: dict[tuple[int, str], RecordedRun]) -> bool:
    """Add what a line says. False where it is damaged; what is whole in it is added all the same."""
    try:
        _add(decode(line), rank, runs)
        return True
    except ValueError:
        pass
    for whole in salvage(line[:_MOST_SALVAGED]):
        with contextlib.suppress(ValueError):
            _add(whole, rank, runs)
    return False


def _add(value: Any, rank: int, runs: dict[tuple[int, str], RecordedRun]) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("run"), str) or len(value["run"]) > 64:
        raise ValueError("not a line of a record")
    step = StepLine.from_json(value) if "step" in value else None
    if step is None and "header" not in value and "lost" not in value:
        raise ValueError("neither a step nor a header")
    key = rank, value["run"]
    if key not in runs and len(runs) >= _RUNS:
        raise ValueError("more runs than a record can have")
    run = runs.setdefault(key, RecordedRun(value["run"], rank))
    if step is not None:
        run.columns.add(step)
    elif "header" in value:
        began, about = value.get("time"), value.get("about")
        if run.began is None and isinstance(began, (int, float)) and 0 <= began < 2**53:
            run.began = float(began)
        run.about = about if isinstance(about, dict) else run.about
    elif isinstance(value["lost"], int) and 0 < value["lost"] < 2**53:
        run.lost += value["lost"]
