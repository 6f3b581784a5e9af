"""An error that nbdebug raises on purpose, out of torch's hooks: its traceback ends at the user's own line.

IPython leaves frames out that set `__tracebackhide__`, but never the innermost one, so a notebook would show where in
nbdebug the error was raised. It also asks an exception to render itself. Nothing here imports IPython.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

PACKAGES = ("nbdebug", "torch")
"""Where an innermost frame is not the user's."""


class ShownAtUsersLine(Exception):
    """Raised from inside a hook, and shown in a notebook as if the user's call of torch had raised it."""

    def _render_traceback_(self) -> list[str]:
        """What IPython asks for in place of its own rendering. `%tb` and `%debug` then end at the same line."""
        _cut(self.__traceback__)
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None:
            return traceback.format_exception(self)
        return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))


def _cut(whole: TracebackType | None) -> None:
    """Take away what lies behind the last line that is neither torch's nor nbdebug's, if there is such a line."""
    last, at = None, whole
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").split(".")[0] not in PACKAGES:
            last = at
        at = at.tb_next
    if last is not None:
        last.tb_next = None
