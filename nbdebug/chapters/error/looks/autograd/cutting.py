"""The operations at which a gradient's path ends, by the names that torch, NumPy and Python give them."""

from __future__ import annotations

import ast
from typing import Any

from nbdebug.chapters.error.looks.autograd.source import Code, last, value
from nbdebug.chapters.error.operands import UNKNOWN

KINDS: dict[str, frozenset[str]] = {
    "detached": frozenset({"detach", "detach_", "stop_gradient"}),
    "number": frozenset({"item", "tolist", "numpy", "float", "int", "bool"}),
    "whole numbers": frozenset(
        {
            "argmax",
            "argmin",
            "argsort",
            "one_hot",
            "nonzero",
            "argwhere",
            "bincount",
            "histc",
            "searchsorted",
            "bucketize",
            "count_nonzero",
            "multinomial",
            "long",
            "int",
            "short",
            "byte",
            "char",
        }
    ),
    "comparison": frozenset(
        {
            "gt",
            "ge",
            "lt",
            "le",
            "eq",
            "ne",
            "greater",
            "less",
            "greater_equal",
            "less_equal",
            "not_equal",
            "equal",
            "logical_and",
            "logical_or",
            "logical_not",
            "isnan",
            "isinf",
            "isfinite",
            "isclose",
            "allclose",
            "any",
            "all",
            "bool",
            "signbit",
        }
    ),
    "rebuilt": frozenset(
        {
            "tensor",
            "as_tensor",
            "asarray",
            "array",
            "from_numpy",
            "Tensor",
            "FloatTensor",
            "LongTensor",
            "DoubleTensor",
            "HalfTensor",
            "IntTensor",
            "new_tensor",
            "scalar_tensor",
        }
    ),
    "sampled": frozenset({"sample"}),
}
"""Which names end a path, and in what way."""
INDICES = frozenset({"max", "min", "sort", "topk", "mode", "kthvalue", "median", "cummax", "cummin"})
"""Ops that give values and, beside them, the places where they were found."""
FRESH = frozenset(
    {
        "zeros",
        "ones",
        "zeros_like",
        "ones_like",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "full",
        "full_like",
        "empty",
        "empty_like",
        "arange",
        "linspace",
        "eye",
        "randint",
        "randperm",
        "new_zeros",
        "new_ones",
        "new_full",
        "size",
        "dim",
        "numel",
        "len",
        "range",
        "isinstance",
        "type",
        "hasattr",
        "parameters",
        "state_dict",
        "print",
    }
)
"""What is new and depends on the values of nothing."""
BLOCKS = frozenset({"no_grad", "inference_mode"})
FUNCTIONS_ONLY = frozenset({"float", "int", "bool", "tensor", "as_tensor", "asarray", "array", "from_numpy"})
METHODS_ONLY = frozenset(
    {"item", "tolist", "numpy", "detach_", "long", "short", "byte", "char", "sample", "new_tensor"}
)
_WHOLE = ("long", "int", "short", "bool", "uint8", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor")


def kind_of_call(call: ast.Call, is_function: bool) -> str | None:
    """How a call ends the path of what it is given, or None. is_function: `torch.argmax(x)`, not `x.argmax()`."""
    name = last(call.func)
    if name == "grad" and is_function and not keeps_graph(call):
        return "gradient"
    if name in ("to", "type") and not is_function:
        casts = [*call.args, *(k.value for k in call.keywords)]
        return "whole numbers" if any(_whole(given) for given in casts) else None
    if name == "float" and not is_function or name in METHODS_ONLY and is_function:
        return None
    if name in ("int", "bool") and not is_function:
        return "comparison" if name == "bool" else "whole numbers"
    if name in FUNCTIONS_ONLY and not is_function:
        return None
    return next((kind for kind, names in KINDS.items() if name in names), None)


def keeps_graph(call: ast.Call) -> bool:
    """Whether `torch.autograd.grad` is asked for gradients that have a graph of their own."""
    return any(
        k.arg == "create_graph" and not (isinstance(k.value, ast.Constant) and not k.value.value) for k in call.keywords
    )


def _whole(given: Any) -> bool:
    if isinstance(given, ast.Constant):
        return isinstance(given.value, str) and given.value.rpartition(".")[2] in _WHOLE
    name = last(given)
    return name in _WHOLE or name.startswith(("int", "uint"))


def closing(context: Any, code: Code) -> bool | None:
    """Whether a context manager, or a decorator, turns gradients off (True) or on (False); None where neither."""
    call = context.func if isinstance(context, ast.Call) else context
    name = last(call)
    given = context.args[0] if isinstance(context, ast.Call) and context.args else None
    if name in BLOCKS:
        return given is None or truth(given, code) is not False
    if name == "enable_grad":
        return False
    if name == "set_grad_enabled" and given is not None:
        on = truth(given, code)
        return None if on is None else not on
    return None


def truth(node: Any, code: Code) -> bool | None:
    """Whether a condition holds, where plain values tell; None where they don't."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth(node.operand, code)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        found = [truth(part, code) for part in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in found else None if None in found else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(node, code)
    known = _plain(node, code)
    return None if known is UNKNOWN else bool(known)


def _plain(node: Any, code: Code) -> Any:
    found = value(node, code)
    return found if type(found) in (bool, int, float, str, type(None)) else UNKNOWN


def _compared(node: ast.Compare, code: Code) -> bool | None:
    left, right = value(node.left, code), value(node.comparators[0], code)
    if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        if left is UNKNOWN or right is UNKNOWN:
            return None
        return (left is right) is isinstance(node.ops[0], ast.Is)
    if type(left) not in (bool, int, float, str) or type(right) not in (bool, int, float, str):
        return None
    if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        return (left == right) is isinstance(node.ops[0], ast.Eq)
    if isinstance(left, str) or isinstance(right, str):
        return None
    tests = {ast.Lt: left < right, ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right}
    return tests.get(type(node.ops[0]))
