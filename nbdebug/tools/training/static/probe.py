"""From the user's model, loader and loss to a `Before`: each probe in turn, on a copy, with everything put back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.live import progress_bar
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.validation import check_loss, check_model, loss_call, optimizers_of
from nbdebug.report import Finding
from nbdebug.tools.training.facts import Attempt, OverfitResult, Parameter, StaticFacts, TrainingFacts
from nbdebug.tools.training.probe_errors import ProbeErrors
from nbdebug.tools.training.rules import name_all, slug
from nbdebug.tools.training.run.data import iter_is_itself, unnoticed
from nbdebug.tools.training.run.layers import look as look_at_units
from nbdebug.tools.training.static import environment as surroundings
from nbdebug.tools.training.static.batch_mixing import batch_size, mixing
from nbdebug.tools.training.static.batches import BatchesRead, ignores, read
from nbdebug.tools.training.static.environment import workers
from nbdebug.tools.training.static.fixes import attempt, remedy
from nbdebug.tools.training.static.one_step import bad, begin, run
from nbdebug.tools.training.static.outputs import broadcasts, losses, over_all, refused
from nbdebug.tools.training.static.overfit_batch import heart
from nbdebug.tools.training.static.parameters import (
    again,
    as_written,
    brought_along,
    cuts,
    held_elsewhere,
    ledger,
    strangers,
)
from nbdebug.tools.training.static.signals import entries, weights

CALL = "preflight(model, loader, loss_fn)"
LARGE = 2 << 30
"""Bytes of parameters above which no further copies are made."""
UNITS_FROM = 4
"""Batches over which a unit has to be zero to count as dead."""


SECONDS = 60.0
"""The time of a whole look."""
RUN_SHOWS = frozenset({"frozen-parameters", "dead-relu", "saturated-activation", "zero-loss", "unshuffled-data"})
"""Causes whose fix a watched run tries better."""


def look(
    model: nn.Module,
    loader: Any,
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    by_heart: bool = True,
    seconds: float = SECONDS,
) -> StaticFacts:
    """Everything that can be known before training, and for the causes that it names, whether their fix helps.

    by_heart: also try to learn one batch by heart (up to 600 steps); without it a watched run is to follow, which tries
    some of the fixes itself. seconds: what has not begun by then is not looked at, and `unchecked` says so; tries stop
    there. Exceptions of the model, the loss and the loader pass unchanged. Raises TypeError or ValueError for arguments
    that make no sense, among them a loader that can be read only once and one without batches.
    """
    began = time.monotonic()
    optimizers = checked(model, loader, loss_fn, optimizer)
    others = [scheduler] if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else []
    start = Snapshot.take(model, optimizers, others=others)
    try:
        with _eager(), _bar() as tick, unnoticed(loader, val_loader, loss_fn):
            looking = _Looking(model, loader, loss_fn, optimizers, val_loader, tick, began, seconds)
            before = looking.all(by_heart)
    finally:
        start.restore()
    return dataclasses.replace(
        before, seconds=time.monotonic() - began, scheduler="" if scheduler is None else type(scheduler).__name__
    )


def checked(model: Any, loader: Any, loss_fn: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises TypeError for what is no model, no loader, no function or no optimizer."""
    check_model(model, CALL)
    check_loss(loss_fn, CALL)
    readable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not readable or iter_is_itself(loader):
        raise TypeError(
            "loader must be something that can be read more than once, such as a DataLoader or a list of "
            f"batches; got {type(loader).__name__}"
        )
    return list(optimizers_of(optimizer, CALL).values())


class _Looking:
    """One look. work: the model that is worked on, a copy wherever there can be one."""

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        loss_fn: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        val_loader: Any,
        tick: Callable[[str], None],
        began: float,
        seconds: float,
    ):
        self.model, self.loader, self.loss_fn, self.val_loader, self.tick = model, loader, loss_fn, val_loader, tick
        self.deadline, self.seconds = began + seconds, seconds
        self.faults = ProbeErrors()
        self.unchecked: list[str] = []
        self.given = list(optimizers)
        self.work, self.optimizers = self._copy(model, self.given)
        self.optimizer_given = bool(optimizers)
        self.ask: Callable[[Any, Any], Any]

    def _copy(self, model: nn.Module, optimizers: list[Any]) -> tuple[nn.Module, list[Any]]:
        try:
            return copy.deepcopy((model, optimizers))
        except Exception:  # lambdas, locks, tensors with a history: then on the original, which is put back
            return model, optimizers

    def all(self, by_heart: bool) -> StaticFacts:
        """Each probe in turn."""
        self.tick("reading")
        found = read(self.loader, self.val_loader)
        if not found.train:
            raise ValueError("loader gave no batch: there is nothing to look at")
        batch = found.train[0]
        self.ask, form = loss_call(self.loss_fn)
        self.tick("one step")
        begun = self._step(batch)
        if isinstance(begun, StaticFacts):  # the loss refuses its targets
            begun = dataclasses.replace(begun, form=form, losses=tuple(over_all(c, found.train) for c in begun.losses))
            return self._ended(dataclasses.replace(begun, attempts=self._attempts(begun, found, by_heart)))
        facts = dataclasses.replace(self._of_step(begun, found), form=form)
        self._try("Inputs and targets", lambda: found.roles(begun, facts.losses), None)
        facts = dataclasses.replace(facts, **self._of_data(found))
        facts = dataclasses.replace(facts, **self._of_model(batch, found))
        attempts = self._attempts(facts, found, by_heart)
        facts = dataclasses.replace(
            facts,
            attempts=attempts,
            heart=None if any(a.verified for a in attempts.values()) or not by_heart else self._heart(batch),
        )
        return self._ended(facts)

    def _ended(self, facts: StaticFacts) -> StaticFacts:
        return dataclasses.replace(facts, unchecked=(*self.unchecked, *self.faults.lines, *self._not_given()))

    def _step(self, batch: Any) -> Any:
        """One forward and backward; on the original where the loss is not that of the model it is given."""
        for times in range(3):
            calls = begin(self.work, batch)
            try:
                step = run(calls, self.ask, batch)
            except Exception as error:
                refusal = refused(calls)
                if refusal is not None:
                    return StaticFacts(losses=(refusal,), has_optimizer=self.optimizer_given)
                if times or not self._elsewhere(error):
                    raise
                continue
            own = {id(p) for p in self.model.parameters()}
            if self.work is not self.model and any(id(p) in own for _, p in calls.parameters):
                self.work, self.optimizers = self.model, self.given  # loss_fn uses a model of its own: the same one
                continue
            return step
        return step

    def _elsewhere(self, error: Exception) -> bool:
        """Batches come on the CPU and the loop moves them: do the same from now on."""
        device = next((p.device for p in self.work.parameters()), torch.device("cpu"))
        if device.type == "cpu" or not isinstance(error, (RuntimeError, TypeError)):
            return False
        inner = self.ask
        self.ask = lambda model, batch: inner(model, tree_map_only(torch.Tensor, lambda t: t.to(device), batch))
        return True

    def _ledger(self, step: Any) -> tuple[Parameter, ...]:
        """A loss function's own parameters are no copies: what holds them are the optimizers that were given."""
        optimizers = self.optimizers if self.work is self.model else [*self.optimizers, *self.given]
        lines = ledger(self.work, optimizers, step, brought_along(self.loss_fn, self.work))
        return held_elsewhere(lines, self.model, [*self.optimizers, *self.given])

    def _of_step(self, step: Any, found: BatchesRead) -> StaticFacts:
        parameters = self._try("The parameters", lambda: self._ledger(step), ())
        named = [(name, p) for name, p in step.calls.parameters if name]
        own = list(self.work.parameters())
        return StaticFacts(
            loss=step.value,
            finite=math.isfinite(step.value),
            has_optimizer=self.optimizer_given,
            optimizer=as_written(self.given),
            parameters=parameters,
            bad_gradients=tuple(name for name, p in named if bad(step.gradients.get(id(p)))),
            cuts=self._try(
                "Cuts of the graph",
                lambda: cuts(
                    step, parameters, self.optimizer_given, lambda: again(self.work, self.ask, found.train[0])
                ),
                (),
            ),
            strangers=self._try(
                "Strange tensors in the optimizer", lambda: strangers(self.work, self.optimizers, step), None
            ),
            losses=self._try("What the loss is given", lambda: losses(step.calls, step.loss), ()),
            broadcasts=self._try("Shapes in the loss", lambda: broadcasts(step.calls), ()),
            entries=self._try("The scale of the inputs", lambda: entries(step), ()),
            weights=self._try("The initial weights", lambda: weights(step), ()),
            norms=any("Norm" in type(m).__name__ for m in self.work.modules()),
            samples=found.samples,
            batch_size=batch_size(found.train[0]),
            eval_mode=not self.model.training,
            devices=tuple(sorted({str(p.device) for p in own})),
            dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in own})),
        )

    def _of_data(self, found: BatchesRead) -> dict[str, Any]:
        self.tick("data")
        facts: dict[str, Any] = {
            "labels": self._try("The labels", found.labels, None),
            "shift": self._try("Training against validation inputs", found.shift, None),
            "overlap": self._try("Rows in both training and validation", found.overlap, None),
        }
        self.tick("workers")
        facts["workers"], why = self._try(
            "What the workers draw",
            lambda: workers(self.loader, max(1.0, (self.deadline - time.monotonic()) / 2)),
            (None, ""),
        )
        self.unchecked += [why] * bool(why)
        return facts

    def _of_model(self, batch: Any, found: BatchesRead) -> dict[str, Any]:
        self.tick("samples")
        mixed, why = self._try("Whether samples mix", lambda: mixing(self.work, self.ask, batch), (None, ""))
        self.unchecked += [why] * bool(why)
        looked = "Whether samples mix" not in self.faults.told and not self._late
        facts: dict[str, Any] = {
            "mixing": mixed,
            "mixing_checked": looked and not why,
            "ignores_input": self._try(
                "Whether the input matters", lambda: ignores(self.work, self.ask, batch, found.inputs), None
            ),
        }
        self.tick("activations")
        facts["units"] = self._try(
            "Dead and saturated units", lambda: look_at_units(self.work, self.ask, found.train[:UNITS_FROM])[0], ()
        )
        facts["accumulates"] = self._try(
            "Half batches against the whole", lambda: surroundings.accumulation(self.work, self.ask, batch), ""
        )
        facts["notes"] = tuple(surroundings.notes(self.model, self.loader, self.loss_fn))
        return facts

    def _heart(self, batch: Any) -> OverfitResult | None:
        if self._too_large:
            self.unchecked.append(f"One batch by heart: {self._too_large}, and it takes copies")
            return None
        self.tick("by heart")
        return self._try(
            "One batch by heart", lambda: heart(self.work, self.optimizers, self.ask, batch, self.deadline), None
        )

    def _attempts(self, facts: StaticFacts, found: BatchesRead, by_heart: bool) -> dict[str, Attempt]:
        """The fixes of the causes that these facts name, tried; by the cause."""
        self.tick("fixes")
        tried: dict[str, Attempt] = {}
        for finding in name_all(TrainingFacts(facts)):
            name = slug(finding)
            if by_heart or name not in RUN_SHOWS:
                tried[name] = self._try(
                    f"Whether the fix of {name} helps",
                    lambda f=finding: self._attempt(  # type: ignore[misc]
                        f, facts, found
                    ),
                    Attempt(why="there was no time" if self._late else "trying it failed"),
                )
        return tried

    def _attempt(self, finding: Finding, facts: StaticFacts, found: BatchesRead) -> Attempt:
        cure = remedy(finding, facts, self.work, found.train, found.inputs)
        if isinstance(cure, str):
            return Attempt(why=cure)
        if self._too_large:
            return Attempt(why=f"{self._too_large}, and it takes copies")
        return attempt(self.work, self.optimizers, self.ask, found.train[0], cure, self.deadline)

    @property
    def _too_large(self) -> str:
        size = sum(p.numel() * p.element_size() for p in self.work.parameters())
        return f"the model is large ({size / 2**30:.1f} GiB)" if size > LARGE else ""

    @property
    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _try(self, what: str, probe: Callable[[], Any], default: Any) -> Any:
        """The border: a probe of ours that fails, or for which no time is left, is told, and the others go on."""
        if self._late:
            self.unchecked.append(f"{what}: the {self.seconds:g} s of this look were over")
            return default
        return self.faults.ask(what, probe, default)

    def _not_given(self) -> list[str]:
        missing = [] if self.optimizer_given else ["Which parameters an optimizer holds: no optimizer was given"]
        return missing + (["Training against validation: no val_loader was given"] if self.val_loader is None else [])


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs in eager, so that every call is seen."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[str], None]]:
    with progress_bar("preflight", "checks", 8) as bar:

        def tick(what: str) -> None:
            bar.set_description_str(f"preflight: {what}", refresh=False)
            bar.update()

        yield tick
