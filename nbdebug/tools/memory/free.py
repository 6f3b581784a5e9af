"""free(): what the notebook keeps by itself, each with its bytes; and freeing what the user chooses.

free()                          list; nothing is freed
free("traceback", "Out[7]")     free these, and say how much was freed
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nbdebug.observe import shell as shells
from nbdebug.observe.variables import frame_variables
from nbdebug.report import Report, Table
from nbdebug.text import count, size
from nbdebug.tools.memory.facts import KeptByNotebook
from nbdebug.tools.memory.leftovers import WORDS, Leftover, Listing, listing
from nbdebug.tools.memory.reachability import ReachabilityWalk


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """In bytes. tensors: in storages that Python's tensors have, by device; allocated, reserved: of CUDA's allocator,
    by device; process: resident set, None where the system does not say."""

    tensors: dict[str, int]
    allocated: dict[str, int]
    reserved: dict[str, int]
    process: int | None

    def rows(self, after: ProcessMemory) -> list[list[object]]:
        """What, before, after, came back; only what there is."""
        pairs = [
            (f"in tensors on {d}", self.tensors.get(d, 0), after.tensors.get(d, 0))
            for d in sorted({*self.tensors, *after.tensors})
        ]
        pairs += [(f"{device}, allocated", count, after.allocated[device]) for device, count in self.allocated.items()]
        pairs += [(f"{device}, reserved", count, after.reserved[device]) for device, count in self.reserved.items()]
        if self.process is not None and after.process is not None:
            pairs.append(("this process", self.process, after.process))
        return [[what, one, two, one - two] for what, one, two in pairs]


def process_memory() -> ProcessMemory:
    """All of them, now."""
    walk, held = ReachabilityWalk(graphs=False), dict[str, int]()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    for block in walk.storages(tensors):
        held[block.device] = held.get(block.device, 0) + block.bytes
    del tensors
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    return ProcessMemory(
        held,
        {d: torch.cuda.memory_allocated(d) for d in cuda},
        {d: torch.cuda.memory_reserved(d) for d in cuda},
        resident(),
    )


def resident() -> int | None:
    """Bytes of this process in the machine's memory."""
    import psutil  # only where somebody asks

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return None


def give_back() -> None:
    """Return what the allocators keep for later to the system: CUDA's cache, and the C library's free pages on
    Linux."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


ALL = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache", "all")
"""The words that `free` takes, beside the names of single entries."""


@dataclasses.dataclass(frozen=True)
class Release:
    """One freed entry. back: bytes of it that are free now."""

    kept: KeptByNotebook
    back: int


def check(words: tuple[str, ...], entries: list[Leftover]) -> set[str]:
    """The words as a set. Raises ValueError for one that names neither a kind nor an entry."""
    requested = {word.strip() for word in words}
    named = {name for e in entries for name in (e.kept.release, e.kept.name, *e.kept.also)}
    unknown = sorted(requested - set(ALL) - named)
    if unknown:
        there = ", ".join(dict.fromkeys(e.kept.release for e in entries if e.kept.release not in ALL))
        raise ValueError(
            f"free takes {', '.join(ALL)}"
            + (f", or the name of what it lists ({there})" if there else "")
            + f"; got {', '.join(map(repr, unknown))}."
        )
    return requested


def release(entries: list[Leftover], words: set[str]) -> tuple[list[Release], ProcessMemory, ProcessMemory]:
    """Free the chosen ones; `entries` is emptied, since it holds what is freed."""
    before = process_memory()
    chosen = [entry for entry in entries if entry.chosen_by(words)]
    entries.clear()
    chosen_blocks = [(entry.kept, entry.blocks) for entry in chosen]
    while chosen:
        chosen.pop().let_go()
    gc.collect()  # what only refers to itself
    if words & {"cache", "all"}:
        give_back()
    released = [
        Release(leftover, sum(block.bytes for block in blocks if block.gone())) for leftover, blocks in chosen_blocks
    ]
    return released, before, process_memory()


WORTH = 1 << 20
"""Bytes below which nothing is reported: a healthy notebook keeps as much in small outputs."""
TRIM = 64 << 20
"""Bytes that a process keeps after its tensors are freed: from here on a note says how the system gets them."""
HOW = {
    "output": "shown in a cell",
    "traceback": "of the last failure",
    "exception": "exceptions kept in a variable",
    "loss": "losses with their graph",
    "hook": "hook registered more than once",
    "displayed": "figure not closed",
}


def free(*what: str, names: Mapping[str, Any] | None = None, shell: Any = None) -> Report:
    """List what the notebook keeps by itself, or free what is chosen, and nothing else.

    what: nothing, to list only; or any of "traceback" (sys.last_*, and what %debug starts from: it no longer works for
    that failure afterwards), "outputs" (Out, _, __, ___; variables stay), "exceptions" (the frames of exceptions in
    variables; the exceptions stay, with their message), "graphs" (tensors in lists and dicts that keep the graphs of
    several steps are replaced by themselves, detached: values stay, a backward through them is no longer possible),
    "hooks" (all but the newest of hooks that a cell, run again, has registered again), "figures" (pyplot's), "cache"
    (what allocators keep for later goes back to the card and the system), "all"; or the name of one entry that the list
    shows: "Out[7]", "losses". names: the user's variables; left out: those that the caller sees. shell: IPython's;
    left out: the one that runs, if any.

    The bytes of an entry are those of tensors and numpy arrays that nothing of the user's holds besides, each counted
    at the first entry. Freed: bytes of them that are free now. Raises ValueError for an unknown word, TypeError for
    what is no word.
    """
    for word in what:
        if not isinstance(word, str):
            raise TypeError(
                f'free takes words, such as free("traceback"); got {type(word).__name__}. A variable is '
                "freed with `del name`."
            )
    caller = sys._getframe(1)
    shell = shells.running_shell() if shell is None else shell
    if names is None:
        names = {**getattr(shell, "user_ns", {}), **caller.f_globals, **frame_variables(caller)}
    entries = listing(names, shell, caller)
    if not what:
        return _list(entries)
    words = check(what, entries.entries)
    doubts = entries.doubts
    return _freed(*release(entries.entries, words), words, doubts)


def _list(entries: Listing) -> Report:
    leftovers = [entry.kept for entry in entries.entries]
    total = sum(k.bytes for k in leftovers)
    telling = [k for k in leftovers if k.how in ("hook", "loss")]
    facts: dict[str, Any] = {"notebook": [dataclasses.asdict(k) for k in leftovers]}
    notes = (
        [
            f"{count(entries.same, 'output is', 'outputs are')} held by variables of yours as well, without memory "
            "of their own."
        ]
        if entries.same
        else []
    )
    if total < WORTH and not telling:
        small = f" Its small outputs hold {size(total)}." if total else ""
        headline, tables = f"There is nothing to free: the notebook keeps nothing large by itself.{small}", []
    else:
        headline = (
            f"The notebook keeps {size(total)} that none of your variables needs."
            if total >= WORTH
            else "The notebook keeps little memory so far, but some of it grows each time a cell runs."
        )
        tables = [_table(leftovers)]
        notes = [*_advice(leftovers), *notes]
    return Report("free()", notes=tuple(notes), unchecked=entries.doubts, facts=facts, headline=headline, tables=tables)


def _advice(leftovers: list[KeptByNotebook]) -> list[str]:
    word = WORDS[leftovers[0].how]
    notes = [
        f'Nothing has been freed. `%free {word}` (in a script: `free("{word}")`) frees the first, '
        "`%free --all` everything listed."
    ]
    if any(k.how == "traceback" for k in leftovers):
        notes.append("`%debug` and `%tb` work until the traceback is freed.")
    if any(k.how == "loss" for k in leftovers):
        notes.append("`losses.append(loss.item())`, or `loss.detach()`, keeps no graph.")
    return notes


def _table(leftovers: list[KeptByNotebook]) -> Table:
    rows = [
        [k.name, k.bytes, _word(k), ", ".join(part for part in (HOW[k.how], k.what, k.where.place) if part)]
        for k in leftovers
    ]
    return Table(
        "Held by the notebook",
        ("name", "held (bytes)", "word", "what"),
        rows,
        "Held: tensors and arrays that none of your variables holds, each counted once. `%free WORD` frees an entry.",
    )


def _word(leftover: KeptByNotebook) -> str:
    return WORDS[leftover.how] if leftover.how in ("traceback", "displayed", "hook") else leftover.release


def _freed(
    released: list[Release], before: ProcessMemory, after: ProcessMemory, words: set[str], doubts: tuple[str, ...]
) -> Report:
    back, held = sum(r.back for r in released), sum(r.kept.bytes for r in released)
    trimmed = bool(words & {"cache", "all"})
    facts: dict[str, Any] = {"freed": {"bytes": back, "held": held, "names": [r.kept.name for r in released]}}
    headline, tables = _headline(released, back, held, before, after, trimmed), []
    if released or trimmed:
        tables = [
            Table(
                "Before and after",
                ("memory", "before (bytes)", "after (bytes)", "freed (bytes)"),
                before.rows(after),
            )
        ]
    if released:
        tables.insert(
            0,
            Table(
                "Freed",
                ("name", "held (bytes)", "freed (bytes)", "what"),
                [[r.kept.name, r.kept.bytes, r.back, HOW[r.kept.how]] for r in released],
            ),
        )
    notes = _notes(back, held, before, after, trimmed)
    return Report(
        f"free({', '.join(map(repr, sorted(words)))})",
        notes=tuple(notes),
        unchecked=doubts,
        facts=facts,
        headline=headline,
        tables=tables,
    )


def _notes(back: int, held: int, before: ProcessMemory, after: ProcessMemory, trimmed: bool) -> list[str]:
    """Notes: what is still held, what was garbage, what allocators keep for later."""
    notes = (
        [] if back >= held else [f"{size(held - back)} of it is still held by something else; `%mem` names the holder."]
    )
    garbage = sum(before.tensors.values()) - sum(after.tensors.values()) - back
    if garbage > WORTH:
        notes.append(
            f"{size(garbage)} more were in objects that only refer to each other: the garbage collector has freed them."
        )
    if trimmed:
        return notes
    cached = sum(after.reserved.values()) - sum(after.allocated.values())
    if cached > WORTH:
        notes.append(
            f"torch keeps {size(cached)} of the GPU for your next tensors. `%free cache` frees it for other processes."
        )
    freed = before.tensors.get("cpu", 0) - after.tensors.get("cpu", 0)
    retained = freed - max(0, (before.process or 0) - (after.process or 0))
    if before.process is not None and retained > max(TRIM, freed / 2):
        notes.append(
            f"The process keeps up to {size(retained)} of it for your next tensors. `%free cache` returns it to the "
            "system."
        )
    return notes


def _headline(
    released: list[Release], back: int, held: int, before: ProcessMemory, after: ProcessMemory, trimmed: bool
) -> str:
    hooks = sum(r.kept.items for r in released if r.kept.how == "hook")
    parts = [f"{size(back)} freed" + (f", of {size(held)} that was held" if back < held else "")] if held else []
    parts += [f"{count(hooks, 'duplicate hook')} removed"] if hooks else []
    cache = sum(before.reserved.values()) - sum(after.reserved.values())
    system = max(0, (before.process or 0) - (after.process or 0))
    if trimmed:
        parts.append(
            "the system got "
            + " and ".join(
                [f"{size(system)} of this process's memory"]
                + ([f"{size(cached)} of the GPU's" for cached in [max(0, cache)] if before.reserved])
            )
        )
    text = "; ".join(parts) or "There was nothing to free: the notebook keeps nothing of that kind"
    return f"{text[0].upper()}{text[1:]}."
