"""%explain and %nbdebug: the catalogue, what is active, and off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug import catalogue
from nbdebug.finding import Report
from nbdebug.magics.freeing import card_of_last
from nbdebug.magics.guarding import GuardMagics
from nbdebug.magics.typed import HELP, parsed, silenced
from nbdebug.magics.watching import GradWatchMagics

REQUESTS = ("status", "catalogue", "off")


@magics_class
class NbdebugMagics(Magics):
    """What explains, and what tells and ends the rest. watches: the magics that watch; unregister: takes all magics
    from a shell."""

    def __init__(self, shell: Any, watches: Sequence[GuardMagics | GradWatchMagics],
                 unregister: Callable[[Any], None]) -> None:
        super().__init__(shell)
        self.watches, self.unregister = watches, unregister

    @no_var_expand
    @magic_arguments()
    @HELP
    @argument("code", nargs="?", metavar="CODE", help="a cause, such as nan/overflow (overflow will do). Left out: the "
              "last failed cell, when it ran out of memory")
    @line_magic
    def explain(self, line: str) -> Report | None:
        """Show the catalogue page of a cause: what you see, why, how to make sure, what to do.

        %explain alone, after a cell that ran out of memory, says who held what and what would have made it fit.
        """
        args = parsed(self.explain, line.rstrip().rstrip(";"))
        if args is None:
            return None
        if args.code is None:
            return None if silenced(line) else self._last()
        try:
            page = catalogue.look_up(args.code).page()
        except KeyError as unknown:
            raise UsageError(unknown.args[0]) from None
        display({"text/plain": page, "text/markdown": page}, raw=True)
        return None

    def _last(self) -> Report:
        card = card_of_last(self.shell)
        if card is None:
            raise UsageError("%explain takes a code, such as %explain nan/overflow; %nbdebug catalogue lists them all. "
                             "Alone it explains a failed cell that ran out of memory: the last one did not")
        return dataclasses.replace(card, question="%explain")

    @no_var_expand
    @magic_arguments("nbdebug")
    @HELP
    @argument("request", nargs="?", choices=REQUESTS, default="status",
              help="status: version and what is active; catalogue: every cause; off: take magics and hooks away")
    @line_magic("nbdebug")
    def control(self, line: str) -> None:
        """Say what nbdebug is doing, list the causes it can name, or turn it off."""
        args = parsed(self.control, line)
        if args is None:
            return
        if args.request == "catalogue":
            print("\n".join(f"{rule.code:34}{rule.title}" for rule in catalogue.rules()))
        elif args.request == "off":
            self._off()
        else:
            print(f"nbdebug {nbdebug.__version__}: %nan_trace, %%nan_trace, %guard, %grad_watch, %preflight, "
                  "%diagnose, %mem, %fit, %free, %precision, %explain, %nbdebug.")
            print("\n".join(line for magics in self.watches for line in magics.active()) or
                  "Active: nothing; it watches only while a guard is on, or one of its magics or functions runs.")

    def _off(self) -> None:
        for magics in self.watches:
            magics.close_all()
        if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
            self.unregister(self.shell)
        print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
