"""The report of `mem()`: who holds what, by owner, by kind, tensor by tensor, and what the devices say."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nbdebug.arguments import Subject, discover
from nbdebug.interrupts import uncollected
from nbdebug.observe.shell import running_shell
from nbdebug.observe.validation import models_of, optimizers_of
from nbdebug.report import Plot, Report, Table
from nbdebug.text import count as counted
from nbdebug.text import size
from nbdebug.tools.memory.facts import KINDS, Device, HeldMemory, Holding, KeptByNotebook, MemoryFacts
from nbdebug.tools.memory.free import kept_by_notebook
from nbdebug.tools.memory.owners.inventory import NAMELESS, UNMET, Inventory, inventory
from nbdebug.tools.memory.rules import name_all
from nbdebug.tools.memory.rules.leaks import MATTERS

CALL = "mem(model=, optimizer=)"
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
"""Share of reserved memory that is not allocated, above which a note says so (as in rules.retention)."""
WORTH = 64 << 20
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
    only = _device(device)
    shell = running_shell() if shell is None else shell
    models = discover("model", names) if model is None else models_of(model, CALL, names)
    optimizers = discover("optimizer", names) if optimizer is None else optimizers_of(optimizer, CALL, names)
    with uncollected():
        owners = inventory(models, optimizers, names, device=only, caller=sys._getframe(1), shell=shell)
        notebook = kept_by_notebook(names, shell, device=only) if _beyond_variables(owners.held) >= MATTERS else ()
    facts = MemoryFacts(now=owners.held, notebook=notebook, unchecked=owners.unchecked)
    findings = tuple(name_all(facts))
    return Report(
        question,
        findings,
        (),
        facts.unchecked,
        tuple(_notes(owners.held)),
        str(Subject(models, optimizers, model is not None)) if subject is None else subject,
        _numbers(owners, facts.notebook),
        headline=_headline(owners.held),
        tables=[
            t for t in (_by_owner(owners), _by_kind(owners.held), _largest(owners), _devices(owners.held)) if t.rows
        ],
        plots=_plots(owners.held),
    )


def _beyond_variables(held: HeldMemory) -> int:
    """Bytes that no variable leads to: an upper bound of what the notebook keeps."""
    return sum(h.bytes for h in held.holdings if KINDS.index(h.kind) > KINDS.index("variable"))


def _device(value: Any) -> str:
    """Raises ValueError for no device."""
    if value is None:
        return ""
    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f'device is a device such as "cuda:0" or "cpu"; got {value!r}') from wrong


# -- in words ---------------------------------------------------------------------------------------------------------


def _notes(held: HeldMemory) -> list[str]:
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
    if share <= SPLIT or idle < WORTH:
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


# -- in numbers -------------------------------------------------------------------------------------------------------


def _numbers(owners: Inventory, notebook: tuple[KeptByNotebook, ...]) -> dict[str, Any]:
    held = owners.held
    return {
        "devices": [dataclasses.asdict(device) for device in held.devices],
        "tensors": held.tensors,
        "storages": held.storages,
        "notebook": [dataclasses.asdict(leftover) for leftover in notebook],
    }


def _plots(held: HeldMemory) -> tuple[Plot, ...]:
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
