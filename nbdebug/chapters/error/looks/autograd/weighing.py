"""Which of several in-place statements took the value that the backward misses."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import torch

from nbdebug.chapters.error.facts_autograd import Change
from nbdebug.chapters.error.looks.autograd.calls import entered
from nbdebug.chapters.error.looks.autograd.changes import Found
from nbdebug.chapters.error.looks.autograd.graph import PARTS, VIEWS, Saved, op_of
from nbdebug.chapters.error.looks.autograd.held import children, is_module, package
from nbdebug.chapters.error.looks.autograd.parts import skipped
from nbdebug.chapters.error.looks.autograd.source import Code, assignments, ends, last, loops, value
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import Scene, is_tensor

ENOUGH = 3
"""Points from which a statement is named: one sign that it is this value, not only that it is in place."""
SPELT = {
    "linear": "addmm",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "conv3d": "convolution",
    "batchnorm1d": "nativebatchnorm",
    "batchnorm2d": "nativebatchnorm",
    "layernorm": "nativelayernorm",
    "matmul": "mm",
    "softmax": "softmax",
    "logsoftmax": "logsoftmax",
    "embedding": "embedding",
    "silu": "silu",
    "maxpool2d": "maxpool2dwithindices",
}
"""Modules and functions whose node is called otherwise, in small letters without underscores."""
ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "mm"}


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What a statement is weighed against. missing: the node without its value; graph: all nodes; shape, version: of
    the tensor; module: nearest to the node; leaf: the parameter or input that was changed, if it is one."""

    missing: Saved | None
    graph: dict[Any, int]
    shape: tuple[int, ...] | None
    version: int | None
    module: str | None
    leaf: Any

    @property
    def made_by(self) -> Any:
        return self.missing.made_by if self.missing is not None else None

    def users(self) -> set[str]:
        """The ops of the nodes that took the value, or that of which it is a view."""
        anchors, at = [], self.made_by
        while at is not None:
            anchors.append(at)
            at = at.next_functions[0][0] if op_of(at) in VIEWS | PARTS and at.next_functions else None
        return {
            op_of(node).lower()
            for node in self.graph
            if any(before is anchor for before, _ in node.next_functions for anchor in anchors)
        }


def weigh(candidates: list[tuple[Found | None, Change, Any]], against: Weighed, scene: Scene) -> list[Change]:
    """The changes that would explain it, the likeliest first; one of a class that several modules share is named by the
    module nearest to the node."""
    users = against.users()
    scored: dict[tuple[Any, ...], tuple[float, Change]] = {}
    for found, change, module in candidates:
        points = _points(found, change, module, against, users)
        if points is None or points < ENOUGH:
            continue
        late = found.statement.lineno / 1e6 if found is not None and found.code.live else 0
        near = points + _nearness(change.module, against.module) + late
        key = (change.where.file, change.where.line, change.target if found else change.module)
        if key not in scored or near > scored[key][0]:
            scored[key] = (near, change)
    return [change for _, change in sorted(scored.values(), key=lambda entry: -entry[0])]


def _points(found: Found | None, change: Change, module: Any, against: Weighed, users: set[str]) -> float | None:
    made = op_of(against.made_by).lower() if against.made_by is not None else ""
    points = 0.0
    if users & {change.op.lower(), change.op.lower() + "_"} or change.how == "item" and "copyslices" in users:
        points += 3
    if found is None:
        return points
    later = found.code.live and found.statement.lineno > found.code.line and not loops(found.code, found.statement)
    if later or skipped(found.statement, found.code):
        return None
    lies = value(found.node, found.code)
    if against.leaf is not None:
        aside = change.how == "block" and issubclass(type(lies), torch.nn.Parameter)  # a loop over the parameters
        return points + 6 if lies is against.leaf else 4 if aside else 0
    if is_tensor(lies):
        if found.code.live and not _bound_again(found) and not _fits(lies, against):
            return None
        if against.made_by is None or against.version == lies._version:
            points += 3 if against.made_by is None else 2
    elif against.made_by is None and not users:
        points += 1
    if made and _ends_in(found.node, found.code, place(found.statement)) == made:
        points += 4
    return points


def _bound_again(found: Found) -> bool:
    """Whether the variable got another value after the change: what lies in it now is not what was changed."""
    return isinstance(found.node, ast.Name) and any(
        s.lineno > found.statement.lineno and not isinstance(s, ast.AugAssign)
        for s in assignments(found.code, found.node.id, found.code.line)
    )


def _fits(lies: Any, against: Weighed) -> bool:
    """Whether a live tensor may be the one that torch speaks of."""
    return lies._version > 0 and (against.shape is None or lies.numel() == _size(against.shape) or lies._is_view())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _nearness(module: str | None, wanted: str | None) -> float:
    """How near a module is to another: the share of the dotted name that both have, a whole ancestor most."""
    if module is None or wanted is None:
        return 0
    mine, theirs = [p for p in module.split(".") if p], wanted.split(".")
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    return (1 if common == len(mine) else 0) + common / 10 - (len(mine) - common) / 100


def _ends_in(node: Any, code: Code, line: tuple[int, int], depth: int = 6) -> str:
    """The op that an expression's value comes from last, in small letters."""
    if depth == 0:
        return ""
    if isinstance(node, ast.Name):
        made = [
            s
            for s in assignments(code, node.id, line)
            if isinstance(s, ast.Assign) and ends(s) <= line and not skipped(s, code)
        ]
        if made:
            return _ends_in(made[-1].value, code, place(made[-1]), depth - 1)
        given, caller = code.given.get(node.id, (None, None))
        return _ends_in(given, caller, (caller.line, 0), depth - 1) if isinstance(given, ast.AST) else ""
    if isinstance(node, ast.BinOp):
        return ARITHMETIC.get(type(node.op), "")
    if isinstance(node, ast.Call):
        called = value(node.func, code)
        if is_module(called) and _leaf_op(called):
            return _leaf_op(called)
        inner = entered(node, code, called) if called is not UNKNOWN else None
        if inner is not None and inner.returned():
            given, statement = inner.returned()[-1]
            return _ends_in(given, inner, place(statement), depth - 1)
        return _spelt(last(node.func))
    return ""


def place(statement: Any) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _leaf_op(module: Any) -> str:
    """The last op of a module of torch's own; of a Sequential that of its last part."""
    parts = list(children(module).values())
    if type(module).__name__ == "Sequential" and parts:
        return _leaf_op(parts[-1])
    return _spelt(type(module).__name__) if package(module).startswith("torch.nn") else ""


def _spelt(name: str) -> str:
    plain = name.lower().replace("_", "")
    return SPELT.get(plain, plain)
