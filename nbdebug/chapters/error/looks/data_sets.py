"""A data set whose length promises more samples than what it indexes holds: which sample, which data set, how many."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable
from types import GeneratorType
from typing import Any

from nbdebug.chapters.error.facts_indices import IndexFacts
from nbdebug.chapters.error.looks.loaders import iterator_of, loader_of
from nbdebug.chapters.error.operands import expression, value_of
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.syntax import nodes_of
from nbdebug.observe.frames import Frame
from nbdebug.observe.named import attributes

_WHOLE: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def number(node: ast.AST, frame: Frame) -> int | None:
    """A whole number as it is written: `i`, `i + self.width`; computed from plain ints alone."""
    if isinstance(node, ast.BinOp) and type(node.op) in _WHOLE:
        left, right = number(node.left, frame), number(node.right, frame)
        return None if left is None or right is None else _WHOLE[type(node.op)](left, right)
    value = value_of(node, frame)
    return value if type(value) is int else None


def sample_of(facts: IndexFacts, scene: Scene) -> IndexFacts:
    """In a data set's `__getitem__`: the facts with the length that it says of itself, the sample that was asked for,
    the data set's name, and the length that would fit."""
    frame = scene.users[0] if scene.users else None
    methods = _methods(frame) if frame is not None else {}
    if frame is None or "__len__" not in methods:
        return facts
    returned = [r.value for r in ast.walk(methods["__len__"]) if isinstance(r, ast.Return) and r.value]
    if not returned:
        return facts
    parameters = methods["__getitem__"].args.args[1:2]
    asked = parameters[0].arg if parameters else ""
    value = frame.names.get(asked)
    name, promised = _promise(frame, scene)
    known = asked != facts.key and type(value) is int
    head, fits = ast.unparse(returned[0]), _fits(facts, asked, frame)
    if head == fits:  # its length is right: the index is what is wrong
        return facts
    return dataclasses.replace(
        facts, head=head, sample=f"`{asked}` is {value}" if known else "", data_set=name, promised=promised, fits=fits
    )


def _methods(frame: Frame) -> dict[str, ast.FunctionDef]:
    """The methods of the class whose `__getitem__` was running."""
    if frame.site.function != "__getitem__":
        return {}
    for node in nodes_of(frame.site.file):
        if isinstance(node, ast.ClassDef):
            methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
            mine = methods.get("__getitem__")
            if mine is not None and mine.lineno <= frame.site.line <= (mine.end_lineno or 0):
                return methods
    return {}


def _fits(facts: IndexFacts, asked: str, frame: Frame) -> str:
    """What `__len__` would have to return, where the failing index is the sample's own or a fixed way beyond it."""
    entries = f"{facts.table}.shape[{facts.dim}]" if facts.dim else f"len({facts.table})"
    ran = expression(frame)
    for node in ast.walk(ran) if ran is not None else ():
        if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != facts.table:
            continue
        for key in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            if ast.unparse(key) == asked == facts.key:
                return entries
            if isinstance(key, ast.BinOp) and isinstance(key.op, ast.Add) and ast.unparse(key) == facts.key:
                for mine, more in ((key.left, key.right), (key.right, key.left)):
                    ahead = number(more, frame)
                    lasting = all(
                        not isinstance(n, ast.Name) or n.id == "self" or n.id in frame.globals for n in ast.walk(more)
                    )  # known in `__len__` as well
                    if ast.unparse(mine) == asked and lasting and ahead is not None and 0 < ahead < (facts.size or 0):
                        return f"{entries} - {ast.unparse(more)}"
    return ""


def _promise(frame: Frame, scene: Scene) -> tuple[str, int | None]:
    """(the data set by the user's name or its loader's, how many samples the loader's sampler was told that it has)."""
    mine, iterator = frame.names.get("self"), iterator_of(scene)
    held = attributes(iterator) if iterator is not None else {}
    if mine is not None and held.get("_dataset") is mine:
        loader, name, _ = loader_of(scene)
        if name == type(mine).__name__ and loader:
            name = f"{loader}.dataset"
        return name, _told(held.get("_sampler_iter"))
    return next(
        (
            name
            for name, value, _ in scene.variables()
            if value is mine and mine is not None and name.partition(".")[0] != "self"
        ),
        "",
    ), None


def _told(running: Any) -> int | None:
    """The length over which torch's sampler runs, as its own frames hold it: no `__len__` of the user's is asked."""
    if type(running) is type(iter(range(0))):
        whole = running.__reduce__()[1][0]
        return len(whole) if type(whole) is range else None
    frame = running.gi_frame if type(running) is GeneratorType else None
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
        return None
    found = frame.f_locals.get("n")
    return found if type(found) is int else _told(frame.f_locals.get("sampler_iter"))
