"""%explain: why the last cell failed, or the catalogue page of a cause. It comes from `nbdebug.explain`."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug import registry as catalogue
from nbdebug.magics._arguments import HELP, parsed, silenced, visible
from nbdebug.report import Report

PASSING = (UsageError, SyntaxError, KeyboardInterrupt, SystemExit)
"""What --auto does not explain: each says itself what it is, or was wanted."""


@magics_class
class ExplainMagics(Magics):
    """What explains. auto: each failing cell is explained below its traceback."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.auto = False

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "--auto",
        nargs="?",
        const="on",
        choices=("on", "off"),
        help="explain each failing cell from now on, below its traceback; --auto off ends it",
    )
    @argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="a cause, such as nan/overflow (overflow will do): its catalogue page. Left out: the last failure",
    )
    @line_magic
    def explain(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Say why the last failing cell failed, or show the catalogue page of a cause.

        %explain reads the last error, the frames of its traceback and your variables: which tensor, of which shape,
        dtype and device, at which line, and what to write instead. Nothing runs again. An error that is not known gets
        the facts of its tensors. The result is a report: shown when it comes last, assignable (rep = %explain),
        silenced by a semicolon. In a script: nbdebug.explain(error).
        """
        args = parsed(self.explain, line.rstrip().rstrip(";"))
        if args is None:
            return None
        if args.auto is not None:
            self._switch(args.auto == "on")
        elif args.code is not None:
            _show_page(args.code)
        else:
            report = self._last(visible(self.shell, local_ns))
            return None if silenced(line) else report
        return None

    def _last(self, names: dict[str, Any]) -> Report:
        from nbdebug.observe.shell import last_error  # brings torch: %load_ext and %explain CODE do not wait for it

        error = last_error(self.shell)
        report = nbdebug.explain(error, names=names, shell=self.shell)
        return dataclasses.replace(report, question="%explain", subject=_failed_in(error))

    # -- after each failing cell ----------------------------------------------------------------------------------

    def active(self) -> list[str]:
        """A line for %nbdebug status."""
        return ["Active: each failing cell is explained. %explain --auto off ends it."] if self.auto else []

    def close(self) -> None:
        """Explain no further cells."""
        self._set(False)

    close_all = close

    def _switch(self, on: bool) -> None:
        self._set(on)
        print(
            "Each failing cell is explained from now on; %explain --auto off ends it."
            if on
            else "Failing cells are explained when you ask: %explain."
        )

    def _set(self, on: bool) -> None:
        if on and not self.auto:
            self.shell.events.register("post_run_cell", self._ran)
        elif self.auto and not on:
            self.shell.events.unregister("post_run_cell", self._ran)
        self.auto = on

    def _ran(self, result: Any) -> None:
        error = getattr(result, "error_in_exec", None)
        if error is None or isinstance(error, PASSING) or _shown_already(error):
            return
        report = nbdebug.explain(error, names=self.shell.user_ns, shell=self.shell)
        display(dataclasses.replace(report, question="%explain --auto", subject=_failed_in(error)))


def _show_page(code: str) -> None:
    try:
        page = catalogue.look_up(code).page()
    except KeyError as unknown:
        raise UsageError(unknown.args[0]) from None
    display({"text/plain": page, "text/markdown": page}, raw=True)


def _shown_already(error: BaseException) -> bool:
    """Whether one of the other magics has shown its report with this error."""
    return isinstance(BaseException.__getattribute__(error, "__dict__").get("report"), Report)


def _failed_in(error: BaseException | None) -> str:
    """ "the error of In [7]": the cell that was run, whatever it called."""
    from nbdebug.observe.locations import cell_name

    at = error.__traceback__ if error is not None else None
    while at is not None:
        cell = cell_name(at.tb_frame.f_code.co_filename)
        if cell is not None:
            return f"the error of {cell}"
        at = at.tb_next
    return ""
