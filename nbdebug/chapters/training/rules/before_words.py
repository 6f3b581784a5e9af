"""How a rule over what was seen before training puts its finding together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.finding import Finding, Fix, Link, Where


def finding(slug: str, title: str, where: Iterable[str], fixes: Iterable[Fix], *, place: Where | None = None,
            chain: Iterable[str] = (), **evidence: Any) -> Finding:
    """where: the modules, parameters, functions or arguments to blame, the most telling first. `_` in the names of
    evidence stands for a space."""
    names = [name for name in dict.fromkeys(where) if name]
    place = place or Where()
    at = dataclasses.replace(place, module=place.module or (names[0] if names else None))
    shown: Mapping[str, Any] = {key.replace("_", " "): value for key, value in evidence.items() if value is not None}
    return Finding(f"training/{slug}", title, at, {"where": names, **shown}, tuple(fixes),
                   tuple(Link(what) for what in chain))


def listed(names: Iterable[str], most: int = 4) -> str:
    """ "`a`, `b` and 3 more"."""
    names = list(names)
    shown = [f"`{name}`" for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(", ".join(shown).rsplit(", ", 1)) if len(shown) > 1 else "".join(shown)


def line(where: Where) -> str:
    """ " (train.py, line 31)", or "" where the line is not known."""
    return f" ({where.place})" if where.place else ""


def short(value: float) -> str:
    """A number for a sentence: three digits."""
    return f"{value:.3g}"


def shape(size: Iterable[int]) -> str:
    """(64, 1) as "64×1", (64,) as "64"."""
    return "×".join(str(s) for s in size)
