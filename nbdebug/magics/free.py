"""%free: what the notebook keeps by itself; and what %explain and %mem show after a cell that ran out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.magics._arguments import HELP, parsed_in_any_order, silenced, visible
from nbdebug.report import Report

WORDS = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache")


@magics_class
class FreeMagics(Magics):
    """What lets go."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument("--all", action="store_true", help="let go of all that the list shows, and of the allocators' cache")
    @argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(WORDS)}, or a name that the list shows, such as Out[7]. Left out: nothing is freed",
    )
    @line_magic
    def free(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """List what the notebook keeps by itself, with the bytes of each; let go of what you choose.

        Outputs (Out, _), the traceback of the last failed cell, exceptions in variables, losses with their graph, hooks
        that a cell has registered twice, figures. %free lists; %free traceback outputs lets go of these two and says
        how much came back. %debug works until the traceback is let go. The result is a report: shown when it comes
        last, assignable (rep = %free), silenced by a semicolon. In a script: nbdebug.free("traceback").
        """
        __tracebackhide__ = True
        args = parsed_in_any_order(self.free, line.rstrip().rstrip(";"))
        if args is None:
            return None
        from nbdebug.tools.memory.free import free  # brings torch, which %load_ext does not wait for

        words = [*args.what, *["all"] * args.all]
        try:
            report = free(*words, names=visible(self.shell, local_ns), shell=self.shell)
        except ValueError as wrong:
            raise UsageError(str(wrong)) from None
        report = dataclasses.replace(report, question=" ".join(["%free", *args.what, *["--all"] * args.all]))
        return None if silenced(line) else report

    def offered(self, before: str) -> Iterable[str]:
        """The words that Tab offers: the kinds, and the outputs that are kept."""
        return [*WORDS, *(f"Out[{number}]" for number in self.shell.user_ns.get("_oh", ()))]


def card_of_last(shell: Any, just_now: bool = False) -> Report | None:
    """The report on the last failed cell, when it ran out of memory; None otherwise. just_now: of the cell before this
    one alone."""
    from nbdebug.observe.shell import last_error

    error, before = last_error(shell), getattr(shell, "last_execution_result", None)
    if error is None or just_now and before is not None and before.success:
        return None
    from nbdebug.tools.memory import oom  # brings torch, which %explain CODE does not wait for

    found = oom.cause_of(error)
    return None if found is None else oom.out_of_memory(found, shell.user_ns, shell=shell)
