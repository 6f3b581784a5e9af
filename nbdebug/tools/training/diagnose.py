"""`diagnose(train, ...)`: why a training does not learn, overfits, jumps or stalls.

What can be known beforehand is checked; the user's own loop runs once, watched; then the start is put back and one
thing is changed at a time, where the course of the run gives reason to. The result is one ranked answer, and the model
is left as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdebug.arguments import completed, trainer_of, with_callback
from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.report import Report
from nbdebug.tools.training.facts import TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.loop_frames import LoopStart, LoopSubject
from nbdebug.tools.training.preflight import static_facts
from nbdebug.tools.training.probe import NO_MODEL, LoopArguments, checked_arguments, late_facts, run_facts
from nbdebug.tools.training.report import diagnose_report
from nbdebug.tools.training.rules import name_all
from nbdebug.tools.training.static_facts import StaticFacts


@interruptible
def diagnose(
    train: Callable[..., Any],
    *,
    model: torch.nn.Module | Any = None,
    optimizer: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    train_loader: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    regularize: bool = False,
    keep: bool = False,
    progress: bool = True,
) -> Report:
    """Run a training loop once and say why it does not learn as it should, with the fix tried.

    train: your own loop, a function without arguments, or a trainer's `train`. One that takes a callback is given one,
    and calls `callback(step, loss)` after each step; else each step of the optimizer counts. model: a Module, or a
    trainer that holds it; what is None is then the trainer's. Without a model, the loop tells it, at its first call of
    one with gradients: one that it makes itself, or several that its optimizers train together. optimizer: one, or
    several in a list; without one, each that trains the model is taken when it first steps. loss_fn: `loss_fn(model,
    batch)`, which gives the loss of one batch (or a criterion, `loss_fn(outputs, targets)`); left out, it is taken from
    the lines of the loop that compute the loss, where these tell it. So are the batches, where it reads no loader.
    Where the loss or the batches are not known, nothing can be tried, and the report says so.
    regularize: what may make it generalize is tried, too, one change at a time from the start of the run: dropout,
    weight decay, label smoothing, a smaller model (half the blocks or half the width; where neither can be built, a
    frozen half), augmentation of the training rows (pictures, token ids, vectors), warm-up, a stop at the best step.
    They are compared by the validation loss without smoothing, in a table of the report (`report.full()` shows it). A
    gain has to be more than another order of the batches makes; its line to paste is the one that was run. That takes
    as long as a dozen runs, two minutes at most. keep: leave the model, the optimizer and the scheduler as the loop
    left them; else they are put back, bit for bit, and the random numbers too. progress: show a bar.

    The experiments do what the loop did, batch by batch: several optimizers, accumulation, a closure, clipping. Where
    that does not give the same losses, nothing is concluded from them, and the report says why. They take at most
    three times as long as your loop (or 20 seconds).

    Raises TypeError for arguments of another kind, ValueError where the loop calls no model; whatever `train` itself
    raises passes unchanged, with the findings up to then as its `report`.
    """
    parts = {"optimizer": optimizer, "loss_fn": loss_fn, "train_loader": train_loader, "val_loader": val_loader}
    model = trainer_of(train) if model is None else model
    return diagnose_loop(train, model, {**parts, "scheduler": scheduler}, regularize, keep, progress)


def diagnose_loop(
    train: Any,
    model: Any,
    parts: dict[str, Any],
    regularize: bool,
    keep: bool,
    progress: bool = True,
    usual: Callable[[str], Any] = lambda kind: None,
    names: Mapping[str, Any] | None = None,
) -> Report:
    """What `diagnose` does. usual: gives the parts that nobody named. names: the user's variables, for what a loop
    without a model does not read itself."""
    if not callable(train):
        raise TypeError(f"diagnose takes your training loop, a function; got {train!r}")
    train = with_callback(train)
    arguments: LoopArguments | None = None
    start, subject = LoopStart(names), ""

    def found(what: LoopSubject) -> LoopArguments:
        nonlocal arguments, subject
        arguments = checked_arguments(what.model, parts, what.part, _static)
        arguments = dataclasses.replace(arguments, regularize=regularize, names=what.names, start=start)
        subject = str(what)
        return arguments

    def answer(facts: TrainingFacts) -> Report:
        kinds = [type(o).__name__ for o in arguments.optimizers] if arguments is not None else []
        trained = ", ".join(kinds if len(kinds) < 5 else dict.fromkeys(kinds))
        kind = f"a model of type {type(model).__name__}, trained by {trained or 'no optimizer'}"
        return diagnose_report(facts, name_all(facts), "diagnose(train)", subject or kind)

    if model is not None:
        parts = completed(model, parts)
        model = parts["model"]
        arguments = checked_arguments(parts.pop("model"), parts, usual, _static)
        arguments = dataclasses.replace(arguments, regularize=regularize)
    facts: TrainingFacts | None
    try:
        with progress_bar("your loop, watched", "steps", wanted=progress) as bar:

            def on_step(steps: int, loss: float) -> None:
                bar.update(steps - bar.n)

            if arguments is not None:
                facts = run_facts(train, arguments, keep, on_step)
            else:
                facts = late_facts(train, start, found, keep, on_step)
    except Exception as error:  # the loop's own; the facts before it may well say why
        why = TrainingRunFacts(unchecked=(f"The run: it ended with {type(error).__name__}",))
        if arguments is not None:
            error.report = answer(TrainingFacts(arguments.before, why))  # type: ignore[attr-defined]
        raise
    if facts is None:
        raise ValueError(NO_MODEL)
    return answer(facts)


def _static(arguments: LoopArguments) -> StaticFacts:
    """What preflight knows, without overfitting a batch: the run and its experiments tell more."""
    if arguments.loss_fn is None or arguments.train_loader is None:
        return StaticFacts()
    try:
        return static_facts(
            arguments.model,
            arguments.train_loader,
            arguments.loss_fn,
            optimizer=arguments.optimizers,
            val_loader=arguments.val_loader,
            scheduler=arguments.scheduler,
            overfit=False,
        )
    except Exception as error:  # the border: if it is the user's own, the run meets it as well, and passes it on
        return StaticFacts(unchecked=(f"What can be known before training: {type(error).__name__}: {error}",))
