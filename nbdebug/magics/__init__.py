"""The magics: read what was typed, call the function of the same name, return its report.

    %nan_trace step()          one training step, written as an expression or a statement
    %%nan_trace                the whole cell, a training loop included
    %guard on|off|status       watch every step from now on; %guard open PATH shows a record from disk
    %grad_watch on|off|status  measure gradients, updates and the loss of every step
    %preflight                 what would keep the model from learning, before training; %%preflight asks the loop below
    %diagnose train            why a training does not learn: your loop, run once, and fixes tried on its start
    %%diagnose                 the same for the loop in the cell below
    %mem                       where memory is now, by owner; %%mem follows the cell below it
    %fit                       whether a training step fits into memory, and what would make it fit; %%fit asks the loop
    %free [WHAT]               what the notebook itself keeps alive; frees what you choose
    %precision                 which modules must stay in float32; %%precision asks the loop below
    %stop_at LAYER             stop training inside a layer, in ipdb or in the attached debugger
    %bottleneck step()         what makes a step slow, and the step's time with the cure in place
    %generation model ids      how fast a model writes tokens, with and without a cache
    %ranks start 2             several processes; %%ranks runs the cell below it on each of them
    %monitor on|off|status     the machine beside the steps: card, processor, memory, disk, network
    %incident                  the reports of this session as a page in five parts
    %read_log PATH             what the log of a run shows, and on which line
    %step_through              a training step, layer by layer, while the notebook stays usable
    %check_data PATH           what is wrong with a data set: pictures, captions, tables, tokens
    %check_loader              what is wrong with the stream that a loader makes of it
    %check_outputs SAMPLES     what is wrong with what a model made: copies, collapse, tints, loops
    %check_adapter MODEL       what a LoRA changes, layer by layer, and what keeps it from doing so
    %check_diffusion MODEL …   what a denoiser predicts, beside its sampler, its schedule and its noise
    %perplexity MODEL DATA     the perplexity per real next token, and the mistake that gives another
    %compare A B INPUTS METRIC which of two models is better, where noise does not explain it
    %check_config FILE         what is wrong with the settings of a run, before anything runs
    %check_environment         whether this machine can do what a run asks of it
    %check_notebook            what cells that ran again, or out of order, have left behind
    %first_aid SYMPTOM         what to try in which order, each step run on what is among your variables
    %checklist MOMENT          the same before, during or after training
    %describe THING            a line for each tensor of anything
    %smallest STEP             a failing step shrunk while it fails alike, as a script that runs alone
    %explain                   why the last cell failed; %explain CODE shows the catalogue page of a cause
    %nbdebug                   the panel: what is on, what was found, and buttons; %nbdebug off removes everything

A magic's file has its options, the call of the function of the same name, and the report. What they share: `_arguments`
parses the line, prints `-h`, finds models, batches and losses among the user's variables, and tells what Tab offers;
`_user_code` compiles and runs a step or a cell so that it keeps its place; `_watch` is what %guard and %grad_watch have
in common. Only this package knows IPython.
"""

from __future__ import annotations

from typing import Any

from nbdebug.magics._arguments import Completion, help_text
from nbdebug.magics.bottleneck import BottleneckMagics
from nbdebug.magics.check import CheckMagics
from nbdebug.magics.check_config import BeforeRunMagics
from nbdebug.magics.diagnose import DiagnoseMagics
from nbdebug.magics.explain import ExplainMagics
from nbdebug.magics.first_aid import FirstAidMagics
from nbdebug.magics.grad_watch import GradWatchMagics
from nbdebug.magics.guard import GuardMagics
from nbdebug.magics.mem import MemoryMagics
from nbdebug.magics.monitor import MonitorMagics
from nbdebug.magics.nan_trace import NanTraceMagics
from nbdebug.magics.panel import NbdebugMagics
from nbdebug.magics.precision import PrecisionMagics
from nbdebug.magics.ranks import RanksMagics
from nbdebug.magics.step_through import StepMagics
from nbdebug.magics.stop_at import StopMagics

WATCHES = (
    GuardMagics,
    GradWatchMagics,
    BottleneckMagics,
    MonitorMagics,
    StopMagics,
    StepMagics,
    ExplainMagics,
    RanksMagics,
)
"""Magics that stay on; %nbdebug shows and ends them."""
QUESTIONS = (
    NanTraceMagics,
    DiagnoseMagics,
    MemoryMagics,
    PrecisionMagics,
    BeforeRunMagics,
    CheckMagics,
    FirstAidMagics,
)
OURS = (*WATCHES, *QUESTIONS, NbdebugMagics, Completion)


def register(shell: Any) -> None:
    """Add the magics and the completion of their options to a shell."""
    unregister(shell)
    watches = tuple(kind(shell) for kind in WATCHES)
    panel = NbdebugMagics(shell, watches, unregister)
    groups = (*(kind(shell) for kind in QUESTIONS), *watches, panel)
    for magics in groups:
        shell.register_magics(magics)
    lines = {name: method for magics in groups for name, method in magics.magics["line"].items()}
    for method in lines.values():
        method.__func__.__doc__ = help_text(method)  # what `%guard?` shows
    panel.state.lines = lines
    shell.Completer.custom_matchers.append(Completion(shell, lines).complete)


def unregister(shell: Any) -> None:
    """Remove them again, and end the watches that are on; a user's magic of the same name stays."""
    registry = shell.magics_manager.registry
    registered = [registry.pop(kind.__name__, None) for kind in OURS]
    for kind, table in shell.magics_manager.magics.items():
        for name in [name for name, magic in table.items() if _is_ours(magic)]:
            del table[name]
            table.update(_before(registry, kind, name))
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if not _is_ours(matcher)]
    for magics in registered:
        if isinstance(magics, (*WATCHES, NbdebugMagics)):
            magics.close()


def _before(registry: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """What the name stood for before ours: IPython has a %precision, too."""
    others = (magics.magics.get(kind, {}) for magics in registry.values() if hasattr(magics, "magics"))
    return next(({name: table[name]} for table in others if name in table), {})


def _is_ours(method: Any) -> bool:
    return isinstance(getattr(method, "__self__", None), OURS)
