"""Where a tensor got its dtype, by the sources: `from_numpy`, `torch.tensor` of integers, `.double()`."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import torch

from nbdebug.observe.sources import nodes_of
from nbdebug.report import Link
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.facts import ArgumentFact, TensorFact, TriedFix, ValueOrigin
from nbdebug.tools.errors.operands import (
    OpArgument,
    OperandNames,
    argument_texts,
    is_instance,
    library_frames,
    model_name,
    op_arguments,
    raised_facts,
    weights,
)
from nbdebug.tools.errors.origin import ExpressionBinding, origin_of, where_of
from nbdebug.tools.errors.rules.dtypes import DtypeFacts
from nbdebug.tools.errors.syntax import bindings, callee_name, value_parts
from nbdebug.tools.errors.values import UNKNOWN, operands, value_of

CASTS = {"double": "float64", "half": "float16", "bfloat16": "bfloat16", "float": "float32"}
_TAKES = frozenset({"from_numpy", "tensor", "as_tensor", "asarray"})
MAKERS: dict[str, frozenset[str]] = {
    "float64": _TAKES | {"double", "DoubleTensor"},
    "int64": _TAKES
    | {
        "long",
        "arange",
        "randint",
        "LongTensor",
        "argmax",
        "argmin",
        "argsort",
        "one_hot",
        "randperm",
        "multinomial",
        "bincount",
        "nonzero",
        "searchsorted",
        "bucketize",
    },
    "float32": _TAKES
    | {
        "float",
        "zeros",
        "ones",
        "empty",
        "rand",
        "randn",
        "full",
        "linspace",
        "FloatTensor",
        "Tensor",
        "rand_like",
        "randn_like",
        "eye",
        "mean",
        "softmax",
        "sigmoid",
    },
    "float16": _TAKES | {"half", "HalfTensor"},
    "bfloat16": _TAKES | {"bfloat16"},
    "bool": _TAKES | {"bool", "isnan", "isfinite", "logical_not", "logical_and", "eq", "ne", "ge", "gt", "le", "lt"},
    "int32": _TAKES | {"int", "IntTensor"},
    "int16": _TAKES | {"short"},
    "uint8": _TAKES | {"byte", "ByteTensor"},
    "complex64": frozenset(
        {
            "fft",
            "fft2",
            "fftn",
            "rfft",
            "rfft2",
            "stft",
            "complex",
            "view_as_complex",
            "polar",
            "eig",
            "eigvals",
            "tensor",
        }
    ),
    "complex128": frozenset({"fft", "fft2", "rfft", "stft", "complex", "from_numpy", "tensor", "eig", "eigvals"}),
}
"""dtype → the calls that can give it."""


ALIASES = {
    "long": "int64",
    "int": "int64",
    "int_": "int64",
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "bool_": "bool",
    "byte": "uint8",
}
"""Further names of a dtype, behind `torch.` or `np.`; `float` alone is float64 in NumPy and float32 in torch."""


def origin(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """The binding that set the dtype, and the way from there; None where the sources don't show it."""
    if not odd.known:
        return None
    dtype = odd.value.dtype
    name = str(dtype).removeprefix("torch.")

    def is_origin(node: ast.expr) -> bool:
        return _makes(node, name) or _module(node, dtype, context) is not None

    def fits(value: Any) -> bool:
        """A tensor on the way must have the dtype; an array and other objects may be its source."""
        return value.dtype == dtype if is_tensor(value) else not is_instance(value, (int, float, str))

    way = origin_of(odd.name, context, is_origin, fits)
    result = _origin(way, context, dtype) if way else _at_once(odd, context, is_origin) or _autocast(odd, context)
    return result or passed(odd, context)


def passed(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """The bindings and arguments on a tensor's way to the failing line, where no line shows what set its dtype."""

    def fits(value: Any) -> bool:
        return value.dtype == odd.value.dtype if is_tensor(value) else not is_instance(value, (int, float, str))

    way = origin_of(odd.name, context, lambda node: False, fits, partial=True) if odd.known else ()
    links = tuple(Link(binding.phrase, binding.where) for binding in way[-6:])
    return ValueOrigin(way[0].name, way[0].code, "", way[0].where, links) if way else None


def of_model(weight: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """Where the dtype of a model was changed: `.half()` on it, as a statement or after its constructor."""
    root, name = model_name(weight.name, context), str(weight.value.dtype).removeprefix("torch.")

    def is_origin(node: ast.expr) -> bool:
        return callee_name(node) in ("to", *(call for call, dtype in CASTS.items() if dtype == name)) and _makes(
            node, name
        )

    way = origin_of(root, context, is_origin)
    if way:
        return _origin(way, context, weight.value.dtype)
    for frame in context.users:
        for node in nodes_of(frame.site.file):
            if (
                isinstance(node, ast.Call)
                and is_origin(node)
                and isinstance(node.func, ast.Attribute)
                and (ast.unparse(node.func.value) == root)
            ):
                binding = ExpressionBinding(root, ast.unparse(node), where_of(frame.site.file, node), node)
                return ValueOrigin(
                    root, binding.code, callee_name(node), binding.where, (Link(f"`{binding.code}`", binding.where),)
                )
    return None


def _origin(way: tuple[ExpressionBinding, ...], context: ErrorContext, dtype: torch.dtype) -> ValueOrigin:
    first = way[0]
    maker = first.maker or first.node
    call = callee_name(maker) or ("comparison" if isinstance(maker, ast.Compare) else "")
    path = _module(maker, dtype, context)
    stated = next((ast.unparse(k.value) for k in getattr(maker, "keywords", []) if k.arg == "dtype"), "")
    links = tuple(Link(binding.phrase, binding.where) for binding in way)
    return ValueOrigin(path or first.name, first.code, "module" if path else call, first.where, links, stated)


def _at_once(odd: OpArgument, context: ErrorContext, is_origin: Any) -> ValueOrigin | None:
    """An operand that is not a variable but is created in the failing line."""
    try:
        node = ast.parse(odd.name, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    maker = next((part for part in value_parts(node) if is_origin(part)), None)
    if maker is None or isinstance(node, (ast.Name, ast.Attribute)):
        return None
    path = _module(maker, odd.value.dtype, context)
    call = callee_name(maker) or "comparison"
    stated = next((ast.unparse(k.value) for k in getattr(maker, "keywords", []) if k.arg == "dtype"), "")
    return ValueOrigin(path or odd.name, odd.name, "module" if path else call, context.users[0].where, (), stated)


def _module(node: ast.expr, dtype: torch.dtype, context: ErrorContext) -> str | None:
    """The path of a module whose weights have the dtype, where the expression is a call of it."""
    if not isinstance(node, ast.Call) or not dtype.is_floating_point or dtype == torch.get_default_dtype():
        return None
    module = next((value for frame in context.users[:3] if (value := value_of(node.func, frame)) is not UNKNOWN), None)
    if module is None or not is_instance(module, torch.nn.Module):
        return None
    own = [p.dtype for p in weights(module) if p.dtype.is_floating_point]
    return OperandNames(context).module(module) if own and own[-1] == dtype else None


def _autocast(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """A half precision tensor that was computed in an autocast block and used after its end."""
    if odd.value.dtype not in (torch.float16, torch.bfloat16) or not context.users:
        return None
    for frame in context.users:
        for node in nodes_of(frame.site.file):
            heads = node.items if isinstance(node, ast.With) else []
            if any("autocast" in ast.unparse(item.context_expr) for item in heads) and bindings(node, odd.name):
                where = where_of(frame.site.file, heads[0].context_expr)
                link = Link(f"`{odd.name}` was computed under autocast, and is used after its end", where)
                return ValueOrigin(odd.name, ast.unparse(heads[0].context_expr), "autocast", where, (link,))
    return None


def _makes(node: ast.expr, name: str) -> bool:
    """Whether this expression itself can give the dtype."""
    if isinstance(node, ast.Compare):
        return name == "bool"
    if not isinstance(node, ast.Call):
        return False
    stated = [k.value for k in node.keywords if k.arg == "dtype"]
    if callee_name(node) in ("to", "type", "astype"):
        return any(_named(arg, name) for arg in (*node.args, *stated))
    if stated:
        return _named(stated[0], name)
    return callee_name(node) in MAKERS.get(name, frozenset())


def _named(node: ast.expr, name: str) -> bool:
    text = ast.unparse(node).strip("'\"")
    last = text.split(".")[-1]
    return last == name or ALIASES.get(last) == name or text == "float" and name == "float64"


def is_array(value: Any) -> bool:
    """Whether its class is a NumPy array."""
    return issubclass(type(value), np.ndarray)


MAX_ENTRIES = 100_000
"""Entries of an array or a list that are searched for one that is not a number."""
_NUMBERS = (int, float, bool, complex)


def array_facts(context: ErrorContext, default: str) -> DtypeFacts | None:
    """Which array it is, and its first entry that is not a number: the type and the place, never the value."""
    message = context.message
    if "ScalarType" in message:
        odd = next(
            (p for p in op_arguments(context) if str(p.value.dtype) in ("torch.bfloat16", "torch.complex32")), None
        )
        part = ArgumentFact(odd.fact(), odd.role, odd.owner, odd.known) if odd else None
        cure = TriedFix(f"{odd.name}.float()") if odd else None
        return DtypeFacts(
            raised_facts(context), "array", part, None, "float32", "numpy()", "ScalarType", default=default, cure=cure
        )
    kind = _rejected_type(message)
    match = next(((text, value) for text, value in _values(context) if _is_rejected(value, kind)), None)
    if match is None and kind in ("list", "tuple", "int", "float"):
        return None  # an argument of the wrong class, with no candidate: not named
    text, value = match or ("", None)
    part = ArgumentFact(_fact(text, value)) if match else None
    function = re.match(r"(\w+)\(\): argument", message)
    entry = _entry(value) if kind in ("object_", "str_", "str", "NoneType") else ""
    return DtypeFacts(
        raised_facts(context),
        "array",
        part,
        None,
        default,
        function[1] if function else "",
        kind,
        default=default,
        entry=entry,
        cure=_cure(text, value, kind),
    )


def _rejected_type(message: str) -> str:
    patterns = (
        r"np\.ndarray of type numpy\.(\w+)",
        r"infer dtype of (\w+)",
        r"too many dimensions '(\w+)'",
        r"must be Tensor, not (?:numpy\.)?(\w+)",
        r"byte (order)",
    )
    return next((m[1] for p in patterns if (m := re.search(p, message))), "")


def _values(context: ErrorContext) -> list[tuple[str, Any]]:
    """Operands of the failing line, arguments of torch's functions in it, operands of the lines that led to it."""
    lines = [list(operands(frame)) for frame in context.users[:6]]
    texts = argument_texts(context)
    arguments = [
        (texts[id(value)], value)
        for frame in library_frames(context)
        for value in frame.names.values()
        if id(value) in texts
    ]
    return [*(lines[0] if lines else []), *arguments, *(pair for line in lines[1:] for pair in line)]


def _is_rejected(value: Any, kind: str) -> bool:
    if kind in ("object_", "str_", "order"):
        return is_array(value) and value.dtype.kind in {"object_": "O", "str_": "SU", "order": "fiuc"}[kind]
    if kind == "ndarray":
        return is_array(value)
    if kind in ("Series", "DataFrame", "list", "tuple"):
        return type(value).__name__ == kind
    return type(value) in (list, tuple) and bool(_entry(value))


def _entry(value: Any) -> str:
    """ "a NoneType at [3]": the first entry that is not a number."""
    todo: list[tuple[str, Any]] = [("", value)]
    for _ in range(MAX_ENTRIES):
        if not todo:
            return ""
        place, one = todo.pop(0)
        if type(one) in (list, tuple) or is_array(one) and one.ndim:
            room = min(len(one), MAX_ENTRIES - len(todo))
            todo += [(f"{place}[{i}]", one[i]) for i in range(max(0, room))]
        elif type(one) not in _NUMBERS and not is_instance(one, np.number):
            kind = "str" if is_instance(one, str) else type(one).__name__
            return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} at {place or '[]'}"
    return ""


def _fact(text: str, value: Any) -> TensorFact:
    if is_array(value):
        return TensorFact(text, tuple(value.shape), str(value.dtype), "numpy", "array")
    shape = (len(value),) if type(value) in (list, tuple) else ()
    return TensorFact(text, shape, type(value).__name__, "Python", "list")


def _cure(text: str, value: Any, kind: str) -> TriedFix | None:
    """The conversion to a tensor; of an array of objects only where all entries are numbers of one shape."""
    if kind == "ndarray" and is_array(value) and value.dtype.kind in "fiub":
        import torch

        tensor = torch.as_tensor(value[:1] if value.ndim else value, dtype=torch.float32)
        return TriedFix(
            f"torch.as_tensor({text}, dtype=torch.float32)",
            True,
            {"result": f"{str(tensor.dtype).removeprefix('torch.')} {list(value.shape)}"},
        )
    if kind in ("list", "tuple") and not _entry(value):
        return TriedFix(f"torch.tensor({text}, dtype=torch.float32)")
    if kind == "object_" and is_array(value) and not _entry(value) and value.size <= MAX_ENTRIES:
        tensor = value.astype(np.float32)
        return TriedFix(f'{text}.astype("float32")', True, {"result": f"{tensor.dtype} {list(tensor.shape)}"})
    if kind == "order":
        return TriedFix(f"{text}.astype({text}.dtype.newbyteorder('='))")
    return None
