"""From a call in the user's source into what it means: a function, a method, a module's forward."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.locations import other_cells
from nbdebug.observe.variables import cell_has_value
from nbdebug.tools.errors.autograd.facts import GraphCut
from nbdebug.tools.errors.autograd.functions import (
    FUNCTIONS,
    SCOPES,
    FunctionSource,
    assignments,
    calls_in,
    children,
    class_attribute,
    failing_node,
    frame_source,
    function_source,
    is_module,
    last_name,
    loops_around,
    modules,
    own_expressions,
    source,
    static_value,
    unwrap,
)
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.values import UNKNOWN

MAX_FUNCTIONS = 300
"""Functions looked at."""


def callee(call: ast.Call, code: FunctionSource, called: Any = UNKNOWN) -> FunctionSource | None:
    """The user's function that a call runs, with what it is given; None where it is not the user's, or not known."""
    called = static_value(call.func, code) if called is UNKNOWN else called
    if is_module(called):
        called = types.MethodType(unwrap(class_attribute(called, "forward")), called)
    elif type(called) not in (types.FunctionType, types.MethodType):
        if called is UNKNOWN or issubclass(type(called), (type, types.ModuleType, types.BuiltinFunctionType)):
            return None
        own = class_attribute(called, "__call__")
        if type(own) is not types.FunctionType:
            return None
        called = types.MethodType(own, called)
    mine = called.__self__ if type(called) is types.MethodType else UNKNOWN
    found = function_source(called)
    return None if found is None else bind(found, call, code, mine)


def no_grad_decorator(function: Any) -> str | None:
    """ "no_grad" where a function, be it a library's (`model.generate`), was decorated with it."""
    function = function.__func__ if type(function) is types.MethodType else function
    for _ in range(5):
        if type(function) is not types.FunctionType:
            return None
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name == "ctx_factory" and function.__code__.co_name == "decorate_context" and cell_has_value(cell):
                manager = getattr(cell.cell_contents, "__self__", None)
                if type(manager) in (torch.no_grad, torch.inference_mode):
                    return type(manager).__name__
        function = function.__dict__.get("__wrapped__")
    return None


def entries(node: Any, key: Any, code: FunctionSource, depth: int = 6) -> Iterator[tuple[Any, FunctionSource]]:
    """(expression, its function) of one entry of what a variable holds or a call gives: a tuple, a list or a dict."""
    if isinstance(node, (ast.Tuple, ast.List)):
        if type(key) is int and key < len(node.elts) and not any(isinstance(e, ast.Starred) for e in node.elts):
            yield node.elts[key], code
    elif isinstance(node, ast.Dict):
        yield from ((v, code) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == key)
    elif isinstance(node, ast.Name) and depth:
        made = [s for s in assignments(code, node.id, (node.lineno, node.col_offset)) if isinstance(s, ast.Assign)]
        whole = [s.value for s in made if any(isinstance(t, ast.Name) and t.id == node.id for t in s.targets)]
        yield from entries(whole[-1], key, code, depth - 1) if whole else ()
        if not made and node.id in code.given:
            yield from entries(*_swapped(code.given[node.id], key), depth - 1)
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
        for given, _ in inner.returned():
            yield from entries(given, key, inner, depth - 1)


def _swapped(given: tuple[Any, Any], key: Any) -> tuple[Any, Any, Any]:
    return given[0], key, given[1]


def bind(found: FunctionSource, call: ast.Call, code: FunctionSource, mine: Any = UNKNOWN) -> FunctionSource:
    """A function with its parameters bound to what a call gives them."""
    given, names = arguments(found, call, code, mine)
    return dataclasses.replace(
        found, given=given, frame=dataclasses.replace(found.frame, names=dict(found.frame.names) | names)
    )


def arguments(
    found: FunctionSource, call: ast.Call, code: FunctionSource, mine: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """({parameter: (what the caller wrote, the caller)}, {parameter: its value}) as far as each is known."""
    args = found.node.args
    wanted = [a.arg for a in (*args.posonlyargs, *args.args)]
    names: dict[str, Any] = {}
    for name, default in zip(reversed(wanted), reversed(args.defaults)):
        if isinstance(default, ast.Constant):
            names[name] = default.value
    if mine is not UNKNOWN and wanted:
        names[wanted.pop(0)] = mine
    simple = [a for a in call.args if not isinstance(a, ast.Starred)]
    pairs = dict(zip(wanted, simple)) | {k.arg: k.value for k in call.keywords if k.arg}
    if args.vararg is not None:
        pairs[args.vararg.arg] = ast.Tuple(simple[len(wanted) :], ast.Load())
    for name, node in pairs.items():
        names.pop(name, None)
        known = static_value(node, code)
        if known is not UNKNOWN:
            names[name] = known
    return {name: (node, code) for name, node in pairs.items()}, names


def forward_of(module: Any) -> FunctionSource | None:
    """A module's own forward, if it is the user's."""
    return method_source(module, "forward")


def method_source(module: Any, name: str) -> FunctionSource | None:
    """A method of an object's, if it is the user's."""
    function = unwrap(class_attribute(module, name))
    found = function_source(function)
    if found is None:
        return None
    first = next((a.arg for a in (*found.node.args.posonlyargs, *found.node.args.args)), "self")
    return dataclasses.replace(
        found, frame=dataclasses.replace(found.frame, names=dict(found.frame.names) | {first: module}, module=module)
    )


def traceback_functions(scene: ErrorContext) -> list[FunctionSource]:
    """The functions of the traceback's user frames, innermost first, each with what its caller wrote for it."""
    frames = scene.users
    codes: list[FunctionSource | None] = [frame_source(frame) for frame in frames]
    for inner in range(len(codes) - 2, -1, -1):
        code, caller = codes[inner], codes[inner + 1]
        if code is None or caller is None or not isinstance(code.node, FUNCTIONS):
            continue
        node = failing_node(caller)
        for call in calls_in(node) if node is not None else ():
            target = callee(call, caller)
            if target is not None and target.node.lineno == code.node.lineno and target.source.file == code.source.file:
                codes[inner] = dataclasses.replace(code, given=target.given)
                break
    return [code for code in codes if code is not None]


def reachable_functions(scene: ErrorContext) -> list[tuple[FunctionSource, Any]]:
    """(function, the module whose method it is or None) of all that the traceback's functions and the modules' forwards
    call, nearest first, each function of each module once."""
    todo: list[tuple[FunctionSource, Any]] = [(code, code.frame.module) for code in traceback_functions(scene)]
    todo += [
        (code, part)
        for model in scene.owners.models.values()
        for part in modules(model)
        if (code := forward_of(part)) is not None
    ]
    seen: set[tuple[int, int]] = set()
    found: list[tuple[FunctionSource, Any]] = []
    while todo and len(found) < MAX_FUNCTIONS:
        code, module = todo.pop(0)
        if (id(code.node), id(module)) in seen:
            continue
        seen.add((id(code.node), id(module)))
        found.append((code, module))
        for part in [code.node.body] if isinstance(code.node, ast.Lambda) else code.statements():
            for node in own_expressions(part) if isinstance(part, ast.stmt) else ast.walk(part):
                if isinstance(node, ast.Call):
                    todo += [(inner, _module_of(inner) or module) for inner in _callees(node, code)]
    return found


def _callees(call: ast.Call, code: FunctionSource) -> list[FunctionSource]:
    """All the functions of the user's that a call may run: those of a loop's modules and of the modules within one, and
    the forward of a class that is called (`Net()(x)`)."""
    called = static_value(call.func, code)
    if issubclass(type(called), type):
        return [found for found in [forward_of_class(called)] if found is not None]
    one = callee(call, code, called)
    several = (
        loop_modules(call.func.id, code)
        if called is UNKNOWN and isinstance(call.func, ast.Name)
        else ([called] if is_module(called) and one is None else [])
    )
    inside = [forward_of(part) for module in several for part in modules(module)]
    return [found for found in [one, *inside] if found is not None]


def is_module_class(thing: Any) -> bool:
    """Whether it is a class of modules."""
    return issubclass(type(thing), type) and issubclass(thing, torch.nn.Module)


def forward_of_new_module(call: ast.Call, code: FunctionSource) -> FunctionSource | None:
    """The forward that `Net()(x)` runs: of the class, since its object is gone."""
    kind = static_value(call.func.func, code) if isinstance(call.func, ast.Call) else UNKNOWN
    found = forward_of_class(kind)
    if found is None:
        return None
    found = bind(found, call, code, None)
    names = {name: thing for name, thing in found.frame.names.items() if name != found.node.args.args[0].arg}
    return dataclasses.replace(found, frame=dataclasses.replace(found.frame, names=names))


def forward_of_class(kind: Any) -> FunctionSource | None:
    """The forward of a module's class, where the module itself is gone."""
    if not is_module_class(kind):
        return None
    return function_source(next((vars(k)["forward"] for k in kind.__mro__ if "forward" in vars(k)), None))


def _module_of(code: FunctionSource) -> Any:
    first = next((a.arg for a in (*code.node.args.posonlyargs, *code.node.args.args)), None)
    mine = code.frame.names.get(first) if first else None
    return mine if is_module(mine) else None


def enclosing_scopes(code: FunctionSource) -> Iterator[FunctionSource]:
    """The scopes in which a name may have got its value: the function, those around it, the file, and, of a notebook,
    its other cells, the last that ran first."""
    yield code
    node = code.node
    while not isinstance(node, ast.Module):
        node = code.source.outer(node)
        if node is None:
            return
        yield dataclasses.replace(code, node=node, live=False, given={})
    for file in other_cells(code.source.file):
        read = source(file)
        if read is not None:
            yield dataclasses.replace(code, source=read, node=read.tree, live=False, given={})


def modules_in(thing: Any) -> list[Any]:
    """The modules in a container of modules, as a loop over it gives them."""
    if is_module(thing):
        return list(children(thing).values())
    return [one for one in thing if is_module(one)] if type(thing) in (list, tuple) else []


def loop_modules(name: str, code: FunctionSource) -> list[Any]:
    """The modules that a loop's variable stands for."""
    for statement in assignments(code, name, code.line):
        if isinstance(statement, ast.For):
            over: Any = statement.iter
            if isinstance(over, ast.Call):  # enumerate(x), reversed(x), x.items(), x.values()
                over = over.args[0] if over.args else getattr(over.func, "value", over)
            found = static_value(over, code)
            if found is not UNKNOWN:
                return modules_in(found)
    return []


KINDS: dict[str, frozenset[str]] = {
    "detached": frozenset({"detach", "detach_", "stop_gradient"}),
    "number": frozenset({"item", "tolist", "numpy", "float", "int", "bool"}),
    "whole numbers": frozenset(
        {
            "argmax",
            "argmin",
            "argsort",
            "one_hot",
            "nonzero",
            "argwhere",
            "bincount",
            "histc",
            "searchsorted",
            "bucketize",
            "count_nonzero",
            "multinomial",
            "long",
            "int",
            "short",
            "byte",
            "char",
        }
    ),
    "comparison": frozenset(
        {
            "gt",
            "ge",
            "lt",
            "le",
            "eq",
            "ne",
            "greater",
            "less",
            "greater_equal",
            "less_equal",
            "not_equal",
            "equal",
            "logical_and",
            "logical_or",
            "logical_not",
            "isnan",
            "isinf",
            "isfinite",
            "isclose",
            "allclose",
            "any",
            "all",
            "bool",
            "signbit",
        }
    ),
    "rebuilt": frozenset(
        {
            "tensor",
            "as_tensor",
            "asarray",
            "array",
            "from_numpy",
            "Tensor",
            "FloatTensor",
            "LongTensor",
            "DoubleTensor",
            "HalfTensor",
            "IntTensor",
            "new_tensor",
            "scalar_tensor",
        }
    ),
    "sampled": frozenset({"sample"}),
}
"""Which names end a path, and in what way."""
INDICES = frozenset({"max", "min", "sort", "topk", "mode", "kthvalue", "median", "cummax", "cummin"})
"""Ops that give values and, beside them, the places where they were found."""
FRESH = frozenset(
    {
        "zeros",
        "ones",
        "zeros_like",
        "ones_like",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "full",
        "full_like",
        "empty",
        "empty_like",
        "arange",
        "linspace",
        "eye",
        "randint",
        "randperm",
        "new_zeros",
        "new_ones",
        "new_full",
        "size",
        "dim",
        "numel",
        "len",
        "range",
        "isinstance",
        "type",
        "hasattr",
        "parameters",
        "state_dict",
        "print",
    }
)
"""What is new and depends on the values of nothing."""
BLOCKS = frozenset({"no_grad", "inference_mode"})
FUNCTIONS_ONLY = frozenset({"float", "int", "bool", "tensor", "as_tensor", "asarray", "array", "from_numpy"})
METHODS_ONLY = frozenset(
    {"item", "tolist", "numpy", "detach_", "long", "short", "byte", "char", "sample", "new_tensor"}
)
_WHOLE = ("long", "int", "short", "bool", "uint8", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor")


def cut_kind(call: ast.Call, is_function: bool) -> str | None:
    """How a call ends the path of what it is given, or None. is_function: `torch.argmax(x)`, not `x.argmax()`."""
    name = last_name(call.func)
    if name == "grad" and is_function and not keeps_graph(call):
        return "gradient"
    if name in ("to", "type") and not is_function:
        casts = [*call.args, *(k.value for k in call.keywords)]
        return "whole numbers" if any(_whole(given) for given in casts) else None
    if name == "float" and not is_function or name in METHODS_ONLY and is_function:
        return None
    if name in ("int", "bool") and not is_function:
        return "comparison" if name == "bool" else "whole numbers"
    if name in FUNCTIONS_ONLY and not is_function:
        return None
    return next((kind for kind, names in KINDS.items() if name in names), None)


def keeps_graph(call: ast.Call) -> bool:
    """Whether `torch.autograd.grad` is asked for gradients that have a graph of their own."""
    return any(
        k.arg == "create_graph" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in call.keywords
    )


def _whole(given: Any) -> bool:
    if isinstance(given, ast.Constant):
        return isinstance(given.value, str) and given.value.rpartition(".")[2] in _WHOLE
    name = last_name(given)
    return name in _WHOLE or name.startswith(("int", "uint"))


def disables_grad(context: Any, code: FunctionSource) -> bool | None:
    """Whether a context manager, or a decorator, turns gradients off (True) or on (False); None where neither."""
    call = context.func if isinstance(context, ast.Call) else context
    name = last_name(call)
    given = context.args[0] if isinstance(context, ast.Call) and context.args else None
    if name in BLOCKS:
        return given is None or truth(given, code) is not False
    if name == "enable_grad":
        return False
    if name == "set_grad_enabled" and given is not None:
        on = truth(given, code)
        return None if on is None else not on
    return None


def truth(node: Any, code: FunctionSource) -> bool | None:
    """Whether a condition holds, where plain values tell; None where they don't."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth(node.operand, code)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        found = [truth(part, code) for part in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in found else None if None in found else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(node, code)
    known = _plain(node, code)
    return None if known is UNKNOWN else bool(known)


def _plain(node: Any, code: FunctionSource) -> Any:
    found = static_value(node, code)
    return found if type(found) in (bool, int, float, str, type(None)) else UNKNOWN


def _compared(node: ast.Compare, code: FunctionSource) -> bool | None:
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


def call_arguments(node: ast.Call) -> list[Any]:
    return [*node.args, *(k.value for k in node.keywords)]


def is_function(node: ast.Call, code: FunctionSource) -> bool:
    """`torch.argmax(x)` and `float(x)`, not `x.argmax()`."""
    if isinstance(node.func, ast.Name):
        return True
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    return issubclass(type(static_value(base, code)), (types.ModuleType, type)) if base is not None else False


def call_operands(node: ast.Call, code: FunctionSource) -> list[Any]:
    base = [node.func.value] if isinstance(node.func, ast.Attribute) and not is_function(node, code) else []
    return base + call_arguments(node)


def top_package(called: Any) -> str:
    kind = called if issubclass(type(called), type) else type(called)
    plain = kind in (types.BuiltinFunctionType, types.FunctionType)
    return str(called.__module__ if plain else type.__getattribute__(kind, "__module__")).partition(".")[0]


def comprehensions(node: ast.Name, code: FunctionSource) -> list[Any]:
    """The `for` of a comprehension around a name that gives it its value."""
    return [
        g
        for n in code.source.around(node)
        for g in getattr(n, "generators", ())
        if any(isinstance(t, ast.Name) and t.id == node.id for t in ast.walk(g.target))
    ]


def values_put_in(code: FunctionSource, name: str) -> list[Any]:
    """What is put into a container of this name: `name.append(x)`, `name[k] = x`."""
    found: list[Any] = []
    for statement in code.statements():
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id == name
            for t in statement.targets
        ):
            found.append(statement.value)
        elif isinstance(statement, ast.Expr):
            found += [
                a
                for call in calls_in(statement)
                if last_name(call.func) in ("append", "extend", "insert", "add")
                and isinstance(call.func, ast.Attribute)
                and last_name(call.func.value) == name
                and isinstance(call.func.value, ast.Name)
                for a in call.args[-1:]
            ]
    return found


def is_skipped(statement: Any, code: FunctionSource) -> bool:
    """Whether a statement stands in a branch that plain values say was not taken."""
    inner = statement
    for around in code.source.around(statement):
        if isinstance(around, ast.If) and not changes_in_loop(around.test, code):
            holds = truth(around.test, code)
            if holds is not None and (inner in around.body) is not holds:
                return True
        inner = around
    return False


def changes_in_loop(test: Any, code: FunctionSource) -> bool:
    """Whether a name in a condition is given its value in a loop: what it is now is not what it was."""
    return any(
        loops_around(code, s)
        for n in ast.walk(test)
        if isinstance(n, ast.Name)
        for s in assignments(code, n.id, code.line)
        if not isinstance(s, SCOPES)
    )


def first_value(statement: Any, name: str, code: FunctionSource) -> bool:
    return not any(s.lineno < statement.lineno for s in assignments(code, name, statement.lineno))


def target_index(statement: Any, name: str) -> int | None:
    """Which of several targets a variable is: `_, best = …` → 1 for `best`."""
    for whole in getattr(statement, "targets", ()):
        if isinstance(whole, (ast.Tuple, ast.List)):
            return next((i for i, t in enumerate(whole.elts) if isinstance(t, ast.Name) and t.id == name), None)
    return None


def statement_of(node: Any, code: FunctionSource) -> Any:
    if isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)


def comparison_sign(node: ast.Compare) -> str:
    signs = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="}
    return signs.get(type(node.ops[0]), "in")


def short(node: Any) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 80 else text[:77] + "..."


def no_grad_block(node: Any, code: FunctionSource, name: str | None = None) -> GraphCut | None:
    """The no_grad around a statement, if one is."""
    for around in code.source.around(node):
        if isinstance(around, (ast.With, ast.AsyncWith)):
            for item in around.items:
                off = disables_grad(item.context_expr, code)
                if off is not None:
                    call = item.context_expr
                    name_of = last_name(call.func if isinstance(call, ast.Call) else call)
                    return (
                        GraphCut(
                            "block",
                            name_of,
                            f"with {short(call)}:",
                            None,
                            name,
                            code.name,
                            code.where(around),
                            written=short(node),
                        )
                        if off
                        else None
                    )
        if around is code.node:
            break
    return None
