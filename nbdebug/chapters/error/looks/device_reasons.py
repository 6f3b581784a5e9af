"""Why a tensor is not on the device that the others are on: where it lies, and what the sources do with it."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.error.asked import Asked, Names, is_a, parts, weights
from nbdebug.chapters.error.facts_devices import DeviceFacts
from nbdebug.chapters.error.facts_parts import Origin
from nbdebug.chapters.error.operands import value_of
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.chapters.error.syntax import called, nodes_of, spine
from nbdebug.chapters.error.written import came, cells, where_of
from nbdebug.finding import Link, Where
from nbdebug.observe.named import MODULES_OWN, attributes

MAKERS = frozenset(
    {
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "eye",
        "rand",
        "randn",
        "randint",
        "randperm",
        "tensor",
        "as_tensor",
        "from_numpy",
        "Tensor",
        "FloatTensor",
        "LongTensor",
        "normal",
        "tril_indices",
        "triu_indices",
        "scalar_tensor",
    }
)
"""What makes a tensor on the host unless it is told a device."""
MOVES = ("to", "cuda", "cpu")


def reason(facts: DeviceFacts, odd: Asked, scene: Scene) -> DeviceFacts:
    """The same facts with `why`, and what belongs to it."""
    names = Names(scene)
    if odd.owner is not None:
        return _registered(facts, odd, scene, names)
    held = _attribute(odd.value, scene, names)
    if held is not None:
        owner, kind, name, module = held
        return dataclasses.replace(
            facts,
            why="attribute" if module else "holder",
            owner=owner,
            holder=kind,
            attribute=name,
            origin=_origin(odd, scene),
        )
    line = _dropped(odd.name, scene)
    if line is not None:
        return dataclasses.replace(facts, why="dropped", dropped=line)
    found = _origin(odd, scene)
    looped = found is not None and any("comes out of" in link.what for link in found.way)
    made = found is not None and bool(found.call) and not looped and _runs(found, scene)
    return dataclasses.replace(
        facts,
        why="made" if made else "batch" if looped else "variable",
        origin=found,
        source="" if found is None or made else _source(found, odd, scene),
    )


def _source(origin: Origin, odd: Asked, scene: Scene) -> str:
    """The one tensor on the odd device from which the first binding on the way was made."""
    try:
        node = ast.parse(origin.code, mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    found = {
        ast.unparse(part)
        for part in spine(node)
        if isinstance(part, (ast.Name, ast.Attribute))
        and is_tensor(value := value_of(part, scene.users[0]))
        and value.device == odd.value.device
    }
    return found.pop() if len(found) == 1 and origin.code not in found else ""


def _registered(facts: DeviceFacts, odd: Asked, scene: Scene, names: Names) -> DeviceFacts:
    """A parameter or a buffer: of a model that was never moved, of a part that came later, or of a hidden module."""
    owner = odd.owner or ""
    root = next(
        (model for name, model in scene.owners.models.items() if owner == name or owner.startswith(f"{name}.")), None
    )
    if "[" in owner:
        place, _, _ = owner.partition("[")
        whole, _, attribute = place.rpartition(".")
        return dataclasses.replace(facts, why="list", owner=owner, holder=whole, attribute=attribute)
    if root is None:
        return dataclasses.replace(facts, why="model", owner=owner)
    counts = Counter(str(t.device) for t in weights(root, buffers=True))
    path, alone = names.module(root), set(counts) == {str(odd.value.device)}
    return dataclasses.replace(
        facts,
        why="model" if alone else "part",
        counts=dict(counts),
        model=path,
        owner=path if alone else _highest(root, odd, path) or owner,
    )


def _highest(root: nn.Module, odd: Asked, path: str) -> str | None:
    """The largest part of the model that is wholly on the odd device and holds the tensor."""
    for name, part in parts(root):
        inside = weights(part, buffers=True)
        if any(t is odd.value for t in inside) and all(t.device == odd.value.device for t in inside):
            return f"{path}.{name}".rstrip(".")
    return odd.owner


def _attribute(value: Any, scene: Scene, names: Names) -> tuple[str, str, str, bool] | None:
    """(path, class, attribute, whether it is a module's) of an object that holds the tensor as a plain attribute."""
    for model in scene.owners.models.values():
        for _, part in parts(model):
            for name, held in attributes(part).items():
                if held is value and name not in MODULES_OWN:
                    return names.module(part), type(part).__name__, name, True
    for frame in scene.users:
        mine = frame.names.get("self")
        for name, held in (attributes(mine) if mine is not None else {}).items():
            if held is value:
                return "self", type(mine).__name__, name, issubclass(type(mine), nn.Module)
    return None


def _dropped(name: str, scene: Scene) -> Where | None:
    """The line on which `x.to(device)` stands as a statement, so that its result goes nowhere."""
    files = [frame.site.file for frame in scene.users]
    for file in dict.fromkeys([*files, *(cells(files[0]) if files else [])]):
        for node in nodes_of(file):
            call = node.value if isinstance(node, ast.Expr) else None
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in MOVES
                and (ast.unparse(call.func.value) == name)
            ):
                return where_of(file, call)
    return None


def _origin(odd: Asked, scene: Scene) -> Origin | None:
    """The binding in which a tensor was made on the host."""
    device = odd.value.device

    def tells(node: ast.expr) -> bool:
        return called(node) in MAKERS and not any(k.arg == "device" for k in getattr(node, "keywords", []))

    def fits(value: Any) -> bool:
        return value.device == device if is_tensor(value) else not is_a(value, (int, float, str, torch.dtype))

    way = came(odd.name, scene, tells, fits, partial=True)
    if not way:
        return None
    return Origin(
        way[0].name,
        way[0].code,
        called(way[0].maker) if way[0].maker is not None else "",
        way[0].where,
        tuple(Link(made.said, made.where) for made in way),
    )


def _runs(origin: Origin, scene: Scene) -> bool:
    """Whether the tensor is made in a function that was running, and not in the data or the setting up."""
    for frame in scene.users:
        if frame.site.file == origin.where.file and frame.site.function != "<module>":
            for node in nodes_of(frame.site.file):
                if (
                    isinstance(node, ast.FunctionDef)
                    and node.name == frame.site.function
                    and (node.lineno <= (origin.where.line or 0) <= (node.end_lineno or 0))
                ):
                    return True
    return False
