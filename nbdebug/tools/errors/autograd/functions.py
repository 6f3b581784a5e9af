"""The user's functions as syntax, also those that no longer run, and the autograd graph of a failed backward.

A fault of the graph shows in `backward()`, when the frames of the forward are gone. Their source is not. A
`FunctionSource` is a function (or a cell, or a file) with what is known of its variables: those of its frame where one
is left, its closure, its globals, and what the caller wrote for its parameters. From there the second part follows a
call into the function or the module's `forward` that it runs, and says whether a statement of it ran at all, as far as
plain values show it. Nothing is run: a value is read where it lies.

The tensors that backward started from lie in torch's own frame, even where the user gave them no name. From their
`grad_fn` the whole graph can be walked. What a node has saved for its derivative is read once: torch returns it, or
says that an earlier backward has freed it, or that it has been changed since.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.backward import graph_levels, input_nodes
from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, Site, at_site, kind_of, other_cells
from nbdebug.observe.sources import edit_of, functions, nodes, parents, tree_of
from nbdebug.observe.variables import class_attribute, closure_variables, named_children, named_modules
from nbdebug.report import Edit, Where
from nbdebug.tools.errors.context import UNKNOWN, ErrorContext, calls_in, expression, is_tensor, value_of


def unwrap(function: Any) -> Any:
    """The function within its wrappers, as `functools.wraps` and bound methods keep it."""
    for _ in range(20):
        if type(function) is types.MethodType or type(function) in (staticmethod, classmethod):
            function = function.__func__
        elif type(function) is types.FunctionType and "__wrapped__" in function.__dict__:
            function = function.__dict__["__wrapped__"]
        else:
            break
    return function


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), torch.nn.Module)


def package(thing: Any) -> str:
    """The module in which an object's class was made."""
    return str(type.__getattribute__(type(thing), "__module__"))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A file's or a cell's syntax tree. parents: of each node, by its id; bindings: the statements that give the
    variables of a function their values, by the function's id, filled on demand."""

    file: str
    tree: ast.Module
    parents: Mapping[int, ast.AST]
    bindings: dict[int, dict[str, list[Any]]] = dataclasses.field(default_factory=dict)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What stands around a node, from within, within its own function."""
        at = self.parents.get(id(node))
        while at is not None:
            yield at
            if isinstance(at, SCOPES):
                return
            at = self.parents.get(id(at))

    def outer(self, node: ast.AST) -> ast.AST | None:
        """The function around a function; the file where there is none."""
        at = self.parents.get(id(node))
        while at is not None and not isinstance(at, (*FUNCTIONS, ast.Module)):
            at = self.parents.get(id(at))
        return at


def source(file: str) -> Source | None:
    """None where the source can't be read, or is not Python."""
    tree = tree_of(file)
    return None if tree is None else _source(file, tree)


@functools.lru_cache(maxsize=64)
def _source(file: str, tree: ast.Module) -> Source:
    return Source(file, tree, parents(tree))


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function, or a cell. frame: what is known of its variables; live: it is a frame of the traceback, at `line`;
    arguments: for a parameter, what the caller wrote and the caller."""

    source: Source
    node: Any
    frame: Frame
    live: bool = False
    arguments: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """As a sentence names it: the function's name, "" for a cell or a file."""
        return getattr(self.node, "name", "lambda") if isinstance(self.node, FUNCTIONS) else ""

    @property
    def line(self) -> int:
        """The line that a running function has reached; for others the end."""
        return self.frame.site.line if self.live else getattr(self.node, "end_lineno", None) or 10**9

    def where(self, node: ast.AST) -> Where:
        return at_site(Where(), Site(self.source.file, node.lineno, self.name))  # type: ignore[attr-defined]

    @property
    def positional(self) -> list[str]:
        """The names of its positional parameters."""
        args = getattr(self.node, "args", None)
        return [a.arg for a in (*args.posonlyargs, *args.args)] if args is not None else []

    def in_scope(self, node: ast.AST) -> FunctionSource:
        """A scope around it, with the same variables."""
        return dataclasses.replace(self, node=node, live=False, arguments={})

    def in_frame(self, **changes: Any) -> FunctionSource:
        """The same with another module or other names in its frame."""
        return dataclasses.replace(self, frame=dataclasses.replace(self.frame, **changes))

    def statements(self) -> Iterator[Any]:
        """Its statements in the order of the source, without those of functions within it."""
        return statements_of(self.node)

    def returned(self) -> list[tuple[Any, Any]]:
        """(expression, statement) of what it returns."""
        if isinstance(self.node, ast.Lambda):
            return [(self.node.body, self.node.body)]
        return [(s.value, s) for s in self.statements() if isinstance(s, ast.Return) and s.value is not None]


def statements_of(body: Any) -> Iterator[Any]:
    """The statements of a function, a cell or a loop in the order of the source, without those of functions in it."""
    todo = list(reversed(body.body)) if isinstance(getattr(body, "body", None), list) else []
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, SCOPES):
            for part in ("finalbody", "orelse", "handlers", "cases", "body"):
                todo += [n for n in reversed(getattr(node, part, None) or []) if isinstance(n, ast.AST)]


def statement_of(node: Any, code: FunctionSource) -> Any:
    """The statement in which an expression stands; None where that is not known."""
    if node is None or isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)


def frame_source(frame: Frame) -> FunctionSource | None:
    """The function of a frame of the traceback, with the frame's variables."""
    file = source(frame.site.file)
    if file is None:
        return None
    if frame.site.function == "<module>":
        return FunctionSource(file, file.tree, frame, live=True)
    around = [
        n
        for n in functions(file.tree)
        if isinstance(n, FUNCTIONS) and first_line(n) <= frame.site.line <= (n.end_lineno or 0)
    ]
    named = [n for n in around if getattr(n, "name", "<lambda>") == frame.site.function]
    if not named and frame.site.function in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"):
        named = around
    node: Any = min(named, key=lambda n: (n.end_lineno or 0) - first_line(n), default=None)
    return FunctionSource(file, node, frame, live=True) if node is not None else None


def function_source(function: Any) -> FunctionSource | None:
    """A function of the user's, without its decorators."""
    function = unwrap(function)
    if type(function) is not types.FunctionType or kind_of(function.__code__) != USER:
        return None
    code = function.__code__
    file = source(code.co_filename)
    for node in functions(file.tree) if file is not None else ():
        if (
            file is not None
            and isinstance(node, FUNCTIONS)
            and first_line(node) == code.co_firstlineno
            and getattr(node, "name", "<lambda>") == code.co_name
        ):
            names = closure_variables(function)
            around = function.__globals__
            if any(name in around for name in code.co_varnames):  # a variable of its own hides the file's
                around = {name: value for name, value in around.items() if name not in code.co_varnames}
            frame = Frame(names, Site(code.co_filename, code.co_firstlineno, code.co_name), True, None, around)
            return FunctionSource(file, node, frame)
    return None


def first_line(node: Any) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def failing_node(code: FunctionSource) -> Any:
    """What ran in a function of the traceback: the smallest expression, else the statement; None where not known."""
    node = expression(code.frame)
    if node is None:
        return None
    alike = [n for n in nodes(code.source.tree) if type(n) is type(node)]
    return next((n for n in alike if _span(n) == _span(node)), None)


def _span(node: Any) -> tuple[Any, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def static_value(node: Any, code: Any) -> Any:
    """The value of an expression: from the frame, else by what the caller or an assignment gives; else UNKNOWN."""
    for _ in range(10):
        value = value_of(node, code.frame)
        if value is not UNKNOWN or not isinstance(node, ast.Name):
            return _static_part(node, code) if value is UNKNOWN else value
        if node.id in code.arguments:
            node, code = code.arguments[node.id]
            if not isinstance(node, ast.AST):
                return UNKNOWN
            continue
        bindings = [
            s
            for s in assignments(code, node.id, code.line)
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
        ]
        if not bindings or any(n.id == node.id for n in ast.walk(bindings[-1].value) if isinstance(n, ast.Name)):
            return UNKNOWN
        node = bindings[-1].value
    return UNKNOWN


def _static_part(node: Any, code: Any) -> Any:
    """An attribute or an item of what only the caller or an assignment knows."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return UNKNOWN
    whole = static_value(node.value, code)
    if whole is UNKNOWN:
        return UNKNOWN
    name = ast.Name("it", ast.Load())
    part = (
        ast.Attribute(name, node.attr, ast.Load())
        if isinstance(node, ast.Attribute)
        else ast.Subscript(name, node.slice, ast.Load())
    )
    return value_of(part, dataclasses.replace(code.frame, names={"it": whole}))


def assignments(code: FunctionSource, name: str, before: int | tuple[int, int]) -> list[Any]:
    """The statements that give a variable its value, those that end before a line, or before a (line, column); those
    after it (of a loop) if there are none and it is no parameter."""
    position = before if isinstance(before, tuple) else (before, 0)
    bindings = code.source.bindings.get(id(code.node))
    if bindings is None:
        bindings = code.source.bindings.setdefault(id(code.node), {})
        for statement in code.statements():
            for target in {t.id for t in targets(statement) if isinstance(t, ast.Name)}:
                bindings.setdefault(target, []).append(statement)
    statements = bindings.get(name, [])
    return [s for s in statements if end_position(s) <= position] or ([] if name in code.arguments else statements)


def end_position(statement: Any) -> tuple[int, int]:
    """Where a statement has given its value: a loop or a `with` at its head."""
    if hasattr(statement, "body"):
        return statement.lineno, statement.col_offset
    return statement.end_lineno, statement.end_col_offset


def targets(statement: Any) -> list[Any]:
    """What a statement assigns to: names, attributes, items, each for itself."""
    if isinstance(statement, ast.Assign):
        todo = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        todo = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        todo = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        todo = [n.target for n in own_expressions(statement) if isinstance(n, ast.NamedExpr)]
    single = []
    while todo:
        target = todo.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            todo += target.elts
        else:
            single.append(target.value if isinstance(target, ast.Starred) else target)
    return single


def own_expressions(statement: Any) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without the statements within it."""
    for field, value in ast.iter_fields(statement):
        if field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield from ast.walk(node)


def loops_around(code: FunctionSource, node: ast.AST) -> list[Any]:
    """The loops around a node, innermost first."""
    return [n for n in code.source.around(node) if isinstance(n, (ast.For, ast.AsyncFor, ast.While))]


def insertions(statements: Iterable[Any], text: str, methods: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    """(statement, value) of what is put into a container of this name: `name.append(x)`, `name[k] = x`."""
    for statement in statements:
        items = [t for t in getattr(statement, "targets", ()) if isinstance(t, ast.Subscript)]
        if isinstance(statement, ast.Assign) and any(ast.unparse(t.value) == text for t in items):
            yield statement, statement.value
        for call in calls_in(statement) if isinstance(statement, ast.Expr) else ():
            if last_name(call.func) in methods and ast.unparse(getattr(call.func, "value", call)) == text:
                yield statement, call.args[-1] if call.args else None


def last_name(node: Any) -> str:
    """The last name of an expression: `nn.functional.one_hot` → "one_hot"."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def callee_word(node: Any) -> str:
    """The last name of a call, a decorator or a context: "no_grad" of `torch.no_grad()`."""
    return last_name(node.func if isinstance(node, ast.Call) else node)


# -- what a call runs --------------------------------------------------------------------------------------------------


MAX_FUNCTIONS = 300
"""Functions that are examined at most."""


def callee(call: ast.Call, code: FunctionSource, function: Any = UNKNOWN) -> FunctionSource | None:
    """The user's function that a call runs, with its arguments; None where it is not the user's, or not known."""
    function = static_value(call.func, code) if function is UNKNOWN else function
    if is_module(function):
        function = types.MethodType(unwrap(class_attribute(function, "forward")), function)
    elif type(function) not in (types.FunctionType, types.MethodType):
        if function is UNKNOWN or issubclass(type(function), (type, types.ModuleType, types.BuiltinFunctionType)):
            return None
        own = class_attribute(function, "__call__")
        if type(own) is not types.FunctionType:
            return None
        function = types.MethodType(own, function)
    bound_to = function.__self__ if type(function) is types.MethodType else UNKNOWN
    inner = function_source(function)
    return None if inner is None else bind(inner, call, code, bound_to)


def bind(inner: FunctionSource, call: ast.Call, code: FunctionSource, bound_to: Any) -> FunctionSource:
    """A function with its parameters bound to the arguments of a call, each with its value where that is known.
    bound_to: the object of a method, UNKNOWN for a function."""
    args, parameters = inner.node.args, inner.positional
    values: dict[str, Any] = {}
    for name, default in zip(reversed(parameters), reversed(args.defaults)):
        if isinstance(default, ast.Constant):
            values[name] = default.value
    if bound_to is not UNKNOWN and parameters:
        values[parameters.pop(0)] = bound_to
    simple = [a for a in call.args if not isinstance(a, ast.Starred)]
    nodes = dict(zip(parameters, simple)) | {k.arg: k.value for k in call.keywords if k.arg}
    if args.vararg is not None:
        nodes[args.vararg.arg] = ast.Tuple(simple[len(parameters) :], ast.Load())
    for name, node in nodes.items():
        values.pop(name, None)
        value = static_value(node, code)
        if value is not UNKNOWN:
            values[name] = value
    arguments = {name: (node, code) for name, node in nodes.items()}
    return dataclasses.replace(inner, arguments=arguments).in_frame(names=dict(inner.frame.names) | values)


def forward_of(module: Any) -> FunctionSource | None:
    """A module's own forward, if it is the user's."""
    return method_source(module, "forward")


def method_source(module: Any, name: str) -> FunctionSource | None:
    """A method of an object's, if it is the user's."""
    method = function_source(unwrap(class_attribute(module, name)))
    if method is None:
        return None
    first = next(iter(method.positional), "self")
    return method.in_frame(names=dict(method.frame.names) | {first: module}, module=module)


def forward_of_class(kind: Any) -> FunctionSource | None:
    """The forward of a module's class, where the module itself is gone."""
    if not issubclass(type(kind), type) or not issubclass(kind, torch.nn.Module):
        return None
    return function_source(next((vars(k)["forward"] for k in kind.__mro__ if "forward" in vars(k)), None))


def forward_of_new_module(call: ast.Call, code: FunctionSource) -> FunctionSource | None:
    """The forward that `Net()(x)` runs: of the class, since its object is gone."""
    forward = forward_of_class(static_value(call.func.func, code) if isinstance(call.func, ast.Call) else UNKNOWN)
    if forward is None:
        return None
    forward = bind(forward, call, code, None)
    first = forward.node.args.args[0].arg
    return forward.in_frame(names={name: value for name, value in forward.frame.names.items() if name != first})


def loop_modules(name: str, code: FunctionSource) -> list[Any]:
    """The modules that a loop's variable stands for."""
    for statement in assignments(code, name, code.line):
        if isinstance(statement, ast.For):
            over: Any = statement.iter
            if isinstance(over, ast.Call):  # enumerate(x), reversed(x), x.items(), x.values()
                over = over.args[0] if over.args else getattr(over.func, "value", over)
            container = static_value(over, code)
            if is_module(container):
                return list(named_children(container).values())
            if container is not UNKNOWN:
                return [item for item in container if is_module(item)] if type(container) in (list, tuple) else []
    return []


def no_grad_decorator(function: Any) -> str | None:
    """The name of the no_grad with which a function, be it a library's (`model.generate`), was decorated."""
    function = function.__func__ if type(function) is types.MethodType else function
    for _ in range(5):
        if type(function) is not types.FunctionType:
            return None
        if function.__code__.co_name == "decorate_context":
            manager = getattr(closure_variables(function).get("ctx_factory"), "__self__", None)
            if type(manager) in (torch.no_grad, torch.inference_mode):
                return type(manager).__name__
        function = function.__dict__.get("__wrapped__")
    return None


def entries(node: Any, key: Any, code: FunctionSource, depth: int = 6) -> Iterator[tuple[Any, FunctionSource]]:
    """(expression, its function) of one entry of a variable's value or a call's result: a tuple, a list or a dict."""
    if isinstance(node, (ast.Tuple, ast.List)):
        if type(key) is int and key < len(node.elts) and not any(isinstance(e, ast.Starred) for e in node.elts):
            yield node.elts[key], code
    elif isinstance(node, ast.Dict):
        yield from ((v, code) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == key)
    elif isinstance(node, ast.Name) and depth:
        bindings = [s for s in assignments(code, node.id, (node.lineno, node.col_offset)) if isinstance(s, ast.Assign)]
        whole = [s.value for s in bindings if any(isinstance(t, ast.Name) and t.id == node.id for t in s.targets)]
        yield from entries(whole[-1], key, code, depth - 1) if whole else ()
        if not bindings and node.id in code.arguments:
            argument, caller = code.arguments[node.id]
            yield from entries(argument, key, caller, depth - 1)
        yield from (
            (s.value, code)
            for s in code.statements()
            if isinstance(s, ast.Assign)
            and any(
                isinstance(t, ast.Subscript)
                and ast.unparse(t.value) == node.id
                and isinstance(t.slice, ast.Constant)
                and t.slice.value == key
                for t in s.targets
            )
        )
    elif isinstance(node, ast.Call) and depth and (inner := callee(node, code)) is not None:
        for value, _ in inner.returned():
            yield from entries(value, key, inner, depth - 1)


def traceback_functions(context: ErrorContext) -> list[FunctionSource]:
    """The functions of the traceback's user frames, innermost first, each with what its caller wrote for it."""
    codes: list[FunctionSource | None] = [frame_source(frame) for frame in context.users]
    for inner in range(len(codes) - 2, -1, -1):
        code, caller = codes[inner], codes[inner + 1]
        if code is None or caller is None or not isinstance(code.node, FUNCTIONS):
            continue
        line = failing_node(caller)
        for call in calls_in(line):
            target = callee(call, caller)
            if target is not None and target.node.lineno == code.node.lineno and target.source.file == code.source.file:
                codes[inner] = dataclasses.replace(code, arguments=target.arguments)
                break
    return [code for code in codes if code is not None]


def reachable_functions(context: ErrorContext) -> list[tuple[FunctionSource, Any]]:
    """(function, the module whose method it is or None) of all that the traceback's functions and the modules' forwards
    call, nearest first, each function of each module once."""
    todo: list[tuple[FunctionSource, Any]] = [(code, code.frame.module) for code in traceback_functions(context)]
    todo += [
        (code, part)
        for model in context.owners.models.values()
        for _, part in named_modules(model)
        if (code := forward_of(part)) is not None
    ]
    visited: set[tuple[int, int]] = set()
    functions: list[tuple[FunctionSource, Any]] = []
    while todo and len(functions) < MAX_FUNCTIONS:
        code, module = todo.pop(0)
        if (id(code.node), id(module)) in visited:
            continue
        visited.add((id(code.node), id(module)))
        functions.append((code, module))
        for part in [code.node.body] if isinstance(code.node, ast.Lambda) else code.statements():
            for node in own_expressions(part) if isinstance(part, ast.stmt) else ast.walk(part):
                for inner in _callees(node, code) if isinstance(node, ast.Call) else ():
                    first = next(iter(inner.positional), None)
                    own = inner.frame.names.get(first) if first else None
                    todo.append((inner, own if is_module(own) else module))
    return functions


def _callees(call: ast.Call, code: FunctionSource) -> list[FunctionSource]:
    """All the functions of the user's that a call may run: those of a loop's modules and of the modules within one, and
    the forward of a class that is called (`Net()(x)`)."""
    function = static_value(call.func, code)
    if issubclass(type(function), type):
        return [forward for forward in [forward_of_class(function)] if forward is not None]
    one = callee(call, code, function)
    several = (
        loop_modules(call.func.id, code)
        if function is UNKNOWN and isinstance(call.func, ast.Name)
        else ([function] if is_module(function) and one is None else [])
    )
    inside = [forward_of(part) for module in several for _, part in named_modules(module)]
    return [inner for inner in [one, *inside] if inner is not None]


def enclosing_scopes(code: FunctionSource) -> Iterator[FunctionSource]:
    """The scopes in which a name may have got its value: the function, those around it, the file, and, of a notebook,
    its other cells, the last that ran first."""
    yield code
    node = code.node
    while not isinstance(node, ast.Module):
        node = code.source.outer(node)
        if node is None:
            return
        yield code.in_scope(node)
    for file in other_cells(code.source.file):
        read = source(file)
        if read is not None:
            yield dataclasses.replace(code, source=read, node=read.tree, live=False, arguments={})


def is_skipped(statement: Any, code: FunctionSource) -> bool:
    """Whether a statement stands in a branch that plain values say was not taken."""
    inner = statement
    for around in code.source.around(statement):
        if isinstance(around, ast.If) and not _changes_in_loop(around.test, code):
            test = truth(around.test, code)
            if test is not None and (inner in around.body) is not test:
                return True
        inner = around
    return False


def _changes_in_loop(test: Any, code: FunctionSource) -> bool:
    """Whether a name in a condition is given its value in a loop: what it is now is not what it was."""
    return any(
        loops_around(code, statement)
        for name in ast.walk(test)
        if isinstance(name, ast.Name)
        for statement in assignments(code, name.id, code.line)
        if not isinstance(statement, SCOPES)
    )


def truth(node: Any, code: FunctionSource) -> bool | None:
    """Whether a condition holds, as far as plain values show it; None where they don't."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth(node.operand, code)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        parts = [truth(part, code) for part in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in parts else None if None in parts else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _comparison(node, code)
    value = static_value(node, code)
    return bool(value) if type(value) in (bool, int, float, str, type(None)) else None


def _comparison(node: ast.Compare, code: FunctionSource) -> bool | None:
    left, right = static_value(node.left, code), static_value(node.comparators[0], code)
    if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        if left is UNKNOWN or right is UNKNOWN:
            return None
        return (left is right) is isinstance(node.ops[0], ast.Is)
    if type(left) not in (bool, int, float, str) or type(right) not in (bool, int, float, str):
        return None
    if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return (left == right) is isinstance(node.ops[0], ast.Eq)
    if isinstance(left, str) or isinstance(right, str):
        return None
    tests = {ast.Lt: left < right, ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right}
    return tests.get(type(node.ops[0]))


# -- the graph ---------------------------------------------------------------------------------------------------------


MAX_NODES = 20_000
"""Nodes walked, some tens of milliseconds; of a larger graph the part nearest to the loss is seen."""
MAX_QUERIED = 8000
"""Nodes whose saved values are read, 20 microseconds each."""
MAX_COMPARED = 1000
"""Nodes of a variable's own history that are compared with a loss's."""
BACKWARD_FUNCTIONS = ("_engine_run_backward", "backward", "grad")
"""torch's own functions in whose frames the tensors lie that a backward starts from."""
VIEWS = frozenset({"T", "AsStrided", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand", "Select"})
"""Nodes between a leaf and a view of it."""
PART_VIEWS = frozenset(
    {"Slice", "Narrow", "Unbind", "Split", "SplitWithSizes", "Alias", "UnsafeView", "Diagonal", "Reshape"}
)
"""Nodes of a view of a part, or in another form."""


def backward_roots(context: ErrorContext) -> list[torch.Tensor]:
    """The tensors that the failing backward started from."""
    for frame in reversed(context.trail):
        if not frame.users and frame.site.function in BACKWARD_FUNCTIONS:
            for name in ("t_outputs", "tensors", "outputs", "self"):
                argument: Any = frame.names.get(name)
                values = argument if type(argument) in (list, tuple) else [argument]
                roots: list[torch.Tensor] = [value for value in values if is_tensor(value)]
                if roots:
                    return roots
    return []


def loss_expression(
    context: ErrorContext, code: FunctionSource, functions: tuple[str, ...] = ("backward", "grad")
) -> Any:
    """The expression on which the failing line calls backward, or another of these functions: `loss` of
    `loss.backward()`, of `accelerator.backward(loss)`. None where the line does not show it."""
    line = failing_node(code)
    for call in calls_in(line):
        if last_name(call.func) in functions:
            return _root_argument(call, code, context.message)
    attributes = [n for n in ast.walk(line) if isinstance(n, ast.Attribute)] if line is not None else []
    return next((attribute.value for attribute in attributes if attribute.attr in functions), None)


def loss_text(context: ErrorContext, codes: list[FunctionSource]) -> str:
    """The same as text, for the innermost of the user's functions; "" where it is not known."""
    expression = loss_expression(context, codes[0]) if codes else None
    return ast.unparse(expression) if expression is not None else ""


def _root_argument(call: ast.Call, code: FunctionSource, message: str) -> Any:
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    keywords = (k.value for k in call.keywords if k.arg in ("tensors", "outputs", "loss"))
    first = call.args[0] if call.args else next(keywords, None)
    if first is None or base is not None and is_tensor(static_value(base, code)):
        return base
    element = re.search(r"element (\d+) of", message)
    if isinstance(first, (ast.List, ast.Tuple)) and element and int(element[1]) < len(first.elts):
        return first.elts[int(element[1])]
    return first


def node_distances(tensors: Iterable[Any]) -> dict[Any, int]:
    """The nodes from which the gradients of these tensors are made, each with its distance from them, nearest first;
    without those of the leaves."""
    distances: dict[Any, int] = {}
    for distance, level in enumerate(graph_levels(t.grad_fn for t in tensors)):
        distances |= dict.fromkeys((node for node in level if not is_leaf_node(node)), distance)
        if len(distances) >= MAX_NODES:
            break
    return distances


def share_history(tensors: Iterable[Any], graph: Mapping[Any, int]) -> bool:
    """Whether a part of the history of these tensors is a part of that graph, as far as `MAX_COMPARED` nodes back."""
    number = 0
    for level in graph_levels(t.grad_fn for t in tensors):
        number += sum(not is_leaf_node(node) for node in level)
        if number >= MAX_COMPARED:
            return False
        if not graph.keys().isdisjoint(level):
            return True
    return False


def nearest_leaves(node: Any, most: int = 200) -> Iterator[torch.Tensor]:
    """The leaves that a node was computed from, nearest first, as far as `most` nodes back."""
    number = 0
    for level in graph_levels([node]):
        number += len(level)
        if number >= most:
            return
        yield from (one.variable for one in level if is_leaf_node(one))


def is_leaf_node(node: Any) -> bool:
    """Whether a node stands for a leaf, into whose `.grad` the gradient is added."""
    return node.name().endswith("AccumulateGrad")


def op_of(node: Any) -> str:
    """The op of a node, as torch spells it: ReluBackward0 → "Relu", torch::autograd::CopySlices → "CopySlices"."""
    return op_of_name(node.name())


def op_of_name(name: str) -> str:
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def is_freed(node: Any) -> bool:
    """Whether a backward has freed what this node had saved."""
    return any("second time" in message for message in _refused_values(node).values())


@dataclasses.dataclass(frozen=True)
class ModifiedValue:
    """A node one of whose saved tensors has been changed. producer: the node whose output that tensor is, None for one
    that has no history; leaf: the parameter or input behind it, where only views lie between."""

    node: Any
    producer: Any = None
    leaf: torch.Tensor | None = None


def modified_values(nodes: Iterable[Any]) -> list[ModifiedValue]:
    """The nodes whose saved tensors have been changed since, nearest to the loss first, as far as `MAX_QUERIED`
    nodes."""
    values = []
    for node in itertools.islice(nodes, MAX_QUERIED):
        for name, message in _refused_values(node).items():
            if "modified by an inplace" in message:
                producer = _producer(node, name, message)
                values.append(ModifiedValue(node, producer, _saved_leaf(node, producer, message)))
    return values


def _refused_values(node: Any) -> dict[str, str]:
    """{name of a saved value: torch's message where it refuses to return it} of a node of torch's own. Of an autograd
    Function written in Python, and of a value that saved-tensor hooks hold, none is read: that might run user code."""
    if issubclass(type(node), torch.autograd.function.BackwardCFunction):
        return {}
    messages: dict[str, str] = {}
    for name in [n for n in dir(type(node)) if n.startswith("_saved_")]:
        if not name.endswith(("_sizes", "_strides")) and not _has_unpack_hook(node, name):
            try:
                getattr(node, name)
            except RuntimeError as error:
                messages[name] = str(error)
            except Exception:
                continue
    return messages


def _has_unpack_hook(node: Any, name: str) -> bool:
    if getattr(type(node), "_raw" + name, None) is None:
        return False
    try:
        return getattr(getattr(node, "_raw" + name), "unpack_hook", None) is not None
    except RuntimeError:  # freed: then nothing is unpacked either
        return False


def _producer(node: Any, name: str, message: str) -> Any:
    """The node whose output was saved under this name: the node itself for a result, else one of its inputs."""
    named = re.search(r"is output .*? of ([^,]*)", message, re.DOTALL)
    op = op_of_name(named[1].strip()) if named else ""
    if not op:
        return None
    if "result" in name or name in ("_saved_out", "_saved_output"):
        return node
    before = [one for one in input_nodes(node) if op_of(one) == op]
    if not before and op == "AsStrided":  # so torch calls any view of what was changed since
        shape = message_shape(message)
        for one, output in node.next_functions:
            if one is not None and op_of(one) in VIEWS | PART_VIEWS:
                outputs = getattr(one, "_input_metadata", ())
                if shape in (None, list(outputs[output].shape) if output < len(outputs) else None):
                    before.append(one)
    if before:
        return before[0]
    return node if op_of(node) == op else None


def message_shape(message: str) -> list[int] | None:
    """The shape that torch's message names."""
    shape = re.search(r"Tensor \[([\d, ]*)\]\]", message)
    return [int(size) for size in shape[1].split(",") if size.strip()] if shape else None


def _saved_leaf(node: Any, producer: Any, message: str) -> torch.Tensor | None:
    """The leaf that was saved, or of which a view was (a Linear saves the transpose of its weight)."""
    shape = message_shape(message)
    for one in [producer] if producer is not None else input_nodes(node):
        while one is not None and one is not node and op_of(one) in VIEWS:
            one = one.next_functions[0][0]
        if one is not None and is_leaf_node(one) and one.variable._version:
            leaf: torch.Tensor = one.variable
            if shape in (None, list(leaf.shape), list(leaf.shape)[::-1]):
                return leaf
    return None


def reduced(name: str, code: FunctionSource) -> Edit | None:
    """The only line that computes the loss of this name from others, with the mean of it."""
    lines = [n for n in code.statements() if isinstance(n, ast.Assign) and [name] == [*map(ast.unparse, n.targets)]]
    lines = [n for n in lines if name not in [ast.unparse(part) for part in ast.walk(n.value)]]
    return edit_of(code.source.file, {lines[0].value: "{}.mean()"}) if len(lines) == 1 else None
