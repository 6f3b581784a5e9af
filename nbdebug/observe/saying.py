"""What a function says, wherever it stands: its instructions, without line numbers, file, comments and docstring.

Two functions that say the same do the same with the same names at hand, so an edit that only moved or described them is
none, and a function made anew from the same text is the same one again.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any

_SKIPPED = frozenset({"RESUME", "CACHE", "NOP"})


def says(code: CodeType) -> tuple[Any, ...]:
    """The instructions of a code object and of those within it, as plain values that can be compared."""
    names = (code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_varnames, code.co_freevars)
    return (*names, tuple((i.opname, _plain(i.argval)) for i in dis.get_instructions(code) if i.opname not in _SKIPPED))


def _plain(value: Any) -> Any:
    if isinstance(value, CodeType):
        return says(value)
    return value if type(value) in (str, int, type(None)) else (type(value).__name__, repr(value))
