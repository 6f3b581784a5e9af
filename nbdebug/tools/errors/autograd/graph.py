"""The autograd graph of a failed backward: what is still there of a forward whose frames are gone.

The tensors that backward started from lie in torch's own frame, even where the user gave them no name. From their
`grad_fn` the whole graph can be walked. What a node has saved for its derivative is asked for once: it comes, or torch
says that it was freed by a backward before, or that it has been changed since.
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
from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.autograd.calls import callee
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    assignments,
    calls_in,
    failing_node,
    is_module,
    last_name,
    static_value,
)
from nbdebug.tools.errors.context import ErrorContext, is_tensor

MAX_NODES = 20_000
"""Nodes walked, some tens of milliseconds; a larger graph is seen from its loss as far as this."""
MAX_QUERIED = 8000
"""Nodes that are asked for what they have saved, 20 microseconds each."""
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


@dataclasses.dataclass(frozen=True)
class ModifiedValue:
    """A node one of whose saved tensors has been changed. made_by: the node whose output that tensor is, None for one
    that has no history; leaf: the parameter or input behind it, where only views lie between."""

    node: Any
    made_by: Any = None
    leaf: torch.Tensor | None = None


def backward_roots(scene: ErrorContext) -> list[torch.Tensor]:
    """The tensors that the failing backward started from."""
    for frame in reversed(scene.trail):
        if not frame.users and frame.site.function in BACKWARD_FUNCTIONS:
            for name in ("t_outputs", "tensors", "outputs", "self"):
                given: Any = frame.names.get(name)
                inside = given if type(given) in (list, tuple) else [given]
                found: list[torch.Tensor] = [t for t in inside if is_tensor(t)]
                if found:
                    return found
    return []


def node_distances(tensors: Iterable[Any]) -> dict[Any, int]:
    """The nodes from which the gradients of these tensors are made, each with its distance from them, nearest first;
    without those of the leaves."""
    found: dict[Any, int] = {}
    for distance, level in enumerate(graph_levels(t.grad_fn for t in tensors)):
        found |= dict.fromkeys((node for node in level if not is_leaf_node(node)), distance)
        if len(found) >= MAX_NODES:
            break
    return found


def share_history(tensors: Iterable[Any], found: Mapping[Any, int]) -> bool:
    """Whether a part of the history of these tensors is a part of that graph, as far as `NEAR` nodes back."""
    number = 0
    for level in graph_levels(t.grad_fn for t in tensors):
        number += sum(not is_leaf_node(node) for node in level)
        if number >= MAX_COMPARED:
            return False
        if not found.keys().isdisjoint(level):
            return True
    return False


def is_leaf_node(node: Any) -> bool:
    """Whether a node stands for a leaf, into whose `.grad` the gradient is added."""
    return node.name().endswith("AccumulateGrad")


def nearest_leaves(node: Any, most: int = 200) -> Iterator[torch.Tensor]:
    """The leaves that a node was computed from, nearest first."""
    number = 0
    for level in graph_levels([node]):
        number += len(level)
        if number >= most:
            return
        yield from (one.variable for one in level if is_leaf_node(one))


def op_of(node: Any) -> str:
    """The op of a node, as torch spells it: ReluBackward0 → "Relu", torch::autograd::CopySlices → "CopySlices"."""
    name = node.name().rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward")


def is_python_function(node: Any) -> bool:
    """Whether a node is an autograd Function written in Python: what it has saved is not asked for, since that might
    run the user's hooks."""
    return issubclass(type(node), torch.autograd.function.BackwardCFunction)


def _refused_values(node: Any) -> dict[str, str]:
    """{name of a saved value: what torch said when it refused it} of a node of torch's own."""
    said: dict[str, str] = {}
    if is_python_function(node):
        return said
    for name in [n for n in dir(type(node)) if n.startswith("_saved_")]:
        if not name.endswith(("_sizes", "_strides")) and not _has_unpack_hook(node, name):
            try:
                getattr(node, name)
            except RuntimeError as refused:
                said[name] = str(refused)
            except Exception:
                continue
    return said


def _has_unpack_hook(node: Any, name: str) -> bool:
    """Whether saved-tensor hooks hold this value: to unpack it would run them."""
    raw = getattr(type(node), "_raw" + name, None)
    if raw is None:
        return False
    try:
        return getattr(getattr(node, "_raw" + name), "unpack_hook", None) is not None
    except RuntimeError:  # freed: then nothing is unpacked either
        return False


def is_freed(node: Any) -> bool:
    """Whether a backward has freed what this node had saved."""
    return any("second time" in said for said in _refused_values(node).values())


def modified_values(within: Iterable[Any]) -> list[ModifiedValue]:
    """The nodes whose saved tensors have been changed since, nearest to the loss first, as far as `ASKED` nodes."""
    found = []
    for node in itertools.islice(within, MAX_QUERIED):
        for name, said in _refused_values(node).items():
            if "modified by an inplace" in said:
                made_by = _producer(node, name, said)
                found.append(ModifiedValue(node, made_by, _saved_leaf(node, made_by, said)))
    return found


def _producer(node: Any, name: str, said: str) -> Any:
    """The node whose output was saved under this name: the node itself for a result, else one that came before it."""
    _, marked, rest = said.partition("is output ")
    op = rest.partition(" of ")[2].partition(",")[0].strip() if marked else ""
    if not op:
        return None
    op = op.rstrip("0123456789").removesuffix("Backward").rpartition("::")[2]
    if "result" in name or name in ("_saved_out", "_saved_output"):
        return node
    before = [one for one in input_nodes(node) if op_of(one) == op]
    if not before and op == "AsStrided":  # so torch calls any view of what was changed since
        shape = message_shape(said)
        before = [
            one
            for one, i in node.next_functions
            if one is not None and op_of(one) in VIEWS | PART_VIEWS and shape in (None, _gives(one, i))
        ]
    if before:
        return before[0]
    return node if op_of(node) == op else None


def message_shape(said: str) -> list[int] | None:
    """The shape that torch's message names."""
    spoken = re.search(r"Tensor \[([\d, ]*)\]\]", said)
    return [int(n) for n in spoken[1].split(",") if n.strip()] if spoken else None


def _gives(node: Any, output: int) -> list[int] | None:
    """The shape of an output of a node."""
    kept = getattr(node, "_input_metadata", ())
    return list(kept[output].shape) if output < len(kept) else None


def _saved_leaf(node: Any, made_by: Any, said: str) -> torch.Tensor | None:
    """The leaf that was saved, or of which a view was (a Linear saves the transpose of its weight)."""
    shape = message_shape(said)
    for one in [made_by] if made_by is not None else input_nodes(node):
        while one is not None and one is not node and op_of(one) in VIEWS:
            one = one.next_functions[0][0]
        if (
            one is not None
            and is_leaf_node(one)
            and one.variable._version
            and shape in (None, list(one.variable.shape), list(one.variable.shape)[::-1])
        ):
            return one.variable
    return None


def tensor_attributes(thing: Any) -> dict[str, torch.Tensor]:
    """The tensors with a history among an object's own attributes."""
    return {name: value for name, value in attributes(thing).items() if is_tensor(value) and value.grad_fn is not None}


ASKING = {"hook": ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")}
"""The calls that ask, where it is not backward or autograd.grad."""


def asked(scene: ErrorContext, code: FunctionSource, what: str) -> Any:
    """The expression, None where the line does not show it. what: as in `NoGradFacts`."""
    node = failing_node(code)
    if node is None:
        return None
    if what == "grad is None":
        return _none_grad(node, code)
    if what == "inference":
        return _inference(node, code)
    if what in ("no parameters", "not a leaf"):
        return _given_to_optimizer(node, code, what)
    wanted = ASKING.get(what, ("backward", "grad"))
    for call in calls_in(node):
        if last_name(call.func) in wanted:
            if what in ("input", "unused"):
                return _second(call)
            return _base(call, code, scene.message)
    return next((n.value for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in wanted), None)


def _base(call: ast.Call, code: FunctionSource, message: str) -> Any:
    """`loss.backward()` → loss; `torch.autograd.backward([a, b])`, `accelerator.backward(loss)` → what was given."""
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    first = (
        call.args[0]
        if call.args
        else next((k.value for k in call.keywords if k.arg in ("tensors", "outputs", "loss")), None)
    )
    if first is None or base is not None and is_tensor(static_value(base, code)):
        return base
    element = re.search(r"element (\d+) of", message)
    if isinstance(first, (ast.List, ast.Tuple)) and element and int(element[1]) < len(first.elts):
        return first.elts[int(element[1])]
    return first


def _second(call: ast.Call) -> Any:
    return call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "inputs"), None)


def _none_grad(node: Any, code: FunctionSource) -> Any:
    """The `x` of an `x.grad` that is None."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            tensor = static_value(part.value, code)
            if is_tensor(tensor) and (tensor.grad_fn is not None or tensor.grad is None):
                return part.value
    return None


def _inference(node: Any, code: FunctionSource) -> Any:
    """The tensor that was made under inference_mode."""
    parts = [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))]
    return next(
        (part for part in parts if is_tensor(tensor := static_value(part, code)) and tensor.is_inference()), None
    )


def _given_to_optimizer(node: Any, code: FunctionSource, what: str) -> Any:
    """What an optimizer was given; of several tensors the one that is no leaf."""
    for call in calls_in(node):
        given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "params"), None)
        if given is None:
            continue
        if what == "no parameters":
            return given
        for part in ast.walk(given):
            if isinstance(part, ast.expr) and is_tensor(lies := static_value(part, code)) and lies.grad_fn is not None:
                return part
        return given
    return None


def input_at_fault(asked_for: Any, code: FunctionSource, found: list[Any], what: str) -> tuple[str, Any, Any]:
    """(text, tensor, expression) of autograd.grad's input that has no gradient, or that the outputs don't come from."""
    parts = asked_for.elts if isinstance(asked_for, (ast.List, ast.Tuple)) else [asked_for]
    within = set(node_distances(found)) if what == "unused" else set()
    ends = {id(before.variable) for node in within for before in input_nodes(node) if is_leaf_node(before)}
    for part in parts:
        tensor = static_value(part, code)
        if not is_tensor(tensor):
            continue
        reached = tensor.grad_fn in within if tensor.grad_fn is not None else id(tensor) in ends
        if not (tensor.requires_grad if what == "input" else reached):
            return ast.unparse(part), tensor, part
    return ast.unparse(asked_for) if asked_for is not None else "", None, asked_for


def giver(asked_for: Any, code: FunctionSource, nothing: bool) -> str | None:
    """The call whose result it is. nothing: only a function that gives nothing back, by its name."""
    node = asked_for
    if isinstance(node, ast.Name):
        made = [s for s in assignments(code, node.id, code.line) if isinstance(s, ast.Assign)]
        node = made[-1].value if made else None
    if not isinstance(node, ast.Call):
        return None
    called, inner = static_value(node.func, code), callee(node, code)
    if nothing:
        if inner is None or inner.returned():
            return None
        return f"{type(called).__name__}.forward" if is_module(called) else inner.name
    text = ast.unparse(node)
    return text if len(text) < 60 else text[:57] + "..."
