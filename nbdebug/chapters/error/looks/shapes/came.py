"""How a shape came about: the layers between the user's tensor and the one that failed, with the shape after each.

Two ways tell it, and neither computes anything: in a Sequential the layers before it, by their formulas; else the
autograd graph of the tensor, whose nodes know the shapes of what they gave.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbdebug.chapters.error.asked import Names
from nbdebug.chapters.error.facts_shapes import Operand, Passed
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.expressions import is_shaped
from nbdebug.chapters.error.looks.shapes.graph import path_of, way
from nbdebug.chapters.error.looks.shapes.through import through
from nbdebug.chapters.error.operands import operands, value_of
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.finding import Link
from nbdebug.observe.frames import Frame
from nbdebug.observe.named import attributes


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
        found = list(_layers(names, levels, start.shape))
        if found:
            return tuple(found)
    return way(given.value, names) if given is not None else ()


def below(scene: Scene) -> list[Frame]:
    """The frames under the user's innermost line, outermost first."""
    last = max((i for i, frame in enumerate(scene.trail) if frame.users), default=-1)
    return scene.trail[last + 1 :]


def _layers(names: Names, levels: list[Frame], shape: tuple[int, ...]) -> Iterator[Passed]:
    """Every layer before the one that failed, level by level of nested Sequentials."""
    at: tuple[int, ...] | None = shape
    for level in levels:
        running = level.names.get("module")
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is running:
                break
            before, at = at, None if at is None else through(child, at)
            if at is not None and at != before:
                yield Passed(_called(names, child), at)
        reached = level.names["input"]
        actual = tuple(reached.shape) if is_tensor(reached) else None
        if actual is not None and at != actual:
            yield Passed("the layers up to there", actual)
        at = actual


def _called(names: Names, child: Any) -> str:
    path = path_of(child, names)
    kind = type(child).__name__
    return f"{path} ({kind})" if path != kind else kind


def lines(scene: Scene, at_fault: Part | None) -> tuple[Link, ...]:
    """The user's lines that led there, outermost first, each with the tensor at fault where it stands in its call, else
    the first that does; a line without one where it is a function of the user's with a name. Each once."""
    found: list[Link] = []
    seen: set[tuple[str, int]] = set()
    for frame in reversed(scene.users[1:]):
        there = [(text, value) for text, value in operands(frame) if is_shaped(value)]
        same = [one for one in there if at_fault is not None and one[1] is at_fault.value]
        given = next(iter([*same, *there]), None)
        key = (given[0], id(given[1])) if given is not None else (frame.site.function, 0)
        if key in seen or given is None and frame.site.function.startswith("<"):
            continue
        seen.add(key)
        told = f"`{given[0]}` {list(given[1].shape)} goes in" if given else f"in `{frame.site.function}`"
        if found and (found[-1].where.file, found[-1].where.line) == (frame.site.file, frame.site.line):
            found.pop()  # a comprehension runs on the line of its function
        found.append(Link(told, frame.where))
    return tuple(found)


def sizes(layer: nn.Module) -> dict[str, int]:
    """What a layer was made for, of the sizes that its class takes."""
    told = attributes(layer)
    wanted = (
        "in_features",
        "out_features",
        "in_channels",
        "out_channels",
        "num_features",
        "normalized_shape",
        "num_channels",
        "num_groups",
        "input_size",
        "hidden_size",
        "num_layers",
        "embed_dim",
        "num_heads",
        "kernel_size",
        "in1_features",
        "in2_features",
        "num_parameters",
        "num_embeddings",
        "embedding_dim",
    )
    found = {name: told[name] for name in wanted if name in told}
    if "batch_first" in told:
        found["batch_first"] = told["batch_first"]
    return {
        name: value[0] if type(value) is tuple and len(set(value)) == 1 else value
        for name, value in found.items()
        if type(value) in (int, bool, tuple)
    }
