"""%check_notebook: what cells that ran in some order, and again, have left behind. It is `nbdebug.check_notebook`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import magic_arguments

from nbdebug.magics._arguments import HELP, parsed, silenced, visible
from nbdebug.report import Report


@magics_class
class CheckNotebookMagics(Magics):
    """What looks at the notebook itself."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @line_magic
    def check_notebook(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say what is wrong by the way in which the cells ran, and which cell brought it in.

        A file that was edited after its import; a model made anew while the optimizer keeps the old parameters; hooks
        that a cell, run again, has registered once more; objects whose class was defined again; loaders, schedulers and
        trainers made from what has been replaced; memory that only Out or a traceback holds. It may be asked at any
        time, changes nothing and runs none of your code. The result is a report: shown when it comes last, assignable
        (rep = %check_notebook), silenced by a semicolon. In a script: nbdebug.check_notebook(globals()).
        """
        __tracebackhide__ = True
        args = parsed(self.check_notebook, line.rstrip().rstrip(";"))
        if args is None:
            return None
        from nbdebug.tools.notebook.check_notebook import (
            check_notebook,  # brings torch, which %load_ext does not wait for
        )

        report = check_notebook(visible(self.shell, local_ns), shell=self.shell)
        return None if silenced(line) else dataclasses.replace(report, question="%check_notebook")
