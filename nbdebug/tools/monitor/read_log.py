"""`read_log`: what the log of a run shows, with the line that proves it.

The course of the loss is judged by `verdict`, as in every tool of nbdebug; what a traceback says by `explain`. Here is
which rows belong to one run: counters that begin anew with each epoch, runs that went on from a checkpoint, several
ranks in one file, several runs in one folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import pathlib
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

from nbdebug import verdict
from nbdebug.live import progress_bar
from nbdebug.report import Finding, Plot, Report, Symptom, Table, Where
from nbdebug.text import clip, count, figures, listed
from nbdebug.tools.grad_watch.history import jumps
from nbdebug.tools.grad_watch.report import loss_findings
from nbdebug.tools.monitor.formats import (
    READERS,
    TRAIN_LOSS,
    Follower,
    LogRows,
    LogText,
    role_of,
    sources,
    texts_of,
)
from nbdebug.tools.monitor.rules import LOG_RULES, LoggedRun, Restart

JUDGED = 20_000
"""Losses of a run that are judged: of more, each is the first of a stretch, or one that is not finite."""
POINTS = 300
SLOW = 32 * 2**20
"""Bytes that take longer than two seconds to read."""
QUIET = 600.0
"""Seconds without a new line after which a log has ended; and ten times its own usual pause."""
MOST_FINDINGS, MOST_SYMPTOMS = 12, 8
SAME_EPOCHS, SAME = 8, 0.003
"""Epochs whose mean losses all lie within this share of the first: healthy ones change by more, or began as well as
they can be."""
NORMS_BAD = 3
"""Gradient norms at the end that are not finite; single ones are steps that a scaler skips."""
ADVERSARY = re.compile(
    r"(?:^|[_/. -])(?:[dg]|gen|disc?|generator|discriminator|critic|actor|policy|value)(?:$|[_/. -])", re.I
)
"""In the name of a loss: there is another one that it pulls at."""
LINE = re.compile(r"step ([\d,]+)")


@overload
def read_log(path: str | os.PathLike[str], *, follow: Literal[False] = False, every: float = 1.0) -> Report: ...


@overload
def read_log(path: str | os.PathLike[str], *, follow: Literal[True], every: float = 1.0) -> Iterator[Report]: ...


def read_log(path: str | os.PathLike[str], *, follow: bool = False, every: float = 1.0) -> Report | Iterator[Report]:
    """Read the log of a run, or all logs of a folder, and say what went wrong in it and on which line.

    path: text of any usual form, JSON Lines, CSV, TensorBoard's event files, trainer_state.json, Keras' history, a
    guard's record, or a folder with any of them. follow: give a report each time that the file has grown, looking every
    so many seconds, until Ctrl-C. Of a file that is still written a line that has no end yet is left for later.

    Raises FileNotFoundError where there is nothing, ValueError where no file of it is a log, OSError where it can't be
    read. Nothing in a log is executed.
    """
    place = pathlib.Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"There is no log at {os.fspath(path)!r}.")
    if not place.is_dir() and not place.is_file():
        raise ValueError(f"{os.fspath(path)!r} is neither a file nor a folder.")
    if not every > 0:
        raise ValueError(f"every is the number of seconds between two looks; got {every!r}.")
    if follow:
        return _follow(place, every)
    return _report(place, _read(place))


def _follow(place: pathlib.Path, every: float) -> Iterator[Report]:
    followers: dict[pathlib.Path, Follower] = {}
    try:
        while True:
            paths = sources(place) if place.is_dir() else [place]
            for path in paths:
                followers.setdefault(path, Follower(path))
            grown = [follower.read() for follower in followers.values()]  # each of them
            if any(grown):
                logs = [follower.rows for follower in followers.values()]
                yield _report(place, [log for log in logs if len(log) or log.tracebacks or log.kills], growing=True)
            time.sleep(every)
    except KeyboardInterrupt:  # the way to end it
        return


def _read(place: pathlib.Path) -> list[LogRows]:
    """The sources that hold something. Raises ValueError where there is none."""
    paths = sources(place) if place.is_dir() else [place]
    total = sum(path.stat().st_size for path in paths)
    logs, reasons = [], []
    with progress_bar("log", "B", total, wanted=total >= SLOW, unit_scale=True) as bar:
        for path in paths:
            follower = Follower(path)
            try:
                follower.read(bar.update)
            except ValueError as error:
                reasons.append(f"{path.name}: {error}")
                continue
            follower.end()
            rows = follower.rows
            if len(rows) or rows.tracebacks or rows.kills or not place.is_dir():
                logs.append(rows)
    if not logs:
        why = f" ({'; '.join(reasons[:3])})" if reasons else ""
        raise ValueError(f"{os.fspath(place)!r} holds no log with a loss, an error or a last word{why}.")
    return logs


# -- which rows belong to one run -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Course:
    """One run of one rank. rows: (step, loss, validation loss), steps rising; lines, val_lines: of each step. backs:
    where the counter went back: from, to, line. rounded: rates of zero may be small ones, written with few digits."""

    rank: int = -1
    unit: str = "step"
    rows: list[tuple[int, float | None, float | None]] = dataclasses.field(default_factory=list)
    rates: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    norms: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    lines: dict[int, int] = dataclasses.field(default_factory=dict)
    val_lines: dict[int, int] = dataclasses.field(default_factory=dict)
    restarts: list[Restart] = dataclasses.field(default_factory=list)
    backs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    rounded: bool = False
    several: bool = False  # losses of parts that pull at each other

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(step, loss) for step, loss, _ in self.rows if loss is not None]

    @property
    def last_line(self) -> int:
        return max(self.lines.values(), default=0)

    @property
    def gap(self) -> float:
        """Between two rows, usually."""
        return _gap([step for step, _, _ in self.rows])

    def add(self, step: int, line: int, loss: float | None, val: float | None) -> None:
        """A step that is there already gets what it lacks."""
        if val is not None:
            self.val_lines[max(step, self.rows[-1][0]) if self.rows else step] = line
        if self.rows and step <= self.rows[-1][0]:
            last, known, validation = self.rows[-1]
            if loss is not None and not math.isfinite(loss) and (known is None or math.isfinite(known)):
                known, self.lines[last] = loss, line  # of another rank, say
            self.rows[-1] = last, known if known is not None else loss, val if val is not None else validation
            return
        self.rows.append((step, loss, val))
        self.lines[step] = line


def chosen(log: LogRows, role: str, wanted: Sequence[int]) -> str:
    """The key of this role: a usual name before others, and then the one with most rows."""
    among = set(wanted)
    numbers = {key: sum(row in among for row in rows) for key, (rows, _) in log.series.items() if role_of(key) == role}
    numbers = {key: number for key, number in numbers.items() if number}
    if not numbers:
        return ""

    def usual(key: str) -> bool:
        plain = re.sub(r"[ ./@-]+", "_", key.lower())
        return plain in TRAIN_LOSS if role == "loss" else plain.endswith("loss") if role == "validation" else True

    return max(numbers, key=lambda key: (usual(key), numbers[key], -len(key)))


def courses(log: LogRows) -> list[Course]:
    """The runs of a source, by rank and in order."""
    by_rank = {rank: [row for row in range(len(log)) if log.ranks[row] == rank] for rank in sorted(set(log.ranks))}
    found = [course for rank, own in by_rank.items() for course in _courses(log, rank, own)]
    return [course for course in found if course.rows or course.norms or course.rates]


def _courses(log: LogRows, rank: int, own: list[int]) -> list[Course]:
    keys = {role: chosen(log, role, own) for role in ("loss", "validation", "norm", "rate")}
    columns = {role: dict(zip(*log.series[key])) for role, key in keys.items() if key}
    loss = columns.get("loss") or columns.get("validation", {})
    main = [row for row in own if row in loss] or own
    unit, places = _places(log, main)
    courses, offset, last, epoch = [Course(rank, unit)], 0.0, -math.inf, math.nan
    gap, begun = _gap(list(places.values())), places.get(main[0], 0.0)
    for row in own:
        step = places.get(row)
        if step is not None and step + offset < last:
            course = courses[-1]
            again = step <= begun + gap
            if again and _next_pass(log, row, epoch, course, loss):
                offset = last + max(gap, 1.0) - step
            else:
                offset = 0.0
                if again:
                    courses.append(Course(rank, unit))
                else:
                    _go_back(courses, int(step), log.lines[row])
                last = -math.inf
        if step is None and not math.isfinite(loss.get(row, 0.0)):
            step = last + 1 - offset  # "Loss is nan, stopping training"
        step = last if step is None else step + offset
        if step == -math.inf:
            step = float(begun)
        last = max(last, step)
        epoch = log.epochs[row] if math.isfinite(log.epochs[row]) else epoch
        _take(courses[-1], int(step), row, log, columns)
    for course in courses:
        course.rounded, course.several = keys["rate"] in log.rounded, bool(ADVERSARY.search(keys["loss"]))
    return [_with_restarts(course, log) for course in courses]


def _take(course: Course, step: int, row: int, log: LogRows, columns: dict[str, dict[int, float]]) -> None:
    line = log.lines[row]
    loss, val = (columns.get(role, {}).get(row) for role in ("loss", "validation"))
    if loss is not None or val is not None:
        course.add(step, line, loss, val)
    for role, series in (("rate", course.rates), ("norm", course.norms)):
        value = columns.get(role, {}).get(row)
        if value is not None and (not series or series[-1][0] < step):
            series.append((step, value))
            course.lines.setdefault(step, line)


def _places(log: LogRows, rows: list[int]) -> tuple[str, dict[int, float]]:
    """The unit of the rows' numbers, and the number of each row that has one."""
    enough = 0.5 * len(rows)
    for unit, column in (("step", log.steps), ("step", log.places), ("epoch", log.epochs)):
        known = {row: column[row] for row in rows if math.isfinite(column[row])}
        if len(known) <= enough:
            continue
        if column is log.places and _in_passes(log, list(known)):
            first = min(log.epochs[row] for row in known) == 1  # epochs that count from one
            known = {row: place + (log.epochs[row] - first) * log.totals[row] for row, place in known.items()}
        if unit == "epoch" and (
            any(v != int(v) for v in known.values()) or len(set(known.values())) < 0.8 * len(known)
        ):
            break
        if column is log.steps or unit == "epoch":  # validation may stand in rows of its own
            known |= {
                row: column[row]
                for row in range(len(log))
                if row not in known and math.isfinite(column[row]) and log.ranks[row] == log.ranks[rows[0]]
            }
        return unit, known
    return "logged value", {row: float(place) for place, row in enumerate(rows, 1)}


def _in_passes(log: LogRows, rows: list[int]) -> bool:
    """Whether the rows count within an epoch, as in "Epoch 3: 50/100": the count falls where the epoch rises."""
    if not all(math.isfinite(log.epochs[row]) and math.isfinite(log.totals[row]) for row in rows):
        return False
    turns = [(a, b) for a, b in itertools.pairwise(rows) if log.epochs[b] > log.epochs[a]]
    return bool(turns) and sum(log.places[b] <= log.places[a] for a, b in turns) > 0.5 * len(turns)


def _gap(values: Sequence[float]) -> float:
    rises = [b - a for a, b in itertools.pairwise(values) if b > a]
    return statistics.median(rises) if rises else 1.0


def _next_pass(log: LogRows, row: int, epoch: float, course: Course, loss: dict[int, float]) -> bool:
    """Whether a counter that begins anew counts the next pass of the same run: its epoch is a later one, or its loss
    is nearer to the last ones than to the first."""
    now = log.epochs[row]
    if math.isfinite(now) and math.isfinite(epoch) and now != epoch:
        return now > epoch
    values = [v for _, v in course.losses if math.isfinite(v)]
    if (
        math.isfinite(now)
        or row not in loss
        or len(values) < 2
        or any(r.line > course.lines.get(course.rows[-1][0], 0) for r in log.resumes)
    ):
        return False
    if not math.isfinite(loss[row]):
        return True
    few = max(1, min(5, len(values) // 4))
    first, last = statistics.median(values[:few]), statistics.median(values[-few:])
    return abs(loss[row] - last) < abs(loss[row] - first) or first == last


def _go_back(courses: list[Course], step: int, line: int) -> None:
    """The counter has gone back: the run was started again from a checkpoint. Its later steps are kept aside."""
    course = courses[-1]
    course.backs.append((course.rows[-1][0] if course.rows else step, step, line))
    kept = [row for row in course.rows if row[0] < step]
    again = [loss for s, loss, _ in course.rows if s >= step and loss is not None]
    before = [loss for _, loss, _ in kept if loss is not None][-12:]
    same = again[:12] if len(again) >= 6 else [*before, *again]
    course.restarts.append(Restart(step, course.rows[-1][0] if course.rows else step, line, tuple(same), ()))
    course.rows = kept
    course.rates = [pair for pair in course.rates if pair[0] < step]
    course.norms = [pair for pair in course.norms if pair[0] < step]


def _with_restarts(course: Course, log: LogRows) -> Course:
    """The restarts with the losses after them; also those where a checkpoint was read and the counter went on."""
    rows = course.losses
    done = [dataclasses.replace(r, after=tuple(v for s, v in rows if s >= r.step)[:8]) for r in course.restarts]
    for text in log.resumes:
        before = [(s, v) for s, v in rows if course.lines.get(s, 0) < text.line]
        after = [(s, v) for s, v in rows if course.lines.get(s, 0) > text.line]
        if before and after and not any(abs(r.line - text.line) < 200 for r in done):
            step, sides = after[0][0], [tuple(v for _, v in side) for side in (before[-12:], after[:8])]
            done.append(Restart(step, before[-1][0], course.lines[step], *sides))
    course.restarts = done
    return course


# -- the verdict ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Judged:
    """What one source shows. name: as the report calls it."""

    name: str
    log: LogRows
    courses: list[Course]
    findings: list[Finding]
    symptoms: list[Symptom]
    notes: list[str]


def _thinned(rows: list[Any]) -> list[Any]:
    """Of many rows, the first of each stretch, and those that are not finite or have a validation loss."""
    if len(rows) <= JUDGED:
        return rows
    apart = -(-len(rows) // JUDGED)
    return [
        row
        for place, row in enumerate(rows)
        if place % apart == 0 or row[2] is not None or row[1] is not None and not math.isfinite(row[1])
    ]


def judge(log: LogRows, name: str, growing: bool) -> Judged:
    """What is wrong in a source. name: as the report calls it."""
    all_courses = courses(log)
    findings: list[Finding] = []
    symptoms: list[Symptom] = []
    notes: list[str] = []
    ranks = sorted({course.rank for course in all_courses})
    for rank in ranks:
        own = [course for course in all_courses if course.rank == rank]
        for course in own:
            last = course is own[-1]
            found, seen, words = _of_course(course, log, name, growing or not last)
            who = f"Rank {rank}: " if len(ranks) > 1 else ""
            if last:
                findings += found
                symptoms += [dataclasses.replace(s, what=who + s.what) for s in seen]
                notes += words
            elif found or seen:
                first = next((f.title for f in found), None) or seen[0].what
                notes.append(
                    f"{who}An earlier run in this file (up to line {course.last_line:,}): {first.rstrip('.')}."
                )
    errors = _errors(log, name, all_courses, notes)
    findings = [*(e for e in errors if isinstance(e, Finding)), *findings]
    symptoms = [*(e for e in errors if isinstance(e, Symptom)), *symptoms]
    return Judged(name, log, all_courses, findings, _merged(symptoms), notes)


def _merged(symptoms: list[Symptom]) -> list[Symptom]:
    """Of several ranks with the same trouble, one sentence."""
    plain: dict[str, list[Symptom]] = {}
    for symptom in symptoms:
        plain.setdefault(re.sub(r"^Rank \d+: |[\d.,e+-]+", "", symptom.what), []).append(symptom)
    merged = []
    for same in plain.values():
        more = f" The same in {count(len(same) - 1, 'other rank')}." if len(same) > 1 else ""
        merged.append(dataclasses.replace(same[0], what=same[0].what + more))
    return merged


def _of_course(
    course: Course, log: LogRows, name: str, growing: bool
) -> tuple[list[Finding], list[Symptom], list[str]]:
    rows = _thinned(course.rows)
    if rows and all(loss is None for _, loss, _ in rows):
        rows = [(step, val, None) for step, _, val in rows]
    rates = dict(course.rates)
    known = rates if rates and all(step in rates for step, loss, _ in rows if loss is not None) else None
    resumed = bool(course.rows) and (
        course.rows[0][0] > 100 * max(1, course.gap) or bool(log.resumes and not course.restarts)
    )
    patterns = verdict.verdicts(rows, rates=known)
    found = loss_findings(patterns)
    seen = verdict.of_losses(rows, rates=known, several=course.several, resumed=resumed)
    titles = {finding.title for finding in found}
    said = {*titles, *(symptom.what for symptom in seen)}
    notes = [pattern.said for pattern in patterns if pattern.said not in said and pattern.kind != "nan"]
    worse = bool(seen) or any(pattern.kind in ("nan", "divergence") for pattern in patterns)
    facts = LoggedRun(
        name,
        course.losses,
        course.rates,
        course.lines,
        course.unit,
        course.restarts,
        _killed(log, course),
        None if growing else _stopped(log, course),
        course.last_line,
        course.rounded,
        worse,
    )
    own = [finding for check in LOG_RULES if (finding := check(facts)) is not None]
    lost = next((f for f in own if f.code == "run/not-resumed"), None)
    if lost is not None:  # the jump is the restart's
        found = [
            f
            for f in found
            if f.code != "training/loss-spike"
            or abs((f.where.step or 0) - lost.evidence["goes on at"]) > 10 * course.gap
        ]
        seen = [s for s in seen if "jumped" not in s.what]
    found = [_placed(finding, course, name) for finding in found]
    seen = [dataclasses.replace(s, what=_with_line(s.what, course, name)) for s in seen if s.what not in titles]
    seen += [*_norms(course, name), *_same_for_epochs(course, name, resumed)]
    return [*own, *found], seen, [*(_in_unit(note, course) for note in notes), *_course_notes(course, name)]


def _in_unit(text: str, course: Course) -> str:
    """`verdict` speaks of steps; a log may count epochs, or nothing."""
    if course.unit == "step":
        return text
    return re.sub(r"\bstep(s?)\b", lambda m: f"{course.unit}{m[1]}", text)


def _placed(finding: Finding, course: Course, name: str) -> Finding:
    step = finding.where.step
    line = course.lines.get(step) if step is not None else None
    title = _in_unit(finding.title, course)
    return dataclasses.replace(finding, title=title, where=Where(file=name, line=line))


def _with_line(text: str, course: Course, name: str) -> str:
    """The sentence with the line that shows it: that of the step that it names, or of the last value."""
    match = LINE.search(text)
    step = int(match[1].replace(",", "")) if match is not None else None
    if step is None and "is nan" in text.lower():
        step = next((s for s, v in course.losses if not math.isfinite(v)), None)
    if "after step" in text and step is not None:
        step = next((s for s, _ in course.losses if s > step), step)
    lines = course.val_lines if text.startswith("The validation") else course.lines
    line = lines.get(step) if step is not None else None
    where = f"{name}, line {line:,}" if line else f"{name}, up to line {course.last_line:,}"
    return f"{_in_unit(text, course).rstrip('.')} ({where})."


def _norms(course: Course, name: str) -> list[Symptom]:
    """Gradient norms that are not finite to the end, and losses of zero that hide them."""
    bad = 0
    for _, norm in reversed(course.norms):
        if math.isfinite(norm):
            break
        bad += 1
    if bad < NORMS_BAD:
        return []
    step, norm = course.norms[-bad]
    if any(not math.isfinite(v) for _, v in course.losses):
        return []
    zeros = [s for s, v in course.losses if s >= step and v == 0]
    hidden = (
        "; the losses of 0 beside it are no losses: transformers writes 0 for NaN (logging_nan_inf_filter)"
        if len(zeros) >= NORMS_BAD
        else ""
    )
    what = f"The gradient norm is {norm} from {course.unit} {step:,} on{hidden} ({name}, line {course.lines[step]:,})."
    return [Symptom(what, verdict.FINITE)]


def _same_for_epochs(course: Course, name: str, resumed: bool) -> list[Symptom]:
    """The means of whole epochs have next to no noise: a few that stay alike tell what single steps take longer for."""
    values = [v for _, v in course.losses]
    if resumed or course.several or course.unit != "epoch" or not SAME_EPOCHS <= len(values) < verdict.ENOUGH:
        return []
    if not all(map(math.isfinite, values)) or max(values) - min(values) > SAME * abs(values[0]) or not any(values):
        return []
    what = f"The loss has stayed at {values[0]:.4g} for {len(values)} epochs ({name}, up to line {course.last_line:,})."
    return [Symptom(what, verdict.DATA)]


def _course_notes(course: Course, name: str) -> list[str]:
    notes = []
    for start, step, line in course.backs[:3]:
        lost = any(r.line == line and r.lost for r in course.restarts)
        if not lost:
            notes.append(
                f"The {course.unit} goes back from {start:,} to {step:,} ({name}, line {line:,}): the run went on from "
                "a checkpoint, with the loss that it had there."
            )
    if len(course.backs) > 3:
        notes.append(f"It goes back {len(course.backs)} times in all.")
    rises = jumps([pair for pair in course.norms if math.isfinite(pair[1])])
    if rises:
        step, times = max(rises, key=lambda rise: rise[1])
        notes.append(
            f"At {course.unit} {step:,} the gradient norm is {times:,.0f} times its median of the 20 values before "
            f"(line {course.lines[step]:,})."
        )
    return notes


def _killed(log: LogRows, course: Course) -> tuple[int, str] | None:
    """The line that says that the process was killed, where no loss comes after it, and no end before it: that would be
    a crash at the exit."""
    kill = next((kill for kill in log.kills if kill.line >= course.last_line), None)
    if kill is None or any(course.last_line <= end < kill.line for end in log.ends):
        return None
    return kill.line, kill.text


def _stopped(log: LogRows, course: Course) -> tuple[int, int, str] | None:
    """(place, planned, unit) where the log ends well before the planned end, for good, with no word about it."""
    last = course.last_line
    if log.kind in ("trainer_state.json", "JSON history") or not last:
        return None
    if any(line >= last for line in log.ends) or any(t.line >= last for t in log.tracebacks):
        return None
    if not _quiet(log):
        return None
    if log.bar is not None and log.bar[2] >= last:
        place, planned = log.bar[0], log.bar[1]
        return (place, planned, "step") if log.open_end and place < planned else None
    place, planned, unit = _planned(log, course)
    return (place, planned, unit) if planned and not (unit == "epoch" and _may_have_stopped_early(course)) else None


def _planned(log: LogRows, course: Course) -> tuple[int, int, str]:
    """Where the log ends, and the end that it names, where that lies well beyond; else zeros."""
    place, total, gap = log.places[-1], log.totals[-1], 2.5 * course.gap
    if math.isfinite(total) and math.isfinite(place) and total - place > gap:
        return int(place), int(total), "step"
    step = course.rows[-1][0] if course.rows else 0
    if log.steps_planned and course.unit == "step":
        return (step, log.steps_planned, "step") if log.steps_planned - step > gap else (0, 0, "")
    epochs = [epoch for epoch in log.epochs if math.isfinite(epoch)]
    if log.epochs_planned and epochs and not math.isfinite(total):
        done = int(max(epochs)) + (min(epochs) == 0)
        return (done, log.epochs_planned, "epoch") if done < log.epochs_planned else (0, 0, "")
    return 0, 0, ""


def _may_have_stopped_early(course: Course) -> bool:
    """The best validation loss lies three evaluations or more back: a stopper may have ended it, without a word."""
    values = [val for _, _, val in course.rows if val is not None]
    return len(values) > 3 and min(range(len(values)), key=values.__getitem__) <= len(values) - 4


def _quiet(log: LogRows) -> bool:
    """Whether nothing has come for so long that nothing will."""
    try:
        if time.time() - log.path.stat().st_mtime > QUIET:
            return True
    except OSError:
        return False
    if not log.last_stamp:
        return False
    stamp = datetime.datetime.strptime(log.last_stamp, "%Y-%m-%d %H:%M:%S")
    return (datetime.datetime.now() - stamp).total_seconds() > 2 * 86_400  # of whatever time zone


# -- errors -----------------------------------------------------------------------------------------------------------

SECONDARY = re.compile(
    r"ChildFailedError|exited unexpectedly|Broken pipe|Connection (?:reset|closed)|Watchdog|ProcessExitedException"
)
ON_PURPOSE = re.compile(r"(?:^|\n)(?:KeyboardInterrupt|SystemExit)\b")


def _errors(log: LogRows, name: str, courses: list[Course], notes: list[str]) -> list[Finding | Symptom]:
    """What `explain` says of the error that ended the run: the first that is not another's consequence."""
    if not log.tracebacks:
        return []
    last = {course.rank: course.last_line for course in courses}
    ended = [t for t in log.tracebacks if t.line > last.get(-1 if t.rank is None else t.rank, 0)]
    passed = [t for t in log.tracebacks if t not in ended]
    if passed:
        said = clip(_message(passed[0]), 160)
        notes.append(f"An error is logged on line {passed[0].line:,}, and the run went on: {said}.")
    wanted = [t for t in ended if not ON_PURPOSE.search(t.text)]
    if ended and not wanted:
        notes.append(f"It was ended on purpose on line {ended[0].line:,} ({_message(ended[0])}).")
    if not wanted:
        return []
    first = next((t for t in wanted if not SECONDARY.search(_message(t))), wanted[0])
    ranks = sorted({t.rank for t in wanted if t.rank is not None and _message(t) == _message(first)})
    finding = _explained(first, name)
    if len(ranks) > 1 and isinstance(finding, Finding):
        finding = dataclasses.replace(finding, evidence={**finding.evidence, "ranks": ranks})
    others = {_message(t) for t in wanted} - {_message(first)}
    notes += [f"Another error: {clip(message, 160)}." for message in sorted(others)[:2]]
    return [finding]


def _message(trace: LogText) -> str:
    lines = [line for line in trace.text.splitlines() if line.strip()]
    heads = (" ", "\t", "Traceback", "During", "The above")
    return ([line for line in lines if not line.startswith(heads)] or lines)[-1].strip()


def _explained(trace: LogText, name: str) -> Finding | Symptom:
    from nbdebug.tools.explain import explain

    report = explain(trace.text + "\n ")
    message = _message(trace)
    who = f"Rank {trace.rank} ends" if trace.rank is not None else "The run ends"
    if report.findings:
        known = report.findings[0]
        evidence = {**known.evidence, "message": clip(message, 300), "line of the log": trace.line}
        if known.where.place:
            evidence["raised at"] = known.where.place
        where = Where(phase=known.where.phase, file=name, line=trace.line, rank=trace.rank, text=clip(message, 160))
        return dataclasses.replace(known, evidence=evidence, where=where)
    what = f"{who} with an error that has no page: {clip(message, 200)} ({name}, line {trace.line:,})."
    if "loss scale" in message:  # it fell with each step that was not finite
        return Symptom(what, verdict.FINITE)
    return Symptom(what, "`%explain` below the failing cell sees the values, too; the traceback is in the log.")


# -- the report -------------------------------------------------------------------------------------------------------


def _report(place: pathlib.Path, logs: list[LogRows], growing: bool = False) -> Report:
    """The report on all sources of a path."""
    folder = place.is_dir()
    judged = [judge(log, str(log.path.relative_to(place)) if folder else log.path.name, growing) for log in logs]
    judged = [one for one in judged if one.courses or one.findings or not folder]
    findings = [f for one in judged for f in _with_texts(one)][:MOST_FINDINGS]
    symptoms = [s for one in judged for s in one.symptoms][:MOST_SYMPTOMS]
    if folder and (place / "steps.jsonl").is_file():
        findings += _of_record(place)
    notes = [symptom.what for symptom in symptoms] if findings else []  # above them it is the findings that are shown
    notes += [note for one in judged for note in _source_notes(one)]
    notes += [f"{one.name}: {note}" if len(judged) > 1 else note for one in judged for note in one.notes]
    main = max(judged, key=lambda one: sum(len(c.rows) for c in one.courses), default=None)
    worst = next((one for one in judged if one.findings or one.symptoms), main)
    losses = [v for course in main.courses[-1:] for _, v in course.losses if math.isfinite(v)] if main else []
    return Report(
        f"read_log({place.name or str(place)!r})",
        tuple(findings),
        (),
        tuple(_unchecked(judged)),
        tuple(notes),
        listed([one.name for one in judged], quote="") or "nothing",
        {"sources": [_facts(one) for one in judged]},
        headline=_headline(judged, findings, symptoms),
        symptoms=symptoms,
        independent=True,
        steps=sum(len(course.rows) for one in judged for course in one.courses),
        losses=[losses[0], losses[-1]] if len(losses) > 1 else losses,
        tables=[table for table in (_runs(judged), _series(worst), _warnings(judged)) if table is not None],
        plots=_plots(worst),
    )


def _with_texts(one: Judged) -> list[Finding]:
    """The findings, each with the text of its line."""
    numbers = {f.where.line for f in one.findings if f.where.line and f.where.text is None}
    if one.log.kind not in READERS or not numbers:
        return one.findings
    texts = texts_of(one.log.path, numbers)

    def placed(finding: Finding) -> Finding:
        text = texts.get(finding.where.line or 0)
        where = dataclasses.replace(finding.where, text=clip(text, 160)) if text else finding.where
        return dataclasses.replace(finding, where=where)

    return [placed(finding) for finding in one.findings]


def _of_record(place: pathlib.Path) -> list[Finding]:
    """What a guard's record knows beyond its numbers: the steps that were stopped, with their cause."""
    from nbdebug.tools.guard.record.open_record import open_record

    try:
        return [f for f in open_record(place).report().findings if f.code != "nan/not-located"]
    except (OSError, ValueError):
        return []


def _headline(judged: list[Judged], findings: list[Finding], symptoms: list[Symptom]) -> str:
    rows = sum(len(course.rows) for one in judged for course in one.courses)
    runs = sum(len(one.courses) for one in judged)
    if findings or rows and symptoms:
        return ""
    said = f"{count(rows, 'value')} of the loss" + (f" in {runs} runs" if runs > 1 else "")
    return f"{said}: none of the troubles that a log can show." if rows else "No loss is in this log."


def _source_notes(one: Judged) -> list[str]:
    log, name, parts = one.log, one.name, []
    if one.courses and (course := one.courses[-1]).rows:
        parts.append(f"{course.unit} {course.rows[0][0]:,} to {course.rows[-1][0]:,}")
        values = [v for _, v in course.losses]
        parts += [f"loss {figures(values[0])} at first and {figures(values[-1])} at last"] if values else []
    ranks = {c.rank for c in one.courses}
    parts += [f"{len(ranks)} ranks"] * (len(ranks) > 1)
    lines = count(log.line, "record" if log.kind == "TensorBoard events" else "line")
    notes = [f"{name} ({log.kind}, {lines}): {'; '.join(parts) or 'no loss'}."]
    if log.broken:
        notes.append(
            f"{name}: {count(len(log.broken), 'line')} could not be read, the first is line {log.broken[0]:,}."
        )
    if log.open_end and log.kind != "text":
        notes.append(f"{name}: the last line is cut off.")
    return notes


def _unchecked(judged: list[Judged]) -> Iterator[str]:
    for one in judged:
        if not any(course.rows for course in one.courses):
            yield f"The course of the loss in {one.name}: no loss was found in it."
        if one.log.stride > 1:
            yield f"Each row of {one.name}: one of {one.log.stride} was read, and all that are not finite."
        if any(0 < len(course.rows) < verdict.FEW for course in one.courses):
            yield f"The course of a run with under {verdict.FEW} losses."
            return


def _facts(one: Judged) -> dict[str, Any]:
    return {
        "file": one.name,
        "kind": one.log.kind,
        "lines": one.log.line,
        "runs": [
            {
                "rank": course.rank if course.rank >= 0 else None,
                "unit": course.unit,
                "values": len(course.rows),
                "first": course.rows[0][0] if course.rows else None,
                "last": course.rows[-1][0] if course.rows else None,
                "restarts": len(course.backs),
            }
            for course in one.courses
        ],
        "warnings": sum(w.times for w in one.log.warnings.values()),
        "tracebacks": len(one.log.tracebacks),
    }


def _runs(judged: list[Judged]) -> Table | None:
    """All runs, where there are several."""
    rows = []
    for one, course in [(j, c) for j in judged for c in j.courses if c.rows]:
        values = [v for _, v in course.losses]
        span = f"{course.unit} {course.rows[0][0]:,} to {course.rows[-1][0]:,}"
        ends = (values[0], values[-1]) if values else (None, None)
        lowest = min(filter(math.isfinite, values), default=None)
        rows.append([one.name, course.rank if course.rank >= 0 else "", course.last_line, span, *ends, lowest])
    columns = ("file", "rank", "last line", "span", "first loss", "last loss", "lowest")
    return Table("Runs", columns, rows[:50]) if len(rows) > 1 else None


ROLES = {"loss": "training loss", "validation": "validation", "norm": "gradient norm", "rate": "learning rate", "": ""}


def _series(one: Judged | None) -> Table | None:
    rows = []
    for key, (_, values) in list(one.log.series.items())[:40] if one is not None else ():
        finite: list[Any] = [v for v in values if math.isfinite(v)] or [None]
        bad = sum(not math.isfinite(v) for v in values)
        rows.append([key, ROLES[role_of(key)], len(values), values[0], values[-1], min(finite), max(finite), bad])
    columns = ("name", "read as", "values", "first", "last", "min", "max", "not finite")
    return Table("What the log holds", columns, rows, open=False) if rows else None


def _warnings(judged: list[Judged]) -> Table | None:
    found = [(one.name, w) for one in judged for w in one.log.warnings.values()]
    found.sort(key=lambda pair: -pair[1].times)
    rows = [[name, w.line, w.times, clip(w.text, 160)] for name, w in found[:20]]
    return Table("Warnings", ("file", "line", "times", "text"), rows, open=False) if rows else None


def _plots(one: Judged | None) -> tuple[Plot, ...]:
    """The losses of the run that is at fault, or of the longest one."""
    if one is None or not one.courses:
        return ()
    course = max(one.courses, key=lambda c: (c is one.courses[-1], len(c.rows)))
    validation = [(s, val) for s, _, val in course.rows if val is not None]
    curves = {"training": course.losses, "validation": validation}
    data = {name: _points(pairs) for name, pairs in curves.items() if len(pairs) > 1}
    return (Plot("losses", {"curves": data, "curves of": f"loss in {one.name}"}),) if data else ()


def _points(pairs: list[tuple[int, float]]) -> list[list[Any]]:
    """At most POINTS of a curve, its extremes and its first value that is not finite among them."""
    apart = max(1, -(-len(pairs) // POINTS))
    keep = {*range(0, len(pairs), apart), len(pairs) - 1}
    finite = [i for i, (_, v) in enumerate(pairs) if math.isfinite(v)]
    if finite:
        keep |= {max(finite, key=lambda i: pairs[i][1]), min(finite, key=lambda i: pairs[i][1])}
    keep |= {next((i for i, (_, v) in enumerate(pairs) if not math.isfinite(v)), 0)}
    return [[pairs[i][0], pairs[i][1] if math.isfinite(pairs[i][1]) else None] for i in sorted(keep)]
