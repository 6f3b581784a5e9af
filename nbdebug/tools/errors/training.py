"""A sandbox in which the user's program goes on as a training: with gradients, loops, loaders and optimizers.

An error often appears behind its cause: in `backward()`, in the second round of a loop, at the end of a loader. So the
program is read from before the error, on copies; what torch would refuse is refused here with the same words. Nothing
of the user's is run (see `sandbox`).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import linecache
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.sources import nodes, parsed
from nbdebug.observe.variables import (
    attributes,
    class_attribute,
    members,
    named_children,
    named_modules,
    named_parameters,
)
from nbdebug.report import Edit
from nbdebug.text import module_name
from nbdebug.tools.errors.autograd.functions import callee_word, first_line, unwrap
from nbdebug.tools.errors.context import UNKNOWN, is_tensor, unpacked, value_of
from nbdebug.tools.errors.sandbox import (
    ATTRIBUTES,
    IN_PLACE,
    TENSORS,
    CannotRun,
    End,
    ProgramSandbox,
    Returned,
    bind,
    read_block,
)

ROUNDS = 3
"""Of a loop around the failing line: what is carried over from one to the next shows in the second."""
LONGEST = 200
"""Rounds of a loop within."""
BATCHES = 3
"""Of a loader, from its beginning; the last one, which may be smaller, follows them."""
ROUNDS_OF_DATA = 2 * BATCHES + 2
"""Of a loop around a line that takes its batches by hand: past the end of the loader, and once more."""
GRAD_MODES = {"no_grad": False, "inference_mode": False, "enable_grad": True}
TRAINING_SECONDS = 1.0
"""For one trial with gradients."""
_READERS = ("item", "tolist", "numpy", "from_numpy", "backward")
"""Methods that are allowed where gradients are on: the values are those of copies."""


_PLAIN: tuple[Any, ...] = (sum, zip, enumerate, float, max, min, abs)
_OF_MODULES: dict[str, Any] = {
    "parameters": named_parameters,
    "modules": named_modules,
    "children": lambda module: named_children(module).items(),
}
_NAMED = tuple(f"named_{name}" for name in _OF_MODULES)
_OF_WEIGHTS = ("zero_grad", "requires_grad_", "train", "eval")


class LoopEnd(Exception):
    """A `break` (True) or a `continue` (False)."""


_ITERATOR: Any = type(iter([]))
_REGISTERS = ("register_buffer", "register_parameter", "register_module", "add_module")
MADE = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, DataLoader, Distribution)
"""What the program may make in a trial."""


@dataclasses.dataclass
class _Schedule:
    """A learning-rate schedule: the steps that it was planned for, those that it made, its first rates."""

    total: Any = None
    steps: int = 0
    rates: tuple[Any, ...] = ()


@dataclasses.dataclass
class _Closure:
    """A function without parameters that the program defines where it runs."""

    node: ast.FunctionDef
    frame: Frame


@dataclasses.dataclass
class _Scaler:
    """What a GradScaler knows of a step: whether a loss was scaled, which optimizers are unscaled or have stepped."""

    scaled: bool = False
    unscaled: set[str] = dataclasses.field(default_factory=set)
    stepped: set[str] = dataclasses.field(default_factory=set)

    def call(self, name: str, optimizer: str) -> None:
        """Raises what torch's own raises."""
        if name == "scale":
            self.scaled = True
        elif name == "update":
            self.unscaled, self.stepped = set(), set()
        elif name in ("step", "unscale_"):
            if not self.scaled:
                raise AssertionError(f"Attempted {name} but _scale is None")
            if optimizer in self.stepped:
                late = "unscale_() is being called after step()."
                raise RuntimeError(late if name == "unscale_" else "step() has already been called")
            if name == "unscale_" and optimizer in self.unscaled:
                raise RuntimeError("unscale_() has already been called on this optimizer")
            (self.stepped if name == "step" else self.unscaled).add(optimizer)


class TrainingSandbox(ProgramSandbox):
    """A sandbox in which a training goes on: weights are copied as leaves, `backward()` runs on what was computed from
    the copies, `step()` changes these. So that an error of the graph appears again, and an edit shows whether it cures.

    Statements that can't be read are passed over where nothing else needs their result; a value that they would give
    stays what it is, or is unknown where it has a graph. edit: of the user's source; covered: whether it was read."""

    def __init__(self, frame: Frame, edit: Edit | None, swap: Mapping[int | str, Any] | None = None):
        super().__init__(swap)
        self.edit, self.covered, self.frame = edit, False, frame
        self.tree = None
        if edit is not None:
            lines = linecache.getlines(edit.file)
            self.tree = parsed((*lines[: edit.line - 1], edit.new + "\n", *lines[edit.end_line :]))
        self.calls, self.line, self.rounds = 0, frame.site.line, ROUNDS
        self._scalers: dict[int, _Scaler] = {}
        self._schedules: dict[int, _Schedule] = {}
        self._new: set[int] = set()
        self.readers: dict[Any, Callable[[Any, Frame], None]] = {
            (ast.For, ast.While): self._loop,
            ast.With: self._block,
            ast.Try: self._attempt,
            ast.FunctionDef: self._define,
            (ast.Break, ast.Continue): self._leave,
            ast.If: self._branch,
            ast.Return: self._return,
            (ast.Assign, ast.AugAssign, ast.AnnAssign): self._assign,
            ast.Expr: self._effect,
        }
        self._own: dict[int, Any] = {}
        self._fields: dict[tuple[int, str], Any] = {}

    # values: what the sandbox has made is taken as it is, what is the user's is copied once

    def keep(self, value: Any) -> Any:
        self._own[id(value)] = value
        if type(value) in (list, tuple):
            for item in value:
                self.keep(item)
        return value

    def copy(self, value: Any) -> Any:
        if type(value) is torch.Generator and id(value) not in self._own:
            raise CannotRun
        if issubclass(type(value), (torch.optim.Optimizer, Dataset)):
            return value
        if id(value) in self._own and self._own[id(value)] is value:
            return value
        if type(value) in (list, dict):
            if id(value) not in self._copies:
                self._copies[id(value)] = (value, self.keep(super().copy(value)))
            return self._copies[id(value)][1]
        return self.keep(super().copy(value))

    def _copy(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return super()._copy(value)
        if value.layout is not torch.strided or value.is_quantized or self.large:
            raise CannotRun
        plain = (
            torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            if value.device.type != "cpu"
            else value.detach().clone()
        )
        return plain.requires_grad_(value.is_leaf and value.requires_grad)

    def allow(self, name: str) -> None:
        if name not in _READERS:
            super().allow(name)

    def evaluate(self, node: ast.AST | None, frame: Frame) -> Any:
        if isinstance(node, ast.Attribute):
            thing = value_of(node.value, frame)
            if (id(thing), node.attr) in self._fields:
                return self._fields[id(thing), node.attr]
            if is_tensor(thing) and node.attr in (*ATTRIBUTES, "grad", "requires_grad"):
                return self.keep(getattr(self.copy(thing), node.attr))
        return self.keep(super().evaluate(node, frame))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> list[Any]:
        clause = node.generators[0]
        if len(node.generators) > 1:
            raise CannotRun
        inner, values = dataclasses.replace(frame, names=dict(frame.names)), []
        for item in self.items(clause.iter, frame):
            bind(clause.target, item, inner.names)  # type: ignore[arg-type]
            if all(self.evaluate(test, inner) for test in clause.ifs):
                values.append(self.evaluate(node.elt, inner))
        return values

    _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, frame: Frame) -> dict[Any, Any]:
        pair = ast.Tuple([node.key, node.value], ast.Load())
        return dict(self._listcomp(ast.ListComp(pair, node.generators), frame))

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        if type(value_of(node.value, frame)) is DataLoader:
            raise TypeError("'DataLoader' object is not subscriptable")
        return super()._subscript(node, frame)

    def items(self, node: ast.expr, frame: Frame) -> list[Any]:
        """What a loop goes through."""
        value = value_of(node, frame)
        if issubclass(type(value), (nn.Sequential, nn.ModuleList)):
            return list(named_children(value).values())
        value = self.batches(value) if type(value) is DataLoader else self.evaluate(node, frame)
        if type(value) not in (list, tuple, range, dict, *TENSORS) or len(value) > LONGEST:
            raise CannotRun
        return [self.keep(item) for item in value]

    def batches(self, loader: DataLoader) -> list[Any]:
        """The first batches of a loader and its last, in order, of samples that torch's functions alone make."""
        own = attributes(loader)
        size, dataset = own.get("batch_size"), own.get("dataset")
        plain = own.get("collate_fn") is default_collate and not issubclass(type(dataset), IterableDataset)
        if type(size) is not int or not plain:
            raise CannotRun
        number = self._length(dataset)
        last = number // size if own.get("drop_last") else math.ceil(number / size)
        batches = []
        for k in dict.fromkeys([*range(min(BATCHES, last)), max(last - 1, 0)] if last else []):
            rows = range(k * size, min(number, (k + 1) * size))
            batches.append(self.keep(default_collate([self._sample(dataset, i) for i in rows])))
        return batches

    def _length(self, dataset: Any) -> int:
        if type(dataset) in (list, tuple, *TENSORS):
            return len(dataset)
        if type(dataset) is TensorDataset:
            return len(dataset.tensors[0])
        if type(dataset) is Subset:
            return len(dataset.indices)
        method = class_attribute(dataset, "__len__")
        if type(method) is not FunctionType and self.edit is not None and "def __len__(" in self.edit.new:
            return int(self._new_method(dataset, "__len__"))
        if type(method) is not FunctionType:
            raise TypeError(f"object of type {type(dataset).__name__!r} has no len()")
        return int(self._read(method, (dataset,), {}))

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = self.swap.get(id(module), module)
        if class_attribute(module, "forward") is vars(nn.Module)["forward"]:
            if self.edit is None or "def forward(" not in self.edit.new:
                raise NotImplementedError(f"Module [{type(module).__name__}] is missing the required")
            return self._new_method(module, "forward", *args)
        return super().forward(module, *args, **kwargs)

    def _new_method(self, owner: Any, name: str, *args: Any) -> Any:
        """What a method returns that only the edited text has, in the place of one that the class knows, or in it."""
        from nbdebug.tools.errors.autograd.functions import function_source  # only for what the user wrote

        assert self.edit is not None
        first, last = self.edit.line, self.edit.line + self.edit.new.count("\n")
        known = [function_source(thing) for thing in vars(type(owner)).values() if type(thing) is FunctionType]
        known = [c for c in known if c and c.frame.site.file == self.edit.file and _holds_line(c.node, first)]
        new = [n for n in ast.walk(self.tree or ast.Module([], [])) if isinstance(n, ast.FunctionDef)]
        new = [n for n in new if n.name == name and first <= n.lineno <= last]
        if not known or not new or known[0] is None:
            raise CannotRun
        self.covered = True
        names = dict(zip([a.arg for a in new[0].args.args], (owner, *args)))
        return self._body_value(dataclasses.replace(known[0], node=new[0]), names)

    def _sample(self, dataset: Any, index: int) -> Any:
        if type(dataset) in (list, tuple, *TENSORS):
            return self.copy(dataset)[index]
        if type(dataset) is TensorDataset:
            return tuple(self.copy(tensor)[index] for tensor in dataset.tensors)
        if type(dataset) is Subset:
            return self._sample(dataset.dataset, int(dataset.indices[index]))
        method = class_attribute(dataset, "__getitem__")
        if type(method) is not FunctionType:
            raise CannotRun
        return self.call(method, dataset, index)

    def _dict(self, node: ast.Dict, frame: Frame) -> dict[Any, Any]:
        if any(key is None for key in node.keys):
            raise CannotRun
        return {self.evaluate(k, frame): self.evaluate(v, frame) for k, v in zip(node.keys, node.values)}

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> str:
        texts = []
        for part in node.values:
            value = part.value if isinstance(part, ast.Constant) else self.evaluate(getattr(part, "value", None), frame)
            if type(value) not in (str, int, float, bool):
                raise CannotRun
            texts.append(str(value))
        return "".join(texts)

    # calls

    def call(self, method: FunctionType, owner: Any, argument: Any) -> Any:
        """What a method of the user's returns."""
        return self._read(method, (owner, argument), {})

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        for way in (self._of_graph, self._of_program, self._of_python):
            result = way(node, callee_word(node), getattr(node.func, "value", None), frame)
            if result is not UNKNOWN:
                return result
        return super()._call(node, frame)

    def _of_graph(self, node: ast.Call, name: str, base: ast.expr | None, frame: Frame) -> Any:
        """What works on gradients and random numbers; UNKNOWN for all else, as of the next two."""
        if name == "backward":
            return self._backward(node, frame)
        if name == "manual_seed" and isinstance(base, ast.Call) and value_of(base.func, frame) is torch.Generator:
            return torch.Generator().manual_seed(self.evaluate(node.args[0], frame))
        if name == "set_grad_enabled":
            torch._C._set_grad_enabled(bool(self.evaluate(node.args[0], frame)))
            return None
        if value_of(node.func, frame) is torch.autograd.grad:
            return torch.autograd.grad(*self._items(node.args, frame), **self._keywords(node, frame))
        return UNKNOWN

    def _of_program(self, node: ast.Call, name: str, base: ast.expr | None, frame: Frame) -> Any:
        """Methods of optimizers, schedules and modules, and what makes or copies them."""
        owner: Any = value_of(base, frame) if base is not None else None
        function = value_of(node.func, frame)
        if issubclass(type(owner), torch.optim.Optimizer) or type(owner).__name__ == "GradScaler":
            return self._optimizer_call(owner, name, node, frame)
        if issubclass(type(owner), nn.Module) and name in (*_OF_MODULES, *_NAMED, *_OF_WEIGHTS, "state_dict"):
            return self._module_call(owner, name, node, frame)
        if name == "__init__" and isinstance(base, ast.Call):
            return self._super_init(node, frame)
        if name in _REGISTERS and id(owner) in self._new and self._own.get(id(owner)) is owner:
            return getattr(nn.Module, name)(owner, *self._items(node.args, frame), **self._keywords(node, frame))
        if type(function) is MethodType and issubclass(type(owner), Distribution) and id(owner) in self._own:
            return function(*self._items(node.args, frame), **self._keywords(node, frame))
        if issubclass(type(function), type) and issubclass(function, MADE):
            return self.made(function, self._items(node.args, frame), self._keywords(node, frame))
        if name == "get_last_lr" and isinstance(base, ast.Call):
            plan = self.evaluate(base, frame)
            return list(plan.rates) if type(plan) is _Schedule else UNKNOWN
        if any(function is one for one in (torch.save, copy.deepcopy, torch.utils.data.random_split)):
            args = node.args[: 2 if function is torch.utils.data.random_split else 1]
            return self._of_module(function, self._items(args, frame))
        if issubclass(type(owner), (torch.optim.lr_scheduler.LRScheduler, _Schedule)) and name == "step":
            return self._schedule(owner, [float(value) for value in self._items(node.args, frame)])
        return UNKNOWN

    def _of_python(self, node: ast.Call, name: str, base: ast.expr | None, frame: Frame) -> Any:
        """Functions of Python's and of the user's, methods of lists and dicts."""
        owner, function = value_of(base, frame) if base is not None else None, value_of(node.func, frame)
        if type(function) is _Closure:
            return self._closure_value(function)
        if (
            function is iter
            or function is next
            or function is len
            and type(value_of(node.args[0], frame)) is DataLoader
        ):
            return self._iterated(function, node, frame)
        plain = next((f for f in _PLAIN if f is function), None)
        if plain is not None and not node.keywords:
            result = plain(*self._items(node.args, frame))
            return list(result) if plain in (zip, enumerate) else result
        methods = ("append", "extend", "clear", "values", "items", "setdefault")
        if base is not None and type(owner) in (list, dict) and name in methods:
            result = getattr(self.evaluate(base, frame), name)(*self._items(node.args, frame))
            return list(result) if name in ("values", "items") else result
        inner = unwrap(function)
        if type(inner) is FunctionType and inner is not function and kind_of(inner.__code__) == USER:
            own = (function.__self__,) if type(function) is MethodType else ()
            return self._read(inner, (*own, *self._items(node.args, frame)), self._keywords(node, frame))
        return UNKNOWN

    def _closure_value(self, closure: _Closure) -> Any:
        assert self.run is not None
        inner = dataclasses.replace(closure.frame, names={**closure.frame.names})
        try:
            read_block(self.run, closure.node.body, inner, fresh=True)
        except Returned as done:
            return done.args[0]
        return None

    def made(self, kind: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a class of torch's makes; a module or a data set of the user's, whose `__init__` is read."""
        if kind is DataLoader:
            return self._loader(*args, **kwargs)
        if kind.__module__ == "torch.optim.lr_scheduler":
            groups = self.copy(attributes(args[0]).get("param_groups", [])) if args else []
            if kwargs.get("last_epoch", -1) != -1 and any("initial_lr" not in group for group in groups):
                raise KeyError("param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer")
            return self.keep(_Schedule(kwargs.get("total_steps"), rates=tuple(group["lr"] for group in groups)))
        if module_name(kind).startswith("torch."):
            if not issubclass(kind, nn.Module):
                return self.keep(kind(*args, **kwargs))
            return super().made(kind, args, kwargs)
        own = kind.__setattr__ in (nn.Module.__setattr__, object.__setattr__) and kind.__new__ is object.__new__
        if not issubclass(kind, (nn.Module, Dataset)) or not own:
            raise CannotRun
        thing = self.keep(object.__new__(kind))
        self._new.add(id(thing))
        if type(kind.__init__) is FunctionType:
            self._read(kind.__init__, (thing, *args), kwargs)
        return thing

    def _of_module(self, function: Any, args: list[Any]) -> Any:
        """`deepcopy` and `save` refuse what torch and pickle refuse; `random_split` other lengths than the whole."""
        thing = args[0]
        if function is torch.utils.data.random_split:
            if sum(args[1]) != self._length(thing):
                raise ValueError("Sum of input lengths does not equal the length of the input dataset!")
            ends = [sum(args[1][: i + 1]) for i in range(len(args[1]))]
            return [Subset(thing, range(end - size, end)) for end, size in zip(ends, args[1])]
        parts = [part for _, part in named_modules(thing)] if issubclass(type(thing), nn.Module) else []
        held = {(id(part), name): value for part in parts for name, value in attributes(part).items()}
        held |= {key: value for key, value in self._fields.items() if key[0] in {id(part) for part in parts}}
        values = [*held.values(), thing]
        if function is copy.deepcopy and any(map(has_graph, values)):
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves)")
        if function is torch.save and any(
            type(value) is FunctionType and "<l" in value.__qualname__ for value in values
        ):
            raise AttributeError("Can't pickle local object")
        return thing if function is copy.deepcopy else None

    def _schedule(self, plan: Any, values: list[float]) -> None:
        """A step of a schedule, which may have an end, or watches a value."""
        if type(plan) is torch.optim.lr_scheduler.ReduceLROnPlateau and not values:
            raise TypeError("step() missing 1 required positional argument: 'metrics'")
        own = plan
        if type(plan) is not _Schedule:
            own = self._schedules.setdefault(id(plan), _Schedule(members(plan).get("total_steps")))
        own.steps += 1
        if own.total is not None and own.steps > own.total:
            raise ValueError(f"Tried to step {own.steps} times. The specified number of total steps is {own.total}")

    def _loader(self, dataset: Any, batch_size: int = 1, shuffle: Any = None, **kwargs: Any) -> DataLoader:
        """A loader that stands for the user's: of the same data, in order, without workers."""
        if set(kwargs) - {"num_workers", "drop_last", "pin_memory"}:
            raise CannotRun
        if issubclass(type(dataset), IterableDataset):
            if shuffle:
                raise ValueError("DataLoader with IterableDataset: expected unspecified shuffle option")
        elif not self._length(dataset) and shuffle:
            raise ValueError("num_samples should be a positive integer value")
        loader: Any = DataLoader(range(1), batch_size, drop_last=bool(kwargs.get("drop_last")))  # type: ignore[arg-type]
        loader.__dict__["dataset"] = dataset
        return loader

    def _super_init(self, node: ast.Call, frame: Frame) -> None:
        """`super().__init__(…)` in a module that is made here."""
        thing = frame.names.get("self")
        above = [kind for kind in type(thing).__mro__[1:] if "__init__" in vars(kind)]
        if id(thing) not in self._new:
            raise CannotRun
        if module_name(above[0]).startswith("torch.") or above[0] is object:
            vars(above[0])["__init__"](thing)
        else:
            args = self._items(node.args, frame)
            self._read(vars(above[0])["__init__"], (thing, *args), self._keywords(node, frame))

    def _iterated(self, function: Any, node: ast.Call, frame: Frame) -> Any:
        """`iter`, `next` and `len` of a loader. An iterator of the user's own is at its end: it is what failed."""
        value = value_of(node.args[0], frame)
        if function is len:
            own = attributes(value)
            whole, size = self._length(own["dataset"]), own["batch_size"]
            return whole // size if own["drop_last"] else math.ceil(whole / size)
        if function is iter:
            return iter(self.items(node.args[0], frame))
        if "DataLoaderIter" in type(value).__name__ and id(value) not in self._own:
            raise StopIteration
        value = self.evaluate(node.args[0], frame) if value is UNKNOWN else value
        if type(value) is DataLoader:
            raise TypeError("'DataLoader' object is not an iterator")
        if type(value) is not _ITERATOR or id(value) not in self._own:
            raise CannotRun
        return next(value, *self._items(node.args[1:], frame))

    def _module_call(self, owner: nn.Module, name: str, node: ast.Call, frame: Frame) -> Any:
        if name in _OF_MODULES:
            return [self.copy(value) for _, value in _OF_MODULES[name](owner)]
        if name in _NAMED:
            return [(key, self.copy(value)) for key, value in _OF_MODULES[name.removeprefix("named_")](owner)]
        if name == "state_dict":
            return {key: self.copy(value) for key, value in named_parameters(owner, buffers=True)}
        flag = self.evaluate(node.args[0], frame) if node.args else True
        for _, weight in named_parameters(owner):
            if name == "zero_grad":
                self.copy(weight).grad = None
            elif name == "requires_grad_":
                self.copy(weight).requires_grad_(bool(flag))
        return owner

    def _backward(self, node: ast.Call, frame: Frame) -> None:
        thing = self.evaluate(getattr(node.func, "value", None), frame)
        if type(thing) not in TENSORS:
            raise AttributeError(f"{type(thing).__name__!r} object has no attribute 'backward'")
        self.calls += 1
        torch.Tensor.backward(thing, *self._items(node.args, frame), **self._keywords(node, frame))

    def _optimizer_call(self, owner: Any, name: str, node: ast.Call, frame: Frame) -> Any:
        """`step` moves each copy that has a gradient a little, `zero_grad` clears them; a scaler scales by one."""
        if type(owner).__name__ == "GradScaler":
            scaler = self._scalers.setdefault(id(owner), _Scaler())
            scaler.call(name, ast.unparse(node.args[0]) if node.args else "")
        elif name == "step" and node.args:
            closure = value_of(node.args[0], frame)
            if type(closure) is _Closure:
                self._closure_value(closure)
            return self.evaluate(ast.Call(node.args[0], [], []), frame)
        elif name == "step" and type(owner) is torch.optim.LBFGS:
            raise TypeError("LBFGS.step() missing 1 required positional argument: 'closure'")
        if name == "scale":
            return self.evaluate(node.args[0], frame)
        own = value_of(node.args[0], frame) if type(owner).__name__ == "GradScaler" and node.args else owner
        groups = attributes(own).get("param_groups", ())
        held = {id(weight) for group in groups for weight in group["params"]}
        for first, weight in list(self._copies.values()) if name in ("step", "zero_grad") else ():
            if held and not held & {id(first), id(weight)}:
                continue
            if type(weight) in TENSORS and weight.is_leaf and weight.requires_grad and weight.grad is not None:
                if name == "zero_grad":
                    weight.grad = None
                else:
                    with torch.no_grad():
                        weight.sub_(weight.grad, alpha=1e-3)
        return None

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> Any:
        target = self.evaluate(ast.parse(ast.unparse(node.target), mode="eval").body, frame)
        return self._arithmetic(IN_PLACE, node.op, target, self.evaluate(node.value, frame))

    # statements

    def read_body(self, function: Any, frame: Frame) -> None:
        edit = self.edit
        if edit is not None and self.tree is not None and frame.site.file == edit.file:
            first = first_line(function)
            if first <= edit.line <= (function.end_lineno or 0):
                alike = [n for n in nodes(self.tree) if type(n) is type(function) and first_line(n) == first]
                function = next((n for n in alike if getattr(n, "name", "") == function.name), function)
                self.covered |= edit.line < function.body[0].lineno
        with _grad_mode([callee_word(mark) for mark in function.decorator_list]):
            super().read_body(function, frame)

    def reads(self, node: ast.stmt, frame: Frame) -> bool:
        self.covered |= self._is_edited(node, frame)
        for kinds, read in self.readers.items():
            if isinstance(node, kinds):
                read(node, frame)
                break
        return True

    def _is_edited(self, node: ast.stmt, frame: Frame) -> bool:
        edit = self.edit
        if edit is None or frame.site.file != edit.file:
            return False
        return edit.line <= node.lineno <= edit.line + edit.new.count("\n")

    def _leave(self, node: ast.Break | ast.Continue, frame: Frame) -> None:
        raise LoopEnd(isinstance(node, ast.Break))

    def _return(self, node: ast.Return, frame: Frame) -> None:
        raise Returned(self.evaluate(node.value or ast.Constant(None), frame))

    def _define(self, node: ast.FunctionDef, frame: Frame) -> None:
        names: Any = frame.names if frame.site.function != "<module>" else frame.globals
        if not ast.unparse(node.args):
            names[node.name] = _Closure(node, frame)

    def _effect(self, node: ast.Expr, frame: Frame) -> None:
        try:
            self.evaluate(node.value, frame)
        except CannotRun:
            if "backward" in ast.unparse(node):
                raise

    def _block(self, node: ast.With, frame: Frame) -> None:
        assert self.run is not None
        parts = [item.context_expr for item in node.items]
        parts = [self._chosen(part, frame) if isinstance(part, ast.IfExp) else part for part in parts]
        with _grad_mode([callee_word(part) for part in parts]):
            read_block(self.run, node.body, frame, fresh=True)

    def _chosen(self, node: ast.IfExp, frame: Frame) -> ast.expr:
        return node.body if self.evaluate(node.test, frame) else node.orelse

    def _attempt(self, node: ast.Try, frame: Frame) -> None:
        assert self.run is not None
        try:
            read_block(self.run, node.body, frame, fresh=True)
            read_block(self.run, node.orelse, frame, fresh=True)
        except (CannotRun, End, Returned, LoopEnd):
            raise
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__}
            named = ((h, ast.walk(h.type) if h.type is not None else ()) for h in node.handlers)
            fits = [h for h, at in named if h.type is None or any(getattr(n, "id", "") in kinds for n in at)]
            if not fits:
                raise
            read_block(self.run, fits[0].body, frame, fresh=True)
        read_block(self.run, node.finalbody, frame, fresh=True)

    def _assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, frame: Frame) -> None:
        names: Any = frame.names if frame.site.function != "<module>" else frame.globals
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        try:
            value = self.evaluate(node if isinstance(node, ast.AugAssign) else node.value or ast.Constant(None), frame)
            for target in targets:
                self._store(target, value, frame, names)
        except CannotRun:
            if "backward" in ast.unparse(node) or self._is_edited(node, frame):  # names have old values
                raise
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    known = names.get(part.id, UNKNOWN)
                    if self._own.get(id(known)) is known or has_graph(known):
                        names[part.id] = UNKNOWN

    def _store(self, target: Any, value: Any, frame: Frame, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Attribute):
            thing = value_of(target.value, frame)
            if is_tensor(thing):
                setattr(self.copy(thing), target.attr, value)
            elif id(thing) in self._new and self._own.get(id(thing)) is thing:
                setattr(thing, target.attr, value)
            elif thing is UNKNOWN:
                raise CannotRun
            elif target.attr in (attributes(thing).get("_parameters") or ()) and type(value) is not nn.Parameter:
                raise TypeError(f"cannot assign {value.type()!r} as parameter {target.attr!r}")
            else:
                self._fields[id(thing), target.attr] = value
        elif isinstance(target, ast.Subscript):
            thing, key = (self.evaluate(part, frame) for part in (target.value, target.slice))
            if type(thing) not in (list, dict, *TENSORS):
                raise CannotRun
            thing[key] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and type(value) in (tuple, list):
            for part, item in unpacked(target, list(value)):
                self._store(part, item, frame, names)
        else:
            bind(target, value, names)

    def _branch(self, node: ast.If, frame: Frame) -> None:
        assert self.run is not None
        try:
            test = bool(self.evaluate(node.test, frame))
        except CannotRun:
            line, own = self.line, frame.site.file == self.frame.site.file
            inside = [own and b and b[0].lineno <= line <= (b[-1].end_lineno or 0) for b in (node.body, node.orelse)]
            if not any(inside):
                if "backward" in ast.unparse(node):
                    raise
                return
            test = bool(inside[0])
        read_block(self.run, node.body if test else node.orelse, frame, fresh=True)

    def _loop(self, node: ast.For | ast.While, frame: Frame) -> None:
        """All rounds of a loop; of the one around the failing line the first few."""
        assert self.run is not None
        names: Any = frame.names if frame.site.function != "<module>" else frame.globals
        line = self.line
        around = frame.site.file == self.frame.site.file and node.lineno <= line <= (node.end_lineno or 0)
        rounds: list[Any] = [None] * self.rounds
        known = isinstance(node, ast.While)
        if isinstance(node, ast.For):
            try:
                rounds = self.items(node.iter, frame)
                rounds, known = rounds[: self.rounds] if around else rounds, False
            except CannotRun:
                targets = [t.id for t in ast.walk(node.target) if isinstance(t, ast.Name)]
                if not around or any(names.get(t, UNKNOWN) is UNKNOWN for t in targets):
                    raise
                known = True
        elif not around:
            raise CannotRun
        for item in rounds:
            if isinstance(node, ast.For) and not known:
                bind(node.target, item, names)
            try:
                read_block(self.run, node.body, frame, fresh=True)
            except LoopEnd as end:
                if end.args[0]:
                    break


def _grad_mode(words: list[str]) -> AbstractContextManager[Any]:
    """What the decorators or blocks of these names do to gradients."""
    modes = [word for word in words if word in GRAD_MODES]
    if "inference_mode" in modes:
        return torch.inference_mode()
    return torch.set_grad_enabled(GRAD_MODES[modes[0]] if modes else torch.is_grad_enabled())


def _holds_line(node: Any, line: int) -> bool:
    return bool(first_line(node) <= line <= (node.end_lineno or 0))


def has_graph(value: Any) -> bool:
    items = value if type(value) in (list, tuple) else [value]
    return any(is_tensor(item) and item.grad_fn is not None for item in items)
