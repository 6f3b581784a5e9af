"""The magics: read what was typed, call the function of the same name, return its report.

    %nan_trace step()          one training step, written as an expression or a statement
    %%nan_trace                the whole cell, a training loop included
    %guard on|off|status       watch every step from now on; %guard open PATH shows a record from disk
    %grad_watch on|--off       follow gradients, updates and the loss; %grad_watch shows what was seen
    %preflight                 what can be known before training: what would keep the model from learning
    %diagnose train            why a training does not learn: your loop, run once, and what is tried on its start
    %%diagnose                 the same for the loop in the cell below
    %mem                       where memory is now, by owner; %%mem follows the cell below it
    %fit                       what a training step takes before anything is allocated, and what would fit
    %free [WHAT]               what the notebook keeps by itself; let go of what you choose
    %precision                 which modules must stay in float32
    %stop_at LAYER             stop training inside a layer, in ipdb or in the debugger that is attached
    %step_through              a training step, layer by layer, while the notebook stays alive
    %check_notebook            what cells that ran again, or in another order, have left behind
    %explain                   why the last cell failed; %explain CODE gives the catalogue page of a cause
    %nbdebug                   the panel: what is on, what was found, and buttons; %nbdebug off takes everything away

Only this package knows IPython; `cells.py` gives what was typed its place, `subject.py` finds the models.
"""

from __future__ import annotations

from typing import Any

from nbdebug.magics._completion import Completion
from nbdebug.magics.check_notebook import CheckNotebookMagics
from nbdebug.magics.diagnose import DiagnoseMagics
from nbdebug.magics.explain import ExplainMagics
from nbdebug.magics.fit import FitMagics
from nbdebug.magics.free import FreeMagics
from nbdebug.magics.grad_watch import GradWatchMagics
from nbdebug.magics.guard import GuardMagics
from nbdebug.magics.mem import MemoryMagics
from nbdebug.magics.nan_trace import NanTraceMagics
from nbdebug.magics.panel import NbdebugMagics
from nbdebug.magics.precision import PrecisionMagics
from nbdebug.magics.preflight import PreflightMagics
from nbdebug.magics.step_through import StepMagics
from nbdebug.magics.stop_at import StopMagics

WATCHES = (GuardMagics, GradWatchMagics, StopMagics, StepMagics, ExplainMagics)
"""What may be on, and is shown and ended by %nbdebug."""
ASKED = (
    NanTraceMagics,
    PreflightMagics,
    DiagnoseMagics,
    MemoryMagics,
    FitMagics,
    FreeMagics,
    PrecisionMagics,
    CheckNotebookMagics,
)
OURS = (*WATCHES, *ASKED, NbdebugMagics, Completion)


def register(shell: Any) -> None:
    """Add the magics and the completion of their options to a shell."""
    unregister(shell)
    watches = tuple(kind(shell) for kind in WATCHES)
    made = [*watches, *(kind(shell) for kind in ASKED), NbdebugMagics(shell, watches, unregister)]
    for magics in made:
        shell.register_magics(magics)
    lines = {name: method for magics in made for name, method in magics.magics["line"].items()}
    made[-1].board.lines = lines
    shell.Completer.custom_matchers.append(Completion(shell, lines).complete)


def unregister(shell: Any) -> None:
    """Take them away again, and the watches that are on; a user's magic of the same name stays."""
    registry = shell.magics_manager.registry
    registered = [registry.pop(kind.__name__, None) for kind in OURS]
    for kind, table in shell.magics_manager.magics.items():
        for name in [name for name, magic in table.items() if _ours(magic)]:
            del table[name]
            table.update(_before(registry, kind, name))
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if not _ours(matcher)]
    for magics in registered:
        if isinstance(magics, (*WATCHES, NbdebugMagics)):
            magics.close()


def _before(registry: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """What the name stood for before ours: IPython has a %precision, too."""
    others = (magics.magics.get(kind, {}) for magics in registry.values() if hasattr(magics, "magics"))
    return next(({name: table[name]} for table in others if name in table), {})


def _ours(method: Any) -> bool:
    return isinstance(getattr(method, "__self__", None), OURS)
