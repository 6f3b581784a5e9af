"""The places in which a shell keeps what was shown and what has failed. Nothing here imports IPython.

What was shown: `Out`, `_`, `__`, `___`, `_7`, a hidden copy of these names, the display hook's own three and the result
of the last cell. What has failed: `sys.last_value` and its like, the traceback that `%debug` starts from, the debugger
itself, and the result of the last cell. `del`, `%reset -f out` and `gc.collect()` leave most of them as they are.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

LAST_ERROR_NAMES = ("last_value", "last_exc", "last_traceback", "last_type")
UNDERSCORES = re.compile(r"_{1,3}|_\d+")


@dataclasses.dataclass(frozen=True)
class ShellPlace:
    """Where something is kept. name: as it is told; get: what lies there now, or None; clear: take it away."""

    name: str
    get: Callable[[], Any]
    clear: Callable[[], Any]


def running_shell() -> Any:
    """The IPython shell that runs, if one does. IPython is never imported for it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


@dataclasses.dataclass(frozen=True)
class ShellPlaces:
    """A shell's places. shell: None in a script; names: the user's variables."""

    shell: Any
    names: Mapping[str, Any]

    @property
    def namespaces(self) -> list[MutableMapping[str, Any]]:
        """The namespaces in which a shell keeps its underscores: the user's, and a hidden copy."""
        found = [self.names, getattr(self.shell, "user_ns", None), getattr(self.shell, "user_ns_hidden", None)]
        return list({id(s): s for s in found if isinstance(s, MutableMapping)}.values())

    @property
    def outputs(self) -> dict[Any, Any]:
        """`Out`, by the number of the cell; the very dict."""
        for space in self.namespaces:
            for name in ("_oh", "Out"):
                if isinstance(space.get(name), dict):
                    return space[name]
        return {}

    def displayed(self) -> list[tuple[str, Any, tuple[str, ...]]]:
        """(name, value, further names) of each thing that was shown and is kept for it."""
        found: dict[int, tuple[str, Any, list[str]]] = {}
        for number, value in list(self.outputs.items()):
            entry = found.setdefault(id(value), (f"Out[{number}]", value, []))
            entry[2].append(f"Out[{number}]")
        for place in self._underscores():
            value = place.get()
            if value is not None and not isinstance(value, str) and value is not self.outputs:
                entry = found.setdefault(id(value), (place.name, value, []))
                entry[2].append(place.name)
        return [(name, value, tuple(dict.fromkeys(also))) for name, value, also in found.values()]

    def forget(self, value: Any) -> None:
        """Take away every place that keeps this one output."""
        for number in [n for n, v in self.outputs.items() if v is value]:
            del self.outputs[number]
        for place in self._underscores():
            if place.get() is value:
                place.clear()

    def _underscores(self) -> list[ShellPlace]:
        places = []
        for space in self.namespaces:
            for name in [n for n in space if isinstance(n, str) and UNDERSCORES.fullmatch(n)]:
                clear = _emptied(space, name) if set(name) == {"_"} else _removed(space, name)
                places.append(ShellPlace(name, _got(space, name), clear))
        hook = getattr(self.shell, "displayhook", None)
        for name in ("_", "__", "___") if hook is not None else ():
            places.append(ShellPlace(name, _attribute(hook, name), _set(hook, name, "")))
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(ShellPlace("the last cell's result", _attribute(last, "result"), _set(last, "result", None)))
        return places

    def errors(self) -> list[ShellPlace]:
        """The places that keep the last failure, those that are filled."""
        places = [
            ShellPlace(f"sys.{name}", _attribute(sys, name), _deleted(sys, name)) for name in LAST_ERROR_NAMES[:3]
        ]
        for handler in ("InteractiveTB", "SyntaxTB"):
            holder = getattr(self.shell, handler, None)
            places += [
                ShellPlace(word, _attribute(holder, name), _set(holder, name, None))
                for name, word in (
                    ("tb", "what %debug starts from"),
                    ("pdb", "the debugger"),
                    ("last_syntax_error", "the last syntax error"),
                )
                if holder is not None
            ]
        last = getattr(self.shell, "last_execution_result", None)
        if last is not None:
            places.append(
                ShellPlace(
                    "the last cell's result", _attribute(last, "error_in_exec"), _set(last, "error_in_exec", None)
                )
            )
        return [place for place in places if place.get() is not None]


def last_error(shell: Any = None) -> BaseException | None:
    """The exception that ended the last failing cell, if it is still kept."""
    given = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return given if isinstance(given, BaseException) else None


def _got(space: MutableMapping[str, Any], name: str) -> Callable[[], Any]:
    return lambda: space.get(name)


def _removed(space: MutableMapping[str, Any], name: str) -> Callable[[], Any]:
    return lambda: space.pop(name, None)


def _emptied(space: MutableMapping[str, Any], name: str) -> Callable[[], Any]:
    return lambda: space.__setitem__(name, "")


def _attribute(thing: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(thing, name, None)


def _set(thing: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(thing, name, value)


def _deleted(thing: Any, name: str) -> Callable[[], Any]:
    return lambda: delattr(thing, name)
