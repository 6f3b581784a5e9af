"""`step_through(model, batch)`: a training step, layer by layer, while the notebook stays alive."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.finding import Report
from nbdebug.observe.asking import asked
from nbdebug.observe.given import optimizers_of
from nbdebug.observe.state import Snapshot
from nbdebug.stepper import account, goals, numbers
from nbdebug.stepper.caller import Caller
from nbdebug.stepper.layers import Layers
from nbdebug.stepper.places import Place, Stop
from nbdebug.stepper.run import Run
from nbdebug.stepper.turns import PATIENCE

_latest: weakref.ref[Stepper] | None = None


def step_through(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Any = None,
    backward: bool = True,
    restore: bool = True,
) -> Stepper:
    """Run one training step that waits at its layers, and let the notebook go on meanwhile.

    loss_fn: `loss_fn(model, batch)`, or a criterion of (outputs, targets) for batches of a pair; left out, the model is
    called with the batch: a dict by keywords, a tuple as arguments (or only its first part, where that is what forward
    takes). backward: go on through the backward where a loss has come out and the step has not done so itself.
    optimizer: one or a list that the step changes; no step of it is made here. restore: at the end the model, its
    gradients, the optimizer and the random numbers are as before, unlike after nan_trace, because looking is not
    training; False: as one plain step leaves them. A step that is abandoned is always taken back.

    The step runs in a thread with the caller's autocast, grad mode, inference mode, torch modes, default device, GPU
    and stream. It waits before the model's first layer. Its random numbers are its own: what you draw between its
    layers changes nothing. What it raises is kept as `.error`. A stepper that waits already is abandoned.

    Raises TypeError for arguments of another kind.
    """
    global _latest
    if not isinstance(model, nn.Module):
        raise TypeError(f"step_through takes a torch.nn.Module; got {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn takes a function of the model and a batch; got {type(loss_fn).__name__}")
    optimizers = {} if optimizer is None else optimizers_of(optimizer)
    before, note = waiting(), ""
    if before is not None:
        note = "The stepper before this one was abandoned."
        before.abandon()
    caller = Caller()
    with numbers.unwatched():
        step, said = _step(model, batch, loss_fn)
        run = Run(
            step,
            Layers(model, batch, loss_fn),
            Snapshot.take(model, optimizers),
            caller,
            backward=backward,
            restore=restore,
        )
    stepper = Stepper(run, f"model {type(model).__name__}, called as {said}", note)
    _latest = weakref.ref(stepper)
    stepper._go(goals.into)
    return stepper


def waiting() -> Stepper | None:
    """The stepper whose step waits or runs; there is one at most."""
    stepper = _latest() if _latest is not None else None
    return stepper if stepper is not None and not stepper.done else None


class Stepper:
    """A step that waits. Each method lets it run on, returns when it waits again or is over, and gives the report.

    Its controls are shown in a notebook where it stands last in a cell; elsewhere it is shown as its report. asked: the
    call that was made, and what was taken."""

    def __init__(self, run: Run, subject: str, note: str = "") -> None:
        self.asked, self._run, self._note = (account.QUESTION, subject), run, note
        self._one_at_a_time, self._panel = threading.RLock(), None
        # The hooks and the thread know the run, not this: when nobody holds this any more, the step ends.
        ended = weakref.finalize(self, run.turns.abandon, 1.0)
        ended.atexit = False  # the thread ends with the process

    _panel: Any

    def next(self) -> Report:
        """On to the end of this layer, over those inside it; from there to the end of the next one beside it, or of the
        one around it. Stops at the loss, and where backward begins."""
        return self._go(goals.over(self._here()))

    def into(self) -> Report:
        """On to the very next thing that happens: the first layer inside this one, or its end."""
        return self._go(goals.into)

    def out(self) -> Report:
        """On to the end of the layer around this one."""
        return self._go(goals.out(self._here()))

    def run_to(self, pattern: str) -> Report:
        """On to where a layer begins (in backward: its backward) whose name or type is this, or fits it as a pattern:
        "blocks.1.attn", "*.attn", "Linear"; "loss": to the loss. Where none comes any more the step runs to its end.
        Raises ValueError where no layer of the model fits."""
        goals.check(pattern, {layer.name: layer.kind for layer in self._run.layers.all.values()})
        return self._go(goals.to(pattern.strip()))

    def run_to_nonfinite(self) -> Report:
        """On to the innermost layer that makes an inf or a NaN of finite inputs; in backward, of finite gradients. Also
        to the model itself when the batch is not finite, and to the loss when only that is not."""
        return self._go(goals.non_finite)

    def finish(self) -> Report:
        """On to the end of the step."""
        return self._go(goals.never)

    def abandon(self) -> Report:
        """End the step where it is, and put everything back. Raises RuntimeError when it does not end: when it is in
        code that neither calls a layer nor runs Python."""
        turns = self._run.turns
        if not turns.abandon():
            raise RuntimeError(
                f"The step does not end: for {2 * PATIENCE:g} seconds it has been in code that cannot "
                f"be interrupted ({turns.place() or 'not in yours'}). It ends, and the model is put "
                "back, when that returns."
            )
        return self._told()

    close = abandon

    @property
    def at(self) -> Place | None:
        """Where it waits; None once it is over."""
        stop = self._stop
        return stop.place if stop is not None else None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What the layer was given; in backward the gradients that have come to it. The step's own memory: a change in
        place changes the step."""
        stop = self._stop
        return tuple(tensor for _, tensor in stop.given) if stop is not None else ()

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What it has made, once it has run; in backward the gradients that it hands on."""
        stop = self._stop
        return tuple(tensor for _, tensor in stop.made) if stop is not None else ()

    @property
    def done(self) -> bool:
        """The step is over: finished, failed or abandoned."""
        return self._run.turns.over

    @property
    def abandoned(self) -> bool:
        """It was ended before its end."""
        return self.done and self._run.turns.abandoned

    @property
    def result(self) -> Any:
        """What the step returned (the loss, or the model's outputs), without its graph; None until then."""
        return self._run.result

    @property
    def error(self) -> BaseException | None:
        """What the step has raised."""
        return self._run.error

    def report(self) -> Report:
        """Where it waits, and the layer's tensors in numbers; or how it ended, with the cause where it has failed."""
        if self.error is not None and self._run.explained is None:
            self._run.explained = account.explained(self.error)
        with numbers.unwatched():
            return account.report_of(self._run, self.asked, self._note)

    @property
    def _stop(self) -> Stop | None:
        return None if self._run.turns.running else self._run.stop

    def _here(self) -> Place:
        return self.at or self._run.last or Place("", "", "before", 0)

    def _go(self, goal: goals.Goal) -> Report:
        """One at a time: a click waits until a method that was called in a cell has returned."""
        with self._one_at_a_time:
            turns = self._run.turns
            if not turns.over or turns.thread.ident is None:
                self._run.goal = goal
                try:
                    turns.go()
                except KeyboardInterrupt:
                    self._run.goal = goals.into  # the next layer is as good a place to wait as any
                    raise
        return self._told()

    def _told(self) -> Report:
        if self._panel is not None:
            self._panel.redraw()
        return self.report()

    def _ipython_display_(self) -> None:
        if self._panel is None:
            self._panel = self.report()._view("stepper_panel", "steps", weakref.ref(self))
        self._panel._ipython_display_()

    def __repr__(self) -> str:
        return str(self.report())


def _step(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> tuple[Callable[[], Any], str]:
    """The step, and how it is called."""
    if loss_fn is not None:
        ask, form = asked(loss_fn, model, batch)
        return lambda: ask(model, batch), form
    if isinstance(batch, Mapping):
        return lambda: model(**batch), "model(**batch)"
    if not isinstance(batch, (tuple, list)):
        return lambda: model(batch), "model(batch)"
    with contextlib.suppress(TypeError, ValueError):
        takes = inspect.signature(model.forward)
        try:
            takes.bind(*batch)
        except TypeError:
            takes.bind(batch[0])
            return lambda: model(batch[0]), "model(batch[0])"
    return lambda: model(*batch), "model(*batch)"
