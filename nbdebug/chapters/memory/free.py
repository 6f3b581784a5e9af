"""free(): what the notebook keeps by itself, each with its bytes; and letting go of what the user chooses.

free()                          list; nothing is freed
free("traceback", "Out[7]")     let go of these, and say what came back
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from nbdebug.chapters.memory.facts import Kept
from nbdebug.chapters.memory.leaving.letting_go import Released, check, let_go
from nbdebug.chapters.memory.leaving.listed import WORDS, Listing, listing
from nbdebug.chapters.memory.leaving.process import Numbers
from nbdebug.finding import Report
from nbdebug.observe import shell as shells
from nbdebug.observe.named import of_frame
from nbdebug.sizes import size

WORTH = 1 << 20
"""Bytes below which it is not worth a user's attention: what a healthy notebook keeps of small outputs."""
TRIM = 64 << 20
"""Bytes that a process keeps after its tensors are gone, from which on it is worth saying how the system gets them."""
HOW = {
    "output": "shown in a cell",
    "traceback": "of the last failure",
    "exception": "exceptions kept in a variable",
    "loss": "losses with their graph",
    "hook": "hook registered more than once",
    "displayed": "figure not closed",
}


def free(*what: str, names: Mapping[str, Any] | None = None, shell: Any = None) -> Report:
    """List what the notebook keeps by itself, or let go of what is chosen. Nothing else is freed.

    what: nothing, to list only; or any of "traceback" (sys.last_*, and what %debug starts from: it no longer works for
    that failure afterwards), "outputs" (Out, _, __, ___; variables stay), "exceptions" (the frames of exceptions in
    variables; the exceptions stay, with their message), "graphs" (tensors in lists and dicts that keep the graphs of
    several steps are replaced by themselves, detached: values stay, a backward through them is no longer possible),
    "hooks" (all but the newest of hooks that a cell, run again, has registered again), "figures" (pyplot's), "cache"
    (what allocators keep for later goes back to the card and the system), "all"; or the name of one entry that the list
    shows: "Out[7]", "losses". names: the user's variables; left out: those that the caller sees. shell: IPython's;
    left out: the one that runs, if any.

    The bytes of an entry are those of tensors and numpy arrays that nothing of the user's holds besides, each counted
    at the first entry. Came back: bytes of them that are really gone. Raises ValueError for an unknown word, TypeError
    for what is no word.
    """
    for word in what:
        if not isinstance(word, str):
            raise TypeError(
                f'free takes words, such as free("traceback"); got {type(word).__name__}. A variable is '
                "freed with `del name`."
            )
    caller = sys._getframe(1)
    shell = shells.running() if shell is None else shell
    if names is None:
        names = _seen_by(caller, shell)
    found = listing(names, shell, caller)
    if not what:
        return _list(found)
    words = check(what, found.entries)
    doubts = found.doubts
    return _freed(*let_go(found.entries, words), words, doubts)


def _seen_by(caller: FrameType, shell: Any) -> dict[str, Any]:
    """The variables that the caller sees, and those of the notebook."""
    return {**getattr(shell, "user_ns", {}), **caller.f_globals, **of_frame(caller)}


def _list(found: Listing) -> Report:
    kept = [entry.kept for entry in found.entries]
    total = sum(k.bytes for k in kept)
    telling = [k for k in kept if k.how in ("hook", "loss")]
    facts: dict[str, Any] = {"notebook": [dataclasses.asdict(k) for k in kept]}
    notes = (
        [
            f"{found.same} output{'s are' if found.same > 1 else ' is'} held by variables of yours as well: no memory "
            "of their own."
        ]
        if found.same
        else []
    )
    if total < WORTH and not telling:
        small = f" Its small outputs come to {size(total)}." if total else ""
        facts["headline"] = f"There is nothing to free: the notebook keeps nothing of weight by itself.{small}"
    else:
        facts["headline"] = (
            f"The notebook keeps {size(total)} that none of your variables needs."
            if total >= WORTH
            else "The notebook keeps little memory, but things that pile up."
        )
        facts["tables"] = [_table(kept)]
        notes = [*_advice(kept), *notes]
    return Report("free()", notes=tuple(notes), unchecked=found.doubts, facts=facts)


def _advice(kept: list[Kept]) -> list[str]:
    word = WORDS[kept[0].how]
    notes = [
        f'Nothing has been freed. `%free {word}` (in a script: `free("{word}")`) lets go of the first, '
        "`%free --all` of everything listed."
    ]
    if any(k.how == "traceback" for k in kept):
        notes.append("`%debug` and `%tb` work until the traceback is let go.")
    if any(k.how == "loss" for k in kept):
        notes.append("`losses.append(loss.item())`, or `loss.detach()`, keeps no graph from the start.")
    return notes


def _table(kept: list[Kept]) -> dict[str, Any]:
    rows = [
        [k.name, k.bytes, _word(k), ", ".join(part for part in (HOW[k.how], k.what, k.where.place) if part)]
        for k in kept
    ]
    return {
        "title": "Kept by the notebook",
        "columns": ["name", "held (bytes)", "%free", "what"],
        "rows": rows,
        "note": "Held: bytes of tensors and arrays that nothing else of yours holds, each counted once.",
    }


def _word(kept: Kept) -> str:
    return WORDS[kept.how] if kept.how in ("traceback", "displayed", "hook") else kept.release


def _freed(
    released: list[Released], before: Numbers, after: Numbers, words: set[str], doubts: tuple[str, ...]
) -> Report:
    back, held = sum(r.back for r in released), sum(r.kept.bytes for r in released)
    trimmed = bool(words & {"cache", "all"})
    facts: dict[str, Any] = {"freed": {"bytes": back, "held": held, "names": [r.kept.name for r in released]}}
    facts["headline"] = _said(released, back, held, before, after, trimmed)
    if released or trimmed:
        facts["tables"] = [
            {
                "title": "Before and after",
                "columns": ["bytes", "before (bytes)", "after (bytes)", "came back (bytes)"],
                "rows": before.rows(after),
                "note": "",
            }
        ]
    if released:
        facts["tables"].insert(
            0,
            {
                "title": "Let go",
                "columns": ["name", "held (bytes)", "came back (bytes)", "what"],
                "note": "",
                "rows": [[r.kept.name, r.kept.bytes, r.back, HOW[r.kept.how]] for r in released],
            },
        )
    notes = _left(back, held, before, after, trimmed)
    return Report(f"free({', '.join(map(repr, sorted(words)))})", notes=tuple(notes), unchecked=doubts, facts=facts)


def _left(back: int, held: int, before: Numbers, after: Numbers, trimmed: bool) -> list[str]:
    """What else is worth knowing: what is still held, what was garbage, what allocators keep for later."""
    notes = (
        [] if back >= held else [f"{size(held - back)} of it is still held by something else: `%mem` names the holder."]
    )
    garbage = sum(before.tensors.values()) - sum(after.tensors.values()) - back
    if garbage > WORTH:
        notes.append(f"{size(garbage)} more were garbage, held by nothing but itself: the collector has taken it.")
    if trimmed:
        return notes
    cached = sum(after.reserved.values()) - sum(after.allocated.values())
    if cached > WORTH:
        notes.append(
            f"torch keeps {size(cached)} of the card for later: your next tensors use it. `%free cache` gives "
            "it to other processes."
        )
    gone = before.tensors.get("cpu", 0) - after.tensors.get("cpu", 0)
    kept = gone - max(0, (before.process or 0) - (after.process or 0))
    if before.process is not None and kept > max(TRIM, gone / 2):
        notes.append(
            f"The process keeps up to {size(kept)} of it for later: your next tensors use it. `%free cache` "
            "gives it to the system."
        )
    return notes


def _said(released: list[Released], back: int, held: int, before: Numbers, after: Numbers, trimmed: bool) -> str:
    hooks = sum(r.kept.items for r in released if r.kept.how == "hook")
    said = [f"{size(back)} came back" + (f", of {size(held)} that was held" if back < held else "")] if held else []
    said += [f"{hooks} doubled hook{'s' * (hooks > 1)} removed"] if hooks else []
    cache = sum(before.reserved.values()) - sum(after.reserved.values())
    system = max(0, (before.process or 0) - (after.process or 0))
    if trimmed:
        said.append(
            "the system got "
            + " and ".join(
                [f"{size(system)} of this process's memory"]
                + ([f"{size(cached)} of the card's" for cached in [max(0, cache)] if before.reserved])
            )
        )
    told = "; ".join(said) or "There was nothing to let go of: the notebook keeps nothing of that kind"
    return f"{told[0].upper()}{told[1:]}."
