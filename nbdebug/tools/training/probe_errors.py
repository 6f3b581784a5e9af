"""Probes of ours that fail: each becomes a line of the report that says what is not known, and never an error of the
user's loop.

A probe is called through `run`; a function that the watched code calls is wrapped by `wrap`. Whatever they raise ends
as a line of the report's `unchecked`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nbdebug.text import in_a_line

T = TypeVar("T")


class ProbeErrors:
    """by_topic: what could not be measured → why; in the order in which it happened."""

    def __init__(self) -> None:
        self.by_topic: dict[str, str] = {}

    def run(self, topic: str, probe: Callable[[], T], default: Any) -> T:
        """What a probe returns; the default where it fails. topic: told to the user as that which is not known then."""
        try:
            return probe()
        except Exception as error:  # the border: this probe is ours
            self.by_topic.setdefault(topic, describe(topic, error))
            return default

    def wrap(self, topic: str, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function, which keeps its errors from its caller. After one of them it is not called any more: half
        of a step is worse than none."""

        def guarded(*args: Any) -> None:
            if topic not in self.by_topic:
                self.run(topic, lambda: function(*args), None)

        return guarded

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.by_topic.values())


def describe(topic: str, error: BaseException) -> str:
    """A probe that failed, in a sentence: what is not known, and why."""
    return f"{topic}: {in_a_line(error)}"
