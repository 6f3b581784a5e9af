"""Which function a call in the user's source runs: a function, a method, a module's forward; with what the caller wrote
for its parameters, and whether a statement of it ran at all, as far as plain values show it."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.locations import other_cells
from nbdebug.observe.variables import class_attribute, closure_variables, named_children, named_modules
from nbdebug.tools.errors.autograd.functions import (
    FUNCTIONS,
    SCOPES,
    FunctionSource,
    assignments,
    calls_in,
    failing_node,
    frame_source,
    function_source,
    is_module,
    loops_around,
    own_expressions,
    source,
    static_value,
    unwrap,
)
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.values import UNKNOWN

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


def is_module_class(value: Any) -> bool:
    """Whether it is a class of modules."""
    return issubclass(type(value), type) and issubclass(value, torch.nn.Module)


def forward_of_class(kind: Any) -> FunctionSource | None:
    """The forward of a module's class, where the module itself is gone."""
    if not is_module_class(kind):
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


def modules_in(container: Any) -> list[Any]:
    """The modules in a container of modules, as a loop over it gives them."""
    if is_module(container):
        return list(named_children(container).values())
    return [item for item in container if is_module(item)] if type(container) in (list, tuple) else []


def loop_modules(name: str, code: FunctionSource) -> list[Any]:
    """The modules that a loop's variable stands for."""
    for statement in assignments(code, name, code.line):
        if isinstance(statement, ast.For):
            over: Any = statement.iter
            if isinstance(over, ast.Call):  # enumerate(x), reversed(x), x.items(), x.values()
                over = over.args[0] if over.args else getattr(over.func, "value", over)
            container = static_value(over, code)
            if container is not UNKNOWN:
                return modules_in(container)
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
        for call in calls_in(line) if line is not None else ():
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
