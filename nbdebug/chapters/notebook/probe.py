"""What the session shows, as facts. Nothing is run, changed or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil
import torch

from nbdebug.chapters.notebook.cells import History
from nbdebug.chapters.notebook.classes import redefined
from nbdebug.chapters.notebook.facts import NotebookFacts
from nbdebug.chapters.notebook.files import stale_modules
from nbdebug.chapters.notebook.held import Held
from nbdebug.chapters.notebook.holders import stale_holders
from nbdebug.chapters.notebook.hooks import hooks_registered_twice
from nbdebug.chapters.notebook.leftovers import leftovers
from nbdebug.chapters.notebook.modes import modes_left
from nbdebug.chapters.notebook.order import applied_twice, too_early
from nbdebug.chapters.notebook.outputs import kept
from nbdebug.chapters.notebook.renewed import left_behind
from nbdebug.observe.named import attributes, own, things
from nbdebug.observe.shell import last_error


def seen(names: Mapping[str, Any], shell: Any, memory: Iterable[Any] = ()) -> NotebookFacts:
    """names: the user's variables; shell: IPython's, None in a script; memory: what the shell keeps of it, as the list
    of `free()` gives it. A part that fails is told as not checked."""
    with torch._C.DisableTorchFunctionSubclass():
        history, mine, error = History.of(shell), own(names), last_error(shell)
        met = met_from(mine)
        held = Held(mine, met)
        unchecked: list[str] = []

        def part(what: str, look: Callable[[], Any]) -> Any:
            try:
                return look()
            except Exception as wrong:  # a strange object, a strange cell: the other parts still stand
                unchecked.append(f"{what}: looking at it failed ({type(wrong).__name__})")
                return []

        stale, broken = part("edited files", lambda: stale_modules(mine, history, psutil.Process().create_time())) or (
            [],
            [],
        )
        unchecked += [f"{file}: it can't be compiled now, so it was not compared" for file in broken]
        notes = [
            *part("double runs", lambda: applied_twice(mine, history)),
            *part("settings", lambda: leftovers(mine, held, history)),
        ]
        given = list(memory)
        return NotebookFacts(
            len(history.cells),
            len(met),
            tuple(stale),
            tuple(part("optimizers", lambda: left_behind(held, history))),
            tuple(part("holders", lambda: stale_holders(mine, met, history))),
            tuple(part("hooks", lambda: hooks_registered_twice(met, history))),
            tuple(part("classes", lambda: redefined(mine, met, history, error))),
            tuple(part("outputs", lambda: kept(given, history, error))),
            tuple(part("the order of cells", lambda: too_early(mine, history, error))),
            tuple(part("modes", lambda: modes_left(held, history, error))),
            tuple(notes),
            tuple(unchecked),
        )


def met_from(mine: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What can be reached from the variables by name, also through torch's loaders and schedulers."""
    met = list(things(mine))
    known = {id(thing) for _, thing in met}
    for name, thing in list(met):
        kind = type(thing)
        if not kind.__module__.startswith("torch.utils.data"):
            continue
        for key in ("dataset", "collate_fn", "batch_sampler", "sampler"):
            part = attributes(thing).get(key)
            if part is not None and id(part) not in known and not issubclass(type(part), torch.Tensor):
                known.add(id(part))
                met.append((f"{name}.{key}", part))
    return met
