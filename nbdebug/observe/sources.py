"""The source of files and cells as Python's syntax: parsed once as long as the text is the same, and never run."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Mapping

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Syntax that has local variables of its own; comprehensions are left out."""


def parse(text: str | bytes) -> ast.Module | None:
    """The syntax of a text; None where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def tree_of(file: str) -> ast.Module | None:
    """The syntax of a file or a cell; None where its source is not available or is no Python (a cell with magics)."""
    lines = tuple(linecache.getlines(file))
    return _parsed(lines) if lines else None


@functools.lru_cache(maxsize=64)
def _parsed(lines: tuple[str, ...]) -> ast.Module | None:
    return parse("".join(lines))


@functools.lru_cache(maxsize=64)
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` gives them: walked once, since a file of some thousand lines takes 0.2 s."""
    return tuple(ast.walk(tree))


def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """The same by the name of the file; () where its source is not available or is no Python."""
    tree = tree_of(file)
    return () if tree is None else nodes(tree)


@functools.lru_cache(maxsize=64)
def functions(tree: ast.Module) -> tuple[ast.AST, ...]:
    """The functions and lambdas of a file."""
    return tuple(node for node in nodes(tree) if isinstance(node, SCOPES))


@functools.lru_cache(maxsize=64)
def parents(tree: ast.Module) -> Mapping[int, ast.AST]:
    """The node around each node, by the id of the inner one."""
    return {id(child): node for node in nodes(tree) for child in ast.iter_child_nodes(node)}
