"""The user's line, with the fix in it: "torch.log(1 - gate)" becomes "torch.log((1 - gate).clamp_min(1e-12))".

Only a line that parses and holds the op just once is rewritten; else the caller shows its general form.
"""

from __future__ import annotations

import ast

_OPERATORS = {"div": ast.Div, "pow": ast.Pow, "mul": ast.Mult, "sub": ast.Sub, "add": ast.Add}


def rewritten(text: str | None, op: str | None, template: str, operand: int = 0) -> str | None:
    """`text` with the given operand X of `op` replaced by `template.format(X)`; None where that can't be done.

    operand: 0 for the first operand, 1 for the second. Works on `f(X)`, `X.f()` and on operators.
    """
    if not text or not op:
        return None
    line = text.rstrip(":") if text.rstrip().endswith(":") else text
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return None
    found = [part for node in ast.walk(tree) if (part := _operand(node, op, operand)) is not None]
    if len(found) != 1:
        return None
    part = found[0]
    inside = ast.get_source_segment(line, part) or ""
    plain = isinstance(part, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    new = template.format(inside if plain else f"({inside})")
    before = line.encode()[: part.col_offset].decode()
    after = line.encode()[part.end_col_offset :].decode()
    if part.lineno != 1 or part.end_lineno != 1:
        return None
    return before + new + after


def _operand(node: ast.AST, op: str, operand: int) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS.get(op, ())):
        return node.right if operand else node.left
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    names = (op, op.removeprefix("linalg_"), "float_power" if op == "pow" else op)
    if node.func.attr.strip("_") not in names:
        return None
    owner = node.func.value
    module = (
        isinstance(owner, ast.Name)
        and owner.id in ("torch", "F", "np", "math")
        or (isinstance(owner, ast.Attribute) and owner.attr in ("functional", "linalg", "special", "nn"))
    )
    parts = list(node.args) if module else [owner, *node.args]
    return parts[operand] if len(parts) > operand and isinstance(parts[operand], ast.expr) else None
