"""Looks of ours that failed: told in the report, each with what is not known for it, and no fault of the user's loop.

A look is asked for through `ask`, watched code is told things through `quietly`. Whatever is raised there ends with a
line for the report's `unchecked`; it never reaches the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ProbeErrors:
    """told: what could not be looked at → why; in the order in which it happened."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def tell(self, what: str, fault: BaseException) -> None:
        """Note a fault, the first of its kind."""
        self.told.setdefault(what, told(what, fault))

    def ask(self, what: str, look: Callable[[], T], default: Any) -> T:
        """What a look gives; the default where it fails. what: said to the user as that which is not known then."""
        try:
            return look()
        except Exception as fault:  # the border: this look is ours
            self.tell(what, fault)
            return default

    def quietly(self, what: str, tell: Callable[..., Any]) -> Callable[..., None]:
        """The same function, which keeps its faults from its caller. After one of them nothing of this kind is told
        any more: half of a step is worse than none."""

        def safely(*given: Any) -> None:
            if what not in self.told:
                self.ask(what, lambda: tell(*given), None)

        return safely

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.told.values())


def told(what: str, fault: BaseException) -> str:
    """A look that failed, in a sentence: what is not known, and why."""
    lines = str(fault).splitlines()
    return f"{what}: {type(fault).__name__}: {lines[0][:160] if lines else 'no message'}"
