"""Cells that ran again: statements that consume their own result, or act a second time on the same object."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from nbdebug.observe.variables import attributes, class_attribute, closure_variables, is_user_module, members
from nbdebug.report import Where
from nbdebug.text import module_name
from nbdebug.tools.notebook.cells import (
    DEFINED,
    At,
    CellBinding,
    CellHistory,
    arguments_of,
    bound,
    cell_lines,
    dotted,
    error_message,
    first_read,
    first_training_use,
    keeps_object,
    names_in,
    nodes,
    number_of,
    read_by,
    root_of,
    running,
    traceback_links,
)
from nbdebug.tools.notebook.rules import NOWHERE, RunTwice, Told, named
from nbdebug.tools.notebook.stale_objects import is_module, modules_of

SAME = frozenset(
    "to cuda cpu float double half long bool detach train eval compile requires_grad_ rename astype fillna clip clamp "
    "contiguous sort_values sort_index sorted drop_duplicates dropna copy clone".split()
)
"""Methods that change nothing when they are applied again."""
REFUSED = (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError, OSError, StopIteration)
"""What a second application raises: what it takes is gone, or is of another kind by now; RecursionError is one."""
GONE = frozenset("chdir rename move remove unlink rmdir replace".split())
"""Functions after which a path no longer is where it was."""
ONCE = re.compile(r"already|more than one|exists|twice|\bonce\b|Tried to step")
"""Messages of what can be done once: a second `optimizer.add_param_group(…)`, `frame.insert(0, "id", …)`; or a number
of times: `schedule.step()`."""


def runs_twice(names: Mapping[str, Any], history: CellHistory, error: BaseException | None) -> list[RunTwice]:
    """The last failure, if its statement consumes its own result (`table = table.drop(…)`, `y = table.pop("y")`) and
    ran before on the same variable; else a tensor or an array that a statement has divided a second time by what does
    not come from it (`x = x / 255`), if a call takes it after that."""
    if error is not None and issubclass(type(error), REFUSED):
        for number, line in reversed(list(cell_lines(error, history))):
            twice = _refused(number, line, error, names, history)
            first = history.cells.get(number_of(twice.first) or 0) if twice else None
            if first is not None and "not callable" in str(error) and first.source != history.cells[number].source:
                break  # two cells take one name for two things
            if twice:
                return [dataclasses.replace(twice, error=type(error).__name__)]
        if twice := _consumed_by_call(error, names, history):
            return [dataclasses.replace(twice, error=type(error).__name__)]
    for number in reversed(history.cells):
        for statement in history.cells[number].statements:
            outer = statement in history.cells[number].body
            for check in (_used_up, _doubled, _applied_again, _shown, _carried_on, _rows_twice)[: None if outer else 1]:
                twice = None if isinstance(statement, DEFINED) else check(number, statement, names, history)
                grown = twice is not None and check is _shown and "." in twice.name and error is None
                if twice is not None and not (grown and any(history.training(number_of(twice.first) or 0, number))):
                    return [twice]  # else a part grows between trainings, on purpose
    return []


EMPTY = frozenset(["0", "0.0", "-1", "[]", "list()", "float('inf')", "-float('inf')"])
"""What a counter, a sum, a best value or a history begins as."""
GATHERS = re.compile(r"(?:cat|stack|concatenate|_score|_report|confusion_matrix)$")
"""Functions that take all that was collected as the rows of one evaluation."""


def _carried_on(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A loop that goes on where its last run ended, as what it counts or collects was made in an earlier cell: a
    history or a counter of a training whose model was made anew meanwhile; a sum from which a mean is taken; the rows
    of an evaluation before the training."""
    if not isinstance(statement, (ast.For, ast.With)):
        return None
    cell = history.cells[number]
    trains = "backward(" in cell.source
    added = [(one, path) for one in running([statement]) for path in _added(one)]
    for one, path in added:
        if root_of(path) not in names or any(b.number == number and b.node is not one for b in history.bindings(path)):
            continue
        twice = _run_before(history, number, one, path)
        if twice is None:
            continue
        first = number_of(twice.first) or number
        made = (b.value for b in reversed(history.bindings(path)) if b.value and history.text(b) == twice.renewal)
        begun = ast.unparse(next(made, one))
        if begun not in EMPTY and not re.match(r"(torch|np)\.zeros\(", begun):
            found = False
        elif trains:
            models = [n for n in names_in(statement) if is_module(names.get(n))]
            anew = any(first < b.number <= number and not keeps_object(b) for m in models for b in history.bindings(m))
            found = anew and _looked_at(history, path, number, one)
        else:
            shares = [n for n in nodes(cell.statements) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
            shares = [n for n in shares if path in names_in(n.left)]
            calls = [n for n in nodes(cell.statements) if isinstance(n, ast.Call) and GATHERS.search(dotted(n.func))]
            joined = any(path in map(dotted, arguments_of(n)) for n in calls)
            found = any(not names_in(n.right) & {p for _, p in added} for n in shares)
            found = found or bool(shares or joined) and any(history.training(first, number))
        if found:
            return dataclasses.replace(twice, how="carried on")
    return None


def _added(statement: ast.stmt) -> Iterator[str]:
    """The variables to which a statement adds: `total += loss`, `losses.append(loss)`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        of = statement.target
        yield from filter(None, [dotted(of.value if isinstance(of, ast.Subscript) else of)])
    path, called, _ = _chain(statement)
    if path and called in (["append"], ["extend"]):
        yield path


def _looked_at(history: CellHistory, path: str, number: int, adding: ast.stmt) -> bool:
    """Whether what was collected is read, other than by the statement that adds to it."""
    own = {id(n) for n in ast.walk(adding)}
    later = (cell for cell in history.mentioning(root_of(path)) if cell.number >= number)
    loads = (
        n for cell in later for n in nodes(cell.statements) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    )
    return any(n.id == path and id(n) not in own for n in loads)


JOINS = ("concat", "cat", "vstack", "hstack", "concatenate", "append")
ROWS = 20_000
"""The rows of a list or a table that are compared."""


def _rows_twice(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A statement that adds rows to a list, a dict of lists or a table that an earlier cell made, and has done so
    before: the same rows stand in it twice, from its beginning, and a later line reads them."""
    inside = list(running([statement]))
    own = {path for s in inside for path, *_ in bound(s)}
    for one, path in [(s, path) for s in inside for path in _filled(s, history)]:
        value = names.get(path)
        joined = _is_array(value) and isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
        if type(value) not in (list, dict) and not joined or own & {path} and type(one) not in GROWS:
            continue
        alike = functools.partial(_fills, path=path, history=history)
        twice = _run_before(history, number, one, path) or _run_before(history, number, one, path, alike)
        if twice is None or not twice.renewal or not (rows := _same_rows(value)):
            continue
        first, at = number_of(twice.first) or number, (number, statement.end_lineno or 0)
        inputs = [history.bindings(n, "assign") for n in names_in(statement) - own - {path}]
        changed = (b for made in inputs for b in made if first < b.number <= number and b.at < (number, one.lineno))
        before = {history.text(b) for made in inputs for b in made if b.number <= first}
        if all(history.text(b) in before for b in changed) and _taken(history, path, at) is not None:
            proof = f"`{path}` begins with the same {rows} rows twice"
            return dataclasses.replace(twice, how="carried on", proof=proof, times=max(2, twice.times))
    return None


GROWS = (ast.Assign, ast.AugAssign)


def _filled(statement: ast.AST, history: CellHistory) -> set[str]:
    """The variables to which a statement adds: `rows.append(row)`, `rows += more`, `groups[kind].append(row)`, `table =
    pd.concat([table, part])`, `read_into(rows)`."""
    found = set[str]()
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        found.add(dotted(statement.target))
    if isinstance(statement, ast.Assign):
        value, path = statement.value, dotted(statement.targets[0])
        joins = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in JOINS
        grows = joins or isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        found |= {path} & names_in(value) if grows else set()
    for call in nodes([statement]) if isinstance(statement, (ast.Expr, ast.Assign)) else ():
        if not isinstance(call, ast.Call):
            continue
        of = call.func
        if isinstance(of, ast.Attribute) and of.attr in ("append", "extend"):
            while isinstance(of, (ast.Attribute, ast.Subscript, ast.Call)):
                of = of.func if isinstance(of, ast.Call) else of.value
            found.add(dotted(of))
        for function in [b.node for b in history.bindings(dotted(call.func), "def")[-1:]]:
            into = {p for s in running(function.body) for p in _added(s)}  # type: ignore[attr-defined]
            given = [*zip(call.args, function.args.args), *((k.value, k) for k in call.keywords)]  # type: ignore
            found |= {dotted(a) for a, parameter in given if parameter.arg in into}
    return found - {""}


def _fills(statement: ast.AST, path: str, history: CellHistory) -> str:
    return path if path in _filled(statement, history) else ""


def _same_rows(value: Any) -> int:
    """How many different rows stand twice, one block after the other, at the beginning of a list or a table, after one
    other row at most; 0 for less than three."""
    if type(value) is dict:
        return max((_same_rows(part) for part in value.values() if type(part) is list), default=0)
    if type(value) is not list:
        value = value.to_numpy() if hasattr(value, "to_numpy") else value
        value = value[:ROWS] if value.ndim else ()
    rows = list(map(_row, value[:ROWS]))
    for start in (0, 1):
        keys = rows[start:]
        for size in [n for n in range(3, len(keys) // 2 + 1) if keys[n] == keys[0]]:
            if keys[:size] == keys[size : 2 * size] and len(set(keys[:size])) > 2:
                return size
    return 0


def _row(item: Any, deep: int = 0) -> Any:
    """What stands for a row: its numbers and texts, of a long one some of them; of another object which one it is."""
    kind = type(item)
    if kind in (str, int, float, bool, bytes, type(None), complex):
        return repr(item)
    if deep < 4 and kind.__name__ in ("Tensor", "ndarray") and _is_array(item):
        flat = item.detach().reshape(-1) if kind is torch.Tensor else item.reshape(-1)
        return (*item.shape, *(_row(one, 4) for one in flat[:: max(1, len(flat) // 64)].tolist()))
    if deep < 4 and kind in (list, tuple, dict):
        inside = list(item.items() if kind is dict else item)
        return (len(inside), *(_row(one, deep + 1) for one in inside[:: max(1, len(inside) // 64)]))
    own = is_user_module(module_name(kind)) and not is_module(item) and deep < 4
    return (kind.__name__, _row(attributes(item), deep + 1)) if own else id(item)


def _taken(history: CellHistory, name: str, at: At, *partners: str) -> Where | None:
    """The first line after this place that uses a variable, other than to print it or its length, until it is made
    anew. partners: variables of which one is used in the same line, or what was made of them since then."""
    with_it = set(partners)
    for cell in [cell for cell in history.cells.values() if cell.number >= at[0]]:
        for one in [s for s in cell.body if (cell.number, s.lineno) > at and not isinstance(s, DEFINED)]:
            seen = {id(n) for call in ast.walk(one) if _looks(call) for n in ast.walk(call)}
            own = {n.id for n in ast.walk(one) if isinstance(n, ast.Name) and id(n) not in seen}
            read = own | read_by(root for root in history.reach_of(running([one]), cell.number) if root is not one)
            made = [b for b in cell.bindings if b.node is one and b.how == "assign"]
            if any(b.path == name and name not in names_in(b.value) for b in made):
                return None
            if name in read and (not partners or with_it & read):
                return cell.place(one.lineno)
            for b in made:
                with_it = with_it | {b.path} if with_it & names_in(b.value) else with_it - {b.path}
    return None


def _looks(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assert) or isinstance(node, ast.Call) and dotted(node.func) in ("print", "len", "display")
    )


READS = frozenset("read readlines read_csv load loads loadtxt list tuple set dict sorted sum max min".split())
"""Functions and methods that go through an iterator, or a file, to its end."""


def _used_up(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A statement that goes through an iterator (`pairs = zip(x, y)`, an open file), where an earlier cell, or an
    earlier round of a loop, has gone through it to its end."""
    if isinstance(statement, (ast.For, ast.While)):
        inside = list(running(statement.body))
        anew = {path for s in inside for path, *_ in bound(s)}
        for one, path in [(s, path) for s in inside for path in _gone_through(s, history) - anew]:
            value, made = names.get(path), history.bindings(path, "assign")[-1:]
            if made and class_attribute(value, "__next__") is not None and not is_user_module(module_name(type(value))):
                place, text = history.cells[number].place(one.lineno), history.text_of(number, one).partition("\n")[0]
                last = (history.text(made[0]), place, place, history.place(made[0]), "used up")
                return RunTwice(path, text, 2, "", *last)
    for path in _gone_through(statement, history):
        value = names.get(path)
        if class_attribute(value, "__next__") is None or is_user_module(module_name(type(value))):
            continue  # one of the user's own may begin anew
        twice = _run_before(history, number, statement, path, functools.partial(_used, path=path, history=history))
        if twice is not None and not any(cell.mentions(f"{path}.seek(") for cell in history.mentioning(path)):
            return dataclasses.replace(twice, statement=twice.statement.partition("\n")[0], how="used up")
    return None


def _used(statement: ast.AST, path: str, history: CellHistory) -> str:
    return path if path in _gone_through(statement, history) else ""


def _gone_through(statement: ast.AST, history: CellHistory | None = None) -> set[str]:
    """The variables that a statement iterates to the end. history: also those of functions that it calls."""
    found: set[str] = set()
    if isinstance(statement, ast.For):
        if any(isinstance(n, (ast.Break, ast.Return, ast.Yield)) for n in ast.walk(statement)):
            return found
        found.add(dotted(statement.iter))
    for node in nodes([statement]) if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)) else ():
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            found.add(dotted(node.generators[0].iter))
        elif isinstance(node, ast.Call):
            of = dotted(node.func)
            owner, _, last = of.rpartition(".")
            for function in [b.node for b in history.bindings(of, "def")[-1:]] if history is not None else ():
                loops = [s for s in running(function.body) if isinstance(s, ast.For)]  # type: ignore[attr-defined]
                read = set[str]().union(*map(_gone_through, loops))
                found |= {dotted(a) for a, p in zip(node.args, function.args.args) if p.arg in read}  # type: ignore
            if last in READS or last.startswith("clip_grad_") or issubclass(type(getattr(torch.optim, last, 0)), type):
                given = [a.generators[0].iter if isinstance(a, ast.GeneratorExp) else a for a in node.args[:1]]
                found |= {owner} if last.startswith("read") and not node.args else set(map(dotted, given))
    return found - {""}


def _doubled(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A statement that adds to an object what an earlier cell has added, as the object shows: a handler to a logger,
    a mask or a parametrization to a module; or that lowers a learning rate again. With a training since then it is done
    step by step, on purpose."""
    source, twice = history.cells[number].source, None
    if not any(word in source for word in (*ADDITIONS, "param_groups")):
        return None
    text = ast.unparse(statement)
    words = set(re.findall(r"\w+", text))
    if words & ADDITIONS and (name := next((n for n in sorted(words & names.keys()) if _has_double(names[n])), "")):
        twice = _run_before(history, number, statement, "")
        calls = f"`{name}` calls one function twice" if _called_twice(attributes(names[name])) else ""
        twice = twice and dataclasses.replace(twice, name=name, how="carried on" if calls else "", proof=calls)
    elif "param_groups" in words and re.search(r"\['lr'\] (?:\*=|/=|= .*\['lr'\])", text):
        twice = _run_before(history, number, statement, text.partition(".param_groups")[0].rpartition(" ")[2])
    trained = twice is not None and any(history.training(number_of(twice.first) or 0, number))
    return None if trained else twice


def _applied_again(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A statement that divides an array or a column, or takes the logarithm, a second time, and uses it then."""
    at = (number, statement.end_lineno or 0)
    if not any(word in history.cells[number].source for word in ("/", "div_", "[", "transform(", *FURTHER)):
        return None
    path, called, given = _chain(statement)
    of_itself = any(
        path in names_in(v) and f"{path}.new_" not in ast.unparse(v) for v in given
    )  # its values, not its type
    in_place = "div_" in called and _is_array(names.get(path)) and not of_itself
    if in_place and first_training_use(history, path, at) is not None:
        return _run_before(history, number, statement, path)
    for one in ast.walk(statement):
        if not isinstance(one, (ast.Assign, ast.AugAssign)):
            continue
        target = one.targets[0] if isinstance(one, ast.Assign) else one.target
        text, column = ast.unparse(target), isinstance(target, ast.Subscript)
        path = dotted(target.value) if isinstance(target, ast.Subscript) else text
        cut = len(history.cells[number].body) > 1 and module_name(type(names.get(path))).startswith("pandas")
        cut = cut and _cuts(one.value, text)
        if not cut and not _acts_again(one, text) or not _is_array(names.get(path)):
            continue
        renewed = _renewed(history, path, text, one) if column else history.bindings(path)[-1].node is not statement
        used = None if renewed else (first_read if column or cut else first_training_use)(history, path, at)
        scaler, fits = _scaler(one.value, text)
        if fits:  # of what it has scaled itself it learns to do nothing, with other rows as well
            used = first_read(history, scaler, (number, history.cells[number].body[-1].end_lineno or 0))
        elif scaler and f"{scaler}.fit" in history.cells[number].source:
            continue
        if used is not None and (twice := _run_before(history, number, statement, path)) is not None:
            first = history.cells[number_of(twice.first) or number].source
            if not cut or difflib.SequenceMatcher(None, first, history.cells[number].source).ratio() > ALIKE:
                return twice
    return None


ALIKE = 0.7
"""How alike (difflib's ratio) two texts of a cell are that ran again, perhaps after a change of some lines."""


def _chain(statement: ast.stmt) -> tuple[str, list[str], list[ast.expr]]:
    """The variable, the methods and their arguments of `images.sub_(0.5).div_(0.25)`."""
    value, called, given = statement.value if isinstance(statement, ast.Expr) else None, list[str](), list[ast.expr]()
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        called.append(value.func.attr)
        given += arguments_of(value)
        value = value.func.value
    return dotted(value), called, given


ADDITIONS = frozenset(
    "addHandler prune register_parametrization spectral_norm weight_norm orthogonal on_click observe on_submit".split()
)
"""Calls after which an object has a handler, a mask, a parametrization or a callback more."""


def _has_double(thing: Any) -> bool:
    """Whether a logger has two handlers for the same stream or file, or a module two masks or parametrizations of one
    kind on one parameter."""
    held = attributes(thing)
    if _called_twice(held):
        return True
    if type(held.get("handlers")) is list and not any(type(h) is FunctionType for h in held["handlers"]):
        to = [(type(h), attributes(h).get("baseFilename") or id(attributes(h).get("stream"))) for h in held["handlers"]]
        return len(set(to)) < len(to)
    if not is_module(thing):
        return False
    for _, part in modules_of(thing):
        inside = attributes(part)
        masks = [
            attributes(hook).get("_pruning_methods") or () for hook in inside.get("_forward_pre_hooks", {}).values()
        ]
        listed = inside.get("_modules", {}).values() if type(part).__name__ == "ParametrizationList" else ()
        if any(len({type(one) for one in group}) < len(group) for group in (*masks, tuple(listed))):
            return True
    return False


def _called_twice(held: Mapping[str, Any]) -> bool:
    """Whether a widget, or an object of the user's, calls two functions of one name: of two runs of a cell."""
    clicks = attributes(held.get("_click_handlers")).get("_trait_values") or {}
    notified = [one for kinds in (held.get("_trait_notifiers") or {}).values() for one in kinds.values()]
    for listed in (*(v for v in held.values() if type(v) is list), clicks.get("callbacks"), *notified):
        own = [f for f in listed or () if type(f) is FunctionType and is_user_module(f.__module__ or "")]
        called = [(f.__qualname__, "<" in f.__qualname__ and f.__code__, f.__closure__) for f in own]
        if any(one in called[:at] for at, one in enumerate(called)):
            return True
    return False


def _renewed(history: CellHistory, path: str, text: str, one: ast.stmt) -> bool:
    """Whether another statement than this one assigns to an item of a variable."""
    return any(
        isinstance(s, (ast.Assign, ast.AugAssign))
        and ast.unparse(s) != ast.unparse(one)
        and f"{text} =" in ast.unparse(s)
        for cell in history.mentioning(root_of(path))
        for s in cell.statements
    )


def _refused(
    number: int, line: int, error: BaseException, names: Mapping[str, Any], history: CellHistory
) -> RunTwice | None:
    """What of one line of a traceback had run before."""
    statement = history.cells[number].statement(line)
    if statement is not None and issubclass(type(error), RecursionError):
        return _calls_itself(statement, history)
    if statement is None or statement not in history.cells[number].statements:
        return None
    done = statement.value if isinstance(statement, ast.Expr) and ONCE.search(error_message(error)) else None
    once = [dotted(done.func).rpartition(".")[0]] if isinstance(done, ast.Call) else []
    if issubclass(type(error), StopIteration):  # of `next(batches)`
        once = [dotted(n.args[0]) for n in ast.walk(statement) if isinstance(n, ast.Call) and dotted(n.func) == "next"]
    calls = [n for n in nodes([statement]) if isinstance(n, ast.Call) and n.args]
    if issubclass(type(error), FileNotFoundError) and calls and dotted(calls[0].func).rpartition(".")[2] in GONE:
        twice = _run_before(history, number, statement, "")
        return twice and dataclasses.replace(twice, name=ast.unparse(calls[0].args[0]))
    for path in [*filter(None, once), *_consumed(statement)]:
        if root_of(path) in names and (twice := _run_before(history, number, statement, path)) is not None:
            return twice
    return _used_after(names, history, number, statement, f"{type(error).__name__}: {error_message(error)}")


def _consumed_by_call(error: BaseException, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """Where a function of a cell failed to take something out of what it was given, as an earlier call of it has taken
    it out: `width = settings.pop("width")`."""
    lines = list(cell_lines(error, history))[-2:]
    codes = [link.tb_frame.f_code for link in traceback_links(error)]
    called = [code for code in codes if history.cell_of(code.co_filename) is not None][-1:]
    taking, calling = (
        (history.cells[number].statement(line) for number, line in reversed(lines)) if lines[1:] else (None,) * 2
    )
    if taking is None or calling is None or not issubclass(type(error), LookupError):
        return None
    given = called[0].co_varnames[: called[0].co_argcount]
    function = str(getattr(called[0], "co_qualname", called[0].co_name)).removesuffix(".__init__").rpartition(".")[2]

    def taken(statement: ast.AST, name: str) -> str:
        """The variable that a statement passes to the function under this name."""
        for call in nodes([statement]):
            if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] == function:
                passed = dict(zip(given[1:] if given[:1] == ("self",) else given, call.args))
                passed |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                return dotted(passed.get(name))
        return ""

    for name in set(_consumed(taking)) & set(given):
        path = taken(calling, name)
        if path and root_of(path) in names:
            return _run_before(history, lines[0][0], calling, path, functools.partial(taken, name=name))
    return None


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


MOVES = frozenset(
    "unsqueeze permute transpose swapaxes movedim moveaxis expand_dims one_hot pad repeat merge join".split()
)
"""Functions that give another shape, or other columns, when they are applied again."""
MISFIT = re.compile(r"shape|size|dim|channel|out of|range|bound|KeyError", re.IGNORECASE)


def _used_after(
    names: Mapping[str, Any], history: CellHistory, number: int, statement: ast.stmt, message: str
) -> RunTwice | None:
    """The array that a failing line takes, if what its shape or its numbers come from ran a second time on it; or a
    list to which a cell has added a second time."""
    for name in names_in(statement) if MISFIT.search(message) else ():
        if type(names.get(name)) is list:
            added = [
                (cell.number, s)
                for cell in history.mentioning(name)
                for s in cell.statements
                if cell.number < number and isinstance(s, ast.Expr) and _chain(s)[:2] == (name, ["append"])
            ]
            if added and (twice := _run_before(history, *added[-1], name)) is not None:
                return twice
        again = _moved_in_place(names, history, number, name) if re.search("range|bound", message) else None
        if again is not None:
            return again
        made = [b for b in history.bindings(name) if b.number <= number] if _is_array(names.get(name)) else []
        for last in sorted(made, key=lambda b: b.at, reverse=True):
            value, own = last.value, name in names_in(last.value) or isinstance(last.node, ast.AugAssign)
            if not own or last.node not in history.cells[last.number].body:
                break
            called = [n.func for n in nodes([last.node]) if isinstance(n, ast.Call)]
            moved = any(getattr(of, "attr", dotted(of)) in MOVES for of in called)
            computes = last.node if isinstance(last.node, ast.AugAssign) else value
            shifted = isinstance(getattr(computes, "op", None), (ast.Add, ast.Sub, ast.Mult, ast.Div))
            if (moved or shifted) and (twice := _run_before(history, last.number, last.node, name)) is not None:
                return twice
    return None


def _moved_in_place(names: Mapping[str, Any], history: CellHistory, number: int, name: str) -> RunTwice | None:
    """The statement that adds to an array, or to a column of the table from which it is made, a second time:
    `kinds.sub_(1)`, `table["kind"] -= 1`."""
    made = history.bindings(name, "assign")[-1:] if name in names else []
    texts = {ast.unparse(n) for b in made for n in ast.walk(b.node) if isinstance(n, ast.Subscript)}
    for cell in reversed(history.mentioning(name, *(root_of(text) for text in texts))):
        for s in [s for s in cell.body if cell.number <= number]:
            column = ast.unparse(s.target) if isinstance(s, ast.AugAssign) else ""
            path, called, given = _chain(s)
            moved = path == name and _is_array(names[name]) and called in (["sub_"], ["add_"])
            given = given if moved else [s.value] if isinstance(s, ast.AugAssign) and column in texts else []
            if given and isinstance(given[0], ast.Constant):
                return _run_before(history, cell.number, s, root_of(column) or name)
    return None


def _shown(number: int, statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> RunTwice | None:
    """A statement that ran again, as the variable itself shows."""
    if path := _spoiled(statement, names, history):
        return _run_before(history, number, statement, path)
    path = _wrapped(number, statement, names, history)
    return _run_before(history, number, statement, path, _form) if path else None


def _spoiled(statement: ast.stmt, names: Mapping[str, Any], history: CellHistory) -> str:
    """The variable on which one statement ran again, as it shows: a column computed from itself (`table["y"] =
    table["y"].map(…)`) has no value left, a list of steps ends with one of the same kind twice, a list of names that a
    cell counts has one of them twice; "" of all others."""
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Subscript):
        path, key = dotted(target.value), getattr(target.slice, "value", None)
        table: Any = names.get(path)
        if module_name(type(table)).startswith("pandas") and ast.unparse(statement.value).startswith(
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
        for b in (*history.bindings(path), *(history.bindings(root_of(path)) if root_of(path) != path else ()))
        if b.at < at and not _reads(b.value, path) and not isinstance(b.node, ast.AugAssign)
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


def _reads(value: ast.expr | None, path: str) -> bool:
    """Whether an expression takes what a variable, or an attribute of one, holds."""
    return path in names_in(value) or "." in path and any(dotted(n) == path for n in nodes([value] if value else []))


FURTHER = frozenset("log log1p log2 log10 exp expm1 sqrt".split())
"""Functions that give another value when they are applied again."""


def _scaler(value: ast.expr | None, text: str) -> tuple[str, bool]:
    """Of `x = scaler.fit_transform(x)`, also within other calls, the scaler, and whether it is fitted."""
    while isinstance(value, ast.Call) and not getattr(value.func, "attr", "").endswith("transform") and value.args:
        value = value.args[0]
    given = isinstance(value, ast.Call) and value.args and ast.unparse(value.args[0]).removesuffix(".values") == text
    *_, scaler, method = ["", "", *dotted(value.func).split(".")] if given else ["", ""]  # type: ignore[union-attr]
    return (scaler, method == "fit_transform") if method in ("transform", "fit_transform") else ("", False)


def _acts_again(node: ast.stmt, text: str) -> bool:
    """`x = x / 255`, `x = (x - mean) / std`, `x /= 255`, `x = np.log(x)`: once more is another value. `x = x / x.max()`
    is not. text: that of the target."""
    value = node.value  # type: ignore[attr-defined]
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Div) and root_of(text) not in names_in(value)
    if _scaler(value, text)[0]:
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in FURTHER:
        return text in (ast.unparse(value.func.value), *map(ast.unparse, value.args[:1]))
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Div) or root_of(text) in names_in(value.right):
        return False
    left = value.left
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and root_of(text) not in names_in(left.right):
        left = left.left
    while isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute) and left.func.attr in SAME:
        left = left.func.value
    return ast.unparse(left) == text


def _cuts(value: ast.expr, text: str) -> bool:
    """`table = table.iloc[2:]`, `table = table[table.x < table.x.quantile(0.9)]`: once more takes further rows."""
    if not isinstance(value, ast.Subscript) or ast.unparse(value.value) not in (text, f"{text}.iloc", f"{text}.loc"):
        return False
    part, own = value.slice, [n for n in ast.walk(value.slice) if isinstance(n, ast.Call)]
    ends = [part.lower, part.upper] if isinstance(part, ast.Slice) else []
    cut = (re.fullmatch(form, ast.unparse(end)) for form, end in zip((r"[1-9]\d*", r"-\d+"), ends) if end is not None)
    return any(cut) or any(getattr(n.func, "attr", "") in ("quantile", "mean", "std", "median") for n in own)


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


def applied_twice(names: Mapping[str, Any], history: CellHistory, told: Container[str]) -> list[str]:
    """Notes on cells that ran more than once and compute a tensor or an array from itself: `x = x - 1`. told: the
    variables of which a finding tells it."""
    notes = []
    for number, ran in history.cells.items():
        for last in ran.bindings if len(history.same(number)) > 1 else ():
            value, path = last.value, last.path
            own = isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Div, ast.Sub, ast.Mult))
            if (
                not own
                or path not in names_in(value)
                or last.node not in ran.body
                or last is not history.bindings(path)[-1]
            ):
                continue
            twice = _run_before(history, number, last.node, path)
            if twice is not None and path not in told and _is_array(names.get(path)):
                notes.append(
                    f"`{twice.statement}` ran in {named(twice.first)} and {named(twice.where)}: it computes `{path}` "
                    f"from itself, so it has been applied {twice.times} times. If once was meant, name the result anew."
                )
    return notes


def _is_array(value: Any) -> bool:
    kind = type(value)
    return module_name(kind).partition(".")[0] in ("torch", "numpy", "pandas") and kind.__name__ in (
        "Tensor",
        "ndarray",
        "DataFrame",
    )


REORDERS = re.compile(r"shuffle\(|randperm\(|permutation\(|\bsample\(|\.reverse\(")
REMOVES = re.compile(r"\.pop\(|^del |inplace=True")
ROWLESS = re.compile(
    r"\bset\(|sorted\(|unique|Counter|\.copy\(|\bclone\(|deepcopy\(|\[:\]|^list\(\w+\)$|shuffle|sample|perm"
)
"""Statements after which rows stand in another order, or are fewer, each time that they run; of values that have no
row for each row, or are a copy."""


def rows_out_of_step(names: Mapping[str, Any], history: CellHistory) -> list[Told]:
    """Rows that a cell has put into another order, or thinned out, once more, after labels had been made from the order
    of before, where a later line takes both."""
    for cell in reversed(history.cells.values()):
        for statement in [s for s in cell.body if isinstance(s, (ast.Expr, ast.Assign, ast.Delete))]:
            text = ast.unparse(statement)
            orders, removes = REORDERS.search(text), REMOVES.search(text)
            for path in sorted(names_in(statement) & names.keys()) if orders or removes else ():
                rows = _length(names[path])
                anew = [b for b in history.bindings(path) if b.number == cell.number and b.node is not statement]
                if not rows or anew or (twice := _run_before(history, cell.number, statement, path)) is None:
                    continue
                first = number_of(twice.first) or 0
                for name in names:
                    made = history.bindings(name, "assign")[-1:]
                    if name == path or not made or not first <= made[0].number < cell.number or cell.mentions(name):
                        continue
                    fewer, before = _length(names[name]) - rows, (cell.number, 0)
                    if fewer < 0 or bool(fewer) is not bool(removes) or made[0].at < (first, statement.lineno):
                        continue
                    own = made[0].value is not None and not ROWLESS.search(ast.unparse(made[0].value))
                    if own and path in {of for of, _ in history.origins(name, before)} - {name}:
                        end = (cell.number, statement.end_lineno or 0)
                        used = _taken(history, name, end, path)
                        if used is not None:
                            return [
                                _out_of_step(
                                    name, path, history.text_of(cell.number, statement), twice, made[0], used, history
                                )
                            ]
    return []


def _out_of_step(
    name: str, path: str, text: str, twice: RunTwice, made: CellBinding, used: Where, history: CellHistory
) -> Told:
    title = (
        f"The rows of `{name}` and `{path}` no longer belong together: {named(twice.where)} ran `{text}` again after "
        f"{named(history.place(made))} had made `{name}` from the order of before, and {named(used)} takes both"
    )
    links = (
        (f"{named(twice.first)} ran it first", twice.first),
        (f"{named(history.place(made))} made `{name}`", history.place(made)),
        (f"{named(used)} takes both", used),
    )
    fix = (
        f"Make `{name}` again after it; or do it in the cell that makes `{path}`, so that it is done once.",
        history.text(made),
    )
    return Told("notebook/cell-run-twice", title, (path, name), twice.where, (fix,), links)


def _length(value: Any) -> int:
    """The rows of a list, an array or a table."""
    if type(value) in (list, tuple):
        return len(value)
    shape = value.shape if _is_array(value) or type(value).__name__ == "Series" else ()
    return int(shape[0]) if shape else 0


def numbered_twice(name: str, value: dict[Any, int], history: CellHistory) -> Iterator[Told]:
    """A vocabulary in which two entries have one number, as those of a cell that ran again took `len(…)` anew."""
    of = {number: key for key, number in value.items()}
    double = next((key for key, number in value.items() if of[number] != key), None)
    told = double is not None and not any(f"not in {name}" in cell.source for cell in history.cells.values())
    adding = [(c, n) for c in history.reaching(name) for n in nodes(history.reach(c.number)) if _numbers(n, name)]
    for cell, node in adding[1:][-1:] if told else ():
        title = (
            f"`{name}` gives {double!r} and {of[value[double]]!r} one number, {value[double]}: In [{cell.number}] "
            f"numbers again by `len({name})` what In [{adding[0][0].number}] had numbered already"
        )
        fix = ("Number only what is new.", f"{name}.setdefault(word, len({name}))")
        yield Told("notebook/cell-run-twice", title, (name,), cell.place_of(node), (fix,))


def _numbers(node: ast.AST, name: str) -> bool:
    """`vocab[word] = len(vocab)`"""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Subscript) and ast.unparse(node).endswith(f"= len({name})")


DRAWS = frozenset("randperm permutation random_split train_test_split sample choice".split())
SEEDS = frozenset("random_state generator seed rng".split())
PASSES = frozenset("DataLoader Subset TensorDataset iter".split())
"""Calls that draw at random, the arguments that fix what is drawn, and what passes it on."""


def splits_drawn_again(models: set[str], history: CellHistory) -> list[Told]:
    """A random split that was drawn again after a model had been trained on the first one, which is then judged by the
    second: what is held out now was trained on. models: their variables."""
    for number in [one.number for one in reversed(history.mentioning(*DRAWS))]:
        for drawn in history.cells[number].bindings:
            calls = [n for n in ast.walk(drawn.node) if isinstance(n, ast.Call)]
            if not any(dotted(n.func).rpartition(".")[2] in DRAWS for n in calls) or "seed(" in (
                history.cells[number].source
            ):
                continue
            before = _run_before(history, number, drawn.node, "")
            first = number_of(before.first) or 0 if before is not None else 0
            fixed = [keyword.value for n in calls for keyword in n.keywords if keyword.arg in SEEDS]
            goes_on = [b for one in fixed for b in history.bindings(dotted(one))[-1:]]  # a generator, made once
            if before is None or fixed and not any("enerator" in history.text(b) and b.number < first for b in goes_on):
                continue
            split = {b.path for b in history.cells[number].bindings if b.node is drawn.node}
            for b in [b for one in history.cells.values() if one.number >= number for b in one.bindings]:
                passed = isinstance(b.value, ast.Call) and dotted(b.value.func).rpartition(".")[2] in PASSES
                if (b.number == number or passed) and split & names_in(b.value):
                    split.add(b.path)
            for trained in history.training(first, number):
                loops = [s for s in history.cells[trained].body if "backward" in ast.unparse(s)]
                steps = [n for s in loops for n in ast.walk(s)] or nodes(history.reach(trained))
                read = {n.id for n in steps if isinstance(n, ast.Name)}
                kept = [m for m in models & read if not any(b.number >= number for b in history.bindings(m))]
                for held in sorted(split - read) if split & read else ():
                    used = first_read(history, held, (number, history.cells[number].body[-1].end_lineno or 0))
                    judged = history.cells.get(number_of(used) or 0) if used is not None else None
                    if judged is not None and any(
                        isinstance(n, ast.Name) and n.id in kept for n in nodes(history.reach(judged.number))
                    ):
                        title = (
                            f"`{held}` holds rows that the model was trained on: {named(before.where)} drew the split "
                            f"again at random after In [{trained}] had trained on that of {named(before.first)}"
                        )
                        text = "Fix the split, so that the cell draws the same one; then train a new model on it."
                        fix = (text, "torch.manual_seed(0)\n" + before.statement)
                        links = ((f"In [{trained}] trained on the earlier split", history.cells[trained].place()),)
                        return [Told("training/leakage", title, (held,), before.where, (fix,), links)]
    return []
