"""What one run of a step or a cell has added: the memory that came in it and is still there at its end, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdebug.chapters.memory.facts import Holding
from nbdebug.chapters.memory.holding.claims import Claim
from nbdebug.chapters.memory.holding.graphs import Graphs
from nbdebug.chapters.memory.holding.naming import Naming
from nbdebug.chapters.memory.holding.storages import Key, live
from nbdebug.chapters.memory.stepping.follow import Follow
from nbdebug.chapters.memory.stepping.ledger import Birth
from nbdebug.chapters.memory.stepping.peak import at_site
from nbdebug.finding import Where

KIND = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer state", "buffers": "buffer"}


def stays(follow: Follow, names: Mapping[str, Any]) -> tuple[Holding, ...]:
    """The largest first, by the variable that it belongs to; what has no name is told by the line that made it."""
    known = _claims(follow, names)
    groups: dict[tuple[str, str, str], list[tuple[str, Birth]]] = {}
    for birth in follow.ledger.births:
        if birth.step == follow.ledger.step and birth.died is None and birth.born > follow.ledger.began:
            claim = known.get(follow.ledger.place(birth))
            kind = claim.kind if claim is not None else KIND.get(birth.role, "graph" if birth.needs else "unknown")
            name, root = (claim.name, claim.root) if claim is not None else (_line(birth), _line(birth))
            groups.setdefault((kind, root, birth.device), []).append((name, birth))
    held = [_holding(kind, device, members) for (kind, _, device), members in groups.items()]
    return tuple(sorted(held, key=lambda h: -h.bytes))


def _holding(kind: str, device: str, members: list[tuple[str, Birth]]) -> Holding:
    name, largest = max(members, key=lambda m: m[1].nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return Holding(
        kind, name + more, sum(b.nbytes for _, b in members), len(members), device, shape=largest.shape, where=where
    )


def _line(birth: Birth) -> str:
    place = at_site(Where(), birth.op.site).place if birth.op is not None else ""
    return f"made in {place}" if place else "no name leads to it"


def _claims(follow: Follow, names: Mapping[str, Any]) -> dict[Key, Claim]:
    """Whose a storage is, by its place."""
    naming = Naming()
    naming.models(follow.names.models)
    naming.optimizers(follow.optimizers)
    naming.variables(names)
    naming.walk()
    Graphs(naming).walk(live())
    return {key: owned.claim for key, owned in naming.owned.items() if owned.claim is not None}
