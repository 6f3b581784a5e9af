"""An index beyond a list, a tuple, a NumPy array, a data frame or a container of modules."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.chapters.error.asked import is_a
from nbdebug.chapters.error.facts_indices import Beyond, IndexFacts
from nbdebug.chapters.error.looks.data_sets import number, sample_of
from nbdebug.chapters.error.operands import UNKNOWN, expression, value_of
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.observe.frames import Frame

WORDS = re.compile(
    r"^(?:list|tuple|string|deque|range object|bytes)(?: assignment)? index out of range|"
    r"^index -?\d+ is out of range|^single positional indexer is out-of-bounds"
)
EXACT = (list, tuple, str, range, bytes, collections.deque, torch.Size)


def look(facts: IndexFacts, scene: Scene) -> IndexFacts | None:
    """The subscript of the failing line that goes beyond what it indexes."""
    if scene.type != "IndexError" or not WORDS.search(scene.message) or not scene.users:
        return None
    frame = scene.users[0]
    found = _subscripts(frame)
    alone = scene.carried is not None and len(found) == 1 and scene.trail[-1] is frame  # raised in this very line
    for base, key, size, value in found:
        if value is not None and not -size <= value < size or value is None and alone:
            written = "" if isinstance(key, (ast.Constant, ast.UnaryOp)) else ast.unparse(key)
            beyond = Beyond(value) if value is not None else Beyond(size, total=0)
            return sample_of(
                dataclasses.replace(
                    facts, kind="sequence", table=ast.unparse(base), size=size, least=-size, key=written, beyond=beyond
                ),
                scene,
            )
    return None


def arrays(facts: IndexFacts, scene: Scene, value: int, dim: int | None, size: int) -> IndexFacts | None:
    """NumPy's words are torch's: the array of the failing line whose size the message names."""
    frame = scene.users[0] if scene.users else None
    for node in ast.walk(_ran(frame)) if frame is not None else ():
        if not isinstance(node, ast.Subscript):
            continue
        table = value_of(node.value, frame) if frame is not None else UNKNOWN
        if type(table) is not np.ndarray or dim is None or dim >= table.ndim or table.shape[dim] != size:
            continue
        facts = dataclasses.replace(
            facts,
            kind="sequence",
            table=ast.unparse(node.value),
            size=size,
            dim=dim,
            shape=table.shape,
            least=-size,
            beyond=Beyond(value),
        )
        keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        mine = [ast.unparse(key) for key in keys if _reaches(key, value, frame)]
        return sample_of(dataclasses.replace(facts, key=mine[0] if mine else ""), scene)
    single = [n for n in ast.walk(_ran(frame)) if isinstance(n, ast.Subscript)] if frame is not None else []
    if len(single) != 1 or single[0] is not _value(_ran(frame)) or scene.trail[-1] is not frame:
        return None
    key = "" if isinstance(single[0].slice, (ast.Constant, ast.UnaryOp)) else ast.unparse(single[0].slice)
    return sample_of(
        dataclasses.replace(
            facts,
            kind="sequence",
            table=ast.unparse(single[0].value),
            size=size,
            dim=dim,
            least=-size,
            beyond=Beyond(value),
            key=key if key.isidentifier() else "",
        ),
        scene,
    )


def _value(node: ast.AST) -> ast.AST | None:
    return node.value if isinstance(node, (ast.Return, ast.Expr, ast.Assign)) else node


def _reaches(key: ast.expr, value: int, frame: Frame | None) -> bool:
    """Whether a key that is no number written there has the value, or holds it."""
    known: Any = value_of(key, frame) if frame is not None else UNKNOWN
    known = _computed(key, frame) if known is UNKNOWN and frame is not None else known
    if isinstance(key, ast.Constant) or known is UNKNOWN:
        return False
    if type(known) is np.ndarray and known.dtype.kind in "iu":
        return bool((known == value).any())
    if is_tensor(known) and not known.is_meta and not known.dtype.is_floating_point:
        return bool((known == value).any())
    return is_a(known, (int, np.integer)) and int(known) == value


def _computed(key: ast.expr, frame: Frame) -> Any:
    found = number(key, frame) if isinstance(key, ast.BinOp) else None
    return UNKNOWN if found is None else found


def _ran(frame: Frame | None) -> ast.AST:
    node = expression(frame) if frame is not None else None
    return node if node is not None else ast.Module([], [])


def _subscripts(frame: Frame) -> list[tuple[ast.expr, ast.expr, int, int | None]]:
    """(what is indexed, the index, how many entries, the number where it is known) of the failing line's subscripts."""
    found = []
    for node in ast.walk(_ran(frame)):
        if isinstance(node, ast.Subscript):
            size = _size(node.value, frame)
            value: Any = value_of(node.slice, frame)
            value = _computed(node.slice, frame) if value is UNKNOWN else value
            whole = is_a(value, (int, np.integer)) and type(value) is not bool
            if size is not None and (whole or value is UNKNOWN and isinstance(node.slice, ast.Name)):
                found.append((node.value, node.slice, size, int(value) if whole else None))
    return found


def _size(node: ast.expr, frame: Frame) -> int | None:
    """How many entries something has, where asking runs no code of the user's."""
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "iloc"):
        inner = value_of(node.value, frame)
        if node.attr == "shape":
            return inner.ndim if is_tensor(inner) or type(inner) is np.ndarray else None
        return _pandas(inner)
    if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(part, ast.Starred) for part in node.elts):
        return len(node.elts)
    value: Any = value_of(node, frame)
    if type(value) in EXACT:
        return len(value)
    if type(value) in (nn.Sequential, nn.ModuleList, nn.ParameterList):
        return len(value)
    return None


def _pandas(value: Any) -> int | None:
    home, name = type(value).__module__.partition(".")[0], type(value).__name__
    return int(value.shape[0]) if home == "pandas" and name in ("DataFrame", "Series") else None
