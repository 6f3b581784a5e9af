"""A cure is tried on the very op that failed: torch's own function, module or expression, run again on copies of what
it was given, with some of it replaced.

Nothing of the user's runs: only functions and modules of torch's, without hooks, on plain tensors that are small enough
to take no time. Gradients are off, the state of the random numbers is kept, and copies take the place of what an
in-place op would change.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.variables import attributes
from nbdebug.tools.errors.context import ErrorContext, is_tensor
from nbdebug.tools.errors.operands import parts, weights, within
from nbdebug.tools.errors.syntax import called
from nbdebug.tools.errors.values import UNKNOWN, expression, value_of

RANDOM = ("rand", "normal", "multinomial", "bernoulli", "dropout", "empty", "poisson", "exponential", "uniform")
"""Beginnings of the names of functions that give other values each time."""
SMALL = 2_000_000
"""Elements in all that are copied and run again: a few hundredths of a second."""
_HOMES = (torch, nn.functional, torch.linalg, torch.special, torch.fft, torch._C._nn)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
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
}
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_PLAIN = (int, float, bool, complex, str, slice, torch.dtype, torch.device, torch.Size)
_IN_PLACE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.iadd,
    ast.Sub: operator.isub,
    ast.Mult: operator.imul,
    ast.Div: operator.itruediv,
}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What was seen when the op ran again. says: its result in words, or the message of what it raised."""

    worked: bool
    says: str

    @property
    def after(self) -> dict[str, str]:
        """The proof of a fix."""
        return {"result": self.says} if self.worked else {"it raised": self.says, "runs": "1"}


class _CannotRun(Exception):
    """Something in it is not torch's own, too large, or not at hand."""


def rerun(
    scene: ErrorContext, swap: Mapping[int | str, Any], inside: Callable[[], AbstractContextManager] = nullcontext
) -> TrialResult | None:
    """The failing op again. swap: what takes the place of a tensor, by the id of the one that it was given, or of an
    operand that is made in the line, by its text; inside: a context of torch's in which it is to run, such as one
    without cuDNN. None where it can't be run without running code of the user's, or does not fail by itself."""
    before = _run(scene, {})
    if before is None or before.worked:  # what runs here is not what failed there: then it proves nothing
        return None
    with inside():
        return _run(scene, swap)


def computed(scene: ErrorContext, known: set[str]) -> list[tuple[str, torch.Tensor]]:
    """(text, value) of operands that the failing line makes itself (`torch.tensor([0, 9])` as an index), made again
    where that takes torch's code alone and nothing is drawn at random. known: the texts that need no making."""
    ran = _value_part(expression(scene.users[0])) if scene.users and not within(scene) else None
    found = []
    for node in _operands(ran):
        text = ast.unparse(node)
        drawn = any(called(part).rstrip("_").startswith(RANDOM) for part in ast.walk(node))
        if text in known or drawn or isinstance(node, (ast.Name, ast.Constant)):
            continue
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = _StatementSandbox({}).value(node, scene.users[0])
            except Exception:  # it can't be made here: then nothing is said of it
                continue
        if type(value) is torch.Tensor:
            found.append((text, value))
    return found


def _operands(node: ast.AST | None) -> list[ast.expr]:
    """What an expression computes with, one step down: both sides, the receiver and the arguments, the index."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript):
        return [node.value, *(node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if isinstance(node, ast.Call):
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*receiver, *node.args, *(k.value for k in node.keywords)]
    return []


def _run(scene: ErrorContext, swap: Mapping[int | str, Any]) -> TrialResult | None:
    again = _StatementSandbox(swap)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = again.op(scene)
        except _CannotRun:
            return None
        except Exception as failed:  # the cure is none: the op's own word for it
            said = failed.args[0] if failed.args and type(failed.args[0]) is str else type(failed).__name__
            return TrialResult(False, said.partition("\n")[0][:200])
    return TrialResult(True, _told(result))


def _told(result: Any) -> str:
    if type(result) is tuple and result:
        result = result[0]
    if is_tensor(result):
        return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)} on {result.device}"
    return "no error, 1 run"


class _StatementSandbox:
    def __init__(self, swap: Mapping[int | str, Any]):
        self.swap, self.size = swap, 0
        self.copies: dict[int, Any] = {}

    def op(self, scene: ErrorContext) -> Any:
        for frame in within(scene):
            function = getattr(nn.functional, frame.site.function, None)
            if frame.site.file == nn.functional.__file__ and type(function) is FunctionType:
                return function(**self._arguments(function, frame))
            if frame.module is not None and frame.site.function == "forward":
                return self._module(frame, *_call(scene, frame))
        if not scene.users:
            raise _CannotRun
        return self.value(_value_part(expression(scene.users[0])), scene.users[0])

    def _arguments(self, function: Callable[..., Any], frame: Frame) -> dict[str, Any]:
        found = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name == "self":
                continue
            if name not in frame.names or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                raise _CannotRun
            found[name] = self.own(frame.names[name])
        return found

    def _module(self, frame: Frame, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """A module of torch's, as a copy with copies of its buffers; its forward alone, so no hook of its own runs."""
        module = frame.module
        if module is None or not _torchs(module):
            raise _CannotRun
        twin = copy.copy(module)
        for table in ("_parameters", "_buffers"):
            own = attributes(module)[table]
            twin.__dict__[table] = {name: self.own(value) for name, value in own.items()}
        if any(id(p) in self.swap for p in weights(module)) and isinstance(module, nn.RNNBase):
            raise _CannotRun  # its weights lie in a list of their own as well
        return type(twin).forward(twin, *map(self.own, args), **{name: self.own(v) for name, v in named.items()})

    def own(self, value: Any) -> Any:
        """A plain value as it is, a tensor as a copy or as what takes its place."""
        if id(value) in self.swap:
            return self.swap[id(value)]
        if is_tensor(value):
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise _CannotRun
            if id(value) not in self.copies:
                self.size += value.numel()
                if self.size > SMALL:
                    raise _CannotRun
                self.copies[id(value)] = value.detach().clone()
            return self.copies[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self.own(item) for item in value)
        if value is None or type(value) in _PLAIN:
            return value
        raise _CannotRun

    def value(self, node: ast.AST | None, frame: Frame) -> Any:
        """An expression of the user's, where all of it is torch's."""
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            raise _CannotRun
        if self.swap and node is not None and (text := ast.unparse(node)) in self.swap:
            return self.swap[text]
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Constant)):
            known = value_of(node, frame)
            if known is not UNKNOWN:
                return self.own(known)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.value(node.left, frame), self.value(node.right, frame))
        if isinstance(node, ast.AugAssign) and type(node.op) in _IN_PLACE:
            target = value_of(ast.parse(ast.unparse(node.target), mode="eval").body, frame)
            return _IN_PLACE[type(node.op)](self.own(target), self.value(node.value, frame))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
            inner = self.value(node.operand, frame)
            return -inner if isinstance(node.op, ast.USub) else ~inner
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.value(part, frame) for part in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        return self._part(node, frame)

    def _part(self, node: ast.AST | None, frame: Frame) -> Any:
        """A comparison; an item, a slice or an attribute of a plain tensor."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            compare = _COMPARED[type(node.ops[0])]
            return compare(self.value(node.left, frame), self.value(node.comparators[0], frame))
        if isinstance(node, ast.Slice):
            return slice(*(None if p is None else self.value(p, frame) for p in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Subscript):
            thing, key = self.value(node.value, frame), self.value(node.slice, frame)
            if type(thing) in (torch.Tensor, nn.Parameter, torch.Size):
                return thing[tuple(key) if type(key) is list and isinstance(node.slice, ast.Tuple) else key]
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "shape", "dtype", "device", "data"):
            thing = self.value(node.value, frame)
            if type(thing) in (torch.Tensor, nn.Parameter):
                return getattr(thing, node.attr)
        raise _CannotRun

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords):
            raise _CannotRun
        function = value_of(node.func, frame)
        given = [] if function is not UNKNOWN else [self.value(getattr(node.func, "value", None), frame)]
        if given and type(given[0]) in (torch.Tensor, nn.Parameter):
            function = getattr(torch.Tensor, getattr(node.func, "attr", ""), None)
        if not _is_torchs(function):
            raise _CannotRun
        given += [self.value(arg, frame) for arg in node.args]
        return function(*given, **{str(k.arg): self.value(k.value, frame) for k in node.keywords})


def _call(scene: ErrorContext, forward: Frame) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a module was called with; its forward may have bound other values to the same names since."""
    before = scene.trail[: next(i for i, frame in enumerate(scene.trail) if frame is forward)]
    call = before[-1].names if before and before[-1].site.function == "_call_impl" else {}
    args, named = call.get("args"), call.get("kwargs")
    if call.get("self") is not forward.module or type(args) is not tuple or type(named) is not dict:
        raise _CannotRun
    return args, named


def _value_part(node: ast.AST | None) -> ast.AST | None:
    """The expression of a statement that ran."""
    if isinstance(node, (ast.Expr, ast.Return, ast.Assign, ast.AnnAssign)):
        return node.value
    return node


def _is_torchs(function: Any) -> bool:
    if type(function) is FunctionType:
        return str(function.__module__).partition(".")[0] == "torch"
    if type(function) is MethodDescriptorType:
        return function.__objclass__ in torch.Tensor.__mro__
    return type(function) is BuiltinFunctionType and any(
        function is known for home in _HOMES for known in vars(home).values()
    )


def _torchs(module: nn.Module) -> bool:
    """Whether a module and its parts are torch's own and no hook of the user's hangs on a part."""
    every = [part for _, part in parts(module)]
    return (
        len(every) < 50
        and all(type(p).__module__.startswith("torch.nn.") for p in every)
        and not any(attributes(part).get(hooks) for part in every if part is not module for hooks in _HOOKS)
    )


SMALL_OPERAND = 2_000_000
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
_OP_MODULES = [vars(home) for home in (torch, torch._C._nn, torch.linalg, torch.special, torch.fft, nn.functional)]
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


class OperandSandbox:
    """One run. instead: what takes the place of an operand, by the text the user wrote for it."""

    def __init__(self, instead: Mapping[str, Any] | None = None):
        self.instead, self.copies, self.size = instead or {}, {}, 0  # type: Mapping[str, Any], dict[int, Any], int

    @property
    def large(self) -> bool:
        return self.size > SMALL_OPERAND

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
    return any(home.get(name) is function for home in _OP_MODULES)
