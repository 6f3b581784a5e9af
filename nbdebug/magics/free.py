"""%free: what the notebook itself keeps alive. Its answer: `nbdebug.free`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from nbdebug.magics._arguments import FULL, HELP, answer, parse, usage_errors, variables
from nbdebug.report import Report

KINDS = ("traceback", "outputs", "exceptions", "graphs", "hooks", "figures", "cache")


@magics_class
class FreeMagics(Magics):
    """%free."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @argument("--all", action="store_true", help="free all that the list shows, and the cache of the allocators")
    @argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(KINDS)}, or a name from the list, such as Out[7] (default: nothing is freed)",
    )
    @line_magic
    def free(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """List the memory that the notebook itself keeps, and free what you choose.

            %free
            %free traceback outputs

        The list has outputs (Out, _), the traceback of the last failed cell, exceptions in variables, losses with their
        graph, hooks that a cell has registered twice, and figures, each with its size. %free alone frees nothing. %free
        traceback outputs frees these two and says how much memory is free again; after that, %debug no longer works. In
        a script: nbdebug.free("traceback").
        """
        __tracebackhide__ = True
        args = parse(self.free, line)
        if args is None:
            return None
        from nbdebug.tools.memory.free import free  # imports torch: %load_ext must stay quick

        words = [*args.what, *["all"] * args.all]
        with usage_errors():
            report = free(*words, names=variables(self.shell, local_ns), shell=self.shell)
        report = dataclasses.replace(report, question=" ".join(["%free", *args.what, *["--all"] * args.all]))
        return answer(report, args, line)

    def words(self) -> Iterable[str]:
        """The words that Tab offers: the kinds, and the outputs that the notebook keeps."""
        return [*KINDS, *(f"Out[{number}]" for number in self.shell.user_ns.get("_oh", ()))]
