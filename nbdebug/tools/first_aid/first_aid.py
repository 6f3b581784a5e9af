"""`first_aid(symptom)`: the steps of a procedure, run in order on the user's variables until one names a cause."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import nbdebug
from nbdebug.arguments import discover
from nbdebug.interrupts import interruptible
from nbdebug.observe.frames import exception_chain
from nbdebug.observe.locations import code_fingerprint
from nbdebug.observe.snapshot import own_random_numbers
from nbdebug.observe.variables import frame_variables, last_error, running_shell, user_variables
from nbdebug.report import FOUND, Report, RuledOut, Table
from nbdebug.text import clip, count, in_a_line, listed
from nbdebug.tools.first_aid.procedures import (
    CHECKLISTS,
    OF_A_CELL,
    SYMPTOMS,
    Missing,
    NotNeeded,
    Procedure,
    Step,
    Surroundings,
    named,
    recorded_losses,
)

WELL, CAUSE, UNWELL, NEEDS, NOT_NEEDED, NOT_REACHED = "well", "cause", "not well", "needs", "not needed", "not reached"
MARKS = {WELL: "✓", CAUSE: "✗", UNWELL: "!", NEEDS: "–", NOT_NEEDED: "–", NOT_REACHED: ""}


@dataclasses.dataclass
class FirstAidReport(Report):
    """The steps, ticked off, and below them the report of the step that found something. tool: that report."""

    tool: Report | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def _steps(self) -> Report:
        """The steps alone."""
        return Report(
            self.question if self.tool is None else "", headline=self.headline, tables=self.tables[:1], notes=self.notes
        )

    def __str__(self) -> str:
        return self._joined("render")

    def __repr__(self) -> str:
        return self._joined("for_terminal")

    def _joined(self, function: str) -> str:
        steps = self._steps()
        if self.tool is None or not self.folded:
            text = str(steps.full()._view("text", function))
        else:  # a line each, up to the one that counts, whose report is below
            steps.tables = [_without_unreached(self.tables[0])]
            text = str(steps._view("text", function, len(steps.tables[0].rows) + 4 + 2 * len(steps.notes)))
        if self.tool is None:
            return text
        left = max(14, 28 - text.count("\n"))
        tool = dataclasses.replace(self.tool, folded=self.folded, subject="")
        return f"{text}\n\n{tool._view('text', function, left)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        tools = [dataclasses.replace(self.tool, folded=self.folded)] if self.tool is not None else []
        html = "\n".join(str(part._view("html", "render")) for part in (self._steps(), *tools))
        return {"text/plain": repr(self), "text/html": html}


@dataclasses.dataclass
class StepOutcome:
    """What came of a step. state: one of the words above; text: in a sentence; report: the tool's own."""

    step: Step
    state: str = NOT_REACHED
    text: str = ""
    seconds: float | None = None
    report: Report | None = None

    def row(self, number: int) -> list[Any]:
        takes = "" if self.state == NOT_NEEDED else _minutes(self.step.minutes)
        if self.seconds is not None:
            takes = f"{self.seconds:.1f} s"
        text = f"{self.state}: {self.text}" if self.text and self.state != WELL else self.text or self.state
        return [MARKS[self.state], f"{number}. {self.step.what}", self.step.magic, takes, text]


class LogEntry(NamedTuple):
    """One first aid. settings: of the run then; changed: since the one before."""

    at: str
    symptom: str
    outcome: str
    settings: Mapping[str, str]
    changed: tuple[str, ...]


LOG: list[LogEntry] = []
"""What was tried in this session, oldest first."""


@interruptible
def first_aid(
    symptom: str | None = None,
    *,
    names: Mapping[str, Any] | None = None,
    shell: Any = None,
    all_steps: bool = False,
    log: bool = False,
) -> Report:
    """Run the steps of a procedure in order, each on what is among the user's variables, until one names a cause.

    symptom: "nan", "memory", "slow", "hang", "crash", "not-learning", "error" or "quality" (or another word for one);
    or a checklist, "before", "during" or "after" training, whose steps are all run. Left out: the list of symptoms, and
    which of them fit the last error and the variables. names: the user's variables, by default the notebook's, or those
    of the caller. all_steps: go on after the first cause. log: what was tried in this session instead, and what was
    changed in between.

    A step of training runs on the user's own `train_step(batch)` or the like, or on model, loss, optimizer and batches;
    afterwards models, optimizers, random numbers and variables are as they were. What a step needs and does not find is
    in its line. Returns a Report: the steps, ticked off, with the seconds that each took, and the report of the tool
    that found the cause. Raises ValueError for a word that names no list.
    """
    if log:
        return _log_report()
    caller = sys._getframe(1)
    shell = running_shell() if shell is None else shell
    if names is None:
        names = {**getattr(shell, "user_ns", {}), **caller.f_globals, **frame_variables(caller)}
    names = user_variables(names)
    error = last_error()
    result = getattr(shell, "last_execution_result", None)
    fresh = error is not None and (result is None or result.error_in_exec is error)
    a = Surroundings(names, shell, error, fresh)
    if symptom is None:
        return _overview(a)
    name = named(symptom, {**SYMPTOMS, **CHECKLISTS})
    whole = name in CHECKLISTS
    procedure = CHECKLISTS[name] if whole else SYMPTOMS[name]
    with contextlib.ExitStack() as same:
        for loader in discover("loader", names).values() or [None]:
            same.enter_context(own_random_numbers(loader))
        outcomes, known = [], False
        for step in procedure.steps:
            skipped = known and not (all_steps or whole or step.always)
            outcomes.append(StepOutcome(step) if skipped else _run(step, a))
            known = known or outcomes[-1].state == CAUSE
    entry = _remember(name, outcomes, names)
    return _report(name, procedure, outcomes, entry, a, whole)


# -- the walk ---------------------------------------------------------------------------------------------------------


def _run(step: Step, a: Surroundings) -> StepOutcome:
    began = time.perf_counter()
    try:
        report = step.run(a)
    except Missing as missing:
        return StepOutcome(step, NEEDS, str(missing))
    except NotNeeded as reason:
        return StepOutcome(step, NOT_NEEDED, str(reason))
    except Exception as error:
        return _failed(step, error, a, time.perf_counter() - began)
    state = CAUSE if report.verdict == FOUND else WELL if report.ok else UNWELL
    return StepOutcome(step, state, report.sentence, time.perf_counter() - began, report)


def _failed(step: Step, error: Exception, a: Surroundings, seconds: float) -> StepOutcome:
    """An exception of the user's own step is a cause; of a step that was made here, or of a tool, it is none: the step
    could not run."""
    frames = [frame for one in exception_chain(error) for frame, _ in traceback.walk_tb(one.__traceback__)]
    if a.own_step is not None and any(frame.f_code is a.own_step.__code__ for frame in frames):
        report = nbdebug.explain(error, names=dict(a.names), shell=a.shell)
        if report.verdict == FOUND:
            return StepOutcome(step, CAUSE, report.sentence, seconds, report)
    return StepOutcome(step, NEEDS, f"it could not run here ({in_a_line(error)})", seconds)


# -- the reports ------------------------------------------------------------------------------------------------------


def _report(
    name: str, procedure: Procedure, outcomes: list[StepOutcome], entry: LogEntry, a: Surroundings, whole: bool
) -> Report:
    rows = [outcome.row(number) for number, outcome in enumerate(outcomes, 1)]
    title = f"Checklist {procedure.title}" if whole else f"First aid for {procedure.title}"
    table = Table("The steps", ("", "step", "by", "takes", "what came out"), rows, open=True)
    causes = [o for o in outcomes if o.state == CAUSE]
    unwell = [o for o in outcomes if o.state == UNWELL]
    tool = next((o.report for o in (*causes, *unwell)), None)
    findings = tuple(f for o in causes for f in (o.report.findings if o.report else ()))
    symptoms = tuple(s for o in unwell for s in (o.report.symptoms if o.report else ()))
    return FirstAidReport(
        f"%checklist {name}" if whole else f"%first_aid {name}",
        findings,
        tuple(RuledOut(o.step.what, o.text or "nothing was found") for o in outcomes if o.state == WELL),
        tuple(f"{o.step.what}: {o.text}" for o in outcomes if o.state == NEEDS),
        (*_notes(entry), *_loop_in_a_cell(name, outcomes, a)),
        headline=_headline(outcomes, title),
        symptoms=symptoms,
        independent=whole or len(causes) > 1,
        tables=(table, *(tool.tables if tool else ())),
        plots=tool.plots if tool else (),
        facts={"steps": [{"what": o.step.what, "state": o.state, "seconds": o.seconds} for o in outcomes]},
        saver=tool.saver if tool else None,
        tool=tool,
    )


def _without_unreached(table: Table) -> Table:
    """The last steps, which were not reached, in one row."""
    reached = max((i for i, row in enumerate(table.rows, 1) if row[-1] != NOT_REACHED), default=0)
    rest = len(table.rows) - reached
    row = ["", f"{reached + 1} to {len(table.rows)}", "", "", f"{NOT_REACHED} (--all runs them)"]
    return dataclasses.replace(table, rows=[*table.rows[:reached], *([row] if rest > 1 else table.rows[reached:])])


def _headline(outcomes: list[StepOutcome], title: str) -> str:
    ran = sum(o.state in (WELL, CAUSE, UNWELL) for o in outcomes)
    done = f"{ran} of {count(len(outcomes), 'step')} ran"
    causes, unwell = ([n for n, o in enumerate(outcomes, 1) if o.state == state] for state in (CAUSE, UNWELL))
    if causes:
        noun = "step" if len(causes) == 1 else "steps"
        return f"{title}: a cause was found in {noun} {listed(causes, 9, quote='')} of {len(outcomes)}."
    if unwell:
        return f"{title}: step {unwell[0]} saw something that is not well, with no known cause. {done}."
    return f"{title}: no cause was found. {done}." if ran else f"{title}: no step could run. Each says what it needs."


def _notes(entry: LogEntry) -> tuple[str, ...]:
    if not entry.changed:
        return ()
    since = f"Changed since the last first aid: {listed(entry.changed, 4, quote='')}."
    if len(entry.changed) > 1:
        since += " More than one thing: which of them helped, or hurt, can't be told. Change one at a time."
    return (since,)


def _loop_in_a_cell(name: str, outcomes: list[StepOutcome], a: Surroundings) -> Iterator[str]:
    """What to type above a training that stands in a cell, where its parts were not found or could not tell."""
    known = any(o.state == CAUSE for o in outcomes)
    if name in OF_A_CELL and not known and any(o.state == NEEDS for o in outcomes) and (cell := a.loop_cell):
        yield f"A training stands in {cell}. Make its model anew, type {OF_A_CELL[name]} above it, and run it."


def _overview(a: Surroundings) -> Report:
    """The symptoms, and which of them fit what is here."""
    fits: dict[str, str] = {}
    for name, why in fitting(a):
        fits.setdefault(name, why)
    rows = [
        [f"%first_aid {name}", p.when, len(p.steps), _minutes(p.minutes), fits.get(name, "")]
        for name, p in SYMPTOMS.items()
    ]
    rows.sort(key=lambda row: not row[-1])
    first = next(iter(fits), None)
    headline = f"Type %first_aid {first}: {fits[first]}." if first else "What do you see? Nothing here tells by itself."
    columns = ("type", "when", "steps", "takes", "what fits here")
    table = Table(
        "First aid", columns, rows, "%checklist before, during or after: around a run. --log: what was tried."
    )
    return Report("%first_aid", headline=headline, tables=(table,), facts={"fits": fits})


def fitting(a: Surroundings) -> Iterator[tuple[str, str]]:
    """(symptom, why) of those that fit the last error and the variables, the likeliest first."""
    if a.error is not None and a.fresh:
        yield from _by_error(a.error)
    name, values = recorded_losses(a.names)
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is not None:
        yield "nan", f"`{name}[{bad}]` is {values[bad]}"
    elif values:
        from nbdebug.verdict import of_losses

        if symptoms := of_losses(values):
            yield "not-learning", f"`{name}`: {symptoms[0].what.rstrip('.')}"
    for name, model in discover("model", a.names).items():
        from nbdebug.observe.rerun import has_nonfinite

        if (wrong := next((n for n, p in model.named_parameters() if has_nonfinite(p)), None)) is not None:
            yield "nan", f"`{name}.{wrong}` holds NaN or inf"


def _by_error(error: BaseException) -> Iterator[tuple[str, str]]:
    kind, words = type(error).__name__, f"{type(error).__name__} {error}".lower()
    if kind == "NonFiniteStep" or "returned nan" in words:
        yield "nan", f"the last cell ended with {kind}"
    elif "out of memory" in words or isinstance(error, MemoryError):
        yield "memory", f"the last cell ended with {kind}"
    elif isinstance(error, KeyboardInterrupt):
        yield "hang", "you interrupted the last cell (if it was only slow: %first_aid slow)"
    elif kind != "UsageError" and not isinstance(error, (SystemExit, SyntaxError)):
        yield "error", f"the last cell ended with {kind}"


def _minutes(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes >= 0.95 else f"{60 * minutes:.0f} s"


# -- the log ----------------------------------------------------------------------------------------------------------


def _remember(symptom: str, outcomes: list[StepOutcome], names: Mapping[str, Any]) -> LogEntry:
    settings = settings_of(names)
    before = LOG[-1].settings if LOG else settings
    told = next((o for state in (CAUSE, UNWELL) for o in outcomes if o.state == state), None)
    if told is not None:
        code = told.report.findings[0].code if told.report and told.report.findings else told.state
        outcome = f"{code}: {told.text}"
    else:
        outcome = "no cause" if any(o.state == WELL for o in outcomes) else "no step could run"
    entry = LogEntry(time.strftime("%H:%M:%S"), symptom, outcome, settings, tuple(_changes(before, settings)))
    LOG.append(entry)
    return entry


def _log_report() -> Report:
    rows = [
        [number, entry.at, entry.symptom, listed(entry.changed, 4, quote="") or "nothing", clip(entry.outcome, 90)]
        for number, entry in enumerate(LOG, 1)
    ]
    several = [number for number, entry in enumerate(LOG, 1) if len(entry.changed) > 1]
    note = f"Before {listed(several, 5, quote='')} more than one thing was changed: change one at a time."
    columns = ("try", "at", "asked", "changed since the last", "what came out")
    headline = f"{count(len(LOG), 'try', 'tries')} in this session." if LOG else "Nothing was tried yet."
    return Report(
        "%first_aid --log",
        headline=headline,
        tables=(Table("What was tried", columns, rows),),
        notes=(note,) if several else (),
    )


OPTIONS = ("initial_lr", "lr", "momentum", "betas", "weight_decay", "eps", "nesterov", "amsgrad", "alpha")
"""Of an optimizer's groups: what a person sets."""


def settings_of(names: Mapping[str, Any]) -> dict[str, str]:
    """What a person changes between two tries, as text: models, optimizers, loaders, and the code of the functions and
    classes of the notebook."""
    found: dict[str, str] = {}
    for name, model in discover("model", names).items():
        parameters = list(model.parameters())
        found[f"{name}: class"] = type(model).__name__
        found[f"{name}: parameters"] = f"{sum(p.numel() for p in parameters):,}"
        found[f"{name}: trained"] = f"{sum(p.numel() for p in parameters if p.requires_grad):,}"
        found[f"{name}: dtype"] = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
        found[f"{name}: device"] = ", ".join(sorted({str(p.device) for p in parameters}))
    for name, optimizer in discover("optimizer", names).items():
        found[f"{name}: class"] = type(optimizer).__name__
        for i, group in enumerate(optimizer.param_groups):
            place = f"{name}.param_groups[{i}]" if len(optimizer.param_groups) > 1 else name
            own = {key: group[key] for key in OPTIONS if key in group}
            if "initial_lr" in own:  # of a scheduler, which changes lr by itself
                own["lr"] = own.pop("initial_lr")
            found |= {f"{place}: {key}": str(value) for key, value in own.items()}
    for name, loader in discover("loader", names).items():
        found[f"{name}: batch size"] = str(loader.batch_size)
        found[f"{name}: workers"] = str(loader.num_workers)
        found[f"{name}: sampler"] = type(loader.sampler).__name__
    for name, thing in names.items():
        if type(thing) is types.FunctionType and thing.__module__ == "__main__":
            found[f"{name}: code"] = str(code_fingerprint(thing.__code__))
        elif isinstance(thing, type) and thing.__module__ == "__main__":
            methods = [value for value in vars(thing).values() if type(value) is types.FunctionType]
            found[f"{name}: code"] = str([code_fingerprint(method.__code__) for method in methods])
    return found


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        name, _, what = key.partition(": ")
        if what == "code":
            yield f"{name} is {'new' if old is None else 'gone' if new is None else 'written anew'}"
        elif old is None or new is None:
            if what == "class":
                yield f"{name} is {'new' if old is None else 'gone'}"
        else:
            yield f"{name} has {what} {new} (was {old})"
