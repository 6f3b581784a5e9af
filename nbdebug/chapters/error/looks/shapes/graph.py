"""The way of a tensor's shape as its autograd graph tells it: the ops that changed it, first to last.

What a layer does inside is told as the layer: the views around the product of a Linear, the steps of a recurrent layer,
the heads of an attention. The data are followed, never the weights that meet them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from nbdebug.chapters.error.asked import Names, is_a
from nbdebug.chapters.error.facts_shapes import Passed, Shape
from nbdebug.chapters.error.lying import of_tensor
from nbdebug.chapters.error.scene import is_tensor
from nbdebug.observe.frames import parts_of
from nbdebug.observe.named import attributes

MOST = 60
COMMON = {
    "MaxPool2DWithIndices": "max_pool2d",
    "MaxPool3DWithIndices": "max_pool3d",
    "Addmm": "linear",
    "Mm": "mm",
    "UnsafeView": "view",
    "ReshapeAlias": "reshape",
    "T": "t",
    "SqueezeBackward1": "squeeze",
}
"""Nodes of the autograd graph whose op the user knows by another name."""
WHOLE = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Layers of several ops: told as one."""
VIEWS = ("view", "reshape")
READY = (*VIEWS, "transpose", "clone", "unsqueeze")


@dataclasses.dataclass(frozen=True)
class Step:
    """One node: the op, the shape of what it gave, the layer whose weight it used ("" for none), and that layer."""

    op: str
    shape: Shape
    path: str = ""
    layer: Any = None


def way(value: Any, names: Names) -> tuple[Passed, ...]:
    """The ops that changed the shape, first to last, along the first operand that has a history."""
    if not is_tensor(value):
        return ()
    told: list[Passed] = []
    for step in _as_layers(list(_steps(value, names))[::-1]):
        if not told or told[-1].shape != step.shape:
            name = f"{step.path} ({step.op})" if step.path else step.op
            told.append(Passed(name, step.shape))
    return tuple(told)


def batch_changed(value: Any, rows: int, names: Names) -> Passed | None:
    """The op after which the first axis of a tensor no longer had this number of rows."""
    for before, after in itertools.pairwise(way(value, names)):
        if before.shape[:1] == (rows,) and after.shape[:1] != (rows,):
            return after
    return None


def _steps(value: Any, names: Names) -> Iterator[Step]:
    """The nodes, last to first."""
    owners = _owners(names)
    node: Any = of_tensor(value, "grad_fn")
    for _ in range(MOST):
        if node is None:
            return
        given = [(inner, _weight(inner)) for inner, _ in node.next_functions if inner is not None]
        layer = next((owners[id(w)] for _, w in given if w is not None and id(w) in owners), None)
        told = getattr(node, "_input_metadata", None)
        if told:
            yield _step(node, tuple(told[0].shape), layer, names)
        node = next((inner for inner, weight in given if weight is None), None)


def _step(node: Any, shape: Shape, layer: Any, names: Names) -> Step:
    name = re.sub(r"Backward\d*$", "", node.name())
    op = COMMON.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return Step(op, shape) if layer is None else Step(type(layer).__name__, shape, path_of(layer, names), layer)


def _owners(names: Names) -> dict[int, Any]:
    """The layer of each parameter, by the parameter's id; of several ops the outermost."""
    outer: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for model in names.scene.owners.models.values():
        for _, part in parts_of(model):  # outer ones come first
            for _, inner in parts_of(part) if is_a(part, WHOLE) else ():
                outer.setdefault(id(inner), part)
            for weight in (attributes(part).get("_parameters") or {}).values():
                found.setdefault(id(weight), outer.get(id(part), part))
    return found


def path_of(layer: Any, names: Names) -> str:
    """The name of a layer within its model ("stages.3.1"); with the model's own where that would be a bare number
    ("self.mlp.0"), or where the model is the layer."""
    inside = (names.scene.path(layer) or "").removeprefix("_orig_mod.")  # of a compiled model
    whole = names.module(layer)
    root = whole.removesuffix(inside).rstrip(".")
    if inside[:1].isdigit() and whole.endswith(f".{inside}") and root not in _classes(names):
        return whole
    return inside or whole


def _classes(names: Names) -> set[str]:
    """Models that no variable has are called by their class."""
    return {type(model).__name__ for model in names.scene.owners.models.values()}


def _weight(node: Any) -> Any:
    """The parameter that this operand is, as it lies or transposed; None for data."""
    if "Accumulate" in node.name():
        return node.variable
    inside = [inner for inner, _ in node.next_functions if inner is not None]
    if (
        re.match(
            r"(T|Transpose|Permute|To|ToCopy|Unsqueeze|View|Expand|UnsafeSplit|Split)(With\w+)?Backward", node.name()
        )
        and len(inside) == 1
    ):
        return _weight(inside[0])
    return None


def _as_layers(steps: list[Step]) -> Iterator[Step]:
    """Each layer once, with the shape of what it gave."""
    last: Mapping[str, int] = {step.path: i for i, step in enumerate(steps) if step.path}
    i = 0
    while i < len(steps):
        step = steps[i]
        if step.path:
            end = last[step.path] if is_a(step.layer, WHOLE) else i
            i = _ends(steps, end)
            step = dataclasses.replace(step, shape=steps[i].shape)
        elif _leads_in(steps, i):
            i += 1
            continue
        yield step
        i += 1


def _leads_in(steps: list[Step], i: int) -> bool:
    """Whether it only makes ready what a layer is given: the rows of a sequence under each other, time first."""
    k = next((k for k in range(i, len(steps)) if steps[k].op not in READY or steps[k].path), len(steps) - 1)
    layer = steps[k].layer
    if is_a(layer, nn.Linear):
        return k == i + 1 and len(steps[_ends(steps, k)].shape) > 2 and len(steps[i].shape) == 2
    return k > i and is_a(layer, WHOLE)


def _ends(steps: list[Step], i: int) -> int:
    """The number of the last node of the layer whose last product is node i."""
    layer, then = steps[i].layer, [step.op for step in steps[i + 1 :]]
    known = attributes(layer)
    turned = ("transpose",) if known.get("batch_first") else ()
    if is_a(layer, nn.RNNBase):
        joined = then.index("stack") + 1 if "stack" in then else 0
        ends = ("cat",) if known.get("bidirectional") else ()
        return _over(then, i, joined, (*ends, *turned))
    if is_a(layer, nn.MultiheadAttention):
        return _over(then, i, 0, ("view", *turned))
    view = is_a(layer, nn.Linear) and bool(then) and then[0] in VIEWS
    after = steps[i + 1].shape if view else ()
    return i + (len(after) > 2 and after[-1] == steps[i].shape[-1])


def _over(then: list[str], i: int, done: int, ops: tuple[str, ...]) -> int:
    """Over these ops as well, where they follow in this order."""
    for op in ops:
        done += then[done : done + 1] == [op]
    return i + done
