"""What every step leaves behind: who holds it, which line put it there, what would stay after the cure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.chapters.memory.facts import SMALL, Growth
from nbdebug.chapters.memory.leaving.reach import Walk
from nbdebug.chapters.memory.stepping import source
from nbdebug.chapters.memory.stepping.behind import holder_of, tensors_on
from nbdebug.chapters.memory.stepping.follow import Follow
from nbdebug.chapters.memory.stepping.growing import Grown, alone, grown, still_grow, watch_of
from nbdebug.chapters.memory.stepping.holders import Key, Look
from nbdebug.chapters.memory.stepping.ledger import Birth
from nbdebug.chapters.memory.stepping.peak import at_site
from nbdebug.chapters.memory.stepping.put import Put, Tracer
from nbdebug.finding import Where
from nbdebug.observe.sites import Site

EVALUATES = re.compile(r"eval|valid|\bval\b|val_|_val|test|predict|infer|score", re.IGNORECASE)
"""What a function is called that asks for no gradient."""

MORE = 4
"""Steps that run on top where a container grows whose items are in order by themselves."""


def growths(asked: Any, follow: Follow, look: Look, sizes: list[dict[Key, int]]) -> tuple[Growth, ...]:
    """What grew with each of the last steps, the most telling first."""
    source.forget()
    with _disable_current_modes():
        found = alone([one for one in grown(look, sizes, _known(follow)) if _worth(one)])
    steps = len(sizes) - 1
    kept = _survivors(follow, steps)
    seen = _Seen(kept, len(follow.backwards), steps)
    if not found:
        return _behind(seen, look)
    evaluated = not follow.backwards and any(b.evaluation for b in kept)
    found = _confirmed(found, asked)
    if not found:
        return ()
    traced = _traced(asked, follow, look, found, no_grad=evaluated)
    graphs = [one for one in found if one.grad or one.errors]
    return tuple(_growth(one, n, seen, look, follow, traced, whole=len(graphs) == 1) for n, one in enumerate(found))


@dataclasses.dataclass
class _Seen:
    """kept: memory that came in one of the last steps and stayed; backwards: in a step; steps: that were run."""

    kept: list[Birth]
    backwards: int
    steps: int

    @property
    def bytes(self) -> int:
        return sum(b.nbytes for b in self.kept)


def _known(follow: Follow) -> Walk:
    known = Walk()
    known(
        *follow.parameters(),
        *(p.grad for p in follow.parameters()),
        *(o.state for o in follow.optimizers.values()),
        *(b for m in follow.names.models.values() for b in m.buffers()),
    )
    return known


def _worth(one: Grown) -> bool:
    """Whether it may be a fault at all: a list of numbers for a plot is none."""
    return one.grad or one.kind == "hooks" or max(one.bytes, one.plain) >= SMALL


def _confirmed(found: list[Grown], asked: Any) -> list[Grown]:
    """Without what stops growing when one waits a little: asked only of containers of things that are in order by
    themselves."""
    doubtful = [
        one for one in found if one.kind in ("dict", "list", "set", "object") and not one.grad and not one.errors
    ]
    if not doubtful:
        return found
    try:
        sure = still_grow(doubtful, asked.step, MORE)
    except Exception:  # the data are at their end
        return found
    return [one for one in found if one not in doubtful or one in sure]


def _survivors(follow: Follow, steps: int) -> list[Birth]:
    """Of the last step but one: what the last one holds may be gone with the next."""
    return follow.ledger.survivors(steps - 2 if steps > 2 else steps - 1)


@dataclasses.dataclass
class _Traced:
    """One more step. puts: for each holder the line that puts it there; emptied: whether a line takes things out again;
    after: bytes that the step left when it ran without gradients, None where it did not."""

    puts: list[Put | None]
    emptied: list[bool]
    after: int | None = None


def _traced(asked: Any, follow: Follow, look: Look, found: list[Grown], no_grad: bool) -> _Traced:
    watches = [(n, watch_of(spot)) for n, one in enumerate(found) for spot in one.spots[:8]]
    takers = [
        () if one.chain or one.kind in ("hooks", "output") else source.takers(look.files, one.name) for one in found
    ]
    tracer = Tracer([watch for _, watch in watches], [t for some in takers for t in some])
    number = follow.ledger.step + 1
    follow.begin_step(number)
    told = _Traced([None] * len(found), [])
    try:
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            tracer.run(asked.step)
        if no_grad:
            gc.collect()
            told.after = sum(b.nbytes for b in follow.ledger.survivors(number))
    except Exception:  # the data are at their end, or it needs its gradients: the source is read instead
        pass
    for (n, _), put in zip(watches, tracer.found):
        told.puts[n] = told.puts[n] or put
    told.emptied = [
        any(
            source.same_variable(t, look.files, one.name, put.site if put is not None else None)
            for t in some
            if t not in tracer.dead
        )
        for one, put, some in zip(found, told.puts, takers)
    ]
    return told


def _growth(one: Grown, number: int, seen: _Seen, look: Look, follow: Follow, traced: _Traced, whole: bool) -> Growth:
    put = traced.puts[number]
    kind = _kind(one, put)
    by = max(one.bytes, seen.bytes) if whole and (one.grad or one.errors) else one.bytes
    module = follow.names.of(put.module) if put is not None and put.module is not None else None
    evaluation = kind == "graph" and _evaluates(seen, put, by, one)
    where = _where(one, put, look)
    return Growth(
        one.name,
        kind,
        by,
        seen.steps,
        where,
        one.grad,
        evaluation,
        module or _module(seen.kept),
        one.items,
        one.nodes,
        own=min(one.own, by),
        plain=one.plain,
        chained=one.chain,
        backward=seen.backwards > 0,
        emptied=one.bounded or traced.emptied[number],
        names=_names(one),
        after=traced.after if evaluation else None,
        traced=put is not None,
    )


def _kind(one: Grown, put: Put | None) -> str:
    if one.errors:
        return "exception"
    if one.kind in ("output", "cache"):
        return one.kind
    if one.kind == "hooks" or (put is not None and put.hook):
        return "hook"
    return "graph" if one.grad else one.kind


def _evaluates(seen: _Seen, put: Put | None, by: int, one: Grown) -> bool:
    """Kept from an evaluation: below a model in eval mode and with what a backward would need; or by a function that is
    called like one, in a step without any backward."""
    if one.chain:
        return False
    flagged = sum(b.nbytes for b in seen.kept if b.evaluation)
    if 2 * flagged > seen.bytes and (not seen.backwards or by > 2 * one.own):
        return True
    return not seen.backwards and put is not None and EVALUATES.search(put.site.function) is not None


def _module(kept: list[Birth]) -> str | None:
    """The module that most of it comes from, if there is such a one."""
    sums: Counter[str] = Counter()
    for birth in kept:
        if birth.op is not None and birth.op.module_type:
            sums[birth.op.module] += birth.nbytes
    name, most = sums.most_common(1)[0] if sums else (None, 0)
    return name if 2 * most >= sums.total() else None


def _where(one: Grown, put: Put | None, look: Look) -> Where:
    """The line: of a cache, where it is declared; else as it was seen; else as the source says."""
    cached = one.spots[0].thing if one.kind == "cache" else None
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    if code is not None:
        return at_site(Where(), Site(code.co_filename, code.co_firstlineno, code.co_name))
    if put is not None:
        return at_site(Where(), put.site)
    return at_site(Where(), source.putting(look.files, one.name))


def _names(one: Grown) -> tuple[str, ...]:
    """The holder, what it is a part of, and the parts that grow: `probe.seen`, `probe.seen['a']`."""
    names = [one.name, *(spot.name for spot in one.spots[:8])]
    names += [n for name in names for n in _prefixes(name)]
    return tuple(dict.fromkeys(names))


def _prefixes(name: str) -> Iterator[str]:
    """`probe.seen['a']` → "probe.seen"; an attribute's owner is no holder of its own."""
    while name.endswith("]"):
        name = name[: name.rindex("[")]
        yield name


def _behind(seen: _Seen, look: Look) -> tuple[Growth, ...]:
    """Memory stays with each step, and no name leads to it: who refers to it?"""
    if seen.bytes < SMALL or seen.steps < 3:
        return ()
    with _disable_current_modes():
        tensors = tensors_on({b.key for b in seen.kept})
        holder = next((said for t in tensors[:3] if (said := holder_of(t, (tensors, seen.kept, look)))), "")
        grad = any(t.requires_grad for t in tensors)
    largest = max(seen.kept, key=lambda b: b.nbytes)
    where = at_site(Where(), largest.op.site) if largest.op is not None else Where()
    return (
        Growth(
            holder,
            "graph" if grad else "list",
            seen.bytes,
            seen.steps,
            where,
            grad,
            module=_module(seen.kept),
            items=len(seen.kept),
            names=(holder,) if holder else (),
        ),
    )
