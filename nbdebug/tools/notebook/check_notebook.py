"""check_notebook(): problems that come from the order in which cells ran, and from cells that ran again.

Two tools answer together: this one, and the memory tool, which lists what the shell keeps.
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

from nbdebug.observe import variables as shells
from nbdebug.observe.variables import attributes, frame_variables, last_error, reachable_objects, user_variables
from nbdebug.report import Finding, Report, RuledOut
from nbdebug.text import count, module_name
from nbdebug.tools.notebook.cells import CellHistory, error_message, traceback_links
from nbdebug.tools.notebook.flow import told_of_cells, told_of_error
from nbdebug.tools.notebook.left_on import (
    cells_too_early,
    hooks_registered_twice,
    kept_outputs,
    left_on_notes,
    modes_left_on,
    names_shadowed,
)
from nbdebug.tools.notebook.repeats import applied_twice, rows_out_of_step, runs_twice, splits_drawn_again
from nbdebug.tools.notebook.rules import NotebookFacts, StaleModule, Told, name_all, notes_of
from nbdebug.tools.notebook.stale_code import redefined_classes, stale_modules, stale_results
from nbdebug.tools.notebook.stale_objects import ModelsAndOptimizers, missing_parameters, stale_holders, stale_workers


def check_notebook(names: Mapping[str, Any] | None = None, *, shell: Any = None) -> Report:
    """Find what is wrong because of how the notebook's cells ran, each with the cell that caused it.

    It finds modules whose file was edited after the import (error/stale-import); models that were created again, or
    given new parts, while the optimizer holds the old parameters (training/parameters-not-in-optimizer); hooks that a
    cell registered again when it ran again (notebook/hooks-registered-twice); objects of an earlier definition of
    their class (notebook/class-redefined); loaders, schedulers and trainers that still use a replaced object
    (notebook/stale-reference); a cell that ran before the one it needs (notebook/cells-out-of-order), or again on its
    own result (notebook/cell-run-twice); a name of Python's that a variable hides (notebook/name-shadowed); memory
    that only `Out`, the last traceback or a list of losses holds (memory/…). Settings that a cell left on are notes.

    names: the user's variables, by default the notebook's, or those of the caller. shell: IPython's, by default the
    running one. It works at any time, also when nbdebug was loaded after the problem. It changes nothing and runs none
    of the user's code. Raises TypeError where names is no mapping.
    """
    if names is not None and not isinstance(names, Mapping):
        raise TypeError(f"names takes a dict of your variables, such as globals(); got {type(names).__name__}.")
    from nbdebug.tools.memory.free import kept_by_notebook  # imports torch

    caller = sys._getframe(1)
    shell = shells.running_shell() if shell is None else shell
    if names is None:
        space = getattr(shell, "user_ns", None)
        names = space if space is not None else {**caller.f_globals, **frame_variables(caller)}
    return notebook_report(names, shell, kept_by_notebook(names, shell))


def notebook_facts(names: Mapping[str, Any], shell: Any, memory: Iterable[Any] = ()) -> NotebookFacts:
    """names: the user's variables; shell: IPython's, None in a script; memory: what the shell keeps, as the list of
    `free()` gives it. A part that fails is reported as not checked."""
    with torch._C.DisableTorchFunctionSubclass():
        history, variables, error = CellHistory.of(shell), user_variables(names), last_error()
        objects = objects_from(variables)
        owners = ModelsAndOptimizers(variables, objects)
        unchecked: list[str] = []

        def part(what: str, check: Callable[[], Any]) -> Any:
            try:
                return check()
            except Exception as fault:  # a strange object, a strange cell: the other parts still hold
                unchecked.append(f"{what}: the check failed ({type(fault).__name__})")
                return []

        stale, broken = part(
            "edited files", lambda: stale_modules(variables, history, psutil.Process().create_time())
        ) or ([], [])
        unchecked += broken
        again = part("cells that ran again", lambda: runs_twice(variables, history, error))
        models = {name.partition("[")[0] for name, _ in owners.whole}
        hooks = part("hooks", lambda: hooks_registered_twice(objects, history))
        drawn = [] if again else part("random splits", lambda: splits_drawn_again(models, history))
        drawn += [] if again else part("the order of rows", lambda: rows_out_of_step(variables, history))
        notes = [
            *part("double runs", lambda: applied_twice(variables, history, [one.name for one in again])),
            *part("settings", lambda: left_on_notes(variables, owners, history)),
        ]
        outputs = list(memory)
        return NotebookFacts(
            len(history.cells),
            len(objects),
            tuple(stale),
            tuple(part("optimizers", lambda: missing_parameters(owners, history))),
            (
                *part("holders", lambda: stale_holders(variables, history, owners)),
                *part("loaders' processes", lambda: list(stale_workers(variables, objects, history))),
            ),
            tuple(part("classes", lambda: redefined_classes(variables, objects, history, error))),
            tuple(part("outputs", lambda: kept_outputs(outputs, history, error))),
            tuple(notes),
            tuple(again),
            tuple(unchecked),
            tuple(part("the last failure", lambda: _of_failure(variables, objects, owners, history, error))),
            (
                *hooks,
                *drawn,
                *part("kept results", lambda: list(stale_results(variables, history))),
                *part("what lines read", lambda: list(told_of_cells(variables, objects, history, owners))),
            ),
        )


def objects_from(variables: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name, object) of all that the variables lead to, also through torch's loaders and schedulers."""
    objects = list(reachable_objects(variables))
    visited = {id(thing) for _, thing in objects}
    for name, thing in list(objects):
        kind = type(thing)
        if not module_name(kind).startswith("torch.utils.data"):
            continue
        for key in ("dataset", "collate_fn", "batch_sampler", "sampler"):
            part = attributes(thing).get(key)
            if part is not None and id(part) not in visited and not issubclass(type(part), torch.Tensor):
                visited.add(id(part))
                objects.append((f"{name}.{key}", part))
    return objects


def notebook_report(names: Mapping[str, Any], shell: Any = None, memory: Iterable[Any] = ()) -> Report:
    """names, shell, memory: as in `notebook_facts`."""
    facts = notebook_facts(names, shell, memory)
    findings = tuple(name_all(facts))
    objects = f"{count(facts.objects, 'object')} that your variables lead to"
    subject = (
        f"{count(facts.cells, 'cell')} that ran, {objects}"
        if facts.cells
        else f"{objects}; no record of cells, as outside a notebook"
    )
    ruled_out = RuledOut("an old version of an edited file", "your loaded modules match their files")
    return Report(
        "check_notebook()",
        findings,
        () if findings or facts.stale else (ruled_out,),
        facts.unchecked,
        tuple(notes_of(facts)),
        subject,
        headline="" if findings else "No problem was found that comes from the order in which the cells ran.",
        independent=True,
    )


def _of_failure(
    names: Mapping[str, Any],
    objects: list[tuple[str, Any]],
    owners: ModelsAndOptimizers,
    history: CellHistory,
    error: BaseException | None,
    whole: bool = True,
) -> list[Told]:
    """What the last failure tells. whole: as in `modes_left_on`."""
    return [
        *modes_left_on(owners, history, error, whole),
        *names_shadowed(names, history, error),
        *cells_too_early(names, history, error),
        *told_of_error(names, objects, history, error),
    ]


MODULES = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'|cannot import name '(\w+)' from '([\w.]+)'")
CALLS = re.compile(r"((?:\w+\.)*\w+)\(\) (?:got an unexpected keyword argument '(\w+)'|takes|missing)")
OBJECTS = re.compile(r"(?:type object )?'(\w+)'(?: object)? has no attribute '(\w+)'")
"""Python's messages for an attribute, a name or a parameter that does not exist."""


def notebook_causes(error: BaseException, names: Mapping[str, Any], shell: Any = None) -> tuple[Finding, ...]:
    """What of the notebook explains this exception: a file that differs from what is loaded of it, an object of an
    earlier definition of its class, a name that a later cell defines or an earlier one hides, a statement that had
    consumed its own result before, what a cell set or changed for all that follow. () for other exceptions."""
    with torch._C.DisableTorchFunctionSubclass():
        history, variables = CellHistory.of(shells.running_shell() if shell is None else shell), user_variables(names)
        files = {os.path.basename(link.tb_frame.f_code.co_filename) for link in traceback_links(error)}
        message = error_message(error)
        stale, _ = stale_modules(variables, history, psutil.Process().create_time())
        objects, kinds = objects_from(variables), (TypeError, AttributeError, KeyError)
        refused = issubclass(type(error), kinds) or "pickl" in type(error).__name__.lower()
        classes = redefined_classes(variables, objects, history, error) if refused else []
        owners = ModelsAndOptimizers(variables, objects)
        return tuple(
            name_all(
                NotebookFacts(
                    stale=tuple(one for one in stale if one.file in files or _is_about(one, message)),
                    classes=tuple(one for one in classes if one.evidence == "exception"),
                    repeated=tuple(one for one in runs_twice(variables, history, error) if one.error),
                    failed=tuple(_of_failure(variables, objects, owners, history, error, False)),
                )
            )
        )


def _is_about(one: StaleModule, message: str) -> bool:
    """Whether the message names something of a module, or of its classes and functions, that its file has by now: such
    a traceback has no line of the file itself."""
    changed = {part for name in one.changed for part in (name, name.rpartition(".")[2])}
    if (match := MODULES.search(message)) is not None:
        module, name = (match[1], match[2]) if match[1] else (match[4], match[3])
        return module == one.module and name in changed
    if (match := CALLS.match(message)) is not None:
        name = match[1].removesuffix(".__init__")
        applies = name in one.changed or f"{name}.__init__" in one.changed or "takes no arguments" in message
        return applies and _accepts(one.module, name, match[2])
    match = OBJECTS.search(message)
    return match is not None and f"{match[1]}.{match[2]}" in one.changed


def _accepts(module: str, name: str, argument: str | None) -> bool:
    """Whether the file has a function, method or class of this name that accepts such an argument."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    try:
        with open(file or "", encoding="utf-8") as opened:
            body: list[ast.stmt] = ast.parse(opened.read()).body
    except (OSError, SyntaxError, ValueError):
        return False
    for part in [*name.split("."), "__init__"]:
        node = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part), None)
        if node is None:
            return False
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            return argument is None or argument in names or node.args.kwarg is not None
        body = node.body
    return False
