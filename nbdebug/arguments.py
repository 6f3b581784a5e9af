"""Which model is meant? The one that was named, or else every one among the user's variables.

Where no variable is one, the objects among the variables that hold one are asked: a trainer of transformers or
Lightning, an accelerator, an object of the user's own class (`trainers.py`). A loss, loaders and a scheduler
are looked for in the same way, and by their usual names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from nbdebug.text import listed, module_name

NOUNS = {"model": "model", "optimizer": "optimizer", "scaler": "GradScaler", "loader": "DataLoader"}
"""What can be looked for among the user's variables, and what an error calls it."""
USUAL_NAMES = {
    "loss_fn": ("loss_fn", "compute_loss", "criterion", "loss_func", "loss_function", "crit"),
    "train_loader": ("train_loader", "train_dl", "train_dataloader", "trainloader", "loader"),
    "val_loader": ("val_loader", "val_dl", "val_dataloader", "valid_loader", "valloader", "test_loader"),
    "scheduler": ("scheduler", "lr_scheduler", "sched"),
    "batch": ("batch", "data", "inputs"),
}
"""Names by which these are recognized among the user's variables where no option names them, in this order."""
TRAINERS = ("transformers.trainer", "pytorch_lightning", "lightning.pytorch")
"""Packages whose trainers are asked before usual names are looked for, where they are loaded."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The models and optimizers that a magic works with, by the user's names for them. named: the user named some of
    them; model_named: and the models among them."""

    models: dict[str, Any]
    optimizers: dict[str, Any]
    named: bool
    model_named: bool = False

    @classmethod
    def chosen(cls, models: list[str] | None, optimizers: list[str] | None, names: dict[str, Any]) -> Subject:
        """Those that were named, or else all that the user has; where only an object of the user's holds optimizers,
        the models that these train, too. Raises ValueError for a wrong name."""
        found = evaluated("model", models, names) if models else discover("model", names)
        stepping = evaluated("optimizer", optimizers, names) if optimizers else discover("optimizer", names)
        idle = [o for o in stepping.values() if not any(trains(o, m) for m in found.values())]
        if found and idle and not models:
            others = _without_parts(_held("model", names))
            found |= {n: m for n, m in others.items() if any(trains(o, m) for o in idle)}
        return cls(found, stepping, named=bool(models or optimizers), model_named=bool(models))

    def only(self, name: str, names: Mapping[str, Any]) -> Subject:
        """This model alone, without the optimizers that objects of the user's hold for other models."""
        model = self.models[name]
        own = {n: o for n, o in self.optimizers.items() if n in names or trains(o, model)}
        return dataclasses.replace(self, models={name: model}, optimizers=own)

    @property
    def model(self) -> Any:
        """As `nan_trace` takes it: the only one, several by name, or None."""
        return _only(self.models) if len(self.models) == 1 else self.models or None

    @property
    def optimizer(self) -> Any:
        """As `nan_trace` takes it: the only one, a list of several, or None."""
        return _only(self.optimizers) if len(self.optimizers) == 1 else list(self.optimizers.values()) or None

    def one_model(self, magic: str, loss_fn: Any = None, how: str = "--model NAME") -> tuple[str, Any]:
        """(name, model) of the only one. A loss is a module too: where no model was named, `loss_fn` is not taken, and
        modules without parameters only where there is nothing else. how: to name it. Raises ValueError for none or
        several."""
        models = self.models
        if not self.model_named:
            models = {name: model for name, model in models.items() if model is not loss_fn}
            models = {name: model for name, model in models.items() if any(True for _ in model.parameters())} or models
        return one_of("model", models, magic, how)

    def __str__(self) -> str:
        parts = [_several(kind, taken) for kind, taken in (("model", self.models), ("optimizer", self.optimizers))]
        return " and ".join(parts) + ("" if self.named else " (found among your variables)")


def one_of(kind: str, things: Mapping[str, Any], magic: str, how: str) -> tuple[str, Any]:
    """(name, thing) of the only one of a kind. Raises ValueError for none or several, which says how to name it."""
    if len(things) == 1:
        return next(iter(things.items()))
    noun = NOUNS[kind]
    if not things:
        needs = f"{magic} needs {'an' if noun[0] in 'aeiou' else 'a'} {noun}"
        raise ValueError(f"{needs}, and none of your variables is one. Make it first, or name it: {how}")
    raise ValueError(f"{magic} needs one {noun}, and you have several: {listed(things, 8)}. Say which: {how}")


def _several(kind: str, taken: dict[str, Any]) -> str:
    """ "model `net`", "models `net`, `head`", or "no model"."""
    names = ", ".join(f"`{name}`" for name in taken)
    return f"{kind}{'s' if len(taken) > 1 else ''} {names}" if taken else f"no {kind}"


def _only(taken: dict[str, Any]) -> Any:
    return next(iter(taken.values()))


def _class_of(kind: str) -> type:
    import torch  # here, so that %load_ext nbdebug stays quick

    return {
        "model": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "scaler": torch.amp.GradScaler,
        "loader": torch.utils.data.DataLoader,
        "criterion": torch.nn.modules.loss._Loss,
    }[kind]


def evaluated(kind: str, expressions: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """What the user named; a name may be an expression in the user's own namespace, such as trainer.model. Raises
    ValueError where it is nothing of this kind."""
    chosen = {}
    for text in expressions:
        try:
            chosen[text] = unwrapped(eval(text, names))
        except Exception:  # whatever it raises, it names no model
            chosen[text] = None
        if not isinstance(chosen[text], _class_of(kind)):
            noun, others = NOUNS[kind], discover(kind, names)
            there = f". Your {noun}s: {listed(others, 8)}." if others else ", and none of your variables is one."
            raise ValueError(f"--{kind} {text!r} names no {noun}{there}")
    return chosen


def discover(kind: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """The user's models, optimizers, scalers or loaders: each object once, at its first name, without parts of another
    model and without old outputs (`_`, `_7`). They are known by their type alone: no object of the user's is asked.
    Where no variable is one, those that an object of the user's holds."""
    wanted = _class_of(kind)
    first: dict[int, tuple[str, Any]] = {}
    for name, value in names.items():
        if issubclass(type(value), wanted) and not name.startswith("_"):
            value = unwrapped(value)
            first.setdefault(id(value), (name, value))
    things = dict(first.values()) or _held(kind, names)
    return _without_parts(things) if kind == "model" else things


def _without_parts(models: dict[str, Any]) -> dict[str, Any]:
    """The models that are no part of another one."""
    parts = {id(part) for model in models.values() for part in model.modules() if part is not model}
    return {name: model for name, model in models.items() if id(model) not in parts}


def planned_optimizers(names: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers as the trainers among the user's variables will make them, where these have none yet."""
    loaded = any(package in sys.modules for package in TRAINERS)
    return _held("new_optimizer", names, libraries=True) if loaded else {}


def opened(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """(models, optimizers), where a trainer that holds them stands in the model's place; else as they are."""
    if model is None or isinstance(model, (_class_of("model"), Mapping, list, tuple)):
        return model, optimizer
    names = {"trainer": model}
    models = _without_parts(_held("model", names))
    return models or model, (_held("optimizer", names) or None) if optimizer is None else optimizer


def completed(model: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, where a trainer stands in the model's place: its model, and its parts for those that are
    None. parts: by the kinds of `part`, and "optimizer"."""
    models, optimizer = opened(model, parts.get("optimizer"))
    if models is model:
        return {"model": model, **parts}
    names = {"trainer": model}
    found = {kind: part(kind, names)[1] if value is None else value for kind, value in parts.items()}
    return {**found, "model": _only(models) if len(models) == 1 else models, "optimizer": optimizer}


def around(model: Any, names: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's variables without the objects that hold other models and not this one."""
    from nbdebug.trainers import held

    def others(name: str, thing: Any) -> bool:
        holds = held("model", {name: thing}).values() if thing is not model else ()
        models = [other for other in holds if any(True for _ in other.parameters())]  # a criterion belongs to all
        return bool(models) and not any(part is model for other in models for part in other.modules())

    return {name: thing for name, thing in names.items() if not others(name, thing)}


def part(kind: str, names: Mapping[str, Any]) -> tuple[str, Any]:
    """(expression, value) of the loss, the training or validation batches or the scheduler (a key of USUAL_NAMES but
    "batch"): from a library's trainer, by a usual name, from an object of the user's own, or what the model does
    itself; ("", None) for none."""
    return next(_candidates(kind, names), ("", None))


def _candidates(kind: str, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    usual = USUAL_NAMES.get(kind, ())
    if any(package in sys.modules for package in TRAINERS):
        yield from _held(kind, names, libraries=True).items()
    yield from ((name, unwrapped(names[name])) for name in usual if names.get(name) is not None)
    if kind in ("train_loader", "val_loader"):
        from nbdebug.trainers import is_validation

        loaders = discover("loader", names)
        yield from ((n, value) for n, value in loaders.items() if is_validation(n) == (kind == "val_loader"))
    if kind == "loss_fn" and "torch" in sys.modules:
        criteria = discover("criterion", names)
        yield from criteria.items() if len(criteria) == 1 else ()
    yield from _held(kind, names).items()
    if kind == "loss_fn":
        from nbdebug.trainers import own_loss

        for name, model in discover("model", names).items():
            if (loss := own_loss(model)) is not None:
                yield f"{name}(**batch).loss", loss


def is_source(value: Any) -> bool:
    """Whether this gives batches or is called with one, so that it is none itself: a data set, a loader, a model."""
    from torch.utils.data import DataLoader, Dataset

    return isinstance(value, (Dataset, DataLoader, _class_of("model"))) or type(value).__name__.endswith("DataModule")


def trainer_of(train: Any) -> Any:
    """The trainer of a library whose own loop this is, in which no line of the user's calls the model; else None."""
    owner = getattr(train, "__self__", None)
    return owner if module_name(type(owner)).startswith(TRAINERS) else None


def callback_argument(train: Any) -> str:
    """How a training loop is given a callback, as the text between the brackets of its call: as its first argument
    where it must have one, by its name, or not at all ("")."""
    try:
        parameters = inspect.signature(train).parameters
    except (TypeError, ValueError):
        return "callback"
    first = next((p for p in parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)), None)
    if first is not None and (first.default is first.empty or first.name == "callback"):
        return "callback"
    return "callback=callback" if "callback" in parameters else ""


def with_callback(train: Callable[..., Any]) -> Callable[[Any], Any]:
    """A training loop as one that is called with a callback."""
    how = callback_argument(train)
    return train if how == "callback" else functools.partial(_by_name if how else _alone, train)


def _by_name(train: Callable[..., Any], callback: Any) -> Any:
    return train(callback=callback)


def _alone(train: Callable[..., Any], callback: Any) -> Any:
    return train()


def trains(optimizer: Any, model: Any) -> bool:
    """Whether an optimizer holds a parameter of this model."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in held for p in model.parameters())


def _held(kind: str, names: Mapping[str, Any], libraries: bool = False) -> dict[str, Any]:
    from nbdebug.trainers import held  # here, so that %load_ext nbdebug stays quick

    return held(kind, names, USUAL_NAMES.get(kind, ()), libraries=libraries)


def unwrapped(thing: Any) -> Any:
    """What accelerate's wrapper of an optimizer, a scheduler or a loader wraps; other things as they are."""
    if "accelerate" not in sys.modules:
        return thing
    from nbdebug.trainers import bare

    return bare(thing)


def running_trainer(frame: FrameType | None) -> str:
    """The package whose trainer runs the loop: "transformers" or "lightning"; "" for a loop of the user's own."""
    while frame is not None:
        if (name := frame.f_globals.get("__name__", "")).startswith(TRAINERS):
            return "lightning" if "lightning" in name else "transformers"
        frame = frame.f_back
    return ""
