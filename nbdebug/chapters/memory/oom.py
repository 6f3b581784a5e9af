"""The out-of-memory card: what was asked for, who held what, whether it grew or was too large at once, what would help.

It reads the error, the frames of its traceback (which still hold what they held) and the user's variables; nothing is
run again and nothing is freed.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbdebug.chapters.memory.facts_failure import Asked, Failure
from nbdebug.chapters.memory.leaving import asked_for, scene, work
from nbdebug.chapters.memory.leaving.listed import kept_by_notebook
from nbdebug.finding import Report, Where
from nbdebug.observe import shell as shells
from nbdebug.observe.frames import Frame, Owners, chain, frames, phase, running_module
from nbdebug.observe.named import of_frame
from nbdebug.sizes import size

SMALL = 1024
"""Bytes below which an owner is not listed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: torch's on any device, CUDA's libraries', numpy's, Python's."""
    return asked_for.says_so(error)


def cause_of(error: BaseException) -> BaseException | None:
    """The out-of-memory among an exception and those that led to it; None where there is none."""
    return next((one for one in chain(error) if is_out_of_memory(one)), None)


def out_of_memory(
    error: BaseException, names: Mapping[str, Any] | None = None, *, course: Sequence[int] = (), shell: Any = None
) -> Report:
    """The card of one failure.

    error: the exception, with its traceback. names: the user's variables; left out: those that the caller sees.
    course: live bytes after each earlier step; left out: those that `mem(step)` has counted, if it ran the step.
    shell: IPython's; left out: the one that runs.

    Raises ValueError for an exception that is no out-of-memory.
    """
    if not isinstance(error, BaseException) or not is_out_of_memory(error):
        raise ValueError(f"out_of_memory takes an exception that says that memory ran out; got {type(error).__name__}.")
    caller = sys._getframe(1)
    shell = shells.running() if shell is None else shell
    if names is None:
        names = {**getattr(shell, "user_ns", {}), **caller.f_globals, **of_frame(caller)}
    facts = _failure(error, names, tuple(int(count) for count in course or _watched(error)), shell)
    from nbdebug.chapters.memory.rules.out_of_memory import out_of_memory as rule

    found = rule(facts)
    return Report(
        "out of memory",
        findings=(found,) if found else (),
        unchecked=facts.unchecked,
        notes=_notes(facts),
        facts=_drawn(facts),
    )


def _watched(error: BaseException) -> Sequence[int]:
    """Live bytes after each step before, where mem(step) has watched them and left its report with the error."""
    report = vars(error).get("report")
    after = report.facts.get("after") if isinstance(report, Report) else None
    return after if isinstance(after, list) else ()


def _failure(error: BaseException, names: Mapping[str, Any], course: tuple[int, ...], shell: Any) -> Failure:
    gc.collect()  # an earlier failure, replaced by this one, may be left as garbage: it is free in all but name
    asked = asked_for.read(error)
    trail = frames(error)
    owners = Owners.met(names, trail)
    seen = scene.held(names, trail, owners, shells.Kept(shell, names), asked.device)
    total = sum(holding.bytes for holding in seen.holdings)
    used = asked.allocated
    limit, free = _room(asked)
    kept = kept_by_notebook(names, shell, error, asked.device)
    asked_as, shape = work.asked_as(trail, asked.bytes)
    left = max(0, used - total) if used is not None else 0
    return Failure(
        type(error).__name__,
        asked,
        _where(trail, owners),
        asked_as,
        tuple(seen.holdings),
        kept,
        work.looked_at(trail, owners, seen.activations, seen.holdings),
        course,
        limit,
        free,
        left,
        min(left, _gone(asked)),
        sum(b.bytes for b in seen.activations if shape and b.shape == shape),
    )


def _where(trail: list[Frame], owners: Owners) -> Where:
    users = [frame for frame in trail if frame.users]
    at = users[-1].where if users else Where()
    module, kind = running_module(trail, owners)
    return dataclasses.replace(at, phase=phase(trail), module=module, module_type=kind)


def _room(asked: Asked) -> tuple[int | None, int | None]:
    """(all that there is, what was to be had) on the device; on the CPU as it is now, under the process's own limit."""
    if asked.device != "cpu" or asked.free is not None:
        limit = asked.allowed or asked.total
        free = asked.free
        if asked.allowed is not None and asked.allocated is not None:
            free = min(max(0, asked.allowed - asked.allocated - (asked.unused or 0)), asked.free or asked.allowed)
        return limit, free
    import psutil

    machine = psutil.virtual_memory()
    limit, free = int(machine.total), int(machine.available)
    own = _own_limit()
    if own is not None:
        address_space = int(psutil.Process().memory_info().vms)
        limit, free = min(limit, own), min(free, max(0, own - address_space))
    return limit, free


def _gone(asked: Asked) -> int:
    """Bytes that were in use when it failed and are in use no longer."""
    if asked.allocated is None:
        return 0
    if asked.device.startswith("cuda:") and torch.cuda.is_initialized():
        return max(0, asked.allocated - torch.cuda.memory_allocated(asked.device))
    return asked.allocated if asked.device == "cpu" else 0  # whatever has no name by now


def _own_limit() -> int | None:
    """The process's own limit of its address space, if it has one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _notes(facts: Failure) -> tuple[str, ...]:
    notes = []
    if facts.asked.device != "cpu" and torch.cuda.is_initialized() and facts.held:
        notes.append("The frames of the failed cell hold their tensors until `%free traceback`, or the next error.")
    elif facts.held:
        notes.append("`%free traceback` lets go of what the failed cell holds; `%debug` works until then.")
    return tuple(notes)


def _drawn(facts: Failure) -> dict[str, Any]:
    """The numbers for the views."""
    held = [*facts.held]
    parts: dict[str, int] = {}
    for holding in held:
        word = {"variable": "variables", "graph": "saved for backward"}.get(holding.kind, holding.kind)
        parts[word] = parts.get(word, 0) + holding.bytes
    if facts.gone:
        parts["gone since"] = facts.gone
    if facts.left > facts.gone:
        parts["not found by name"] = facts.left - facts.gone
    rows: list[list[Any]] = [
        [h.name, h.kind, h.bytes, h.where.place, f"{h.dtype} {h.shape}{_more(h.storages)}"]
        for h in held
        if h.bytes >= SMALL
    ]
    rows += [
        [f"({name})", "unknown", count, "", said]
        for name, count, said in (
            ("gone since", facts.gone, "in use when it failed, free by now"),
            ("no name found", facts.left - facts.gone, "allocated, and not met"),
        )
        if count > 0
    ]
    total = sum(parts.values())
    table = {
        "title": f"Held when it failed: {size(total)} on {facts.asked.device}",
        "columns": ["name", "kind", "held (bytes)", "where", "largest"],
        "rows": rows,
        "note": "Each storage counted once, at its first owner.",
    }
    drawn: dict[str, Any] = {"failure": dataclasses.asdict(facts), "tables": [table] if rows else []}
    if parts:
        drawn["memory"] = {
            "title": "Held when it failed",
            "parts": sorted(([k, v] for k, v in parts.items()), key=lambda pair: -int(pair[1])),
            "total": total,
            "limit": facts.limit,
            "course": [[i, b] for i, b in enumerate(facts.course)],
            "axis": "steps",
        }
    return drawn


def _more(storages: int) -> str:
    return f" and {storages - 1} more" if storages > 1 else ""
