"""An expression, a function or a layer of torch's run once more on copies: to learn the shape of an operand that the
user computed on the line, and to see whether a cure fits.

Only torch's and NumPy's own functions run, on plain tensors and arrays of at most SMALL elements in all; of a larger
tensor views are taken and nothing is computed. Gradients are off and the random numbers keep their state.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.chapters.error.operands import UNKNOWN, value_of
from nbdebug.observe.frames import Frame
from nbdebug.observe.named import attributes

SMALL = 2_000_000
"""Elements of tensors that are copied and computed with: some hundredths of a second."""
TENSORS = (torch.Tensor, nn.Parameter)
PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis), slice)
VIEWS = {
    "T",
    "mT",
    "t",
    "transpose",
    "swapaxes",
    "permute",
    "movedim",
    "view",
    "unsqueeze",
    "squeeze",
    "expand",
    "chunk",
    "split",
    "select",
    "narrow",
    "unbind",
    "detach",
    "unflatten",
    "size",
    "dim",
    "numel",
    "shape",
    "len",
}
NEVER = {
    "item",
    "tolist",
    "backward",
    "numpy",
    "register_hook",
    "share_memory_",
    "set_",
    "resize_",
    "save",
    "load",
    "from_numpy",
    "compile",
}
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.MatMult: operator.matmul,
    ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HOMES = [vars(home) for home in (torch, torch._C._nn, torch.linalg, torch.special, torch.fft, nn.functional)]
_NUMPY = {
    "concatenate",
    "stack",
    "vstack",
    "hstack",
    "dot",
    "matmul",
    "einsum",
    "where",
    "reshape",
    "transpose",
    "mean",
    "sum",
    "squeeze",
    "expand_dims",
    "swapaxes",
    "broadcast_to",
    "outer",
    "inner",
    "tensordot",
    "array",
    "zeros",
    "ones",
    "argmax",
    "clip",
    "abs",
    "sqrt",
    "exp",
    "maximum",
    "minimum",
    "add",
    "subtract",
    "multiply",
    "divide",
}


class CannotRun(Exception):
    """Something in it is not torch's own, is too large, or is not at hand."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Gradients off, random numbers kept, no warnings."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Bench:
    """One run. instead: what takes the place of an operand, by the text the user wrote for it."""

    def __init__(self, instead: Mapping[str, Any] | None = None):
        self.instead, self.copies, self.size = instead or {}, {}, 0  # type: Mapping[str, Any], dict[int, Any], int

    @property
    def large(self) -> bool:
        return self.size > SMALL

    def own(self, value: Any) -> Any:
        """What stands for a value: a copy of a small tensor, a view of a large one, plain values as they are."""
        if type(value) in (list, tuple):
            return type(value)(self.own(item) for item in value)
        if type(value) not in (*TENSORS, np.ndarray):
            if type(value) in PLAIN or isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType)):
                return value
            raise CannotRun
        if id(value) not in self.copies:
            self.size += value.size if type(value) is np.ndarray else value.numel()
            self.copies[id(value)] = (value, self._copy(value))  # the value is kept, so that its id stays its own
        return self.copies[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return value if self.large else value.copy()
        if value.layout is not torch.strided or value.is_quantized:
            raise CannotRun
        if value.device.type != "cpu":  # a device may have failed, and would have to be waited for
            return torch.zeros((), dtype=value.dtype).expand(value.shape)
        return value.detach() if self.large else value.detach().clone()

    def allow(self, name: str) -> None:
        if name in NEVER or self.large and name not in VIEWS:
            raise CannotRun

    def value(self, node: ast.AST | None, frame: Frame) -> Any:
        """The value of an expression. Raises CannotRun where that would take code of the user's, and whatever torch or
        NumPy raise."""
        if self.instead and isinstance(node, ast.expr) and (text := ast.unparse(node)) in self.instead:
            return self.instead[text]
        found = value_of(node, frame) if node is not None else UNKNOWN
        if found is not UNKNOWN and not self.instead:
            return self.own(found)
        kind = type(node).__name__.lower()
        inner = getattr(self, f"_{kind}", None)
        if inner is None:
            raise CannotRun
        return inner(node, frame)

    def _name(self, node: ast.AST, frame: Frame) -> Any:
        found = value_of(node, frame)
        if found is UNKNOWN:
            raise CannotRun
        return self.own(found)

    _constant = _name

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        found = value_of(node, frame)
        if found is not UNKNOWN:
            return self.own(found)
        thing = self.value(node.value, frame)
        if type(thing) in (*TENSORS, np.ndarray) and node.attr in ("T", "mT", "shape", "dtype", "ndim", "device"):
            return getattr(thing, node.attr)
        raise CannotRun

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        thing, key = self.value(node.value, frame), self.value(node.slice, frame)
        if type(thing) not in (*TENSORS, np.ndarray, torch.Size, list, tuple):
            raise CannotRun
        return thing[key]

    def _slice(self, node: ast.Slice, frame: Frame) -> slice:
        return slice(*(None if p is None else self.value(p, frame) for p in (node.lower, node.upper, node.step)))

    def _tuple(self, node: ast.Tuple, frame: Frame) -> tuple[Any, ...]:
        return tuple(self._parts(node.elts, frame))

    def _list(self, node: ast.List, frame: Frame) -> list[Any]:
        return self._parts(node.elts, frame)

    def _parts(self, nodes: list[ast.expr], frame: Frame) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                several = self.value(node.value, frame)
                if type(several) not in (list, tuple, torch.Size):
                    raise CannotRun
                found += several
            else:
                found.append(self.value(node, frame))
        return found

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        return self._two(node.op, self.value(node.left, frame), self.value(node.right, frame))

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> Any:
        left, right = self.value(node.target, frame), self.value(node.value, frame)
        found = self._two(node.op, left, right)
        if getattr(found, "shape", None) != getattr(left, "shape", None):
            raise RuntimeError(f"output with shape {list(left.shape)} doesn't match {list(found.shape)}")
        return found

    def _compare(self, node: ast.Compare, frame: Frame) -> Any:
        return self._two(node.ops[0], self.value(node.left, frame), self.value(node.comparators[0], frame))

    def _two(self, op: ast.AST, left: Any, right: Any) -> Any:
        if type(op) not in ARITHMETIC or type(left) is str or type(right) is str:
            raise CannotRun
        if any(type(side) in (*TENSORS, np.ndarray) for side in (left, right)):
            self.allow("arithmetic")
        return ARITHMETIC[type(op)](left, right)

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        inner = self.value(node.operand, frame)
        self.allow("arithmetic")
        return -inner if isinstance(node.op, ast.USub) else ~inner if isinstance(node.op, ast.Invert) else not inner

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        called, function = getattr(node.func, "attr", getattr(node.func, "id", "")), value_of(node.func, frame)
        named = {k.arg: self.value(k.value, frame) for k in node.keywords if k.arg}
        given = self._parts(node.args, frame)
        if len(named) < len(node.keywords):
            raise CannotRun
        if issubclass(type(function), nn.Module):
            return self.layer(function, *given, **named)
        self.allow(called)
        if function is UNKNOWN or type(function) is MethodType and type(function.__self__) in TENSORS:
            thing = self.value(getattr(node.func, "value", None), frame)
            if type(thing) in TENSORS and called in ("cpu", "cuda", "to"):
                return thing.to(*(x for x in given if type(x) is torch.dtype))
            function = method_of(thing, called)
            given = [thing, *given]
        if not _own(function):
            raise CannotRun
        return function(*given, **named)

    def layer(self, module: nn.Module, *given: Any, **named: Any) -> Any:
        """What a module of torch's own gives: a copy of it, with copies of its parameters and without hooks."""
        self.allow("forward")
        return type(module).forward(self._twin(module), *given, **named)

    def _twin(self, module: nn.Module) -> nn.Module:
        kind = type(module)
        if not kind.__module__.startswith("torch.nn.modules.") or "forward" in attributes(module):
            raise CannotRun
        twin = copy.copy(module)
        for table in ("_parameters", "_buffers"):
            twin.__dict__[table] = {name: self.own(value) for name, value in attributes(module)[table].items()}
        twin.__dict__["_modules"] = {n: m and self._twin(m) for n, m in attributes(module)["_modules"].items()}
        twin.__dict__ |= {name: {} for name in attributes(module) if name.endswith("_hooks")}
        if issubclass(kind, nn.RNNBase):
            twin.__dict__["_flat_weights"] = [self.own(weight) for weight in attributes(module)["_flat_weights"]]
        self.allow("forward")
        return twin

    def function(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any],
        instead: Mapping[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """A function of torch's, or a module's forward, with the arguments of its frame, some of them replaced."""
        given = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "self":
                if name not in names or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                    raise CannotRun
                given[name] = instead[name] if name in instead else self.own(names[name])
        if module is not None:
            return self.layer(module, **given)
        self.allow("function")
        return function(**given)


def method_of(thing: Any, name: str) -> Any:
    """A method of a plain tensor or array, as a function of it."""
    if type(thing) in TENSORS:
        return getattr(torch.Tensor, name, None)
    return getattr(np.ndarray, name, None) if type(thing) is np.ndarray else None


def _own(function: Any) -> bool:
    """Whether it is a function of torch's or NumPy's that only computes, or one of Python's few that do."""
    if any(function is known for known in (len, int, tuple, list, range)):
        return True
    if type(function) is MethodDescriptorType:
        return function.__objclass__ in (*torch.Tensor.__mro__, np.ndarray)
    if type(function) not in (FunctionType, BuiltinFunctionType, np.ufunc, type(np.concatenate)):
        return False
    name = function.__name__
    if getattr(np, name, None) is function:
        return name in _NUMPY
    if type(function) is FunctionType:
        return function.__module__ in ("torch.functional", "torch.nn.functional", "torch._tensor", "torch.nn.utils.rnn")
    return any(home.get(name) is function for home in _HOMES)
