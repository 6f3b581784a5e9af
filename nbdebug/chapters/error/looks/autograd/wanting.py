"""Of which expression a gradient was asked, in the line that failed."""

from __future__ import annotations

import ast
import re
from typing import Any

from nbdebug.chapters.error.looks.autograd.calls import entered
from nbdebug.chapters.error.looks.autograd.graph import is_leaf, nodes
from nbdebug.chapters.error.looks.autograd.held import is_module
from nbdebug.chapters.error.looks.autograd.source import Code, assignments, calls, failing, last, value
from nbdebug.chapters.error.scene import Scene, is_tensor

ASKING = {"hook": ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")}
"""The calls that ask, where it is not backward or autograd.grad."""


def asked(scene: Scene, code: Code, what: str) -> Any:
    """The expression, None where the line does not show it. what: as in `NoGradFacts`."""
    node = failing(code)
    if node is None:
        return None
    if what == "grad is None":
        return _none_grad(node, code)
    if what == "inference":
        return _inference(node, code)
    if what in ("no parameters", "not a leaf"):
        return _given_to_optimizer(node, code, what)
    wanted = ASKING.get(what, ("backward", "grad"))
    for call in calls(node):
        if last(call.func) in wanted:
            if what in ("input", "unused"):
                return _second(call)
            return _base(call, code, scene.message)
    return next((n.value for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in wanted), None)


def _base(call: ast.Call, code: Code, message: str) -> Any:
    """`loss.backward()` → loss; `torch.autograd.backward([a, b])`, `accelerator.backward(loss)` → what was given."""
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    first = (
        call.args[0]
        if call.args
        else next((k.value for k in call.keywords if k.arg in ("tensors", "outputs", "loss")), None)
    )
    if first is None or base is not None and is_tensor(value(base, code)):
        return base
    element = re.search(r"element (\d+) of", message)
    if isinstance(first, (ast.List, ast.Tuple)) and element and int(element[1]) < len(first.elts):
        return first.elts[int(element[1])]
    return first


def _second(call: ast.Call) -> Any:
    return call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "inputs"), None)


def _none_grad(node: Any, code: Code) -> Any:
    """The `x` of an `x.grad` that is None."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            tensor = value(part.value, code)
            if is_tensor(tensor) and (tensor.grad_fn is not None or tensor.grad is None):
                return part.value
    return None


def _inference(node: Any, code: Code) -> Any:
    """The tensor that was made under inference_mode."""
    parts = [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))]
    return next((part for part in parts if is_tensor(tensor := value(part, code)) and tensor.is_inference()), None)


def _given_to_optimizer(node: Any, code: Code, what: str) -> Any:
    """What an optimizer was given; of several tensors the one that is no leaf."""
    for call in calls(node):
        given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "params"), None)
        if given is None:
            continue
        if what == "no parameters":
            return given
        for part in ast.walk(given):
            if isinstance(part, ast.expr) and is_tensor(lies := value(part, code)) and lies.grad_fn is not None:
                return part
        return given
    return None


def input_at_fault(asked_for: Any, code: Code, found: list[Any], what: str) -> tuple[str, Any, Any]:
    """(text, tensor, expression) of autograd.grad's input that has no gradient, or that the outputs don't come from."""
    parts = asked_for.elts if isinstance(asked_for, (ast.List, ast.Tuple)) else [asked_for]
    within = set(nodes(found)) if what == "unused" else set()
    ends = {
        id(before.variable)
        for node in within
        for before, _ in node.next_functions
        if before is not None and is_leaf(before)
    }
    for part in parts:
        tensor = value(part, code)
        if not is_tensor(tensor):
            continue
        reached = tensor.grad_fn in within if tensor.grad_fn is not None else id(tensor) in ends
        if not (tensor.requires_grad if what == "input" else reached):
            return ast.unparse(part), tensor, part
    return ast.unparse(asked_for) if asked_for is not None else "", None, asked_for


def giver(asked_for: Any, code: Code, nothing: bool) -> str | None:
    """The call whose result it is. nothing: only a function that gives nothing back, by its name."""
    node = asked_for
    if isinstance(node, ast.Name):
        made = [s for s in assignments(code, node.id, code.line) if isinstance(s, ast.Assign)]
        node = made[-1].value if made else None
    if not isinstance(node, ast.Call):
        return None
    called, inner = value(node.func, code), entered(node, code)
    if nothing:
        if inner is None or inner.returned():
            return None
        return f"{type(called).__name__}.forward" if is_module(called) else inner.name
    text = ast.unparse(node)
    return text if len(text) < 60 else text[:57] + "..."
