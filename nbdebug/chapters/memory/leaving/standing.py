"""What would stay if the notebook let go of everything: all that the user's own variables, modules and calls hold.

Only what lies beyond it can come back, so only that is told as kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from nbdebug.chapters.memory.leaving.reach import Walk
from nbdebug.observe.named import is_users, of_frame, own
from nbdebug.observe.shell import Kept


def standing(names: Mapping[str, Any], kept: Kept, caller: FrameType | None, without: Iterable[Any] = ()) -> Walk:
    """A walk over what the user's own things hold, without graphs and tracebacks: these lie in its nodes and trails.
    caller: of nbdebug; without: what is to count as not held."""
    hidden = [names, *kept.spaces, kept.outputs, kept.shell]
    walk = Walk(graphs=False, tracebacks=False, stop=[t for t in [*hidden, *without] if t is not None])
    walk(*own(names).values())
    for space in [vars(module) for module in _users_modules()] + list(_locals(caller)):
        if not any(space is thing for thing in hidden):
            walk(*own(space).values())
    return walk


def _users_modules() -> list[Any]:
    """Modules of the user's own files: what their globals hold is held, whatever the notebook does."""
    return [
        module
        for name, module in list(sys.modules.items())
        if type(module) is type(sys) and name != "__main__" and is_users(name)
    ]


def _locals(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The variables of the user's functions that are running, from the caller outwards."""
    while frame is not None:
        if is_users(str(frame.f_globals.get("__name__", ""))):
            yield of_frame(frame)
        frame = frame.f_back
