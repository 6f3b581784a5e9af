"""What a public function was given: models, optimizers, a scaler, a step, a loss; checked once, in one wording.

Each error names the call, quotes the value, and says what to write. Models and optimizers are known by the user's own
names where the user has such, as in `nbdebug.arguments`, which holds what needs no torch.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.sources import codes_of
from nbdebug.observe.variables import attributes, children, closure_variables, key_text


def quoted(value: Any) -> str:
    """A value as an error quotes it: 'net', "a tensor of shape (2, 3)", the beginning of a long one with its type."""
    kind = type(value)
    try:
        text = f"a tensor of shape {tuple(value.shape)}" if issubclass(kind, torch.Tensor) else repr(value)
    except Exception:  # of the value's own __repr__
        return f"an object of type {kind.__name__}"
    return text if len(text) < 80 else f"{type(value).__name__} {text[:60]}…"


def wrong_type(call: str, name: str, wanted: str, value: Any) -> TypeError:
    """The error for an argument of another kind. call: as the user writes it, "fit(model, batch, loss_fn)"."""
    return TypeError(f"{call}: {name} must be {wanted}; got {quoted(value)}.")


# -- models and optimizers --------------------------------------------------------------------------------------------


def check_model(model: Any, call: str) -> None:
    """Raises TypeError for what is no single model."""
    if not isinstance(model, nn.Module):
        raise wrong_type(call, "model", "a torch.nn.Module", model)


def models_of(models: Any, call: str, names: Mapping[str, Any] | None = None) -> dict[str, nn.Module]:
    """The models by name; none where the step calls no module. Raises TypeError for what is no model."""
    return _by_name(models, call, "model", nn.Module, "a torch.nn.Module", names or {})


def optimizers_of(
    optimizers: Any, call: str, names: Mapping[str, Any] | None = None, *, required: bool = False
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name. Raises TypeError for what is no optimizer, ValueError where one is required and none is
    given."""
    found = _by_name(optimizers, call, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer", names or {})
    if required and not found:
        raise ValueError(f"{call}: optimizer must be a torch.optim.Optimizer, or a list or dict of them; got none.")
    return found


def check_scaler(scaler: Any, call: str) -> None:
    """Raises TypeError for what is no GradScaler."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise wrong_type(call, "scaler", "a torch.amp.GradScaler", scaler)


def _by_name(given: Any, call: str, word: str, kind: type, wanted: str, names: Mapping[str, Any]) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping) and not isinstance(given, kind):
        things = {str(name): thing for name, thing in given.items()}
    elif isinstance(given, (list, tuple)):
        things = {_users_name(thing, names) or f"{word} {i}": thing for i, thing in enumerate(given)}
    else:
        things = {_users_name(given, names) or word: given}
    found = dict[str, Any]()
    for name, thing in things.items():
        parts = {name: thing} if isinstance(thing, kind) else _parts(name, thing, kind)
        if not parts:
            word = f"{word} {name!r}" if isinstance(given, (Mapping, list, tuple)) else word
            raise wrong_type(call, word, f"{wanted}, or a list or dict of them", thing)
        found |= parts
    return found


def _parts(name: str, thing: Any, kind: type) -> dict[str, Any]:
    """Those that an object of the user's own holds, itself or in a list or dict, by expression."""
    inner = {} if isinstance(thing, (types.FunctionType, types.MethodType)) else dict(children(name, thing))
    inner |= {n: part for each, value in inner.items() for n, part in children(each, value)}
    return {n: part for n, part in inner.items() if isinstance(part, kind)}


def _users_name(thing: Any, names: Mapping[str, Any]) -> str | None:
    return next((name for name, value in names.items() if value is thing and not name.startswith("_")), None)


# -- a step -----------------------------------------------------------------------------------------------------------


def check_step(step: Any, tool: str) -> None:
    """Raises TypeError for what can't be called without arguments. tool: the public function, "nan_trace"."""
    if isinstance(step, nn.Module):
        raise TypeError(
            f"{tool} needs a step to call, not a model; got {type(step).__name__}. "
            f"Write {tool}(lambda: loss_fn(model(x), y).backward(), model=model)."
        )
    if not callable(step):
        hint = " It looks like the result of a step: pass the function itself." * isinstance(step, torch.Tensor)
        raise TypeError(
            f"{tool} needs a step to call, a function without arguments such as lambda: train_step(batch); "
            f"got {quoted(step)}.{hint}"
        )
    if missing := needed(step):
        raise TypeError(
            f"{tool} calls the step without arguments, but {quoted(step)} needs {', '.join(missing)}. "
            f"Write {tool}(lambda: {getattr(step, '__name__', 'step')}({', '.join(missing)}))."
        )


def needed(function: Any) -> list[str]:
    """The arguments that a call must give; none where the signature is not known, as of some builtins."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def check_count(count: Any, name: str) -> None:
    """Raises ValueError for what is no whole number from 1 on."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}.")


def names_used_by(step: Any) -> dict[str, Any]:
    """The variables that a step uses: its closure, the globals that it names, its own object, bound arguments."""
    if isinstance(step, functools.partial):
        return {**names_used_by(step.func), **step.keywords, **{f"argument {i}": a for i, a in enumerate(step.args)}}
    owner = getattr(step, "__self__", None)
    names: dict[str, Any] = {"self": owner} | dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    function: Any = inspect.unwrap(getattr(step, "__func__", step))
    code = getattr(function, "__code__", None)
    if code is None:
        return names
    names |= closure_variables(function)
    used = {n for c in codes_of(code) for n in c.co_names}
    names |= {name: function.__globals__[name] for name in used if name in function.__globals__}
    return names | _members(names)


def _members(names: Mapping[str, Any]) -> dict[str, Any]:
    """Models and optimizers that a plain object or dict among the names holds (a trainer, a namespace), and those of
    functions that it calls."""
    members: dict[str, Any] = {}
    wanted = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    for name, value in list(names.items()):
        kind = type(value)  # isinstance would ask the object for its class
        if issubclass(kind, (*wanted, types.ModuleType, type)):
            continue
        function = kind is types.FunctionType
        if function and value.__closure__ is not None:
            inner = closure_variables(value)
        elif function:
            inner = {n: value.__globals__.get(n) for n in value.__code__.co_names}
        else:
            inner = value if kind is dict else attributes(value)
        for key, member in list(inner.items())[:200]:
            if issubclass(type(member), wanted):
                label = key if type(key) is str else key_text(key)
                members.setdefault(label if function else f"{name}.{label}", member)
    return members


# -- a loss -----------------------------------------------------------------------------------------------------------

MODEL_FORM, OUTPUT_FORM = "loss_fn(model, batch)", "loss_fn(outputs, targets)"
OUTPUTS = frozenset(
    ("output", "outputs", "out", "pred", "preds", "prediction", "predictions", "logits", "input", "scores")
    + ("y_hat", "y_pred", "yhat")
)
"""Names of a loss function's first parameter that mean the outputs of the model; any other is a model."""


def check_loss(loss_fn: Any, call: str) -> None:
    """Raises TypeError for what can't be called."""
    if not callable(loss_fn):
        raise wrong_type(call, "loss_fn", "a function of (model, batch) or (outputs, targets)", loss_fn)


def loss_call(loss_fn: Callable[..., Any]) -> tuple[Callable[[Any, Any], Any], str]:
    """(function of (model, batch), form): how loss_fn is called, with (model, batch) or with (outputs, targets) of a
    batch that is a pair. The function raises TypeError for a batch of another form."""
    if _form(loss_fn) == MODEL_FORM:
        return loss_fn, MODEL_FORM

    def of_outputs(model: Any, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                "loss_fn(outputs, targets) needs batches of the form (inputs, targets); write "
                f"loss_fn(model, batch) for batches like this {type(batch).__name__}"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        inputs, targets = (part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
        return loss_fn(model(inputs), targets)

    return of_outputs, OUTPUT_FORM


def _form(loss_fn: Callable[..., Any]) -> str:
    if isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") in ("torch.nn.functional", "torch._C._nn"):
        return OUTPUT_FORM
    try:
        names = [p.name.lower() for p in inspect.signature(loss_fn).parameters.values()]
    except (TypeError, ValueError):
        return MODEL_FORM
    if names and (names[0] in OUTPUTS or names[0].startswith(("pred", "out", "logit"))):
        return OUTPUT_FORM
    return MODEL_FORM
