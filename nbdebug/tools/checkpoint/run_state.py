"""What a run is at one moment: the weights, gradients, optimizers, schedulers, averages, samplers and generators among
the variables of its frames and in its trainer, and how each is put back into another run at the same moment.

The moment is the first forward of training after so many backwards. A run is observed in a copy of this process.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from nbdebug.observe.variables import attributes, children
from nbdebug.trainers import TYPES, bare, held

AVERAGE = re.compile(r"ema|average|shadow|swa|slow|teacher|target", re.IGNORECASE)
"""Names of averaged weights."""
MOST = 100
"""Items of a list or dict that are looked at; a longer one is data."""
PLAIN = (int, float, str, bool, bytes, type(None))
LIBRARIES = ("transformers.", "accelerate.", "pytorch_lightning.", "lightning.")
OTHERS = ("torch.", "nbdebug.", "numpy.", "importlib", "contextlib", *LIBRARIES)
"""Beginnings of the modules whose frames hold no variables of the user's."""


class RunState:
    """What was taken at the moment. parts: (kind, name) → state; counters: whole numbers among the variables; random:
    states of the global generators at the moment, and `earlier` those after the update before it."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str], Any] = {}
        self.counters: dict[str, int] = {}
        self.random: dict[str, Any] = {}
        self.earlier: dict[str, Any] = {}


class ObservedRun:
    """Runs a function of the user's with the moment in sight. at: how many backwards come before it.

    take: note the state at the moment. put: (kind, name) → state to put back there; early, late: states of the global
    generators to set after each loading, or at the moment. rows: of each forward of training, a number that stands for
    its tensors; losses: what each backward began with. trainer: of a library, which has parts that no frame shows."""

    def __init__(self, at: int = 0, take: bool = False, put: Mapping[tuple[str, str], Any] | None = None) -> None:
        self.at, self.take, self.put = at, take, dict(put or {})
        self.early: dict[str, Any] = {}
        self.late: dict[str, Any] = {}
        self.rows, self.losses, self.state, self.done = list[int](), list[Any](), RunState(), False
        self.trainer: Any = None
        self._models: dict[int, nn.Module] = {}
        self._depth = 0
        self._stop: FrameType | None = None

    def run(self, function: Callable[[ObservedRun], Any]) -> dict[str, Any]:
        """{"values", "losses", "rows", "weights", "state"}; changes functions of torch and never puts them back: only
        in a copy of the process."""
        self._watch()
        self._stop = sys._getframe()
        values = function(self)
        states = [model.state_dict() for model in self._models.values()]
        weights = [{n: _mark([v]) for n, v in state.items() if isinstance(v, torch.Tensor)} for state in states]
        return {
            "values": plain(values), "losses": self.losses, "rows": self.rows, "weights": weights, "state": self.state
        }  # fmt: skip

    def _watch(self) -> None:
        backward, call = torch.autograd.backward, nn.Module.__call__

        def counted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            backward(tensors, *args, **kwargs)
            self.losses.append(plain(tensors.detach() if isinstance(tensors, torch.Tensor) else list(tensors)))

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                if self._depth == 1 and module.training and torch.is_grad_enabled():
                    self._before_forward(module, (*args, *kwargs.values()), sys._getframe(1))
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        torch.autograd.backward = counted
        nn.Module.__call__ = called  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._after_step)
        for owner, name in (
            [(torch, "load"), (nn.Module, "load_state_dict"), (torch.optim.Optimizer, "load_state_dict")]
            if self.early
            else []
        ):
            self._after(owner, name)

    def _after(self, owner: Any, name: str) -> None:
        plainly = getattr(owner, name)

        def loaded(*args: Any, **kwargs: Any) -> Any:
            result = plainly(*args, **kwargs)
            if not self.done:  # not what is put back
                set_random(self.early)
            return result

        setattr(owner, name, loaded)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], frame: FrameType) -> None:
        if any(p.requires_grad for p in module.parameters()):
            self._models.setdefault(id(module), module)
            self.rows.append(_mark(args))
            if len(self.losses) >= self.at and not self.done:
                self.done = True
                self._moment(frame)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.take and len(self.losses) <= self.at:
            self.state.earlier = get_random()

    def _moment(self, frame: FrameType) -> None:
        things = dict(_things(frame, self._stop))
        names = {} if self.trainer is None else {"trainer": self.trainer}
        things |= {name: thing for kind in TYPES if kind != "loader" for name, thing in held(kind, names).items()}
        parts = kinds(things)
        if self.take:
            self.state.random = get_random()
            self.state.counters = {name: thing for name, thing in things.items() if type(thing) is int}
            states = {key: _taken(key[0], thing) for key, thing in parts.items()}
            self.state.parts = {key: state for key, state in states.items() if state is not None}
        for key, thing in parts.items() if self.put else ():
            if key in self.put:
                put_back(key[0], thing, self.put[key])
        if self.late:
            set_random(self.late)


def plain(value: Any) -> Any:
    """Numbers, for comparison: tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inside) for inside in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _mark(args: Any) -> int:
    """A number that is the same for the same tensors."""
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    flat = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in tensors if t.numel()]
    return hash((tuple(tuple(t.shape) for t in tensors), tuple(t.numpy().tobytes() for t in flat)))


def _things(frame: FrameType | None, stop: FrameType | None) -> Iterator[tuple[str, Any]]:
    """(name, thing) of the variables in the frames of the user's code, and of the attributes of the user's objects."""
    known: set[str] = set()
    while frame is not None and frame is not stop:
        if not str(frame.f_globals.get("__name__", "")).startswith(OTHERS):
            for name, thing in list(frame.f_locals.items()):
                if name not in known and not name.startswith("_"):
                    known.add(name)
                    yield name, bare(thing)
                    if _is_users(thing):
                        yield from ((f"{name}.{key}", bare(part)) for key, part in attributes(thing).items())
                    elif type(thing) in (dict, list, tuple, SimpleNamespace) and _tensors(thing) is None:
                        yield from ((key, bare(part)) for key, part in list(children(name, thing))[:MOST])
        frame = frame.f_back


def _is_users(thing: Any) -> bool:
    kind = type(thing)
    return (
        not isinstance(thing, (nn.Module, type))
        and not f"{kind.__module__}.".startswith(("torch", "builtins", "numpy", "types.", *LIBRARIES))
        and hasattr(thing, "__dict__")
    )


def kinds(things: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """(kind, name) → thing of all that has a state. Each object once."""
    optimizers = [thing for thing in things.values() if isinstance(thing, torch.optim.Optimizer)]
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    found: dict[tuple[str, str], Any] = {}
    seen: set[int] = set()
    for name, thing in things.items():
        kind = _kind(name, thing, trained) if id(thing) not in seen else ""
        if kind:
            seen.add(id(thing))
            found[kind, name] = thing
            if kind == "model":
                found["gradients", name] = thing
    return found


def _kind(name: str, thing: Any, trained: set[int]) -> str:
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, nn.Module):
        own = any(id(p) in trained for p in thing.parameters()) and not hasattr(thing, "n_averaged")
        return "model" if own else "ema"
    if isinstance(thing, (torch.Generator, random.Random)) or type(thing).__module__.startswith("numpy.random"):
        return "generator"
    if hasattr(thing, "state_dict") and hasattr(thing, "last_epoch"):
        return "scheduler"
    if hasattr(thing, "get_scale") and hasattr(thing, "state_dict"):
        return "scaler"
    tensors = _tensors(thing)
    if tensors is not None and (isinstance(thing, dict) or AVERAGE.search(name)):
        return "ema"
    if _is_users(thing):
        inside = any(_tensors(value) is not None for value in attributes(thing).values())
        return "ema" if inside and AVERAGE.search(f"{name}.{type(thing).__name__}") else "sampler"
    return ""


def _tensors(thing: Any) -> list[Any] | None:
    """The tensors of a list or dict of nothing else."""
    values = list(thing.values()) if isinstance(thing, dict) else thing if isinstance(thing, list) else []
    return values if values and all(isinstance(value, torch.Tensor) for value in values) else None


def _taken(kind: str, thing: Any) -> Any:
    """The state of a thing, fit for another process; None where it has none."""
    try:
        if kind == "generator":
            read = getattr(thing, "get_state", None) or getattr(thing, "getstate", None)
            state = read() if read is not None else thing.bit_generator.state
        elif kind == "gradients":
            state = {
                n: p.grad for n, p in thing.named_parameters() if p.grad is not None and bool(p.grad.any())
            } or None
        elif kind == "ema" and isinstance(thing, (dict, list)):
            state = thing
        elif hasattr(thing, "state_dict"):
            state = thing.state_dict()
        else:
            state = {n: v for n, v in attributes(thing).items() if _is_plain(v)}
        return pickle.loads(pickle.dumps(copy.deepcopy(state)))
    except Exception:  # an object of the user's that can't be copied: it is not among what is put back
        return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return isinstance(value, (*PLAIN, torch.Tensor))


def put_back(kind: str, thing: Any, state: Any) -> None:
    """Give a thing the state that it has in the other run."""
    write = getattr(thing, "set_state", None) or getattr(thing, "setstate", None)
    if kind == "generator" and write is not None:
        write(state)
    elif kind == "generator":
        thing.bit_generator.state = state
    elif kind == "gradients":
        for name, parameter in thing.named_parameters():
            parameter.grad = state.get(name)
    elif isinstance(thing, (dict, list)):
        for key in thing if isinstance(thing, dict) else range(len(thing)):
            with torch.no_grad():
                thing[key].copy_(state[key])
    elif hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)
        rates = (state.get("_last_lr") or []) if kind == "scheduler" else []
        for group, rate in zip(thing.optimizer.param_groups if rates else (), rates):
            group["lr"] = rate
    else:
        vars(thing).update(copy.deepcopy(state))


def get_random() -> dict[str, Any]:
    """The states of the global generators of torch, its cards in use, Python and numpy: tensors and plain values."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "Python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random(states: Mapping[str, Any]) -> None:
    """Set those that are given; those of cards where there are as many."""
    for name, state in states.items():
        if name == "numpy":
            importlib.import_module("numpy").random.set_state(state)
        elif name == "Python":
            random.setstate(state)
        elif name == "torch":
            torch.set_rng_state(state)
        elif torch.cuda.device_count() == len(state):
            torch.cuda.set_rng_state_all(state)
