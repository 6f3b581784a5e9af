"""Stale objects: optimizers that hold parameters of an earlier model; loaders, schedulers and trainers that use an
object which a later cell has replaced; loaders' processes with a copy of a data set that a later cell has changed;
weights that were kept without a copy.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import code_fingerprint
from nbdebug.observe.variables import (
    attributes,
    class_attribute,
    closure_variables,
    is_user_module,
    key_text,
    reachable_objects,
)
from nbdebug.report import Where
from nbdebug.text import module_name
from nbdebug.tools.notebook.cells import (
    DEFINED,
    FUNCTIONS,
    At,
    Cell,
    CellBinding,
    CellHistory,
    arguments_of,
    bound,
    calls_after,
    dotted,
    first_read,
    first_training_use,
    keeps_object,
    names_in,
    nodes,
    read_by,
    reads_only,
    root_of,
    running,
    scopes,
)
from nbdebug.tools.notebook.rules import NOWHERE, LeftBehind, Told, named, told

PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)
ADDS = frozenset(
    "add_module register_module register_parameter append extend insert setattr weight_norm spectral_norm "
    "register_parametrization load_state_dict".split()
)
"""Calls that give a model new parameters."""


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module)


def is_optimizer(thing: Any) -> bool:
    return issubclass(type(thing), torch.optim.Optimizer)


def is_tensor(thing: Any) -> bool:
    return issubclass(type(thing), torch.Tensor)


def modules_of(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, module) of a module and all within it, each once, read past any code of the user's."""
    visited: set[int] = set()
    todo = [(name, module)]
    while todo:
        path, now = todo.pop(0)
        if id(now) not in visited:
            visited.add(id(now))
            yield path, now
            children = attributes(now).get("_modules") or {}
            todo += [(f"{path}.{key}" if path else key, child) for key, child in children.items() if child is not None]


def parameters_of(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, parameter) of a module and all within it; of a tensor itself."""
    if is_tensor(module):
        yield name, module
        return
    for path, part in modules_of(module, name):
        for key, value in (attributes(part).get("_parameters") or {}).items():
            if value is not None:
                yield (f"{path}.{key}" if path else key), value


def optimizer_tensors(optimizer: Any) -> list[Any]:
    """The tensors in an optimizer's parameter groups."""
    groups = attributes(optimizer).get("param_groups") or []
    return [p for group in groups if type(group) is dict for p in group.get("params", ()) if is_tensor(p)]


class ModelsAndOptimizers:
    """The models and optimizers that the user's variables lead to. top: (name, module) of variables and of items in
    their lists and dicts; inner: of modules in other objects; whole: those of top that are no part of another; weights:
    variables that are trainable tensors."""

    def __init__(self, names: dict[str, Any], objects: list[tuple[str, Any]]) -> None:
        modules = [(name, thing) for name, thing in objects if is_module(thing)]
        self.top = [
            (name, module)
            for name, module in modules
            if "." not in name.partition("[")[0] and "]." not in name and not name.startswith("an item")
        ]
        tops = {id(module) for _, module in self.top}
        self.inner = [(name, module) for name, module in modules if id(module) not in tops]
        parts = {id(part) for _, module in self.top for _, part in modules_of(module) if part is not module}
        self.whole = [(name, module) for name, module in self.top if id(module) not in parts]
        self.weights = [
            (name, value) for name, value in names.items() if is_tensor(value) and value.is_leaf and value.requires_grad
        ]
        self.optimizers = [(name, thing) for name, thing in objects if is_optimizer(thing)]
        self.in_optimizers = {id(p) for _, optimizer in self.optimizers for p in optimizer_tensors(optimizer)}
        self.loose = {id(tensor) for tensor in loose_tensors(names, objects)}
        self.named = self._ids(self.top)
        self.anywhere = self.named | self._ids(self.inner)

    @staticmethod
    def _ids(modules: list[tuple[str, Any]]) -> set[int]:
        return {id(p) for _, module in modules for _, p in parameters_of(module)}

    def missing(self, name: str, module: Any) -> tuple[list[tuple[str, Any]], int]:
        """The trainable parameters of a model that no optimizer holds, and how many it has."""
        trained = {id(p): (path, p) for path, p in parameters_of(module, name) if p.requires_grad}
        return [pair for key, pair in trained.items() if key not in self.in_optimizers], len(trained)

    def strangers(self, optimizer: Any, inner: bool) -> list[Any]:
        """The tensors of an optimizer that no variable leads to. inner: modules inside other objects count as well."""
        known = (self.anywhere if inner else self.named) | self.loose
        return [p for p in optimizer_tensors(optimizer) if id(p) not in known]


def loose_tensors(names: dict[str, Any], objects: list[tuple[str, Any]]) -> list[Any]:
    """The tensors in variables, in their lists and dicts, and in attributes of objects other than modules."""
    tensors = [value for value in names.values() if is_tensor(value)]
    for _, thing in objects:
        kind = type(thing)
        if kind in (list, tuple, set):
            tensors += [value for value in thing if is_tensor(value)]
        elif kind is dict:
            tensors += [value for value in thing.values() if is_tensor(value)]
        elif not is_module(thing) and not is_optimizer(thing) and not issubclass(kind, type):
            tensors += [value for value in attributes(thing).values() if is_tensor(value)]
    return tensors


def missing_parameters(owners: ModelsAndOptimizers, history: CellHistory) -> list[LeftBehind]:
    """The trainable parameters of each model that no optimizer holds because a cell changed the model later."""
    missing_of_all: list[LeftBehind] = []
    for name, model in [*owners.whole, *owners.weights]:
        missing, trained = owners.missing(name, model)
        if missing and (history.loop_of(name) is None or any(p.grad is not None for _, p in missing)):
            links = [_link(owners, name, model, missing, trained, each, history) for each in owners.optimizers]
            missing_of_all += [link for link in links if link is not None][:1]
    return missing_of_all


def _link(
    owners: ModelsAndOptimizers,
    name: str,
    model: Any,
    missing: list[tuple[str, Any]],
    trained: int,
    optimizer: tuple[str, Any],
    history: CellHistory,
) -> LeftBehind | None:
    """What has changed in this model since this optimizer was created, if the two belong together."""
    title, thing = optimizer
    creation = _creation(history, title)
    own = {id(p) for _, p in parameters_of(model)}
    shares = any(id(p) in own for p in optimizer_tensors(thing))
    names_model = creation is not None and root_of(name) in names_in(creation.value)
    grads = any(p.grad is not None for _, p in missing)
    strangers = owners.strangers(thing, inner=not (names_model or shares or grads))
    if not strangers:
        how, changed = _added_part(name, missing, creation, history) if shares and creation is not None else ("", None)
    else:
        alike = not Counter(tuple(p.shape) for p in strangers) - Counter(tuple(p.shape) for _, p in missing)
        if not (names_model or shares or alike and grads):
            return None
        how, changed = _change_of(name, missing, shares, creation, history)
        if changed is None and not grads:
            return None
    if not how:
        return None
    at, where = changed or ((0, 0), NOWHERE)
    used = grads or changed is not None and first_training_use(history, root_of(title), at) is not None
    return LeftBehind(
        name,
        title,
        tuple(path for path, _ in missing),
        trained,
        len(strangers),
        how,
        used,
        history.text(creation) if creation is not None else "",
        where,
        history.place(creation) if creation is not None else NOWHERE,
    )


def _creation(history: CellHistory, optimizer: str) -> CellBinding | None:
    """The statement that created the optimizer."""
    bindings = history.bindings(root_of(optimizer), "assign")
    return bindings[-1] if bindings else None


def _change_of(
    name: str, missing: list[tuple[str, Any]], part: bool, creation: CellBinding | None, history: CellHistory
) -> tuple[str, tuple[At, Where] | None]:
    """The first statement after the optimizer's that created the model again, or replaced a part of it: how, where."""
    since = creation.at if creation is not None else (0, 0)
    if part:
        replaced = _replaced(name, missing, since, history)
        if replaced is not None:
            return "part", replaced
    bindings = [b for b in history.bindings(root_of(name)) if b.at > since and not keeps_object(b)]
    bindings = bindings if creation is not None else bindings[-1:]
    if bindings:
        return "anew", (bindings[0].at, history.place(bindings[0]))
    replaced = _replaced(name, missing, since, history)
    return "part" if part or replaced is not None else "anew", replaced


def _replaced(name: str, missing: list[tuple[str, Any]], since: At, history: CellHistory) -> tuple[At, Where] | None:
    """The first statement after `since` that gives the model one of the parts with missing parameters."""
    parts = {piece for path, _ in missing for piece in path.split(".")[1:]} | ADDS
    root = root_of(name)
    for number in [n for n in history.cells if n >= since[0]]:
        cell = history.cells[number]
        if not cell.mentions(root):
            continue
        for top in cell.statements:
            if (number, top.lineno) <= since or root not in {n.id for n in nodes([top]) if isinstance(n, ast.Name)}:
                continue
            if any(_adds_parameters(node, parts) for node in nodes([top, *_called_by(top, history, number)])):
                return (number, top.lineno), cell.place(top.lineno)
    return None


def _called_by(statement: ast.stmt, history: CellHistory, number: int) -> list[ast.AST]:
    """The functions of cells that the statement calls by name."""
    names = {dotted(n.func) for n in nodes([statement]) if isinstance(n, ast.Call)}
    return [f for f in history.reach(number) if isinstance(f, ast.FunctionDef) and f.name in names]


def _adds_parameters(node: ast.AST, parts: set[str]) -> bool:
    """Whether it sets one of these attributes, or an item, or calls a method that adds a part."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr in parts
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return True
    return isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ADDS


def _added_part(
    name: str, missing: list[tuple[str, Any]], creation: CellBinding, history: CellHistory
) -> tuple[str, tuple[At, Where] | None]:
    """A part that was added, or unfrozen, after the optimizer was created with all parameters of that time."""
    if "requires_grad" in history.text(creation):
        cells = history.reaching("requires_grad", "requires_grad_")
        for number in [cell.number for cell in cells if cell.number >= creation.number]:
            for node in nodes(history.reach(number)):
                if _unfreezes(node) and (number > creation.number or getattr(node, "lineno", 0) > creation.node.lineno):
                    line = getattr(node, "lineno", 1)
                    return "unfrozen", ((number, line), history.cells[number].place(line))
    if f"{root_of(name)}.parameters()" not in history.text(creation):
        return "", None
    replaced = _replaced(name, missing, creation.at, history)
    return ("part", replaced) if replaced is not None else ("", None)


def _unfreezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
        return any(isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets)
    if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "requires_grad_":
        return not node.args or isinstance(node.args[0], ast.Constant) and node.args[0].value is True
    return False


def stale_holders(
    names: Mapping[str, Any], history: CellHistory, owners: ModelsAndOptimizers | None = None
) -> list[Told]:
    """The variables whose object still uses a value that a later cell has replaced. names: the user's own variables."""
    known = {id(value) for value in names.values()} | (owners.anywhere if owners is not None else set())
    stale: dict[str, Told] = {}
    for holder, thing in names.items():
        if issubclass(type(thing), PLAIN) or is_tensor(thing) or is_optimizer(thing):
            continue
        parts = [(path, part) for path, part in _parts(holder, thing) if id(part) not in known]
        function = type(thing) is types.FunctionType
        if not parts or not (bindings := history.bindings(holder, "assign", *(("def",) if function else ()))):
            continue
        creation = bindings[-1]
        current = {id(part) for _, part in parts} | {id(part) for _, part in _parts(holder, thing)}
        made_from = creation.value if creation.how == "assign" else getattr(creation.node, "args", None)
        for name in sorted(names_in(made_from) & names.keys() - {holder}):
            if id(names[name]) not in current and not _in_another_holder(names[name], thing, names):
                one = _stale_holder(holder, name, names, parts, creation, history)
                if one is not None:
                    stale.setdefault(holder, one)
    return list(stale.values())


def _in_another_holder(new: Any, holder: Any, names: Mapping[str, Any]) -> bool:
    """Whether another variable of the holder's type holds the new object, or any other new settings: the name was used
    for one after the other."""
    alike = [
        thing
        for thing in names.values()
        if thing is not holder and (type(thing) is type(holder) or module_name(type(new)) in SETTINGS)
    ]
    return any(part is new for thing in alike for _, part in _parts("", thing))


def _stale_holder(
    holder: str,
    name: str,
    names: Mapping[str, Any],
    parts: list[tuple[str, Any]],
    creation: CellBinding,
    history: CellHistory,
) -> Told | None:
    new = names[name]
    since = [b for b in history.bindings(name) if b.at > creation.at and not keeps_object(b)]
    if not since:
        return None
    path = next((path for path, old in parts if _replaced_holder(old, new, name, creation, since[0], history)), None)
    if path is None:
        return None
    at, thing = since[0].at, names[holder]
    if creation.how == "def":
        used = _called_without(holder, path, creation, at, history)
    else:
        users = [n for n, other in names.items() if any(part is thing for _, part in _parts(n, other))]
        uses = [(use, user) for user in [holder, *users] for use in (first_training_use, first_read)]
        used = next((place for use, user in uses if (place := use(history, root_of(user), at)) is not None), None)
    if used is None:
        return None
    kind, where = "function" if type(new) is types.FunctionType else type(new).__name__, history.place(since[0])
    title = f"`{holder}` still uses an earlier `{name}`, which {named(where)} has replaced: `{path}` is the old {kind}"
    made = history.place(creation)
    links = (
        (f"{named(made)} created `{holder}` from the earlier `{name}`", made),
        (f"{named(used)} used `{holder}` since then", used),
    )
    fix = (f"Create `{holder}` again.", history.text(creation) or f"{holder} = …({name})")
    return Told("notebook/stale-reference", title, (holder, name, path), where, (fix,), links)


def _called_without(holder: str, path: str, creation: CellBinding, since: At, history: CellHistory) -> Where | None:
    """The first cell after this place that calls a function and leaves one of its arguments to the default."""
    arguments = getattr(creation.node, "args", ast.arguments([], [], None, [], [], None, []))
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    name = path.rpartition(".")[2]
    for cell, call in calls_after(history, since, holder):
        positional = name in names and len(call.args) > names.index(name)
        if dotted(call.func) == holder and not positional and name not in {k.arg for k in call.keywords}:
            return cell.place()
    return None


def _replaced_holder(
    old: Any, new: Any, name: str, creation: CellBinding, since: CellBinding, history: CellHistory
) -> bool:
    """Whether the new object takes the place of the old one, and differs in what it does."""
    if type(old) is types.FunctionType and type(new) is types.FunctionType:
        return (
            old.__code__.co_name == new.__code__.co_name
            and old.__globals__ is new.__globals__
            and (code_fingerprint(old.__code__) != code_fingerprint(new.__code__))
        )
    kind, new_kind = type(old), type(new)
    if is_module(new) and issubclass(kind, nn.Parameter):  # in a list of what was the model's
        return True
    if (kind.__module__, kind.__qualname__) != (new_kind.__module__, new_kind.__qualname__):
        return creation.how == "def" and is_module(old) and is_module(new)
    if is_module(old):
        return any(True for _ in parameters_of(old))
    if is_optimizer(old):
        return True
    before = [b for b in history.bindings(name) if b.at <= creation.at]
    if not before or history.text(before[-1]) == history.text(since) and kind is new_kind:
        return False
    if is_tensor(old):  # the weights of a loss; the data of a data set, where they were computed from these
        return _differ(old, new) and (name in names_in(since.value) or _gives_weights(creation))
    return is_dataset(new) or class_attribute(new, "__call__") is not None or module_name(new_kind) in SETTINGS


SETTINGS = ("__main__", "types", "argparse")
"""Modules of classes of which an object may be the settings of another."""


def _gives_weights(creation: CellBinding) -> bool:
    """Whether a statement gives something to a loss as its weights, or to a function as a default."""
    calls = [n for n in ast.walk(creation.node) if isinstance(n, ast.Call)]
    return creation.how == "def" or any("weight" in (keyword.arg or "") for call in calls for keyword in call.keywords)


def _differ(old: Any, new: Any) -> bool:
    """Whether two tensors of the same shape and kind hold other numbers."""
    alike = type(old) is type(new) is torch.Tensor and (old.shape, old.dtype, old.device) == (
        new.shape,
        new.dtype,
        new.device,
    )
    return alike and not torch.equal(old, new)


def is_dataset(thing: Any) -> bool:
    """Whether its class has `__getitem__` and `__len__`, or inherits from torch's Dataset."""
    kind = type(thing)
    return (
        any(module_name(parent).startswith("torch.utils.data") for parent in kind.__mro__)
        or all(
            any(name in type.__getattribute__(parent, "__dict__") for parent in kind.__mro__[:-1])
            for name in ("__getitem__", "__len__")
        )
        and kind.__module__ == "__main__"
    )


def _parts(holder: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of an object's own attributes, of a module also of its children and buffers, of a function what it
    is bound to, of a list its items."""
    kind = type(thing)
    if kind in (list, tuple, dict):
        items = thing.items() if kind is dict else enumerate(thing)
        yield from ((f"{holder}[{key_text(key)}]", value) for key, value in itertools.islice(items, 1000))
        return
    values = dict(attributes(thing))
    if is_module(thing):
        values |= {**(values.pop("_modules", None) or {}), **(values.pop("_buffers", None) or {})}
    elif kind is types.FunctionType:
        thing = inspect.unwrap(thing, stop=lambda f: type(f.__dict__.get("__wrapped__")) is not types.FunctionType)
        given = thing.__code__.co_varnames[: thing.__code__.co_argcount]
        values = {**closure_variables(thing), **dict(zip(reversed(given), reversed(thing.__defaults__ or ())))}
        values |= thing.__kwdefaults__ or {}
    elif kind is functools.partial:
        values = {**{str(n): one for n, one in enumerate(thing.args)}, **thing.keywords}
    for key, value in values.items():
        yield f"{holder}.{key}", value
        if key in ("lr_lambdas", "dataset", "datasets", "tensors", "transform", "transforms") and value is not thing:
            yield from _parts(f"{holder}.{key}", value)


CHANGES = frozenset("append extend insert clear pop remove update sort reverse fill_ copy_ mul_ add_ zero_".split())
"""Methods of lists, dicts and tensors that change them."""


def stale_workers(names: Mapping[str, Any], objects: list[tuple[str, Any]], history: CellHistory) -> Iterator[Told]:
    """Loaders whose processes go on with the data set that they were started with (`persistent_workers=True`; an
    iterator that is still in use), where a cell has changed it since then and goes through them again."""
    for path, loader in objects:
        held, made = attributes(loader), history.bindings(root_of(path), "assign")[-1:]
        module = any(module_name(kind) == "torch.utils.data.dataloader" for kind in type(loader).__mro__)
        alive = "_workers" in held
        if not made or not module or not alive and held.get("_iterator") is None:
            continue
        copied, todo = list[Any](), [held.get(key) for key in ("dataset", "_dataset", "collate_fn", "_collate_fn")]
        while todo:
            part = todo.pop()
            copied += [part] if part is not None else []
            todo += [inside.get("dataset") for inside in [attributes(part)] if module_name(type(part)) == DATASETS]
            todo += attributes(part).get("datasets") or () if module_name(type(part)) == DATASETS else ()
        parts = {id(thing): thing for _, thing in reachable_objects(dict(zip(map(str, "abcdefgh"), copied)))}
        if found := _changed_between(root_of(path), made[0].at, parts, names, history, alive):
            text, where, used = found
            what = "the iterator's processes keep" if alive else "with persistent_workers=True its processes keep"
            title = (
                f"`{text}` ({named(where)}) does not reach `{path}`: {what} the copy of the data set that they got "
                "when they were started"
            )
            renewal = history.text(made[0])
            ends = renewal.replace("persistent_workers=True", "persistent_workers=False")
            fix = ("Make it again after the change.", renewal) if alive else ("Start them anew each time.", ends)
            links = ((f"{named(where)} changes the notebook's own copy", where), (f"{named(used)} uses it", used))
            blamed = (path, text, "persistent_workers") if not alive else (path, text)
            yield Told("notebook/stale-reference", title, blamed, history.place(made[0]), (fix,), links)


DATASETS = "torch.utils.data.dataset"


def _changed_between(
    loader: str, made: At, parts: dict[int, Any], names: Mapping[str, Any], history: CellHistory, started: bool
) -> tuple[str, Where, Where] | None:
    """(statement, its place, that of the next use) of what changed one of the parts after a first pass through the
    loader, and before another one. started: the processes were, where it was made."""
    changed: tuple[str, Where] | None = None
    functions = [f for part in parts.values() for _, f in _methods(part) if f.__module__ == "__main__"]
    read = {i.argval for f in functions for i in dis.get_instructions(f) if i.opname == "LOAD_GLOBAL"}
    for cell in [cell for cell in history.cells.values() if cell.number >= made[0]]:
        for one in [s for s in cell.body if (cell.number, s.lineno) > made]:
            reached = history.reach_of(running([one]), cell.number)
            if any(b.path.startswith(f"{loader}.") for b in cell.bindings if b.node is one):
                started, changed = False, None
            passes, changes = _passes(loader, reached), list(_changes_of(reached, parts, names, history))
            loops = [n for root in reached for n in ast.walk(root) if isinstance(n, (ast.For, ast.While))]
            for loop in loops if passes and changes else ():
                inside = history.reach_of(running(loop.body), cell.number)
                again = next(_changes_of(inside, parts, names, history), None)
                if again is not None and _passes(loader, inside):
                    return ast.unparse(again), cell.place_of(again), cell.place_of(loop)
            if passes and changed is not None:
                return (*changed, cell.place(one.lineno))
            for b in [b for b in cell.bindings if started and b.node is one and b.path in read]:
                before = [history.text(old) for old in history.bindings(b.path, "assign", "def") if old.at < b.at]
                changes += [one] if before and before[-1] != history.text(b) else []
            if changes and started:
                changed = ast.unparse(changes[0]).partition("\n")[0], cell.place_of(changes[0])
            started = started or passes
    return None


def _passes(loader: str, reached: list[ast.AST]) -> bool:
    """Whether something goes through a loader, or is given it."""
    if loader not in read_by(reached):
        return False
    inside = list(nodes(reached))
    loops = any(isinstance(n, (ast.For, ast.comprehension)) and loader in names_in(n.iter) for n in inside)
    calls = (n for n in inside if isinstance(n, ast.Call) and not reads_only(dotted(n.func)))
    return loops or any(loader in map(dotted, arguments_of(n)) for n in calls)


def _changes_of(
    reached: list[ast.AST], parts: dict[int, Any], names: Mapping[str, Any], history: CellHistory
) -> Iterator[ast.AST]:
    """The statements and calls that change an attribute or an item of the parts, which their own methods read."""
    for node in nodes(reached):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign)) else ():
            base = _object_at(target.value, names) if isinstance(target, (ast.Attribute, ast.Subscript)) else None
            if id(base) in parts and (not isinstance(target, ast.Attribute) or _reads(base, target.attr)):
                yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base, method = _object_at(node.func.value, names), node.func.attr
            function = class_attribute(base, method) if id(base) in parts else None
            if type(function) is types.FunctionType and is_user_module(function.__module__):
                yield from (node for name in sorted(_sets(function)) if _reads(base, name, method))
            elif id(base) in parts and method in CHANGES:
                yield node


def _object_at(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The object that a path names now: of `dataset.steps`; None where there is none."""
    root, *inside = dotted(node).split(".")
    thing = names.get(root)
    for name in inside:
        thing = attributes(thing).get(name)
    return thing


def _sets(function: types.FunctionType) -> set[str]:
    """The attributes that a method sets in its own object."""
    own, steps = function.__code__.co_varnames[:1], list(dis.get_instructions(function))
    found = set[str]()
    for at, step in enumerate(steps):
        of = at - 1
        if step.opname == "STORE_ATTR" and steps[of].opname in ("SWAP", "ROT_TWO"):  # `self.level += 1`
            of = max(n for n in range(at) if steps[n].opname == "LOAD_ATTR" and steps[n].argval == step.argval) - 2
        last = steps[of].argval if step.opname == "STORE_ATTR" and steps[of].opname.startswith("LOAD_FAST") else ""
        if own and (last[-1] if isinstance(last, tuple) else last) == own[0]:
            found.add(step.argval)
    return found


def _reads(thing: Any, name: str, by: str = "") -> bool:
    """Whether a method of an object's class, other than the one that sets it, reads an attribute; of a class that is
    not the user's it is taken to."""
    methods = _methods(thing)
    own = {key for key, f in methods if name in f.__code__.co_names} - {"__init__", "__len__", "__repr__", by}
    return not methods or bool(own)


def _methods(thing: Any) -> list[tuple[str, types.FunctionType]]:
    """The methods of an object's class that are the user's; of a function itself."""
    if type(thing) is types.FunctionType:
        return [(thing.__name__, thing)]
    kinds = [kind for kind in type(thing).__mro__ if is_user_module(module_name(kind))]
    held = [one for kind in kinds for one in type.__getattribute__(kind, "__dict__").items()]
    return [(key, function) for key, function in held if type(function) is types.FunctionType]


def weights_not_copied(
    names: Mapping[str, Any], objects: list[tuple[str, Any]], history: CellHistory
) -> Iterator[Told]:
    """A model's own state dict, kept as if it were a copy (in a variable, an item, an attribute, within a function),
    which the training changes after that; and put back, saved, or kept several times."""
    models = [(n, v) for n, v in reversed(objects) if is_module(v)]  # the outermost last
    own = {p.data_ptr(): n for n, v in models for _, p in parameters_of(v) if p.numel()}
    dicts = [(n, [t.data_ptr() for t in v.values() if is_tensor(t)]) for n, v in objects if issubclass(type(v), dict)]
    kept = {n: own[at] for n, tensors in dicts for at in tensors[:1] if at in own}
    trains = history.words("backward")
    for cell in history.mentioning("state_dict"):
        last = [b.node for b in cell.bindings if history.bindings(b.path)[-1:] == [b]]
        for scope in (None, *(n for s in last for n in ast.walk(s) if isinstance(n, FUNCTIONS))):
            inside = [s for s in running(scope.body if scope else cell.body) if not isinstance(s, DEFINED)]
            for taken, target, model, bare in [(s, *one) for s in inside for one in _state_dicts(s)]:
                loops = [s for s in inside if isinstance(s, (ast.For, ast.While)) and taken in running(s.body)]
                if loops and not _goes_on(loops[-1], taken, model, trains):
                    continue
                end = [taken, *loops][-1].end_lineno or 0
                back = [_puts_back(n, target) for n in nodes(inside) if bare and loops and scope]
                used, does = cell.place(max(back, default=0)), "puts back what is there already"
                if max(back, default=0) <= end:
                    held = [n for n in kept if _keeps(n, target, scope, history)]
                    at = (cell.number, scope.end_lineno or 0 if scope else end)
                    used, does = _taken_for_copy(held, kept, target, at, bool(loops), names, history)
                    model = kept[held[0]] if held else model
                if used is not NOWHERE:
                    title = (
                        f"`{target}` is no copy of the weights of `{model}`, but the weights themselves: training "
                        f"changed them, and {named(used)} {does}"
                    )
                    text = history.text_of(cell.number, taken)
                    code = re.sub(r"([\w.]+(?:\([^()]*\))?\.state_dict\(\))", r"copy.deepcopy(\1)", text)
                    fix = ("Make a copy there.", f"import copy\n{code}")
                    names_ = (root_of(target), root_of(model))
                    links = ((f"{named(used)} uses it", used),)
                    yield Told("notebook/shared-object", title, names_, cell.place(taken.lineno), (fix,), links)
                    return


def compared_with_itself(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Weights that were put aside without a copy, and compared after a training with the model's, which they are."""
    own = {p.data_ptr(): n for n, v in names.items() if is_module(v) for _, p in parameters_of(v) if p.numel()}
    for name, value in names.items() if own else ():
        kind = type(value)
        held = [*value.values()] if kind is dict else [*value] if kind in (list, tuple) else [value]
        model = next((own.get(tensor.data_ptr(), "") for tensor in held[:1] if is_tensor(tensor)), "")
        made = history.bindings(name, "assign")[-1:] if model else []
        trained = next(history.training(made[0].number - 1, 1 << 30), 1 << 30) if made else 1 << 30
        cells = [cell for cell in history.mentioning(name) if cell.number >= trained]
        for cell, statement in [(c, s) for c in cells for s in c.statements if not isinstance(s, ast.Assert)]:
            compares = [n for n in nodes([statement]) if _compares(n)]
            last = max((s.end_lineno or 0 for s in cell.body if "backward" in ast.unparse(s)), default=0)
            if compares and statement.lineno > last and {name, model} <= names_in(statement):
                title = (
                    f"`{name}` is no copy of the weights of `{model}`, but the weights themselves: "
                    f"{named(cell.place(statement.lineno))} compares them with themselves, whatever the training did"
                )
                fix = ("Make a copy there.", f"import copy\n{name} = copy.deepcopy({ast.unparse(made[0].value)})")  # type: ignore[arg-type]
                used = cell.place(statement.lineno)
                links = ((f"{named(used)} compares them", used),)
                yield Told("notebook/shared-object", title, (name, model), history.place(made[0]), (fix,), links)
                return


def _compares(node: ast.AST) -> bool:
    """`a - b`, `a == b`, `torch.equal(a, b)`"""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], (ast.Eq, ast.NotEq))
    if isinstance(node, ast.Call):
        return dotted(node.func).rpartition(".")[2] in ("equal", "allclose")
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def _state_dicts(statement: ast.stmt) -> Iterator[tuple[str, str, bool]]:
    """(what keeps it, the model, whether it is surely no copy) of the state dicts that a statement keeps."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = list(zip(target.elts, value.elts)) if both else [(target, value)]  # type: ignore[attr-defined]
    elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
        pairs = [(call.func.value, value) for value in call.args]
    for target, value in pairs:
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
        dicts = [
            n.func for n in calls if not n.args and isinstance(n.func, ast.Attribute) and n.func.attr == "state_dict"
        ]
        for model in [ast.unparse(of.value) for of in dicts]:
            if not re.search(r"opt|sched|scaler", model):
                while isinstance(value, ast.Call) and dotted(value.func) in ("dict", "OrderedDict", "copy.copy"):
                    value = value.args[0]
                parts = value.values if isinstance(value, ast.Dict) else [value]
                bare = f"{model}.state_dict()" in [ast.unparse(part).removesuffix(".copy()") for part in parts]
                yield ast.unparse(target).partition("[")[0], model, bare


def _goes_on(loop: ast.stmt, taken: ast.stmt, model: str, trains: set[str]) -> bool:
    """Whether a loop trains this one model on after a statement in it."""
    inside = list(running([loop]))
    last = [s.body[-1] for s in inside if isinstance(s, ast.If) and taken in s.body]
    words, anew = set(re.findall(r"\w+", ast.unparse(loop))), {path for s in inside for path, *_ in bound(s)}
    ends = any(isinstance(s, (ast.Break, ast.Return)) for s in last)
    return bool(words & trains) and not ends and root_of(model) not in anew


def _puts_back(node: ast.AST, target: str) -> int:
    """The line of a call that loads what was kept; 0 for anything else."""
    call = isinstance(node, ast.Call) and dotted(node.func).endswith(".load_state_dict")
    given = [ast.unparse(value).partition("[")[0] for value in node.args] if call else []  # type: ignore[attr-defined]
    return node.lineno if target in given else 0  # type: ignore[attr-defined]


def _keeps(name: str, target: str, scope: Any, history: CellHistory) -> bool:
    """Whether an object (`best`, `states[3]`, `keeper.state`) is what a statement of a cell or a function has kept:
    by its name, as an attribute, or as what the function returned."""
    if target.startswith("self."):
        return name.partition(".")[2].partition("[")[0] == target[5:]
    if root_of(name) == root_of(target):
        return True
    made = history.bindings(root_of(name), "assign")[-1:] if scope is not None else []
    return any(scope.name in names_in(b.value) for b in made)


def _taken_for_copy(
    held: list[str],
    kept: dict[str, str],
    target: str,
    at: At,
    loops: bool,
    names: Mapping[str, Any],
    history: CellHistory,
) -> tuple[Where, str]:
    """Where what was kept is put back into its model, saved after its loop, or read as one of several."""
    for cell, root, _ in history.after(at, "load_state_dict", inner=True) if held and "." in target else ():
        if back := [n for n in nodes([root]) if _puts_back(n, target)]:
            return cell.place_of(back[0]), "puts back what is there already"
    for name in dict.fromkeys(map(root_of, held)):
        for cell, call in calls_after(history, at, name):
            of, _, does = dotted(call.func).rpartition(".")
            own = not is_module(names.get(root_of(of))) or root_of(of) in kept.values()
            if does == "load_state_dict" and own and (loops or any(history.training(at[0] - 1, cell.number + 1))):
                return cell.place_of(call), "puts back what is there already"
            if does == "save" and loops:
                return cell.place_of(call), "saves the last"
        several = [n for n in held if root_of(n) == name]
        if len(several) > 1 and (read := first_read(history, name, at)) is not None:
            return read, f"reads the last of them {len(several)} times"
    return NOWHERE, ""


PICKS = re.compile(r"(?:nan)?(?:arg)?(?:min|max)|sorted|idxmin|idxmax|nsmallest|nlargest|sort_values|most_common")
"""Functions that pick one result of several."""
PUT_BACK = re.compile(r"load_state_dict|reset_parameters|\bapply\(|deepcopy|copy_\(|from_pretrained|\.load\(")


def settings_on_one_model(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Settings of an optimizer that are compared, each by a training that goes on with the model of the one before."""
    for cell in [history.cells[number] for number in history.training(0, 1 << 30)]:
        for loop in [s for s in cell.statements if isinstance(s, ast.For)]:
            body, setting = list(running(loop.body)), names_in(loop.target)
            reached, anew = history.reach_of(body, cell.number), {path for s in body for path, *_ in bound(s)}
            models = [m for m in read_by(reached) - anew & names.keys() if is_module(names.get(m))]
            models = [m for m in models if m in _given_with(setting, body, reached)]
            if not models or PUT_BACK.search("\n".join(map(ast.unparse, reached))):
                continue
            picked = _picked(setting, loop, cell, history)
            made = [b for b in history.bindings(models[0], "assign") if b.at < (cell.number, loop.lineno)]
            if picked is not None and made:
                calls = (s for s in body if models[0] in names_in(s) and setting & names_in(s))
                where, by = cell.place(next(calls, loop).lineno), ast.unparse(loop.target)
                title = (
                    f"`{models[0]}` is one and the same in all rounds of the loop over `{by}`: each of them trains on "
                    f"from where the one before has ended, and {named(picked)} picks the best of them"
                )
                code = f"torch.manual_seed(0)\n{history.text(made[-1])}"
                fix = ("Make the model anew in the loop, with one seed.", code)
                yield told("notebook/stale-reference", title, (models[0], *sorted(setting)), fix, where, picked)
                return


def _given_with(setting: set[str], body: list[ast.stmt], reached: list[ast.AST]) -> set[str]:
    """The models of the optimizers that statements of a loop, or functions that they call, make with a setting."""
    models = set[str]()
    for root in [*body, *(r for r in reached if isinstance(r, FUNCTIONS))]:
        for _, call, given in optimizers_made(root, body):
            rest = {given.get(n, "") for a in arguments_of(call)[1:] for n in names_in(a)}
            if any(setting & set(re.findall(r"\w+", text)) for text in rest):
                models |= {given.get(n, n) for n in names_in(call.args[0])}
    return models


def optimizers_made(root: ast.AST, body: list[ast.stmt]) -> Iterator[tuple[str, ast.Call, dict[str, str]]]:
    """(class, call, what each name stands for) of the optimizers that a statement, or a called function, makes."""
    for call in [n for n in nodes([root]) if isinstance(n, ast.Call) and n.args]:
        for given in scopes(root, body):
            kind = given.get(dotted(call.func), dotted(call.func)).rpartition(".")[2]
            if issubclass(type(getattr(torch.optim, kind, None)), type):
                yield kind, call, given


STAGES = re.compile(
    r"stage|phase|warm|head|tun|part|before|after|cont|more|resum|fro[zs]e|pre|again|next|rest|init|final|round|cycl"
    r"|extra|further|coarse|last|then|anneal|decay|cool|main|full|whole|first|second"
)
"""Words in the names of results that follow one another on purpose."""
BEGINS_ANEW = re.compile(rf"{PUT_BACK.pattern}|requires_grad|(?<!__)(?:reset|init)\w*\(")


def trainings_compared(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Two trainings of one model that differ in the learning rate or the optimizer alone, with their results kept to be
    compared: the second goes on with the weights that the first has learned."""
    runs = [(n, s) for n in history.training(0, 1 << 30) for s in history.cells[n].body if history.trains(s, n)]
    for (first, begun), (number, again) in itertools.pairwise(runs):
        since, at = (first, begun.lineno), (number, again.lineno)
        one, other = _trained_with(first, begun, history), _trained_with(number, again, history)
        models = [m for m in sorted(one.keys() & other.keys()) if is_module(names.get(m))]
        models = [m for m in models if _compared(one[m], other[m], history)]
        span = [n for n in history.cells if models and (first < n <= number or first == n == number)]
        text = "\n".join(ast.unparse(root) for n in span for root in history.reach(n))
        for model in models if not BEGINS_ANEW.search(text) else ():
            made = [b for b in history.bindings(model) if b.at < at and not keeps_object(b)]
            if not made or made[-1].at > since:
                continue
            (kind, rate, _, kept), (kind_2, rate_2, _, results) = one[model], other[model]
            by = f"lr={rate_2:g} after {rate:g}" if kind == kind_2 else f"{kind_2} after {kind}"
            result = min(results - kept)
            where, used = history.cells[number].place(again.lineno), history.cells[first].place(begun.lineno)
            title = f"`{model}` goes on in {named(where)} ({by}) from {named(used)}: `{result}` is no fair comparison"
            fix = ("Make the model anew before each, with one seed.", f"torch.manual_seed(0)\n{history.text(made[-1])}")
            yield told("notebook/stale-reference", title, (model, result), fix, where, used)
            return


def _trained_with(number: int, statement: ast.stmt, history: CellHistory) -> dict[str, tuple[Any, ...]]:
    """Of each model for which a statement, or its cell above it, makes an optimizer: its class, its rate (0 if none is
    given), what trains but for these two, and the variables that keep what it gives."""
    found, body = dict[str, tuple[Any, ...]](), history.cells[number].body
    makes = [
        s for s in body if isinstance(s, ast.Assign) and s.lineno < statement.lineno and "optim." in ast.unparse(s)
    ]
    own = [*makes, *running([statement])]
    kept = {path for path, how, *_ in bound(statement) if how == "assign"}
    added = (s.value.func for s in own if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call))
    kept |= {dotted(of.value) for of in added if isinstance(of, ast.Attribute) and of.attr == "append"}
    masked = {*kept, *(path for s in own for path, *_ in bound(s))}
    for root in history.reach_of(own, number):
        inner = {p for s in running(root.body) for p, *_ in bound(s)} if isinstance(root, FUNCTIONS) else set[str]()
        for kind, call, given in optimizers_made(root, own):
            rates = [*(k.value for k in call.keywords if k.arg == "lr"), *call.args[1:2]]
            rate = given.get(ast.unparse(rates[0]), ast.unparse(rates[0])) if rates else "0"
            made = [b.value for b in history.bindings(rate, "assign") if b.at < (number, statement.lineno)][-1:]
            value = ast.unparse(made[0]) if made and made[0] is not None else rate
            items = (
                s.targets[0] for s in body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Subscript)
            )
            under = {f"{dotted(t.value)}[{value}]" for t in items if ast.unparse(t.slice) in (rate, value)}
            if re.fullmatch(r"[\d.e-]+", value):
                varied = rf"(?<![\w.])(?:{re.escape(value)}|{'|'.join(masked)})(?!\w)|\b{kind}\b|'[^']*'"
                text = re.sub(varied, "_", "\n".join(map(ast.unparse, own)))
                models = {given.get(n, n) for n in names_in(call.args[0]) - inner}
                found |= {m: (kind, float(value), text, kept | under) for m in models}
    return found


def _compared(one: tuple[Any, ...], other: tuple[Any, ...], history: CellHistory) -> bool:
    """Whether two trainings that differ in one setting are no two stages of one: the rate is raised, the results are
    kept by their settings, or a cell compares the two numbers."""
    (kind, rate, text, kept), (kind_2, rate_2, text_2, kept_2) = one, other
    for a, b in itertools.product(kept - kept_2, kept_2 - kept):
        read = all(first_read(history, root_of(name), (0, 0)) is not None for name in (a, b))
        if text != text_2 or (kind, rate) == (kind_2, rate_2) or not read or STAGES.search(f"{a} {b}"):
            continue
        by_kind = kind != kind_2 and kind.lower() in a.lower() and kind_2.lower() in b.lower()
        inside = (n for cell in history.mentioning(root_of(b)) for n in nodes(cell.statements) if {a, b} <= names_in(n))
        judged = any(isinstance(n, ast.Compare) or PICKS.fullmatch(dotted(getattr(n, "func", None))) for n in inside)
        if judged or by_kind or "[" in a or kind == kind_2 and rate < rate_2:
            return True
    return False


def _picked(setting: set[str], loop: ast.For, cell: Cell, history: CellHistory) -> Where | None:
    """Where one of the settings is taken as the best: `best_lr = lr` below an `if`, `min(results, …)`."""
    kept = set[str]()
    for s in running(loop.body):
        if isinstance(s, ast.If) and any(isinstance(n, ast.Compare) for n in ast.walk(s.test)):
            chosen = [one for one in running(s.body) if isinstance(one, ast.Assign) and setting & names_in(one.value)]
            if chosen:
                return cell.place(chosen[0].lineno)
        target = s.targets[0] if isinstance(s, ast.Assign) else None
        if isinstance(target, ast.Subscript) and setting & names_in(target.slice):
            kept.add(root_of(ast.unparse(target)))
        call = s.value if isinstance(s, ast.Expr) else None
        added = call.args[0] if isinstance(call, ast.Call) and dotted(call.func).endswith(".append") else None
        if isinstance(added, (ast.Tuple, ast.Dict)) and setting & names_in(added):
            kept.add(root_of(ast.unparse(s)))
    for name in sorted(kept):
        for at, call in calls_after(history, (cell.number, loop.end_lineno or 0), name):
            if PICKS.fullmatch(dotted(call.func).rpartition(".")[2]):
                return at.place_of(call)
    return None
