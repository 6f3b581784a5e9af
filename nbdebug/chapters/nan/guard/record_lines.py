"""The steps of a record, read back: every whole line, whatever became of the others.

A process may have been killed within a line, a disk may have been full, a file may have been damaged. So each line
stands alone, says which run it belongs to, and is believed only when every part of it has the right type. What can't be
read is counted. Where two lines have run together, both are still found where they are whole.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from tqdm.auto import tqdm

from nbdebug.chapters.nan.guard.lines import OUTCOMES, StepLine, decoded, salvaged
from nbdebug.chapters.nan.guard.record_files import MOST, StepsFile, opened

_LONGEST = 2**16
"""Bytes of a line; those of a step have about 130, those of a header a few hundred."""
_SALVAGED = 4 * 1024
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
class Run:
    """One run of one process. about: what its guard was told. began: when, in seconds since the epoch, None where its
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


def read_runs(folder: pathlib.Path, files: Iterable[StepsFile]) -> tuple[list[Run], int]:
    """The runs in these files, by rank and in order, and how many lines could not be read. Raises OSError, and
    ValueError for what is no plain file."""
    runs: dict[tuple[int, str], Run] = {}
    unreadable = 0
    total = sum(min((folder / file.name).stat().st_size, MOST) for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="record", leave=False, disable=total < _SLOW) as bar:
        for name in files:
            with opened(folder / name.name) as file:
                for line in _lines(file):
                    unreadable += not _take(line, name.rank, runs)
                    bar.update(len(line))
    ordered = sorted(runs.values(), key=lambda run: run.rank)  # stable: in the order in which they were met
    return ordered, unreadable


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not empty, endless ones cut; no more than MOST bytes of them."""
    while file.tell() < MOST and (line := file.readline(_LONGEST)):
        cut = line
        while len(cut) == _LONGEST and not cut.endswith(b"\n"):
            cut = file.readline(_LONGEST)
        if line.strip():
            yield line


def _take(line: bytes, rank: int, runs: dict[tuple[int, str], Run]) -> bool:
    """Note what a line says. False where it is damaged; what is whole in it is noted all the same."""
    try:
        _note(decoded(line), rank, runs)
        return True
    except ValueError:
        pass
    for whole in salvaged(line[:_SALVAGED]):
        with contextlib.suppress(ValueError):
            _note(whole, rank, runs)
    return False


def _note(given: Any, rank: int, runs: dict[tuple[int, str], Run]) -> None:
    if not isinstance(given, dict) or not isinstance(given.get("run"), str) or len(given["run"]) > 64:
        raise ValueError("no line of a record")
    step = StepLine.from_json(given) if "step" in given else None
    if step is None and "header" not in given and "lost" not in given:
        raise ValueError("neither a step nor a header")
    key = rank, given["run"]
    if key not in runs and len(runs) >= _RUNS:
        raise ValueError("more runs than a record can have")
    run = runs.setdefault(key, Run(given["run"], rank))
    if step is not None:
        run.columns.add(step)
    elif "header" in given:
        _note_header(given, run)
    elif isinstance(given["lost"], int) and 0 < given["lost"] < 2**53:
        run.lost += given["lost"]


def _note_header(given: dict[str, Any], run: Run) -> None:
    began, about = given.get("time"), given.get("about")
    if run.began is None and isinstance(began, (int, float)) and 0 <= began < 2**53:
        run.began = float(began)
    if isinstance(about, dict):
        run.about = about
