"""Where the IPython shell keeps references to displayed outputs and to the last error. Nothing here imports IPython.

Outputs: `Out`, `_`, `__`, `___`, `_7`, a hidden copy of these names, the display hook's own three and the result of
the last cell. Errors: `sys.last_value` and its like, the traceback that `%debug` starts from, the debugger itself, and
the result of the last cell. `del`, `%reset -f out` and `gc.collect()` leave most of these references in place.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

LAST_ERROR_NAMES = ("last_value", "last_exc", "last_traceback", "last_type")
UNDERSCORES = re.compile(r"_{1,3}|_\d+")


@dataclasses.dataclass(frozen=True)
class ShellPlace:
    """One reference that the shell keeps. name: for reports; get: its value now, or None; clear: drop it."""

    name: str
    get: Callable[[], Any]
    clear: Callable[[], Any]


def running_shell() -> Any:
    """The running IPython shell, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


@dataclasses.dataclass(frozen=True)
class ShellPlaces:
    """All references of one shell. shell: None in a script; names: the user's variables."""

    shell: Any
    names: Mapping[str, Any]

    @property
    def namespaces(self) -> list[MutableMapping[str, Any]]:
        """The namespaces that hold the underscore names: the user's, and a hidden copy."""
        spaces = [self.names, getattr(self.shell, "user_ns", None), getattr(self.shell, "user_ns_hidden", None)]
        return list({id(s): s for s in spaces if isinstance(s, MutableMapping)}.values())

    @property
    def outputs(self) -> dict[Any, Any]:
        """The dict `Out` itself: outputs by the cell's number."""
        for space in self.namespaces:
            for name in ("_oh", "Out"):
                if isinstance(space.get(name), dict):
                    return space[name]
        return {}

    def displayed(self) -> list[tuple[str, Any, tuple[str, ...]]]:
        """(name, value, all its names) of each displayed value that the shell still references."""
        entries: dict[int, tuple[str, Any, list[str]]] = {}
        for number, value in list(self.outputs.items()):
            entry = entries.setdefault(id(value), (f"Out[{number}]", value, []))
            entry[2].append(f"Out[{number}]")
        for place in self._underscores():
            value = place.get()
            if value is not None and not isinstance(value, str) and value is not self.outputs:
                entry = entries.setdefault(id(value), (place.name, value, []))
                entry[2].append(place.name)
        return [(name, value, tuple(dict.fromkeys(also))) for name, value, also in entries.values()]

    def forget(self, value: Any) -> None:
        """Drop every reference to this output."""
        for number in [n for n, v in self.outputs.items() if v is value]:
            del self.outputs[number]
        for place in self._underscores():
            if place.get() is value:
                place.clear()

    def _underscores(self) -> list[ShellPlace]:
        places = []
        for space in self.namespaces:
            for name in [n for n in space if isinstance(n, str) and UNDERSCORES.fullmatch(n)]:
                places.append(_underscore(space, name))
        hook = getattr(self.shell, "displayhook", None)
        for name in ("_", "__", "___") if hook is not None else ():
            places.append(_attribute(name, hook, name, ""))
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(_attribute("the last cell's result", last, "result"))
        return places

    def errors(self) -> list[ShellPlace]:
        """The references to the last error that are set."""
        places = [
            dataclasses.replace(_attribute(f"sys.{name}", sys, name), clear=functools.partial(delattr, sys, name))
            for name in LAST_ERROR_NAMES[:3]
        ]
        for handler in ("InteractiveTB", "SyntaxTB"):
            holder = getattr(self.shell, handler, None)
            places += [
                _attribute(title, holder, name)
                for name, title in (
                    ("tb", "what %debug starts from"),
                    ("pdb", "the debugger"),
                    ("last_syntax_error", "the last syntax error"),
                )
                if holder is not None
            ]
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(_attribute("the last cell's result", last, "error_in_exec"))
        return [place for place in places if place.get() is not None]


def last_error() -> BaseException | None:
    """The exception that ended the last failing cell, if Python still references it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _underscore(space: MutableMapping[str, Any], name: str) -> ShellPlace:
    """A name such as `_7`, which `clear` removes; `_`, `__` and `___` are set to an empty text."""
    empty = set(name) == {"_"}
    return ShellPlace(
        name, lambda: space.get(name), lambda: space.__setitem__(name, "") if empty else space.pop(name, None)
    )


def _attribute(title: str, holder: Any, name: str, empty: Any = None) -> ShellPlace:
    """An attribute, which `clear` sets to `empty`."""
    return ShellPlace(title, lambda: getattr(holder, name, None), lambda: setattr(holder, name, empty))
