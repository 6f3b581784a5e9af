"""Show a Report at once, where nobody waits for a return value: in the notebook that runs, else on stderr."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from nbdebug.report import Report
from nbdebug.text import in_colour
from nbdebug.views import text


def show(report: Report) -> None:
    """Display it as the last line of a cell would. stderr, because stdout may be what the program was run for."""
    shell = running_shell()
    if shell is None:
        print(text.render(report, colour=in_colour(sys.stderr)), file=sys.stderr, flush=True)
        return
    data, metadata = shell.display_formatter.format(report)
    shell.display_pub.publish(data, metadata)


def running_shell() -> Any:
    """The notebook's shell; None in a script, and in a process that a notebook has started: it can display nothing."""
    ipython = sys.modules.get("IPython")  # where nobody has imported it, nothing of it runs
    find = getattr(ipython, "get_ipython", None)
    return find() if find is not None and multiprocessing.parent_process() is None else None
