"""Fixes of shapes as edits of the user's own text, and the program run on with that text: only what comes through is
called tried. An operand is rewritten where the failing line names it, a layer where it is made."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import edit_of, nodes_of, parse
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.report import Edit
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.continuation import before_line, continued
from nbdebug.tools.errors.shapes.call import FailedCall
from nbdebug.tools.errors.shapes.facts import ShapeFix
from nbdebug.tools.errors.shapes.layer_fixes import layer_of_size
from nbdebug.tools.errors.syntax import callee_name
from nbdebug.tools.errors.values import expression, statement, value_of

WHOLE = ("reshape", "axis", "order", "count", "unsorted", "state")
"""Fixes whose code stands for the whole failing expression."""
LAYERS = ("layer", "downstream")
"""Fixes that make a layer anew."""
SIZES = {"Linear": "out_features", "Conv1d": "out_channels", "Conv2d": "out_channels", "Conv3d": "out_channels"}


def as_edits(
    context: ErrorContext, call: FailedCall, fixes: tuple[ShapeFix, ...], size: int | None
) -> tuple[ShapeFix, ...]:
    """The fixes as edits, each tried on the program behind the line; those that fail there are left out, and those that
    are no edit, or could not be tried, become suggestions. Those that came through go first."""
    results = []
    for fix in fixes:
        edit = _edit(context, call, fix)
        if fix.slug in LAYERS:
            edit, layers = _layer_edit(context, call, fix, size)
            trial = continued(context, None, layers) if edit is not None and layers is not None else None
        else:
            trial = continued(context, edit) if edit is not None else None
        if trial is not None and not trial.worked:
            continue
        tried = True if trial is not None and fix.verified is not False else None
        results.append(dataclasses.replace(fix, edit=edit, verified=tried, reached=trial.text if trial else ""))
    return tuple(sorted(results, key=lambda fix: not fix.verified))


def _edit(context: ErrorContext, call: FailedCall, fix: ShapeFix) -> Edit | None:
    frame = call.frame
    if frame is None or fix.slug in LAYERS or "\n" in fix.code or "#" in fix.code:
        return None
    code = fix.code
    if "F." in code and "F" not in {**frame.globals, **frame.names}:
        code = code.replace("F.", "torch.nn.functional.")
    if fix.slug == "images":
        line, tree = statement(frame), parse(code)
        fits = line is not None and not hasattr(line, "body") and tree is not None
        return before_line(frame, line, tree.body) if fits and line is not None and tree is not None else None
    whole = fix.slug in WHOLE or fix.slug == "flatten" and call.op in ("view", "reshape")
    if fix.slug == "axis" and call.op in ("cat", "concatenate"):
        whole = True
    node: Any = call.node if whole else _operand_node(call, fix.name)
    if not isinstance(node, ast.expr) or node.end_lineno is None:
        return None
    return edit_of(frame.site.file, {node: code})


def _operand_node(call: FailedCall, name: str) -> ast.AST | None:
    """The operand of this text in the user's line."""
    operand = next((one for one in call.operands if one.text == name and name), None)
    if operand is None or call.frame is None:
        return None
    roots = (call.node, expression(call.frame), statement(call.frame))
    inside = [n for root in roots if root is not None for n in ast.walk(root)]
    if operand.node is not None and any(n is operand.node for n in inside):
        return operand.node
    alike = (n for n in inside if isinstance(n, ast.expr) and isinstance(getattr(n, "ctx", None), ast.Load))
    return next((n for n in alike if ast.unparse(n) == name or value_of(n, call.frame) is operand.value), None)


def _layer_edit(
    context: ErrorContext, call: FailedCall, fix: ShapeFix, size: int | None
) -> tuple[Edit | None, dict[int | str, nn.Module] | None]:
    """The size in the call that made the failing layer, and what replaces the layer in a trial."""
    layer = call.layer
    if layer is None or size is None or fix.slug != "layer":
        return None, None
    new, made = layer_of_size(layer, size), _constructor(context, layer)
    if new is None or made is None or not made[1].args:
        return None, None
    weight = next(iter(layer.parameters(recurse=False)), None)
    module = new[0] if weight is None else new[0].to(weight.dtype)
    return edit_of(made[0], {made[1].args[0]: str(size)}), {id(layer): module}


def _constructor(context: ErrorContext, layer: nn.Module) -> tuple[str, ast.Call] | None:
    """(file, call) of the only call in the user's sources that can have made a layer: its class, and its sizes where
    they are numbers."""
    own, kind = attributes(layer), type(layer).__name__
    names = [name for name in (*_FIRST, SIZES.get(kind, "")) if name in own]
    wanted = [own[name] for name in names]
    exact, possible = [], []
    for file in _files(context):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and callee_name(node) == kind and node.args:
                numbers = [_number(arg) for arg in node.args[: len(wanted)]]
                if any(n is not None and n != w for n, w in zip(numbers, wanted)):
                    continue
                (exact if None not in numbers else possible).append((file, node))
    candidates = exact or possible
    return candidates[0] if len(candidates) == 1 else None


_FIRST = ("in_features", "in_channels", "input_size", "num_features", "normalized_shape")


def _number(node: ast.expr) -> int | None:
    """The value of an expression of whole numbers: `16 * 5 * 5`."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None:
            return None
        ops: dict[type, Any] = {ast.Mult: left * right, ast.Add: left + right, ast.Sub: left - right}
        if isinstance(node.op, (ast.FloorDiv, ast.Pow)) and 0 < right < 32:
            return left // right if isinstance(node.op, ast.FloorDiv) else left**right if abs(left) < 1e4 else None
        return ops.get(type(node.op))
    return None


def _files(context: ErrorContext) -> Iterator[str]:
    """The user's files that can have made a layer: those of the traceback, other cells, and those of their models."""
    files = [frame.site.file for frame in context.users]
    files += [other for file in files[:1] for other in other_cells(file)]
    for model in context.owners.models.values():
        code = getattr(class_attribute(model, "__init__"), "__code__", None)
        if code is not None and not type(model).__module__.startswith("torch."):
            files.append(code.co_filename)
    yield from dict.fromkeys(files)
