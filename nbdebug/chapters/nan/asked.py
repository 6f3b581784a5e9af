"""What was asked: is the step something to call, which models and optimizers does it use?

Wrong arguments get an error that quotes what was given and says what to write instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.subject import Subject, found

STRATEGIES = ("auto", "trace", "replay", "bisect")


@dataclasses.dataclass
class Asked:
    """A step, and what it uses. named: the user named the models.
    others: gradient scalers and schedulers near the step."""

    step: Callable[[], Any]
    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    named: bool
    others: list[Any]

    @classmethod
    def about(cls, step: Any, model: Any, optimizer: Any) -> Asked:
        """Raises TypeError or ValueError for what is no model or no optimizer."""
        near = names_near(step)
        models = _models(model, near)
        check_models(models)
        return cls(step, models, _optimizers(optimizer, near), model is not None, _others(near))

    @property
    def subject(self) -> str:
        return str(Subject(self.models, self.optimizers, self.named))

    @property
    def scaler(self) -> bool:
        return any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in self.others)

    @property
    def on_cpu(self) -> bool:
        """Whether looking at values makes no device wait."""
        tensors = [
            *(p for m in self.models.values() for p in m.parameters()),
            *(p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]),
        ]
        return all(t.device.type == "cpu" for t in tensors)


def check(step: Any, max_steps: Any, strategy: Any) -> None:
    """Raises TypeError or ValueError where the arguments of `nan_trace` make no sense."""
    if not callable(step):
        made = isinstance(step, torch.Tensor)
        hint = " It looks like the result of a step: pass the function itself." if made else ""
        raise TypeError(
            "nan_trace takes a step to call, a function of no arguments such as lambda: train_step(batch); "
            f"got {_short(step)}.{hint}"
        )
    if isinstance(step, nn.Module):
        raise TypeError(
            f"nan_trace takes a step to call, not a model; got {type(step).__name__}. "
            "Write nan_trace(lambda: loss_fn(model(x), y).backward(), model=model)."
        )
    with contextlib.suppress(ValueError):  # builtins without a signature are called as they are
        needed = [
            p.name
            for p in inspect.signature(step).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if needed:
            raise TypeError(
                f"The step takes no arguments, but {_short(step)} wants {', '.join(needed)}. "
                f"Write nan_trace(lambda: {getattr(step, '__name__', 'step')}({', '.join(needed)}))."
            )
    if not isinstance(max_steps, int) or isinstance(max_steps, bool) or max_steps < 1:
        raise ValueError(f"max_steps is a whole number of at least 1; got {max_steps!r}.")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}; got {strategy!r}.")


def check_models(models: Mapping[str, Any]) -> None:
    """Raises TypeError for what is no model, ValueError for a model without values."""
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"model takes a torch.nn.Module, or a dict or list of them; {name!r} is {_short(model)}.")
        meta = next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)
        if meta is not None:
            raise ValueError(
                f"The parameter {meta!r} is on the meta device: it has no values to look at. "
                "Move the model with model.to_empty(device=...) and load its weights first."
            )


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else f"a tensor of shape {tuple(value.shape)}"
    return text if len(text) < 80 else f"{type(value).__name__} {text[:60]}…"


def _models(given: Any, near: dict[str, Any]) -> dict[str, nn.Module]:
    if given is None:
        return found("model", near)
    if isinstance(given, Mapping) and not isinstance(given, nn.Module):
        return dict(given)
    if isinstance(given, (list, tuple)):
        return {_known_as(m, near) or f"model {i}": m for i, m in enumerate(given)}
    return {_known_as(given, near) or "model": given}


def _optimizers(given: Any, near: dict[str, Any]) -> dict[str, torch.optim.Optimizer]:
    if given is None:
        return found("optimizer", near)
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else [given]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer takes a torch.optim.Optimizer, or a list of them; got {_short(optimizer)}.")
    return {_known_as(o, near) or f"optimizer {i}": o for i, o in enumerate(several)}


def _known_as(thing: Any, near: dict[str, Any]) -> str | None:
    return next((name for name, value in near.items() if value is thing and not name.startswith("_")), None)


def _others(near: dict[str, Any]) -> list[Any]:
    """What else a step may change: gradient scalers and schedulers among the variables that it uses."""
    kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    return list({id(v): v for v in near.values() if isinstance(v, kinds)}.values())


def names_near(step: Any) -> dict[str, Any]:
    """The variables that a step uses: its closure, the globals that it names, its own object, bound arguments."""
    if isinstance(step, functools.partial):
        return {**names_near(step.func), **step.keywords, **{f"argument {i}": a for i, a in enumerate(step.args)}}
    owner = getattr(step, "__self__", None)
    near: dict[str, Any] = {"self": owner} | dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    function = inspect.unwrap(getattr(step, "__func__", step))
    code = getattr(function, "__code__", None)
    if code is None:
        return near
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            near[name] = cell.cell_contents
    used = {n for c in _codes(code) for n in c.co_names}
    near |= {name: function.__globals__[name] for name in used if name in function.__globals__}
    return near | _inside(near)


def _inside(near: dict[str, Any]) -> dict[str, Any]:
    """Models and optimizers that a plain object or dict near the step holds (a trainer, a namespace),
    and of functions it calls."""
    found_inside: dict[str, Any] = {}
    wanted = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    for name, value in list(near.items()):
        if isinstance(value, wanted) or inspect.ismodule(value) or isinstance(value, type):
            continue
        if inspect.isfunction(value) and value.__closure__ is not None:
            members = dict(zip(value.__code__.co_freevars, (_content(c) for c in value.__closure__), strict=False))
        elif inspect.isfunction(value):
            members = {n: value.__globals__.get(n) for n in value.__code__.co_names}
        else:
            members = value if type(value) is dict else getattr(value, "__dict__", {})
        for key, member in list(members.items())[:200]:
            if isinstance(member, wanted):
                found_inside.setdefault(str(key) if inspect.isfunction(value) else f"{name}.{key}", member)
    return found_inside


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)
