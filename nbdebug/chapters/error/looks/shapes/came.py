"""How a shape came about: the layers between the user's tensor and the one that failed, with the shape after each.

Two ways tell it, and neither computes anything: in a Sequential the layers before it, by their formulas; else the
autograd graph of the tensor, whose nodes know the shapes of what they gave.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbdebug.chapters.error.asked import Names
from nbdebug.chapters.error.facts_shapes import Operand, Passed
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.expressions import is_shaped
from nbdebug.chapters.error.looks.shapes.through import through
from nbdebug.chapters.error.operands import operands, value_of
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.finding import Link
from nbdebug.observe.frames import Frame
from nbdebug.observe.named import attributes

MOST = 40
COMMON = {"MaxPool2DWithIndices": "max_pool2d", "MaxPool3DWithIndices": "max_pool3d", "Addmm": "linear", "Mm": "mm",
          "UnsafeView": "view", "ReshapeAlias": "reshape", "T": "t", "SqueezeBackward1": "squeeze"}
"""Nodes of the autograd graph whose op the user knows by another name."""


def entered(call: Call) -> Operand | None:
    """The user's tensor that went into what failed: the first in the arguments of the user's own call."""
    if call.inner is None or call.frame is None or not isinstance(call.node, ast.Call):
        return None
    for arg in [*call.node.args, *(k.value for k in call.node.keywords)]:
        for part in ast.walk(arg):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                value = value_of(part, call.frame)
                if is_shaped(value):
                    return Part(ast.unparse(part), "", value).operand()
    return None


def passed(scene: Scene, call: Call, given: Part | None, names: Names) -> tuple[Passed, ...]:
    """The steps from the user's tensor to the one at fault, in order; () where they can't be told."""
    start = entered(call)
    levels = [frame for frame in below(scene) if type(frame.module) is nn.Sequential and "input" in frame.names]
    if start is not None and start.shape is not None and levels:
        found = list(_layers(scene, levels, start.shape))
        if found:
            return tuple(found)
    return tuple(_graph(given.value, names)) if given is not None and is_tensor(given.value) else ()


def below(scene: Scene) -> list[Frame]:
    """The frames under the user's innermost line, outermost first."""
    last = max((i for i, frame in enumerate(scene.trail) if frame.users), default=-1)
    return scene.trail[last + 1:]


def _layers(scene: Scene, levels: list[Frame], shape: tuple[int, ...]) -> Iterator[Passed]:
    """Every layer before the one that failed, level by level of nested Sequentials."""
    at: tuple[int, ...] | None = shape
    for level in levels:
        running = level.names.get("module")
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is running:
                break
            before, at = at, None if at is None else through(child, at)
            if at is not None and at != before:
                yield Passed(_called(scene, child), at)
        reached = level.names["input"]
        actual = tuple(reached.shape) if is_tensor(reached) else None
        if actual is not None and at != actual:
            yield Passed("the layers up to there", actual)
        at = actual


def _called(scene: Scene, child: Any) -> str:
    path = scene.path(child)
    return f"{path} ({type(child).__name__})" if path else type(child).__name__


def _graph(value: Any, names: Names) -> Iterator[Passed]:
    """The ops of the graph that changed the shape, first to last, along the first operand that has a history."""
    node, found = value.grad_fn, []  # type: Any, list[tuple[str, tuple[int, ...]]]
    while node is not None and len(found) < MOST:
        told = getattr(node, "_input_metadata", None)
        if told:
            found.append((_op(node, names), tuple(told[0].shape)))
        node = next((n for n, _ in node.next_functions if n is not None and "Accumulate" not in n.name()), None)
    shape: tuple[int, ...] | None = None
    for name, after in reversed(found):
        if after != shape:
            yield Passed(name, after)
        shape = after


def _op(node: Any, names: Names) -> str:
    """The op of a node, and the layer whose weight it used."""
    name = re.sub(r"Backward\d*$", "", node.name())
    called = COMMON.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    weights = [n.variable for n, _ in node.next_functions if n is not None and "Accumulate" in n.name()]
    owner = next((names.weights[id(w)][0] for w in weights if id(w) in names.weights), None)
    return f"{owner} ({called})" if owner else called


def batch_changed(value: Any, rows: int, names: Names) -> Passed | None:
    """The op after which the first axis of a tensor no longer had this number of rows."""
    steps = list(_graph(value, names)) if is_tensor(value) else []
    for before, after in itertools.pairwise(steps):
        if before.shape[:1] == (rows,) and after.shape[:1] != (rows,):
            return after
    return None


def lines(scene: Scene) -> tuple[Link, ...]:
    """The user's lines that led there, outermost first, each with the first tensor that stands in its call."""
    found = []
    for frame in reversed(scene.users[1:]):
        given = next(((text, value) for text, value in operands(frame) if is_shaped(value)), None)
        told = f"`{given[0]}` {list(given[1].shape)} goes in" if given else frame.site.function
        found.append(Link(told, frame.where))
    return tuple(found[-4:])


def sizes(layer: nn.Module) -> dict[str, int]:
    """What a layer was made for, of the sizes that its class takes."""
    told = attributes(layer)
    wanted = ("in_features", "out_features", "in_channels", "out_channels", "num_features", "normalized_shape",
              "num_channels", "num_groups", "input_size", "hidden_size", "num_layers", "embed_dim", "num_heads",
              "kernel_size", "in1_features", "in2_features", "num_parameters", "num_embeddings", "embedding_dim")
    found = {name: told[name] for name in wanted if name in told}
    if "batch_first" in told:
        found["batch_first"] = told["batch_first"]
    return {name: value[0] if type(value) is tuple and len(set(value)) == 1 else value for name, value in found.items()
            if type(value) in (int, bool, tuple)}


