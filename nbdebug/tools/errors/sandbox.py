"""Torch's own part of the failing line, run again on copies: to see that it fails by itself, and that a fix works.

Nothing of the user's runs: only functions, methods and modules of torch's and NumPy's that do nothing but compute,
modules without their hooks, on copies of plain tensors that are small enough to take no time. Gradients are off, and
the state of the random numbers is kept.

A fix that lets one op run may break the next layer. So the second part reads the user's program on from the failing
line: the statement with the new text, then the statements behind it, then those of the caller behind its call, up to
the loss. Expressions are evaluated in the `Sandbox`, which knows torch's functions alone; of the user's own functions
and modules the statements are read in the same way. Where that ends (a file is read, `backward()`, a loop goes round),
the trial ends, and says how far it came.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.sources import SCOPES, edit_of, parents, parse, tree_of
from nbdebug.observe.variables import attributes, class_attribute, named_parameters
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import clip, module_name
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    callee_name,
    expression,
    functions_around,
    is_tensor,
    statement,
    unpacked,
    value_of,
    value_part,
)
from nbdebug.tools.errors.operands import CALLS, library_frames
from nbdebug.tools.errors.rules import TriedFix, word_pairs

SMALL = 2_000_000
"""Elements of all tensors together that are copied and computed with: a few hundredths of a second."""
RANDOM = ("rand", "normal", "multinomial", "bernoulli", "dropout", "empty", "poisson", "exponential", "uniform")
"""Beginnings of the names of functions that return other values each time."""
TENSORS = (torch.Tensor, nn.Parameter)
ARRAYS = (*TENSORS, np.ndarray)
PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis), slice)
ATTRIBUTES = ("T", "mT", "shape", "dtype", "ndim", "device", "data")
"""Attributes of a tensor or array that are read."""
VIEWS = re.compile(
    "T|mT|t|transpose|swapaxes|permute|movedim|view|unsqueeze|squeeze|expand|chunk|split|select|narrow|unbind|detach|"
    "unflatten|size|dim|numel|shape|len"
)
"""What takes no time on a tensor of any size."""
NEVER = re.compile("backward|register_hook|share_memory_|set_|resize_|save|load|from_numpy|compile|item|tolist|numpy")
"""Methods and functions that do more than compute, or hand out values that a stand-in does not have."""
NUMPY = re.compile(
    "concatenate|stack|vstack|hstack|dot|matmul|einsum|where|reshape|transpose|mean|sum|squeeze|expand_dims|swapaxes|"
    "broadcast_to|outer|inner|tensordot|array|zeros|ones|argmax|clip|abs|sqrt|exp|maximum|minimum|add|subtract|"
    "multiply|divide"
)
PYTHON = (len, int, float, tuple, list, dict, range, min, max, torch.device, torch.cuda.is_available)
TORCH_PYTHON = ("torch.functional", "torch.nn.functional", "torch._tensor", "torch.nn.init", "torch.nn.utils")
"""Modules of torch's whose Python functions compute and do nothing else."""
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    getattr(ast, kind): getattr(operator, name)
    for kind, name in word_pairs(
        "Add:add Sub:sub Mult:mul Div:truediv MatMult:matmul Pow:pow FloorDiv:floordiv Mod:mod BitAnd:and_ BitOr:or_ "
        "BitXor:xor Eq:eq NotEq:ne Lt:lt LtE:le Gt:gt GtE:ge Is:is_ IsNot:is_not"
    ).items()
}
OF_TEXT: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda text, others: text in others,
    ast.NotIn: lambda text, others: text not in others,
}
IN_PLACE: dict[type, Callable[[Any, Any], Any]] = {
    kind: getattr(operator, "i" + function.__name__.rstrip("_"))
    for kind, function in ARITHMETIC.items()
    if issubclass(kind, ast.operator)
}
UNARY: dict[type, Callable[[Any], Any]] = {
    getattr(ast, kind): getattr(operator, name)
    for kind, name in word_pairs("USub:neg UAdd:pos Invert:invert Not:not_").items()
}


class CannotRun(Exception):
    """Something in it is not torch's own, is too large, or is not available."""


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What happened when the op ran again. text: its result in words, or the message of what it raised."""

    worked: bool
    text: str

    @classmethod
    def failed(cls, error: Exception) -> TrialResult:
        return cls(False, clip(first_words(error), 200))

    @property
    def after(self) -> dict[str, str]:
        """The proof of a fix."""
        return {"result": self.text} if self.worked else {"it raised": self.text, "runs": "1"}


def first_words(error: Exception) -> str:
    """The first line of a message of torch's or Python's; the class of an exception without one."""
    message = error.args[0] if error.args and type(error.args[0]) is str else type(error).__name__
    return str(message).partition("\n")[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Gradients off, random numbers kept, no warnings."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def rerun(
    context: ErrorContext, swap: Mapping[int | str, Any], inside: Callable[[], AbstractContextManager] = nullcontext
) -> TrialResult | None:
    """The failing op again. swap: what replaces a tensor, by the id of the one that the op was called with, or an
    operand that is computed in the line, by its text; inside: a context of torch's in which it is to run, such as one
    without cuDNN. None where it can't be run without running code of the user's, or does not fail by itself."""
    before = _trial(context, {})
    if before is None or before.worked:  # what runs here is not what failed there: then it proves nothing
        return None
    with inside():
        return _trial(context, swap)


def _trial(context: ErrorContext, swap: Mapping[int | str, Any]) -> TrialResult | None:
    with quiet():
        try:
            result = _failing_op(context, Sandbox(swap, on_device=True))
        except CannotRun:
            return None
        except Exception as error:  # not a fix: the op's own message
            return TrialResult.failed(error)
    if type(result) is tuple and result:
        result = result[0]
    if not is_tensor(result):
        return TrialResult(True, "no error, 1 run")
    dtype = str(result.dtype).removeprefix("torch.")
    return TrialResult(True, f"{dtype} {list(result.shape)} on {result.device}")


def _failing_op(context: ErrorContext, sandbox: Sandbox) -> Any:
    """Torch's innermost function or module in the traceback, else the expression in the user's line."""
    for frame in library_frames(context):
        function = getattr(nn.functional, frame.site.function, None)
        if frame.site.file == nn.functional.__file__ and type(function) is FunctionType:
            return sandbox.call_function(function, frame.names)
        if frame.module is not None and frame.site.function == "forward":
            args, kwargs = _module_call(context, frame)
            args, kwargs = sandbox.copy(args), {name: sandbox.copy(value) for name, value in kwargs.items()}
            return sandbox.forward(frame.module, *args, **kwargs)
    node = value_part(expression(context.users[0])) if context.users else None
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):  # to read `x[i]` is not what failed
        raise CannotRun
    if isinstance(node, ast.Attribute):  # what Python names of `x.mean()` where `x` has no such method
        around = parents(tree_of(context.users[0].site.file) or ast.Module([], [])).get(id(node))
        node = around if isinstance(around, ast.Call) and around.func is node else node
    return sandbox.evaluate(node, context.users[0])


def _module_call(context: ErrorContext, forward: Frame) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What a module was called with; its forward may have bound other values to the same names since."""
    before = context.trail[: next(i for i, frame in enumerate(context.trail) if frame is forward)]
    call = before[-1].names if before and before[-1].site.function == "_call_impl" else {}
    args, kwargs = call.get("args"), call.get("kwargs")
    if call.get("self") is not forward.module or type(args) is not tuple or type(kwargs) is not dict:
        raise CannotRun
    return args, kwargs


def computed_operands(context: ErrorContext, known: set[str]) -> list[tuple[str, torch.Tensor]]:
    """(text, value) of operands that the failing line computes itself (`torch.tensor([0, 9])` as an index), computed
    again where that takes torch's code alone and nothing is drawn at random. known: the texts whose value is known."""
    node = value_part(expression(context.users[0])) if context.users and not library_frames(context) else None
    results = []
    for operand in _operand_nodes(node):
        text = ast.unparse(operand)
        random = any(callee_name(part).rstrip("_").startswith(RANDOM) for part in ast.walk(operand))
        if text in known or random or isinstance(operand, (ast.Name, ast.Constant)):
            continue
        with quiet(), contextlib.suppress(Exception):  # what can't be computed here is left out
            value = Sandbox(on_device=True).evaluate(operand, context.users[0])
            if type(value) is torch.Tensor:
                results.append((text, value))
    return results


def _operand_nodes(node: ast.AST | None) -> list[ast.expr]:
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


class Sandbox:
    """One run of an expression, a function or a module.

    swap: what replaces a tensor, by its id, or an operand, by its text in the user's line. on_device: tensors stay on
    their device, so that an error of devices appears again. Else only shapes matter, and zeros on the CPU replace the
    tensors of an accelerator: it may have failed, and would have to be waited for.

    All methods raise CannotRun where they would need code of the user's or too much time; whatever torch and NumPy
    raise passes through.
    """

    def __init__(self, swap: Mapping[int | str, Any] | None = None, *, on_device: bool = False):
        self.swap: Mapping[int | str, Any] = swap or {}
        self.on_device = on_device
        self.size = 0
        self._copies: dict[int, tuple[Any, Any]] = {}

    @property
    def large(self) -> bool:
        return self.size > SMALL

    def allow(self, name: str) -> None:
        """Raises CannotRun where a function or method of this name may not run on the tensors copied so far."""
        if NEVER.fullmatch(name) or self.large and not VIEWS.fullmatch(name):
            raise CannotRun

    def copy(self, value: Any) -> Any:
        """What replaces a value: a copy of a small tensor, a view of a large one, a plain value itself."""
        if id(value) in self.swap:
            return self.swap[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self.copy(item) for item in value)
        if type(value) is dict:
            return {key: self.copy(item) for key, item in value.items() if type(key) in (str, int)}
        if type(value) not in ARRAYS:
            if type(value) in PLAIN or _only_computes(value):
                return value
            raise CannotRun
        if id(value) not in self._copies:
            self.size += value.size if type(value) is np.ndarray else value.numel()
            self._copies[id(value)] = (value, self._copy(value))  # the value is kept, so that its id stays its own
        return self._copies[id(value)][1]

    def _copy(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            if value.dtype.hasobject:  # their arithmetic may be the user's
                raise CannotRun
            return value if self.large else value.copy()
        if not self.on_device:
            if value.layout is not torch.strided or value.is_quantized:
                raise CannotRun
            if value.device.type != "cpu":
                return torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)
        return value.detach() if self.large else value.detach().clone()

    def evaluate(self, node: ast.AST | None, frame: Frame) -> Any:
        """The value of an expression of the user's."""
        if node is None:
            raise CannotRun
        if isinstance(node, ast.expr) and (text := ast.unparse(node)) in self.swap:
            return self.swap[text]
        value = UNKNOWN if self._swapped_inside(node) else value_of(node, frame)
        if value is not UNKNOWN:
            return self.copy(value)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotRun
        return method(node, frame)

    def _swapped_inside(self, node: ast.AST) -> bool:
        texts = {key for key in self.swap if type(key) is str}
        return bool(texts) and any(isinstance(n, ast.expr) and ast.unparse(n) in texts for n in ast.walk(node))

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        thing = self.evaluate(node.value, frame)
        if type(thing) is np.ndarray and node.attr == "values":
            return thing  # of a column, see `_subscript`
        if type(thing) not in ARRAYS or node.attr not in ATTRIBUTES:
            raise CannotRun
        return getattr(thing, node.attr)

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        whole, key = value_of(node.value, frame), self.evaluate(node.slice, frame)
        if (pandas := sys.modules.get("pandas")) is not None and type(whole) is pandas.DataFrame:
            names = key if type(key) is list else [key]
            if any(type(name) is not str or name not in whole.columns for name in names):
                raise CannotRun
            return self.copy(whole[key].to_numpy())
        thing = self.evaluate(node.value, frame)
        if type(thing) not in (*ARRAYS, torch.Size, list, tuple, dict):
            raise CannotRun
        if any(type(part) in (*ARRAYS, list) for part in (key if type(key) is tuple else (key,))):
            self.allow("index")
        return thing[key]

    def _slice(self, node: ast.Slice, frame: Frame) -> slice:
        return slice(*(None if p is None else self.evaluate(p, frame) for p in (node.lower, node.upper, node.step)))

    def _tuple(self, node: ast.Tuple, frame: Frame) -> tuple[Any, ...]:
        return tuple(self._items(node.elts, frame))

    def _list(self, node: ast.List, frame: Frame) -> list[Any]:
        return self._items(node.elts, frame)

    def _items(self, nodes: list[ast.expr], frame: Frame) -> list[Any]:
        values: list[Any] = []
        for node in nodes:
            value = self.evaluate(node.value if isinstance(node, ast.Starred) else node, frame)
            if not isinstance(node, ast.Starred):
                values.append(value)
            elif type(value) in (list, tuple, torch.Size):
                values += value
            else:
                raise CannotRun
        return values

    def _keywords(self, node: ast.Call, frame: Frame) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is None and type(value) is not dict:
                raise CannotRun
            values |= value if keyword.arg is None else {keyword.arg: value}
        return values

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        return self._arithmetic(ARITHMETIC, node.op, self.evaluate(node.left, frame), self.evaluate(node.right, frame))

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> Any:
        target = self.evaluate(ast.parse(ast.unparse(node.target), mode="eval").body, frame)
        value = self.evaluate(node.value, frame)
        self.allow("arithmetic")
        return self._arithmetic(IN_PLACE, node.op, target.clone() if type(target) in TENSORS else target, value)

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        test = self.evaluate(node.test, frame)
        if type(test) not in (bool, int, type(None)):
            raise CannotRun
        return self.evaluate(node.body if test else node.orelse, frame)

    def _compare(self, node: ast.Compare, frame: Frame) -> Any:
        if len(node.ops) > 1:
            raise CannotRun
        left, right = self.evaluate(node.left, frame), self.evaluate(node.comparators[0], frame)
        if type(left) is str and type(right) in (str, tuple, list, dict) and type(node.ops[0]) in OF_TEXT:
            return OF_TEXT[type(node.ops[0])](left, right)
        return self._arithmetic(ARITHMETIC, node.ops[0], left, right)

    def _arithmetic(self, table: Mapping[type, Callable[[Any, Any], Any]], op: ast.AST, left: Any, right: Any) -> Any:
        if type(op) not in table or type(left) is str or type(right) is str:
            raise CannotRun
        if type(left) in ARRAYS or type(right) in ARRAYS:
            self.allow("arithmetic")
        return table[type(op)](left, right)

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.evaluate(node.operand, frame)
        self.allow("arithmetic")
        return UNARY[type(node.op)](value)

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        name, function = getattr(node.func, "attr", getattr(node.func, "id", "")), value_of(node.func, frame)
        kwargs = self._keywords(node, frame)
        args = self._items(node.args, frame)
        if issubclass(type(function), nn.Module):
            return self.forward(function, *args, **kwargs)
        self.allow(name)
        if function is UNKNOWN or type(function) is MethodType and type(function.__self__) in TENSORS:
            thing = self.evaluate(getattr(node.func, "value", None), frame)
            if type(thing) in TENSORS and name in ("cpu", "cuda", "to") and not self.on_device:
                return thing.to(*(x for x in args if type(x) is torch.dtype))
            if type(thing) is np.ndarray and name == "to_numpy" and not args:
                return thing
            if type(thing) is dict and name in ("keys", "values", "items") and not args:
                return list(getattr(thing, name)())
            if type(thing) in (tuple, list, dict, str, type(iter([]))) and not hasattr(type(thing), name):
                which = "" if "iterator" in type(thing).__name__ else f"{type(thing).__name__!r} "  # torch's stand-in
                raise AttributeError(f"{which}object has no attribute {name!r}")
            kind = torch.Tensor if type(thing) in TENSORS else type(thing)
            function = getattr(kind, name, None) if kind in ARRAYS else None
            args = [thing, *args]
        if type(function) is type and issubclass(function, dict) and not args:  # an output of a library
            own = vars(function).get("__init__") if "__dataclass_fields__" not in vars(function) else None
            function = dict if own is None else function
        if not _only_computes(function):
            raise CannotRun
        self.allow(getattr(function, "__name__", ""))
        return function(*args, **kwargs)

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What a module of torch's own returns: a copy of it, with copies of its parameters and without hooks."""
        twin = self._twin(module)
        self.allow("forward")
        return type(module).forward(twin, *args, **kwargs)

    def _twin(self, module: nn.Module) -> nn.Module:
        kind, own = type(module), attributes(module)
        hostile = any(
            type(v) in (FunctionType, MethodType, functools.partial) and not _only_computes(v) for v in own.values()
        )
        if not module_name(kind).startswith("torch.nn.modules.") or "forward" in own or hostile:
            raise CannotRun
        twin = copy.copy(module)
        for table in ("_parameters", "_buffers"):
            twin.__dict__[table] = {name: self.copy(value) for name, value in own[table].items()}
        twin.__dict__["_modules"] = {n: None if m is None else self._twin(m) for n, m in own["_modules"].items()}
        twin.__dict__ |= {name: {} for name in own if name.endswith("_hooks")}
        if issubclass(kind, nn.RNNBase):
            twin.__dict__["_flat_weights"] = [self.copy(weight) for weight in own["_flat_weights"]]
        return twin

    def call_function(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any],
        swap: Mapping[str, Any] | None = None,
        module: nn.Module | None = None,
    ) -> Any:
        """A function of torch's, or the forward of a module, with the arguments that lie in its frame (`names`), some
        of them replaced by name."""
        swap, arguments = swap or {}, {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "self":
                if name not in names or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                    raise CannotRun
                arguments[name] = swap[name] if name in swap else self.copy(names[name])
        if module is not None:
            return self.forward(module, **arguments)
        self.allow("function")
        return function(**arguments)


@functools.cache
def _torch_ops() -> frozenset[int]:
    homes = (torch, torch._C._nn, torch.linalg, torch.special, torch.fft, nn.functional)
    return frozenset(id(value) for home in homes for value in vars(home).values() if type(value) is BuiltinFunctionType)


def _only_computes(function: Any) -> bool:
    """Whether it is a function of torch's or NumPy's that only computes, or one of Python's few that do."""
    kind: Any = type(function)
    if any(function is known for known in PYTHON):
        return True
    if kind is MethodDescriptorType:
        return function.__objclass__ in (*torch.Tensor.__mro__, np.ndarray)
    if kind is BuiltinFunctionType and id(function) in _torch_ops():
        return True
    if kind not in (FunctionType, BuiltinFunctionType, np.ufunc, type(np.concatenate)):
        return False
    name = str(function.__name__)
    if getattr(np, name, None) is function:
        return NUMPY.fullmatch(name) is not None
    return kind is FunctionType and str(function.__module__).startswith(TORCH_PYTHON)


# -- the program run on ------------------------------------------------------------------------------------------------


SECONDS = 0.5
"""For one trial; the clock is read between statements."""
DEEPEST = 6
"""Functions of the user's within one another."""


class Returned(Exception):
    """A `return` was reached."""


class End(Exception):
    """The trial can't go on, or has come to a `backward()`; so far all is well."""


@dataclasses.dataclass
class Run:
    """until: when the time is over; last: the value of the last tensor expression; line: the last statement read."""

    until: float
    sandbox: ProgramSandbox
    last: Any = None
    line: int = 0


class ProgramSandbox(Sandbox):
    """A sandbox that also reads the user's own functions and the `forward` of their modules, statement by statement."""

    def __init__(self, swap: Mapping[int | str, Any] | None = None):
        super().__init__(swap)
        self.run: Run | None = None
        self.depth = 0

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.swap.get(id(module), module)
        if module_name(type(module)).startswith("torch."):
            if type(module) is nn.Sequential:
                for child in module._modules.values():
                    assert child is not None
                    args = (self.forward(child, *args),)
                return args[0]
            return super().forward(module, *args, **kwargs)
        return self._read(class_attribute(module, "forward"), (module, *args), kwargs)

    def keep(self, value: Any) -> Any:
        """A result of the sandbox itself."""
        return value

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        function = value_of(node.func, frame)
        if isinstance(node.func, ast.Call):
            made = self.evaluate(node.func, frame)
            if not issubclass(type(made), nn.Module):
                raise CannotRun
            return self.forward(made, *self._items(node.args, frame), **self._keywords(node, frame))
        if issubclass(type(function), type) and issubclass(function, nn.Module):
            return self.made(function, self._items(node.args, frame), self._keywords(node, frame))
        if function is nn.Parameter:
            return self.keep(nn.Parameter(self.evaluate(node.args[0], frame).detach().clone()))
        if type(function) in (FunctionType, MethodType) and kind_of(function.__code__) == USER:
            args = self._items(node.args, frame)
            own = (function.__self__,) if type(function) is MethodType else ()
            return self._read(function, (*own, *args), self._keywords(node, frame))
        return super()._call(node, frame)

    def made(self, kind: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A new module of torch's own, where its weights are few."""
        if not module_name(kind).startswith("torch.nn."):
            raise CannotRun
        if not any(issubclass(type(arg), (nn.Module, list)) for arg in args):
            with torch.device("meta"):
                probe = kind(*args, **kwargs)
            if sum(weight.numel() for _, weight in named_parameters(probe)) > SMALL:
                raise CannotRun
        return self.keep(kind(*args, **kwargs))

    def copy(self, value: Any) -> Any:
        """Modules and results of the sandbox itself stay as they are."""
        return value if issubclass(type(value), nn.Module) else super().copy(value)

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a function of the user's returns for these arguments."""
        from nbdebug.tools.errors.autograd.functions import function_source  # only for what the user wrote

        source = function_source(function)
        if source is None or self.run is None or self.depth >= DEEPEST or not isinstance(source.node, ast.FunctionDef):
            raise CannotRun
        given = source.node.args
        names = [a.arg for a in (*given.posonlyargs, *given.args)]
        if len(args) > len(names) or given.vararg or given.kwarg:
            raise CannotRun
        if unknown := [name for name in kwargs if name not in (*names, *(a.arg for a in given.kwonlyargs))]:
            raise TypeError(f"{source.node.name}() got an unexpected keyword argument {unknown[0]!r}")
        bound: dict[str, Any] = {}
        for name, default in zip(reversed(names), reversed(given.defaults)):
            bound[name] = self.evaluate(default, source.frame)
        bound |= {**dict(zip(names, args)), **kwargs}
        if missing := [name for name in names if name not in bound]:
            raise TypeError(f"{source.node.name}() missing {len(missing)} required positional argument")
        return self._body_value(source, bound)

    def _body_value(self, source: Any, names: dict[str, Any]) -> Any:
        assert self.run is not None
        frame = dataclasses.replace(source.frame, names={**source.frame.names, **names})
        self.depth += 1
        try:
            self.read_body(source.node, frame)
        except Returned as done:
            return done.args[0]
        finally:
            self.depth -= 1
        return None

    def read_body(self, function: Any, frame: Frame) -> None:
        """The statements of a function of the user's."""
        assert self.run is not None
        read_block(self.run, function.body, frame)

    def reads(self, node: ast.stmt, frame: Frame) -> bool:
        """Whether this sandbox has read a statement in a way of its own."""
        return False


def continued(
    context: ErrorContext, edit: Edit | None, layers: Mapping[int | str, nn.Module] | None = None
) -> TrialResult | None:
    """The program from the failing statement on, with the text of an edit of it. layers: what replaces a layer, by its
    id, where the edit is of another line, which makes that layer. None where not even the statement can be read."""
    frame = context.frame
    mended = _mended(edit, frame) if frame is not None and edit is not None else None
    if frame is None or (mended is None) is (edit is not None):
        return None
    run = Run(time.monotonic() + SECONDS, ProgramSandbox(layers))
    run.sandbox.run = run
    with quiet():
        try:
            value = _rest_of_frame(run, frame, mended)
        except CannotRun:
            return None
        except End:
            return _result(run)
        except Exception as error:  # the next op, or the user's next layer, refuses it
            return TrialResult.failed(error)
        try:
            _outwards(run, context, frame, value)
        except (CannotRun, End):
            pass
        except Exception as error:
            return TrialResult.failed(error)
    return _result(run)


def edited(
    context: ErrorContext, code: str, methods: Mapping[str, str], trial: TrialResult | None, kept: bool = False
) -> TriedFix:
    """A fix that calls a method on operands of the user's line (`x.float()`, by the operand's text), as an edit of it;
    tried by the program behind it. trial: of the op alone; kept: a variable that the function uses again gets the
    result, before the line."""
    frame, node = context.frame, context.ran
    changes: dict[ast.AST, str] = {}
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.expr) and not isinstance(getattr(part, "ctx", None), (ast.Store, ast.Del)):
            method = methods.get(ast.unparse(part))
            if method is not None and not any(part is n for done in changes for n in ast.walk(done)):
                changes[part] = f"{{}}.{method}"
    edit = edit_of(frame.site.file, changes) if changes and frame is not None else None
    again = _used_again(frame, context.line, changes) if kept and frame is not None and context.line else []
    if again and frame is not None and context.line is not None:
        lines = [ast.parse(f"{name} = {name}.{methods[name]}").body[0] for name in again]
        edit = before_line(frame, context.line, lines) or edit
    further = continued(context, edit) if edit is not None else None
    if further is not None and not further.worked:
        return TriedFix(code)
    after = dict(trial.after) if trial is not None else {}
    if further is not None:
        after["the program then runs"] = further.text
    return TriedFix(code, True if trial or further else None, after, edit)


def _used_again(frame: Frame, line: ast.stmt, changes: Mapping[ast.AST, str]) -> list[str]:
    """Of the variables in these places those that the function reads in other places from this line on."""
    scope: Any = next(iter(functions_around(tree_of(frame.site.file), line.lineno)), None)
    names = dict.fromkeys(node.id for node in changes if isinstance(node, ast.Name))
    later = [n for n in ast.walk(scope) if isinstance(n, ast.Name)] if scope is not None else []
    later = [n for n in later if n.lineno >= line.lineno and isinstance(n.ctx, ast.Load) and n not in changes]
    return [name for name in names if any(n.id == name for n in later)]


def proven(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with each fix that is called tried as an edit of the user's own lines: one that assigns a new value
    (`ids = ids - 1`) goes before the failing line, and the program runs on with it. What is no edit is a suggestion."""
    return dataclasses.replace(finding, fixes=tuple(_proven(context, fix) for fix in finding.fixes))


def _proven(context: ErrorContext, fix: Fix) -> Fix:
    if not fix.verified or fix.edit is not None:
        return fix
    edit = _replaced(context, fix.code)
    if edit is not None:
        return Fix.of(fix.title, edit, True, fix.after)
    edit = inserted(context, fix.code)
    trial = continued(context, edit) if edit is not None else None
    if edit is None or trial is not None and not trial.worked:
        return dataclasses.replace(fix, verified=None, after={})
    after = {**fix.after, **({"the program then runs": trial.text} if trial is not None else {})}
    return Fix.of(fix.title, edit, True, after)


def _replaced(context: ErrorContext, code: str) -> Edit | None:
    """Statements that end in the failing call itself, on other values, in the place of the failing statement."""
    frame = context.frame
    line, tree = statement(frame) if frame is not None else None, parse(code)
    last = tree.body[-1] if tree is not None and tree.body else None
    if frame is None or not isinstance(line, ast.Expr) or not isinstance(last, ast.Expr) or "#" in code:
        return None
    names = [getattr(getattr(one.value, "func", None), "attr", "") for one in (line, last)]
    pad = " " * line.col_offset
    return (
        edit_of(frame.site.file, {line: code.replace("\n", f"\n{pad}")}) if names[0] and names[0] == names[1] else None
    )


def inserted(context: ErrorContext, code: str) -> Edit | None:
    """Assignments before the failing statement, where that uses what they assign; None for other code."""
    frame, line = context.frame, context.line
    tree = parse(code)
    if frame is None or line is None or hasattr(line, "body") or tree is None or "#" in code or "…" in code:
        return None
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.value.func.value for n in tree.body if _moves(n)]  # type: ignore[attr-defined]
    used = {ast.unparse(n) for n in ast.walk(line) if isinstance(n, (ast.Name, ast.Attribute))}
    if len(targets) != len(tree.body) or not any(ast.unparse(t) in used for t in targets):
        return None
    known = {*frame.names, *frame.globals, *vars(builtins)} | {t.id for t in targets if isinstance(t, ast.Name)}
    inner = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if any(isinstance(n, ast.Name) and n.id not in known | inner for n in ast.walk(tree)):
        return None
    return before_line(frame, line, tree.body)


def _moves(node: ast.stmt) -> bool:
    """Whether it is `model.to(device)`."""
    return isinstance(node, ast.Expr) and callee_name(node.value) == "to" and isinstance(node.value.func, ast.Attribute)  # type: ignore[attr-defined]


def before_line(frame: Frame, line: ast.stmt, body: list[ast.stmt]) -> Edit | None:
    """Assignments before a statement. A name of the function around, or of the file, would become local by that: there
    the one new value is written in its place."""
    scope = next(iter(functions_around(tree_of(frame.site.file), line.lineno)), None)
    names = {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    inside = list(ast.walk(scope)) if scope is not None else []
    own = {n.arg for n in inside if isinstance(n, ast.arg)}
    own |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if scope is None or names <= own:
        pad = " " * line.col_offset
        text = "".join(ast.unparse(node).replace("\n", f"\n{pad}") + f"\n{pad}" for node in body)
        return edit_of(frame.site.file, {line: text + "{raw}"})
    uses = [n for n in ast.walk(line) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    only = body[0] if len(body) == 1 else None
    if not isinstance(only, ast.Assign) or len(uses) != 1:
        return None
    value = ast.unparse(only.value)
    simple = isinstance(only.value, (ast.Call, ast.Name, ast.Attribute, ast.Subscript))
    return edit_of(frame.site.file, {uses[0]: value if simple else f"({value})"})


def _result(run: Run) -> TrialResult:
    text = f"to line {run.line}"
    if is_tensor(run.last):
        dtype = str(run.last.dtype).removeprefix("torch.")
        text += f", which gives {dtype} {list(run.last.shape)}"
    return TrialResult(True, text)


def _mended(edit: Edit, frame: Frame) -> list[ast.stmt] | None:
    """The statements of the new text."""
    tree = parse(textwrap.dedent(edit.new))
    return tree.body if tree is not None and edit.file == frame.site.file else None


def _rest_of_frame(run: Run, frame: Frame, first: list[ast.stmt] | None, swap: tuple[str, Any] | None = None) -> Any:
    """What a frame returns: its present statement (in the text `first`, or with the value of one call in it known),
    then those behind it. Raises End where it goes no further."""
    now = statement(frame)
    tree = tree_of(frame.site.file)
    if now is None or tree is None:
        raise CannotRun
    frame = dataclasses.replace(frame, names=dict(frame.names), globals=dict(frame.globals))
    before = dict(run.sandbox.swap)
    if swap is not None:
        run.sandbox.swap = {**before, swap[0]: swap[1]}
    try:
        read_block(run, first if first is not None else [now], frame, fresh=True)
        run.sandbox.swap = before
        _behind(run, now, parents(tree), frame)
    except Returned as done:
        return done.args[0]
    finally:
        run.sandbox.swap = before
    raise End


def _behind(run: Run, node: ast.AST, around: Mapping[int, ast.AST], frame: Frame) -> None:
    """The statements behind a statement, in its block and in those around it, up to the end of a loop."""
    while True:
        block = around.get(id(node))
        if block is None:
            raise End
        for part in ("body", "orelse", "finalbody"):
            inside = getattr(block, part, None)
            if isinstance(inside, list) and any(one is node for one in inside):
                at = next(i for i, one in enumerate(inside) if one is node)
                read_block(run, inside[at + 1 :], frame)
        if isinstance(block, (*SCOPES, ast.For, ast.While, ast.Module, ast.AsyncFor)):
            raise End if not isinstance(block, SCOPES) else Returned(None)
        node = block


def read_block(run: Run, body: list[ast.stmt], frame: Frame, fresh: bool = False) -> None:
    """Statements in order. fresh: they must be readable, or nothing was tried at all."""
    for node in body:
        if time.monotonic() > run.until:
            raise End
        try:
            _read_statement(run, node, frame)
        except CannotRun:
            if fresh or run.sandbox.depth:
                raise
            raise End from None
        run.line = node.lineno if not fresh and not run.sandbox.depth else run.line or frame.site.line


def _read_statement(run: Run, node: ast.stmt, frame: Frame) -> None:
    if run.sandbox.reads(node, frame):
        return
    names: Any = frame.names if frame.site.function != "<module>" else frame.globals
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.AugAssign)):
        own = isinstance(node, ast.AugAssign)
        value = run.sandbox.evaluate(node if own else node.value or ast.Constant(None), frame)
        run.last = value if is_tensor(value) else run.last
        if isinstance(node, ast.Return):
            raise Returned(value)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Subscript) or own and not isinstance(target, ast.Name):
                _write(run, target, value, frame, own)
            bind(target, value, names)
    elif isinstance(node, ast.If):
        test = run.sandbox.evaluate(node.test, frame)
        if type(test) not in (bool, int, type(None)):
            raise CannotRun
        read_block(run, node.body if test else node.orelse, frame, fresh=True)
    elif isinstance(node, ast.With) and all(i.optional_vars is None for i in node.items):
        read_block(run, node.body, frame, fresh=True)
    elif not isinstance(node, ast.Pass):
        raise CannotRun


def _write(run: Run, target: Any, value: Any, frame: Frame, done: bool) -> None:
    """`x[i] = value`: into a copy, which is read no more, so the trial ends there. done: it is written already."""
    if not done:
        thing, key = (run.sandbox.evaluate(part, frame) for part in (target.value, target.slice))
        if not is_tensor(thing):
            raise CannotRun
        thing[key] = value
    raise End


def bind(target: Any, value: Any, names: dict[str, Any]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        if type(value) not in (tuple, list, dict, torch.Size) and not is_tensor(value):
            raise CannotRun
        for part, item in unpacked(target, list(value)):
            bind(part, item, names)
    elif target is not None:
        raise CannotRun


def _outwards(run: Run, context: ErrorContext, frame: Frame, value: Any) -> None:
    """The callers of a frame that has returned, one after the other, as long as they called it directly."""
    places = {id(one): i for i, one in enumerate(context.trail)}
    at = next(i for i, one in enumerate(context.users) if one is frame)
    for caller in context.users[at + 1 :]:
        between = context.trail[places[id(caller)] + 1 : places[id(frame)]]
        value = _through_layers(run, between, value)
        call = expression(caller)
        if not isinstance(call, ast.Call):
            raise End
        run.line = caller.site.line
        value = _rest_of_frame(run, caller, None, (ast.unparse(call), value))
        frame = caller


def _through_layers(run: Run, between: list[Frame], value: Any) -> Any:
    """What torch's containers make of a result on its way to the caller: a Sequential passes it to its next layers."""
    for frame in reversed(between):
        if frame.site.function in CALLS:
            continue
        if type(frame.module) is not nn.Sequential or frame.site.function != "forward":
            raise End
        layers = list(frame.module._modules.values())
        at = next((i for i, layer in enumerate(layers) if layer is frame.names.get("module")), None)
        for layer in layers[at + 1 :] if at is not None else ():
            assert layer is not None
            value = run.sandbox.forward(layer, value)
    return value
