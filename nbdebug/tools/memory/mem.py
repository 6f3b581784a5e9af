"""`mem()`: where the memory is now, by owner; `mem(step)`: what a step needs at its peak, and what every step leaves
behind. Below them the reports of both: findings, tables, the picture, what was ruled out and what not checked."""

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
from nbdebug.interrupts import interruptible, uncollected
from nbdebug.observe.validation import check_count, check_step, models_of, names_used_by, optimizers_of
from nbdebug.observe.variables import running_shell
from nbdebug.report import Plot, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import count as counted
from nbdebug.text import percent, size
from nbdebug.tools.memory.facts import KINDS, Device, HeldMemory, Holding, KeptByNotebook, MemoryFacts, StepMemory
from nbdebug.tools.memory.free import kept_by_notebook
from nbdebug.tools.memory.inventory import NAMELESS, UNMET, Inventory, inventory
from nbdebug.tools.memory.rules import name_all
from nbdebug.tools.memory.rules.usage import MATTERS

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
    from nbdebug.tools.memory.steps import StepRequest, StepsTraced, trace_steps
    from nbdebug.tools.memory.workers import worker_copies

    only = None if device is None else _device(device)
    only = f"cuda:{torch.cuda.current_device()}" if only == "cuda" else only
    request = StepRequest(step, models, optimizers, names, steps, only, progress, files)
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
    """Raises ValueError for no device."""
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f'device is a device such as "cuda:0" or "cpu"; got {value!r}') from wrong


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
    from nbdebug.tools.memory.holders import plain_bytes

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
    if len(facts.after_steps) > 1 and not facts.growth:
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
    growth = [
        {
            "holder": g.holder,
            "kind": g.kind,
            "bytes a step": g.bytes,
            "items a step": g.items,
            "place": g.where.place,
        }
        for g in facts.growth
    ]
    return {"growth": growth, "peak": step.peak, "measured_peak": step.measured_peak}


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


PLURALS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "buffer": "buffers",
    "variable": "variables",
    "cell output": "cell outputs",
    "traceback": "tracebacks",
    "closure": "closures",
    "graph": "saved for backward",
    "unknown": "no name found",
}
SPLIT = 0.30
"""Share of reserved memory that is not allocated, above which a note says so (as in rules)."""
IDLE = 64 << 20
"""Least bytes of it."""


def held_report(
    model: Any = None,
    optimizer: Any = None,
    names: Mapping[str, Any] | None = None,
    *,
    device: Any = None,
    question: str = "mem()",
    subject: str | None = None,
    shell: Any = None,
) -> Report:
    """All that is held in memory now.

    model, optimizer: one, or several in a list or a dict; left out, those among `names`, the user's variables. device:
    report this one alone ("cuda:0"; "cuda" means every GPU). subject: which models were taken, as a sentence.
    shell: IPython's; left out, the one that runs. Raises TypeError or ValueError for arguments that make no sense.
    """
    names = {} if names is None else names
    only = "" if device is None else _device(device)
    shell = running_shell() if shell is None else shell
    models = discover("model", names) if model is None else models_of(model, "mem(model=, optimizer=)", names)
    optimizers = (
        discover("optimizer", names)
        if optimizer is None
        else optimizers_of(optimizer, "mem(model=, optimizer=)", names)
    )
    with uncollected():
        owners = inventory(models, optimizers, names, device=only, caller=sys._getframe(1), shell=shell)
        # an upper bound of what the notebook keeps: bytes that no variable leads to
        beyond = sum(h.bytes for h in owners.held.holdings if KINDS.index(h.kind) > KINDS.index("variable"))
        notebook = kept_by_notebook(names, shell, device=only) if beyond >= MATTERS else ()
    facts = MemoryFacts(now=owners.held, notebook=notebook, unchecked=owners.unchecked)
    findings = tuple(name_all(facts))
    return Report(
        question,
        findings,
        (),
        facts.unchecked,
        tuple(_notes_of_held(owners.held)),
        str(Subject(models, optimizers, model is not None)) if subject is None else subject,
        _numbers_of_held(owners, facts.notebook),
        headline=_headline(owners.held),
        tables=[
            t for t in (_by_owner(owners), _by_kind(owners.held), _largest(owners), _devices(owners.held)) if t.rows
        ],
        plots=_plot_of_held(owners.held),
    )


# -- the report of what is held, in words ------------------------------------------------------------------------------


def _notes_of_held(held: HeldMemory) -> list[str]:
    notes = [note for device in held.devices for note in _of_device(device)]
    nameless = [h for h in held.holdings if h.kind == "unknown" and h.storages]
    count = sum(h.bytes for h in nameless)
    if count > sum(h.bytes for h in held.holdings) // 50 and count > 1 << 20:
        several = sum(h.storages for h in nameless)
        notes.append(
            f"No name leads to {counted(several, 'storage')} ({size(count)}). `import gc; gc.collect()` frees them if "
            "they only refer to each other."
        )
    return notes


def _of_device(device: Device) -> list[str]:
    if device.name == "cpu":
        text = f"Tensors and arrays hold {size(device.live)} on the CPU"
        if device.process is not None:
            text += f", and this process uses {size(device.process)} in total"
        return [f"{text}; {size(device.free or 0)} of the machine's {size(device.total or 0)} are free."]
    if device.allocated is None:
        return [f"Tensors on {device.name} hold {size(device.live)}; its allocator can't be read."]
    text = f"{device.name}: {size(device.allocated)} allocated of {size(device.reserved or 0)} reserved"
    if device.peak_allocated is not None:
        text += f" (at most {size(device.peak_allocated)} and {size(device.peak_reserved or 0)} so far)"
    text += f"; {size(device.free or 0)} of the GPU's {size(device.total or 0)} are free."
    return [text, *_idle(device), *_unmet(device)]


def _idle(device: Device) -> list[str]:
    share, idle = device.fragmentation or 0.0, (device.reserved or 0) - (device.allocated or 0)
    if share <= SPLIT or idle < IDLE:
        return []
    largest = "" if device.largest is None else f"; the largest free piece is {size(device.largest)}"
    return [
        f"{share:.0%} of what is reserved on {device.name} is not allocated: {size(idle)} that the allocator keeps "
        f"for the next requests{largest}. `torch.cuda.empty_cache()` releases the segments that are wholly free; where "
        "sizes change from step to step, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts."
    ]


def _unmet(device: Device) -> list[str]:
    unmet = (device.allocated or 0) - device.live
    if not device.name.startswith("cuda") or unmet < max(1 << 20, (device.allocated or 0) // 100):
        return []
    return [
        f"{size(unmet)} on {device.name} are allocated without any tensor: workspaces of cuBLAS and "
        "cuDNN, or what other libraries hold."
    ]


# -- and in numbers ---------------------------------------------------------------------------------------------------


def _numbers_of_held(owners: Inventory, notebook: tuple[KeptByNotebook, ...]) -> dict[str, Any]:
    held = owners.held
    return {
        "devices": [dataclasses.asdict(device) for device in held.devices],
        "tensors": held.tensors,
        "storages": held.storages,
        "notebook": [dataclasses.asdict(leftover) for leftover in notebook],
    }


def _plot_of_held(held: HeldMemory) -> tuple[Plot, ...]:
    """What is held on the device that has most of it, a GPU first."""
    main = max(
        held.devices,
        key=lambda d: (d.name != "cpu" and bool(d.live or d.allocated), d.allocated or d.live),
        default=None,
    )
    if main is None or not held.holdings:
        return ()
    parts = _parts(held, main.name)
    data = {
        "title": f"Held on {'the CPU' if main.name == 'cpu' else main.name}",
        "parts": parts,
        "total": sum(int(count) for _, count in parts),
        "limit": None if main.name == "cpu" else main.total,
        "course": [],
        "events": {},
    }
    return (Plot("memory", data),)


def _headline(held: HeldMemory) -> str:
    sums: dict[str, int] = {}
    for holding in held.holdings:
        sums[holding.device] = sums.get(holding.device, 0) + holding.bytes
    if not sums:
        return "No tensor is held."
    where = " and ".join(
        f"{size(count)} on {'the CPU' if name == 'cpu' else name}"
        for name, count in sorted(sums.items(), key=lambda pair: (pair[0] == "cpu", pair[0]))
    )
    return f"{where}, held by {counted(held.tensors, 'tensor')} in {counted(held.storages, 'storage')}"


def _parts(held: HeldMemory, device: str) -> list[list[Any]]:
    sums: dict[str, int] = {}
    for holding in held.holdings:
        if holding.device == device:
            word = UNMET if holding.name == UNMET else PLURALS.get(holding.kind, holding.kind)
            sums[word] = sums.get(word, 0) + holding.bytes
    return [list(pair) for pair in sorted(sums.items(), key=lambda pair: -pair[1])]


def _by_owner(owners: Inventory) -> Table:
    """A row for each kind and variable, with the largest that lies in it."""
    groups: dict[tuple[str, str, str], list[Holding]] = {}
    for holding, root in zip(owners.held.holdings, owners.roots):
        groups.setdefault((holding.kind, root or holding.name, holding.device), []).append(holding)
    rows: list[list[Any]] = []
    for (kind, root, device), together in groups.items():
        first = max(together, key=lambda holding: holding.bytes)
        count = sum(holding.storages for holding in together)
        rows.append(
            [
                _owner(kind, root, together),
                kind,
                sum(holding.bytes for holding in together),
                count,
                device,
                f"{first.name}: {what(first)}" if count else "(no tensor)",
            ]
        )
    rows.sort(key=lambda row: -row[2])
    return Table(
        "By owner",
        ("owner", "kind", "held (bytes)", "storages", "device", "largest"),
        rows,
        f"Each storage counted once, at its first owner in this order: {', '.join(KINDS)}.",
    )


def _owner(kind: str, root: str, together: list[Holding]) -> str:
    if kind in PLURALS and kind in ("parameter", "gradient", "buffer"):
        return f"{root}'s {PLURALS[kind]}"
    if kind == "optimizer state":
        return f"{root}'s state"
    if kind == "graph" and root != NAMELESS:
        return f"graphs kept by {root}" if len({h.name for h in together}) > 1 else together[0].name
    return together[0].name if kind == "closure" and len(together) == 1 else root


def what(holding: Holding) -> str:
    """ "float32 (512, 2048)"."""
    return f"{holding.dtype} {holding.shape}" if holding.dtype else "(no tensor)"


def _by_kind(held: HeldMemory) -> Table:
    sums: dict[tuple[str, str], list[int]] = {}
    for holding in held.holdings:
        entry = sums.setdefault((holding.device, holding.kind), [0, 0])
        entry[0], entry[1] = entry[0] + holding.bytes, entry[1] + holding.storages
    wholes = {device: sum(count for (name, _), (count, _) in sums.items() if name == device) for device, _ in sums}
    rows = [
        [kind, device, count, f"{count / (wholes[device] or 1):.0%}", several]
        for (device, kind), (count, several) in sums.items()
    ]
    return Table(
        "By kind",
        ("kind", "device", "held (bytes)", "share", "storages"),
        sorted(rows, key=lambda row: (row[1] == "cpu", row[1], -row[2])),
    )


def _largest(owners: Inventory) -> Table:
    rows = [
        [holding.name, holding.kind, holding.bytes, what(holding), holding.device, _remark(holding, shown)]
        for holding, shown in owners.largest
    ]
    return Table("Largest tensors", ("name", "kind", "held (bytes)", "what", "device", "remark"), rows)


def _remark(holding: Holding, shown: int) -> str | None:
    remarks = [f"a view of {size(shown)}, which keeps all of it"] if shown * 2 < holding.bytes else []
    remarks += [f"also {', '.join(holding.also)}"] if holding.also else []
    return "; ".join(remarks) or None


def _devices(held: HeldMemory) -> Table:
    fields = ("live", "allocated", "reserved", "peak_allocated", "peak_reserved", "largest", "process", "free", "total")
    words = (
        "in tensors",
        "allocated",
        "reserved",
        "peak allocated",
        "peak reserved",
        "largest free piece",
        "process",
        "free",
        "total",
    )
    rows = [
        [
            device.name,
            *(getattr(device, field) for field in fields),
            None if device.fragmentation is None else f"{device.fragmentation:.0%}",
        ]
        for device in held.devices
    ]
    used = [n for n, values in enumerate(zip(*rows)) if any(value is not None for value in values)]
    columns = ["device", *(f"{word} (bytes)" for word in words), "reserved, not allocated"]
    return Table("Devices", [columns[n] for n in used], [[row[n] for n in used] for row in rows])
