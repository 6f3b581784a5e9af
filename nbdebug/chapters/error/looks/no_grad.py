"""Nothing with a gradient was at hand where one was asked for: at which variable, and by which op, the path ended."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from nbdebug.chapters.error.facts import TensorFact
from nbdebug.chapters.error.facts_autograd import Cut, NoGradFacts
from nbdebug.chapters.error.looks.calls import trail
from nbdebug.chapters.error.looks.cutting import closing
from nbdebug.chapters.error.looks.graph import is_leaf, nodes, roots
from nbdebug.chapters.error.looks.path import GRAD, PLAIN, Path, block
from nbdebug.chapters.error.looks.source import Code, calls, failing, last, parameters, targets, value
from nbdebug.chapters.error.looks.untracked import untracked
from nbdebug.chapters.error.operands import UNKNOWN
from nbdebug.chapters.error.scene import Scene, fact, is_tensor

MESSAGES = (
    (r"element \d+ of (tensors|variables) does not require grad", "loss"),
    (r"grad can be implicitly created only for scalar outputs", "not scalar"),
    (r"[Oo]ne of the differentiated Tensors does not require grad", "input"),
    (r"appears to not have been used in the graph", "unused"),
    (r"optimizer got an empty parameter list", "no parameters"),
    (r"can't optimize a non-leaf Tensor", "not a leaf"),
    (r"optimizer can only optimize Tensors, but one of the params is", "not a tensor for it"),
    (r"cannot register a hook on a tensor that doesn't require grad", "hook"),
    (r"can't retain_grad on Tensor that has requires_grad=False", "hook"),
    (r"Inference tensors cannot be saved for backward|requires_grad=True on inference tensor", "inference"),
    (r"[Oo]nly Tensors of floating point (and complex )?dtype can require gradients", "whole numbers"),
)
NOT_A_TENSOR = re.compile(r"'(\w+)' object has no attribute 'backward'")
NO_GRAD = re.compile(r"'NoneType' object has no attribute '\w+'|unsupported operand type.*NoneType")
REDUCED_AT_MOST = 10_000_000


def look(scene: Scene) -> NoGradFacts | None:
    what = _what(scene)
    if what is None:
        return None
    codes = trail(scene)
    if not codes:
        return NoGradFacts(scene.raised(), what)
    code = codes[0]
    asked = _asked(scene, code, what)
    if what == "grad is None" and asked is None:
        return None
    facts = _facts(scene, what, code, asked)
    if what == "not a tensor" and facts.kind is None:
        return None
    return facts


def _what(scene: Scene) -> str | None:
    """Which of these errors it is, by what torch says."""
    message = scene.message
    if scene.type in ("RuntimeError", "ValueError", "TypeError"):
        for pattern, what in MESSAGES:
            if re.search(pattern, message):
                return what
    if scene.type == "AttributeError" and NOT_A_TENSOR.search(message):
        return "not a tensor"
    if scene.type in ("AttributeError", "TypeError") and NO_GRAD.search(message):
        return "grad is None"
    return None


def _asked(scene: Scene, code: Code, what: str) -> Any:
    """The expression that a gradient was asked of."""
    node = failing(code)
    if node is None:
        return None
    if what == "grad is None":
        return _none_grad(node, code)
    wanted = {"loss": ("backward", "grad"), "not scalar": ("backward", "grad"), "not a tensor": ("backward",),
              "hook": ("register_hook", "retain_grad")}.get(what)
    for call in calls(node):
        if wanted is None or last(call.func) in wanted:
            base = call.func.value if isinstance(call.func, ast.Attribute) else None
            element = re.search(r"element (\d+) of", scene.message)
            if base is not None and not call.args and wanted is not None or what == "hook" and base is not None:
                return base
            first = call.args[0] if call.args else next((k.value for k in call.keywords), None)
            if isinstance(first, (ast.List, ast.Tuple)) and element and int(element[1]) < len(first.elts):
                return first.elts[int(element[1])]
            if what in ("input", "unused"):
                return call.args[1] if len(call.args) > 1 else next(
                    (k.value for k in call.keywords if k.arg == "inputs"), None)
            takes_own = base is not None and is_tensor(value(base, code))
            return base if takes_own and what in ("loss", "not scalar") else first if first is not None else base
    return next((n.value for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in (wanted or ())), None)


def _none_grad(node: Any, code: Code) -> Any:
    """The `x` of an `x.grad` that is None."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "grad" and is_tensor(
                tensor := value(part.value, code)) and (not tensor.is_leaf or tensor.grad is None):
            return part.value
    return None


def _facts(scene: Scene, what: str, code: Code, asked: Any) -> NoGradFacts:
    lies = value(asked, code) if asked is not None else UNKNOWN
    found = roots(scene)
    tensor = lies if is_tensor(lies) else next((t for t in found if what == "not scalar" or not t.requires_grad), None)
    text = ast.unparse(asked) if asked is not None else ""
    if what in ("input", "unused"):
        text, tensor, asked = _input(asked, code, found, what)
    path = Path(scene)
    cut, plain = _cut(scene, path, what, asked, code, tensor)
    kind = NOT_A_TENSOR.search(scene.message)
    reduced = None
    if what == "not scalar" and tensor is not None and 0 < tensor.numel() <= REDUCED_AT_MOST:
        with torch.no_grad():
            reduced = float(tensor.detach().double().mean()) if tensor.device.type != "meta" else None
    return NoGradFacts(
        scene.raised(), what, text if len(text) < 80 else text[:77] + "...", _fact(text, tensor),
        kind[1] if kind else None, cut, plain, _evaluating(scene), _counts(scene),
        tuple(untracked(scene)), reduced)


def _fact(text: str, tensor: Any) -> TensorFact | None:
    return fact(text or "the tensor", tensor) if tensor is not None else None


def _cut(scene: Scene, path: Path, what: str, asked: Any, code: Code, tensor: Any) -> tuple[Cut | None, bool]:
    """(where the path ends, whether there never was one)."""
    if what not in ("loss", "not a tensor", "hook", "input") or asked is None:
        return None, False
    around = _around(scene)
    if around is not None and what != "not a tensor":
        return around, False
    verdict = path.of(asked, code)
    if isinstance(verdict, Cut):
        return verdict, False
    if not torch.is_grad_enabled():
        return Cut("global", "torch.set_grad_enabled(False)"), False
    if verdict != GRAD and path.frozen:
        return _frozen(scene, path), False
    return None, verdict == PLAIN


def _around(scene: Scene) -> Cut | None:
    """The no_grad within which the failing line itself stands, here or in a function that called it."""
    for code in trail(scene):
        node = failing(code)
        inside = block(node, code) if node is not None and isinstance(node, (ast.expr, ast.stmt)) else None
        if inside is not None:
            return inside
        for decorator in getattr(code.node, "decorator_list", ()):
            if closing(decorator, code):
                return Cut("block", last(decorator.func if isinstance(decorator, ast.Call) else decorator),
                           "@" + ast.unparse(decorator), None, None, code.name, code.where(decorator))
    return None


def _frozen(scene: Scene, path: Path) -> Cut:
    """All that could learn was frozen: which modules, and where that was written."""
    for code in trail(scene):
        for scope in [code, *([outer] if (outer := _outer(code)) is not None else [])]:
            for statement in scope.statements():
                off = [t for t in targets(statement) if isinstance(t, ast.Attribute) and t.attr == "requires_grad"
                       and isinstance(getattr(statement, "value", None), ast.Constant) and not statement.value.value]
                off += [c for c in (calls(statement) if isinstance(statement, ast.Expr) else ()) if last(
                    c.func) == "requires_grad_" and c.args and isinstance(c.args[0], ast.Constant)
                    and not c.args[0].value]
                if off:
                    return Cut("frozen", "requires_grad", ast.unparse(statement), None, None, scope.name,
                               scope.where(statement), True, tuple(path.frozen))
    return Cut("frozen", "requires_grad", names=tuple(path.frozen))


def _outer(code: Code) -> Code | None:
    import dataclasses

    node = None if isinstance(code.node, ast.Module) else code.source.outer(code.node)
    return dataclasses.replace(code, node=node, live=False, given={}) if node is not None else None


def _input(asked: Any, code: Code, found: list[Any], what: str) -> tuple[str, Any, Any]:
    """Which of autograd.grad's inputs it is: one without a gradient, or one that the outputs don't come from."""
    parts = asked.elts if isinstance(asked, (ast.List, ast.Tuple)) else [asked] if asked is not None else []
    known = [(part, value(part, code)) for part in parts]
    within = set(nodes(found)) if what == "unused" else set()
    ends = {id(before.variable) for node in within for before, _ in node.next_functions
            if before is not None and is_leaf(before)}
    for part, tensor in known:
        if is_tensor(tensor) and (not tensor.requires_grad if what == "input" else (
                tensor.grad_fn not in within if tensor.grad_fn is not None else id(tensor) not in ends)):
            return ast.unparse(part), tensor, part
    return (ast.unparse(asked) if asked is not None else "", None, asked)


def _evaluating(scene: Scene) -> tuple[str, ...]:
    return tuple(name for name, model in scene.owners.models.items() if vars(model).get("training") is False)


def _counts(scene: Scene) -> tuple[tuple[str, int, int], ...]:
    """(model, parameters that want a gradient, all of them)."""
    found = []
    for name, model in scene.owners.models.items():
        sizes = [(p.requires_grad, p.numel()) for _, p in parameters(model) if not _lazy(p)]
        if sizes:
            found.append((name, sum(n for wants, n in sizes if wants), sum(n for _, n in sizes)))
    return tuple(found)


def _lazy(parameter: Any) -> bool:
    return issubclass(type(parameter), torch.nn.parameter.UninitializedTensorMixin)


