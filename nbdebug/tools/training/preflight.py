"""`preflight(model, loader, loss_fn, ...)`: everything that can be known before training."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdebug.arguments import completed, planned_optimizers, trainer_of
from nbdebug.interrupts import interruptible
from nbdebug.observe.validation import optimizers_of
from nbdebug.report import Report
from nbdebug.tools.training.diagnose import first_steps
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.report import preflight_report
from nbdebug.tools.training.rules import name_all
from nbdebug.tools.training.run.probe import LoopArguments
from nbdebug.tools.training.static.probe import CALL, SECONDS, static_facts


@interruptible
def preflight(
    model: torch.nn.Module | Any,
    loader: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    seconds: float = SECONDS,
) -> Report:
    """Check everything that can be known before training, and name what would keep the model from learning.

    model: a Module, or a trainer (of a library, or an object of yours) that holds it; what is None is then the
    trainer's. Or your training loop, a function `train()` or `train(callback)`, which runs until its first steps have
    told model, loss, batches and optimizer; then it is stopped, and they are put back. loader: training batches, to be
    read more than once (a DataLoader, a list). loss_fn: `loss_fn(model, batch)`, or `loss_fn(outputs, targets)` (a
    criterion, for instance) where batches are pairs (inputs, targets). optimizer: one, or several in a list or dict;
    val_loader, scheduler: where there are such. What is not given is not checked, and the report says so.

    The fix of each cause is tried where one batch can show it: the batch is trained on as it is and with the fix, and
    the report gives both losses.

    seconds: the time for all of it. What has not begun by then is reported as not checked, tries stop there, and a
    probe that has begun is finished. It takes seconds on a small model; the loss is computed up to 1,500 times.

    Model, optimizer, random numbers and loaders are as before afterwards, also when it is interrupted.
    `report.facts["parameters"]` is the parameter table: each parameter, whether it is trained, used, reached by the
    loss, held by an optimizer and at which rate.

    Raises TypeError or ValueError for arguments that make no sense (seconds: a number above 0); what the model,
    the loss or the loader raise passes unchanged (except a loss that refuses its labels, which is a finding).
    """
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"seconds takes a number above 0; got {seconds!r}")
    parts = {"optimizer": optimizer, "train_loader": loader, "loss_fn": loss_fn}
    parts |= {"val_loader": val_loader, "scheduler": scheduler}
    model = trainer_of(model) or model
    if loader is None and isinstance(model, (types.FunctionType, types.MethodType, functools.partial)):
        return preflight_loop(model, {**parts, "model": None}, seconds=seconds)[0]
    names = {"trainer": model}
    parts = completed(model, parts)
    parts["optimizer"] = parts["optimizer"] or planned_optimizers(names) or None
    trained = " and ".join(type(o).__name__ for o in optimizers_of(parts["optimizer"], CALL).values())
    subject = f"a model of type {type(parts['model']).__name__}" + (f", trained by {trained}" if trained else "")
    return _report(parts, seconds, subject)


def preflight_loop(
    train: Any, given: dict[str, Any], names: Mapping[str, Any] | None = None, seconds: float = SECONDS
) -> tuple[Report, LoopArguments]:
    """The same for a loop that tells what it trains, and what that is. given: the parts that were named, and
    "model"."""
    known, subject = first_steps(train, given, names)
    parts = {name: getattr(known, name) for name in ("model", "train_loader", "loss_fn", "val_loader", "scheduler")}
    return _report({**parts, "optimizer": known.optimizers}, seconds, subject), known


def _report(parts: dict[str, Any], seconds: float, subject: str) -> Report:
    model, loader, loss_fn = (parts.pop(kind) for kind in ("model", "train_loader", "loss_fn"))
    static = static_facts(model, loader, loss_fn, **parts, seconds=seconds)
    how = f"{subject}; the loss was taken as {static.loss_form}"
    return preflight_report(static, name_all(TrainingFacts(static)), how)
