"""`diagnose(train, ...)`: why a training does not learn, overfits, jumps or stalls.

What can be known beforehand is looked at; the user's own loop runs once, watched; then the start is put back and one
thing is changed at a time, where the course of the run gives reason to. One ranked answer comes of it, and the model is
left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nbdebug.live import progress_bar
from nbdebug.observe.validation import check_loss, check_model, loss_call, optimizers_of
from nbdebug.report import Report
from nbdebug.tools.training.facts import StaticFacts, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.report import run_report as report_of
from nbdebug.tools.training.rules import name_all
from nbdebug.tools.training.run.probe import LoopArguments, watch
from nbdebug.tools.training.static import look

CALL = "diagnose(train, model=, optimizer=)"


def diagnose(
    train: Callable[..., Any],
    *,
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    train_loader: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    keep: bool = False,
    progress: bool = True,
) -> Report:
    """Run `train(callback)` once and say why it does not learn as it should, with the fix tried.

    train: your own loop; it calls `callback(step, loss)` after each step. optimizer: one, or several in a list.
    loss_fn: `loss_fn(model, batch)`, which gives the loss of one batch (or a criterion, `loss_fn(outputs, targets)`);
    without it and `train_loader` nothing can be tried, and the report says so. keep: leave the model, the optimizer and
    the scheduler as the loop left them; else they are put back, bit for bit, and the random numbers too. progress: show
    a bar.

    The experiments do what the loop did, batch by batch: several optimizers, accumulation, a closure, clipping. Where
    that does not come to the same losses, nothing is concluded from them, and the report says why. They take at most
    three times as long as your loop (or 20 seconds).

    Raises TypeError for arguments of another kind; whatever `train` itself raises passes unchanged, with what was seen
    before it as its `report`.
    """
    given = asked_of(train, model, optimizer, loss_fn, train_loader, val_loader, scheduler)
    before = _before(given)
    try:
        with progress_bar("your loop, watched", "steps", wanted=progress) as bar:
            facts = TrainingFacts(before, watch(train, given, keep, lambda steps, loss: bar.update(steps - bar.n)))
    except Exception as raised:  # the loop's own; what was seen before it may well be why
        facts = TrainingFacts(before, TrainingRunFacts(unchecked=(f"The run: it ended with {type(raised).__name__}",)))
        report = report_of(facts, name_all(facts), "diagnose(train)", _subject(given))
        raised.report = report  # type: ignore[attr-defined]
        raise
    return report_of(facts, name_all(facts), "diagnose(train)", _subject(given))


def asked_of(
    train: Any, model: Any, optimizer: Any, loss_fn: Any, train_loader: Any, val_loader: Any, scheduler: Any
) -> LoopArguments:
    """The arguments, checked. Raises TypeError, quoting what was given."""
    if not callable(train):
        raise TypeError(f"diagnose takes your training loop, a function that is called with a callback; got {train!r}")
    check_model(model, CALL)
    optimizers = list(optimizers_of(optimizer, CALL, required=True).values())
    if loss_fn is not None:
        check_loss(loss_fn, CALL)
    for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        if loader is not None and not isinstance(loader, Iterable):
            raise TypeError(f"{name} takes something to iterate over, such as a DataLoader; got {loader!r}")
    loss = loss_fn if loss_fn is None else loss_call(loss_fn)[0]
    return LoopArguments(model, optimizers, loss, train_loader, val_loader, scheduler)


def _before(given: LoopArguments) -> StaticFacts:
    """What preflight sees, short of learning a batch by heart: the run and its experiments tell more."""
    if given.loss_fn is None or given.train_loader is None:
        return StaticFacts()
    try:
        return look(
            given.model,
            given.train_loader,
            given.loss_fn,
            optimizer=given.optimizers,
            val_loader=given.val_loader,
            scheduler=given.scheduler,
            by_heart=False,
        )
    except Exception as fault:  # the border: if it is the user's own, the run meets it as well, and passes it on
        return StaticFacts(unchecked=(f"What can be known before training: {type(fault).__name__}: {fault}",))


def _subject(given: LoopArguments) -> str:
    optimizers = ", ".join(type(o).__name__ for o in given.optimizers)
    return f"a model of type {type(given.model).__name__}, trained by {optimizers}"
