"""Errors that nbdebug raises on purpose from torch's hooks: their traceback ends at the user's own line.

IPython omits frames that set `__tracebackhide__`, but never the innermost one, so a notebook would show the line in
nbdebug that raised the error. IPython also lets an exception render itself. Nothing here imports IPython.
"""

from __future__ import annotations

import sys
import traceback

PACKAGES = ("nbdebug", "torch")
"""Packages whose frames at the end of a traceback are not the user's."""


class ShownAtUsersLine(Exception):
    """Raised from inside a hook, and shown in a notebook as if the user's call of torch had raised it."""

    def _render_traceback_(self) -> list[str]:
        """IPython calls this in place of its own rendering. `%tb` and `%debug` then end at the same line."""
        last, at = None, self.__traceback__
        while at is not None:
            if at.tb_frame.f_globals.get("__name__", "").split(".")[0] not in PACKAGES:
                last = at
            at = at.tb_next
        if last is not None:
            last.tb_next = None
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None:
            return traceback.format_exception(self)
        return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))
