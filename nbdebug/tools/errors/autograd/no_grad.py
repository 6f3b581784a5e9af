"""Nothing with a gradient was at hand where one was asked for: at which variable, and by which op, the path ended."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.variables import MODULES_OWN, attributes
from nbdebug.tools.errors.autograd.calls import (
    disables_grad,
    enclosing_scopes,
    method_source,
    no_grad_block,
    traceback_functions,
)
from nbdebug.tools.errors.autograd.facts import GraphCut, NoGradFacts
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    calls_in,
    failing_node,
    is_module,
    last_name,
    modules,
    parameters,
    static_value,
    targets,
)
from nbdebug.tools.errors.autograd.graph import asked, backward_roots, giver, input_at_fault
from nbdebug.tools.errors.autograd.path import GRAD, PLAIN, Path
from nbdebug.tools.errors.context import ErrorContext, fact, is_tensor
from nbdebug.tools.errors.facts import TensorFact
from nbdebug.tools.errors.values import UNKNOWN

MOST = 8


def untracked(scene: ErrorContext) -> Iterator[tuple[str, str]]:
    """(name, what it is) of a module's attributes that `parameters()` does not give."""
    told = 0
    for model_name, model in scene.owners.models.items():
        for part in modules(model):
            path = scene.owners.paths.get(id(part)) or model_name
            for name, thing in attributes(part).items():
                what = None if name in MODULES_OWN else _kind(thing)
                if what is not None and told < MOST:
                    told += 1
                    yield f"{path}.{name}", what


def _kind(thing: Any) -> str | None:
    inside = list(thing.values()) if type(thing) is dict else thing
    if type(thing) in (list, tuple, dict) and inside and all(is_module(one) for one in inside):
        return f"a plain {type(thing).__name__} of {len(inside)} modules"
    if is_tensor(thing) and thing.requires_grad and thing.is_leaf:
        return "a tensor, no nn.Parameter"
    return None


MESSAGES = (
    (r"element \d+ of (tensors|variables) does not require grad", "loss"),
    (r"grad can be implicitly created only for scalar outputs", "not scalar"),
    (r"[Oo]ne of the differentiated Tensors does not require grad", "input"),
    (r"appears to not have been used in the graph", "unused"),
    (r"optimizer got an empty parameter list", "no parameters"),
    (r"can't optimize a non-leaf Tensor", "not a leaf"),
    (r"cannot register a hook on a tensor that doesn't require grad", "hook"),
    (r"can't retain_grad on Tensor that has requires_grad=False", "hook"),
    (r"Inference tensors cannot be saved for backward|requires_grad=True on inference tensor", "inference"),
)
NOT_A_TENSOR = re.compile(r"'([\w.]+)' object has no attribute 'backward'")
NO_LOSS = re.compile(
    r"float|int|bool|complex|str|NoneType|tuple|list|dict|OrderedDict|ndarray|numpy\.\w+|\w*Loss|"
    r"\w*Output|\w*Outputs"
)
"""What is met in place of a loss; another class without a `backward` is a slip of another kind."""
NO_GRAD = re.compile(
    r"'NoneType' object has no attribute '\w+'|unsupported operand type.*NoneType|"
    r"must be Tensor, not NoneType"
)
REDUCED_AT_MOST = 10_000_000


def look(scene: ErrorContext) -> NoGradFacts | None:
    what = _what(scene)
    if what is None:
        return None
    codes = traceback_functions(scene)
    if not codes:
        return NoGradFacts(scene.raised(), what)
    code = codes[0]
    if what == "loss" and _asks_inputs(scene, code):
        what = "input"
    of = asked(scene, code, what)
    if what == "grad is None" and of is None:
        return None
    return _facts(scene, what, code, of)


def _asks_inputs(scene: ErrorContext, code: FunctionSource) -> bool:
    """Whether autograd.grad was asked for the gradient of what wants none: then the loss need not have one."""
    of = asked(scene, code, "input")
    return of is not None and input_at_fault(of, code, [], "input")[1] is not None


def _what(scene: ErrorContext) -> str | None:
    """Which of these errors it is, by what torch says."""
    message = scene.message
    if scene.type in ("RuntimeError", "ValueError", "TypeError"):
        for pattern, what in MESSAGES:
            if re.search(pattern, message):
                return what
    missing = NOT_A_TENSOR.search(message) if scene.type == "AttributeError" else None
    if missing and NO_LOSS.fullmatch(missing[1]):
        return "not a tensor"
    if scene.type in ("AttributeError", "TypeError") and NO_GRAD.search(message):
        return "grad is None"
    return None


def _facts(scene: ErrorContext, what: str, code: FunctionSource, of: Any) -> NoGradFacts:
    """of: the expression that a gradient was asked of."""
    lies = static_value(of, code) if of is not None else UNKNOWN
    found = backward_roots(scene)
    tensor = lies if is_tensor(lies) else next((t for t in found if what == "not scalar" or not t.requires_grad), None)
    text = ast.unparse(of) if of is not None else ""
    if what in ("input", "unused"):
        text, tensor, of = input_at_fault(of, code, found, what)
    cut, plain = _cut(scene, what, of, code)
    kind = NOT_A_TENSOR.search(scene.message)
    given = giver(of, code, nothing=kind[1] == "NoneType") if kind and of is not None else None
    return NoGradFacts(
        scene.raised(),
        what,
        text if len(text) < 80 else text[:77] + "...",
        _fact(text, tensor),
        kind[1] if kind else None,
        cut,
        plain,
        _evaluating(scene),
        _counts(scene),
        tuple(untracked(scene)) if what == "no parameters" else (),
        _mean(tensor) if what == "not scalar" else None,
        given,
        _parameter(scene, tensor),
    )


def _mean(tensor: Any) -> float | None:
    """The loss reduced to one number, by torch."""
    if tensor is None or not 0 < tensor.numel() <= REDUCED_AT_MOST or tensor.device.type == "meta":
        return None
    with torch.no_grad():
        return float(tensor.detach().double().mean())


def _parameter(scene: ErrorContext, tensor: Any) -> str | None:
    """The dotted name of a parameter."""
    return next(
        (
            f"{called}.{name}"
            for called, model in scene.owners.models.items()
            for name, p in parameters(model)
            if p is tensor
        ),
        None,
    )


def _fact(text: str, tensor: Any) -> TensorFact | None:
    return fact(text or "the tensor", tensor) if tensor is not None else None


def _cut(scene: ErrorContext, what: str, of: Any, code: FunctionSource) -> tuple[GraphCut | None, bool]:
    """(where the path ends, whether there never was one)."""
    if what not in ("loss", "not a tensor", "hook", "input"):
        return None, False
    path = Path(scene)
    if of is None:
        return _in_models(scene, path), False
    around = _around(scene)
    if around is not None and what != "not a tensor":
        return around, False
    verdict = path.of(of, code)
    if isinstance(verdict, GraphCut):
        return verdict, False
    if not torch.is_grad_enabled():
        return _everywhere(scene), False
    if verdict != GRAD and path.frozen:
        return _frozen(scene, path), False
    return None, verdict == PLAIN


def _in_models(scene: ErrorContext, path: Path) -> GraphCut | None:
    """Where a library calls backward: the cut in what a model gives back as its loss."""
    for model in scene.owners.models.values():
        for name in ("training_step", "forward"):
            code = method_source(model, name)
            verdict = path.function(code) if code is not None else PLAIN
            if isinstance(verdict, GraphCut):
                return verdict
    return None


def _around(scene: ErrorContext) -> GraphCut | None:
    """The no_grad within which the failing line itself stands, here or in a function that called it."""
    for code in traceback_functions(scene):
        node = failing_node(code)
        inside = no_grad_block(node, code) if node is not None and isinstance(node, (ast.expr, ast.stmt)) else None
        if inside is not None:
            return inside
        for decorator in getattr(code.node, "decorator_list", ()):
            if disables_grad(decorator, code):
                return GraphCut(
                    "block",
                    last_name(decorator.func if isinstance(decorator, ast.Call) else decorator),
                    "@" + ast.unparse(decorator),
                    None,
                    None,
                    code.name,
                    code.where(decorator),
                )
    return None


def _everywhere(scene: ErrorContext) -> GraphCut:
    """Gradients are off: the line that turned them off and no other on again, as far as the source shows it."""
    for code in [scope for one in traceback_functions(scene) for scope in enclosing_scopes(one)]:
        for statement in code.statements():
            off = [
                call
                for call in calls_in(statement)
                if last_name(call.func) in ("set_grad_enabled", "_set_grad_enabled")
                and any(_is_false(given) for given in call.args)
            ]
            if off and isinstance(statement, ast.Expr):
                text = ast.unparse(statement)
                return GraphCut("global", text, text, None, None, code.name, code.where(statement))
    return GraphCut("global", "torch.set_grad_enabled(False)")


def _frozen(scene: ErrorContext, path: Path) -> GraphCut:
    """All that could learn was frozen: which modules, and where that was written."""
    for code in traceback_functions(scene):
        for scope in [code, *([outer] if (outer := _outer(code)) is not None else [])]:
            for statement in scope.statements():
                if _freezes(statement):
                    return GraphCut(
                        "frozen",
                        "requires_grad",
                        ast.unparse(statement),
                        None,
                        None,
                        scope.name,
                        scope.where(statement),
                        True,
                        tuple(path.frozen),
                    )
    return GraphCut("frozen", "requires_grad", names=tuple(path.frozen))


def _freezes(statement: Any) -> bool:
    """Whether it is `p.requires_grad = False` or `model.requires_grad_(False)`."""
    if isinstance(statement, ast.Assign):
        return _is_false(statement.value) and any(last_name(t) == "requires_grad" for t in targets(statement))
    return isinstance(statement, ast.Expr) and any(
        last_name(call.func) == "requires_grad_" and any(_is_false(a) for a in call.args)
        for call in calls_in(statement)
    )


def _is_false(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _outer(code: FunctionSource) -> FunctionSource | None:
    node = None if isinstance(code.node, ast.Module) else code.source.outer(code.node)
    return dataclasses.replace(code, node=node, live=False, given={}) if node is not None else None


def _evaluating(scene: ErrorContext) -> tuple[str, ...]:
    return tuple(name for name, model in scene.owners.models.items() if attributes(model).get("training") is False)


def _counts(scene: ErrorContext) -> tuple[tuple[str, int, int], ...]:
    """(model, parameters that want a gradient, all of them)."""
    found = []
    for name, model in scene.owners.models.items():
        sizes = [(p.requires_grad, p.numel()) for _, p in parameters(model) if not _lazy(p)]
        if sizes:
            found.append((name, sum(n for wants, n in sizes if wants), sum(n for _, n in sizes)))
    return tuple(found)


def _lazy(parameter: Any) -> bool:
    return issubclass(type(parameter), torch.nn.parameter.UninitializedParameter)
