"""%check_notebook: what cells that ran again or out of order have left. Its answer: `nbdebug.check_notebook`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import magic_arguments

from nbdebug.magics._arguments import FULL, HELP, answer, parse, variables
from nbdebug.report import Report


@magics_class
class CheckNotebookMagics(Magics):
    """%check_notebook."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @line_magic
    def check_notebook(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Find what is wrong because of the order in which cells ran, and the cell that caused it.

            %check_notebook
            report = %check_notebook

        It finds files that were edited after their import; a model created again while the optimizer holds the old
        parameters; hooks that a cell registered again; objects whose class was defined again; loaders, schedulers and
        trainers made from objects that were replaced; memory that only Out or a traceback holds. It changes nothing
        and runs none of your code. In a script: nbdebug.check_notebook(globals()).
        """
        __tracebackhide__ = True
        args = parse(self.check_notebook, line)
        if args is None:
            return None
        from nbdebug.tools.notebook.check_notebook import check_notebook  # imports torch: %load_ext must stay quick

        report = check_notebook(variables(self.shell, local_ns), shell=self.shell)
        return answer(dataclasses.replace(report, question="%check_notebook"), args, line)
