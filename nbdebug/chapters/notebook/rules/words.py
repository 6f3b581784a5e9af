"""How a rule of this chapter puts its finding together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbdebug.finding import Finding, Fix, Link, Where


def finding(
    code: str,
    title: str,
    where: Where,
    blamed: Iterable[str],
    fixes: Iterable[Fix],
    chain: Iterable[Link] = (),
    **evidence: Any,
) -> Finding:
    """blamed: the variables and modules at fault, the most telling first. `_` in names of evidence is a space."""
    names = [name for name in dict.fromkeys(blamed) if name]
    shown = {key.replace("_", " "): value for key, value in evidence.items() if value not in (None, "", (), [], 0)}
    key = "holder" if code.startswith("memory/") else "where"
    return Finding(code, title, where, {key: names, **shown}, tuple(fixes), tuple(chain))


def listed(names: Iterable[str], most: int = 4) -> str:
    """ "`a`, `b` and 3 more"."""
    names = list(names)
    shown = [f"`{name}`" for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(", ".join(shown).rsplit(", ", 1)) if len(shown) > 1 else "".join(shown)


def cell(where: Where, otherwise: str = "a later cell") -> str:
    """ "In [4]", or the file."""
    return where.cell or (where.place if where.line is not None else "") or otherwise
