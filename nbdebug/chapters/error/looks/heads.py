"""Which layer makes the scores that a loss was given: the last one of the very model that was called for them."""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from nbdebug.chapters.error.asked import Names, is_a, parts
from nbdebug.chapters.error.operands import UNKNOWN, value_of
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.written import came


def head(scores: str, size: int, scene: Scene) -> str:
    """The name of the last layer that gives as many outputs as there are scores: of the model whose call made them,
    named as the user's line calls it; where the sources don't show the call, of the only model that has one. ""
    where several have: the wrong name would be worse than none."""
    text, model = _caller(scores, scene)
    if model is not None:
        path, layer = _last(model, size)
        if layer is None:
            return ""
        named = Names(scene).module(layer)
        root = named.split(".")[0]
        as_called = text.isidentifier() and text != "self" and root != text
        return f"{text}.{path}".rstrip(".") if as_called and "[" not in named else named
    found = [layer for one in scene.owners.models.values() if (layer := _last(one, size)[1]) is not None]
    return Names(scene).module(found[0]) if len(found) == 1 else ""


def _last(model: nn.Module, size: int) -> tuple[str, nn.Module | None]:
    """(dotted name within the model, layer) of the last of torch's own layers with so many outputs."""
    found: tuple[str, nn.Module | None] = "", None
    for path, module in parts(model):
        if type(module).__module__.startswith("torch.nn.") and size in (
            module.__dict__.get("out_features"),
            module.__dict__.get("out_channels"),
        ):
            found = path.replace("_orig_mod.", ""), module
    return found


def _caller(scores: str, scene: Scene) -> tuple[str, nn.Module | None]:
    """(what the call calls, as it is written; the model) of the call that made the scores."""

    def called(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and _module(node.func, scene) is not None

    try:
        written: ast.expr = ast.parse(scores, mode="eval").body
    except (SyntaxError, ValueError):
        return "", None
    inner = [node for node in ast.walk(written) if isinstance(node, ast.Call) and called(node)]
    if not inner:
        way = came(scores, scene, called)
        maker = way[0].maker if way else None
        inner = [maker] if isinstance(maker, ast.Call) else []
    return (ast.unparse(inner[0].func), _module(inner[0].func, scene)) if inner else ("", None)


def _module(node: ast.expr, scene: Scene) -> nn.Module | None:
    """The module that an expression means in the innermost of the user's frames that knows it."""
    value: Any = next((found for frame in scene.users if (found := value_of(node, frame)) is not UNKNOWN), None)
    return value if is_a(value, nn.Module) else None
