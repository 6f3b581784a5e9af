"""From the facts of a step to its report: findings, tables, the picture, what was ruled out and what not checked."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from nbdebug.report import Plot, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import percent, size
from nbdebug.tools.memory.facts import Leak, MemoryFacts, StepMemory
from nbdebug.tools.memory.rules import name_all

ROWS = 40


def report_of(facts: MemoryFacts, question: str, subject: str) -> Report:
    """The report on traced steps."""
    findings = name_all(facts)
    return Report(
        question,
        tuple(findings),
        tuple(_ruled_out(facts)) if not findings else (),
        facts.unchecked,
        tuple(_notes(facts)),
        subject,
        _numbers(facts),
        symptoms=_symptoms(facts),
        tables=[table for table in _tables(facts) if table.rows],
        plots=_plots(facts.step),
    )


def _notes(facts: MemoryFacts) -> list[str]:
    step = facts.step
    if step is None:
        return []
    where, device = _at_place(step), "the CPU" if step.device == "cpu" else step.device
    notes = [
        f"The step began with {size(step.base)} on {device}, reached {size(step.peak)}{where} and ended with "
        f"{size(step.after)}."
    ]
    if step.hidden > step.peak // 100:
        notes.append(
            f"{size(step.hidden)} of the peak are workspaces that an op "
            f"allocated for itself{f': {step.hidden_in}' if step.hidden_in else ''}."
        )
    notes += [
        f"`{g.holder}` grows by {size(max(g.bytes, g.plain))} a step, but it has a limit, or a line empties it."
        for g in facts.growth
        if g.emptied and max(g.bytes, g.plain)
    ]
    return notes


def _symptoms(facts: MemoryFacts) -> list[Symptom]:
    """Memory that grows from step to step, and nothing that is known holds it."""
    resident = [rss for _, _, rss in facts.after_steps]
    rises = [b - a for a, b in itertools.pairwise(resident[1:])]
    if facts.step is None or facts.growth or not rises or min(rises) <= 4 << 20:
        return []
    grows = f"The process grows by {size(statistics.fmean(rises))} a step"
    look = "Check libraries that allocate memory of their own."
    return [Symptom(f"{grows}, and no tensor, array or container accounts for it.", look)]


def _at_place(step: StepMemory) -> str:
    place = step.place
    parts = [
        f"in the {place.phase}" if place.phase else "",
        f"of `{place.module}`" if place.module else "",
        f"({place.place})" if place.place else "",
    ]
    text = " ".join(part for part in parts if part)
    return f" {text}" if text else ""


def _ruled_out(facts: MemoryFacts) -> list[RuledOut]:
    out, step = [], facts.step
    if len(facts.after_steps) > 1:
        live = [count for count, _, _ in facts.after_steps]
        out.append(
            RuledOut(
                "memory that grows with every step",
                f"{size(live[-1])} live after {len(live)} steps, {size(live[-2])} after the one before",
            )
        )
    if step is not None:
        others = sum(step.at_peak.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
        activations, state = step.at_peak.get("activations", 0), sum(count for _, count in step.state)
        if others:
            out.append(
                RuledOut(
                    "activations that dominate",
                    f"{size(activations)} at the peak, beside {size(others)} of weights, gradients and state",
                )
            )
        if state:
            out.append(RuledOut("optimizer state that dominates", f"{size(state)} of {size(step.peak)}"))
    if facts.workers is not None:
        out.append(RuledOut("workers that copy the data set", f"{size(facts.workers.bytes)} for each"))
    return out


# -- numbers for the views --------------------------------------------------------------------------------------------


def _numbers(facts: MemoryFacts) -> dict[str, Any]:
    step = facts.step
    if step is None:
        return {}
    return {
        "growth": [_plain(g) for g in facts.growth],
        "peak": step.peak,
        "measured_peak": step.measured_peak,
    }


def _plain(growth: Leak) -> dict[str, Any]:
    """What the facts say of a growth, in plain values."""
    return {
        "holder": growth.holder,
        "kind": growth.kind,
        "bytes a step": growth.bytes,
        "items a step": growth.items,
        "place": growth.where.place,
    }


def _plots(step: StepMemory | None) -> tuple[Plot, ...]:
    if step is None:
        return ()
    return (
        Plot(
            "memory",
            {
                "parts": [[name, count] for name, count in sorted(step.at_peak.items(), key=lambda p: -p[1]) if count],
                "total": step.peak,
                "limit": None,
                "course": [list(p) for p in step.course],
                "events": step.phases,
                "title": "At the peak of the step",
                "axis": "allocations",
            },
        ),
    )


def _tables(facts: MemoryFacts) -> list[Table]:
    """What grows comes first, where something does: it is the cause, and the peak only its consequence."""
    step = facts.step
    if step is None:
        return []
    growth = _growth_tables(facts)
    peak = [_peak_table(step), *_part_tables(step)]
    return [*growth, *peak] if facts.growth else [*peak, *growth]


def _peak_table(step: StepMemory) -> Table:
    measured = "" if step.measured_peak is None else f" The allocator measured {size(step.measured_peak)}."
    uses = sorted(step.at_peak.items(), key=lambda pair: -pair[1])
    return Table(
        "At the peak",
        ["use", "at the peak (bytes)", "share"],
        [[name, count, percent(count / (step.peak or 1))] for name, count in uses if count],
        f'The peak was{_at_place(step)}.{measured} "other" is older than the step.',
    )


def _part_tables(step: StepMemory) -> list[Table]:
    return [
        Table(
            "By module",
            ["module", "at the peak (bytes)", "of it activations (bytes)", "allocated (bytes)"],
            [[p.name or "(the model)", p.saved, p.activations, p.made] for p in step.modules[:ROWS]],
            "Each module with all modules inside it.",
        ),
        Table(
            "By line",
            ["line", "at the peak (bytes)", "allocated (bytes)", "largest (bytes)", "source"],
            [[_at(p.where), p.saved, p.made, p.most, (p.where.text or "")[:100]] for p in step.lines[:ROWS]],
            "What backward allocates counts for the line of the forward.",
        ),
        Table("Optimizer state", ["parameter", "state (bytes)"], [list(pair) for pair in step.state[:ROWS]]),
    ]


def _growth_tables(facts: MemoryFacts) -> list[Table]:
    several = len(facts.after_steps) > 1
    return [
        Table(
            "What each step adds",
            ["holder", "kind", "a step adds (bytes)", "items", "line"],
            [[g.holder, g.kind, max(g.bytes, g.plain), g.items, _at(g.where)] for g in facts.growth],
        ),
        Table(
            "What the run added and kept",
            ["name", "kind", "kept (bytes)", "shape of the largest", "line"],
            [[h.name, h.kind, h.bytes, str(h.shape), _at(h.where)] for h in facts.stays],
        ),
        Table(
            "After each step",
            ["step", "live (bytes)", "new and kept (bytes)", "process (bytes)"],
            [[number, *row] for number, row in enumerate(facts.after_steps) if several],
            "What is new in the last step may be freed in the next.",
        ),
    ]


def _at(where: Where) -> str:
    """A line for a narrow column, its number first: a long file name may be cut off."""
    if where.cell or where.line is None:
        return where.place
    return f"line {where.line}, {where.place.partition(',')[0]}"
