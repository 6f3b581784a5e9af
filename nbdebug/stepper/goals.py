"""When a step that goes on is to stop again: each goal is asked of every event."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping

from nbdebug.stepper.places import BACKWARD, BEFORE, LOSS, Event, Place

Goal = Callable[[Event], bool]


def into(event: Event) -> bool:
    """The very next thing that happens."""
    return True


def never(event: Event) -> bool:
    """On to the end."""
    return False


def non_finite(event: Event) -> bool:
    """What makes something non-finite of finite values."""
    return event.culprit


def over(here: Place) -> Goal:
    """The end of this layer; from there, of the next one beside it or around it. Where backward begins, too."""
    return _left(here, here.depth)


def out(here: Place) -> Goal:
    """The end of the layer around this one."""
    return _left(here, max(0, here.depth - 1))


def _left(here: Place, depth: int) -> Goal:
    forward = not Event(here).backward
    return lambda event: event.leaving and event.place.depth <= depth or forward and event.backward


def to(pattern: str) -> Goal:
    """Where a layer begins whose name or type the pattern fits, or its backward; "loss": at the loss."""
    return lambda event: (
        event.place.phase in (BEFORE, BACKWARD)
        and fits(pattern, event.place.name, event.place.module_type)
        or event.place.phase == LOSS
        and pattern == "loss"
    )


def fits(pattern: str, name: str, kind: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(kind, pattern)


def check(pattern: str, types: Mapping[str, str]) -> None:
    """types: every layer's name and type. Raises ValueError where nothing fits."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise ValueError(f'run_to takes the name or type of a layer, or a pattern such as "blocks.*"; got {pattern!r}')
    if pattern != "loss" and not any(fits(pattern, name, kind) for name, kind in types.items()):
        near = [name for name in types if name and pattern.strip("*") in name] or [name for name in types if name]
        more = f" and {len(near) - 6} more" if len(near) > 6 else ""
        raise ValueError(f"No layer is called {pattern!r}, by name or type. There are {', '.join(near[:6])}{more}")
