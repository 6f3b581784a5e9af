"""Which backward was called before the one that failed, and what both losses were computed from."""

from __future__ import annotations

import ast
from typing import Any

from nbdebug.chapters.error.facts import NOWHERE
from nbdebug.chapters.error.facts_autograd import Carrier
from nbdebug.chapters.error.looks.autograd.calls import outward
from nbdebug.chapters.error.looks.autograd.carried import backwards, keeps, reads, within, writes
from nbdebug.chapters.error.looks.autograd.carriers import carrier, tensors_of, written
from nbdebug.chapters.error.looks.autograd.graph import nodes
from nbdebug.chapters.error.looks.autograd.parts import skipped
from nbdebug.chapters.error.looks.autograd.source import Code, failing, loops, value
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import is_tensor
from nbdebug.finding import Where
from nbdebug.observe.named import own


def earlier_backward(code: Code, found: dict[Any, int], loss: str) -> tuple[Where | None, str, list[Carrier]]:
    """(where backward was called before in the same turn, on what, what both losses were computed from)."""
    node = failing(code)
    around = loops(code, node) if node is not None else []
    statements = within(around[0]) if around else list(code.statements())
    for statement, call, where in reversed(list(backwards(code, [s for s in statements if s.lineno < code.line]))):
        if keeps(call) or skipped(statement, code):
            continue
        base, text = _called_on(call), _root_of(call)
        if (
            where is code
            and text == loss
            and not writes([s for s in statements if statement.lineno < s.lineno < code.line], text)
        ):
            lies = value(base, code)
            return where.where(call), text, [carrier(text, "again", None if lies is UNKNOWN else lies, NOWHERE)]
        first = value(base, where) if where is code else UNKNOWN
        shared = _shared(code, found, statement, first)
        if shared:
            return where.where(call), text if where is code else "", shared
    for scope in list(outward(code))[1:] if isinstance(code.node, ast.Module) else ():  # another cell, that ran before
        for _, call, where in reversed(list(backwards(scope, list(scope.statements()), depth=0))):
            return where.where(call), _root_of(call), []
    return None, "", []


def _called_on(call: ast.Call) -> Any:
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return call.args[0] if call.args else None


def _root_of(call: ast.Call) -> str:
    """What a backward is called on, as it is written."""
    base = _called_on(call)
    return ast.unparse(base) if base is not None else ""


def _shared(code: Code, found: dict[Any, int], statement: Any, first: Any) -> list[Carrier]:
    """The variables from which both losses were computed, nearest to the second loss."""
    mine = nodes([first]) if is_tensor(first) else None
    names = dict(code.frame.names) or dict(own(code.frame.globals))
    both: list[tuple[int, str, Any]] = []
    for name, thing in names.items():
        for tensor in tensors_of(thing):
            node = tensor.grad_fn
            if (
                thing is not first
                and node in found
                and (
                    node in mine
                    if mine is not None
                    else any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(statement))
                )
            ):
                both.append((found[node], name, thing))
                break
    both.sort(key=lambda entry: entry[0])
    around = list(code.statements())
    return [
        carrier(
            name,
            "shared",
            thing,
            written(code, name),
            code.where(read[0]) if (read := reads(around, name)) else NOWHERE,
        )
        for _, name, thing in both[:1]
    ]
