"""`open_record`: what a guard wrote to disk, as a report (the last trip's findings, the history of the run, notes on
the counts) with figures, and as a table.

Nothing in a record is executed: it is read as JSON and safetensors, by the rules of `files.py`.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbdebug import verdict
from nbdebug.report import Plot, Report, Symptom
from nbdebug.text import count, percent
from nbdebug.tools.guard.record.files import (
    CLIPPED_TOO_OFTEN,
    OUTCOMES,
    RecordedRun,
    contents,
    read_runs,
    too_often_clipped,
)
from nbdebug.tools.guard.record.trips import RecordedTrip, read_trips
from nbdebug.tools.nan.facts import UnlocatedStep
from nbdebug.tools.nan.rules import name_it

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


# -- the report --------------------------------------------------------------------------------------------------------


STRETCHES = 400
"""Two points each: more than a picture of 640 columns can show."""
MARKS, RUNS = 300, 50
"""How many marks of a kind, and how many beginnings of runs, are drawn; the others are counted."""


def history_of(frame: Any) -> dict[str, Any]:
    """Facts to draw: {"losses": [[step, value], …], "norms": …, "marks": {outcome: [step, …]}, "counts": {outcome: how
    many}, "runs": [step, …], "steps": how many, "joined": whether steps were counted on from one run to the next}.
    {} where there is no step.

    frame: of one process, one row a step, with the columns run, step, loss, norm, outcome. A run that begins before the
    one before it has ended (a guard counts from 0) is drawn after it.
    """
    if not len(frame):
        return {}
    places, starts, joined = _placed(frame["run"].to_numpy(), frame["step"].to_numpy().astype(float))
    counts = frame["outcome"].value_counts()
    marks = {
        str(name): places[(frame["outcome"] == name).to_numpy()]
        for name, count in counts.items()
        if count and name != "ok"
    }
    return {
        "losses": downsample(places, frame["loss"].to_numpy()),
        "norms": downsample(places, frame["norm"].to_numpy()),
        "marks": {name: found[:MARKS].tolist() for name, found in marks.items()},
        "counts": {name: len(found) for name, found in marks.items()},
        "runs": starts[1:RUNS],
        "steps": len(frame),
        "joined": joined,
    }


def downsample(places: Any, values: Any) -> list[list[float]]:
    """The finite points; of many, the first, the last, and the lowest and the highest of each stretch, in order."""
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) > 2 * STRETCHES:
        stretches = np.array_split(finite, STRETCHES)
        low, high = ([part[pick(values[part])] for part in stretches] for pick in (np.argmin, np.argmax))
        finite = np.unique([finite[0], *low, *high, finite[-1]])
    return [[float(x), float(y)] for x, y in zip(places[finite], values[finite])]


def _placed(runs: Any, steps: Any) -> tuple[Any, list[float], bool]:
    """Where each step is drawn, from left to right; where each run begins; whether these are not the steps' numbers."""
    first = np.flatnonzero(np.diff(runs, prepend=-1))
    places, joined = steps.copy(), False
    for start, end in zip(first, [*first[1:], len(steps)]):
        after = places[start - 1] + 1 if start else 0.0
        shift = max(0.0, after - steps[start])
        joined = joined or bool(shift > 0)
        places[start:end] += shift
    return places, places[first].tolist(), joined


OUTCOMES_IN_WORDS = {
    "skipped": "dropped because something was not finite",
    "above": "dropped: the norm was above skip_above",
    "scaler": "skipped by GradScaler: normal while it looks for its scale",
}


def record_report(record: Any) -> Report:
    """The report on a Record."""
    question = f"open_record({record.path.name})"
    trip = last_trip(record.trips)
    frame = record.frame
    own = frame[frame["rank"] == frame["rank"].min()] if len(frame) else frame
    history, losses = history_of(own), [float(x) for x in own["loss"] if math.isfinite(x)]
    run = (Plot("run", history),) if history else ()
    notes = (*_notes(record, own), *_trip_notes(record, trip))
    if trip is None and record.ok:
        last = Report(question)
    elif trip is None or trip.report is None or not trip.report.findings:
        last = _not_located(trip, record.runs)
    else:
        last = trip.report
    return Report(
        question,
        last.findings,
        last.ruled_out,
        last.unchecked,
        (*notes, *last.notes),
        _subject(record),
        headline=_headline(own, trip),
        symptoms=_symptoms(record, own),
        steps=len(own),
        losses=[losses[0], losses[-1]] if len(losses) > 1 else losses,
        tables=last.tables,
        plots=(*run, *last.plots),
    )


def _symptoms(record: Any, own: Any) -> list[Symptom]:
    """What is not well in the course of the last run on record, or in what was dropped of it."""
    if not len(own):
        return []
    last, names = own[own["run"] == own["run"].max()], record.runs[-1].about.get("optimizers")
    bad = last[last["outcome"] == "skipped"]
    well = last[~last["outcome"].isin(["tripped", "skipped"]).to_numpy() & last["loss"].notna().to_numpy()]
    said = f"{len(bad):,} of {count(len(last), 'step')} {'was' if len(bad) == 1 else 'were'} dropped: not finite."
    losses = zip(well["step"].tolist(), well["loss"].tolist())
    several = isinstance(names, Mapping) and len(names) > 1
    return [Symptom(said, verdict.FINITE)] * bool(len(bad)) + verdict.of_losses(losses, several=several)


def _headline(own: Any, trip: RecordedTrip | None) -> str:
    """ "1,200 steps on record, none stopped.", "3 of 1,200 steps on record dropped as not finite, the last of them step
    1,187." """
    bad = own["step"][own["outcome"].isin(["tripped", "skipped"]).to_numpy()]
    number = max(len(bad), int(trip is not None))
    if not number:
        return f"{count(len(own), 'step')} on record, none stopped."
    last = trip.step if trip is not None else bad.iloc[-1]
    where = f": step {last:,}" if number == 1 else f", the last of them step {last:,}"
    return f"{number:,} of {count(max(len(own), number), 'step')} on record {_done(own)} as not finite{where}."


def _done(own: Any) -> str:
    """What was done about the steps that were not finite."""
    done = [
        word for outcome, word in (("tripped", "stopped"), ("skipped", "dropped")) if (own["outcome"] == outcome).any()
    ]
    return " or ".join(done) or "stopped"


def last_trip(trips: list[RecordedTrip]) -> RecordedTrip | None:
    """The last step that was stopped; of several processes, the one that was bad itself and could be located."""
    if not trips:
        return None
    last = trips[-1]
    same = [t for t in trips if t.step == last.step and t.time and last.time and abs(t.time - last.time) < 600]
    return max(same or [last], key=lambda t: (_located(t), t.rank in t.bad_ranks, -t.rank))


def _located(trip: RecordedTrip) -> bool:
    return trip.report is not None and any(f.code != "nan/not-located" for f in trip.report)


def _not_located(trip: RecordedTrip | None, runs: Sequence[RecordedRun]) -> Report:
    """The finding for a step that was stopped and of which nothing more is known."""
    if trip is not None:
        call = "" if trip.no_replay else "record.replay(model)  # record = nbdebug.open_record(...)"
        step = UnlocatedStep.of_trip(trip, "its cause was not searched for then", call)
    else:
        run = [run for run in runs if run.alarms][-1]
        columns, place = run.columns, run.alarms[-1]
        number, start = columns.step[place], max(0, place - 8)
        step = UnlocatedStep(
            number,
            f"Step {number} was not finite",
            "the record has only its numbers",
            tuple(columns.loss[start:place]),
            tuple(columns.norm[start:place]),
        )
    return Report("", (name_it(step),))


def _trip_notes(record: Any, trip: RecordedTrip | None) -> list[str]:
    if trip is None:
        return []
    of_many = f", the last of {len(record.trips)} in the record" if len(record.trips) > 1 else ""
    notes = [f"Step {trip.step} was written down as not finite (folder {trip.folder.name}){of_many}."]
    after = [run for run in record.runs if trip.time and run.began and run.began > trip.time and run.steps]
    if after:
        bad = sum(len(run.alarms) for run in after)
        runs = "The run" if len(after) == 1 else f"The {len(after)} runs"
        notes.append(f"{runs} after it had {count(bad, 'such step') if bad else 'no such step'}.")
    if trip.no_replay:
        notes.append(f"It can't be replayed from disk: {trip.no_replay}.")
    elif trip.no_weights:
        notes.append(
            f"Its weights are not in the record: {trip.no_weights}. A replay uses those of the model that you pass."
        )
    else:
        notes.append("`record.replay(model)` runs it again, with a copy of your model.")
    return notes


def _notes(record: Any, own: Any) -> list[str]:
    """The steps and their time, shares, ranks, and what could not be read."""
    steps, runs = len(own), own["run"].nunique()
    notes = [f"{count(steps, 'step')}{f' in {runs} runs' if runs > 1 else ''}{_time(own)}."]
    ranks = sorted({run.rank for run in record.runs})
    if len(ranks) > 1:
        notes.append(f"{len(ranks)} processes wrote it; steps and shares here are those of rank {ranks[0]}.")
    for outcome, words in OUTCOMES_IN_WORDS.items():
        if number := int((own["outcome"] == outcome).sum()):
            notes.append(f"{_share(number, steps)} {words}.")
    if clipped := int(own["clipped"].sum()):
        notes.append(f"{_share(clipped, steps)} clipped.")
        notes += [CLIPPED_TOO_OFTEN] * too_often_clipped(clipped, steps)
    return notes + _damage(record)


def _damage(record: Any) -> list[str]:
    notes = []
    if record.unreadable:
        notes.append(
            f"{count(record.unreadable, 'line')} could not be read: cut off when the "
            "process was killed or the disk was full, or damaged since."
        )
    if lost := sum(run.lost for run in record.runs):
        notes.append(f"{count(lost, 'step')} could not be written while the disk did not take them.")
    if record.links:
        notes.append(f"Links are not followed: {', '.join(record.links[:5])}.")
    notes += [f"{trip.folder.name}: {problem}." for trip in record.trips for problem in trip.problems][:10]
    return notes


def _subject(record: Any) -> str:
    """Models and optimizers of the last run, as they were told to its guard."""
    about = record.runs[-1].about if record.runs else {}
    parts = []
    for kind in ("model", "optimizer"):
        types = about.get(f"{kind}s")
        for name, its_type in list(types.items())[:4] if isinstance(types, Mapping) else ():
            parts.append(f"{kind} `{name}` ({its_type})" if name != kind else f"{kind} {its_type}")
    return ", ".join(parts)


def _time(own: Any) -> str:
    times = own["time"].dropna()
    if len(times) < 2:
        return ""
    seconds = sum(float((run.max() - run.min()).total_seconds()) for _, run in times.groupby(own["run"]))
    return f", {_length(seconds)}, the last on {times.max().strftime('%Y-%m-%d at %H:%M')} UTC"


def _length(seconds: float) -> str:
    """ "41.2 seconds", "14 minutes", "7.4 hours", "2.5 days"."""
    for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} seconds"


def _share(number: int, steps: int) -> str:
    return f"{count(number, 'step')} ({percent(number / max(steps, 1))})"
