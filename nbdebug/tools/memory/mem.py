"""`mem()`: where the memory is now; `mem(step)`: what a step needs at its peak, and what every step leaves behind; and
the report of a step: findings, tables, the picture, what was ruled out and what not checked."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdebug.arguments import Subject, discover
from nbdebug.interrupts import interruptible
from nbdebug.observe.validation import check_count, check_step, models_of, names_used_by, optimizers_of
from nbdebug.report import Plot, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import percent, size
from nbdebug.tools.memory.facts import Leak, MemoryFacts, StepMemory
from nbdebug.tools.memory.rules import name_all

CALL = "mem(step, model=, optimizer=)"


def mem(
    step: Callable[[], Any] | None = None,
    *,
    steps: int = 3,
    model: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    names: Mapping[str, Any] | None = None,
    device: Any = None,
    progress: bool = True,
) -> Report:
    """Without a step: all that is held in memory now, by owner. With one: the step run under watch.

    step: a function of no arguments that performs one whole training or evaluation step; it is called `steps` times,
    and trains as it always does. A leak shows over several calls, so `steps=1` reports only the peak; where
    something grows, one more call is traced to find the line that stores it. model, optimizer: one, or several
    in a list or a dict; loader: a DataLoader, whose workers are checked. Left out, they are searched among `names`,
    the user's variables (default: those of the caller), and what the step uses. device: to report on ("cuda:0"); left
    out, the accelerator that the step uses most, else the CPU. progress: show a bar where it takes longer than two
    seconds.

    All sizes are bytes. The report's tables tell the peak by use, module and line, the optimizer's state by parameter,
    and what each step left. On CUDA the allocator's own peak statistics are reset before every step. Compiled code
    runs in eager meanwhile. What the step raises passes unchanged, with what was seen before it as its `report`; raises
    TypeError or ValueError for arguments that make no sense.
    """
    caller = sys._getframe(1)
    near = {**caller.f_globals, **caller.f_locals} if names is None else names
    if step is None:
        from nbdebug.tools.memory.owners.report import held_report

        return held_report(model, optimizer, near, device=device)
    check_step(step, "mem")
    check_count(steps, "steps")
    around = {**near, **names_used_by(step)}
    models = discover("model", around) if model is None else models_of(model, CALL, around)
    optimizers = discover("optimizer", around) if optimizer is None else optimizers_of(optimizer, CALL, around)
    loaders = loaders_of(loader, around)
    subject = str(Subject(models, optimizers, model is not None))
    return trace_step(step, models, optimizers, loaders, near, "mem(step)", subject, steps, device, progress)


@interruptible
def trace_step(
    step: Callable[[], Any],
    models: dict[str, Any],
    optimizers: dict[str, Any],
    loaders: dict[str, Any],
    names: Mapping[str, Any],
    question: str,
    subject: str,
    steps: int = 3,
    device: Any = None,
    progress: bool = True,
    files: tuple[str, ...] = (),
) -> Report:
    """What `mem(step)` and the magics do, once it is known what is meant. steps=1: a cell, which runs once. files: in
    which there is code outside functions, such as a cell."""
    from nbdebug.tools.memory.step.run import StepRequest, StepsTraced, trace_steps
    from nbdebug.tools.memory.step.workers import worker_copies

    request = StepRequest(
        step, models, optimizers, names, steps, None if device is None else _device(device), progress, files
    )
    course = StepsTraced()
    try:
        trace_steps(request, course)
    except Exception as raised:  # the step's own; a worker that was killed may well be why
        facts = dataclasses.replace(course.facts(), workers=worker_copies(loaders))
        raised.report = report_of(facts, question, subject)  # type: ignore[attr-defined]
        raise
    return report_of(dataclasses.replace(course.facts(), workers=worker_copies(loaders)), question, subject)


def loaders_of(loaders: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders by name: those that are given, or else every DataLoader among the variables."""
    if loaders is None:
        return discover("loader", names)
    if isinstance(loaders, Mapping):
        return {str(name): loader for name, loader in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return {str(number): loader for number, loader in enumerate(loaders)}
    return {next((name for name, value in names.items() if value is loaders), "loader"): loaders}


def _device(value: Any) -> str:
    """ "cuda" means the card that is in use. Raises ValueError for no device."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f'device is a device such as "cuda:0" or "cpu"; got {value!r}') from wrong
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


SAMPLE = 2000
"""Entries of a container that are measured; the rest is taken to be like them."""
WORTH = 1 << 20
"""Bytes by which a container of Python objects must have grown to be named."""


def container_sizes(names: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(identity, entries) of each dict, Counter, list, set and deque among the variables."""
    kinds = (dict, list, set, collections.deque)
    own = {name: value for name, value in names.items() if not name.startswith("_") and isinstance(value, kinds)}
    return {name: (id(value), len(value)) for name, value in own.items() if value is not names}


def growing_containers(before: Mapping[str, tuple[int, int]], names: Mapping[str, Any]) -> Table | None:
    """The variables that have grown by over 1 MiB of Python objects since then, largest first, by their deep size; None
    for none. Of more than SAMPLE entries, so many are measured."""
    from nbdebug.tools.memory.step.holders import plain_bytes

    rows, known = [], set[int]()
    for name, (identity, entries) in container_sizes(names).items():
        had = before[name][1] if before.get(name, (0, 0))[0] == identity else 0
        if entries <= had or identity in known:
            continue
        known.add(identity)
        thing = names[name]
        some = itertools.islice(thing.items() if isinstance(thing, dict) else thing, 0, None, max(1, entries // SAMPLE))
        items = list(some)
        each = plain_bytes(items) / len(items) - (sys.getsizeof(items[0]) if isinstance(thing, dict) else 0)
        whole = round(sys.getsizeof(thing) + each * entries)
        if whole * (entries - had) / entries >= WORTH:
            rows.append((name, type(thing).__name__, had, entries, whole, round(1000 * whole / entries)))
    rows.sort(key=lambda row: -row[4])
    columns = ("variable", "type", "entries before", "entries", "deep size (bytes)", "per 1,000 entries (bytes)")
    note = "Keep what is needed of each entry, write the rest to disk, or read the source in parts."
    return Table("Python containers that grew", columns, rows, note, open=True) if rows else None


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
