"""Which exception is meant: the root of a chain, the members of a group, and what was raised on their way out.

raise A from B              B is the root: it goes first
A while B was handled       A goes first where it is a failure of its own (the fallback failed, too); B where the
                            handler only says it again in other words
ExceptionGroup(B, C)        both, each with the group as what followed it
"""

from __future__ import annotations

import dataclasses
import linecache
from collections import deque
from types import TracebackType
from typing import Any

DEEPEST = 100
"""Links of one chain, and members of all groups, that are followed."""

EXPECTED = (ImportError, LookupError, AttributeError, StopIteration, NotImplementedError)
"""What a program handles on purpose (an optional package, a missing key): no cause of what fails after it."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exception that may be the cause. led_to: what followed it, the nearest first; the last is what was seen."""

    error: BaseException
    led_to: tuple[BaseException, ...] = ()


def lines(error: BaseException) -> list[list[Candidate]]:
    """One list for each member of a group (one in all where there is no group): its candidates, in the order in which
    they are to be asked. Endless chains and cycles end after DEEPEST."""
    found: list[list[Candidate]] = []
    todo: deque[Candidate] = deque([Candidate(error)])
    met: set[int] = set()
    while todo and len(found) < DEEPEST:
        start = todo.popleft()
        if id(start.error) in met:
            continue
        met.add(id(start.error))
        line, inside = _line(start)
        todo.extend(inside)
        if line:
            found.append(line)
    return found


def _line(start: Candidate) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates along one chain; and the members of the group that it leads to, which are asked after them, or in
    their place where they only say it again."""
    parts: list[list[Candidate]] = [[]]
    one: Candidate | None = start
    while one is not None and sum(map(len, parts)) < DEEPEST:
        after = (one.error, *one.led_to)
        inside = members(one.error)
        if inside:
            return [candidate for part in parts[:-1] for candidate in part], [Candidate(m, after) for m in inside]
        parts[-1].insert(0, one)
        before, again = _before(one.error)
        if before is None or any(before is known for known in after):
            break
        if not again and issubclass(type(before), EXPECTED):
            break
        if not again:
            parts.append([])
        one = Candidate(before, after)
    return [candidate for part in parts for candidate in part], []


def members(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions of a group; () for another exception. Python 3.10 has no groups, but there is a backport."""
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "BaseExceptionGroup"]
    slot: Any = kinds[0].__dict__.get("exceptions") if kinds else None
    if slot is None:
        return ()
    found = slot.__get__(error) if hasattr(type(slot), "__get__") and not isinstance(slot, tuple) else slot
    if type(found) not in (tuple, list):
        return ()
    return tuple(one for one in found if issubclass(type(one), BaseException))[:DEEPEST]


def _before(error: BaseException) -> tuple[BaseException | None, bool]:
    """The exception that this one followed, and whether this one only says it again."""
    cause = _slot("__cause__", error)
    if cause is not None:
        return cause, True
    context = _slot("__context__", error)
    if context is None or _slot("__suppress_context__", error):
        return None, False
    return context, _raised_where_caught(error, context)


def _slot(name: str, error: BaseException) -> Any:
    return BaseException.__dict__[name].__get__(error)


def _raised_where_caught(error: BaseException, handled: BaseException) -> bool:
    """Whether a `raise` in the very function that caught the other exception made this one: another name for it. An op
    that failed there, or in what was called from there, is a failure of its own."""
    caught: TracebackType | None = _slot("__traceback__", handled)
    last: TracebackType | None = _slot("__traceback__", error)
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if caught is None or last is None or caught.tb_frame is not last.tb_frame:
        return False
    text = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    return text.startswith("raise")
