"""check_notebook(): what cells that ran in some order, and again, have left behind.

Two chapters answer together: the notebook's own hazards, and what the memory chapter sees the shell keep.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nbdebug.finding import Finding, Report
from nbdebug.observe import shell as shells
from nbdebug.observe.named import of_frame


def check_notebook(names: Mapping[str, Any] | None = None, *, shell: Any = None) -> Report:
    """What is wrong by the way in which the notebook's cells ran: named, with the cell that brought it in.

    Found are: modules whose file was edited after the import (error/stale-import); models made anew, or given new
    parts, while the optimizer keeps the old parameters (training/parameters-not-in-optimizer); hooks that a cell, run
    again, has registered once more (notebook/hooks-registered-twice); objects whose class was defined again
    (notebook/class-redefined); loaders, schedulers and trainers made from what has been replaced
    (notebook/stale-reference); a cell that ran before the one it needs (notebook/cells-out-of-order); memory that only
    `Out`, the last traceback or a list of losses holds (memory/…). Settings that a cell left on are told as notes.

    names: the user's variables; left out: the notebook's, or those of the caller. shell: IPython's; left out: the one
    that runs, if any. It may be asked at any time, also when nbdebug was loaded after the trouble. Nothing is changed,
    and none of the user's code runs. Raises TypeError where names is no mapping.
    """
    if names is not None and not isinstance(names, Mapping):
        raise TypeError(f"names takes a dict of your variables, such as globals(); got {type(names).__name__}.")
    from nbdebug.chapters.memory.leaving.listed import kept_by_notebook  # these two bring torch
    from nbdebug.chapters.notebook.account import notebook_report

    caller = sys._getframe(1)
    shell = shells.running() if shell is None else shell
    if names is None:
        space = getattr(shell, "user_ns", None)
        names = space if space is not None else {**caller.f_globals, **of_frame(caller)}
    return notebook_report(names, shell, kept_by_notebook(names, shell))


def behind(error: BaseException, names: Mapping[str, Any], shell: Any = None) -> tuple[Finding, ...]:
    """What of the notebook explains this very exception: a file that failed and is not what is loaded of it, an object
    of a class that was defined again, a name that a later cell defines. () for other exceptions."""
    from nbdebug.chapters.notebook.failed import explaining

    return explaining(error, names, shells.running() if shell is None else shell)
