"""`open_record`: what a guard wrote to disk, as a report with figures, and as a table.

Nothing in a record is executed: it is read as JSON and safetensors, by the rules of `files.py`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import struct
import time
from typing import Any

from nbdebug.report import Report
from nbdebug.tools.guard.record.files import contents
from nbdebug.tools.guard.record.step_lines import OUTCOMES, RecordedRun, read_runs
from nbdebug.tools.guard.record.trips import RecordedTrip, read_trips

TAGS = {"loss": "loss", "gradient norm": "norm", "learning rate": "lr"}
"""Scalars of an event file, by the columns that they come from."""


def open_record(path: str | os.PathLike[str]) -> Record:
    """Open the record that `guard(..., record=path)` wrote, also that of a process that was killed or still runs.

    Returns a Record, which a notebook shows as a report. Raises FileNotFoundError where there is nothing at `path`,
    ValueError where that is no record, OSError where it can't be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"open_record takes the path of a record, such as 'run.nbdebug'; got {path!r}")
    folder = pathlib.Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"There is no record at {os.fspath(path)!r}.")
    if not folder.is_dir():
        raise ValueError(f"{os.fspath(path)!r} is a file: a record is the folder that guard(..., record=...) wrote.")
    files, trips, links = contents(folder)
    if not files and not trips:
        raise ValueError(
            f"{os.fspath(path)!r} is not a record: it has neither steps.jsonl nor the folder of a trip"
            + (f" (links are not followed: {', '.join(links)})." if links else ".")
        )
    runs, unreadable = read_runs(folder, files)
    return Record(folder, runs, read_trips(folder, trips), unreadable, links)


class Record:
    """A record that was read. runs: one for each process and each time that a guard was set up. trips: the steps that
    were not finite and were written down, in the order of time. unreadable: how many lines were damaged or cut off.
    frame: a DataFrame, one row a step. ok: whether there is no trip, and no bad step other
    than those that `on_trip="skip"` allows."""

    def __init__(
        self, path: pathlib.Path, runs: list[RecordedRun], trips: list[RecordedTrip], unreadable: int, links: list[str]
    ):
        self.path, self.runs, self.trips, self.unreadable, self.links = path, runs, trips, unreadable, links

    @functools.cached_property
    def frame(self) -> Any:
        """One row a step: run (from 0; each process has its own), rank, step, loss, norm (of the gradients, before they
        were clipped), clipped, outcome (one of "ok", "tripped", "skipped", "above", "scaler"), lr, time (UTC)."""
        import pandas

        parts = [
            pandas.DataFrame(
                {
                    "run": n,
                    "rank": run.rank,
                    "step": run.columns.step,
                    "loss": run.columns.loss,
                    "norm": run.columns.norm,
                    "clipped": [bool(c) for c in run.columns.clipped],
                    "outcome": run.columns.outcome,
                    "lr": run.columns.lr,
                    "time": run.columns.time,
                }
            )
            for n, run in enumerate(self.runs)
            if run.steps
        ]
        if not parts:
            names = ("run", "rank", "step", "loss", "norm", "clipped", "outcome", "lr", "time")
            parts = [pandas.DataFrame({name: [] for name in names})]
        frame = pandas.concat(parts, ignore_index=True)
        frame["outcome"] = pandas.Categorical.from_codes(frame["outcome"].astype(int), list(OUTCOMES))
        frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True, errors="coerce")
        return frame.astype({"run": int, "rank": int, "step": int, "clipped": bool})

    @property
    def ok(self) -> bool:
        return not self.trips and not any(run.alarms for run in self.runs)

    def report(self) -> Report:
        """The findings of the last trip, or none; with notes on the steps, and on what could not be read."""
        from nbdebug.tools.guard.record.report import record_report

        return record_report(self)

    def to_csv(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write `frame` as CSV, one row a step. Returns the path."""
        target = pathlib.Path(path)
        self.frame.to_csv(target, index=False, na_rep="nan")
        return target

    def to_tensorboard(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Write loss, gradient norm and learning rate of each step as an event file of TensorBoard's, each process and
        run in a folder of its own where there are several. Returns the folder: `tensorboard --logdir FOLDER`. An event
        file that is there is never replaced."""
        target = pathlib.Path(folder)
        for n, run in enumerate(self.runs):
            place = target / f"rank{run.rank}-run{n}" if len(self.runs) > 1 else target
            place.mkdir(parents=True, exist_ok=True)
            columns = run.columns
            began = columns.time[0] if len(columns) else run.began or time.time()
            with (place / f"events.out.tfevents.{int(began)}.nbdebug.{n}").open("xb") as file:
                file.write(tf_record(b"\x09" + struct.pack("<d", began) + _part(3, b"brain.Event:2")))
                for at in range(len(columns)):
                    values = {name: getattr(columns, key)[at] for name, key in TAGS.items()}
                    file.write(_event(columns.time[at], columns.step[at], values))
        return target

    def figure(self) -> Any:
        """A matplotlib Figure: losses and gradient norms over steps, with trips and dropped steps marked. Raises
        ValueError where there is no step to draw."""
        return self.report().figure()

    def replay(self, model: Any, trip: int = -1, *, optimizer: Any = None) -> Report:
        """Run a recorded step again, and name what first made the bad value.

        model: as it was given to `guard`: a Module, or a dict or list of them, built by your own code; it is copied,
        and the copy gets the weights of the record. trip: which of `trips`. optimizer: needed for a step in which the
        update made a parameter bad. Raises IndexError for a trip that does not exist, ValueError where the step can't
        be replayed from disk or the model does not fit, each with its reason.
        """
        from nbdebug.tools.guard.record.replay import replay  # brings torch

        if not self.trips:
            raise ValueError(f"{str(self.path)!r} has no step to replay: no trip was written to it.")
        return replay(self.trips[trip], model, optimizer)

    def __repr__(self) -> str:
        return str(self.report())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.report()._repr_mimebundle_(include, exclude)


# -- TensorBoard's event files: TFRecords of Event messages, https://www.tensorflow.org/tutorials/load_data/tfrecord


def _event(when: float, step: int, values: dict[str, float]) -> bytes:
    """An Event with its scalars; what a step lacks (NaN stands for it in `norm` and `lr`) is left out."""
    known = [(tag, value) for tag, value in values.items() if value == value or tag == "loss"]
    scalars = (_part(1, _part(1, tag.encode()) + b"\x15" + struct.pack("<f", _single(v))) for tag, v in known)
    return tf_record(b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + _part(5, b"".join(scalars)))


def _single(value: float) -> float:
    """As float32 has it: what is too large for it is infinite."""
    return value if not 3.4e38 < abs(value) < float("inf") else float("inf") * (1 if value > 0 else -1)


def _part(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def tf_record(data: bytes) -> bytes:
    """The data with its length and the checksums of both."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc_table() -> tuple[int, ...]:
    """Of CRC-32C."""
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return tuple(table)
