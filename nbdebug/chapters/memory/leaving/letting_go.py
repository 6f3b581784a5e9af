"""Letting go of what was chosen, and seeing what came back: memory counts as back only when it is really gone."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.memory.facts import Kept
from nbdebug.chapters.memory.leaving.listed import Entry
from nbdebug.chapters.memory.leaving.process import Numbers, collect, give_back, numbers

ALL = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache", "all")
"""The words that `free` takes, beside the names of single entries."""


@dataclasses.dataclass(frozen=True)
class Released:
    """What became of one entry. back: bytes of it that are gone."""

    kept: Kept
    back: int


def check(words: tuple[str, ...], entries: list[Entry]) -> set[str]:
    """The words as a set. Raises ValueError for one that names neither a kind nor an entry."""
    wanted = {word.strip() for word in words}
    named = {name for e in entries for name in (e.kept.release, e.kept.name, *e.kept.also)}
    unknown = sorted(wanted - set(ALL) - named)
    if unknown:
        there = ", ".join(dict.fromkeys(e.kept.release for e in entries if e.kept.release not in ALL))
        raise ValueError(
            f"free takes {', '.join(ALL)}"
            + (f", or the name of what it lists ({there})" if there else "")
            + f"; got {', '.join(map(repr, unknown))}."
        )
    return wanted


def let_go(entries: list[Entry], words: set[str]) -> tuple[list[Released], Numbers, Numbers]:
    """Let go of the chosen ones; `entries` is emptied, since it holds what is to go."""
    before = numbers()
    chosen = [entry for entry in entries if entry.chosen_by(words)]
    entries.clear()
    told = [(entry.kept, entry.blocks) for entry in chosen]
    while chosen:
        chosen.pop().let_go()
    collect()
    if words & {"cache", "all"}:
        give_back()
    released = [Released(kept, sum(block.bytes for block in blocks if block.gone())) for kept, blocks in told]
    return released, before, numbers()
