"""How a memory rule builds its finding: the holder, the pace of growth, the user's line with the fix in it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, size
from nbdebug.tools.memory.facts import Leak


def finding(
    slug: str,
    title: str,
    where: Where,
    holder: Iterable[str],
    fixes: Iterable[Fix],
    evidence: Mapping[str, Any] | None = None,
    chain: Iterable[str | Link] = (),
) -> Finding:
    """holder: who keeps the memory, by the names under which it can be found, the plainest first."""
    links = tuple(Link(link) if isinstance(link, str) else link for link in chain)
    names = [name for name in dict.fromkeys(holder) if name]
    return Finding(f"memory/{slug}", title, where, {"holder": names, **(evidence or {})}, tuple(fixes), links)


def grew(slug: str, growth: Leak, title: str, fixes: Iterable[Fix], chain: Iterable[str | Link] = ()) -> Finding:
    """A finding on what each step leaves behind."""
    evidence: dict[str, Any] = {"steps": growth.steps, "bytes a step": growth.bytes}
    evidence |= {"items a step": growth.items} if growth.items else {}
    evidence |= {"graph nodes a step": growth.nodes} if growth.nodes else {}
    evidence |= {"bytes a step in other Python objects": growth.plain} if growth.plain > growth.bytes // 10 else {}
    where = dataclasses.replace(growth.where, module=growth.where.module or growth.module)
    return finding(slug, title, where, growth.names or (growth.holder,), fixes, evidence, chain)


def pace(growth: Leak) -> str:
    """ "12.0 MiB more after each step"; where it is little memory, what else grows."""
    by = max(growth.bytes, growth.plain)
    if by < 1024 and growth.nodes:
        return f"{count(growth.nodes, 'more node')} of autograd's graph after each step"
    if by < 1024 and growth.chained:
        return "a longer graph after each step"
    if by < 1024 and growth.items:
        return f"{count(growth.items, 'more entry', 'more entries')} after each step"
    return f"{size(by)} more after each step"


def saving(growth_bytes: int, after: int | None = None) -> dict[str, Any]:
    """What a step adds, and would add with the fix; in words, as it was not tried."""
    if after is not None and 2 * after >= growth_bytes:
        return {"with the fix": "the tensor is kept, its graph is freed"}
    note = {"a step adds": size(growth_bytes)}
    return note if after is None else {**note, "with the fix, computed": size(after)}


def holder(growth: Leak) -> str:
    """ "`report['loss']`", or a phrase for one that has no name."""
    return f"`{growth.holder}`" if growth.holder else "An object that no variable refers to"


def small(growth: Leak, least: int) -> bool:
    """Whether a step adds less than `least` bytes, in tensors, arrays and other objects."""
    return max(growth.bytes, growth.plain) < least


def detached(growth: Leak, to: str = ".detach()") -> str:
    """The user's own line with the graph cut off; a line of the same form where theirs can't be read."""
    text = growth.where.text or ""
    parts = any(name.endswith("[0]") for name in growth.names) and growth.chained
    try:
        node = ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return f"kept = value{to}"
    value = _stored_value(node)
    if value is None:
        return f"kept = value{to}"
    source = ast.get_source_segment(text, value) or "value"
    wrapped = source if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({source})"
    new = f"tuple(part{to} for part in {source})" if parts else f"{wrapped}{to}"
    return text[: value.col_offset] + new + text[value.end_col_offset :]


def _stored_value(node: ast.stmt) -> Any:
    """The expression whose value a statement keeps."""
    if isinstance(node, ast.AugAssign):
        return node.value
    if isinstance(node, ast.Assign):
        value = node.value
        if isinstance(value, ast.BinOp) and isinstance(value.right, (ast.Name, ast.Attribute, ast.Call)):
            return value.right
        return value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        return node.value.args[-1]
    return None
