"""%read_log: a run from outside. Its answer: the function of this name."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug.magics._arguments import FULL, HELP, answer, parse, unquote, usage_errors, variables
from nbdebug.report import Report


@magics_class
class ReadLogMagics(Magics):
    """%read_log."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @argument("--follow", action="store_true", help="show the report anew whenever the log has grown, until Ctrl-C")
    @argument("path", metavar="PATH", help="a log, a folder of them, or a variable that holds the path of one")
    @line_magic
    def read_log(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Read the log of a run, and say what went wrong in it and on which line.

            %read_log train.log
            %read_log lightning_logs --full
            %read_log --follow slurm-1234.out

        Text of any usual form, JSON Lines, CSV, TensorBoard's event files, trainer_state.json, a guard's record. The
        losses are judged as in %grad_watch, a traceback as in %explain. It finds NaN, jumps, a rise, a level loss, a
        rising validation loss, rates of zero, restarts that lost their state, and runs that were killed. In a script:
        nbdebug.read_log(path); in a shell: python -m nbdebug read-log PATH.
        """
        __tracebackhide__ = True
        args = parse(self.read_log, line)
        if args is None:
            return None
        names = variables(self.shell, local_ns)
        path = names.get(unquote(args.path), unquote(args.path))
        try:
            with usage_errors():
                report = _followed(path) if args.follow else nbdebug.read_log(path)
        except OSError as error:
            raise UsageError(str(error)) from None
        return answer(report and dataclasses.replace(report, question=f"%read_log {args.path}"), args, line)


def _followed(path: Any) -> Report | None:
    """Show each report in the place of the one before; the last one, after Ctrl-C."""
    report, handle = None, None
    for report in nbdebug.read_log(path, follow=True):
        if handle is None:
            handle = display(report, display_id=True)
        else:
            handle.update(report)
    return report
