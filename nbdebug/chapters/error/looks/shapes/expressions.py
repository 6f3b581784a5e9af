"""The operands of an expression of the user's, by its syntax: which parts they are, and what they are worth."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import BuiltinFunctionType, MethodType
from typing import Any

import numpy as np

from nbdebug.chapters.error.looks.shapes.bench import Bench, quiet
from nbdebug.chapters.error.operands import UNKNOWN, statement, value_of
from nbdebug.chapters.error.scene import is_tensor
from nbdebug.observe.frames import Frame

SYMBOLS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.MatMult: "@",
    ast.Pow: "**",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.GtE: ">=",
}


def is_shaped(value: Any) -> bool:
    return is_tensor(value) or type(value) is np.ndarray


def look_up(node: ast.AST, frame: Frame) -> Any:
    """The value of an operand: as it lies there, else computed again on copies, else UNKNOWN."""
    found = value_of(node, frame)
    if found is not UNKNOWN:
        return found
    with quiet():
        try:
            return Bench().value(node, frame)
        except Exception:
            return UNKNOWN


def is_number(node: ast.AST) -> bool:
    """Sizes, axes and slices: no tensors, though their values may be unknown."""
    called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return isinstance(node, (ast.Constant, ast.Slice, ast.UnaryOp, ast.Tuple, ast.Starred)) or called in (
        "size",
        "len",
        "int",
    )


def op_of(node: ast.AST | None) -> str:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return SYMBOLS.get(type(node.op), "") + "=" * isinstance(node, ast.AugAssign)
    if isinstance(node, ast.Compare):
        return SYMBOLS.get(type(node.ops[0]), "")
    if isinstance(node, ast.Call):
        return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    if isinstance(node, ast.Subscript):
        return "[]"
    return str(node.attr) if isinstance(node, ast.Attribute) else ""


def nodes(node: ast.AST, frame: Frame, kind: str) -> Iterator[tuple[str, ast.AST]]:
    """(role, node) of the operands of an expression."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Subscript)) and isinstance(node.ctx, ast.Store):
        around = statement(frame)
        yield from ([("target", node)] if isinstance(node, ast.Subscript) else [])
        if isinstance(around, (ast.Assign, ast.AugAssign)):
            yield "value", around.value
    elif isinstance(node, ast.BinOp):
        yield from (("left", node.left), ("right", node.right))
    elif isinstance(node, ast.AugAssign):
        yield from (("left", node.target), ("right", node.value))
    elif isinstance(node, ast.Compare) and kind != "truth":
        yield from (("left", node.left), ("right", node.comparators[0]))
    elif isinstance(node, ast.Subscript):
        yield "self", node.value
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield "index", index
    elif isinstance(node, ast.Call):
        yield from _called_with(node, frame)
    else:
        yield "self", node


def _called_with(node: ast.Call, frame: Frame) -> Iterator[tuple[str, ast.AST]]:
    function = value_of(node.func, frame)
    if isinstance(node.func, ast.Attribute) and (
        function is UNKNOWN or type(function) in (MethodType, BuiltinFunctionType) and is_shaped(function.__self__)
    ):
        yield "self", node.func.value
    for arg in [*node.args, *(k.value for k in node.keywords)]:
        if isinstance(arg, (ast.List, ast.Tuple)) and arg.elts and not all(is_number(e) for e in arg.elts):
            yield from (("tensors", part) for part in arg.elts)
        else:
            yield "", arg
