"""What a run is at one moment: the weights, gradients, optimizers, schedulers, averages, samplers and generators among
the variables of its frames and in its trainer, and how each is put back into another run at the same moment.

The moment is the first forward of training after so many backwards. A run is observed in a copy of this process.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from nbdebug.observe.modules import unsaved_tensors
from nbdebug.observe.snapshot import random_states, set_random_states
from nbdebug.observe.tensors import fingerprint, tensors_in
from nbdebug.observe.variables import attributes, children
from nbdebug.text import module_name
from nbdebug.tools.checkpoint.rules import LINES
from nbdebug.trainers import bare, held

AVERAGE = re.compile(r"ema|average|shadow|swa|slow|teacher|target", re.IGNORECASE)  # averaged weights
MOST = 100  # items of a list or dict that are looked at; a longer one is data
PLAIN = (int, float, str, bool, bytes, type(None))
LIBRARIES = ("transformers.", "accelerate.", "pytorch_lightning.", "lightning.")
OTHERS = ("torch.", "nbdebug.", "numpy.", "importlib", "contextlib", *LIBRARIES)
"""Beginnings of the modules whose frames hold no variables of the user's."""
Put = tuple[str, str]  # the kind and the name of a state


@dataclasses.dataclass
class RunState:
    """parts: (kind, name) → state, also "early", "late", "input" and "mode"; forms: how each is read and set;
    orders: of each optimizer the names of its parameters; plain: the other variables, of plain values. kept: (file,
    line, model) → the weights when its `state_dict()` was taken there, of those that were kept, uncopied, through a
    later backward."""

    parts: dict[Put, Any] = dataclasses.field(default_factory=dict)
    forms: dict[Put, str] = dataclasses.field(default_factory=dict)
    orders: dict[Put, list[str]] = dataclasses.field(default_factory=dict)
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    kept: dict[tuple[str, int, int], Any] = dataclasses.field(default_factory=dict)


class ObservedRun:
    """Runs a function of the user's with the moment in sight. at: how many backwards come before it.

    take: note the state at the moment. put: states to put back there, "early" ones after each loading. rows: of each
    forward of training, a number that stands for its tensors; losses: what each backward began with. trainer: of a
    library, which has parts that no frame shows. evaluates: the resumed run trains no more: the moment is a forward of
    any kind, and the inputs from there on are a state as well."""

    def __init__(
        self, at: int = 0, take: bool = False, put: Mapping[Put, Any] | None = None, evaluates: bool = False
    ) -> None:
        self.at, self.take, self.put, self.evaluates = at, take, dict(put or {}), evaluates
        self.rows, self.losses, self.state, self.done = list[Any](), list[Any](), RunState(), False
        self.trainer: Any = None
        self._models: dict[int, nn.Module] = {}
        self._depth = 0
        self._stop: FrameType | None = None

    def _random(self, when: str) -> dict[str, Any]:
        return {name: state for (kind, name), state in self.put.items() if kind == when}

    def run(self, function: Callable[[ObservedRun], Any]) -> dict[str, Any]:
        """{"values", "losses", "rows", "weights", "state"}. It changes torch for good: only in a copy."""
        self._watch()
        self._stop = sys._getframe()
        values = function(self)
        states = [model.state_dict() for model in self._models.values()]
        weights = [{n: _mark([v]) for n, v in state.items() if isinstance(v, torch.Tensor)} for state in states]
        return {
            "values": plain(values), "losses": self.losses, "rows": self.rows, "weights": weights, "state": self.state
        }  # fmt: skip

    def _watch(self) -> None:
        backward, call, state_dict = torch.autograd.backward, nn.Module.__call__, nn.Module.state_dict
        taken: dict[tuple[str, int, int], tuple[Any, Any]] = {}

        def counted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            backward(tensors, *args, **kwargs)
            self.state.kept |= {place: copied for place, (held, copied) in taken.items() if held() is not None}
            self.losses.append(plain(tensors.detach() if isinstance(tensors, torch.Tensor) else list(tensors)))

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                trains = self._depth == 1 and module.training and torch.is_grad_enabled()
                trains = trains and any(p.requires_grad for p in module.parameters())
                if trains:
                    self._models.setdefault(id(module), module)
                    self.rows.append(_mark((*args, *kwargs.values())))
                now = len(self.losses) >= self.at and self._depth == 1 and (bool(trains) or self.evaluates)
                if now and not self.done:
                    self.done = True
                    self._moment(sys._getframe(1))
                    self._mode(module)
                return call(module, *(self._input(args) if now and self.evaluates else args), **kwargs)
            finally:
                self._depth -= 1

        def kept(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            state, frame = state_dict(module, *args, **kwargs), sys._getframe(1)
            users = not str(frame.f_globals.get("__name__", "nbdebug.")).startswith(OTHERS)
            for tensor in list(state.values())[:1] if users and not (args or kwargs) else ():
                place = frame.f_code.co_filename, frame.f_lineno, tensor.data_ptr()
                taken[place] = weakref.ref(tensor), copy.deepcopy(state)
            return state

        torch.autograd.backward = counted
        if self.take:
            nn.Module.state_dict = kept  # type: ignore[method-assign,assignment]
        nn.Module.__call__ = called  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._after_step)
        if self._random("early") or self._random("kept"):
            self._after(torch, "load")
            for owner in (nn.Module, torch.optim.Optimizer):
                self._after(owner, "load_state_dict")

    def _mode(self, module: nn.Module) -> None:
        """Whether each part of the model that the moment is a forward of trains: noted, or set."""
        if self.take:
            self.state.parts["mode", ""] = {name: part.training for name, part in module.named_modules()}
        for name, part in module.named_modules():
            part.training = self.put.get(("mode", ""), {}).get(name, part.training)

    def _input(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a forward, which are noted; or those that are put in their place, of the same shapes."""
        seen = self.state.parts.setdefault(("input", ""), []) if self.take else []
        seen += [tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, args)]
        other = self.put.get(("input", ""), [])[:1]
        del self.put.get(("input", ""), [])[:1]
        return tuple(other[0]) if other and _shapes(other[0]) == _shapes(args) else args

    def _after(self, owner: Any, name: str) -> None:
        plainly = getattr(owner, name)

        def loaded(*args: Any, **kwargs: Any) -> Any:
            result = plainly(*args, **kwargs)
            shapes = _shapes(args[0].state_dict()) if args and isinstance(args[0], nn.Module) else None
            for place, state in self._random("kept").items():
                if _shapes(state) == shapes:
                    plainly(args[0], self.put.pop(("kept", place)))
                    break
            if not self.done:  # not what is put back
                set_random_states(self._random("early"))
            return result

        setattr(owner, name, loaded)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.take and len(self.losses) <= self.at:
            self.state.parts = {("early", name): state for name, state in random_states().items()}

    def _moment(self, frame: FrameType) -> None:
        things = dict(_things(frame, self._stop))
        for kind in ("model", "optimizer", "scheduler", "scaler"):
            things |= held(kind, {"trainer": self.trainer})
        parts = kinds(things)
        if self.take:
            late = {("late", name): state for name, state in random_states().items()}
            self.state.parts |= late
            for put, thing in parts.items():
                with contextlib.suppress(Exception):  # what can't be copied is not among what is put back
                    if (state := pickle.loads(pickle.dumps(read(thing, put[0])))) is not None:
                        self.state.parts[put] = state
            self.state.forms = {put: form(thing) for put, thing in parts.items()}
            self.state.counters = {name: thing for name, thing in things.items() if type(thing) is int}
            self.state.plain = {n: v for n, v in things.items() if _is_small(v)}
        names = {id(p): n for m in things.values() if isinstance(m, nn.Module) for n, p in m.named_parameters()}
        for put, thing in parts.items():
            if put[0] == "optimizer":
                self.state.orders[put] = [names.get(id(p), "") for g in thing.param_groups for p in g["params"]]
        for put in self.put.keys() & parts.keys():
            state = in_order(self.put[put], self.put.get(("order", put[1])), self.state.orders.get(put))
            write(parts[put], state, put[0])
        set_random_states(self._random("late"))


def in_order(state: Any, there: list[str] | None, here: list[str] | None) -> Any:
    """The state of an optimizer for one that has the same parameters in another order. there, here: their names."""
    if not there or not here or there == here or sorted(there) != sorted(here) or len({*there}) < len(there):
        return state
    places = [there.index(name) for name in here]
    return {**state, "state": {i: state["state"][at] for i, at in enumerate(places) if at in state["state"]}}


def _shapes(args: Any) -> list[Any]:
    return [tensor.shape for tensor in tensors_in(args)]


def _is_small(value: Any) -> bool:
    """Whether it is a value that may have been made from other data: a vocabulary, a mean."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= MOST and value.grad_fn is None
    return isinstance(value, (dict, list, tuple, float)) and bool(value) and _is_plain(value)


def plain(value: Any) -> Any:
    """Numbers, for comparison: tensors as lists."""
    return tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, value)


def _mark(args: Any) -> tuple[Any, ...]:
    """What is the same for the same tensors."""
    return tuple(map(fingerprint, tensors_in(args)))


def _things(frame: FrameType | None, stop: FrameType | None) -> Iterator[tuple[str, Any]]:
    """(name, thing) of the variables in the frames of the user's code, and of the attributes of the user's objects."""
    known: set[str] = set()
    while frame is not None and frame is not stop:
        if not str(frame.f_globals.get("__name__", "")).startswith(OTHERS):
            for name, thing in list(frame.f_locals.items()):
                if name not in known and not name.startswith("_"):
                    known.add(name)
                    plain = type(thing) in (dict, list, tuple, SimpleNamespace) and not _of_tensors(thing)
                    inside = list(children(name, thing))[:MOST] if plain and not _is_users(thing) else []
                    for key, part in [(name, thing), *inside]:
                        yield key, bare(part)
                        members = attributes(part).items() if _is_users(part) else ()
                        yield from ((f"{key}.{inner}", bare(value)) for inner, value in members)
        frame = frame.f_back


def _is_users(thing: Any) -> bool:
    foreign = ("torch", "builtins", "numpy", "types.", *LIBRARIES)
    known = isinstance(thing, (nn.Module, type)) or f"{type(thing).__module__}.".startswith(foreign)
    return not known and hasattr(thing, "__dict__")


def kinds(things: Mapping[str, Any]) -> dict[Put, Any]:
    """(kind, name) → thing of all that has a state. Each object once."""
    optimizers = [thing for thing in things.values() if isinstance(thing, torch.optim.Optimizer)]
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    found: dict[Put, Any] = {}
    seen: set[int] = set()
    for name, thing in things.items():
        kind = _kind(name, thing, trained) if id(thing) not in seen else ""
        if kind:
            seen.add(id(thing))
            found[kind, name] = thing
            if kind == "model":
                found["gradients", name] = thing
            if isinstance(thing, nn.Module):
                found["attribute", name] = thing
    return found


def _kind(name: str, thing: Any, trained: set[int]) -> str:
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, nn.Module):
        own = not trained or any(id(p) in trained for p in thing.parameters())
        own = own and not hasattr(thing, "n_averaged")
        return "model" if own else "ema"
    if "generator" in form(thing):
        return "generator"
    for kind, mark in (("scheduler", "last_epoch"), ("scaler", "get_scale")):
        if hasattr(thing, "state_dict") and hasattr(thing, mark):
            return kind
    if _of_tensors(thing) and (isinstance(thing, dict) or AVERAGE.search(name)):
        return "ema"
    if not _is_users(thing):
        return ""
    inside = any(map(_of_tensors, attributes(thing).values()))
    return "ema" if inside and AVERAGE.search(f"{name}.{type(thing).__name__}") else "sampler"


def _of_tensors(thing: Any) -> bool:
    """Whether this is a list or dict of tensors and nothing else."""
    values = list(thing.values()) if isinstance(thing, dict) else thing if isinstance(thing, list) else []
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def form(thing: Any) -> str:
    """How the state of a thing is read and set: a key of LINES, or "values" for the plain attributes of an object."""
    if isinstance(thing, random.Random):
        return "Python generator"
    if isinstance(thing, torch.Generator) or module_name(type(thing)).startswith("numpy.random"):
        return "numpy generator" if hasattr(thing, "bit_generator") else "generator"
    return "object" if hasattr(thing, "state_dict") else "value" if isinstance(thing, (dict, list)) else "values"


def read(thing: Any, kind: str = "") -> Any:
    """The state of a thing, by the very line that a fix gives; None where there are no gradients or attributes."""
    how = form(thing)
    if kind == "gradients":
        grads = {name: p.grad for name, p in thing.named_parameters() if p.grad is not None}
        return grads if any(bool(grad.any()) for grad in grads.values()) else None
    if kind == "attribute":
        return dict(unsaved_tensors(thing)) or None
    if how == "values":
        return {name: value for name, value in attributes(thing).items() if _is_plain(value)}
    return eval(LINES[how][0].format(thing="thing"), {"thing": thing})


def write(thing: Any, state: Any, kind: str = "") -> None:
    """Set it, by the line that a fix gives. The tensors of a dict or list are filled."""
    how = form(thing)
    if kind == "gradients":
        for name, parameter in thing.named_parameters():
            parameter.grad = state.get(name)
    elif kind == "attribute":
        for path, value in state.items():
            owner, _, name = path.rpartition(".")
            part = thing.get_submodule(owner)
            (part._buffers if name in part._buffers else vars(part))[name] = value
    elif how == "values":
        vars(thing).update(copy.deepcopy(state))
    elif how == "value":
        for key in thing if isinstance(thing, dict) else range(len(thing)):
            thing[key].data.copy_(state[key])
    else:
        exec(LINES[how][1].format(thing="thing", saved="state"), {"thing": thing, "state": state})
    rates = (state.get("_last_lr") or []) if kind == "scheduler" else []
    for group, rate in zip(thing.optimizer.param_groups if rates else (), rates):
        group["lr"] = rate


def _is_plain(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, set, dict, deque)):
        return all(map(_is_plain, values))
    return isinstance(value, (*PLAIN, torch.Tensor))
