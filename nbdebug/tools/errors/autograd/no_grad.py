"""A gradient was requested of something that has none: which variable it is, and at which op the path ended.

torch's message says what kind of request it was (`detect`), the failing line of which expression (`_requested`). The
path back from there is followed by `path.py`; where no op ends it, gradients are off everywhere, or all parameters are
frozen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.backward import input_nodes
from nbdebug.observe.sources import edit_of, nodes_of
from nbdebug.observe.variables import MODULES_OWN, attributes, named_modules, named_parameters
from nbdebug.report import Edit
from nbdebug.text import clip
from nbdebug.tools.errors.autograd.calls import callee, enclosing_scopes, method_source, traceback_functions
from nbdebug.tools.errors.autograd.functions import (
    FunctionSource,
    assignments,
    calls_in,
    failing_node,
    is_module,
    last_name,
    static_value,
    targets,
)
from nbdebug.tools.errors.autograd.graph import backward_roots, is_leaf_node, loss_expression, node_distances
from nbdebug.tools.errors.autograd.path import DATA, GRAD, GradientPath, no_grad_block, no_grad_function
from nbdebug.tools.errors.autograd.rules import GraphCut, NoGradFacts
from nbdebug.tools.errors.context import ErrorContext, fact, is_tensor
from nbdebug.tools.errors.values import UNKNOWN

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
"""Types that users take for a loss; another class without a `backward` is a slip of another kind."""
GRAD_IS_NONE = re.compile(
    r"'NoneType' object has no attribute '\w+'|unsupported operand type.*NoneType|"
    r"must be Tensor, not NoneType"
)
HOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
MAX_REDUCED = 10_000_000
"""Elements of a loss whose mean is computed."""
MAX_UNTRACKED = 8
"""Attributes named that `parameters()` does not give."""


def detect(context: ErrorContext) -> NoGradFacts | None:
    """The facts of a missing gradient, or None where the exception is about something else."""
    what = _what(context)
    if what is None:
        return None
    codes = traceback_functions(context)
    if not codes:
        return NoGradFacts(context.raised(), what)
    code = codes[0]
    if what == "loss":  # autograd.grad for an input that requires none: then the loss need not have one
        inputs = _requested(context, code, "input")
        what = "input" if inputs is not None and input_at_fault(inputs, code, [], "input")[1] is not None else what
    expression = _requested(context, code, what)
    if what == "grad is None" and expression is None:
        return None
    return _facts(context, what, code, expression)


def _what(context: ErrorContext) -> str | None:
    """Which of these errors it is, by torch's message."""
    message = context.message
    if context.type in ("RuntimeError", "ValueError", "TypeError"):
        for pattern, what in MESSAGES:
            if re.search(pattern, message):
                return what
    missing = NOT_A_TENSOR.search(message) if context.type == "AttributeError" else None
    if missing and NO_LOSS.fullmatch(missing[1]):
        return "not a tensor"
    if context.type in ("AttributeError", "TypeError") and GRAD_IS_NONE.search(message):
        return "grad is None"
    return None


def _facts(context: ErrorContext, what: str, code: FunctionSource, expression: Any) -> NoGradFacts:
    """expression: that of which a gradient was requested."""
    roots = backward_roots(context)
    value = static_value(expression, code) if expression is not None else UNKNOWN
    without = (root for root in roots if what == "not scalar" or not root.requires_grad)
    tensor: Any = value if is_tensor(value) else next(without, None)
    text = ast.unparse(expression) if expression is not None else ""
    if what in ("input", "unused"):
        text, tensor, expression = input_at_fault(expression, code, roots, what)
    cut, no_path = _cut(context, what, expression, code)
    kind = NOT_A_TENSOR.search(context.message)
    models = context.owners.models.items()
    names = (f"{model_name}.{name}" for model_name, m in models for name, p in named_parameters(m) if p is tensor)
    return NoGradFacts(
        context.raised(),
        what,
        clip(text, 80),
        fact(text or "the tensor", tensor) if tensor is not None else None,
        kind[1] if kind else None,
        cut,
        no_path,
        tuple(name for name, model in models if attributes(model).get("training") is False),
        _counts(context),
        tuple(untracked(context)) if what == "no parameters" else (),
        _mean(tensor) if what == "not scalar" and tensor is not None else None,
        _result_of(expression, code, kind[1] == "NoneType") if kind and expression is not None else None,
        next(names, None),
        _registered(context) if what == "no parameters" else None,
    )


def _registered(context: ErrorContext) -> Edit | None:
    """The line of the user's that makes the first list of modules, with a ModuleList of them."""
    path, what = next(untracked(context), ("", ""))
    attribute, kind = path.rpartition(".")[2], "ModuleDict" if "dict" in what else "ModuleList"
    for file in dict.fromkeys(frame.site.file for frame in context.users) if "modules" in what else ():
        lines = [
            n for n in nodes_of(file) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == f"self.{attribute}"
        ]
        if len(lines) == 1:
            home = "nn" if any(frame.globals.get("nn") is torch.nn for frame in context.users) else "torch.nn"
            return edit_of(file, {lines[0].value: f"{home}.{kind}({{raw}})"})
    return None


def _mean(tensor: Any) -> float | None:
    """The loss reduced to one number, by torch."""
    if not 0 < tensor.numel() <= MAX_REDUCED or tensor.device.type == "meta":
        return None
    with torch.no_grad():
        return float(tensor.detach().double().mean())


def _counts(context: ErrorContext) -> tuple[tuple[str, int, int], ...]:
    """(model, numbers in parameters that require a gradient, all of them)."""
    counts = []
    for name, model in context.owners.models.items():
        lazy = torch.nn.parameter.UninitializedParameter
        sizes = [(p.requires_grad, p.numel()) for _, p in named_parameters(model) if not issubclass(type(p), lazy)]
        if sizes:
            counts.append((name, sum(n for requires, n in sizes if requires), sum(n for _, n in sizes)))
    return tuple(counts)


def untracked(context: ErrorContext) -> Iterator[tuple[str, str]]:
    """(name, what it is) of a module's attributes that `parameters()` does not give."""
    number = 0
    for model_name, model in context.owners.models.items():
        for _, part in named_modules(model):
            path = context.owners.paths.get(id(part)) or model_name
            for name, value in attributes(part).items():
                what = None if name in MODULES_OWN else _untracked_kind(value)
                if what is not None and number < MAX_UNTRACKED:
                    number += 1
                    yield f"{path}.{name}", what


def _untracked_kind(value: Any) -> str | None:
    items = list(value.values()) if type(value) is dict else value
    if type(value) in (list, tuple, dict) and items and all(is_module(item) for item in items):
        return f"a plain {type(value).__name__} of {len(items)} modules"
    if is_tensor(value) and value.requires_grad and value.is_leaf:
        return "a tensor, no nn.Parameter"
    return None


def _requested(context: ErrorContext, code: FunctionSource, what: str) -> Any:
    """The expression of which a gradient was requested, None where the line does not show it. what: as in
    `NoGradFacts`."""
    line = failing_node(code)
    if line is None:
        return None
    if what == "grad is None":
        return _none_grad(line, code)
    if what == "inference":
        parts = [n for n in ast.walk(line) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))]
        return next((part for part in parts if is_tensor(v := static_value(part, code)) and v.is_inference()), None)
    if what in ("no parameters", "not a leaf"):
        return _optimizer_argument(line, code, what)
    if what in ("input", "unused"):
        call = next((call for call in calls_in(line) if last_name(call.func) in ("backward", "grad")), None)
        if call is not None:
            inputs = (k.value for k in call.keywords if k.arg == "inputs")
            return call.args[1] if len(call.args) > 1 else next(inputs, None)
    return loss_expression(context, code, HOOKS if what == "hook" else ("backward", "grad"))


def _none_grad(line: Any, code: FunctionSource) -> Any:
    """The `x` of an `x.grad` that is None."""
    for part in ast.walk(line):
        if isinstance(part, ast.Attribute) and part.attr == "grad":
            tensor = static_value(part.value, code)
            if is_tensor(tensor) and (tensor.grad_fn is not None or tensor.grad is None):
                return part.value
    return None


def _optimizer_argument(line: Any, code: FunctionSource, what: str) -> Any:
    """What an optimizer was given; of several tensors the one that is no leaf."""
    for call in calls_in(line):
        argument = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "params"), None)
        if argument is None:
            continue
        if what == "no parameters":
            return argument
        for part in ast.walk(argument):
            if isinstance(part, ast.expr) and is_tensor(v := static_value(part, code)) and v.grad_fn is not None:
                return part
        return argument
    return None


def input_at_fault(inputs: Any, code: FunctionSource, outputs: list[Any], what: str) -> tuple[str, Any, Any]:
    """(text, tensor, expression) of autograd.grad's input that has no gradient, or that the outputs don't come from."""
    parts = inputs.elts if isinstance(inputs, (ast.List, ast.Tuple)) else [inputs]
    graph = set(node_distances(outputs)) if what == "unused" else set()
    leaves = {id(before.variable) for node in graph for before in input_nodes(node) if is_leaf_node(before)}
    for part in parts:
        tensor = static_value(part, code)
        if not is_tensor(tensor):
            continue
        in_graph = tensor.grad_fn in graph if tensor.grad_fn is not None else id(tensor) in leaves
        if not (tensor.requires_grad if what == "input" else in_graph):
            return ast.unparse(part), tensor, part
    return ast.unparse(inputs) if inputs is not None else "", None, inputs


def _result_of(expression: Any, code: FunctionSource, nothing: bool) -> str | None:
    """The call whose result it is. nothing: only a function that returns nothing, by its name."""
    node = expression
    if isinstance(node, ast.Name):
        values = [s.value for s in assignments(code, node.id, code.line) if isinstance(s, ast.Assign)]
        node = values[-1] if values else None
    if not isinstance(node, ast.Call):
        return None
    if not nothing:
        return clip(ast.unparse(node), 60)
    function, inner = static_value(node.func, code), callee(node, code)
    if inner is None or inner.returned():
        return None
    return f"{type(function).__name__}.forward" if is_module(function) else inner.name


def _cut(context: ErrorContext, what: str, expression: Any, code: FunctionSource) -> tuple[GraphCut | None, bool]:
    """(where the path ends, whether there never was one)."""
    if what not in ("loss", "not a tensor", "hook", "input"):
        return None, False
    path = GradientPath(context)
    if expression is None:
        return _cut_in_models(context, path), False
    block = _surrounding_block(context)
    if block is not None and what != "not a tensor":
        return block, False
    verdict = path.of(expression, code)
    if isinstance(verdict, GraphCut):
        return verdict, False
    if not torch.is_grad_enabled():
        return _global_switch(context), False
    if verdict != GRAD and path.frozen:
        return _frozen(context, path), False
    return None, verdict == DATA


def _cut_in_models(context: ErrorContext, path: GradientPath) -> GraphCut | None:
    """Where a library calls backward: the cut in what a model returns as its loss."""
    for model in context.owners.models.values():
        for name in ("training_step", "forward"):
            code = method_source(model, name)
            verdict = path.function(code) if code is not None else DATA
            if isinstance(verdict, GraphCut):
                return verdict
    return None


def _surrounding_block(context: ErrorContext) -> GraphCut | None:
    """The no_grad within which the failing line itself stands, here or in a function that called it."""
    for code in traceback_functions(context):
        line = failing_node(code)
        block = no_grad_block(line, code) if isinstance(line, (ast.expr, ast.stmt)) else None
        block = block or no_grad_function(code)
        if block is not None:
            return block
    return None


def _global_switch(context: ErrorContext) -> GraphCut:
    """Gradients are off: the line that turned them off and no other on again, as far as the source shows it."""
    for code in [scope for one in traceback_functions(context) for scope in enclosing_scopes(one)]:
        for statement in code.statements():
            if isinstance(statement, ast.Expr) and any(
                last_name(call.func) in ("set_grad_enabled", "_set_grad_enabled") and any(map(_is_false, call.args))
                for call in calls_in(statement)
            ):
                text = ast.unparse(statement)
                return GraphCut("global", text, text, function=code.name, where=code.where(statement))
    return GraphCut("global", "torch.set_grad_enabled(False)")


def _frozen(context: ErrorContext, path: GradientPath) -> GraphCut:
    """All that could learn was frozen: which modules, and the line that froze them."""
    names = tuple(path.frozen)
    for code in traceback_functions(context):
        outer = None if isinstance(code.node, ast.Module) else code.source.outer(code.node)
        for scope in [code, *([code.in_scope(outer)] if outer is not None else [])]:
            for statement in scope.statements():
                if _freezes(statement):
                    text, where = ast.unparse(statement), scope.where(statement)
                    return GraphCut("frozen", "requires_grad", text, function=scope.name, where=where, names=names)
    return GraphCut("frozen", "requires_grad", names=names)


def _freezes(statement: Any) -> bool:
    """Whether it is `p.requires_grad = False` or `model.requires_grad_(False)`."""
    if isinstance(statement, ast.Assign):
        return _is_false(statement.value) and any(last_name(t) == "requires_grad" for t in targets(statement))
    return isinstance(statement, ast.Expr) and any(
        last_name(call.func) == "requires_grad_" and any(map(_is_false, call.args)) for call in calls_in(statement)
    )


def _is_false(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
