"""The autograd graph of a failed backward: what is still there of a forward whose frames are gone.

The tensors that backward started from lie in torch's own frame, even where the user gave them no name. From their
`grad_fn` the whole graph can be walked. What a node has saved for its derivative is read once: torch returns it, or
says that an earlier backward has freed it, or that it has been changed since.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.backward import graph_levels, input_nodes
from nbdebug.tools.errors.autograd.functions import FunctionSource, calls_in, failing_node, last_name, static_value
from nbdebug.tools.errors.context import ErrorContext, is_tensor

MAX_NODES = 20_000
"""Nodes walked, some tens of milliseconds; of a larger graph the part nearest to the loss is seen."""
MAX_QUERIED = 8000
"""Nodes whose saved values are read, 20 microseconds each."""
MAX_COMPARED = 1000
"""Nodes of a variable's own history that are compared with a loss's."""
BACKWARD_FUNCTIONS = ("_engine_run_backward", "backward", "grad")
"""torch's own functions in whose frames the tensors lie that a backward starts from."""
VIEWS = frozenset({"T", "AsStrided", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand", "Select"})
"""Nodes between a leaf and a view of it."""
PART_VIEWS = frozenset(
    {"Slice", "Narrow", "Unbind", "Split", "SplitWithSizes", "Alias", "UnsafeView", "Diagonal", "Reshape"}
)
"""Nodes of a view of a part, or in another form."""


def backward_roots(context: ErrorContext) -> list[torch.Tensor]:
    """The tensors that the failing backward started from."""
    for frame in reversed(context.trail):
        if not frame.users and frame.site.function in BACKWARD_FUNCTIONS:
            for name in ("t_outputs", "tensors", "outputs", "self"):
                argument: Any = frame.names.get(name)
                values = argument if type(argument) in (list, tuple) else [argument]
                roots: list[torch.Tensor] = [value for value in values if is_tensor(value)]
                if roots:
                    return roots
    return []


def loss_expression(
    context: ErrorContext, code: FunctionSource, functions: tuple[str, ...] = ("backward", "grad")
) -> Any:
    """The expression on which the failing line calls backward, or another of these functions: `loss` of
    `loss.backward()`, of `accelerator.backward(loss)`. None where the line does not show it."""
    line = failing_node(code)
    for call in calls_in(line) if line is not None else ():
        if last_name(call.func) in functions:
            return _root_argument(call, code, context.message)
    attributes = [n for n in ast.walk(line) if isinstance(n, ast.Attribute)] if line is not None else []
    return next((attribute.value for attribute in attributes if attribute.attr in functions), None)


def loss_text(context: ErrorContext, codes: list[FunctionSource]) -> str:
    """The same as text, for the innermost of the user's functions; "" where it is not known."""
    expression = loss_expression(context, codes[0]) if codes else None
    return ast.unparse(expression) if expression is not None else ""


def _root_argument(call: ast.Call, code: FunctionSource, message: str) -> Any:
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    keywords = (k.value for k in call.keywords if k.arg in ("tensors", "outputs", "loss"))
    first = call.args[0] if call.args else next(keywords, None)
    if first is None or base is not None and is_tensor(static_value(base, code)):
        return base
    element = re.search(r"element (\d+) of", message)
    if isinstance(first, (ast.List, ast.Tuple)) and element and int(element[1]) < len(first.elts):
        return first.elts[int(element[1])]
    return first


def node_distances(tensors: Iterable[Any]) -> dict[Any, int]:
    """The nodes from which the gradients of these tensors are made, each with its distance from them, nearest first;
    without those of the leaves."""
    distances: dict[Any, int] = {}
    for distance, level in enumerate(graph_levels(t.grad_fn for t in tensors)):
        distances |= dict.fromkeys((node for node in level if not is_leaf_node(node)), distance)
        if len(distances) >= MAX_NODES:
            break
    return distances


def share_history(tensors: Iterable[Any], graph: Mapping[Any, int]) -> bool:
    """Whether a part of the history of these tensors is a part of that graph, as far as `MAX_COMPARED` nodes back."""
    number = 0
    for level in graph_levels(t.grad_fn for t in tensors):
        number += sum(not is_leaf_node(node) for node in level)
        if number >= MAX_COMPARED:
            return False
        if not graph.keys().isdisjoint(level):
            return True
    return False


def nearest_leaves(node: Any, most: int = 200) -> Iterator[torch.Tensor]:
    """The leaves that a node was computed from, nearest first, as far as `most` nodes back."""
    number = 0
    for level in graph_levels([node]):
        number += len(level)
        if number >= most:
            return
        yield from (one.variable for one in level if is_leaf_node(one))


def is_leaf_node(node: Any) -> bool:
    """Whether a node stands for a leaf, into whose `.grad` the gradient is added."""
    return node.name().endswith("AccumulateGrad")


def op_of(node: Any) -> str:
    """The op of a node, as torch spells it: ReluBackward0 → "Relu", torch::autograd::CopySlices → "CopySlices"."""
    return op_of_name(node.name())


def op_of_name(name: str) -> str:
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def is_freed(node: Any) -> bool:
    """Whether a backward has freed what this node had saved."""
    return any("second time" in message for message in _refused_values(node).values())


@dataclasses.dataclass(frozen=True)
class ModifiedValue:
    """A node one of whose saved tensors has been changed. producer: the node whose output that tensor is, None for one
    that has no history; leaf: the parameter or input behind it, where only views lie between."""

    node: Any
    producer: Any = None
    leaf: torch.Tensor | None = None


def modified_values(nodes: Iterable[Any]) -> list[ModifiedValue]:
    """The nodes whose saved tensors have been changed since, nearest to the loss first, as far as `MAX_QUERIED`
    nodes."""
    values = []
    for node in itertools.islice(nodes, MAX_QUERIED):
        for name, message in _refused_values(node).items():
            if "modified by an inplace" in message:
                producer = _producer(node, name, message)
                values.append(ModifiedValue(node, producer, _saved_leaf(node, producer, message)))
    return values


def _refused_values(node: Any) -> dict[str, str]:
    """{name of a saved value: torch's message where it refuses to return it} of a node of torch's own. Of an autograd
    Function written in Python, and of a value that saved-tensor hooks hold, none is read: that might run user code."""
    if issubclass(type(node), torch.autograd.function.BackwardCFunction):
        return {}
    messages: dict[str, str] = {}
    for name in [n for n in dir(type(node)) if n.startswith("_saved_")]:
        if not name.endswith(("_sizes", "_strides")) and not _has_unpack_hook(node, name):
            try:
                getattr(node, name)
            except RuntimeError as error:
                messages[name] = str(error)
            except Exception:
                continue
    return messages


def _has_unpack_hook(node: Any, name: str) -> bool:
    if getattr(type(node), "_raw" + name, None) is None:
        return False
    try:
        return getattr(getattr(node, "_raw" + name), "unpack_hook", None) is not None
    except RuntimeError:  # freed: then nothing is unpacked either
        return False


def _producer(node: Any, name: str, message: str) -> Any:
    """The node whose output was saved under this name: the node itself for a result, else one of its inputs."""
    named = re.search(r"is output .*? of ([^,]*)", message, re.DOTALL)
    op = op_of_name(named[1].strip()) if named else ""
    if not op:
        return None
    if "result" in name or name in ("_saved_out", "_saved_output"):
        return node
    before = [one for one in input_nodes(node) if op_of(one) == op]
    if not before and op == "AsStrided":  # so torch calls any view of what was changed since
        shape = message_shape(message)
        for one, output in node.next_functions:
            if one is not None and op_of(one) in VIEWS | PART_VIEWS:
                outputs = getattr(one, "_input_metadata", ())
                if shape in (None, list(outputs[output].shape) if output < len(outputs) else None):
                    before.append(one)
    if before:
        return before[0]
    return node if op_of(node) == op else None


def message_shape(message: str) -> list[int] | None:
    """The shape that torch's message names."""
    shape = re.search(r"Tensor \[([\d, ]*)\]\]", message)
    return [int(size) for size in shape[1].split(",") if size.strip()] if shape else None


def _saved_leaf(node: Any, producer: Any, message: str) -> torch.Tensor | None:
    """The leaf that was saved, or of which a view was (a Linear saves the transpose of its weight)."""
    shape = message_shape(message)
    for one in [producer] if producer is not None else input_nodes(node):
        while one is not None and one is not node and op_of(one) in VIEWS:
            one = one.next_functions[0][0]
        if one is not None and is_leaf_node(one) and one.variable._version:
            leaf: torch.Tensor = one.variable
            if shape in (None, list(leaf.shape), list(leaf.shape)[::-1]):
                return leaf
    return None
