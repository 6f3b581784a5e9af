"""check_notebook(): problems that come from the order in which cells ran, and from cells that ran again.

Two tools answer together: this one, and the memory tool, which lists what the shell keeps: what only `Out`, the last
traceback or a list of losses holds is told with the cell that did it.
"""

from __future__ import annotations

import ast
import dis
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import psutil
import torch

from nbdebug.observe import variables as shells
from nbdebug.observe.variables import (
    attributes,
    class_attribute,
    frame_variables,
    is_user_module,
    last_error,
    reachable_objects,
    user_variables,
)
from nbdebug.report import Finding, Report, RuledOut, Where
from nbdebug.text import count, listed, module_name
from nbdebug.tools.notebook.cells import (
    At,
    CellBinding,
    CellHistory,
    cell_lines,
    dotted,
    error_message,
    names_in,
    nodes,
    number_of,
    read_by,
    root_of,
    traceback_links,
)
from nbdebug.tools.notebook.flow import told_of_cells
from nbdebug.tools.notebook.left_on import (
    cells_too_early,
    hooks_registered_twice,
    left_on_notes,
    loaded_in_train_mode,
    modes_left_on,
    names_shadowed,
)
from nbdebug.tools.notebook.repeats import MISFIT, applied_twice, rows_out_of_step, runs_twice, splits_drawn_again
from nbdebug.tools.notebook.rules import (
    NOWHERE,
    KeptOutput,
    NotebookFacts,
    StaleModule,
    Told,
    name_all,
    named,
    notes_of,
    renewal_note,
    told,
)
from nbdebug.tools.notebook.stale_code import (
    kept_by_guard,
    memo_changed,
    redefined_classes,
    stale_modules,
    stale_results,
)
from nbdebug.tools.notebook.stale_objects import (
    ModelsAndOptimizers,
    is_module,
    is_tensor,
    missing_parameters,
    parameters_of,
    stale_holders,
    stale_workers,
)


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
                *part("loaded models", lambda: loaded_in_train_mode(owners, history)),
                *part("kept objects", lambda: list(kept_by_guard(variables, history))),
                *part("changed memos", lambda: list(memo_changed(variables, history))),
                *part("names of loops", lambda: list(taken_by_loop(variables, history))),
                *part("models of loops", lambda: list(model_taken_by_loop(variables, history, owners))),
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
    ahead = [renewal_note(one) for one in facts.untrained if not one.used]
    ruled_out = RuledOut("an old version of an edited file", "your loaded modules match their files")
    return Report(
        "check_notebook()",
        findings,
        () if findings or facts.stale or ahead else (ruled_out,),  # what is wrong from the next step on is not well
        facts.unchecked,
        (*(ahead if findings else ahead[1:]), *notes_of(facts)),
        subject,
        headline=""
        if findings
        else ahead[0]
        if ahead
        else "No problem was found that comes from the order in which the cells ran.",
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
        *modes_left_on(names, owners, history, error, whole),
        *names_shadowed(names, history, error),
        *cells_too_early(names, history, error),
        *_of_values(names, objects, history, error),
    ]


def _of_values(
    names: Mapping[str, Any], objects: list[tuple[str, Any]], history: CellHistory, error: BaseException | None
) -> list[Told]:
    """What the last failure tells of the way in which its values came about."""
    message = error_message(error)
    lines = list(cell_lines(error, history)) if MISFIT.search(f"{type(error).__name__}: {message}") else []
    for number, line in reversed(lines):
        statement = history.cells[number].statement(line)
        for name in sorted(names_in(statement) & names.keys()):
            made = [b for b in history.bindings(name) if b.at < (number, line)]
            first = [b for b in made if b.how == "assign" and b.number < made[-1].number][-1:]
            if not first or made[-1].how != "for" or made[-1].number == number:
                continue
            mixed = [
                n for n in names_in(statement) - {name} if (name, first[0].at) in history.origins(n, (number, line))
            ]
            if mixed:
                where = history.place(made[-1])
                title = (
                    f"`{name}` is what the loop of {named(where)} left in it, and no longer that of "
                    f"{named(history.place(first[0]))}, from which `{mixed[0]}` was computed"
                )
                fix = ("Give the loop names of its own.", f"for {name}_batch, … in …:")
                used = history.cells[number].place(line)
                return [told("notebook/name-shadowed", title, (name, mixed[0]), fix, where, used)]
    return list(_lacks(message, objects, history))


def _lacks(message: str, objects: list[tuple[str, Any]], history: CellHistory) -> Iterator[Told]:
    """An object that lacks what its class's `__init__` sets by now, as autoreload has changed the class."""
    match = re.search(r"'(\w+)' object has no attribute '(\w+)'", message)
    kind, lacking = match.groups() if match is not None and history.mentioning("autoreload") else ("", "")
    for name, thing in [one for one in objects if kind and type(one[1]).__name__ == kind]:
        make, made = class_attribute(thing, "__init__"), history.bindings(root_of(name))[-1:]
        own = type(make) is FunctionType and is_user_module(module_name(type(thing)))
        sets = {i.argval for i in dis.get_instructions(make) if i.opname == "STORE_ATTR"} if own else set()
        if lacking in sets and made:
            title = (
                f"`{name}` was made before its class was edited: autoreload gave `{kind}` another `__init__`, which "
                f"sets `{lacking}`, and that has not run for `{name}`"
            )
            fix = (f"Make `{root_of(name)}` again.", history.text(made[0]))
            yield told("notebook/class-redefined", title, (name, kind), fix, history.place(made[0]))
            return


MEASURES = frozenset("mean sum item argmax tolist numpy backward score predict std".split())
SAYS = frozenset("shape size dtype device ndim dim".split())
"""Methods by which a cell measures; what is said of a tensor as well by a part of its rows."""


def taken_by_loop(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """A data set whose name its own loop has taken (`for x, y in loader`), so that a later cell measures with the last
    batch."""
    taken: dict[At, list[tuple[str, int, int, CellBinding, Where]]] = {}
    for name, value in names.items():
        loop = history.loop_of(name) if is_tensor(value) and value.dim() else None
        if loop is None or not isinstance(loop.node, ast.For):
            continue
        sources = {at for read in names_in(loop.node.iter) for of, at in history.origins(read, loop.at) if of == name}
        firsts = [b for b in history.bindings(name, "assign") if b.at in sources and b.number < loop.number]
        whole = [len(t) for n in names_in(loop.node.iter) & names.keys() for t in _rows_of(names[n], value)]
        used = _measured(name, loop, history) if firsts and max(whole, default=0) > len(value) else None
        if used is not None:
            taken.setdefault(loop.at, []).append((name, len(value), max(whole), firsts[-1], used))
    for found in taken.values():
        (name, rows, of, first, used), both = found[0], listed([name for name, *_ in found])
        where, are = history.place(history.bindings(name)[-1]), "are" if len(found) > 1 else "is"
        title = (
            f"{both} {are} the last batch of the loop in {named(where)}, {rows} of {of:,} rows, and no longer what "
            f"{named(history.place(first))} made: {named(used)} measures with it"
        )
        mine = ", ".join(f"{name}_batch" for name, *_ in found)
        fix = ("Give the loop names of its own, and run the cell that makes the data again.", f"for {mine} in …:")
        yield told("notebook/name-shadowed", title, tuple(n for n, *_ in found), fix, where, used)


def _rows_of(thing: Any, row: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a loader's or a data set's that are such rows."""
    while (inner := attributes(thing).get("dataset")) is not None:
        thing = inner
    values = [v for one in attributes(thing).values() for v in (one if type(one) in (list, tuple) else [one])]
    return [
        v for v in (thing, *values) if is_tensor(v) and v.dim() and (v.shape[1:], v.dtype) == (row.shape[1:], row.dtype)
    ]


def _measured(name: str, loop: CellBinding, history: CellHistory) -> Where | None:
    """The later cell that computes a number from all rows of a variable."""
    for cell, root, own in history.after((loop.number, 1 << 30), name):
        inside = list(nodes([root]))
        stored = {n.id for n in inside if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        stored |= {a.arg for a in ast.walk(root) if isinstance(a, ast.arg)}
        parts = {id(n.value) for n in inside if isinstance(n, ast.Subscript)}
        parts |= {id(n.value) for n in inside if isinstance(n, ast.Attribute) and n.attr in SAYS}
        read = [n for n in inside if isinstance(n, ast.Name) and n.id == name and id(n) not in parts]
        if read and name not in stored and MEASURES & history.methods(cell.number):
            return cell.place(read[0].lineno if own else None)
    return None


def model_taken_by_loop(names: Mapping[str, Any], history: CellHistory, owners: ModelsAndOptimizers) -> Iterator[Told]:
    """A trained model whose name a loop over other models has taken, so that a later cell asks the last of these: an
    optimizer alone still holds what it has trained."""
    left = any(owners.strangers(optimizer, inner=True) for _, optimizer in owners.optimizers)
    for name, loop in [(n, history.loop_of(n)) for n, value in names.items() if left and is_module(value)]:
        made = [b for b in history.bindings(name, "assign") if loop is not None and b.number < loop.number]
        own = [p for _, p in parameters_of(names[name])]
        if loop is None or not made or any(p.grad is not None or id(p) in owners.in_optimizers for p in own):
            continue
        trained = [n for n in history.training(made[0].number - 1, loop.number) if name in read_by(history.reach(n))]
        for cell, root, line in history.after((loop.number, 1 << 30), name) if trained else ():
            stored = any(
                isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in nodes([root])
            )
            if name in read_by([root]) and not stored:
                where, used = history.place(loop), cell.place(root.lineno if line else None)  # type: ignore[attr-defined]
                title = (
                    f"`{name}` is the last model of the loop in {named(where)}, and no longer the one that "
                    f"In [{trained[-1]}] has trained: {named(used)} asks the untrained one"
                )
                fix = (
                    "Give the loop a name of its own, and make and train the model again.",
                    f"for other_{name} in …:",
                )
                yield told("notebook/name-shadowed", title, (name,), fix, where, used)
                break


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


FREES = ("collect", "empty_cache", "malloc_trim")
LEAST = 1 << 20
"""Bytes; less is never reported."""


def kept_outputs(outputs: Iterable[Any], history: CellHistory, error: BaseException | None) -> list[KeptOutput]:
    """outputs: what the shell keeps, as `free()` lists it: each with how, name, also, bytes, items, what and where.
    error: the last failure."""
    results = []
    for one in outputs:
        if one.bytes < LEAST:
            continue
        if one.how == "output":
            results.append(_displayed(one, history))
        elif one.how in ("traceback", "loss"):
            raised = one.how == "traceback"
            where = (_failed_line(error, history) or one.where) if raised else _first_append(one.name, history)
            freed = _freeing_statement("" if raised else one.name, number_of(where), history)
            how, mainly = ("traceback", _largest(error)) if raised else ("graph", one.name)
            results.append(KeptOutput(how, one.name, one.bytes, one.what, mainly, *freed, where=where))
    return results


def _failed_line(error: BaseException | None, history: CellHistory) -> Where | None:
    """The line at which a cell failed: of several cells in the traceback, the outermost."""
    for link in traceback_links(error):
        number = history.cell_of(link.tb_frame.f_code.co_filename)
        if number is not None:
            return history.cells[number].place(link.tb_lineno)
    return None


def _largest(error: BaseException | None) -> str:
    """The largest tensor among the variables of the calls that failed: "acts"; "" where there is none."""
    most, largest = 0, ""
    for link in traceback_links(error):
        frame = link.tb_frame
        if frame.f_locals is frame.f_globals or not is_user_module(str(frame.f_globals.get("__name__", ""))):
            continue  # a cell's own variables exist without the traceback
        for name, value in frame.f_locals.items():
            count = value.numel() * value.element_size() if is_tensor(value) else 0
            if count > most:
                most, largest = count, name
    return largest


def _first_append(name: str, history: CellHistory) -> Where:
    """The first line that adds something to this list or dict."""
    root = re.split(r"[.\[]", name)[0]
    for cell in history.mentioning(root):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Call) and _adds(node, name, root):
                return cell.place_of(node)
    bound = history.bindings(root)
    return history.place(bound[-1]) if bound else NOWHERE


def _adds(call: ast.Call, name: str, root: str) -> bool:
    """Whether a call adds a tensor to this list, or to a list in this dict."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("append", "extend"):
        return False
    target, item = ast.unparse(call.func.value), call.args[0] if call.args else None
    number = isinstance(item, ast.Call) and (
        dotted(item.func) in ("float", "int")
        or isinstance(item.func, ast.Attribute)
        and item.func.attr in ("item", "detach", "tolist")
    )
    return not number and (target in (name, root) or target.startswith(f"{name}["))


def _displayed(one: Any, history: CellHistory) -> KeptOutput:
    names = [one.name, *one.also]
    number = next((int(n[4:-1]) for n in names if n.startswith("Out[") and n[4:-1].isdigit()), None)
    if number is None or number not in history.cells:
        return KeptOutput("output", one.name, one.bytes, one.what)
    cell = history.cells[number]
    last = cell.body[-1] if cell.body else None
    expression = last.value if isinstance(last, ast.Expr) else None
    text = cell.text_of(expression) if expression is not None else ""
    variable = (
        next((n.id for n in ast.walk(expression) if isinstance(n, ast.Name)), "") if expression is not None else ""
    )
    statement, deleted, freed = _freeing_statement(variable, number, history)
    shown = next(n for n in names if n.startswith("Out["))
    where = cell.place(last.lineno if last is not None else None)
    return KeptOutput("output", shown, one.bytes, one.what, text, statement, deleted, freed, where)


def _freeing_statement(variable: str, number: int | None, history: CellHistory) -> tuple[str, bool, Where]:
    """The statement after this cell that tried to free the memory, whether it names this variable, and its place: `del
    features`, `features = None`, `gc.collect()`."""
    collected: tuple[str, bool, Where] = ("", False, NOWHERE)
    for cell in [c for n, c in history.cells.items() if number is not None and n > number]:
        for b in cell.bindings if variable and cell.mentions(variable) else ():
            if b.path == variable and (b.how == "del" or isinstance(b.value, ast.Constant) and b.value.value is None):
                return history.text(b), True, history.place(b)
        if collected[0] or not cell.mentions("collect") and not cell.mentions("empty_cache"):
            continue
        for node in nodes(history.reach(cell.number)):
            of = dotted(node.func) if isinstance(node, ast.Call) else ""
            if "." in of and of.rpartition(".")[2] in FREES:
                collected = ast.unparse(node), False, cell.place(getattr(node, "lineno", 1))
    return collected
