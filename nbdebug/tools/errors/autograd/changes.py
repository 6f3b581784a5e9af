"""In-place changes as they stand in the user's source: `+=`, `x[i] = v`, `x.mul_(…)`, `inplace=True`, `out=`."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.autograd.calls import no_grad_block
from nbdebug.tools.errors.autograd.facts import InPlaceChange
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    children,
    function_source,
    last_name,
    modules,
    own_expressions,
    package,
    static_value,
)
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.values import UNKNOWN

NODES = {
    "ReLU6": "Hardtanh",
    "LeakyReLU": "LeakyRelu",
    "SELU": "Elu",
    "CELU": "Elu",
    "RReLU": "RreluWithNoise",
    "Dropout": "Mul",
}
"""Activations whose node in the graph has a name of its own."""
SIGNS = {
    ast.Add: ("+", "Add"),
    ast.Sub: ("-", "Sub"),
    ast.Mult: ("*", "Mul"),
    ast.Div: ("/", "Div"),
    ast.Pow: ("**", "Pow"),
    ast.FloorDiv: ("//", "FloorDivide"),
    ast.Mod: ("%", "Remainder"),
    ast.MatMult: ("@", "Mm"),
    ast.BitAnd: ("&", "BitwiseAnd"),
    ast.BitOr: ("|", "BitwiseOr"),
}
HARMLESS = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "rename_", "detach_"})
"""Methods with the sign of a change that leave a tensor's values as they are."""
FILLS = frozenset({"fill_", "zero_", "copy_", "masked_fill_", "index_fill_", "scatter_", "index_copy_"})


class ChangeSite(NamedTuple):
    """A change with the syntax that it stands in. node: what is changed."""

    change: InPlaceChange
    code: FunctionSource
    statement: Any
    node: Any


def in_place_changes(code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """All that one function changes in place, in the order of its lines."""
    for statement in code.statements():
        yield from changes_in_statement(statement, code, module)


def changes_in_statement(statement: Any, code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """What one statement changes."""
    inside = "block" if no_grad_block(statement, code) is not None else None
    for node, how, op, added, instead in _change_targets(statement, code):
        if not _tensor(node, code):
            continue
        small = next((n for n in code.source.around(node) if isinstance(n, ast.Lambda)), statement)
        change = InPlaceChange(
            _text(small), ast.unparse(node), inside or how, op, added, instead, module, code.name, code.where(statement)
        )
        yield ChangeSite(change, code, statement, node)


def _change_targets(statement: Any, code: FunctionSource) -> Iterator[tuple[Any, str, str, str | None, str]]:
    """(what is changed, how, the op of its node in the graph, what is put in, what to write instead)."""
    if isinstance(statement, ast.AugAssign):
        yield from _augmented(statement)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and not _keyed(target):
                base, new = ast.unparse(target.value), ast.unparse(statement.value)
                yield (
                    target.value,
                    "item",
                    "CopySlices",
                    new,
                    f"{base} = {base}.clone()\n{ast.unparse(target)} = {new}",
                )
    for node in own_expressions(statement):
        if isinstance(node, ast.Call):
            yield from _called(node, code)


def _augmented(statement: ast.AugAssign) -> Iterator[tuple[Any, str, str, str | None, str]]:
    sign, op = SIGNS.get(type(statement.op), ("?", ""))
    target, added = statement.target, ast.unparse(statement.value)
    text = ast.unparse(target)
    right = f"({added})" if isinstance(statement.value, (ast.BinOp, ast.IfExp)) else added
    if isinstance(target, ast.Subscript):
        if not _keyed(target):
            base = ast.unparse(target.value)
            yield target.value, "item", "CopySlices", added, f"{base} = {base}.clone()\n{text} {sign}= {added}"
    elif not text.endswith((".data", ".grad")):
        yield target, "statement", op, added, f"{text} = {text} {sign} {right}"


def _called(node: ast.Call, code: FunctionSource) -> Iterator[tuple[Any, str, str, str | None, str]]:
    name = last_name(node.func)
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    rest = ", ".join(
        ast.unparse(part) for part in [*node.args, *(k for k in node.keywords if k.arg not in ("out", "inplace"))]
    )
    out = next((k.value for k in node.keywords if k.arg == "out"), None)
    flag = next((k.value for k in node.keywords if k.arg == "inplace"), None)
    if out is not None:
        left = ", ".join(ast.unparse(part) for part in [*node.args, *(k for k in node.keywords if k.arg != "out")])
        yield out, "out", _camel(name), rest or None, f"{ast.unparse(out)} = {ast.unparse(node.func)}({left})"
    elif isinstance(flag, ast.Constant) and flag.value is True and node.args:
        first = ast.unparse(node.args[0])
        instead = f"{ast.unparse(node.func)}({rest})   # without inplace=True: {first} stays"
        yield node.args[0], "method", _camel(name), None, instead
    elif name.endswith("_") and not name.endswith("__") and name not in HARMLESS:
        plain = name[:-1]
        if base is not None and hasattr(torch.Tensor, name) and type(static_value(base, code)) is not types.ModuleType:
            text = ast.unparse(base)
            if not text.endswith((".data", ".grad")):
                yield base, "method", _camel(plain), rest or None, _without(text, plain, rest, name)
        elif node.args and (hasattr(torch, name) or hasattr(torch.nn.functional, name) or hasattr(torch.nn.init, name)):
            first = ast.unparse(node.args[0])
            yield node.args[0], "method", _camel(plain), None, f"{first} = {ast.unparse(node.func)[:-1]}({rest})"


def _without(text: str, plain: str, rest: str, name: str) -> str:
    if plain in ("zero", "fill"):
        return f"{text} = torch.zeros_like({text})" if plain == "zero" else f"{text} = torch.full_like({text}, {rest})"
    if hasattr(torch.Tensor, plain):
        return f"{text} = {text}.{plain}({rest})"
    return f"{text} = {text}.clone()\n{text}.{name}({rest})"


def _tensor(node: Any, code: FunctionSource) -> bool:
    """Whether what is changed may be a tensor: not what is known to be something else."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return False
    lies = static_value(node, code)
    if lies is not UNKNOWN:
        return is_tensor(lies)
    written = [
        s
        for s in code.statements()
        if isinstance(s, ast.Assign)
        and any(isinstance(t, ast.Name) and isinstance(node, ast.Name) and t.id == node.id for t in s.targets)
    ]
    return not any(
        isinstance(s.value, (ast.Constant, ast.List, ast.Dict, ast.ListComp, ast.DictComp, ast.JoinedStr))
        for s in written
    )


def _keyed(target: ast.Subscript) -> bool:
    """Whether an item is a dict's by its key."""
    return isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _text(statement: Any) -> str:
    text = ast.unparse(statement).partition("\n")[0]
    return text if len(text) <= 90 else text[:87] + "..."


def in_place_modules(scene: ErrorContext) -> Iterator[tuple[InPlaceChange, Any]]:
    """(change, module) of torch's activations that were made with `inplace=True`."""
    for model in scene.owners.models.values():
        for parent in modules(model):
            for name, part in children(parent).items():
                if attributes(part).get("inplace") is True and package(part).startswith("torch.nn"):
                    path = scene.path(part) or name
                    made = _made(parent, type(part).__name__, scene)
                    kind = type(part).__name__
                    op = NODES.get(kind, kind.capitalize())
                    yield (
                        InPlaceChange(
                            f"{kind}(inplace=True)",
                            path,
                            "module",
                            op,
                            None,
                            f"nn.{kind}()",
                            path,
                            "",
                            made[0].where(made[1]),
                        )
                        if made
                        else InPlaceChange(f"{kind}(inplace=True)", path, "module", op, None, f"nn.{kind}()", path),
                        part,
                    )


def _made(parent: Any, kind: str, scene: ErrorContext) -> tuple[FunctionSource, Any] | None:
    """The call in the user's `__init__` (of the parent, or of one around it) that made it."""
    around = [
        parent,
        *(
            m
            for model in scene.owners.models.values()
            for m in modules(model)
            if any(child is parent for child in children(m).values())
        ),
    ]
    for one in around:
        code = function_source(vars(type(one)).get("__init__"))
        for statement in code.statements() if code is not None else ():
            for node in own_expressions(statement):
                if isinstance(node, ast.Call) and last_name(node.func) == kind and (node.keywords or node.args):
                    return code, node  # type: ignore[return-value]
    return None
