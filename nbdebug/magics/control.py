"""%nbdebug: what is active, the catalogue, and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from nbdebug import catalogue
from nbdebug.finding import Report
from nbdebug.magics.board import Board
from nbdebug.magics.typed import HELP, parsed, silenced

REQUESTS = ("status", "catalogue", "off")


@magics_class
class NbdebugMagics(Magics):
    """What tells and ends the rest. watches: the magics that may be on; unregister: takes all magics from a shell."""

    def __init__(self, shell: Any, watches: Sequence[Any], unregister: Callable[[Any], None]) -> None:
        super().__init__(shell)
        self.watches, self.unregister = watches, unregister
        self.board = Board(shell, watches)

    def close(self) -> None:
        """The shell is left: hear no more of its cells."""
        self.board.close()

    @no_var_expand
    @magic_arguments("nbdebug")
    @HELP
    @argument(
        "request",
        nargs="?",
        choices=REQUESTS,
        help="left out: the panel, in a notebook; status: the same "
        "without controls; catalogue: every cause; off: take magics and hooks away",
    )
    @line_magic("nbdebug")
    def control(self, line: str) -> Report | None:
        """Open the panel: what is on, what was found, memory, gradients and the loss, and buttons for the rest.

        Guard and Gradients switch the two watches; Trace next step looks at one step layer by layer; Stop ends the cell
        after a whole step; Free lets go of the last traceback; All off ends everything that watches. %nbdebug status
        gives the same as a report, %nbdebug off takes nbdebug away.
        """
        args = parsed(self.control, line.rstrip().rstrip(";"))
        if args is None:
            return None
        if args.request == "catalogue":
            print("\n".join(f"{rule.code:34}{rule.title}" for rule in catalogue.rules()))
        elif args.request == "off":
            self._off()
        elif args.request is None and hasattr(self.shell, "kernel"):
            from nbdebug.views import dashboard  # brings ipywidgets, which a terminal does not need

            display(dashboard.board(self.board))
        elif not silenced(line):
            return self.board.report()
        return None

    def _off(self) -> None:
        for magics in self.watches:
            magics.close_all()
        if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
            self.unregister(self.shell)
        print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
