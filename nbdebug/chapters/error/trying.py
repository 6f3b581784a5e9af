"""A cure is tried on the very op that failed: torch's own function, module or expression, run again on copies of what
it was given, with some of it replaced.

Nothing of the user's runs: only functions and modules of torch's, without hooks, on plain tensors that are small enough
to take no time. Gradients are off, the state of the random numbers is kept, and copies take the place of what an
in-place op would change.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.error.asked import parts, weights, within
from nbdebug.chapters.error.operands import UNKNOWN, expression, value_of
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.chapters.error.syntax import called
from nbdebug.observe.frames import Frame
from nbdebug.observe.named import attributes

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
class Trial:
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
    scene: Scene, swap: Mapping[int | str, Any], inside: Callable[[], AbstractContextManager] = nullcontext
) -> Trial | None:
    """The failing op again. swap: what takes the place of a tensor, by the id of the one that it was given, or of an
    operand that is made in the line, by its text; inside: a context of torch's in which it is to run, such as one
    without cuDNN. None where it can't be run without running code of the user's, or does not fail by itself."""
    before = _run(scene, {})
    if before is None or before.worked:  # what runs here is not what failed there: then it proves nothing
        return None
    with inside():
        return _run(scene, swap)


def computed(scene: Scene, known: set[str]) -> list[tuple[str, torch.Tensor]]:
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
                value = _Again({}).value(node, scene.users[0])
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


def _run(scene: Scene, swap: Mapping[int | str, Any]) -> Trial | None:
    again = _Again(swap)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = again.op(scene)
        except _CannotRun:
            return None
        except Exception as failed:  # the cure is none: the op's own word for it
            said = failed.args[0] if failed.args and type(failed.args[0]) is str else type(failed).__name__
            return Trial(False, said.partition("\n")[0][:200])
    return Trial(True, _told(result))


def _told(result: Any) -> str:
    if type(result) is tuple and result:
        result = result[0]
    if is_tensor(result):
        return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)} on {result.device}"
    return "no error, 1 run"


class _Again:
    def __init__(self, swap: Mapping[int | str, Any]):
        self.swap, self.size = swap, 0
        self.copies: dict[int, Any] = {}

    def op(self, scene: Scene) -> Any:
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


def _call(scene: Scene, forward: Frame) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
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
