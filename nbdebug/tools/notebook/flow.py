"""Data flow between cells: what a line reads is not what it was written for.

One object stands where each name, item or call was to have its own; a function reads the notebook's variable, not its
argument; a copied line has one name of the original; a loop took the name of the data; the cell that made something ran
again, and what had been done to it since did not. Each is told only where the cells and the objects show both sides.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from nbdebug.observe.sources import parse
from nbdebug.observe.variables import attributes, class_attribute, is_user_module, last_error
from nbdebug.report import Where
from nbdebug.text import listed, module_name
from nbdebug.tools.notebook.cells import (
    DEFINED,
    FUNCTIONS,
    IDLE,
    Cell,
    CellBinding,
    CellHistory,
    arguments_of,
    bound,
    calls_after,
    cell_lines,
    dotted,
    draws_after,
    first_read,
    first_training_use,
    keeps_object,
    methods_of,
    names_in,
    nodes,
    number_of,
    read_by,
    reads_only,
    root_of,
    running,
    seeding,
    unwrapped,
)
from nbdebug.tools.notebook.left_on import output_redirected, rate_left, schedules_at_their_end, windows_cut
from nbdebug.tools.notebook.repeats import numbered_twice
from nbdebug.tools.notebook.rules import NOWHERE, Told, named, told
from nbdebug.tools.notebook.stale_objects import (
    BEGINS_ANEW,
    PUT_BACK,
    SETTINGS,
    ModelsAndOptimizers,
    compared_with_itself,
    is_dataset,
    is_module,
    is_optimizer,
    is_tensor,
    optimizer_tensors,
    optimizers_made,
    parameters_of,
    settings_on_one_model,
    trainings_compared,
    weights_not_copied,
)

SHARED = "notebook/shared-object"


MUTABLE = (list, dict, set)


def told_of_cells(
    names: Mapping[str, Any], objects: list[tuple[str, Any]], history: CellHistory, owners: ModelsAndOptimizers
) -> Iterator[Told]:
    """All that the cells and the variables tell without an exception."""
    for name, value in names.items():
        made = history.bindings(name, "assign", "def", "class")[-1:]
        for binding in made:
            yield from _of_one(name, value, binding, names, history)
    yield from weights_not_copied(names, objects, history)
    yield from compared_with_itself(names, history)
    yield from settings_on_one_model(names, history)
    yield from trainings_compared(names, history)
    yield from _folds_on_one_model(names, history)
    yield from _late(history)
    yield from _copied(names, history)
    yield from _saved_untrained(history, owners)
    yield from rate_left(history, owners)
    yield from schedules_at_their_end(names, history)
    yield from _trained_by_timing(names, history)
    yield from _gradients_left(names, history)
    yield from windows_cut(names, history)
    yield from _left_frozen(names, history, owners)
    yield from _carried_over(names, history)
    yield from _begun_alike(names, history)
    yield from _seeded_once(names, history)
    yield from _seeded_in_each_call(history)
    yield from output_redirected(history)


def _of_one(
    name: str, value: Any, binding: CellBinding, names: Mapping[str, Any], history: CellHistory
) -> Iterator[Told]:
    """What one variable tells, by the statement that made it."""
    if binding.how != "assign":
        yield from _default_shared(name, value, binding, names, history)
        yield from _unread(name, value, binding, names, history)
        yield from _default_of_before(name, value, binding, names, history)
        if issubclass(type(value), type):
            yield from _filled_by_all(name, value, binding, history)
        return
    if type(value) in (list, dict):
        yield from _repeated(name, value, binding, history)
    if type(value) is dict and all(type(number) is int for number in value.values()):
        yield from numbered_twice(name, value, history)
    if (
        isinstance(value, dict)
        or module_name(type(value)) in SETTINGS[1:]
        or not is_module(value)
        and is_dataset(value)
    ):
        yield from _changed_through(name, binding, names, history)
    if not is_module(value) and any(class_attribute(value, word) is not None for word in ("reset", *READ)):
        yield from _counted_on(name, value, binding, names, history)


def _empty(node: ast.AST | None) -> bool:
    """Whether an expression makes an empty list, dict or set."""
    if isinstance(node, ast.Call):
        return dotted(node.func) in ("list", "dict", "set") and not arguments_of(node)
    return isinstance(node, ast.List) and not node.elts or isinstance(node, ast.Dict) and not node.keys


def _repeated(name: str, value: Any, binding: CellBinding, history: CellHistory) -> Iterator[Told]:
    """`[[]] * 3`, `dict.fromkeys(names, [])`, `[[0] * 4] * 3`, once the one list in it has been changed."""
    node, items = binding.value, list(value.values() if type(value) is dict else value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
        each = node.left.elts[0] if len(node.left.elts) == 1 else None
    else:
        fromkeys = isinstance(node, ast.Call) and dotted(node.func) == "dict.fromkeys" and len(node.args) == 2
        each = node.args[1] if fromkeys else None  # type: ignore[union-attr]
    one: Any = items[0] if len(items) > 1 and all(item is items[0] for item in items) else None
    made = is_module(one) and isinstance(each, ast.Call)  # a name that is repeated is shared on purpose
    if not made and (type(one) not in MUTABLE or not _changed_since(each, one)):
        return
    title = (
        f"All {len(items)} items of `{name}` are one {type(one).__name__}, which {named(history.place(binding))} made "
        "once: what is added to one of them is in each"
    )
    text = ast.unparse(each) if each is not None else ""
    code = f"{{key: {text} for key in …}}" if type(value) is dict else f"[{text} for _ in range({len(items)})]"
    used = first_read(history, name, binding.at) or NOWHERE
    yield told(SHARED, title, (name,), ("Make each of them anew.", f"{name} = {code}"), history.place(binding), used)


def _changed_since(each: ast.AST | None, one: Any) -> bool:
    """Whether a list is no longer as its expression made it."""
    return bool(_empty(each) and one) or isinstance(each, ast.BinOp) and len(set(map(repr, one))) > 1


def _default_shared(
    name: str, value: Any, binding: CellBinding, names: Mapping[str, Any], history: CellHistory
) -> Iterator[Told]:
    """`def train(losses=[])`, where two variables, or their attributes, hold the one list by now."""
    function = class_attribute(value, "__init__") if issubclass(type(value), type) else value
    defaults = function.__defaults__ or () if type(function) is FunctionType else ()
    for default in [one for one in defaults if type(one) in MUTABLE and one]:
        place = function.__code__.co_argcount - len(defaults) + [one is default for one in defaults].index(True)
        parameter = function.__code__.co_varnames[place]
        written = [a for n in ast.walk(binding.node) for a in getattr(getattr(n, "args", None), "defaults", ())]
        held = [n for n, v in names.items() if v is default or any(a is default for a in attributes(v).values())]
        if len(held) > 1 and any(map(_empty, written)):
            kind = type(default).__name__
            title = (
                f"`{held[0]}` and `{held[1]}` hold one {kind}: the default of `{parameter}` is made once, when "
                f"{named(history.place(binding))} defines `{name}`, and each call goes on with it"
            )
            code = f"{parameter}=None\n    {parameter} = {kind}() if {parameter} is None else {parameter}"
            fix = ("Make it in the function.", code)
            yield told(SHARED, title, (name, parameter, *held), fix, history.place(binding))


def _default_of_before(
    name: str, value: Any, binding: CellBinding, names: Mapping[str, Any], history: CellHistory
) -> Iterator[Told]:
    """`def noisy(rows, level=level)`, called without `level` after a cell has given `level` another number."""
    if type(value) is not FunctionType or not isinstance(binding.node, FUNCTIONS):
        return
    arguments = [a.arg for a in (*binding.node.args.posonlyargs, *binding.node.args.args)]
    written = binding.node.args.defaults
    for node, kept in zip(written, value.__defaults__ or ()):
        read, place = dotted(node), len(arguments) - len(written) + written.index(node)
        now, since = names.get(read), history.bindings(read)[-1:]
        plain = type(kept) in (int, float, str, bool) and type(now) is type(kept) and now != kept
        if (
            not plain
            or not since
            or read != arguments[place]
            or since[0].how != "assign"
            or since[0].number <= binding.number
        ):
            continue
        for at, call in calls_after(history, since[0].at, name):
            given = len(call.args) > place or any(k.arg in (None, read) for k in call.keywords)
            if dotted(call.func) == name and not given and not any(isinstance(a, ast.Starred) for a in call.args):
                where, changed = history.place(binding), history.place(since[0])
                title = (
                    f"`{name}` goes on with {read}={kept!r}: a default is worked out once, when {named(where)} defines "
                    f"the function, and {named(changed)} has set `{read}` to {now!r} since then"
                )
                fix = ("Give it in the call.", f"{name}(…, {read}={read})")
                yield told("notebook/stale-reference", title, (read, name), fix, where, at.place_of(call))
                return


def _filled_by_all(name: str, kind: type, binding: CellBinding, history: CellHistory) -> Iterator[Told]:
    """A list of a class to which the `__init__` of each object adds, where a second object was made."""
    lists = [key for key, value in type.__getattribute__(kind, "__dict__").items() if type(value) is list and value]
    makers = [f for f in ast.walk(binding.node) if lists and getattr(f, "name", "") == "__init__"]
    for node in (n for f in makers for n in ast.walk(f) if isinstance(n, ast.Call)):
        key = dotted(node.func).removeprefix("self.").removesuffix(".append")
        own = dotted(node.func) == f"self.{key}.append" and key in lists
        if not own or any("self" in names_in(value) for value in node.args):
            continue
        made = [(cell, n) for cell, n in calls_after(history, binding.at, name) if dotted(n.func) == name]
        if len(made) > 1 and f"self.{key} =" not in history.text(binding):
            title = f"`{ast.unparse(node)}` adds to `{name}.{key}`, which all objects of `{name}` share"
            fix = ("Make one for each object, in `__init__`.", f"self.{key} = []")
            where, used = history.cells[binding.number].place(node.lineno), made[1][0].place_of(made[1][1])
            yield told(SHARED, title, (f"self.{key}", f"{name}.{key}"), fix, where, used)


def _changed_through(name: str, binding: CellBinding, names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Where a cell sets an item or an attribute of a second name of an object (`small = base`), or of the data set of a
    part of it, and the other is used."""
    thing, alias = names[name], dotted(binding.value) in names and names.get(dotted(binding.value)) is names[name]
    whole = attributes(thing).get("dataset") if module_name(type(thing)).startswith("torch.utils.data") else None
    parts = [n for n, v in names.items() if whole is not None and n != name and attributes(v).get("dataset") is whole]
    others = [dotted(binding.value)] if alias else [n for n in parts if type(names[n]) is type(thing)]
    for at in [at for at in history.mentioning(name) if others and at.number >= binding.number]:
        for statement in at.statements:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(target, (ast.Attribute, ast.Subscript)) or (at.number, statement.lineno) <= binding.at:
                continue
            if dotted(target.value) != (name if alias else f"{name}.dataset"):
                continue
            if first_read(history, name, (at.number, statement.end_lineno or 0)) is None:
                continue
            for other in others:
                holders = [n for n, v in names.items() if attributes(v).get("dataset") is names[other]]
                since = (at.number, statement.lineno)
                uses = ((use, user) for user in (other, *holders) for use in (first_training_use, first_read))
                used = next((place for use, user in uses if (place := use(history, user, since))), None)
                if used is not None:
                    text = history.text_of(at.number, statement)
                    title = f"`{text}` changes `{other}` as well, which {named(used)} uses: both stand for one object"
                    fix = ("Make a copy there.", f"import copy\n{name} = copy.deepcopy({other})")
                    yield told(SHARED, title, (name, other), fix, at.place(statement.lineno), used)
                    return


def _counted_on(
    name: str, value: Any, binding: CellBinding, names: Mapping[str, Any], history: CellHistory
) -> Iterator[Told]:
    """A metric that counts a second evaluation on top of the first, though it is of another model, or of one that was
    trained in between."""
    codes = (getattr(class_attribute(value, word), "__code__", None) for word in READ)
    resets = class_attribute(value, "reset") is not None
    if (
        not resets
        and not is_user_module(module_name(type(value)))
        or any("reset" in code.co_names for code in codes if code is not None)
    ):
        return
    counted: list[int] = []
    for at, call in calls_after(history, binding.at, name):
        method = dotted(call.func).removeprefix(f"{name}.") if dotted(call.func).startswith(name) else ""
        if method == "reset":
            counted = []
        elif method in ("update", "add", "add_batch", name) and "backward" not in history.methods(at.number):
            read = any(f"{name}.{word}" in map(dotted, nodes(history.reach(at.number))) for word in READ)
            models = [_models_of(names, history, n) for n in (counted[-1], at.number)] if read and counted else []
            other = bool(models) and all(models) and not models[0] & models[1]
            if models and (other or any(history.training(counted[-1], at.number))):
                title = (
                    f"`{name}` counts the rows of In [{at.number}] on top of those of In [{counted[-1]}], "
                    f"{'of another model' if other else 'before the training'}: nothing has reset it"
                )
                fix = ("Reset it before each evaluation.", f"{name}.reset()" if resets else history.text(binding))
                yield told("notebook/cell-run-twice", title, (name,), fix, at.place_of(call))
                return
            counted += [at.number] * read


READ = ("compute", "result", "value", "avg", "mean", "average")
"""What a metric is read by."""
KEEPS = re.compile(r"append|insert|setdefault|register_\w*hook")
"""Methods that keep a function which they are given."""


FOLDS = re.compile(r"(?:Fold|ShuffleSplit)\(")
"""Objects of scikit-learn that split rows into those to train on and those to judge by."""


def _folds_on_one_model(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Cross-validation whose folds all train one model: from the second on, it has been trained on the rows by which
    it is judged."""
    for cell, loop in [(c, s) for c in history.mentioning("split") for s in c.statements if isinstance(s, ast.For)]:
        text, splits = ast.unparse(loop.iter), [b for n in names_in(loop.iter) for b in history.bindings(n)[-1:]]
        pairs = [n for n in ast.walk(loop.target) if isinstance(n, ast.Tuple) and len(n.elts) == 2]
        body, rows = list(running(loop.body)), [dotted(n) for n in pairs[-1].elts] if pairs else [""]
        if ".split(" not in text or not any(map(FOLDS.search, [text, *map(history.text, splits)])):
            continue
        reached, anew = history.reach_of(body, cell.number), {path for s in body for path, *_ in bound(s)}
        if not {*rows} <= read_by(body) or BEGINS_ANEW.search("\n".join(map(ast.unparse, reached))):
            continue
        stepped = {id(p) for n in read_by(reached) if is_optimizer(names.get(n)) for p in optimizer_tensors(names[n])}
        made = [one for root in {*body, *reached} for one in optimizers_made(root, body)]
        given = {of.get(n, n) for _, call, of in made for n in names_in(call.args[0])}
        for model in sorted(name for name in read_by(body) - anew if is_module(names.get(name))):
            own, first = {id(p) for _, p in parameters_of(names[model])}, history.bindings(model, "assign")[-1:]
            if first and "backward" in methods_of(reached) and (model in given or own & stepped):
                where, once = cell.place(loop.lineno), history.place(first[0])
                title = (
                    f"All folds of {named(where)} train the `{model}` that {named(once)} made: from the second on, it "
                    f"has been trained on the rows of `{rows[1]}`, by which it is judged"
                )
                fix = ("Make the model, and its optimizer, anew in each fold.", history.text(first[0]))
                yield told("training/leakage", title, (model, rows[1]), fix, where, once)
                return


def _late(history: CellHistory) -> Iterator[Told]:
    """Functions made in a loop and kept, which read its variable when they are called."""
    for at in history.mentioning("for"):
        loops = [n for s in at.body for n in ast.walk(s) if isinstance(n, (ast.For, ast.ListComp, ast.DictComp))]
        for loop, function, kept in [(one, *kept) for one in loops for kept in _kept(one, at.body)]:
            targets = names_in(loop.target) if isinstance(loop, ast.For) else names_in(loop.generators[0].target)
            own = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
            body = function.body if isinstance(function.body, list) else [function.body]
            late = sorted(set().union(*map(names_in, body)) & targets - own)
            roots = {kept} if kept not in targets else names_in(loop.iter) if isinstance(loop, ast.For) else set()
            end = (at.number, loop.end_lineno or 0)
            used = next((place for root in sorted(roots) if (place := first_read(history, root, end))), None)
            again = [b for b in history.bindings(late[0], "for", "assign") if b.at > end] if late else []
            if used is not None and late and not again:
                title = (
                    f"All functions that In [{at.number}] makes in its loop read `{late[0]}` when they are called, and "
                    f"not when they are made: in {named(used)} each of them sees the last one"
                )
                fix = ("Give each function its own, as a default.", f"lambda …, {late[0]}={late[0]}: …")
                yield told(SHARED, title, (late[0], *roots), fix, at.place(function.lineno), used)
                return


def _kept(loop: Any, body: list[ast.stmt]) -> Iterator[tuple[Any, str]]:
    """(function, variable that keeps it) of the functions that a loop makes and keeps."""
    if not isinstance(loop, ast.For):
        made = loop.elt if isinstance(loop, ast.ListComp) else loop.value
        kept = [s.targets[0] for s in body if isinstance(s, ast.Assign) and s.value is loop]
        yield from ((made, dotted(target)) for target in kept if isinstance(made, ast.Lambda))
        return
    inside = list(ast.walk(loop))
    if any(isinstance(n, ast.Break) or isinstance(n, ast.Attribute) and n.attr == "remove" for n in inside):
        return
    defined = {n.name: n for n in inside if isinstance(n, FUNCTIONS)}
    for n in inside:
        values: list[ast.expr] = []
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and KEEPS.fullmatch(n.func.attr):
            values, into = arguments_of(n), n.func.value
        elif isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript):
            values, into = [n.value], n.targets[0].value
        for value in values:
            function = value if isinstance(value, ast.Lambda) else defined.get(dotted(value))
            if function is not None:
                yield function, root_of(ast.unparse(into))


def _unread(
    name: str, value: Any, binding: CellBinding, names: Mapping[str, Any], history: CellHistory
) -> Iterator[Told]:
    """A function that reads a variable of the notebook in place of the argument of that kind which it is given."""
    if type(value) is not FunctionType or not isinstance(binding.node, FUNCTIONS):
        return
    inside = [n for s in binding.node.body for n in ast.walk(s)]
    modes = {id(n.value) for n in inside if isinstance(n, ast.Attribute) and n.attr in ("eval", "train")}
    read = {n.id for n in inside if isinstance(n, ast.Name) and id(n) not in modes}
    parameters = [a.arg for a in (*binding.node.args.posonlyargs, *binding.node.args.args)]
    for at, call in calls_after(history, binding.at, name) if set(parameters) - read else ():
        given = {**dict(zip(parameters, call.args)), **{k.arg: k.value for k in call.keywords if k.arg in parameters}}
        for parameter in [p for p in given if p not in read and dotted(call.func) == name]:
            passed = dotted(given[parameter])
            for other in sorted(read & names.keys() - {passed, *parameters}):
                if passed in names and _stands_for(names[passed], names[other]):
                    line = next(n.lineno for n in inside if isinstance(n, ast.Name) and n.id == other)
                    title = (
                        f"`{name}` does not read its argument `{parameter}`, but the notebook's `{other}`: "
                        f"In [{at.number}] gives it `{passed}`, and gets the answer for `{other}`"
                    )
                    where = history.cells[binding.number].place(line)
                    fix = ("Read the argument.", (where.text or other).replace(other, parameter))
                    blamed = (name, parameter, other, passed)
                    yield told("notebook/stale-reference", title, blamed, fix, where, at.place_of(call))
                    return


def _stands_for(one: Any, other: Any) -> bool:
    """Whether two different objects can be taken for each other: two models, two tensors of one shape, rows of one
    kind, two loaders."""
    if one is other:
        return False
    if is_tensor(one) and is_tensor(other) and one.shape != other.shape:
        rows = one.dim() > 1 and one.shape[1:] == other.shape[1:] and one.dtype == other.dtype
        return rows and not (one.requires_grad or other.requires_grad)
    kinds = type(one), type(other)
    return is_module(one) and is_module(other) or kinds[0] is kinds[1] and module_name(kinds[0]).startswith("torch")


def _copied(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """`val_loader = DataLoader(train_set)` below `train_loader = DataLoader(train_set)`, where nothing reads
    `val_set`."""
    last = {n: b[-1] for n in names if "_" in n and (b := history.bindings(n, "assign"))}

    def called(name: str) -> str:
        return dotted(getattr(last[name].value, "func", None))

    for name, binding in last.items():
        reads = sorted(names_in(binding.value) & last.keys())
        for read, theirs, own in [(r, t, o) for r in reads for t in r.split("_") for o in name.split("_") if t != o]:
            other, meant = (
                "_".join(new if part == old else part for part in text.split("_"))
                for text, old, new in ((name, own, theirs), (read, theirs, own))
            )
            first = last.get(other)
            if first is None or meant not in last or other == name or meant == name or first.at >= binding.at:
                continue
            alike = called(name) == called(other) != "" and read in names_in(first.value)
            used = first_read(history, name, binding.at)
            if alike and used is not None and first_read(history, meant, last[meant].at) is None:
                code = "training/leakage" if "train" in theirs else "notebook/stale-reference"
                title = (
                    f"`{name}` is made from `{read}`, as `{other}` is: nothing reads `{meant}`, which this line was "
                    "most likely to take"
                )
                fix = ("Change the name in the copied line.", re.sub(rf"\b{read}\b", meant, history.text(binding)))
                yield told(code, title, (name, read, meant), fix, history.place(binding), used)
                return


REVIVES = re.compile(r"fit|train|load|from_pretrained|step|copy_|_?init")
"""Methods after which a model may no longer be as its class makes it."""


def _saved_untrained(history: CellHistory, owners: ModelsAndOptimizers) -> Iterator[Told]:
    """A model that had been trained, was made anew by its cell, and saved with nothing done to it in between."""
    for name, _ in owners.whole:
        made = [b for b in history.bindings(name, "assign") if not keeps_object(b)]
        trained = list(history.training(made[-2].number - 1, made[-1].number)) if len(made) > 1 else []
        since = made[-1].at if trained else (1 << 30, 0)
        for at, call in calls_after(history, since, name):
            if not dotted(call.func).rpartition(".")[2].startswith("save") or history.same(at.number)[0] < trained[0]:
                continue  # it saved the untrained one in the first round, too
            between = [c.number for c in history.cells.values() if since[0] <= c.number <= at.number]
            done = first_training_use(history, name, since)
            methods = set().union(*map(history.methods, between))
            if not any(map(REVIVES.match, methods)) and (done is None or (number_of(done) or 0) > at.number):
                title = (
                    f"In [{at.number}] saves `{name}` as it was made, with random weights: In [{since[0]}] made it "
                    "again after the training, and nothing has trained it since then"
                )
                fix = ("Train it before it is saved.", f"# run In [{trained[-1]}] again, then save")
                where = history.place(made[-1])
                yield told("notebook/cells-out-of-order", title, (name,), fix, where, at.place_of(call))
                return


TIMERS = frozenset("timeit repeat autorange blocked_autorange adaptive_autorange".split())
PROFILERS = frozenset("prun lprun memit".split())
"""Functions, methods and magics that run a statement many times; magics that run it once, to look at it."""


def _timed(cell: Cell) -> Iterator[tuple[ast.stmt, list[ast.stmt], bool]]:
    """(statement, what it times, whether many times) of `%timeit step()`, `timeit.timeit(step)`,
    `Timer("step()", globals=globals()).timeit(100)`."""
    for statement in running((parse(cell.source) or ast.Module([], [])).body):
        inside, calls = unwrapped(statement), [n for n in nodes([statement]) if isinstance(n, ast.Call)]
        magic = getattr(calls[0].args[0], "value", "") if inside != [statement] else ""
        if magic == "timeit" or magic in PROFILERS:
            yield statement, inside, magic == "timeit"
        elif any(dotted(n.func).rpartition(".")[2] in TIMERS or getattr(n.func, "attr", "") in TIMERS for n in calls):
            texts = [n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and type(n.value) is str]
            trees = [tree for text in texts if "(" in text and (tree := parse(text)) is not None]
            yield statement, [statement, *(s for tree in trees for s in tree.body)], True


def _trained_by_timing(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """A measurement of time whose step has trained the model itself, which a later cell takes as it was before."""
    cells = history.mentioning(*TIMERS, *PROFILERS)
    timing = {(cell.number, s.lineno) for cell in cells for s, *_ in _timed(cell)}
    for cell, (statement, inside, often) in [(at, one) for at in cells for one in _timed(at)]:
        reached = history.reach_of(inside, cell.number)
        if not {"backward", "step"} <= methods_of(reached):
            continue
        copied = {id(a) for n in nodes(reached) if isinstance(n, ast.Call) and "copy" in dotted(n.func) for a in n.args}
        own = {n.id for n in nodes(reached) if isinstance(n, ast.Name) and id(n) not in copied}
        for name in sorted(own & read_by(reached) & names.keys()):
            held = attributes(names[name]).values() if is_user_module(module_name(type(names[name]))) else ()
            if is_module(names[name]) or any(map(is_module, held)):
                end = max(s.end_lineno or 0 for s in [statement, *inside])
                used = _used_as_it_is(name, (cell.number, end), timing, history)
                trained = used is not None and any(history.training(number_of(used) or 0, 1 + max(history.cells)))
                if used is None or not often and (not trained or "backward" in history.methods(number_of(used) or 0)):
                    continue
                place = cell.place(statement.lineno)
                title = (
                    f"`{place.text}` does not only measure: each run of it is a step of training of `{name}` itself, "
                    f"which {named(used)} takes as if nothing had happened to it"
                )
                kept = [name, *sorted(n for n in own & names.keys() if is_optimizer(names[n]))] if not held else []
                states = ", ".join(f"{n}.state_dict()" for n in kept) or name
                back = (f"{n}.load_state_dict(kept[{at}])" for at, n in enumerate(kept))
                lines = ("import copy", f"kept = copy.deepcopy([{states}])", place.text, *back)
                code = "\n".join(filter(None, [*lines, f"{name} = kept[0]" if held else ""]))
                fix = ("Measure with a copy, or put weights and the optimizer's state back afterwards.", code)
                yield told("notebook/cell-run-twice", title, (name, place.text or ""), fix, place, used)
                return


def _used_as_it_is(name: str, at: tuple[int, int], timing: set[tuple[int, int]], history: CellHistory) -> Where | None:
    """Where a model is called, or given to a function, after this place, unless it was made anew or put back before."""
    for cell in [cell for cell in history.cells.values() if cell.number >= at[0]]:
        for one in [s for s in cell.body if (cell.number, s.lineno) > at and not isinstance(s, DEFINED)]:
            reached = history.reach_of(running([one]), cell.number)
            if name not in read_by(reached) | {path for s in running([one]) for path, *_ in bound(s)}:
                continue
            binds = [b for b in cell.bindings if b.path == name and b.node is one and not keeps_object(b)]
            if binds or PUT_BACK.search("\n".join(map(ast.unparse, reached))):
                return None
            calls = [n for n in nodes(reached) if isinstance(n, ast.Call)]
            of = {dotted(n.func) for n in calls if root_of(dotted(n.func)) == name} - {f"{name}.{m}" for m in IDLE}
            given = any(name in map(dotted, arguments_of(n)) and not reads_only(dotted(n.func)) for n in calls)
            if (of or given) and (cell.number, one.lineno) not in timing:
                return cell.place(one.lineno)
    return None


def _models_of(names: Mapping[str, Any], history: CellHistory, number: int) -> set[str]:
    """The variables that hold a model and that a cell, or what it runs, reads."""
    return {name for name in _read_in(history, number) if is_module(names.get(name))}


def _read_in(history: CellHistory, number: int) -> set[str]:
    """The notebook's variables that a cell reads, also in functions of cells, whose own variables are none."""
    return read_by(history.reach(number))


def _fresh_models(names: Mapping[str, Any], history: CellHistory, first: int, second: int) -> bool:
    """Whether all models that a cell trains are others than those of an earlier training, and none was loaded."""
    models, before = _models_of(names, history, second), _models_of(names, history, first)
    between = [number for number in history.cells if first < number < second]
    if any({"load_state_dict", "deepcopy"} & history.methods(number) for number in between):
        return False
    made = {m: [b for b in history.bindings(m) if not keeps_object(b)] for m in models}
    return bool(models) and all(m not in before or any(first < b.number <= second for b in made[m]) for m in models)


RENEWS = re.compile(r"(^|_)(reset|clear|restart|__init__|load_state_dict)")
"""Methods after which an object holds nothing of the earlier run."""


def _renewed(name: str, history: CellHistory, first: int, second: int) -> bool:
    """Whether a variable was made anew, reset or set between two runs, or by what the second one runs."""
    outer = history.cells[second].body
    if any(first < b.number < second or b.number == second and b.node in outer for b in history.bindings(name)):
        return True
    between = [c.statements for n, c in history.cells.items() if first < n < second]
    for node in nodes([*(s for one in between for s in one), *history.reach(second)]):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if root_of(called) == name and RENEWS.search(called.rpartition(".")[2]):
            return True
        plain = isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.List, ast.Dict, ast.UnaryOp))
        if plain and any(root_of(ast.unparse(target)) == name for target in node.targets):  # type: ignore[attr-defined]
            return True
    return False


def _carried_over(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """What a training goes on with where a training of another model has left it: the best value of an early stopper,
    the counts of a meter, a counter or a history that a function changes."""
    runs = list(history.training(0, 1 + max(history.cells, default=0)))
    read = {number: _read_in(history, number) for number in runs if len(runs) > 1}
    for second in runs[1:]:
        for name in sorted(read[second] & names.keys()):
            first = max((n for n in runs if n < second and name in read[n]), default=None)
            if first is None:
                continue
            made = next((b for b in reversed(history.bindings(name, "assign")) if b.number < first), None)
            changes = _kept_state(name, names, history, second) if made is not None else ""
            if made is None or not changes or not _fresh_models(names, history, first, second):
                continue
            if not _renewed(name, history, first, second):
                title = (
                    f"`{name}` still holds what the training of In [{first}] has left in {changes}: In [{second}] "
                    "trains another model, and goes on with it"
                )
                fix = ("Make it anew in the cell that trains.", history.text(made))
                body = history.cells[second].statements
                uses = next((s for s in reversed(body) if name in names_in(s)), body[-1])
                where = history.cells[second].place_of(uses)
                code = "notebook/cell-run-twice" if issubclass(type(names[name]), PLAIN_STATE) else SHARED
                yield Told(
                    code, title, (name,), where, (fix,), ((f"In [{made.number}] makes it", history.place(made)),)
                )
                return


PLAIN_STATE = (int, float, bool, type(None), list, dict)


def _kept_state(name: str, names: Mapping[str, Any], history: CellHistory, number: int) -> str:
    """What a variable keeps from one run to the next and decides or counts by, as a sentence names it; "" for none."""
    value, reached = names[name], history.reach(number)
    functions = [root for root in reached if isinstance(root, FUNCTIONS)]
    if type(value) is SimpleNamespace:
        inside = [n for n in nodes(reached) if isinstance(n, (ast.Assign, ast.AugAssign, ast.Compare))]
        compared = {dotted(part) for n in inside if isinstance(n, ast.Compare) for part in (n.left, *n.comparators)}
        kept = compared & {path for n in inside for path in _changes(n, f"{name}.")}
        return listed(sorted(kept)) if kept else ""
    if issubclass(type(value), PLAIN_STATE):
        loops = [n for root in functions for n in ast.walk(root) if isinstance(n, (ast.For, ast.While))]
        changed = {path for loop in loops for n in ast.walk(loop) for path in _changes(n)}
        used = any(isinstance(n, (ast.Compare, ast.BinOp)) and name in names_in(n) for n in nodes(reached))
        later = first_read(history, name, (number, history.cells[number].body[-1].end_lineno or 0))
        whole, own = issubclass(type(value), (list, dict)), history.cells[number].statements
        loop = [n for s in own if isinstance(s, (ast.For, ast.While)) for n in ast.walk(s)]
        compared = {name for n in loop if isinstance(n, ast.Compare) for name in names_in(n)}
        if not whole and name in compared & {path for n in loop for path in _changes(n)}:
            return "it"
        shared = whole or any(name in n.names for f in functions for n in ast.walk(f) if isinstance(n, ast.Global))
        return "it" if name in changed and shared and (used or whole and later is not None) else ""
    if not is_user_module(type(value).__module__) or is_module(value) or issubclass(type(value), type):
        return ""
    bare = {id(n.value) for n in nodes(reached) if isinstance(n, ast.Expr)}  # what such a call returns is not used
    told = [n for n in nodes(reached) if isinstance(n, (ast.Call, ast.Attribute)) and id(n) not in bare]
    given = any(name in map(dotted, arguments_of(n)) for n in told if isinstance(n, ast.Call))
    calls = {id(n.func) for n in nodes(reached) if isinstance(n, ast.Call)}
    asked = (n.func if isinstance(n, ast.Call) else n for n in told if id(n) not in calls)
    if not given and not any(root_of(dotted(of)) == name for of in asked):
        return ""
    kind = [n for cell in history.cells.values() for n in cell.functions.get(type(value).__name__, ())]
    methods = [f for n in kind[-1:] for f in ast.walk(n) if isinstance(f, FUNCTIONS) and f.name != "__init__"]
    changed = {path for f in methods for n in ast.walk(f) for path in _changes(n, "self.")}
    decides = [n for f in methods for n in ast.walk(f) if isinstance(n, ast.Compare)]
    operands = [part for n in decides for part in (n.left, *n.comparators)]
    operands += [part.left for part in operands if isinstance(part, ast.BinOp) and not isinstance(part.op, ast.Mod)]
    shares = [n for f in methods for n in ast.walk(f) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    kept = {dotted(part) for part in (*operands, *(n.left for n in shares))} & changed
    return listed([part.replace("self", name, 1) for part in sorted(kept)]) if kept else ""


def _changes(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """The variable, or the attribute of `self`, that a statement sets, adds to or puts something into."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend"):
        targets = [node.func.value]
    for target in [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
        each = [n for n in ast.walk(target) if isinstance(n, ast.Subscript) and not isinstance(n.slice, ast.Constant)]
        path = ast.unparse(target).partition("[")[0]
        if path.startswith(prefix) and not each:  # `scores[name]` is one for each
            yield path


def _begun_alike(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Models whose function, or loop, seeds before it makes each: they are one model still, after their training."""
    for name, value in names.items():
        models = list(value.values() if type(value) is dict else value) if type(value) in (list, tuple, dict) else []
        made = history.bindings(name, "assign")[-1:]
        if len(models) < 2 or not made or not all(map(is_module, models)) or len({*map(id, models)}) < len(models):
            continue
        later = [cell for number, cell in history.cells.items() if number >= made[0].number]
        roots = [r for r in history.reach(made[0].number) if isinstance(r, (*FUNCTIONS, ast.For))]
        seeds, trained = seeding(roots), next(history.training(made[0].number - 1, 1 << 30), 1 << 30)
        if (
            not seeds
            or trained > later[-1].number
            or any(re.search(r"load_state_dict|copy_\(", c.source) for c in later)
        ):
            continue
        weights = [[p for _, p in parameters_of(model)] for model in models]
        shapes = [[p.shape for p in one] for one in weights]
        same = shapes.count(shapes[0]) == len(shapes)
        same = same and all(torch.equal(a, b) for one in weights[1:] for a, b in zip(weights[0], one))
        end = next((s.end_lineno for s in history.cells[trained].body[::-1] if "backward" in ast.unparse(s)), 0)
        read = first_read(history, name, (trained, end or 0))
        if same and read is not None:
            text = ast.unparse(seeds[0])
            cell = next(cell for cell in reversed(history.cells.values()) if text in cell.source)
            title = (
                f"All {len(models)} models of `{name}` have the same weights, after their training as well: `{text}` "
                "begins each of them with the same random numbers"
            )
            fix = ("Seed once, before the first is made.", f"{text}\n{history.text(made[0])}")
            where, links = cell.place(seeds[0].lineno), ((f"{named(read)} uses them", read),)
            yield Told("notebook/shared-object", title, (name, text), where, (fix,), links)


def _seeded_once(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Two runs of one training that a cell compares, and that differ, as only the first begins right after a seed."""
    trained = set(history.training(0, 1 + max(history.cells, default=0)))
    for node in (n for c in history.mentioning("==", "equal", "close") for n in nodes(history.reach(c.number))):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else getattr(node, "args", None)
        paths = [dotted(one) for one in compared] if type(compared) is list else []
        made = sorted((b for path in paths for b in history.bindings(path, "assign")[-1:]), key=lambda b: b.at)
        if len(paths) != 2 or len(made) != 2 or {b.number for b in made} - trained or paths[0] == paths[1]:
            continue
        first, second = made
        values = [names.get(path) for path in paths]
        if all(type(value) is torch.Tensor for value in values):
            values = [value.tolist() for value in values]  # type: ignore[union-attr]
        differ = all(type(value) in (int, float, list) for value in values) and values[0] != values[1]
        if ast.unparse(first.value) != ast.unparse(second.value) or not differ:  # type: ignore[arg-type]
            continue
        seeds = [(c.number, n.lineno) for c in history.cells.values() for n in seeding(c.statements)]
        own = seeding([root for root in history.reach(second.number) if isinstance(root, FUNCTIONS)])
        before = [at for at in seeds if at < first.at]
        if before and not own and not any(first.at < at < second.at for at in seeds):
            title = (
                f"`{first.path}` and `{second.path}` are two runs of one training, and differ: In [{before[-1][0]}] "
                "seeds before the first, and the second goes on with the random numbers where that ended"
            )
            fix = ("Seed before each of them.", f"torch.manual_seed(0)\n{history.text(second)}")
            where, used = history.place(second), history.cells[before[-1][0]].place(before[-1][1])
            yield Told(
                "notebook/cell-run-twice",
                title,
                (second.path, first.path, "manual_seed"),
                where,
                (fix,),
                ((f"{named(used)} seeds", used),),
            )
            return


def _seeded_in_each_call(history: CellHistory) -> Iterator[Told]:
    """A function that seeds with a constant before it draws, called in each step of a training: all steps get one
    draw."""
    for cell in history.reaching("backward"):
        for loop in [n for n in nodes(history.reach(cell.number)) if isinstance(n, (ast.For, ast.While))]:
            own = [s for s in loop.body if not isinstance(s, (ast.For, ast.While))]
            trained, steps = set[str](), [n for n in nodes(running(own)) if isinstance(n, ast.Call)]
            trained |= {root_of(ast.unparse(n.func)) for n in steps if ast.unparse(n.func).endswith(".backward")}
            for s in reversed(list(running(own))):
                if trained & {path for path, *_ in bound(s)}:
                    trained |= names_in(getattr(s, "value", None))
            for name in sorted(trained):
                made = [b for b in history.bindings(name, "def") if b.number <= cell.number][-1:]
                calls = [n for b in made for n in ast.walk(b.node) if isinstance(n, ast.Call)]
                for seed, draw in [(s, d) for s in calls for d in calls if draws_after(s, d)]:
                    where, used = history.cells[made[0].number].place(seed.lineno), cell.place_of(loop)
                    title = (
                        f"`{name}` draws the same in each call: `{ast.unparse(seed)}` begins the random numbers anew "
                        f"before `{ast.unparse(draw)}`, and all steps of {named(used)} are taken on one draw"
                    )
                    fix = ("Seed once, in a cell above the loop.", f"{ast.unparse(seed)}  # not in `{name}`")
                    blamed = (name, dotted(seed.func).rpartition(".")[2])
                    yield told("notebook/setting-left-on", title, blamed, fix, where, used)
                    return


def _gradients_left(names: Mapping[str, Any], history: CellHistory) -> Iterator[Told]:
    """Gradients of a look, or of a run that was interrupted, in the first step of a loop that clears only after it."""
    for second in history.training(0, 1 + max(history.cells, default=0)):
        roots = [root for root in history.reach(second) if isinstance(root, FUNCTIONS)]
        for root in [ast.Module(history.cells[second].body, []), *roots]:
            at = {word: _lines_of(root, word, history) for word in ("backward", "zero_grad")}
            ahead = any(_lines_of(s, "zero_grad", history) for s in history.cells[second].statements)
            if not all(at.values()) or at["zero_grad"][0] < at["backward"][0] or root in roots and ahead:
                continue
            for model in sorted(_models_of(names, history, second)):
                left = _left_by(model, root, (at["backward"][0], at["zero_grad"][0]), names, history, second)
                if left is not None:
                    title = (
                        f"The first step of In [{second}] adds to the gradients that In [{left[0]}] has left in "
                        f"`{model}`: the loop clears them only after its step"
                    )
                    fix = ("Clear them before each backward().", "optimizer.zero_grad()\nloss.backward()")
                    where, used = history.cells[left[0]].place(left[1]), history.cells[second].place()
                    yield told("notebook/setting-left-on", title, (model, "zero_grad"), fix, where, used)
                    return


def _lines_of(root: ast.AST, word: str, history: CellHistory) -> list[int]:
    """The lines at which a cell or a function itself calls a method."""
    statements = [s for s in running(getattr(root, "body", [root])) if not isinstance(s, DEFINED)]
    calls = (n for n in nodes(statements) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return sorted(n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == word)


def _left_by(
    model: str, root: ast.AST, lines: tuple[int, int], names: Mapping[str, Any], history: CellHistory, before: int
) -> tuple[int, int] | None:
    """The cell and the line that left gradients in a model. lines: of the loop's backward() and zero_grad()."""
    for number in sorted((n for n in history.cells if n < before), reverse=True):
        methods, cell = history.methods(number), history.cells[number]
        if "backward" in methods and model in _models_of(names, history, number):
            if "zero_grad" not in methods and ".grad = None" not in cell.source:
                return number, next(iter(_lines_of(ast.Module(cell.body, []), "backward", history)), 1)
            stopped = list(cell_lines(last_error(), history))
            at_root = [line for n, line in stopped[1:] or stopped if lines[0] <= line < lines[1]]
            interrupted = stopped and number in history.same(stopped[0][0]) and at_root
            return (number, stopped[0][1]) if interrupted else None
        if "zero_grad" in methods or any(b.number == number and not keeps_object(b) for b in history.bindings(model)):
            return None
    return None


def _left_frozen(names: Mapping[str, Any], history: CellHistory, owners: ModelsAndOptimizers) -> Iterator[Told]:
    """A part that was frozen to train the rest, or for its features, where a later training has an optimizer of all."""
    for name, model in owners.whole:
        frozen = [(path, p) for path, p in parameters_of(model, name) if not p.requires_grad]
        ids = {id(p) for _, p in frozen}
        for title, optimizer in owners.optimizers if frozen else ():
            held, whole = {id(p) for p in optimizer_tensors(optimizer)}, f"{root_of(name)}.parameters()"
            made = [b for b in history.bindings(root_of(title), "assign") if b.value is not None]
            last = history.text(made[-1]) if made else ""
            if whole not in last or "requires_grad" in last or not ids <= held:
                continue
            for at in [c for c in history.reaching("requires_grad", "requires_grad_") if c.mentions("requires_grad")]:
                freezes = next((n for n in nodes(history.reach(at.number)) if _freezes(n)), None)
                runs = [n for n in history.training(at.number, 1 + max(history.cells)) if n >= made[-1].number]
                stage = {b.number for c in history.cells.values() for b in c.bindings if _of_a_part(b, whole)}
                if freezes is None or not runs or title not in _read_in(history, runs[0]):
                    continue
                parts = {n for n, one in owners.top if {id(p) for _, p in parameters_of(one)} <= ids} - {name}
                if _takes_features(at, name, parts) or any(at.number <= number < runs[0] for number in stage):
                    says = (
                        f"`{title}` has all of `{name}`, but {len(frozen)} of its tensors stay as they are in "
                        f"In [{runs[0]}]: In [{at.number}] froze them for what it did, and nothing has set them free"
                    )
                    part = next(iter(sorted(parts)), frozen[0][0].rpartition(".")[0])
                    fix = ("Let them be trained again.", f"{name}.requires_grad_(True)")
                    used = history.cells[runs[0]].place()
                    blamed = (name, part, "requires_grad", title)
                    yield told("notebook/setting-left-on", says, blamed, fix, at.place_of(freezes), used)
                    return


def _takes_features(cell: Cell, model: str, parts: set[str]) -> bool:
    """Whether a cell computes something with a part of a model, without gradients: `features = net.body(x)`."""
    blocks = [
        s for s in cell.statements if isinstance(s, ast.With) and re.search("no_grad|inference_mode", ast.unparse(s))
    ]
    values = [s.value for s in running(blocks) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call)]
    called = {ast.unparse(value.func) for value in values if isinstance(value, ast.Call)}
    return any(of in parts or root_of(of) == model != of and not of.startswith(f"{model}.eval") for of in called)


def _freezes(node: ast.AST) -> bool:
    """`part.requires_grad_(False)`, `p.requires_grad = False`."""
    if isinstance(node, ast.Assign):
        off = getattr(node.value, "value", None) is False
        return off and any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
    of = node.func if isinstance(node, ast.Call) and node.args else None
    off = getattr(node.args[0], "value", None) is False if isinstance(node, ast.Call) and node.args else False
    return off and isinstance(of, ast.Attribute) and of.attr == "requires_grad_"


def _of_a_part(binding: CellBinding, whole: str) -> bool:
    """Whether a statement makes an optimizer of less than all parameters."""
    call = binding.value if isinstance(binding.value, ast.Call) and binding.value.args else None
    given = ast.unparse(call.args[0]) if call is not None else ""
    kind = dotted(call.func).rpartition(".")[2] if call is not None else ""
    optimizer = issubclass(type(getattr(torch.optim, kind, 0)), type)
    return optimizer and given != whole and ("parameters()" in given or "requires_grad" in given)
