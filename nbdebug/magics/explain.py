"""%explain: why the last cell failed, or the catalogue page of a cause. Its answer: `nbdebug.explain`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

import nbdebug
from nbdebug import registry
from nbdebug.magics._arguments import answer, parse, report_magic, variables
from nbdebug.report import Report
from nbdebug.text import in_colour

NOT_EXPLAINED = (UsageError, SyntaxError, KeyboardInterrupt, SystemExit)
"""What --auto leaves alone: these errors explain themselves, or were wanted."""


@magics_class
class ExplainMagics(Magics):
    """%explain. auto: each failing cell is explained below its traceback."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.auto = False

    @report_magic
    @argument(
        "--auto",
        nargs="?",
        const="on",
        choices=("on", "off"),
        help="explain each failing cell from now on, below its traceback; --auto off ends it",
    )
    @argument(
        "--text",
        nargs=argparse.REMAINDER,
        help="explain a traceback or a message that is pasted behind it, or below %%%%explain --text",
    )
    @argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="show the page of this cause, such as nan/overflow or overflow (default: explain the last error)",
    )
    @line_cell_magic
    def explain(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Explain why the last failing cell failed, or show the catalogue page of a cause.

            %explain
            %explain nan/overflow
            %explain --text mat1 and mat2 shapes cannot be multiplied (4x15 and 18x2)

        %explain reads the last error, the frames of its traceback and your variables: which tensor, of which shape,
        dtype and device, at which line, and what to write instead. It runs nothing again. For an error that it does not
        know it shows the tensors and makes no guess. In a script: nbdebug.explain(error).
        """
        text = cell if cell is not None else line.partition("--text")[2] if "--text" in line.split() else None
        if text is not None:
            return (
                dataclasses.replace(nbdebug.explain(f"{text.strip()}\n "), question="%explain --text")
                if text.strip()
                else None
            )
        if (args := parse(self.explain, line)) is None:
            return None
        if args.auto is not None:
            self._set_auto(args.auto == "on")
            print(AUTO_ON if self.auto else "Failing cells are explained only when you type %explain.")
        elif args.code is not None:
            _show_page(args.code)
        else:
            report = self._last(variables(self.shell, local_ns))
            return answer(report, args, line)
        return None

    def _last(self, names: dict[str, Any]) -> Report:
        from nbdebug.observe.variables import last_error  # imports torch: %load_ext and %explain CODE must stay quick

        error = last_error()
        report = nbdebug.explain(error, names=names, shell=self.shell)
        return dataclasses.replace(report, question="%explain", subject=_failed_cell(error))

    # -- after each failing cell ----------------------------------------------------------------------------------

    def active(self) -> list[str]:
        """A line for %nbdebug status."""
        return ["Active: each failing cell is explained. %explain --auto off ends it."] if self.auto else []

    def close(self) -> None:
        """Explain no further cells."""
        self._set_auto(False)

    close_all = close

    def _set_auto(self, on: bool) -> None:
        if on and not self.auto:
            self.shell.events.register("post_run_cell", self._after_cell)
        elif self.auto and not on:
            self.shell.events.unregister("post_run_cell", self._after_cell)
        self.auto = on

    def _after_cell(self, result: Any) -> None:
        error = getattr(result, "error_in_exec", None)
        if error is None or isinstance(error, NOT_EXPLAINED) or _has_report(error):
            return
        report = nbdebug.explain(error, names=self.shell.user_ns, shell=self.shell)
        display(dataclasses.replace(report, question="%explain --auto", subject=_failed_cell(error)))


AUTO_ON = "Each failing cell is explained from now on. %explain --auto off ends it."


def _show_page(code: str) -> None:
    try:
        rule = registry.look_up(code)
    except KeyError as unknown:
        raise UsageError(unknown.args[0]) from None
    display({"text/plain": rule.text(colour=in_colour(sys.stdout)), "text/markdown": rule.page()}, raw=True)


def _has_report(error: BaseException) -> bool:
    """Whether one of the other magics has shown its report with this error."""
    return isinstance(BaseException.__getattribute__(error, "__dict__").get("report"), Report)


def _failed_cell(error: BaseException | None) -> str:
    """ "the error of In [7]": the cell that was run, whatever it called."""
    from nbdebug.observe.locations import cell_name

    at = error.__traceback__ if error is not None else None
    while at is not None:
        if (cell := cell_name(at.tb_frame.f_code.co_filename)) is not None:
            return f"the error of {cell}"
        at = at.tb_next
    return ""
