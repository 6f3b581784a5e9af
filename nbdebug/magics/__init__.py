"""The magics: read what was typed, call the function of the same name, return its report.

    %nan_trace step()          one training step, written as an expression or a statement
    %%nan_trace                the whole cell, a training loop included
    %guard on|off|status       watch every step from now on; %guard open PATH shows a record from disk
    %grad_watch on|--off       follow gradients, updates and the loss; %grad_watch shows what was seen
    %preflight                 what can be known before training: what would keep the model from learning
    %diagnose train            why a training does not learn: your loop, run once, and what is tried on its start
    %%diagnose                 the same for the loop in the cell below
    %explain CODE              the catalogue page of a cause
    %nbdebug [catalogue|off]   what is active; all causes; take everything away

Only this package knows IPython; `cells.py` gives what was typed its place, `subject.py` finds the models.
"""

from __future__ import annotations

from typing import Any

from nbdebug.magics.completion import Completion
from nbdebug.magics.control import NbdebugMagics
from nbdebug.magics.diagnosing import DiagnoseMagics
from nbdebug.magics.guarding import GuardMagics
from nbdebug.magics.preflighting import PreflightMagics
from nbdebug.magics.tracing import NanTraceMagics
from nbdebug.magics.watching import GradWatchMagics

OURS = (NanTraceMagics, GuardMagics, GradWatchMagics, PreflightMagics, DiagnoseMagics, NbdebugMagics,
        Completion)


def register(shell: Any) -> None:
    """Add the magics and the completion of their options to a shell."""
    unregister(shell)
    trace, guard, watch = NanTraceMagics(shell), GuardMagics(shell), GradWatchMagics(shell)
    preflight, diagnose = PreflightMagics(shell), DiagnoseMagics(shell)
    control = NbdebugMagics(shell, (guard, watch), unregister)
    for magics in (trace, guard, watch, preflight, diagnose, control):
        shell.register_magics(magics)
    completion = Completion(shell, {"nan_trace": trace.nan_trace, "guard": guard.guard, "grad_watch": watch.grad_watch,
                                    "preflight": preflight.preflight, "diagnose": diagnose.diagnose,
                                    "explain": control.explain, "nbdebug": control.control})
    shell.Completer.custom_matchers.append(completion.complete)


def unregister(shell: Any) -> None:
    """Take them away again, and the watches that are on; a user's magic of the same name stays."""
    registry = shell.magics_manager.registry
    registered = [registry.pop(kind.__name__, None) for kind in OURS]
    for table in shell.magics_manager.magics.values():
        for name in [name for name, magic in table.items() if _ours(magic)]:
            del table[name]
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if not _ours(matcher)]
    for magics in registered:
        if isinstance(magics, (GuardMagics, GradWatchMagics)):
            magics.close()


def _ours(method: Any) -> bool:
    return isinstance(getattr(method, "__self__", None), OURS)
