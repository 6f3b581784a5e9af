"""The report of a training's time: one sentence, a step by its parts, the dearest lines, the cures that were tried."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from nbdebug.report import Plot, Report, RuledOut, Table
from nbdebug.text import clip, count, figures, percent
from nbdebug.tools.speed.facts import PHASES, SpeedFacts
from nbdebug.tools.speed.rules import BATCHED, WAITING, milliseconds, name_cause


def report_of(facts: SpeedFacts, question: str, subject: str, goal: float | None = None) -> Report:
    found = name_cause(facts)
    tables = [table for table in (cures(facts), lines(facts), phases(facts)) if table.rows]
    return Report(
        question,
        (found,) if found is not None else (),
        ruled_out=() if found is not None else tuple(ruled_out(facts)),
        unchecked=tuple(facts.unchecked),
        notes=tuple(notes(facts, goal)),
        subject=subject,
        facts={"speed": plain(facts)},
        headline="" if found is not None else headline(facts),
        steps=len(facts.steps),
        tables=tables,
        plots=(picture(facts, found.evidence["bottleneck"] if found is not None else ""),) if facts.steps else (),
    )


def rate(facts: SpeedFacts) -> str:
    """ "21 steps a second (336 samples)"."""
    seconds = facts.seconds()
    if not seconds:
        return "no step ended"
    samples = statistics.median(step.samples for step in facts.steps)
    rows = f" ({figures(samples / seconds)} samples)" if samples else ""
    return f"{figures(1 / seconds)} {'step' if 1 / seconds == 1 else 'steps'} a second{rows}"


def headline(facts: SpeedFacts) -> str:
    if not facts.steps:
        return "No step was seen."
    work, busy = sum(facts.share(phase) for phase in ("forward", "backward", "optimizer")), facts.busy
    if min(work, 1.0 if busy is None else busy) < 0.5:
        return f"No single cause makes it slow: {rate(facts)}."
    share = (
        f"{percent(work)} of the time is the model's own work"
        if busy is None
        else f"the GPU works {percent(busy)} of the time"
    )
    return f"No bottleneck was found: {share} (compute-bound), {rate(facts)}."


def phases(facts: SpeedFacts) -> Table:
    """A step by its parts: median, spread (the middle half of the steps), share of all time."""
    rows = [
        [name, milliseconds(median), f"{milliseconds(low)} to {milliseconds(high)}", percent(share)]
        for name, median, low, high, share in parts(facts)
    ]
    columns = ("part", "median", "middle half of the steps", "of all time")
    return Table("A step by its parts", columns, rows, f"{count(len(facts.steps), 'step')}, {rate(facts)}", open=False)


def parts(facts: SpeedFacts) -> list[tuple[str, float, float, float, float]]:
    """(name, median, ends of the middle half, share of all time) of each part that takes time."""
    rows = []
    for phase in PHASES:
        values = [step.phases.get(phase, 0.0) for step in facts.parted]
        if facts.share(phase) >= 0.001:
            low, _, high = statistics.quantiles(values, n=4) if len(values) > 3 else (min(values), 0, max(values))
            rows.append((phase, statistics.median(values), max(low, 0.0), high, facts.share(phase)))
    return rows


def picture(facts: SpeedFacts, bottleneck: str) -> Plot:
    """bottleneck: of the finding, "" without one."""
    slow = {"loader": "waiting for data", "transfer": "copy", "sync": "synchronisation"}.get(bottleneck, bottleneck)
    title = f"A step takes {milliseconds(facts.seconds())}: {rate(facts)}"
    return Plot("times", {"title": title, "parts": [list(row) for row in parts(facts)], "slow": slow})


def cures(facts: SpeedFacts) -> Table:
    rows = [
        [c.name, times(c.predicted), times(c.measured) or c.why_not, *(figures(v, 4) for v in c.losses or ())]
        for c in facts.cures
    ]
    rows = [[*row, "", ""][:5] for row in rows]
    note = "times as fast as without it, steps with and without in turn, on a copy; the last loss without and with it"
    return Table(
        "What was tried", ("cure", "predicted", "measured", "loss without", "loss with"), rows, note, open=True
    )


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{figures(ratio, 2)}x"


def lines(facts: SpeedFacts) -> Table:
    rows = [
        [line.where.place, clip(line.where.text or "", 60), percent(line.share)]
        for line in facts.lines
        if line.share >= 0.01
    ]
    return Table(
        "Your dearest lines", ("place", "line", "of all time"), rows, "looked at every 5 ms, while the steps ran"
    )


def ruled_out(facts: SpeedFacts) -> Iterator[RuledOut]:
    if not facts.steps:
        return
    yield RuledOut(
        "loader-bound",
        f"{percent(facts.share('waiting for data'))} of the time is waiting (from {percent(WAITING)} on)",
    )
    if facts.repeated is not None:
        yield RuledOut("redundant-work", f"{percent(facts.repeated.share)} of the work repeats an earlier one")
    if facts.double is not None:
        yield RuledOut("wrong-dtype", f"{percent(facts.double.share)} of the work is in float64")
    reads = max((each.per_step for each in facts.reads), default=0.0)
    yield RuledOut("host-sync", f"{count(round(reads), 'read')} a step at one line")
    if facts.loop is not None:
        yield RuledOut(
            "small-kernels", f"one batch would be {figures(facts.loop.gain, 2)} times as fast (from {BATCHED:g} on)"
        )
    for phase, code in (("saving", "checkpoint-too-often"), ("validating", "eval-too-often")):
        if facts.share(phase):
            yield RuledOut(code, f"{percent(facts.share(phase))} of the time")


def notes(facts: SpeedFacts, goal: float | None) -> Iterator[str]:
    seconds = facts.seconds()
    if goal and seconds:
        reached = 1 / seconds >= goal
        said = "reached" if reached else "not reached"
        yield f"Goal: {figures(goal)} steps a second; {said} with {figures(1 / seconds)}."
    if facts.kernels is not None and facts.busy is not None:
        yield f"The GPU works {percent(facts.busy)} of a step, in {figures(round(facts.kernels[0]))} kernels."
    if facts.device == "cpu":
        yield "Measured on a CPU. A GPU makes the model's part shorter, and what it waits for as long as here."


def plain(facts: SpeedFacts) -> dict[str, Any]:
    """What `--json` prints and `--against` compares."""
    return {
        "seconds": facts.seconds(),
        "steps": [dict(step.phases) for step in facts.parted],
        "samples": statistics.median([step.samples for step in facts.steps] or [0]),
        "shares": {phase: facts.share(phase) for phase in PHASES if facts.share(phase)},
        "device": facts.device,
        "busy": facts.busy,
        "cures": [dataclasses.asdict(cure) for cure in facts.cures],
    }
