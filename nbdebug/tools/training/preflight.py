"""`preflight(model, loader, loss_fn, ...)`: everything that can be known before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbdebug.report import Report
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.report import report_of
from nbdebug.tools.training.rules import name_all
from nbdebug.tools.training.static import SECONDS, look


def preflight(
    model: torch.nn.Module,
    loader: Any,
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    seconds: float = SECONDS,
) -> Report:
    """Look at everything that can be known before training, and name what would keep the model from learning.

    loader: training batches, to be read more than once (a DataLoader, a list). loss_fn: `loss_fn(model, batch)`, or
    `loss_fn(outputs, targets)` (a criterion, for instance) where batches are pairs (inputs, targets). optimizer: one,
    or several in a list or dict; val_loader, scheduler: where there are such. What is not given is not checked, and the
    report says so.

    For a cause that is found, its fix is tried where one batch can show it: the batch is learnt by heart as it is and
    with the fix, and both losses are told.

    seconds: the time for all of it. What has not begun by then is reported as not checked, tries stop there, and a look
    that has begun is finished. It takes seconds on a small model; the loss is computed up to 1,500 times.

    Model, optimizer, random numbers and loaders are as before afterwards, also when it is interrupted.
    `report.facts["parameters"]` holds the ledger: each parameter, whether it is trained, used, reached by the loss,
    held by an optimizer and at which rate.

    Raises TypeError or ValueError for arguments that make no sense (seconds: a number above 0); what the model,
    the loss or the loader raise passes unchanged (save a loss that refuses its labels, which is a finding).
    """
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"seconds takes a number above 0; got {seconds!r}")
    before = look(
        model, loader, loss_fn, optimizer=optimizer, val_loader=val_loader, scheduler=scheduler, seconds=seconds
    )
    optimizers = (
        optimizer.values()
        if isinstance(optimizer, dict)
        else (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] * (optimizer is not None))
    )
    trained = " and ".join(type(o).__name__ for o in optimizers)
    subject = f"a model of type {type(model).__name__}" + (f", trained by {trained}" if trained else "")
    return report_of(before, name_all(TrainingFacts(before)), f"{subject}; the loss was taken as {before.form}")
