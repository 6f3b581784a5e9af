"""What earlier cells left on: duplicate hooks, eval mode, switches of torch, shadowed names; and cells that ran too
early or twice. Each with the cell that did it.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, UnionType
from typing import Any

import torch

from nbdebug.observe.duplicate_hooks import DuplicateHook, find_duplicate_hooks
from nbdebug.observe.variables import attributes, class_attribute, closure_variables, members
from nbdebug.report import Where
from nbdebug.tools.notebook.cells import (
    CellBinding,
    CellHistory,
    arguments_of,
    bound,
    dotted,
    error_message,
    first_training_use,
    names_in,
    nodes,
    root_of,
    traceback_links,
)
from nbdebug.tools.notebook.facts import NOWHERE, ModeLeft, RunTwice, Shadowed, TooEarly, TwiceHook
from nbdebug.tools.notebook.stale_objects import ModelsAndOptimizers, modules_of, optimizer_tensors, parameters_of

METHODS = {
    "forward hook": ("register_forward_hook", "register_module_forward_hook"),
    "forward pre-hook": ("register_forward_pre_hook", "register_module_forward_pre_hook"),
    "backward hook": ("register_full_backward_hook", "register_backward_hook", "register_module_full_backward_hook"),
    "backward pre-hook": ("register_full_backward_pre_hook", "register_module_full_backward_pre_hook"),
    "state dict hook": ("register_state_dict_post_hook", "_register_state_dict_hook"),
    "state dict pre-hook": ("register_state_dict_pre_hook",),
    "load pre-hook": ("register_load_state_dict_pre_hook", "_register_load_state_dict_pre_hook"),
    "load hook": ("register_load_state_dict_post_hook",),
    "gradient hook": ("register_hook",),
    "gradient hook behind accumulation": ("register_post_accumulate_grad_hook",),
    "step pre-hook": ("register_step_pre_hook", "register_optimizer_step_pre_hook"),
    "step hook": ("register_step_post_hook", "register_optimizer_step_post_hook"),
}
"""The methods that register each kind of hook."""
ACTING = ("Dropout", "BatchNorm", "InstanceNorm", "AlphaDropout", "FeatureAlphaDropout", "SyncBatchNorm")
"""Beginnings of the names of layers that behave differently in eval mode."""
SHADOWED = frozenset(
    (
        "list dict set tuple str int float bool len max min sum print range type open zip map filter sorted "
        "abs round any all next iter isinstance super enumerate property object"
    ).split()
)
"""Names of Python that other code of the notebook is likely to call; `id`, `input` or `dir` hardly ever are."""
MODULES = ("torch", "nn", "np", "numpy", "pd", "F", "random", "math", "os", "sys", "copy", "time", "json")
"""Names under which nearly everybody has a module."""
PACKAGES = (
    "torch numpy random json copy math typing types logging queue tokenize string token code dataclasses "
    "datasets transformers torchvision"
).split()
"""Packages whose names people give to a file beside the notebook."""


def hooks_registered_twice(objects: list[tuple[str, Any]], history: CellHistory) -> list[TwiceHook]:
    """One entry for each hook function, with all modules that have it more than once."""
    groups: dict[tuple[str, str, str], list[DuplicateHook]] = {}
    for one in find_duplicate_hooks(objects):
        groups.setdefault((one.hook, one.word, one.code.co_filename), []).append(one)
    return [_duplicate(group, history) for group in groups.values()]


def _duplicate(group: list[DuplicateHook], history: CellHistory) -> TwiceHook:
    first = group[0]
    times = max(len(one.older) for one in group) + 1
    cells, method = _registrations(first, times, history)
    places = [_place(history, number, method) for number in cells]
    where = places[1] if len(places) > 1 else places[0] if places else _source(first.code, history)
    return TwiceHook(
        tuple(dict.fromkeys(one.module for one in group)),
        first.hook,
        first.word,
        method,
        times,
        where,
        places[0] if len(places) > 1 else NOWHERE,
    )


def _registrations(one: DuplicateHook, times: int, history: CellHistory) -> tuple[list[int], str]:
    """The cells that registered the hook, oldest first, and the method that they called."""
    methods = METHODS.get(one.word, ("register",))
    calling: dict[int, list[ast.Call]] = {}
    for number in [cell.number for cell in history.reaching(*methods)]:
        calls = [
            n
            for n in nodes(history.reach(number))
            if isinstance(n, ast.Call)
            and dotted(n.func).rpartition(".")[2] in methods
            or isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr in methods
        ]
        if calls:
            calling[number] = calls
    defining = [n for hook in (*[h for _, _, h in one.older], one.newest) for n in [history.cell_of(_code(hook))] if n]
    naming = [n for n, calls in calling.items() if any(one.hook in _argument_names(call) for call in calls)]
    method = next((_method(call) for calls in calling.values() for call in calls), methods[0])
    if len(set(defining)) == times:  # each run of the cell has defined a function of its own
        return sorted(defining), method
    for cells in (naming, [n for n in calling if defining and n in history.same(defining[-1])], list(calling)):
        if len(cells) >= min(2, times):
            return cells[-times:], _method(calling[cells[-1]][0])
    return list(calling)[-1:], method


def _argument_names(call: ast.Call) -> set[str]:
    """The names in the arguments of a call, those of attributes (`self.save`) as well."""
    values = arguments_of(call)
    attrs = {n.attr for value in values for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    return attrs.union(*(names_in(value) for value in values)) if values else attrs


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _code(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # of a functools.partial
    function = hook.__func__ if type(hook) is MethodType else hook
    return function.__code__.co_filename if type(function) is FunctionType else ""


def _place(history: CellHistory, number: int, method: str) -> Where:
    """The line of a cell that registers the hook: the call itself, or the call of a function that does it."""
    cell = history.cells[number]
    lines = cell.raw.splitlines()
    line = next((n for n, text in enumerate(lines, 1) if method in text), None)
    own = {id(s) for s in cell.statements}
    if line is None:
        for root in history.reach(number):
            if id(root) in own and isinstance(root, (ast.Expr, ast.Assign)) and isinstance(root.value, ast.Call):
                line = root.lineno
                break
    return cell.place(line)


def _source(code: CodeType, history: CellHistory) -> Where:
    number = history.cell_of(code.co_filename)
    return (
        history.cells[number].place(code.co_firstlineno)
        if number is not None
        else Where(file=code.co_filename, line=code.co_firstlineno)
    )


def eval_models(owners: ModelsAndOptimizers) -> list[tuple[str, Any]]:
    """The models in eval mode that an optimizer holds and that have layers which behave differently in it."""
    trained = {id(p) for _, optimizer in owners.optimizers for p in optimizer_tensors(optimizer)}
    models = []
    for name, model in owners.whole:
        parts = [part for _, part in modules_of(model)]
        if (
            any(type(p).__name__.startswith(ACTING) for p in parts)
            and not any(attributes(p).get("training") for p in parts)
            and any(id(p) in trained for _, p in parameters_of(model))
        ):
            models.append((name, model))
    return models


def modes_left_on(owners: ModelsAndOptimizers, history: CellHistory, error: BaseException | None) -> list[ModeLeft]:
    """The modes that were not left on intentionally: a training cell or the last exception shows it."""
    modes = [one for name, _ in eval_models(owners) if (one := _eval(root_of(name), history)) is not None]
    message = error_message(error)
    if "does not require grad" in message and not torch.is_grad_enabled():
        modes += _setting("grad", message, history, "set_grad_enabled", "no_grad", "inference_mode")
    if torch.get_default_dtype() != torch.float32 and any(word in message for word in ("dtype", "Double", "Half")):
        modes += _setting("dtype", message, history, "set_default_dtype", "set_default_tensor_type")
    if torch.get_default_device().type != "cpu" and "device" in message:
        modes += _setting("device", message, history, "set_default_device")
    return modes


def _eval(name: str, history: CellHistory) -> ModeLeft | None:
    """The cell that called eval() between two runs of the same training cell, where no cell called train() since."""
    calls = {cell.number: _methods(history, cell.number) for cell in history.reaching(name)}
    switched = [n for n, methods in calls.items() if "eval" in methods and "step" not in methods]
    if not switched:
        return None
    last = switched[-1]
    training = [
        n for n, methods in calls.items() if "step" in methods and "backward" in methods and "train" not in methods
    ]
    after = next((n for n in training if n > last), None)
    before = next((n for n in reversed(training) if n < last), None)
    if (
        after is None
        or before is None
        or history.same(after)[0] > last
        or any("train" in methods for n, methods in calls.items() if last < n <= after)
    ):
        return None
    line = next(
        (
            getattr(n, "lineno", None)
            for n in nodes(history.cells[last].statements)
            if isinstance(n, ast.Call) and dotted(n.func) == f"{name}.eval"
        ),
        None,
    )
    return ModeLeft("eval", name, history.cells[last].place(line), history.cells[after].place())


def _methods(history: CellHistory, number: int) -> set[str]:
    return {
        n.func.attr
        for n in nodes(history.reach(number))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }


def _setting(kind: str, message: str, history: CellHistory, *words: str) -> list[ModeLeft]:
    for cell in reversed(history.reaching(*words)):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in words:
                return [ModeLeft(kind, ast.unparse(node), cell.place_of(node), message=message)]
    return []


def left_on_notes(names: Mapping[str, Any], owners: ModelsAndOptimizers, history: CellHistory) -> list[str]:
    """Sentences about settings and names that may be left on by accident."""
    evals = [
        f"`{name}` is in eval mode: dropout is off and batch statistics are not updated. Call `{name}.train()` before "
        "you train it."
        for name, _ in eval_models(owners)
    ]
    return [*evals, *_settings(history), *_shadows(names, history), *_files()]


def _settings(history: CellHistory) -> list[str]:
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    settings = (
        (
            not torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
            "Gradients are off for the whole session",
            ("set_grad_enabled", "no_grad"),
            "torch.set_grad_enabled(True)",
        ),
        (
            torch.is_inference_mode_enabled(),
            "Inference mode is on for the whole session",
            ("inference_mode",),
            "call its __exit__, or restart the kernel",
        ),
        (
            any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
            "Autocast is on for the whole session",
            ("autocast",),
            "call its __exit__, or restart the kernel",
        ),
        (
            torch.is_anomaly_enabled(),
            "Autograd's anomaly mode is on, and makes each step several times slower",
            ("anomaly",),
            "torch.autograd.set_detect_anomaly(False)",
        ),
        (
            torch.get_default_dtype() != torch.float32,
            f"New tensors are {dtype} by default",
            ("set_default_dtype", "set_default_tensor_type"),
            "torch.set_default_dtype(torch.float32)",
        ),
        (
            torch.get_default_device().type != "cpu",
            f"New tensors are on {torch.get_default_device()} by default",
            ("set_default_device",),
            "torch.set_default_device('cpu')",
        ),
        (
            torch.are_deterministic_algorithms_enabled(),
            "Only deterministic algorithms are allowed, which is slower and makes some ops fail",
            ("deterministic",),
            "torch.use_deterministic_algorithms(False)",
        ),
    )
    return [
        f"{what}{_since(history, *words)}. If that is not intended: `{how}`." for on, what, words, how in settings if on
    ]


def _since(history: CellHistory, *words: str) -> str:
    """ ", since In [4]" where a cell says it."""
    cells = list(history.mentioning(*words))
    return f", since In [{cells[-1].number}]" if cells else ""


def _shadows(names: Mapping[str, Any], history: CellHistory) -> list[str]:
    notes = []
    for name in sorted(SHADOWED & names.keys()):
        if names[name] is not getattr(builtins, name):
            notes.append(
                f"`{name}` is a variable of yours{_bound(name, history)}, so Python's own {name}() can't be called in "
                f"the notebook. `del {name}` restores it."
            )
    for name in MODULES:
        if (
            name in names
            and type(names[name]) is not type(sys)
            and any(b.how == "import" and name in (b.path,) for b in history.bindings(name))
        ):
            notes.append(f"`{name}` was imported, but is now a {type(names[name]).__name__}{_bound(name, history)}.")
    return notes


def _bound(name: str, history: CellHistory) -> str:
    bindings = [b for b in history.bindings(name) if b.how != "import"]
    return f" (In [{bindings[-1].number}])" if bindings else ""


def _files() -> list[str]:
    """Files beside the notebook that have the name of a package: `import` loads the file."""
    notes = []
    for name in PACKAGES:
        file = os.path.join(os.getcwd(), f"{name}.py")
        if os.path.isfile(file):
            notes.append(
                f"{name}.py is in the notebook's folder: `import {name}` loads this file and not the package. "
                "Rename it."
            )
    return notes


def cells_too_early(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[TooEarly]:
    """The last failure, if it was a missing name that a later cell has defined and the cell has not run again since."""
    if error is None or not issubclass(type(error), NameError) or issubclass(type(error), UnboundLocalError):
        return []
    missing = getattr(error, "name", None)
    failed = next(_cell_lines(error, history), None)
    if type(missing) is not str or failed is None:
        return []
    if missing not in names:
        return _deleted(missing, failed, history)
    later = [b for b in history.bindings(missing) if b.number > failed[0]]
    if not later:
        return []
    line = history.cells[failed[0]].place(failed[1]).text or ""
    if any(line in cell.raw for number, cell in history.cells.items() if number >= later[0].number):
        return []  # it ran again since
    return [TooEarly(missing, history.cells[failed[0]].place(failed[1]), history.place(later[0]))]


def _deleted(missing: str, failed: tuple[int, int], history: CellHistory) -> list[TooEarly]:
    """The same where a cell has deleted the name since it was defined."""
    before = [b for b in history.bindings(missing, "assign", "def", "class", "import", "for", "del") if b.at < failed]
    made = [b for b in before if b.how != "del"]
    if not made or before[-1].how != "del":
        return []
    places = [history.place(b) for b in (made[-1], before[-1])]
    return [TooEarly(missing, history.cells[failed[0]].place(failed[1]), *places)]


def _cell_lines(error: BaseException | None, history: CellHistory) -> Iterator[tuple[int, int]]:
    """(cell, line) of each line of a cell in an exception's traceback, outermost first."""
    for link in traceback_links(error):
        number = history.cell_of(link.tb_frame.f_code.co_filename)
        if number is not None:
            yield number, link.tb_lineno


def _statement(history: CellHistory, number: int, line: int) -> ast.stmt | None:
    """The smallest statement of a cell over a line."""
    inside = [n for s in history.cells[number].body for n in ast.walk(s) if isinstance(n, ast.stmt)]
    return min(
        (n for n in inside if n.lineno <= line <= (n.end_lineno or 0)),
        key=lambda n: (n.end_lineno or 0) - n.lineno,
        default=None,
    )


UNUSABLE = re.compile(
    r"object is not callable|has no attribute '(\w+)'|arg 2 must be a type|\(\) missing \d+ required|\(\) takes \d+ "
    r"positional|\(\) got an unexpected keyword"
)


def names_shadowed(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[Shadowed]:
    """The last failure, if its line uses a builtin, a function or a module of a name that a cell has given to another
    value since; else a cell that does so, and must have caught the failure itself."""
    message, lines = error_message(error), list(_cell_lines(error, history))
    if (match := UNUSABLE.search(message)) is not None:
        for number, line in reversed(lines):
            statement = _statement(history, number, line)
            for node in ast.walk(statement) if statement is not None else ():
                if isinstance(node, ast.Attribute) and node.attr != match[1]:
                    continue
                if found := _shadowed(node, names, history, max(lines)[0]):
                    return [dataclasses.replace(found, message=message, failed=history.cells[number].place(line))]
    return _imported_over(error, lines, names, history) if lines else _caught(names, history)


def _imported_over(
    error: BaseException | None, lines: list[tuple[int, int]], names: Mapping[str, Any], history: CellHistory
) -> list[Shadowed]:
    """The last failure, if its line calls a function of a library that an import has put in the place of Python's own
    of that name: numpy's `max` takes an axis."""
    at, ran, files = lines[-1], max(lines)[0], [link.tb_frame.f_code for link in traceback_links(error)]
    statement = _statement(history, *at)
    for node in ast.walk(statement) if statement is not None else ():
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        value = names.get(name) if name in SHADOWED else None
        package = str(getattr(value, "__module__", None) or "builtins").partition(".")[0]
        if value is None or package not in sys.modules or package in ("builtins", "__main__"):
            continue
        if history.cell_of(files[-1].co_filename) is None and name not in [code.co_name for code in files]:
            continue  # it failed in another call of the line
        for cell in [cell for cell in history.mentioning("import") if cell.number <= ran]:
            for one in [s for s in cell.statements if isinstance(s, ast.ImportFrom)]:
                if any(alias.asname == name or alias.name in ("*", name) for alias in one.names) and (
                    (one.module or "").partition(".")[0] == package
                ):
                    kind, failed = f"{package}.{name}", history.cells[at[0]].place(at[1])
                    return [Shadowed(name, "builtin", kind, "", error_message(error), cell.place(one.lineno), failed)]
    return []


def _caught(names: Mapping[str, Any], history: CellHistory) -> list[Shadowed]:
    """The same in a cell that raised nothing."""
    for name in [n for n in (*SHADOWED, *MODULES) if n in names and type(names[n]).__module__ in ("builtins", "torch")]:
        for cell in history.reaching(name):
            for root in history.reach(cell.number):
                own = {getattr(n, "arg", getattr(n, "id", "")) for n in ast.walk(root) if _binds(n)}
                for node in nodes([root] if name not in own else ()):
                    found = _shadowed(node, {name: names[name]}, history, cell.number)
                    if found and int(found.where.cell[4:-1]) < cell.number:  # type: ignore[index]
                        what = "caught there, as it raised nothing"
                        return [dataclasses.replace(found, message=what, failed=cell.place())]
    return []


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.arg) or isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _shadowed(node: ast.AST, names: Mapping[str, Any], history: CellHistory, ran: int) -> Shadowed | None:
    """What an expression of a cell that ran last as `ran` uses as what it no longer is."""
    name, attribute = _misused(node, names)
    made = [b for b in history.bindings(name) if b.number <= ran] if name else []
    if not made or made[-1].how in ("def", "class"):
        return None
    first = [b for b in made if b.how in ("import", "def", "class") and _origin(b) != _origin(made[-1])][-1:]
    meant = first[0].how if first else "builtin" if hasattr(builtins, name) and not attribute else ""
    others = [b for b in made if not first or b.at > first[0].at]  # the first since then
    if not meant or not first and "import" in {b.how for b in made}:
        return None
    kind = {"import": "module" if attribute else "import", "def": "function"}.get(meant, meant)
    imported = history.text(first[0]) if meant == "import" else ""
    return Shadowed(name, kind, type(names[name]).__name__, imported, "", history.place(others[0]))


def _origin(binding: CellBinding) -> str:
    """What an import binds a name to: "time" or "time.time"; of other statements "", with the place of a definition."""
    node = binding.node
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return f"{binding.at}" if binding.how in ("def", "class") else ""
    one = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == binding.path)
    return one.name if isinstance(node, ast.Import) else f"{node.module}.{one.name}"


def _misused(node: ast.AST, names: Mapping[str, Any]) -> tuple[str, str]:
    """The variable that an expression calls though it can't be called, or reads for an attribute that it lacks, with
    the attribute; of `isinstance` the class that is none."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
        lacks = inspect.getattr_static(names[node.value.id], node.attr, node) is node
        return (node.value.id, node.attr) if lacks else ("", "")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return "", ""
    if node.func.id in names:
        value = names[node.func.id]  # a class's name may have become that of its object: `Net = Net()`
        return (node.func.id, "") if not callable(value) or type(value).__name__ == node.func.id else ("", "")
    second = node.args[1] if node.func.id in ("isinstance", "issubclass") and len(node.args) > 1 else None
    value = names.get(second.id) if isinstance(second, ast.Name) else None
    unusable = value is not None and not isinstance(value, (type, tuple, UnionType))
    return (second.id, "") if unusable and isinstance(second, ast.Name) else ("", "")


SAME = frozenset(
    "to cuda cpu float double half long bool detach train eval compile requires_grad_ rename astype fillna clip clamp "
    "contiguous sort_values sort_index sorted drop_duplicates dropna copy clone".split()
)
"""Methods that change nothing when they are applied again."""
REFUSED = (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError, FileExistsError)
ONCE = re.compile(r"already|more than one|exists|twice")
"""Messages of what can be done once: a second `optimizer.add_param_group(…)`, `frame.insert(0, "id", …)`."""
"""What a second application raises: what it takes is gone, or is of another kind by now; RecursionError is one."""


def runs_twice(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[RunTwice]:
    """The last failure, if its statement consumes its own result (`table = table.drop(…)`, `y = table.pop("y")`) and
    ran before on the same variable; else a tensor or an array that a statement has divided a second time by what does
    not come from it (`x = x / 255`), if a call takes it after that."""
    if error is not None and issubclass(type(error), REFUSED):
        for number, line in reversed(list(_cell_lines(error, history))):
            if twice := _refused(number, line, error, names, history):
                return [dataclasses.replace(twice, error=type(error).__name__)]
    for number in reversed(history.cells):
        for statement in history.cells[number].body:
            if twice := _used_up(number, statement, names, history):
                return [twice]
            path = _spoiled(statement, names, history) or _rescaled(number, statement, names, history)
            wrapped = "" if path else _wrapped(number, statement, names, history)
            form = _form if wrapped else ast.unparse
            if (one := path or wrapped) and (twice := _run_before(history, number, statement, one, form)) is not None:
                return [twice]
    return []


def _used_up(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A loop over an iterator (`pairs = zip(x, y)`) through which a loop of an earlier cell has gone to its end."""
    path = dotted(statement.iter) if isinstance(statement, ast.For) else ""
    if not path or class_attribute(names.get(path), "__next__") is None:
        return None
    if any(isinstance(n, (ast.Break, ast.Return, ast.Yield)) for n in ast.walk(statement)):
        return None
    twice = _run_before(history, number, statement, path)
    return twice and dataclasses.replace(twice, statement=twice.statement.partition("\n")[0])


def _refused(
    number: int, line: int, error: BaseException, names: Mapping[str, Any], history: CellHistory
) -> RunTwice | None:
    """What of one line of a traceback had run before."""
    statement = _statement(history, number, line)
    if statement is not None and issubclass(type(error), RecursionError):
        return _calls_itself(statement, history)
    if statement is None or statement not in history.cells[number].statements:
        return None
    done = statement.value if isinstance(statement, ast.Expr) and ONCE.search(error_message(error)) else None
    once = [dotted(done.func).rpartition(".")[0]] if isinstance(done, ast.Call) else []
    for path in [*filter(None, once), *_consumed(statement)]:
        if root_of(path) in names and (twice := _run_before(history, number, statement, path)) is not None:
            return twice
    return _used_after(names, history, number, statement, f"{type(error).__name__}: {error_message(error)}")


def _calls_itself(statement: ast.stmt, history: CellHistory) -> RunTwice | None:
    """Where a failing line calls a function that was kept (`plain = net.forward`) before another took its place, in a
    cell that ran again: then the other was kept, which is the line's own."""
    called = {n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    for name in called:
        kept = [b for b in history.bindings(name, "assign") if dotted(b.value)]
        if len(kept) > 1 and any(kept[-2].at < b.at < kept[-1].at for b in history.bindings(dotted(kept[-1].value))):
            first, last = kept[0], kept[-1]
            text, places = history.text(last), (history.place(last), history.place(first))
            return RunTwice(name, text, len(kept), where=places[0], first=places[1])
    return None


def _form(node: ast.AST) -> str:
    """A statement without its numbers and texts."""
    return re.sub(r"Constant\(value=[^()]*\)", "Constant()", ast.dump(node))


def _wrapped(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The variable that a statement gives to a function or a class of which it becomes the result (`model =
    Adapter(model)`), where it holds another of its own kind by now."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    call = statement.value if isinstance(statement, ast.Assign) else None
    path = dotted(target)
    if not isinstance(call, ast.Call) or not path or path not in [dotted(argument) for argument in call.args]:
        return ""
    root, *inside = path.split(".")
    thing = names.get(root)
    for part in inside:
        thing = members(thing).get(part)
    if thing is None or history.bindings(path)[-1].number != number:
        return ""
    if type(thing) is FunctionType:
        codes = [getattr(part, "__code__", None) for part in closure_variables(thing).values()]
        return path if thing.__code__ in codes else ""
    kind = type(thing)
    return path if any(type(part) is kind for part in members(thing).values()) and hasattr(kind, "__dict__") else ""


MOVES = frozenset("unsqueeze permute transpose swapaxes expand_dims one_hot pad repeat merge join".split())
"""Functions that give another shape, or other columns, when they are applied again."""
MISFIT = re.compile(r"shape|size|dim|channel|out of|range|bound|KeyError", re.IGNORECASE)


def _used_after(
    names: Mapping[str, Any], history: CellHistory, number: int, statement: ast.stmt, message: str
) -> RunTwice | None:
    """The array that a failing line takes, if what its shape or its numbers come from ran a second time on it."""
    for name in names_in(statement) if MISFIT.search(message) else ():
        last = max((b for b in history.bindings(name) if b.number <= number), key=lambda b: b.at, default=None)
        if last is None or not _is_array(names.get(name)) or last.node not in history.cells[last.number].body:
            continue
        value = last.value
        moved = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in MOVES
        shifted = isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
        own = name in names_in(value) or isinstance(last.node, ast.AugAssign)
        if own and (moved or shifted) and (twice := _run_before(history, last.number, last.node, name)) is not None:
            return twice
    return None


def _rescaled(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The array that a statement divides, as the last of those that bind it, if a call takes it after that."""
    return next(
        (
            last.path
            for last in history.cells[number].bindings
            if last.node is statement
            and _rescales(last)
            and last is history.bindings(last.path)[-1]
            and _is_array(names.get(last.path))
            and first_training_use(history, last.path, last.at) is not None
        ),
        "",
    )


def _spoiled(statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The variable on which one statement ran again, as it shows: a column computed from itself (`table["y"] =
    table["y"].map(…)`) has no value left, a list of steps ends with one of the same kind twice, a list of names that a
    cell counts has one of them twice; "" of all others."""
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Subscript):
        path, key = dotted(target.value), getattr(target.slice, "value", None)
        table: Any = names.get(path)
        if type(table).__module__.startswith("pandas") and ast.unparse(statement.value).startswith(
            f"{ast.unparse(target)}.map("
        ):
            return path if key in table.columns and len(table) and table[key].isna().to_numpy().all() else ""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
        return ""
    path = dotted(call.func.value)
    items = names.get(path)
    if type(items) is list and len(items) > 2 and all(type(one) is str for one in items):
        twice = items[-1] in items[:-1] and len(set(items)) == len(items) - 1
        return path if twice and _counted(path, history) else ""
    if type(items) is not list or not all(
        callable(one) and not issubclass(type(one), torch.nn.Module) for one in items
    ):
        return ""
    kinds = [getattr(one, "__qualname__", type(one)) for one in items]
    return path if kinds[-1:] and kinds[-1] in kinds[:-1] else ""


def _counted(path: str, history: CellHistory) -> bool:
    """Whether a cell asks how many items a list has."""
    calls = (n for cell in history.reaching(root_of(path)) for n in nodes(cell.statements) if isinstance(n, ast.Call))
    return any(dotted(n.func) in ("len", "enumerate") and path in map(dotted, n.args) for n in calls)


def _run_before(
    history: CellHistory, number: int, statement: ast.stmt, path: str, form: Callable[[ast.AST], str] = ast.unparse
) -> RunTwice | None:
    """Where the statement has run in an earlier cell, since the variable was last made anew. form: of two statements
    that are the same."""
    at, text = (number, statement.lineno), form(statement)
    made = [
        b
        for b in history.bindings(path)
        if b.at < at and path not in names_in(b.value) and not isinstance(b.node, ast.AugAssign)
    ]
    fresh = max(made, key=lambda b: b.at, default=None)
    since = fresh.at if fresh is not None else (0, 0)
    before = [
        (cell.number, one.lineno)
        for cell in history.mentioning(root_of(path))
        if cell.number < number
        for one in cell.statements
        if (cell.number, one.lineno) > since and form(one) == text
    ]
    if not before:
        return None
    return RunTwice(
        path,
        history.text_of(number, statement),
        1 + len(before),
        "",
        history.text(fresh) if fresh is not None else "",
        history.cells[number].place(statement.lineno),
        history.cells[before[0][0]].place(before[0][1]),
        history.place(fresh) if fresh is not None else NOWHERE,
    )


def _rescales(binding: CellBinding) -> bool:
    """`x = x / 255`, `x = (x - mean) / std`, `x /= 255`: once more is another value. `x = x / x.max()` is not."""
    node, path = binding.node, binding.path
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Div) and path not in names_in(node.value)
    value = binding.value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Div) or path in names_in(value.right):
        return False
    left = value.left
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and path not in names_in(left.right):
        left = left.left
    return dotted(left) == path


def _consumed(statement: ast.stmt) -> Iterator[str]:
    """The variables that a statement computes from themselves, or takes something out of."""
    for path, how, _, value in bound(statement):
        last = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if how == "assign" and root_of(path) in names_in(value) and last not in SAME:
            yield path
    if isinstance(statement, ast.AugAssign) and dotted(statement.target):
        yield dotted(statement.target)
    if isinstance(statement, ast.Delete):
        yield from (dotted(t.value) for t in statement.targets if isinstance(t, ast.Subscript) and dotted(t.value))
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and dotted(node.func.value):
            inplace = any(k.arg == "inplace" and getattr(k.value, "value", None) is True for k in node.keywords)
            if inplace or node.func.attr in ("pop", "remove", "popitem"):
                yield dotted(node.func.value)


def applied_twice(names: Mapping[str, Any], history: CellHistory, named: Container[str]) -> list[str]:
    """Notes on cells that ran more than once and compute a tensor or an array from itself: `x = x - 1`. named: the
    variables of which a finding tells it."""
    runs: dict[str, list[int]] = {}
    for number, cell in history.cells.items():
        runs.setdefault(cell.source.strip(), []).append(number)
    notes = []
    for numbers in runs.values():
        for last in history.cells[numbers[-1]].bindings if len(numbers) > 1 else ():
            value = last.value
            if (
                last.node in history.cells[last.number].body
                and isinstance(value, ast.BinOp)
                and isinstance(value.op, (ast.Div, ast.Sub, ast.Mult))
                and last.path in names_in(value)
                and last.path not in named
                and _is_array(names.get(last.path))
                and last is history.bindings(last.path)[-1]
                and not [b for b in history.bindings(last.path) if numbers[-2] < b.number < numbers[-1]]
            ):
                cells = " and ".join(f"In [{number}]" for number in numbers[-2:])
                notes.append(
                    f"`{history.text(last)}` ran in {cells}: it computes `{last.path}` from itself, so it has been "
                    f"applied {len(numbers)} times. If once was intended, give the result another name."
                )
    return notes


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] in ("torch", "numpy", "pandas") and kind.__name__ in (
        "Tensor",
        "ndarray",
        "DataFrame",
    )
