"""The loader that was at work, and the data set behind it, by the user's names."""

from __future__ import annotations

import ast
from typing import Any

from torch.utils.data import DataLoader

from nbdebug.chapters.error.operands import value_of
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.syntax import called, nodes_of
from nbdebug.observe.named import attributes


def iterator_of(scene: Scene) -> Any:
    """The loader's iterator, whose method is in the traceback; None where there is none."""
    for frame in reversed(scene.trail):
        mine = frame.names.get("self")
        if "DataLoaderIter" in type(mine).__name__:
            return mine
    return None


def loader_of(scene: Scene) -> tuple[str, str, int | None]:
    """(the loader's name, the data set's name or class, the number of the batch); "" and None where not known."""
    iterator = iterator_of(scene)
    held = attributes(iterator) if iterator is not None else {}
    dataset = held.get("_dataset")
    loader = set_name = ""
    for name, value, _ in scene.variables():
        if dataset is None:
            break
        if issubclass(type(value), DataLoader) and attributes(value).get("dataset") is dataset:
            loader = loader or name
        if value is dataset and not name.startswith("self"):
            set_name = set_name or name
    done = held.get("_rcvd_idx") if "_rcvd_idx" in held else held.get("_num_yielded")
    number = done - 1 if "_rcvd_idx" in held and type(done) is int else done
    return loader, set_name or (type(dataset).__name__ if dataset is not None else ""), number


def loader_at_hand(scene: Scene) -> tuple[str, Any]:
    """(name, loader) of the one that was at work: the traceback's own, else the first with workers among the variables
    (a worker's death is told at whatever line runs just then)."""
    for frame in reversed(scene.trail):
        for name in ("loader", "self"):
            if issubclass(type(frame.names.get(name)), DataLoader):
                loader = frame.names[name]
                named = next((n for n, value, _ in scene.variables() if value is loader and n != "self"), "loader")
                return named, loader
    iterator = iterator_of(scene)
    dataset = attributes(iterator).get("_dataset") if iterator is not None else None
    for name, value, _ in scene.variables():
        if issubclass(type(value), DataLoader):
            held = attributes(value)
            if held.get("dataset") is dataset if dataset is not None else held.get("num_workers"):
                return name, value
    return "", iterator


def loader_written(scene: Scene) -> tuple[str, int | None]:
    """(the data set's class or name, num_workers) of the loop over a loader in which the user's line stands, as its
    source says: a worker's death is told at whatever line runs, and such a loader may have no name."""
    for frame in scene.users:
        loops = [
            node
            for node in nodes_of(frame.site.file)
            if isinstance(node, (ast.For, ast.comprehension))
            and node.iter.lineno <= frame.site.line <= (getattr(node, "end_lineno", None) or node.iter.lineno)
        ]
        for loop in sorted(loops, key=lambda node: -node.iter.lineno):
            for call in ast.walk(loop.iter):
                if isinstance(call, ast.Call) and called(call).endswith("DataLoader"):
                    given = {one.arg: one.value for one in call.keywords}
                    source, workers = call.args[0] if call.args else given.get("dataset"), given.get("num_workers")
                    count = value_of(workers, frame) if workers is not None else None
                    name = called(source) or ast.unparse(source) if source is not None else ""
                    return name, count if type(count) is int else None
    return "", None
