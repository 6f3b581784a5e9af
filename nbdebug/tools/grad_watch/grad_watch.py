"""`grad_watch`: gradients, updates, units and losses of a training, by name, while it runs.

    backward ends ──▶ norms of all gradients ─┐
    an optimizer is about to step ──▶ again,  ├─▶ deferred: read when ready ──▶ history ──▶ frame, figure, report
        where something has clipped them      │
    it has stepped ──▶ what it has changed ───┘

A fault of the watch's own never reaches the training: it is reported once, and the watch ends.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch

from nbdebug.arguments import Subject, opened
from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.live import Live
from nbdebug.observe.backward import EngineWatch
from nbdebug.observe.step_hooks import OptimizerSteps
from nbdebug.observe.validation import check_scaler, models_of, optimizers_of
from nbdebug.report import Plot, Report
from nbdebug.text import in_a_line
from nbdebug.tools.grad_watch import history as tables
from nbdebug.tools.grad_watch import report as account
from nbdebug.tools.grad_watch.history import TOTALS, ThinnedSeries, WatchHistory
from nbdebug.tools.grad_watch.probe import LayerUnits, UnitWatch, WatchedParameters
from nbdebug.tools.grad_watch.steps import WatchSteps
from nbdebug.verdict import Verdict, smoothed_entropy, verdicts

CALL = "grad_watch(model, optimizer)"


def grad_watch(
    model: Any,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    every: int = 1,
    ratios_every: int = 10,
    activations_every: int = 10,
    keep: int = 1000,
) -> GradWatch:
    """Watch the gradients of a training until closed; nothing of the training changes, to the bit.

    model: a Module, a dict or list of them, a trainer that holds them, or None (the optimizers' parameters are
    watched); optimizer: an Optimizer, or several; without one, each that trains the model is taken at its first step.
    scaler: the GradScaler, found by itself where it makes the optimizer step. Norms are 2-norms, in units of the loss:
    a scaler's scale is divided out. Measured are, in every `every`-th step, each gradient's norm when the last backward
    before the update ended, and again at the update where something (clipping) has changed it since; in every
    `ratios_every`-th step the weights' norms and what the update really changed, over them; in every
    `activations_every`-th the units of activation modules (0: never). keep: so many last steps are kept whole, older
    ones thinned out. A step is a round of all optimizers.

    The host does not wait for an accelerator: numbers are read when they are ready, at most two steps later. Returns a
    GradWatch, to be used as a context manager or closed by `close()`. Raises TypeError or ValueError for arguments that
    make no sense.
    """
    pace = Sampling(every, ratios_every, activations_every, keep)
    check_scaler(scaler, CALL)
    model, optimizer = opened(model, optimizer)
    models = models_of(model, CALL)
    return GradWatch(models, optimizers_of(optimizer, CALL, required=not models), pace, scaler)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """In steps: every: between measurements of gradients; ratios_every: of updates; activations_every: of units (0:
    never); keep: how many steps are kept whole."""

    every: int = 1
    ratios_every: int = 10
    activations_every: int = 10
    keep: int = 1000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = {"every": 1, "keep": 10}.get(field.name, 0)
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name} is a whole number of steps, {least} or more; got {value!r}.")


class GradWatch:
    """A watch over gradients; see `grad_watch`. steps: how many were watched; history: what was measured; fault: why it
    has ended, live_fault: why its live view has; "" while they run."""

    def __init__(self, models: dict[str, Any], optimizers: dict[str, Any], pace: Sampling, scaler: Any):
        self.pace, self.active, self.fault, self.live_fault = pace, True, "", ""
        self._several = False
        self.subject = str(Subject(models, optimizers, True))
        self.roster, self.history = WatchedParameters(models, optimizers), WatchHistory(pace.keep)
        self.models, self.optimizers = dict(models), dict(optimizers)
        self.resumed = any(optimizer.state for optimizer in optimizers.values())
        self._steps = WatchSteps(self.roster, self.history, pace.every, pace.ratios_every, scaler, self._step_ended)
        self._units = UnitWatch(models, self._guarded, self._units_due) if pace.activations_every else None
        self._engine = EngineWatch(self._backward_began, self._backward_ended)
        self._recorded: ThinnedSeries[tuple[int, float | None, float | None]] = ThinnedSeries(TOTALS * pace.keep)
        self._rates: dict[int, float] = {}
        self._live: Live | None = None
        self._unheld = self.roster.unheld()
        self._updates = OptimizerSteps(self.models, self.optimizers, self._before, self._after, self._taken)
        self._attach()

    # -- attaching ----------------------------------------------------------------------------------------------------

    @undone_by("_detach")
    def _attach(self) -> None:
        self._engine.attach()
        self._steps.scaled.attach(self._guarded)
        self._updates.attach()
        if self._units is not None:
            self._units.attach()

    @uninterrupted
    def _detach(self) -> None:
        self._engine.detach()
        self._updates.detach()
        self._steps.scaled.detach()
        if self._units is not None:
            self._units.detach()

    def _taken(self, optimizer: Any) -> None:
        self.resumed = self.resumed or bool(optimizer.state)
        self.subject = str(Subject(self.models, self.optimizers, True))
        self.roster.optimizers = self.optimizers
        self._guarded(self.roster.refresh, optimizer)
        self._unheld = self.roster.unheld()

    def close(self) -> None:
        """Stop watching, for good. The measurements stay, as plain numbers."""
        try:
            if self.active:
                self._guarded(self._steps.finish)
                self._guarded(self._read_units)
        finally:
            self.active = False
            self._detach()
            self._steps.leave()
            if self._units is not None:
                self._units.forget()
            self._unheld = self.unheld
            self.roster.forget()
            self._several = len(self.optimizers) > 1
            self.models.clear()
            self.optimizers.clear()
            if self._live is not None:
                live, self._live = self._live, None
                live.end()
                self.live_fault = live.fault

    def __enter__(self) -> GradWatch:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close()

    # -- the border ---------------------------------------------------------------------------------------------------

    def _guarded(self, method: Callable, *args: Any) -> Any:
        """Call something of ours; what it raises ends the watch and not the training."""
        __tracebackhide__ = True
        if not self.active:
            return None
        try:
            return method(*args)
        except Exception as fault:
            self._disable(fault)
            return None

    def _disable(self, fault: Exception) -> None:
        """End the watch after a fault of our own; warn once. Hooks of optimizers go later: one of them may be
        running."""
        self.active, self.fault = False, in_a_line(fault)
        self._steps.leave()
        warnings.warn(
            f"nbdebug's grad_watch has stopped because of a fault of its own ({self.fault}). "
            "The training itself continues, unwatched.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _backward_began(self, call: Any) -> None:
        if not self.active:
            self._detach()
        self._guarded(self._steps.backward_began, call)

    def _backward_ended(self, call: Any, result: Any) -> None:
        self._guarded(self._steps.backward_ended, call, result)

    def _before(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling():
            self._guarded(self._steps.before, optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling():
            self._guarded(self._steps.after, optimizer)

    def _units_due(self) -> int | None:
        """The next step, if its units are sampled."""
        number = self._steps.number
        return number if number % self.pace.activations_every == 0 else None

    def _step_ended(self, step: int) -> None:
        if self._live is not None:
            self._live.step_ended()

    # -- losses -------------------------------------------------------------------------------------------------------

    def loss(self, step: int, value: Any, val: Any = None) -> None:
        """Record a loss: of a step of your own counting, a number or a tensor; val: a validation loss, if there is one
        (value may then be None). Recorded losses take the place of those that backward starts from. Raises TypeError
        for what is no number."""
        known = [None if v is None else loss_of(v) for v in (value, val)]
        total = next(reversed(self.history.totals.items), None)
        if total is not None and total.lr is not None:
            self._rates[int(step)] = total.lr
        self._recorded.append((int(step), known[0], known[1]))

    @property
    def losses(self) -> list[tuple[int, float | None, float | None]]:
        """(step, loss, validation loss): those recorded by `loss`, else the sums of what backward started from, thinned
        out. With several optimizers the latter are no one loss, and are left out."""
        return self.recorded_losses()

    def recorded_losses(self, most: int | None = None) -> list[tuple[int, float | None, float | None]]:
        """`losses`; most: of more than these every second, third …"""
        recorded, totals = self._recorded.items, self.history.totals.items
        apart = 1 if most is None else max(1, len(recorded or totals) // most)
        if recorded:
            return recorded[::apart]
        return (
            []
            if self._several or len(self.optimizers) > 1
            else [(t.step, t.loss, None) for t in totals[::apart] if t.loss is not None and not t.skipped]
        )

    def verdicts(self) -> tuple[Verdict, ...]:
        """What the losses show; see `verdict.verdicts`."""
        self._read_pending()
        return verdicts(self.losses, rates=self.rates)

    @property
    def smoothing(self) -> tuple[float, int]:
        """(share, classes) of smoothed labels, where the loss is one cross entropy of such and is as high as that says;
        else (0, 0)."""
        share, classes = self._steps.smoothing or (0.0, 0)
        floor = smoothed_entropy(share, classes) if classes else 0.0
        sure = self.losses and all(loss is None or loss > floor * 0.999 for _, loss, _ in self.losses)
        return (share, classes) if classes and sure else (0.0, 0)

    @property
    def rates(self) -> dict[int, float]:
        """The learning rate, by the steps of `losses`."""
        known = {t.step: t.lr for t in self.history.totals.items if t.lr is not None}
        return self._rates if self._recorded.items else known

    # -- results ------------------------------------------------------------------------------------------------------

    def _read_pending(self) -> None:
        """Wait for the measurements that are still pending."""
        self._guarded(self._steps.deferred.read_ready, True)

    def _read_units(self) -> None:
        if self._units is not None:
            self._units.read()

    @property
    def several(self) -> bool:
        """Whether several optimizers step, watched or not: their losses may pull at each other."""
        return len(self._updates.stepping) > 1

    @property
    def steps(self) -> int:
        return self.history.steps

    @property
    def names(self) -> list[str]:
        """The watched parameters, by the names that `frame` uses."""
        return list(self.roster.names)

    @property
    def unheld(self) -> list[str]:
        """The model's parameters that require a gradient and that no optimizer has."""
        return self.roster.unheld() if self.active else self._unheld

    @property
    def odd(self) -> int:
        """How many parameters can't be measured."""
        return len(self.roster.odd)

    @property
    def units(self) -> list[LayerUnits]:
        """Dead and saturated units, as far as sampled."""
        if self.active:
            self._guarded(self._read_units)
        return self._units.seen if self._units is not None else []

    @property
    def units_why_not(self) -> str:
        return self._units.why_not if self._units is not None else "not measured (activations_every=0)"

    @property
    def updates_full(self) -> bool:
        return self._steps.updates.full

    @property
    def frame(self) -> Any:
        """A pandas table with a row for each step and parameter: step, name, norm (before clipping), norm_after,
        weight_norm and update_ratio (NaN where they were not measured)."""
        self._read_pending()
        return tables.frame(self.history, self.roster.names)

    @property
    def totals(self) -> Any:
        """A pandas table with a row for each step: step, loss, norm, norm_after, clipped, skipped, lr, scale."""
        self._read_pending()
        return tables.totals(self.history)

    def report(self) -> Report:
        """The report so far."""
        self._read_pending()
        return account.report(self, self.subject)

    def figure(self) -> Any:
        """A matplotlib Figure: norms of layers over steps as a map, the rest as curves. ValueError if there is none."""
        return self.report().figure()

    def live(self, show: Callable[[str], object]) -> GradWatch:
        """Draw while training runs. show: called with the picture as HTML, at most five times a second; in a notebook
        `handle = display(HTML(""), display_id=True)` and `lambda html: handle.update(HTML(html))`. Returns the
        watch."""
        if not callable(show):
            raise TypeError(f"live takes a function that shows HTML; got {show!r}.")
        self.drawn(self.html, show)
        return self

    def html(self) -> str:
        """The picture as HTML (an <img>), as of the numbers that are ready."""
        plot = Plot("gradients", account.picture(self, quick=True))
        return str(Report(account.QUESTION, plots=(plot,))._view("plots.gradients", "html"))

    def panel(self) -> Any:
        """The report under controls (a filter of layers, scales, pause, refresh), redrawn while training runs and from
        the kept steps afterwards. It is shown as the last expression of a cell."""
        return self.report()._view("widgets", "gradients", self)

    def glance(self, layers: str = "") -> Report:
        """The picture alone as a report, of the layers that match (a part of the name, or a pattern with *): as of the
        numbers that are ready, without waiting."""
        return account.glance(self, self.subject, layers)

    def drawn(self, draw: Callable[[], str], show: Callable[[str], object]) -> Live:
        """Draw another view as `live` is drawn; it replaces the one before, which ends."""
        before, view = self._live, Live(draw, show)
        self._live = view if self.active else None
        if before is not None:
            before.end()
        return view

    def __repr__(self) -> str:
        return str(self.report())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.report()._repr_mimebundle_(include, exclude)


def loss_of(value: Any) -> float:
    """A loss, a number or a tensor, as a number. Raises TypeError for anything else."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a loss is a number or a tensor of one; got {str(value)[:80]}.") from None
