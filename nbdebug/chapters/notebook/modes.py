"""Modes that a cell switched and left: eval mode before more training, gradients off, another default dtype.

Each may be meant. They are told as a cause only where what followed shows that it was not: the cell that had trained
the model before trains it again, or the last cell failed by it. All else is a note.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from nbdebug.chapters.notebook.cells import History, nodes
from nbdebug.chapters.notebook.facts import ModeLeft
from nbdebug.chapters.notebook.held import Held, held_by, modules_of, parameters_of
from nbdebug.chapters.notebook.statements import dotted
from nbdebug.chapters.notebook.uses import root_of
from nbdebug.observe.named import attributes

ACTING = ("Dropout", "BatchNorm", "InstanceNorm", "AlphaDropout", "FeatureAlphaDropout", "SyncBatchNorm")
"""How the names of layers begin that do something else in eval mode."""


def in_eval(held: Held) -> list[tuple[str, Any]]:
    """The models in eval mode that an optimizer holds, and that have layers which act differently in it."""
    trained = {id(p) for _, optimizer in held.optimizers for p in held_by(optimizer)}
    found = []
    for name, model in held.whole:
        parts = [part for _, part in modules_of(model)]
        if (
            any(type(p).__name__.startswith(ACTING) for p in parts)
            and not any(attributes(p).get("training") for p in parts)
            and any(id(p) in trained for _, p in parameters_of(model))
        ):
            found.append((name, model))
    return found


def modes_left(held: Held, history: History, error: BaseException | None) -> list[ModeLeft]:
    """The modes of which it is shown that they were not meant."""
    found = [one for name, _ in in_eval(held) if (one := _eval(root_of(name), history)) is not None]
    said = _message(error)
    if "does not require grad" in said and not torch.is_grad_enabled():
        found += _setting("grad", said, history, "set_grad_enabled", "no_grad", "inference_mode")
    if torch.get_default_dtype() != torch.float32 and ("dtype" in said or "Double" in said or "Half" in said):
        found += _setting("dtype", said, history, "set_default_dtype", "set_default_tensor_type")
    return found


def _eval(name: str, history: History) -> ModeLeft | None:
    """The cell that switched to eval mode between two runs of the same training cell, where nothing switched back."""
    calls = {cell.number: _methods(history, cell.number) for cell in history.leading_to(name)}
    switched = [n for n, called in calls.items() if "eval" in called and "step" not in called]
    if not switched:
        return None
    last = switched[-1]
    training = [n for n, called in calls.items() if "step" in called and "backward" in called and "train" not in called]
    after = next((n for n in training if n > last), None)
    before = next((n for n in reversed(training) if n < last), None)
    if (
        after is None
        or before is None
        or history.same(after)[0] > last
        or any("train" in called for n, called in calls.items() if last < n <= after)
    ):
        return None
    line = next(
        (
            getattr(n, "lineno", None)
            for n in nodes(history.cells[last].statements)
            if isinstance(n, ast.Call) and dotted(n.func) == f"{name}.eval"
        ),
        None,
    )
    return ModeLeft("eval", name, history.cells[last].place(line), history.cells[after].place())


def _methods(history: History, number: int) -> set[str]:
    return {
        n.func.attr
        for n in nodes(history.reach(number))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }


def _setting(kind: str, said: str, history: History, *words: str) -> list[ModeLeft]:
    for cell in reversed(history.leading_to(*words)):
        for node in nodes(history.reach(cell.number)):
            if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in words:
                own = any(node in ast.walk(statement) for statement in cell.body)
                return [ModeLeft(kind, ast.unparse(node), cell.place(node.lineno if own else None), said=said)]
    return []


def _message(error: BaseException | None) -> str:
    given = BaseException.args.__get__(error) if error is not None else ()  # type: ignore[attr-defined]
    return given[0] if given and type(given[0]) is str else ""
