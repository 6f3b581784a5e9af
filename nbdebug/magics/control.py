"""%explain and %nbdebug: the catalogue, what is active, and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug import catalogue
from nbdebug.magics.guarding import GuardMagics
from nbdebug.magics.typed import HELP, parsed
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
    @argument("code", nargs="?", metavar="CODE", help="a cause, such as nan/overflow (overflow will do)")
    @line_magic
    def explain(self, line: str) -> None:
        """Show the catalogue page of a cause: what you see, why, how to make sure, what to do."""
        args = parsed(self.explain, line)
        if args is None:
            return
        if args.code is None:
            raise UsageError("%explain takes a code, such as %explain nan/overflow; %nbdebug catalogue lists them all")
        try:
            page = catalogue.look_up(args.code).page()
        except KeyError as unknown:
            raise UsageError(unknown.args[0]) from None
        display({"text/plain": page, "text/markdown": page}, raw=True)

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
                  "%diagnose, %explain, %nbdebug.")
            print("\n".join(line for magics in self.watches for line in magics.active()) or
                  "Active: nothing; it watches only while a guard is on, or one of its magics or functions runs.")

    def _off(self) -> None:
        for magics in self.watches:
            magics.close_all()
        if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
            self.unregister(self.shell)
        print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
