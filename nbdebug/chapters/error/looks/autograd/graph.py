"""The autograd graph of a failed backward: what is still there of a forward whose frames are gone.

The tensors that backward started from lie in torch's own frame, even where the user gave them no name. From their
`grad_fn` the whole graph can be walked. What a node has saved for its derivative is asked for once: it comes, or torch
says that it was freed by a backward before, or that it has been changed since.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.observe.named import attributes

MOST = 20_000
"""Nodes walked, some tens of milliseconds; a larger graph is seen from its loss as far as this."""
ASKED = 8000
"""Nodes that are asked for what they have saved, 20 microseconds each."""
NEAR = 1000
"""Nodes of a variable's own history that are compared with a loss's."""
STARTS = ("_engine_run_backward", "backward", "grad")
"""torch's own functions in whose frames the tensors lie that a backward starts from."""
VIEWS = frozenset({"T", "AsStrided", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand", "Select"})
"""Nodes between a leaf and a view of it."""
PARTS = frozenset(
    {"Slice", "Narrow", "Unbind", "Split", "SplitWithSizes", "Alias", "UnsafeView", "Diagonal", "Reshape"}
)
"""Nodes of a view of a part, or in another form."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A node one of whose saved tensors has been changed. made_by: the node whose output that tensor is, None for one
    that has no history; leaf: the parameter or input behind it, where only views lie between."""

    node: Any
    made_by: Any = None
    leaf: torch.Tensor | None = None


def roots(scene: Scene) -> list[torch.Tensor]:
    """The tensors that the failing backward started from."""
    for frame in reversed(scene.trail):
        if not frame.users and frame.site.function in STARTS:
            for name in ("t_outputs", "tensors", "outputs", "self"):
                given: Any = frame.names.get(name)
                inside = given if type(given) in (list, tuple) else [given]
                found: list[torch.Tensor] = [t for t in inside if is_tensor(t)]
                if found:
                    return found
    return []


def nodes(tensors: Iterable[Any]) -> dict[Any, int]:
    """The nodes from which the gradients of these tensors are made, each with its distance from them, nearest first;
    without those of the leaves."""
    level = [t.grad_fn for t in tensors if t.grad_fn is not None]
    found: dict[Any, int] = dict.fromkeys(level, 0)
    distance = 0
    while level and len(found) < MOST:
        distance += 1
        following = [before for node in level for before, _ in node.next_functions if before is not None]
        level = [node for node in dict.fromkeys(following) if node not in found and not is_leaf(node)]
        found |= dict.fromkeys(level, distance)
    return found


def meet(tensors: Iterable[Any], found: Mapping[Any, int]) -> bool:
    """Whether a part of the history of these tensors is a part of that graph, as far as `NEAR` nodes back."""
    level = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(level)
    while level and len(seen) < NEAR:
        if not found.keys().isdisjoint(level):
            return True
        following = [before for node in level for before, _ in node.next_functions if before is not None]
        level = [node for node in dict.fromkeys(following) if node not in seen and not is_leaf(node)]
        seen.update(level)
    return False


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf, into whose `.grad` the gradient is added."""
    return node.name().endswith("AccumulateGrad")


def leaves(node: Any, most: int = 200) -> Iterator[torch.Tensor]:
    """The leaves that a node was computed from, nearest first."""
    level, seen = [node], {node}
    while level and len(seen) < most:
        following = []
        for one in level:
            if is_leaf(one):
                yield one.variable
            for before, _ in one.next_functions:
                if before is not None and before not in seen:
                    seen.add(before)
                    following.append(before)
        level = following


def op_of(node: Any) -> str:
    """The op of a node, as torch spells it: ReluBackward0 → "Relu", torch::autograd::CopySlices → "CopySlices"."""
    name = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward")


def is_users_function(node: Any) -> bool:
    """Whether a node is an autograd Function written in Python: what it has saved is not asked for, since that might
    run the user's hooks."""
    return issubclass(type(node), torch.autograd.function.BackwardCFunction)


def _asked(node: Any) -> dict[str, str]:
    """{name of a saved value: what torch said when it refused it} of a node of torch's own."""
    said: dict[str, str] = {}
    if is_users_function(node):
        return said
    for name in [n for n in dir(type(node)) if n.startswith("_saved_")]:
        if not name.endswith(("_sizes", "_strides")) and not _hooked(node, name):
            try:
                getattr(node, name)
            except RuntimeError as refused:
                said[name] = str(refused)
            except Exception:
                continue
    return said


def _hooked(node: Any, name: str) -> bool:
    """Whether saved-tensor hooks hold this value: to unpack it would run them."""
    raw = getattr(type(node), "_raw" + name, None)
    if raw is None:
        return False
    try:
        return getattr(getattr(node, "_raw" + name), "unpack_hook", None) is not None
    except RuntimeError:  # freed: then nothing is unpacked either
        return False


def freed(node: Any) -> bool:
    """Whether a backward has freed what this node had saved."""
    return any("second time" in said for said in _asked(node).values())


def modified(within: Iterable[Any]) -> list[Saved]:
    """The nodes whose saved tensors have been changed since, nearest to the loss first, as far as `ASKED` nodes."""
    found = []
    for node in itertools.islice(within, ASKED):
        for name, said in _asked(node).items():
            if "modified by an inplace" in said:
                made_by = _maker(node, name, said)
                found.append(Saved(node, made_by, _leaf(node, made_by, said)))
    return found


def _maker(node: Any, name: str, said: str) -> Any:
    """The node whose output was saved under this name: the node itself for a result, else one that came before it."""
    _, marked, rest = said.partition("is output ")
    op = rest.partition(" of ")[2].partition(",")[0].strip() if marked else ""
    if not op:
        return None
    op = op.rstrip("0123456789").removesuffix("Backward").rpartition("::")[2]
    if "result" in name or name in ("_saved_out", "_saved_output"):
        return node
    before = [one for one, _ in node.next_functions if one is not None and op_of(one) == op]
    if not before and op == "AsStrided":  # so torch calls any view of what was changed since
        shape = spoken_shape(said)
        before = [
            one
            for one, i in node.next_functions
            if one is not None and op_of(one) in VIEWS | PARTS and shape in (None, _gives(one, i))
        ]
    if before:
        return before[0]
    return node if op_of(node) == op else None


def spoken_shape(said: str) -> list[int] | None:
    """The shape that torch's message names."""
    spoken = re.search(r"Tensor \[([\d, ]*)\]\]", said)
    return [int(n) for n in spoken[1].split(",") if n.strip()] if spoken else None


def _gives(node: Any, output: int) -> list[int] | None:
    """The shape of an output of a node."""
    kept = getattr(node, "_input_metadata", ())
    return list(kept[output].shape) if output < len(kept) else None


def _leaf(node: Any, made_by: Any, said: str) -> torch.Tensor | None:
    """The leaf that was saved, or of which a view was (a Linear saves the transpose of its weight)."""
    shape = spoken_shape(said)
    for one in [made_by] if made_by is not None else [before for before, _ in node.next_functions]:
        while one is not None and one is not node and op_of(one) in VIEWS:
            one = one.next_functions[0][0]
        if (
            one is not None
            and is_leaf(one)
            and one.variable._version
            and shape in (None, list(one.variable.shape), list(one.variable.shape)[::-1])
        ):
            return one.variable
    return None


def tensor_attributes(thing: Any) -> dict[str, torch.Tensor]:
    """The tensors with a history among an object's own attributes."""
    return {name: value for name, value in attributes(thing).items() if is_tensor(value) and value.grad_fn is not None}
