"""The files of a record, and how they are opened: as files from a stranger.

    run.nbdebug/
    ├── steps.jsonl             the last steps, one line each; a header where a run begins and where a file begins
    ├── steps.000.jsonl …       the steps before, once a file has reached LIMIT bytes; the last KEPT of them
    ├── steps.rank1.jsonl …     the same of the other processes of a distributed run
    └── trip-000123[-rank1]/    a step that was not finite: its report, and what a replay needs

A record may come from another machine, or from somebody else. So only plain files of these names are opened, never a
link, which could lead out of the folder, and never more of a file than it can sensibly hold.

The second part is one step of a guarded run in numbers, and its form as a line of JSON. JSON has no NaN and no
infinity, and Python writes them as words that other readers refuse. So they are written as the strings "nan", "inf" and
"-inf": the file is strict JSON, and a guard's record is about nothing but such numbers.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from nbdebug.live import progress_bar
from nbdebug.report import Table

LIMIT = 16 * 2**20
"""Bytes of a file of steps, about 120,000 of them, after which a new one is begun."""
FULL_FILES = 8
"""How many of the full files stay: with the current one, about a million steps."""
MOST_BYTES = 16 * LIMIT
"""No more of a file of steps is read: nothing that nbdebug writes comes near it."""

CURRENT = 10**9
"""The number of the file that is still being written: above every full one's."""
PART = ".part"
"""The ending of what is being written; it gets its name when it is whole."""

_STEPS = re.compile(r"steps(?:\.rank(\d{1,6}))?(?:\.(\d{3,9}))?\.jsonl", re.ASCII)
_TRIP = re.compile(r"trip-(\d{1,18})(?:-rank(\d{1,6}))?(?:-again(\d{1,6}))?", re.ASCII)
_PLAIN_ONLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not be waited for either


class StepsFile(NamedTuple):
    """The name of a file of steps. number: of a full one, from 0; the current one comes after all of these."""

    rank: int
    number: int
    name: str


class TripFolder(NamedTuple):
    """The name of a trip's folder. again: the step of this number has tripped so often before, in earlier runs."""

    step: int
    rank: int
    again: int
    name: str


def steps_name(rank: int, number: int | None = None) -> str:
    """The name of the file of steps: the current one, or a full one."""
    return "steps" + (f".rank{rank}" if rank else "") + ("" if number is None else f".{number:03d}") + ".jsonl"


def trip_name(step: int, rank: int, again: int = 0) -> str:
    return f"trip-{step:06d}" + (f"-rank{rank}" if rank else "") + (f"-again{again}" if again else "")


def is_foreign(folder: pathlib.Path) -> bool:
    """Whether the folder has contents, and nothing of a record among them."""
    names = os.listdir(folder)  # read once: other processes of the same run may be making theirs
    return bool(names) and not any(_STEPS.fullmatch(n) or _TRIP.fullmatch(n) or n.endswith(PART) for n in names)


def contents(folder: pathlib.Path) -> tuple[list[StepsFile], list[TripFolder], list[str]]:
    """The files of steps and the folders of trips, in order, and the names of links, which are not followed."""
    files, trips, links = [], [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            steps, trip = _STEPS.fullmatch(entry.name), _TRIP.fullmatch(entry.name)
            if (steps or trip) and entry.is_symlink():
                links.append(entry.name)
            elif steps and entry.is_file(follow_symlinks=False):
                number = CURRENT if steps[2] is None else int(steps[2])
                files.append(StepsFile(int(steps[1] or 0), number, entry.name))
            elif trip and entry.is_dir(follow_symlinks=False):
                trips.append(TripFolder(int(trip[1]), int(trip[2] or 0), int(trip[3] or 0), entry.name))
    return sorted(files), sorted(trips), sorted(links)


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A plain file, for reading. Raises OSError where it can't be opened, ValueError where it is a link or no file."""
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link; a record holds none, and it is not followed")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _PLAIN_ONLY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a plain file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            yield file
    finally:
        os.close(descriptor)


def read_plain(path: pathlib.Path, most: int) -> bytes:
    """The bytes of a plain file. Raises as `opened` does, and ValueError where it is larger than `most`."""
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path.name} is larger than {most:,} bytes, which is more than nbdebug writes")
    return data


# -- the lines of the steps --------------------------------------------------------------------------------------------


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
