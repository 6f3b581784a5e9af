"""check_notebook(): what cells that ran in some order, and again, have left behind.

Two chapters answer together: the notebook's own hazards, and what the memory chapter sees the shell keep.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil
import torch

from nbdebug.observe import shell as shells
from nbdebug.observe.shell import last_error
from nbdebug.observe.variables import attributes, frame_variables, reachable_objects, user_variables
from nbdebug.report import Finding, Report, RuledOut
from nbdebug.tools.notebook.cells import CellHistory
from nbdebug.tools.notebook.facts import NotebookFacts, StaleModule
from nbdebug.tools.notebook.left_on import (
    applied_twice,
    cells_too_early,
    hooks_registered_twice,
    left_on_notes,
    modes_left_on,
)
from nbdebug.tools.notebook.outputs import kept_outputs
from nbdebug.tools.notebook.rules import name_all, notes_of
from nbdebug.tools.notebook.stale_classes import redefined_classes
from nbdebug.tools.notebook.stale_modules import stale_modules
from nbdebug.tools.notebook.stale_objects import ModelsAndOptimizers, missing_parameters, stale_holders


def check_notebook(names: Mapping[str, Any] | None = None, *, shell: Any = None) -> Report:
    """What is wrong by the way in which the notebook's cells ran: named, with the cell that brought it in.

    Found are: modules whose file was edited after the import (error/stale-import); models made anew, or given new
    parts, while the optimizer keeps the old parameters (training/parameters-not-in-optimizer); hooks that a cell, run
    again, has registered once more (notebook/hooks-registered-twice); objects whose class was defined again
    (notebook/class-redefined); loaders, schedulers and trainers made from what has been replaced
    (notebook/stale-reference); a cell that ran before the one it needs (notebook/cells-out-of-order); memory that only
    `Out`, the last traceback or a list of losses holds (memory/…). Settings that a cell left on are told as notes.

    names: the user's variables; left out: the notebook's, or those of the caller. shell: IPython's; left out: the one
    that runs, if any. It may be asked at any time, also when nbdebug was loaded after the trouble. Nothing is changed,
    and none of the user's code runs. Raises TypeError where names is no mapping.
    """
    if names is not None and not isinstance(names, Mapping):
        raise TypeError(f"names takes a dict of your variables, such as globals(); got {type(names).__name__}.")
    from nbdebug.tools.memory.leftovers import kept_by_notebook  # these two bring torch

    caller = sys._getframe(1)
    shell = shells.running_shell() if shell is None else shell
    if names is None:
        space = getattr(shell, "user_ns", None)
        names = space if space is not None else {**caller.f_globals, **frame_variables(caller)}
    return notebook_report(names, shell, kept_by_notebook(names, shell))


def notebook_causes(error: BaseException, names: Mapping[str, Any], shell: Any = None) -> tuple[Finding, ...]:
    """What of the notebook explains this very exception: a file that failed and is not what is loaded of it, an object
    of a class that was defined again, a name that a later cell defines. () for other exceptions."""

    return findings_for(error, names, shells.running_shell() if shell is None else shell)


def notebook_facts(names: Mapping[str, Any], shell: Any, memory: Iterable[Any] = ()) -> NotebookFacts:
    """names: the user's variables; shell: IPython's, None in a script; memory: what the shell keeps of it, as the list
    of `free()` gives it. A part that fails is told as not checked."""
    with torch._C.DisableTorchFunctionSubclass():
        history, mine, error = CellHistory.of(shell), user_variables(names), last_error()
        met = objects_from(mine)
        held = ModelsAndOptimizers(mine, met)
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
            *part("settings", lambda: left_on_notes(mine, held, history)),
        ]
        given = list(memory)
        return NotebookFacts(
            len(history.cells),
            len(met),
            tuple(stale),
            tuple(part("optimizers", lambda: missing_parameters(held, history))),
            tuple(part("holders", lambda: stale_holders(mine, met, history))),
            tuple(part("hooks", lambda: hooks_registered_twice(met, history))),
            tuple(part("classes", lambda: redefined_classes(mine, met, history, error))),
            tuple(part("outputs", lambda: kept_outputs(given, history, error))),
            tuple(part("the order of cells", lambda: cells_too_early(mine, history, error))),
            tuple(part("modes", lambda: modes_left_on(held, history, error))),
            tuple(notes),
            tuple(unchecked),
        )


def objects_from(mine: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What can be reached from the variables by name, also through torch's loaders and schedulers."""
    met = list(reachable_objects(mine))
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


def notebook_report(names: Mapping[str, Any], shell: Any = None, memory: Iterable[Any] = ()) -> Report:
    """names: the user's variables; memory: what the notebook keeps, as the list of `free()` has it."""
    facts = notebook_facts(names, shell, memory)
    found = tuple(name_all(facts))
    cells = f"{facts.cells:,} cell{'s' * (facts.cells != 1)} that ran"
    subject = (
        f"{cells}, {facts.objects:,} objects that your variables lead to"
        if facts.cells
        else (f"{facts.objects:,} objects that your variables lead to; no record of cells, as outside a notebook")
    )
    return Report(
        "check_notebook()",
        found,
        () if found else tuple(_ruled_out(facts)),
        facts.unchecked,
        tuple(notes_of(facts)),
        subject,
        headline="" if found else "Nothing in this notebook is left over from a cell that ran before.",
    )


def _ruled_out(facts: NotebookFacts) -> list[RuledOut]:
    return (
        [RuledOut("an old version of an edited file", "every loaded file of yours says what is loaded")]
        if not facts.stale
        else []
    )


MODULES = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'|cannot import name '(\w+)' from '([\w.]+)'")
CALLS = re.compile(r"((?:\w+\.)*\w+)\(\) (?:got an unexpected keyword argument '(\w+)'|takes|missing)")
OBJECTS = re.compile(r"(?:type object )?'(\w+)'(?: object)? has no attribute '(\w+)'")
"""How Python says that something lacks what was asked of it."""


def findings_for(error: BaseException, names: Mapping[str, Any], shell: Any) -> tuple[Finding, ...]:
    """The findings that belong to the exception; () where the notebook has no part in it."""
    with torch._C.DisableTorchFunctionSubclass():
        history, mine = CellHistory.of(shell), user_variables(names)
        files, said = _files(error), _message(error)
        stale, _ = stale_modules(mine, history, psutil.Process().create_time())
        classes = (
            [one for one in redefined_classes(mine, objects_from(mine), history, error) if one.seen == "exception"]
            if (issubclass(type(error), (TypeError, AttributeError)) or "pickl" in type(error).__name__.lower())
            else []
        )
        return tuple(
            name_all(
                NotebookFacts(
                    stale=tuple(one for one in stale if one.file in files or _is_about(one, said)),
                    classes=tuple(classes),
                    early=tuple(cells_too_early(mine, history, error)),
                )
            )
        )


def _message(error: BaseException) -> str:
    given = vars(BaseException)["args"].__get__(error)
    return given[0] if given and type(given[0]) is str else ""


def _is_about(one: StaleModule, said: str) -> bool:
    """Whether the message asks a module, or a class or function of it, for what its file has by now: the file itself
    has no line in such a traceback."""
    changed = {part for name in one.changed for part in (name, name.rpartition(".")[2])}
    if (asked := MODULES.search(said)) is not None:
        module, name = (asked[1], asked[2]) if asked[1] else (asked[4], asked[3])
        return module == one.module and name in changed
    if (asked := CALLS.match(said)) is not None:
        name = asked[1].removesuffix(".__init__")
        known = name in one.changed or f"{name}.__init__" in one.changed or "takes no arguments" in said
        return known and _accepts(one.module, name, asked[2])
    asked = OBJECTS.search(said)
    return asked is not None and f"{asked[1]}.{asked[2]}" in one.changed


def _accepts(module: str, name: str, argument: str | None) -> bool:
    """Whether the file has a function, method or class of this name that takes such an argument."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    try:
        with open(file or "", encoding="utf-8") as opened:
            body: list[ast.stmt] = ast.parse(opened.read()).body
    except (OSError, SyntaxError, ValueError):
        return False
    for part in [*name.split("."), "__init__"]:
        found = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part), None)
        if found is None:
            return False
        if isinstance(found, ast.FunctionDef):
            given = found.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            return argument is None or argument in names or given.kwarg is not None
        body = found.body
    return False


def _files(error: BaseException) -> set[str]:
    """The base names of the files in its traceback."""
    at, found = vars(BaseException)["__traceback__"].__get__(error), set()
    while at is not None:
        found.add(os.path.basename(at.tb_frame.f_code.co_filename))
        at = at.tb_next
    return found
