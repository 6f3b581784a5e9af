"""In-place changes in the user's source: `+=`, `x[i] = v`, `x.mul_(…)`, `inplace=True`, `out=`."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.sources import tree_of
from nbdebug.observe.variables import attributes, named_children, named_modules
from nbdebug.report import Where
from nbdebug.text import clip
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    function_source,
    last_name,
    own_expressions,
    package,
    static_value,
)
from nbdebug.tools.errors.autograd.path import no_grad_block
from nbdebug.tools.errors.autograd.rules import InPlaceChange
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.facts import NOWHERE
from nbdebug.tools.errors.values import UNKNOWN

NODE_NAMES = {
    "ReLU6": "Hardtanh",
    "LeakyReLU": "LeakyRelu",
    "SELU": "Elu",
    "CELU": "Elu",
    "RReLU": "RreluWithNoise",
    "Dropout": "Mul",
}
"""Activations whose node in the graph has a name of its own."""
OPERATORS = {
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
"""Methods with the underscore of a change that leave a tensor's values as they are."""


class ChangeSite(NamedTuple):
    """A change with its syntax. node: what is changed."""

    change: InPlaceChange
    code: FunctionSource
    statement: Any
    node: Any


class _Target(NamedTuple):
    """node: what is changed; the rest as in `InPlaceChange`."""

    node: Any
    how: str
    op: str
    operand: str | None
    replacement: str


def in_place_changes(code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """All that one function changes in place, in the order of its lines."""
    for statement in code.statements():
        yield from changes_in_statement(statement, code, module)


def changes_in_statement(statement: Any, code: FunctionSource, module: str | None = None) -> Iterator[ChangeSite]:
    """What one statement changes."""
    inside = "block" if no_grad_block(statement, code) is not None else None
    for node, how, op, operand, replacement in _change_targets(statement, code):
        if not _may_be_tensor(node, code):
            continue
        smallest = next((n for n in code.source.around(node) if isinstance(n, ast.Lambda)), statement)
        text, target = clip(ast.unparse(smallest).partition("\n")[0], 90), ast.unparse(node)
        where = code.where(statement)
        change = InPlaceChange(text, target, inside or how, op, operand, replacement, module, code.name, where)
        yield ChangeSite(change, code, statement, node)


def _change_targets(statement: Any, code: FunctionSource) -> Iterator[_Target]:
    if isinstance(statement, ast.AugAssign):
        yield from _augmented_target(statement)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and not _is_dict_item(target):
                yield _item(target, "", ast.unparse(statement.value))
    for node in own_expressions(statement):
        if isinstance(node, ast.Call):
            yield from _call_targets(node, code)


def _augmented_target(statement: ast.AugAssign) -> Iterator[_Target]:
    sign, op = OPERATORS.get(type(statement.op), ("?", ""))
    target, operand = statement.target, ast.unparse(statement.value)
    text = ast.unparse(target)
    if isinstance(target, ast.Subscript):
        if not _is_dict_item(target):
            yield _item(target, sign, operand)
    elif not text.endswith((".data", ".grad")):
        right = f"({operand})" if isinstance(statement.value, (ast.BinOp, ast.IfExp)) else operand
        yield _Target(target, "statement", op, operand, f"{text} = {text} {sign} {right}")


def _item(target: ast.Subscript, sign: str, operand: str) -> _Target:
    base = ast.unparse(target.value)
    replacement = f"{base} = {base}.clone()\n{ast.unparse(target)} {sign}= {operand}"
    return _Target(target.value, "item", "CopySlices", operand, replacement)


def _is_dict_item(target: ast.Subscript) -> bool:
    return isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)


def _call_targets(node: ast.Call, code: FunctionSource) -> Iterator[_Target]:
    name, function = last_name(node.func), ast.unparse(node.func)
    base = node.func.value if isinstance(node.func, ast.Attribute) else None
    rest = ", ".join(map(ast.unparse, [*node.args, *(k for k in node.keywords if k.arg not in ("out", "inplace"))]))
    out = next((k.value for k in node.keywords if k.arg == "out"), None)
    inplace = next((k.value for k in node.keywords if k.arg == "inplace"), None)
    if out is not None:
        arguments = ", ".join(map(ast.unparse, [*node.args, *(k for k in node.keywords if k.arg != "out")]))
        yield _Target(out, "out", _camel(name), rest or None, f"{ast.unparse(out)} = {function}({arguments})")
    elif isinstance(inplace, ast.Constant) and inplace.value is True and node.args:
        replacement = f"{function}({rest})   # without inplace=True: {ast.unparse(node.args[0])} stays"
        yield _Target(node.args[0], "method", _camel(name), None, replacement)
    elif name.endswith("_") and not name.endswith("__") and name not in HARMLESS:
        plain = name[:-1]
        if base is not None and hasattr(torch.Tensor, name) and type(static_value(base, code)) is not types.ModuleType:
            text = ast.unparse(base)
            if not text.endswith((".data", ".grad")):
                yield _Target(base, "method", _camel(plain), rest or None, _without_change(text, plain, rest))
        elif node.args and (hasattr(torch, name) or hasattr(torch.nn.functional, name) or hasattr(torch.nn.init, name)):
            replacement = f"{ast.unparse(node.args[0])} = {function[:-1]}({rest})"
            yield _Target(node.args[0], "method", _camel(plain), None, replacement)


def _without_change(text: str, method: str, arguments: str) -> str:
    """What to write instead of `text.method_(arguments)`."""
    if method in ("zero", "fill"):
        return (
            f"{text} = torch.zeros_like({text})"
            if method == "zero"
            else f"{text} = torch.full_like({text}, {arguments})"
        )
    if hasattr(torch.Tensor, method):
        return f"{text} = {text}.{method}({arguments})"
    return f"{text} = {text}.clone()\n{text}.{method}_({arguments})"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _may_be_tensor(node: Any, code: FunctionSource) -> bool:
    """Whether what is changed may be a tensor: not what is known to be something else."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return False
    value = static_value(node, code)
    if value is not UNKNOWN:
        return is_tensor(value)
    return not any(
        isinstance(s, ast.Assign)
        and any(isinstance(t, ast.Name) and isinstance(node, ast.Name) and t.id == node.id for t in s.targets)
        and isinstance(s.value, (ast.Constant, ast.List, ast.Dict, ast.ListComp, ast.DictComp, ast.JoinedStr))
        for s in code.statements()
    )


def in_place_modules(context: ErrorContext) -> Iterator[tuple[InPlaceChange, Any]]:
    """(change, module) of torch's activations that were made with `inplace=True`."""
    for model in context.owners.models.values():
        for _, parent in named_modules(model):
            for name, part in named_children(parent).items():
                if attributes(part).get("inplace") is True and package(part).startswith("torch.nn"):
                    path, kind = context.path(part) or name, type(part).__name__
                    title = (context.owners.paths.get(id(part)) or path) if path.isdigit() else path
                    op = NODE_NAMES.get(kind, kind.capitalize())
                    where = _constructor(parent, name, kind, context)
                    text = f"{kind}(inplace=True)"
                    yield InPlaceChange(text, title, "module", op, None, f"nn.{kind}()", path, where=where), part


def inplace_flag(call: ast.Call) -> ast.expr | None:
    """The `True` in `nn.ReLU(inplace=True)`, or in `nn.ReLU(True)`."""
    flags = [*(k.value for k in call.keywords if k.arg == "inplace"), *call.args[-1:]]
    return next((flag for flag in flags if isinstance(flag, ast.Constant) and flag.value is True), None)


def _constructor(parent: Any, name: str, kind: str, context: ErrorContext) -> Where:
    """The call in the user's sources that made an activation: the only one of its kind in the `__init__` of the parent
    or of a module around it, else in the user's files; of several the one that gets its name, or that stands at its
    place in a Sequential of as many layers."""
    models = context.owners.models.values()
    outer = [
        m for model in models for _, m in named_modules(model) if any(c is parent for c in named_children(m).values())
    ]
    sources = [function_source(vars(type(one)).get("__init__")) for one in (parent, *outer)]
    roots = [(code.source.file, code.node) for code in sources if code is not None]
    roots += [(f, tree) for f in dict.fromkeys(frame.site.file for frame in context.users) if (tree := tree_of(f))]
    for file, root in roots:
        calls = [n for n in ast.walk(root) if isinstance(n, ast.Call)]
        made = [n for n in calls if last_name(n.func) == kind and inplace_flag(n) is not None]
        if len(made) > 1:
            lines = [
                n for n in ast.walk(root) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == f"self.{name}"
            ]
            alike = [
                n for n in calls if last_name(n.func) == "Sequential" and len(n.args) == len(named_children(parent))
            ]
            places = [line.value for line in lines] + [n.args[int(name)] for n in alike if name.isdigit()]
            made = [n for n in made if any(n is place for place in places)]
        if made:
            return at_site(Where(), Site(file, made[0].lineno, "")) if len(made) == 1 else NOWHERE
    return NOWHERE
