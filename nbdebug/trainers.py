"""The parts of a training that one object holds: a Trainer of transformers or Lightning, an Accelerator, a data module,
an object of the user's own class.

`held(kind, names)` gives them by the expression that a person would write: `trainer.model`,
`trainer.get_train_dataloader()`, `experiment.optim`. A package is looked up among those that are loaded, never
imported. Of the user's own objects only the attributes are read: no code of theirs runs. Of a library's trainer its
documented methods are called (a loader is made, with the random numbers as before).
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.variables import attributes, children, class_attribute, is_user_module, user_variables
from nbdebug.text import module_name

TYPES: dict[str, type] = {
    "model": nn.Module,
    "optimizer": torch.optim.Optimizer,
    "scaler": torch.amp.GradScaler,
    "loader": DataLoader,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
}
DEPTH = 3
"""How far from a variable a part may be: `experiment.state.optim` is two away."""
MOST_HOLDERS = 2000
MOST_MEMBERS = 100
"""A longer list or dict is data."""
VALIDATION = ("val", "test", "eval", "dev", "holdout")
"""A loader whose name has one of these in it is none of training batches."""

Parts = Iterable[tuple[str, Any]]


def held(kind: str, names: Mapping[str, Any], usual: Iterable[str] = (), *, libraries: bool = False) -> dict[str, Any]:
    """What objects among the user's variables hold, by expression, each once, nearest first. kind: one of TYPES,
    "train_loader", "val_loader", "loss_fn" (of (model, batch), or a criterion), or "new_optimizer" (what a library's
    trainer would make); usual: names of attributes that are such a thing. libraries: ask only trainers of libraries,
    which have the whole training."""
    things: dict[int, tuple[str, Any]] = {}
    for name, thing in _holders(names):
        adapter = _adapter(thing)
        if libraries and adapter in (None, _accelerator):
            continue
        for expression, value in adapter(kind, name, thing) if adapter else _own(kind, name, thing, tuple(usual)):
            if value is not None:
                things.setdefault(id(value), (expression, value))
    return dict(things.values())


def bare(thing: Any) -> Any:
    """What accelerate's wrapper of an optimizer, a scheduler or a loader (on the CPU) wraps, which is what runs."""
    if module_name(type(thing)).partition(".")[0] != "accelerate":
        return thing
    own = attributes(thing)
    loader = own.get("base_dataloader")
    if loader is not None and torch.device(own.get("device") or "cpu").type != "cpu":
        return thing  # it moves the batches
    return own.get("optimizer") or own.get("scheduler") or loader or thing


def own_loss(model: nn.Module) -> Callable[[Any, Any], Any] | None:
    """The loss that a model computes itself where the batch has labels: `model(**batch).loss`; None where its forward
    takes none."""
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return None

    def loss(model: Any, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise TypeError(f"model(**batch).loss needs batches that are dicts; got {type(batch).__name__}")
        return loss_of(model(**on_device(batch, model)))

    return loss


def loss_of(output: Any) -> Any:
    """The loss in what a model or a training step returned: a tensor, or `loss` of a dict or an object."""
    if isinstance(output, Mapping):
        return output["loss"]
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def on_device(batch: Any, model: nn.Module) -> Any:
    """The batch where the model's parameters are; the batch itself where it is there, or the model has none."""
    device, parts = next((p.device for p in model.parameters()), None), batch
    if isinstance(batch, Mapping):
        parts = dict(batch)
    if device is None or all(t.device == device for t in tree_leaves(parts) if isinstance(t, torch.Tensor)):
        return batch
    return tree_map_only(torch.Tensor, lambda t: t.to(device), parts)


# -- where to look -----------------------------------------------------------------------------------------------------


def _holders(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, object) of all that may hold parts, nearest first."""
    level = [(n, t) for n, t in user_variables(names).items() if not n.startswith("_")]
    visited: set[int] = set()
    for _ in range(DEPTH):
        following: list[tuple[str, Any]] = []
        for name, thing in level:
            if id(thing) in visited or len(visited) > MOST_HOLDERS:
                continue
            if _adapter(thing) is not None:
                visited.add(id(thing))
                yield name, thing
            elif _is_own(thing):
                visited.add(id(thing))
                yield name, thing
                following += [(n, t) for n, t in _members(name, thing) if not n.rpartition(".")[2].startswith("__")]
        level = following


def _is_own(thing: Any) -> bool:
    """Whether this is an object of the user's own, a small container, or a function or module from a file of theirs."""
    kind = type(thing)
    if kind in (dict, list, tuple):
        return len(thing) <= MOST_MEMBERS
    if kind is types.ModuleType:
        return thing.__name__ != "__main__" and is_user_module(thing.__name__)
    if kind is types.FunctionType:
        return is_user_module(str(thing.__module__))
    return kind is types.SimpleNamespace or is_user_module(str(type.__getattribute__(kind, "__module__")))


def _members(name: str, thing: Any) -> Parts:
    """What an object of the user's own has inside; of a function from a file, the variables of that file."""
    if type(thing) is types.ModuleType:
        return [(f"{name}.{n}", value) for n, value in list(vars(thing).items())]
    if type(thing) is types.FunctionType:
        file = thing.__globals__ if thing.__module__ != "__main__" else {}
        return [*children(name, thing), *((f"{thing.__module__}.{n}", value) for n, value in list(file.items()))]
    return children(name, thing)


def _adapter(thing: Any) -> Callable[[str, str, Any], Parts] | None:
    """What knows this library's trainer; None for an object of no such library."""
    for module, kind, adapter in _LIBRARIES:
        known = getattr(sys.modules.get(module), kind, None)
        if known is not None and issubclass(type(thing), known):
            return adapter
    return None


# -- an object of the user's own ---------------------------------------------------------------------------------------


def _own(kind: str, name: str, thing: Any, usual: tuple[str, ...]) -> Parts:
    members = list(_members(name, thing))
    if kind == "loss_fn":
        return _own_losses(name, thing, members, usual)
    wanted = TYPES.get("loader" if kind.endswith("_loader") else kind)
    parts = [(n, bare(value)) for n, value in members if wanted is not None and issubclass(type(value), wanted)]
    if kind in ("train_loader", "val_loader"):
        parts = [(n, v) for n, v in parts if is_validation(n) == (kind == "val_loader")]
        named = [(n, v) for n, v in members if _last(n) in usual and isinstance(v, Iterable)]
        return [*named, *parts]
    return parts


def is_validation(name: str) -> bool:
    """Whether a loader of this name has validation batches."""
    own = _last(name).lower()
    return any(word in own for word in VALIDATION) or own in ("vdl", "v_dl", "vloader", "v_loader", "vl")


def _last(name: str) -> str:
    return name.rpartition(".")[2].strip("[]'\"")


def _own_losses(name: str, thing: Any, members: Parts, usual: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Attributes and methods that are called as a loss usually is. A method of a batch alone uses the object's own
    model: for the time of a call another one takes its place."""
    yield from ((n, value) for n, value in members if _last(n) in usual and callable(value))
    for method in usual:
        function = class_attribute(thing, method)
        if type(function) is types.FunctionType:
            bound = types.MethodType(function, thing)
            needed = [p for p in inspect.signature(bound).parameters.values() if p.default is p.empty]
            yield f"{name}.{method}", _of_batch(bound, thing) if len(needed) == 1 else bound


def _of_batch(method: Callable[[Any], Any], owner: Any) -> Callable[[Any, Any], Any]:
    place = next((n for n, value in attributes(owner).items() if isinstance(value, nn.Module)), None)

    def loss(model: Any, batch: Any) -> Any:
        own = None if place is None else getattr(owner, place)
        if own is None or own is model:
            return method(batch)
        setattr(owner, place, model)  # type: ignore[arg-type]
        try:
            return method(batch)
        finally:
            setattr(owner, place, own)  # type: ignore[arg-type]

    return loss


# -- libraries ---------------------------------------------------------------------------------------------------------


def _transformers(kind: str, name: str, trainer: Any) -> Parts:
    """transformers.Trainer."""
    if kind == "model":
        return [(f"{name}.model", trainer.model)]
    if kind == "optimizer":
        return [(f"{name}.optimizer", bare(trainer.optimizer))]
    if kind == "new_optimizer":
        return [(f"{name}.create_optimizer()", _new_optimizer(trainer))]
    if kind == "scheduler":
        return [(f"{name}.lr_scheduler", bare(trainer.lr_scheduler))]
    if kind == "scaler":
        return [(f"{name}.accelerator.scaler", trainer.accelerator.scaler)]
    if kind == "train_loader" and trainer.train_dataset is not None:
        return [(f"{name}.get_train_dataloader()", _loader(trainer, trainer.get_train_dataloader))]
    if kind == "val_loader" and trainer.eval_dataset is not None:
        return [(f"{name}.get_eval_dataloader()", _loader(trainer, trainer.get_eval_dataloader))]
    return [(f"{name}.compute_loss", _trainer_loss(trainer))] if kind == "loss_fn" else []


def _loader(trainer: Any, make: Callable[[], Any]) -> Any:
    """A loader as the trainer makes one for itself, which forgets it again."""
    with same_random_numbers():
        listed = attributes(trainer.accelerator).get("_dataloaders", [])
        before = list(listed)
        try:
            loader = make()
        finally:
            listed[:] = before
    return attributes(loader).get("base_dataloader", loader)  # the trainer moves the batches itself


def _new_optimizer(trainer: Any) -> Any:
    """The optimizer that the trainer would make; it makes its own later."""
    if trainer.optimizer is not None:
        return bare(trainer.optimizer)
    with same_random_numbers():
        try:
            return trainer.create_optimizer()
        finally:
            trainer.optimizer = None


def _trainer_loss(trainer: Any) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        inputs = trainer._prepare_inputs(dict(batch))
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs)

    return loss


def _lightning_trainer(kind: str, name: str, trainer: Any) -> Parts:
    """Lightning's Trainer; it has its module and loaders once it was called."""
    module, runs = trainer.lightning_module, trainer.state.status == "running"
    if kind == "model":
        return [(f"{name}.lightning_module", module)]
    if kind == "optimizer":  # the next call of fit makes new ones
        return [(f"{name}.optimizers[{i}]", o) for i, o in enumerate(trainer.optimizers if runs else ())]
    if kind == "scaler":
        return [(f"{name}.precision_plugin.scaler", getattr(trainer.precision_plugin, "scaler", None))]
    if kind == "train_loader":
        return [(f"{name}.train_dataloader", trainer.train_dataloader)]
    if kind == "val_loader":
        loaders = trainer.val_dataloaders
        return [(f"{name}.val_dataloaders", loaders[0] if isinstance(loaders, list) and loaders else loaders)]
    datamodule = getattr(trainer, "datamodule", None)
    return [] if module is None or datamodule is None else _data_module(kind, f"{name}.datamodule", datamodule)


def _lightning_module(kind: str, name: str, module: Any) -> Parts:
    if kind == "model":
        return [(name, module)]
    if kind == "new_optimizer":
        with same_random_numbers():
            return [
                (f"{name}.configure_optimizers()", optimizer)
                for optimizer in _optimizers_in(module.configure_optimizers() if _overridden(module, kind) else None)
            ]
    if kind == "loss_fn":
        return [(f"{name}.training_step", _step_loss)] * (_overridden(module, kind) and module.automatic_optimization)
    return _data_module(kind, name, module)


_METHODS = {
    "new_optimizer": "configure_optimizers",
    "loss_fn": "training_step",
    "train_loader": "train_dataloader",
    "val_loader": "val_dataloader",
}


def _data_module(kind: str, name: str, module: Any) -> Parts:
    """The loaders that a data module, or a LightningModule, makes. What it prepares for that, it prepares in a copy."""
    if not kind.endswith("_loader") or not _overridden(module, kind):
        return []
    with same_random_numbers():
        try:
            loader = getattr(module, _METHODS[kind])()
        except Exception:  # it needs setup first
            if not hasattr(module, "setup"):
                raise
            shallow = object.__new__(type(module))
            shallow.__dict__.update(module.__dict__)
            shallow.setup("fit")
            loader = getattr(shallow, _METHODS[kind])()
    return [(f"{name}.{_METHODS[kind]}()", loader[0] if isinstance(loader, list) and loader else loader)]


def _overridden(module: Any, kind: str) -> bool:
    """Whether the user's class has this method, and not only Lightning's."""
    function = class_attribute(module, _METHODS[kind])
    return str(getattr(function, "__module__", "")).partition(".")[0] not in ("pytorch_lightning", "lightning", "")


def _optimizers_in(configured: Any) -> Iterator[Any]:
    """The optimizers in what `configure_optimizers` returned: one, a dict, a list, or lists of optimizers and
    schedulers."""
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _optimizers_in(item)


def _step_loss(model: Any, batch: Any) -> Any:
    """The loss of a LightningModule's training_step, which logs nothing meanwhile."""
    own = vars(model)
    before = {name: own[name] for name in ("log", "log_dict") if name in own}
    own.update(log=_nothing, log_dict=_nothing)
    try:
        takes_index = len(inspect.signature(model.training_step).parameters) > 1
        return loss_of(model.training_step(on_device(batch, model), *(0,) * takes_index))
    finally:
        for name in ("log", "log_dict"):
            own.pop(name, None)
        own.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _accelerator(kind: str, name: str, accelerator: Any) -> Parts:
    """accelerate's Accelerator, which keeps what it has prepared."""
    if kind == "scaler":
        return [(f"{name}.scaler", accelerator.scaler)]
    kept = {"model": "_models", "optimizer": "_optimizers", "loader": "_dataloaders", "scheduler": "_schedulers"}
    attribute = kept.get("loader" if kind.endswith("_loader") else kind)
    parts = [] if attribute is None else list(enumerate(getattr(accelerator, attribute, ())))
    if kind == "val_loader":
        parts = parts[1:]
    return [(f"{name}.{attribute}[{i}]", bare(thing)) for i, thing in parts]


_LIBRARIES: list[tuple[str, str, Callable[[str, str, Any], Parts]]] = [
    ("transformers.trainer", "Trainer", _transformers),
    *[
        (f"{package}.{module}", kind, adapter)
        for package in ("pytorch_lightning", "lightning.pytorch")
        for module, kind, adapter in (
            ("trainer.trainer", "Trainer", _lightning_trainer),
            ("core.module", "LightningModule", _lightning_module),
            ("core.datamodule", "LightningDataModule", _data_module),
        )
    ],
    ("accelerate.accelerator", "Accelerator", _accelerator),
]
"""(module, class, what knows it) of the trainers that are known, as far as they are loaded."""


# -- a library's training, up to a step -------------------------------------------------------------------------------


def train_until(trainer: Any, others: list[Any], last: int, save: str = "", resume: str | None = None) -> bool:
    """Train up to this step, of the schedule that the trainer has, from a checkpoint of its own where one is given;
    False for what is no trainer of transformers or Lightning. others: what `fit` is called with; save: a path, in whose
    folder the state is saved at the end."""
    if module_name(type(trainer)).startswith(("pytorch_lightning", "lightning")):
        _lightning_until(trainer, others, last, save, resume)
    elif isinstance(trainer, getattr(sys.modules.get("transformers.trainer"), "Trainer", ())):
        _transformers_until(trainer, last, save, resume)
    else:
        return False
    return True


def _transformers_until(trainer: Any, last: int, save: str, resume: str | None) -> None:
    """Train with transformers' Trainer up to this step, of the schedule that it has; it saves there by itself."""
    callback = sys.modules["transformers"].TrainerCallback

    class Stop(callback):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_save = bool(save) and state.global_step == last
            control.should_training_stop = control.should_training_stop or state.global_step >= last

    trainer.args.push_to_hub, trainer.args.disable_tqdm = False, True
    trainer.args.output_dir = os.path.dirname(save) or trainer.args.output_dir
    handler = trainer.callback_handler
    handler.callbacks = [each for each in handler.callbacks if "integrations" not in type(each).__module__]
    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)


def _lightning_until(trainer: Any, others: list[Any], last: int, save: str, resume: str | None) -> None:
    """Train with Lightning's Trainer up to this step; it saves as its own callback would."""
    callback = sys.modules[module_name(type(trainer)).partition(".trainer")[0]].Callback

    class Stop(callback):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
            if trainer.global_step >= last and not trainer.should_stop:
                trainer.should_stop = True
                if save:
                    own = trainer.checkpoint_callback
                    trainer.save_checkpoint(save, weights_only=own is not None and own.save_weights_only)

    trainer.callbacks.append(Stop())
    trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = None, None
    trainer.fit(*others, ckpt_path=resume)
