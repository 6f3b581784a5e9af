"""From a call in the user's source into what it means: a function, a method, a module's forward."""

from __future__ import annotations

import ast
import dataclasses
import linecache
import types
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.chapters.error.looks.autograd.held import children, is_module, method, modules, plain
from nbdebug.chapters.error.looks.autograd.source import (
    FUNCTIONS,
    Code,
    assignments,
    calls,
    failing,
    heads,
    of_frame,
    of_function,
    source,
    value,
)
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import Scene
from nbdebug.observe.named import cell_filled
from nbdebug.observe.sites import cell_name

MOST = 300
"""Functions looked at."""


def entered(call: ast.Call, code: Code, called: Any = UNKNOWN) -> Code | None:
    """The user's function that a call runs, with what it is given; None where it is not the user's, or not known."""
    called = value(call.func, code) if called is UNKNOWN else called
    if is_module(called):
        called = types.MethodType(plain(method(called, "forward")), called)
    elif type(called) not in (types.FunctionType, types.MethodType):
        if called is UNKNOWN or issubclass(type(called), (type, types.ModuleType, types.BuiltinFunctionType)):
            return None
        own = method(called, "__call__")
        if type(own) is not types.FunctionType:
            return None
        called = types.MethodType(own, called)
    mine = called.__self__ if type(called) is types.MethodType else UNKNOWN
    found = of_function(called)
    return None if found is None else bound(found, call, code, mine)


def switched_off(function: Any) -> str | None:
    """ "no_grad" where a function, be it a library's (`model.generate`), was decorated with it."""
    function = function.__func__ if type(function) is types.MethodType else function
    for _ in range(5):
        if type(function) is not types.FunctionType:
            return None
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name == "ctx_factory" and function.__code__.co_name == "decorate_context" and cell_filled(cell):
                manager = getattr(cell.cell_contents, "__self__", None)
                if type(manager) in (torch.no_grad, torch.inference_mode):
                    return type(manager).__name__
        function = function.__dict__.get("__wrapped__")
    return None


def entries(node: Any, key: Any, code: Code, depth: int = 6) -> Iterator[tuple[Any, Code]]:
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
    elif isinstance(node, ast.Call) and depth and (inner := entered(node, code)) is not None:
        for given, _ in inner.returned():
            yield from entries(given, key, inner, depth - 1)


def _swapped(given: tuple[Any, Any], key: Any) -> tuple[Any, Any, Any]:
    return given[0], key, given[1]


def bound(found: Code, call: ast.Call, code: Code, mine: Any = UNKNOWN) -> Code:
    """A function with its parameters bound to what a call gives them."""
    given, names = arguments(found, call, code, mine)
    return dataclasses.replace(
        found, given=given, frame=dataclasses.replace(found.frame, names=dict(found.frame.names) | names)
    )


def arguments(found: Code, call: ast.Call, code: Code, mine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
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
        known = value(node, code)
        if known is not UNKNOWN:
            names[name] = known
    return {name: (node, code) for name, node in pairs.items()}, names


def forward(module: Any) -> Code | None:
    """A module's own forward, if it is the user's."""
    return of_method(module, "forward")


def of_method(module: Any, name: str) -> Code | None:
    """A method of an object's, if it is the user's."""
    function = plain(method(module, name))
    found = of_function(function)
    if found is None:
        return None
    first = next((a.arg for a in (*found.node.args.posonlyargs, *found.node.args.args)), "self")
    return dataclasses.replace(
        found, frame=dataclasses.replace(found.frame, names=dict(found.frame.names) | {first: module}, module=module)
    )


def trail(scene: Scene) -> list[Code]:
    """The functions of the traceback's user frames, innermost first, each with what its caller wrote for it."""
    frames = scene.users
    codes: list[Code | None] = [of_frame(frame) for frame in frames]
    for inner in range(len(codes) - 2, -1, -1):
        code, caller = codes[inner], codes[inner + 1]
        if code is None or caller is None or not isinstance(code.node, FUNCTIONS):
            continue
        node = failing(caller)
        for call in calls(node) if node is not None else ():
            target = entered(call, caller)
            if target is not None and target.node.lineno == code.node.lineno and target.source.file == code.source.file:
                codes[inner] = dataclasses.replace(code, given=target.given)
                break
    return [code for code in codes if code is not None]


def reached(scene: Scene) -> list[tuple[Code, Any]]:
    """(function, the module whose method it is or None) of all that the traceback's functions and the modules' forwards
    call, nearest first, each function of each module once."""
    todo: list[tuple[Code, Any]] = [(code, code.frame.module) for code in trail(scene)]
    todo += [
        (code, part)
        for model in scene.owners.models.values()
        for part in modules(model)
        if (code := forward(part)) is not None
    ]
    seen: set[tuple[int, int]] = set()
    found: list[tuple[Code, Any]] = []
    while todo and len(found) < MOST:
        code, module = todo.pop(0)
        if (id(code.node), id(module)) in seen:
            continue
        seen.add((id(code.node), id(module)))
        found.append((code, module))
        for part in [code.node.body] if isinstance(code.node, ast.Lambda) else code.statements():
            for node in heads(part) if isinstance(part, ast.stmt) else ast.walk(part):
                if isinstance(node, ast.Call):
                    todo += [(inner, _module_of(inner) or module) for inner in _meant(node, code)]
    return found


def _meant(call: ast.Call, code: Code) -> list[Code]:
    """All the functions of the user's that a call may run: those of a loop's modules and of the modules within one, and
    the forward of a class that is called (`Net()(x)`)."""
    called = value(call.func, code)
    if issubclass(type(called), type):
        return [found for found in [class_forward(called)] if found is not None]
    one = entered(call, code, called)
    several = (
        looped(call.func.id, code)
        if called is UNKNOWN and isinstance(call.func, ast.Name)
        else ([called] if is_module(called) and one is None else [])
    )
    inside = [forward(part) for module in several for part in modules(module)]
    return [found for found in [one, *inside] if found is not None]


def is_class(thing: Any) -> bool:
    """Whether it is a class of modules."""
    return issubclass(type(thing), type) and issubclass(thing, torch.nn.Module)


def of_class(call: ast.Call, code: Code) -> Code | None:
    """The forward that `Net()(x)` runs: of the class, since its object is gone."""
    kind = value(call.func.func, code) if isinstance(call.func, ast.Call) else UNKNOWN
    found = class_forward(kind)
    if found is None:
        return None
    found = bound(found, call, code, None)
    names = {name: thing for name, thing in found.frame.names.items() if name != found.node.args.args[0].arg}
    return dataclasses.replace(found, frame=dataclasses.replace(found.frame, names=names))


def class_forward(kind: Any) -> Code | None:
    """The forward of a module's class, where the module itself is gone."""
    if not is_class(kind):
        return None
    return of_function(next((vars(k)["forward"] for k in kind.__mro__ if "forward" in vars(k)), None))


def _module_of(code: Code) -> Any:
    first = next((a.arg for a in (*code.node.args.posonlyargs, *code.node.args.args)), None)
    mine = code.frame.names.get(first) if first else None
    return mine if is_module(mine) else None


def outward(code: Code) -> Iterator[Code]:
    """The scopes in which a name may have got its value: the function, those around it, the file, and, of a notebook,
    its other cells, the last that ran first."""
    yield code
    node = code.node
    while not isinstance(node, ast.Module):
        node = code.source.outer(node)
        if node is None:
            return
        yield dataclasses.replace(code, node=node, live=False, given={})
    if cell_name(code.source.file) is not None:
        others = {
            file: name
            for file in list(linecache.cache)
            if isinstance(file, str) and file != code.source.file and (name := cell_name(file)) is not None
        }
        for file in sorted(others, key=lambda f: _number(others[f]), reverse=True):
            read = source(file)
            if read is not None:
                yield dataclasses.replace(code, source=read, node=read.tree, live=False, given={})


def _number(cell: str) -> int:
    digits = "".join(c for c in cell if c.isdigit())
    return int(digits) if digits else 0


def parts(thing: Any) -> list[Any]:
    """The modules in a container of modules, as a loop over it gives them."""
    if is_module(thing):
        return list(children(thing).values())
    return [one for one in thing if is_module(one)] if type(thing) in (list, tuple) else []


def looped(name: str, code: Code) -> list[Any]:
    """The modules that a loop's variable stands for."""
    for statement in assignments(code, name, code.line):
        if isinstance(statement, ast.For):
            over: Any = statement.iter
            if isinstance(over, ast.Call):  # enumerate(x), reversed(x), x.items(), x.values()
                over = over.args[0] if over.args else getattr(over.func, "value", over)
            found = value(over, code)
            if found is not UNKNOWN:
                return parts(found)
    return []
