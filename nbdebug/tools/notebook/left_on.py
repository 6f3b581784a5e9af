"""What earlier cells left: duplicate hooks, eval mode, switches of torch, a learning rate, shadowed names; and cells
that ran too early. Each with the cell that did it.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, UnionType
from typing import Any

import torch

from nbdebug.observe.duplicate_hooks import DuplicateHook, find_duplicate_hooks
from nbdebug.observe.variables import attributes, class_attribute, is_user_module, last_error
from nbdebug.report import Where
from nbdebug.text import listed, module_name
from nbdebug.tools.notebook.cells import (
    DEFINED,
    FUNCTIONS,
    CellBinding,
    CellHistory,
    arguments_of,
    cell_lines,
    dotted,
    error_message,
    keeps_object,
    names_in,
    nodes,
    number_of,
    read_by,
    root_of,
    running,
    takes,
    traceback_links,
)
from nbdebug.tools.notebook.rules import NOWHERE, Told, named, told
from nbdebug.tools.notebook.stale_objects import (
    ModelsAndOptimizers,
    is_module,
    modules_of,
    optimizer_tensors,
    parameters_of,
)

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
LOOKS = ("no_grad", "inference_mode", "argmax", "detach", "item", "tolist", "numpy", "softmax", "sigmoid")
"""Words of a cell that takes what a model gives as numbers."""
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


def hooks_registered_twice(objects: list[tuple[str, Any]], history: CellHistory) -> list[Told]:
    """The hook function that most modules have more than once, with all of them; of the others that there are such."""
    groups: dict[tuple[str, str, str], list[DuplicateHook]] = {}
    for one in find_duplicate_hooks(objects):
        groups.setdefault((one.hook, one.word, one.code.co_filename), []).append(one)
    told = sorted((_duplicate(group, history) for group in groups.values()), key=lambda one: -len(one.names))
    same = ((f"the same holds for {one.title.partition(' is registered')[0]}", one.where) for one in told[1:])
    return [dataclasses.replace(told[0], links=(*told[0].links, *same))] if told else []


def _duplicate(group: list[DuplicateHook], history: CellHistory) -> Told:
    first, owners = group[0], tuple(dict.fromkeys(one.module for one in group))
    number, root = max(len(one.older) for one in group) + 1, owners[0].partition(".")[0]
    cells, method = _registrations(first, number, history)
    places = [_place(history, number, method) for number in cells]
    where = places[1] if len(places) > 1 else places[0] if places else _source(first.code, history)
    before, times = places[0] if len(places) > 1 else NOWHERE, "twice" if number == 2 else f"{number} times"
    on = listed(owners) if len(owners) > 1 or owners[0] != root else f"`{root}`"
    title = (
        f"The {first.word} `{first.hook}` is registered {times} on {on}: {named(where)} called {method} again, and "
        f"nothing removed the hook of {named(before, 'the earlier run')}"
    )
    code = (
        "for handle in handles:  # of the earlier run\n    handle.remove()\n"
        f"handles = [{root}.{method}({first.hook if first.hook.isidentifier() else 'hook'})]"
    )
    fixes = (
        ("Remove the duplicate hooks; the newest ones stay.", "%free hooks"),
        ("In the cell, remove the old hooks before it registers new ones.", code),
    )
    links = ((f"{named(before)} registered it first", before),)
    return Told("notebook/hooks-registered-twice", title, (*owners, root, method), where, fixes, links)


def _registrations(one: DuplicateHook, times: int, history: CellHistory) -> tuple[list[int], str]:
    """The cells that registered the hook, oldest first, and the method that they called."""
    methods = METHODS.get(one.word, ("register",))
    calling = _calls(history, methods)
    in_file = {} if calling else _calls(history, (_maker(one.newest),))
    if in_file:  # a function of a file registers it
        return list(in_file)[-times:], methods[0]
    defining = [n for hook in (*[h for _, _, h in one.older], one.newest) for n in [history.cell_of(_code(hook))] if n]
    naming = [n for n, calls in calling.items() if any(one.hook in _argument_names(call) for call in calls)]
    method = next((_method(call) for calls in calling.values() for call in calls), methods[0])
    if len(set(defining)) == times:  # each run of the cell has defined a function of its own
        return sorted(defining), method
    for cells in (naming, [n for n in calling if defining and n in history.same(defining[-1])], list(calling)):
        if len(cells) >= min(2, times):
            return cells[-times:], _method(calling[cells[-1]][0])
    return list(calling)[-1:], method


def _calls(history: CellHistory, names: Sequence[str]) -> dict[int, list[ast.Call]]:
    """The calls of functions or methods of these names that each cell runs."""
    ran = {cell.number: nodes(history.reach(cell.number)) for cell in history.reaching(*names)}
    calls = {number: [n for n in of if isinstance(n, ast.Call) and _method(n) in names] for number, of in ran.items()}
    return {number: of for number, of in calls.items() if of}


def _maker(hook: Any) -> str:
    """The function around the hook's own."""
    function = getattr(_function(hook), "__qualname__", "")
    return function.partition(".<locals>")[0].rpartition(".")[2]


def _argument_names(call: ast.Call) -> set[str]:
    """The names in the arguments of a call, those of attributes (`self.save`) as well."""
    values = arguments_of(call)
    attrs = {n.attr for value in values for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    return attrs.union(*(names_in(value) for value in values)) if values else attrs


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _function(hook: Any) -> Any:
    hook = getattr(hook, "func", hook)  # of a functools.partial
    return hook.__func__ if type(hook) is MethodType else hook


def _code(hook: Any) -> str:
    function = _function(hook)
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


def modes_left_on(
    names: Mapping[str, Any],
    owners: ModelsAndOptimizers,
    history: CellHistory,
    error: BaseException | None,
    whole: bool,
) -> list[Told]:
    """The modes that a training cell or the last exception shows. whole: with those of which the errors tell, too."""
    modes = [one for name, _ in eval_models(owners) if whole and (one := _eval(root_of(name), history)) is not None]
    message = error_message(error)
    shown = {
        "grad": whole and "does not require grad" in message,
        "dtype": whole and any(word in message for word in ("dtype", "Double", "Half")),
        "device": whole and "device" in message,
        "exact": "deterministic" in message,
    }
    left = [kind for kind, so in shown.items() if so and switches()[kind][0]]
    modes += [one for kind in left for one in _setting(kind, names, error, history)]
    if issubclass(type(error), (FloatingPointError, Warning)):
        modes += _setting("strict", names, error, history, value="raise|error")
    return modes or _changed(dict(owners.top), error, history)


DTYPES, STRICT = "set_default_dtype set_default_tensor_type", "seterr simplefilter filterwarnings"
"""Functions that set another dtype for new tensors; that make errors of warnings, with 'raise' or 'error'."""
CHANGES = {
    "dtype": (re.compile(r"dtype|Half|Double|BFloat16"), "half bfloat16 double float to type".split()),
    "attached": (re.compile(r"on Tensor that requires grad"), ["requires_grad_"]),
    "grad": (re.compile(r"does not require grad"), "requires_grad_ detach_ register_forward_hook".split()),
    "device": (re.compile(r"device|CUDA"), "to cuda cpu".split()),
}
"""Messages, and the methods that change an object so that it fails with them: of a module in place, of a tensor those
that end with `_`, and those whose result takes the tensor's name."""


def _changed(models: dict[str, Any], error: BaseException | None, history: CellHistory) -> list[Told]:
    """What a cell called on an object of the failing line, or of what that was computed from, where an earlier run of
    the line was well. models: the variables that are modules."""
    message, lines = error_message(error), list(cell_lines(error, history))
    kind = next((kind for kind, (said, _) in CHANGES.items() if said.search(message)), "")
    failed = history.cells[lines[0][0]].statement(lines[0][1]) if kind and lines else None
    if failed is None:
        return []
    at, text = lines[0][0], ast.unparse(failed)
    cells = [cell for cell in history.cells.values() if cell.number < at]
    before = max((c.number for c in cells if any(ast.unparse(s) == text for s in c.statements)), default=at)
    read = {name for number, line in lines for name in names_in(history.cells[number].statement(line))}
    sources = {name for one in read for name, _ in history.origins(one, lines[0])}
    for at_cell in [one for one in reversed(cells) if one.number > before]:
        bound = {b.path for b in at_cell.bindings}
        for node in nodes(at_cell.statements):
            call = node.func if isinstance(node, ast.Call) else None
            if not isinstance(call, ast.Attribute) or call.attr not in CHANGES[kind][1]:
                continue
            of, hook = root_of(ast.unparse(call.value)), call.attr == "register_forward_hook"
            hooked = hook and of in models and _replaces_output(node, models[of], history)  # type: ignore[arg-type]
            if (
                hooked
                and of in sources
                or not hook
                and of in read
                and (of in {*models, *bound} or call.attr.endswith("_"))
            ):
                after = history.cells[at].place(lines[0][1])
                return [_changed_itself(kind, ast.unparse(node), at_cell.place_of(node), after, message)]
    return []


def _replaces_output(call: ast.Call, model: Any, history: CellHistory) -> bool:
    """Whether a hook that is still there gives a module another output."""
    given = {dotted(value) for value in call.args}
    made = [f for cell in history.cells.values() for name in given for f in cell.functions.get(name, ())]
    returns = any(isinstance(n, ast.Return) and n.value is not None for f in made for n in ast.walk(f))
    return returns and any(attributes(part).get("_forward_hooks") for _, part in modules_of(model))


def _eval(name: str, history: CellHistory) -> Told | None:
    """The cell that called eval() after a training, where a later run of that cell, or after a look at the model (no
    gradients) another cell, went on training it and no cell called train() since."""
    calls = {cell.number: history.methods(cell.number) for cell in history.reaching(name)}
    switched = [n for n, methods in calls.items() if "eval" in methods and not {"step", "train"} & methods]
    looks = {cell.number for cell in history.reaching("no_grad", "inference_mode")}
    training = [n for n, methods in calls.items() if {"step", "backward"} <= methods]
    last = after = 0
    for after in [n for n in training if training[0] < n and "train" not in calls[n]]:
        last = max((n for n in switched if training[0] < n < after and _switches(name, n, history)), default=0)
        given = (n for n in nodes(history.reach(after)) if isinstance(n, ast.Call))
        called = any(name in map(dotted, (n.func, *arguments_of(n))) for n in given)  # and not a part of it alone
        back = any("train" in methods for n, methods in calls.items() if last < n < after)
        if last and not back and (history.same(after)[0] < last or called and last in looks):
            break
    else:
        return None
    calls_eval = (n for n in nodes(history.cells[last].statements) if isinstance(n, ast.Call))
    call = next((n for n in calls_eval if dotted(n.func) == f"{name}.eval"), ast.Pass())
    where, trains = history.cells[last].place_of(call), history.cells[after].place()
    title = (
        f"`{name}` has been training in eval mode since {named(where)}: that cell called eval(), and {named(trains)} "
        "went on training without train()"
    )
    fixes = (("Switch back before you train, ideally at the top of the loop.", f"{name}.train()"),)
    links = ((f"{named(trains)} trains it again", trains),)
    return Told("training/eval-mode-in-training", title, (name,), where, fixes, links)


def loaded_in_train_mode(owners: ModelsAndOptimizers, history: CellHistory) -> list[Told]:
    """A model whose weights were loaded, and which predicts in train mode since then: no cell calls eval(), or train(),
    and none trains it."""
    for name, model in owners.whole:
        parts = [(path, p) for path, p in modules_of(model, name) if type(p).__name__.startswith(ACTING)]
        acting = [path for path, p in parts if attributes(p).get("training") and attributes(p).get("p", 1)]
        loads = [(c, n) for c in history.mentioning("load_state_dict") for n in nodes(c.statements) if acting]
        loads = [(c, n) for c, n in loads if isinstance(n, ast.Call) and dotted(n.func) == f"{name}.load_state_dict"]
        if not loads:
            continue
        cell, load = loads[-1]
        cells = [one for one in history.reaching(name) if one.number >= cell.number]
        methods = set().union(*(history.methods(one.number) for one in cells))
        if {"backward", "train"} & methods or any(_switches(name, one.number, history) for one in cells):
            continue
        looks = {one.number for one in history.reaching(*LOOKS)}
        calls = [(one, n) for one in cells for n in nodes(history.reach(one.number)) if isinstance(n, ast.Call)]
        used = [one.place_of(n) for one, n in calls if one.number in looks and name in map(dotted, (n.func, *n.args))]
        if used:
            title = (
                f"`{name}` predicts in train mode in {named(used[0])}: loading its weights does not change the mode, "
                f"and {listed(acting, 3)} act{'s' * (len(acting) == 1)} on each batch anew"
            )
            fix = ("Switch it after the loading.", f"{name}.eval()")
            return [told("training/train-mode-in-eval", title, (name, "eval"), fix, cell.place_of(load), used[0])]
    return []


def _switches(name: str, number: int, history: CellHistory) -> bool:
    """Whether a cell calls eval() of this model, or a function that does so of what it is given."""
    roots = history.reach(number)
    own = {ast.unparse(n) for root in roots if not isinstance(root, FUNCTIONS) for n in _functions_called([root])}
    inner = (n for root in roots if isinstance(root, FUNCTIONS) for n in _functions_called([root]))
    return f"{name}.eval" in own or any(getattr(of, "attr", "") == "eval" for of in inner)


def _functions_called(reached: Iterable[ast.AST]) -> list[ast.expr]:
    return [n.func for n in nodes(reached) if isinstance(n, ast.Call)]


def _setting(
    kind: str, names: Mapping[str, Any], error: BaseException | None, history: CellHistory, value: str = ""
) -> list[Told]:
    """The last call of one of a switch's words, with `value` among its arguments, and the line that failed with it."""
    _, what, words, back, code, effect = switches()[kind]
    number, at = next(cell_lines(error, history), (0, 0))
    taken = names_in(failed.statement(at)) if (failed := history.cells.get(number)) is not None else set()
    held = {name: made for name in sorted(taken) if (made := _made_of(names.get(name), kind))}
    if len({*held.values()}) > 1:
        effect = ", ".join(f"`{name}` is {made}" for name, made in held.items())
    for one in reversed(history.reaching(*words.split())):
        for node in nodes(history.reach(one.number)):
            called = isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in words.split()
            if called and re.search(value, " ".join(map(ast.unparse, arguments_of(node)))):  # type: ignore[arg-type]
                name, where = ast.unparse(node), one.place_of(node)
                title = f"{what} since {named(where)} called `{name}`: {effect}"
                back = back or ("np.seterr(all='warn')" if "seterr" in name else "warnings.simplefilter('default')")
                fix = ("Set it back, and where it is needed, set it for a block only.", back)
                line = where if failed is None else failed.place(at)
                links = ((f"{named(line)} failed because of it: {error_message(error)}", line),)
                return [Told(code, title, (name, *held), where, (fix,), links)]
    return []


def _made_of(value: Any, kind: str) -> str:
    """The device, or the floating dtype, of a tensor or of a module's first weight; "" for all others."""
    tensor: Any = next((p for _, p in parameters_of(value)), None) if is_module(value) else value
    if not issubclass(type(tensor), torch.Tensor) or kind not in ("device", "dtype"):
        return ""
    return str(tensor.device) if kind == "device" else str(tensor.dtype).partition(".")[2] * tensor.is_floating_point()


CHANGED = {
    "dtype": ("error/dtype-mismatch", "it has had another dtype since then"),
    "device": ("error/device-mismatch", "it has been on another device since then"),
    "grad": ("error/no-grad-path", "no gradient has reached it since then"),
    "attached": ("error/attached-to-graph", "its gradients have been recorded since then"),
}
"""kind → the code, what has become of one object."""


def _changed_itself(kind: str, name: str, where: Where, failed: Where, message: str) -> Told:
    """name: the call that changed an object, so that a later line failed."""
    code, says = CHANGED[kind]
    title = f"`{name}` in {named(where)} has changed the object itself, and no copy: {says}"
    owner, _, call = name.partition(".")
    fix = ("Make the object again, and call it on a copy there.", f"import copy\ncopy.deepcopy({owner}).{call}")
    if "_hook(" in call:
        fix = ("Keep the handle, and remove the hook there.", f"handle = {name}\nhandle.remove()")
    return Told(code, title, (name,), where, (fix,), ((f"{named(failed)} failed because of it: {message}", failed),))


def left_on_notes(names: Mapping[str, Any], owners: ModelsAndOptimizers, history: CellHistory) -> list[str]:
    """Sentences about settings and names that may be left on by accident."""
    evals = [
        f"`{name}` is in eval mode: dropout is off and batch statistics are not updated. Call `{name}.train()` before "
        "you train it."
        for name, _ in eval_models(owners)
    ]
    return [*evals, *_settings(history), *_shadows(names, history), *_files()]


def switches() -> dict[str, tuple[bool, str, str, str, str, str]]:
    """By name: whether it is on, what is so, the functions that set it, what sets it back; and where an error shows it,
    the code and the effect."""
    dtype, device = str(torch.get_default_dtype()).removeprefix("torch."), torch.get_default_device()
    grad, set_back = torch.is_grad_enabled() or torch.is_inference_mode_enabled(), "torch.set_default"
    autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    end, apart = "call its __exit__, or restart the kernel", "tensors made before it and after it can't be combined"
    slow, left = "Autograd's anomaly mode is on, and makes each step several times slower", "notebook/setting-left-on"
    grads, exactly = "set_grad_enabled no_grad inference_mode", "torch.use_deterministic_algorithms(False)"
    off, lost = "Gradients are off for the whole session", "results computed since then have no graph for backward"
    fails, exact = "Only deterministic algorithms are allowed", torch.are_deterministic_algorithms_enabled()
    types, placed = f"New tensors are {dtype} by default", f"New tensors are on {device} by default"
    inference, anomaly = torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    return {
        "grad": (not grad, off, grads, "torch.set_grad_enabled(True)", "error/no-grad-path", lost),
        "inference": (inference, "Inference mode is on for the whole session", "inference_mode", end, left, lost),
        "autocast": (autocast, "Autocast is on for the whole session", "autocast", end, left, ""),
        "anomaly": (anomaly, slow, "set_detect_anomaly", "torch.autograd.set_detect_anomaly(False)", left, ""),
        "dtype": (dtype != "float32", types, DTYPES, f"{set_back}_dtype(torch.float32)", "error/dtype-mismatch", apart),
        "device": (
            device.type != "cpu",
            placed,
            "set_default_device",
            f"{set_back}_device('cpu')",
            "error/device-mismatch",
            apart,
        ),
        "exact": (exact, fails, "use_deterministic_algorithms", exactly, left, "some ops fail, and others are slower"),
        "strict": (False, "What was a warning is an error", STRICT, "", left, "it holds for all cells"),
    }


def _settings(history: CellHistory) -> list[str]:
    told = ((what, _since(history, *words.split()), back) for on, what, words, back, *_ in switches().values() if on)
    return [f"{what}{since}. If that is not intended: `{back}`." for what, since, back in told]


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


def cells_too_early(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[Told]:
    """The last failure, if it was a missing name that a later cell has defined, and the cell has not run again since;
    or one that a cell has deleted since it was defined."""
    if error is None or not issubclass(type(error), NameError) or issubclass(type(error), UnboundLocalError):
        return []
    missing, failed = getattr(error, "name", None), next(cell_lines(error, history), None)
    if type(missing) is not str or failed is None:
        return []
    code, where = "notebook/cells-out-of-order", history.cells[failed[0]].place(failed[1])
    every = history.bindings(missing, "assign", "def", "class", "import", "for", "del")
    before = [b for b in every if b.at < failed]
    made = [history.place(b) for b in before if b.how != "del"][-1:]
    between = range((number_of(made[0]) or 0) + 1 if made else failed[0], failed[0])
    cleared = [c.place() for n, c in history.cells.items() if n in between and re.match(r"\s*%reset\b", c.raw)]
    if missing not in names and made and (cleared or before[-1].how == "del"):
        deleted = cleared[-1] if cleared else history.place(before[-1])
        title = f"{named(where)} needs `{missing}`, which {named(deleted)} has deleted"
        fix = (f"Run {named(made[0])} again, and delete `{missing}` below its last use.", made[0].text or missing)
        links = ((f"{named(made[0])} made `{missing}`", made[0]), (f"{named(where)} needs it", where))
        return [Told(code, title, (missing,), deleted, (fix,), links)]
    later = [b for b in every if b.number > failed[0] and b.how != "del"] if missing in names else []
    if not later or any((where.text or "") in cell.raw for n, cell in history.cells.items() if n >= later[0].number):
        return []  # it ran again since
    defined = history.place(later[0])
    title = (
        f"{named(where)} needs `{missing}`, which {named(defined)} defined only later: run {named(where)} again, and "
        "move it below"
    )
    fix = (f"Move the cell that defines `{missing}` up, then run the other one again.", defined.text or missing)
    return [Told(code, title, (missing,), where, (fix,), ((f"{named(defined)} defines `{missing}`", defined),))]


UNUSABLE = re.compile(
    r"object is not callable|has no attribute '(\w+)'|arg 2 must be a type|\(\) missing \d+ required|\(\) takes \d+ "
    r"positional|\(\) got an unexpected keyword"
)


def names_shadowed(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[Told]:
    """The last failure, if its line uses a builtin, a function or a module of a name that a cell has given to another
    value since; else a cell that does so, and must have caught the failure itself."""
    message, lines = error_message(error), list(cell_lines(error, history))
    if (match := UNUSABLE.search(message)) is not None:
        for number, line in reversed(lines):
            statement = history.cells[number].statement(line)
            if found := _overwritten(statement, names, history) or _defined_anew(statement, message, history):
                return [_failed(found, message, history.cells[number].place(line))]
            for node in ast.walk(statement) if statement is not None else ():
                if isinstance(node, ast.Attribute) and node.attr != match[1]:
                    continue
                if found := _shadowed(node, names, history, max(lines)[0]):
                    return [_failed(found, message, history.cells[number].place(line))]
    return _imported_over(error, lines, names, history) if lines else _caught(names, history)


def _overwritten(statement: ast.stmt | None, names: Mapping[str, Any], history: CellHistory) -> Told | None:
    """The method of an object of the failing line that a cell has given a value: `optimizer.step = 3`."""
    for name in sorted(names_in(statement) & names.keys()):
        for key, value in attributes(names[name]).items():
            made = () if callable(value) else history.bindings(f"{name}.{key}")
            if made and type(class_attribute(names[name], key)) is FunctionType:
                return _taken(f"{name}.{key}", "the method", type(value).__name__, history.place(made[-1]))
    return None


def _defined_anew(statement: ast.stmt | None, message: str, history: CellHistory) -> Told | None:
    """The function that the failing line calls as it was before a cell defined another of its name."""
    match = re.match(r"(\w+)\(\) (?:missing|takes|got an unexpected)", message)
    made = history.bindings(match[1], "def") if match is not None else []
    for call in ast.walk(statement) if statement is not None and len(made) > 1 else ():
        if (
            isinstance(call, ast.Call)
            and dotted(call.func) == made[-1].path
            and any(takes(b.node, call) for b in made[:-1])
        ):
            return _taken(made[-1].path, "the function", "another function", history.place(made[-1]))
    return None


def _imported_over(
    error: BaseException | None, lines: list[tuple[int, int]], names: Mapping[str, Any], history: CellHistory
) -> list[Told]:
    """The last failure, if its line calls a function of a library that an import has put in the place of Python's own
    of that name: numpy's `max` takes an axis."""
    at, ran, files = lines[-1], max(lines)[0], [link.tb_frame.f_code for link in traceback_links(error)]
    statement = history.cells[at[0]].statement(at[1])
    for node in ast.walk(statement) if statement is not None else ():
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        value = names.get(name) if name in SHADOWED else None
        package = str(getattr(value, "__module__", None) or "builtins").partition(".")[0]
        if value is None or package not in sys.modules or package in ("builtins", "__main__"):
            continue
        if history.cell_of(files[-1].co_filename) is None and name not in [code.co_name for code in files]:
            continue  # it failed in another call of the line
        for at_cell in [one for one in history.mentioning("import") if one.number <= ran]:
            for one in [s for s in at_cell.statements if isinstance(s, ast.ImportFrom)]:
                if any(alias.asname == name or alias.name in ("*", name) for alias in one.names) and (
                    (one.module or "").partition(".")[0] == package
                ):
                    kind, failed = f"{package}.{name}", history.cells[at[0]].place(at[1])
                    return [
                        _failed(_taken(name, BUILTIN, kind, at_cell.place(one.lineno)), error_message(error), failed)
                    ]
    return []


def _caught(names: Mapping[str, Any], history: CellHistory) -> list[Told]:
    """The same in a cell that raised nothing."""
    for name in [
        n for n in (*SHADOWED, *MODULES) if n in names and module_name(type(names[n])) in ("builtins", "torch")
    ]:
        for cell in history.reaching(name):
            for root in history.reach(cell.number):
                own = {getattr(n, "arg", getattr(n, "id", "")) for n in ast.walk(root) if _binds(n)}
                for node in nodes([root] if name not in own else ()):
                    found = _shadowed(node, {name: names[name]}, history, cell.number)
                    if found and (number_of(found.where) or 0) < cell.number:
                        return [_failed(found, "caught there, as it raised nothing", cell.place())]
    return []


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.arg) or isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _shadowed(node: ast.AST, names: Mapping[str, Any], history: CellHistory, ran: int) -> Told | None:
    """What an expression of a cell that ran last as `ran` uses as what it no longer is."""
    name, attribute = _misused(node, names)
    made = [b for b in history.bindings(name) if b.number <= ran] if name else []
    if not made or made[-1].how in ("def", "class"):
        return None
    first = [b for b in made if b.how in ("import", "def", "class") and _origin(b) != _origin(made[-1])][-1:]
    first = first or [b for b in made[:-1] if not attribute and b.how == "assign" and b.made_of][-1:]
    meant = first[0].how if first else "builtin" if hasattr(builtins, name) and not attribute else ""
    others = [b for b in made if not first or b.at > first[0].at]  # the first since then
    if not meant or not first and "import" in {b.how for b in made}:
        return None
    says = {"import": "the module" if attribute else "what was imported", "def": "the function", "builtin": BUILTIN}
    says["assign"] = f"the {first[0].made_of}" if first else ""
    imported = history.text(first[0]) if meant == "import" else ""
    kind = type(names[name]).__name__
    return _taken(name, says.get(meant, f"the {meant}"), kind, history.place(others[0]), imported)


BUILTIN = "Python's own function"


def _taken(name: str, meant: str, kind: str, where: Where, imported: str = "") -> Told:
    """A name that no longer stands for what its line means. kind: the class of the value that it has now; imported: the
    import that gets it back; where: the cell that gave it this value."""
    title = f"`{name}` is no longer {meant} of this name: {named(where)} gave the name to another value (now: {kind})"
    code = f"del {name}" if meant in (BUILTIN, "the method") else f"# run the cell with `{name}` again"
    other = (f"Give the variable of {named(where)} another name, so that it stays.", f"{name}_value = …")
    fixes = (("Get it back.", imported or code), other)
    links = ((f"{named(where)} gives `{name}` another value", where),)
    return Told("notebook/name-shadowed", title, (name,), where, fixes, links)


def _failed(one: Told, message: str, failed: Where) -> Told:
    says = f"{named(failed)} uses `{one.names[0]}`: {message}"
    return dataclasses.replace(
        one, title=f"{one.title}, and {named(failed)} uses it", links=(*one.links, (says, failed))
    )


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


EVERY = re.compile(r"\(?(\w+)(?: \+ (\d+))?\)? % ([\w.]+) == (0|\3 - 1)")
"""`(i + 1) % every == 0`: a step after every few batches."""
CUT = 0.1
"""The share of an epoch's batches that must be left over; a few at its end are usual, as with `drop_last`."""


def windows_cut(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """A loop that steps after every few batches, whose number is no multiple of that: the gradients of those at the end
    are cleared by the next epoch, or added to its first window."""
    runs = list(history.training(0, 1 + max(history.cells, default=0)))
    for cell in [history.cells[number] for number in runs]:
        for function in (None, *(root for root in history.reach(cell.number) if isinstance(root, FUNCTIONS))):
            inside = [s for s in running(function.body if function else cell.body) if not isinstance(s, DEFINED)]
            called = [n for n in nodes(cell.statements) if isinstance(n, ast.Call) and function is not None]
            called = [n for n in called if dotted(n.func) == _name(function)]
            loops = [s for s in [*inside, *cell.statements] if isinstance(s, (ast.For, ast.While))]
            for loop, window in [
                (a, b) for a in inside if isinstance(a, ast.For) for b in a.body if isinstance(b, ast.If)
            ]:
                rounds, every, left = _left_over(loop, window, function, called, names)
                steps = _calls_of(running([window]), "step")
                if not steps or not left or left < CUT * rounds:
                    continue
                within, of = set(nodes(running(loop.body))), dotted(steps[0].func)
                outside = [n for n in nodes(inside) if isinstance(n, ast.Call) and n not in within]
                each = {*_calls_of(running(loop.body), "zero_grad")} - {*_calls_of(running([window]), "zero_grad")}
                if each or any(dotted(n.func) == of and n.lineno > (loop.end_lineno or 0) for n in outside):
                    continue
                cleared = any(n in outside for n in _calls_of(inside, "zero_grad"))
                looped = any(loop in running(s.body) or set(called) & set(nodes(running(s.body))) for s in loops)
                same = [n for n in runs if function in history.reach(n) or n in history.same(cell.number)]
                later = next((n for n in same if n > cell.number), 0)
                if not looped and (not later or not cleared and _anew(names, history, cell.number, later)):
                    continue
                homes = (c for c in history.cells.values() if function in c.functions.get(_name(function), ()))
                home = next(homes, cell)
                title = (
                    f"The last {left} of {rounds} batches of each epoch come to no step: {named(home.place())} steps "
                    f"after every {every}, and what is left is "
                    + ("cleared" if cleared else "added to the first step of the next epoch")
                )
                fix = ("Step after the last batch, too.", f"if {ast.unparse(window.test)} or last_batch:")
                code = "training/gradients-cleared-before-step" if cleared else "notebook/setting-left-on"
                names_ = (of.rpartition(".")[0], "zero_grad")
                yield Told(code, title, names_, home.place(window.lineno), (fix,))
                return


def _left_over(
    loop: ast.For, window: ast.If, function: Any, called: list[ast.Call], names: Mapping[str, Any]
) -> tuple[int, int, int]:
    """The rounds of a loop, after how many of them it steps, and how many come after its last step; zeros where it is
    not known."""
    match = EVERY.fullmatch(ast.unparse(window.test))
    of, start, index = loop.iter, 0, loop.target
    while isinstance(of, ast.Call) and of.args and (last := dotted(of.func).rpartition(".")[2]) != "range":
        if last == "enumerate":
            index = index.elts[0] if isinstance(index, ast.Tuple) else index
            given = [*of.args[1:], *(k.value for k in of.keywords)]
            start = getattr(given[0], "value", 0) if given else 0
        of = of.args[0]
    ranged = isinstance(of, ast.Call) and len(of.args) == 1
    if match is None or dotted(index) != match[1] or isinstance(of, ast.Call) and not ranged:
        return 0, 0, 0
    count_of = _value(of.args[0] if ranged else of, function, called, names)  # type: ignore[attr-defined]
    every = _value(ast.parse(match[3], mode="eval").body, function, called, names)
    if not ranged:
        kinds = [type(count_of), *map(type, map(attributes(count_of).get, ("dataset", "sampler", "batch_sampler")))]
        own = any(is_user_module(module_name(kind)) for kind in kinds)  # whose code is not run
        count_of = len(count_of) if hasattr(kinds[0], "__len__") and not own else 0
    if type(count_of) is not int or type(every) is not int or every < 2 or count_of < every:
        return 0, 0, 0
    return count_of, every, (start + count_of - 1 + int(match[2] or 0) + (match[4] != "0")) % every


def _value(node: ast.expr, function: Any, called: list[ast.Call], names: Mapping[str, Any]) -> Any:
    """What a number or a name stands for: of a parameter, what the first call gives, or its default."""
    if function is not None and isinstance(node, ast.Name):
        parameters = function.args.args
        given = dict(zip([a.arg for a in parameters[::-1]], function.args.defaults[::-1]))
        for call in called[:1]:
            given |= dict(zip([a.arg for a in parameters], call.args)) | {k.arg: k.value for k in call.keywords}
        node = given.get(node.id, node)
    path = dotted(node)
    value = names.get(root_of(path)) if path else getattr(node, "value", None)
    for key in path.split(".")[1:]:
        value = attributes(value).get(key)
    return value


def _anew(names: Mapping[str, Any], history: CellHistory, first: int, second: int) -> bool:
    """Whether gradients were cleared, or a model was made anew, between two runs."""
    between = [number for number in history.cells if first < number < second]
    models = (n for n, v in names.items() if is_module(v))
    made = (b for n in models for b in history.bindings(n) if not keeps_object(b))
    return any("zero_grad" in history.methods(n) for n in between) or any(first < b.number <= second for b in made)


def _name(function: Any) -> str:
    return str(getattr(function, "name", ""))


def _calls_of(statements: Iterable[ast.stmt], method: str) -> list[ast.Call]:
    calls = (n for n in nodes(statements) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return [n for n in calls if n.func.attr == method]  # type: ignore[attr-defined]


def _sets_rate(node: ast.AST) -> bool:
    """`group["lr"] = rate`, `group["lr"] *= 1.2`; a schedule computes what it sets."""
    target = node.targets[0] if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) else None
    target = node.target if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) else target
    return isinstance(target, ast.Subscript) and getattr(target.slice, "value", "") == "lr"


def rate_left(history: CellHistory, owners: ModelsAndOptimizers) -> Iterator[Told]:
    """A test of many learning rates that left the optimizer at the last of them, where a later cell trains with it."""
    for name, optimizer in owners.optimizers:
        held = attributes(optimizer)
        first, now = (held.get("defaults") or {}).get("lr"), [group.get("lr") for group in held.get("param_groups", ())]
        if not isinstance(first, float) or not all(isinstance(rate, float) and rate >= 10 * first for rate in now):
            continue
        for at in reversed(history.reaching("param_groups")):
            sets = [n for n in nodes(history.reach(at.number)) if _sets_rate(n)]
            if not sets or not {"backward", "step"} <= history.methods(at.number):
                continue
            for trained in history.training(at.number, 1 + max(history.cells)):
                if not any(map(_sets_rate, nodes(history.reach(trained)))) and name in (
                    {n.id for n in nodes(history.reach(trained)) if isinstance(n, ast.Name)}
                ):
                    title = (
                        f"`{name}` has a learning rate of {now[0]:g} in In [{trained}], and was made with {first:g}: "
                        f"In [{at.number}] tried one rate after the other, and left lr at the last"
                    )
                    fix = ("Try rates on a copy, or make both again.", f"trial = copy.deepcopy((model, {name}))")
                    where, used = at.place_of(sets[0]), history.cells[trained].place()
                    yield told("notebook/setting-left-on", title, (name, "lr"), fix, where, used)
                    return


ENDS = {"CosineAnnealingLR": "T_max", "LinearLR": "total_iters", "PolynomialLR": "total_iters"}
"""Schedules that compute each rate from the one before, and the attribute with the step at which they end."""
SETS_RATE = re.compile(r"""\[['"]lr['"]\] *[*/]?=(?!=)|load_state_dict""")
ENDED = 0.01
"""Of the first rate. Below this share a schedule has ended: cosine, linear and polynomial ones end at 0 by default."""


def schedules_at_their_end(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """A training that ran again with a schedule that was at its end, or with a new one for the same optimizer, whose
    rate the first one had brought to its end."""
    for name, schedule in names.items():
        kind, held = type(schedule), attributes(schedule)
        optimizer = next((n for n, v in names.items() if v is held.get("optimizer")), "")
        made, old = (history.bindings(n, "assign")[-1:] for n in (name, optimizer))
        if not module_name(kind).startswith("torch.optim") or kind.__name__ not in ENDS or not made or not old:
            continue
        base = held.get("base_lrs") or []
        now = [group.get("lr") for group in attributes(names[optimizer]).get("param_groups", ())]
        same = [b for b in history.bindings(name) if old[0].at < b.at < made[0].at]
        runs = [n for n in history.training(old[0].number - 1, 1 << 30) if name in read_by(history.reach(n))]
        stopped = {n for at, _ in cell_lines(last_error(), history) for n in history.same(at)} | (
            history.failed or set()
        )
        early = [n for n in runs if same and same[0].number <= n < made[0].number and n not in stopped]
        again = [n for n in runs if n >= made[0].number]
        ended = all(isinstance(rate, float) and rate <= ENDED * of for rate, of in zip(now, base))
        if not same:
            early, again = again[:-1], again[-1:]
            steps, end = held.get("last_epoch", 0), held.get(ENDS[kind.__name__], 0) * (1 + len(early))
            ended = steps == end if kind.__name__.startswith("Cosine") else ended and steps >= end
        texts = [_uses(name, n, history) for n in (*early[:1], *again[:1])] if ended and len(now) == len(base) else []
        anew = any(history.text(b) != history.text(made[0]) for b in same)
        if len(texts) < 2 or anew or list(texts[0]) != list(texts[1]):
            continue
        if any(SETS_RATE.search(cell.source) for n, cell in history.cells.items() if early[0] <= n <= again[0]):
            continue
        where = history.place(made[0]) if same else history.cells[again[0]].place(min(texts[1].values()))
        first, text = history.cells[early[0]].place(), history.text(old[0])
        rates = f"from {max(base):g} to its end" + (f", and `lr` stays at {max(now):g}" if same else "")
        title = (
            f"{named(where)} trains once more with {'a new schedule for' if same else 'the schedule of'} "
            f"`{optimizer}`, whose rate the training of {named(first)} had brought {rates}: `{name}` goes on from there"
        )
        fix = ("Make the optimizer and the schedule anew before it.", f"{text}\n{history.text(made[0])}")
        ended_it = (f"{named(first)} trains to the end of the schedule", first)
        yield Told("notebook/cell-run-twice", title, (optimizer, name), where, (fix,), (ended_it,))


def _uses(name: str, number: int, history: CellHistory) -> dict[str, int]:
    """The statements of a cell that read a variable, also in functions that they call, and their lines."""
    body = [s for s in history.cells[number].body if not isinstance(s, DEFINED)]
    used = (s for s in body if name in read_by(history.reach_of(running([s]), number)))
    return {ast.unparse(s): s.lineno for s in used}


def output_redirected(history: CellHistory) -> Iterator[Told]:
    """`sys.stdout = open(…)`, with cells that print after it."""
    for binding in history.bindings("sys.stdout", "assign")[-1:]:
        value = binding.value
        opened = history.bindings(dotted(value), "assign")[-1:] if dotted(value) else []
        value = opened[0].value if opened else value
        if not isinstance(value, ast.Call) or dotted(value.func).rpartition(".")[2] not in ("open", "StringIO"):
            continue
        printing = [c for c in history.reaching("print") if c.number > binding.number]
        if printing:
            title = f"Nothing is printed here since In [{binding.number}]: sys.stdout is no longer the notebook's"
            code = "with contextlib.redirect_stdout(log):\n    ..."
            fix = ("Set it back (`sys.stdout = sys.__stdout__`, or restart), and use a block.", code)
            used = printing[0].place()
            yield told("notebook/setting-left-on", title, ("sys.stdout",), fix, history.place(binding), used)
