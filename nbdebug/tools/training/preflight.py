"""`preflight(model, loader, loss_fn, ...)`: everything that can be known before training.

Each probe in turn (`static_facts`), on a copy, with everything put back. Where model and optimizer can't be copied,
they are used themselves and put back afterwards. Random numbers, the loader's included, are as before.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import math
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.arguments import completed, planned_optimizers, trainer_of
from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.sources import edited_functions, name_of, nodes_of
from nbdebug.observe.tensors import kinds_of
from nbdebug.observe.validation import check_loss, check_model, loss_call, optimizers_of
from nbdebug.report import Finding, Report, Where
from nbdebug.text import size
from nbdebug.tools.training.batches import (
    Batches,
    drawn_validation,
    environment_notes,
    loss_reduction,
    other_partners,
    worker_draws,
)
from nbdebug.tools.training.edits import never_frozen, users_files
from nbdebug.tools.training.evaluate import (
    LossFn,
    ProbeErrors,
    batch_size,
    is_iterator,
    loss_value,
    mode,
    preserve_rng,
    repeatable_loss,
)
from nbdebug.tools.training.facts import TrainingFacts
from nbdebug.tools.training.fixes import attempt, edit_fixes, fix_for, overfit_batch, patched
from nbdebug.tools.training.one_step import (
    Calls,
    StepGraph,
    at_bound,
    calls_for,
    detached_places,
    foreign_tensors,
    has_nonfinite,
    held_elsewhere,
    loss_parameters,
    optimizer_code,
    own_backwards,
    parameter_table,
    record,
    step_graph,
)
from nbdebug.tools.training.outputs import (
    DIFFERENCES,
    SIGNED,
    always_dropping,
    broadcasts,
    hiding_masks,
    loss_calls,
    over_all_batches,
    refused_labels,
    scores_for_shares,
    with_measured_reach,
    wrong_calls,
)
from nbdebug.tools.training.probe import LoopArguments, first_steps
from nbdebug.tools.training.report import NO_OPTIMIZER, preflight_report
from nbdebug.tools.training.rows import (
    batch_mixing,
    by_place,
    ignores_input,
    mixed_samples,
    sees_ahead,
    twins,
    unshifted_edges,
)
from nbdebug.tools.training.rules import name_all, slug
from nbdebug.tools.training.signals import activation_units, first_layers, initial_weights
from nbdebug.tools.training.static_facts import Attempt, OverfitResult, Parameter, StaticFacts, WrongCall

CALL = "preflight(model, loader, loss_fn)"
LARGE = 2 << 30
"""Bytes of parameters above which no further copies are made."""
SHAPED = frozenset({"view", "reshape"})
"""Names of what gives a text columns, to find the line."""
UNITS_FROM = 4
"""Batches over which a unit has to be zero to count as dead."""
SECONDS = 60.0
"""The time for all probes."""
RUN_SHOWS = frozenset({"frozen-parameters", "dead-relu", "saturated-activation", "zero-loss", "unshuffled-data"})
"""Causes whose fix a watched run tries better."""


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


def static_facts(
    model: nn.Module,
    loader: Any,
    loss_fn: Callable[..., Any],
    *,
    optimizer: Any = None,
    val_loader: Any = None,
    scheduler: Any = None,
    overfit: bool = True,
    seconds: float = SECONDS,
) -> StaticFacts:
    """Everything that can be known before training, and for the causes that it names, whether their fix helps.

    overfit: also try to overfit one batch (up to 600 steps); without it a watched run is to follow, which tries some of
    the fixes itself. seconds: what has not begun by then is not examined, and `unchecked` says so; tries stop there.
    Exceptions of the model, the loss and the loader pass unchanged. Raises TypeError or ValueError for arguments that
    make no sense, among them a loader that can be read only once and one without batches.
    """
    began = time.monotonic()
    optimizers = _checked(model, loader, loss_fn, optimizer)
    others = [scheduler] if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else []
    start = Snapshot.take(model, optimizers, others=others)
    try:
        with _eager(), _bar() as tick, preserve_rng(loader, val_loader, loss_fn):
            probes = _Probes(model, loader, loss_fn, optimizers, val_loader, tick, began + seconds, seconds)
            facts = probes.run(overfit)
    finally:
        start.restore()
    return dataclasses.replace(
        facts, seconds=time.monotonic() - began, scheduler="" if scheduler is None else type(scheduler).__name__
    )


def _checked(model: Any, loader: Any, loss_fn: Any, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list. Raises TypeError for what is no model, no loader, no function or no optimizer."""
    check_model(model, CALL)
    check_loss(loss_fn, CALL)
    readable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not readable or is_iterator(loader):
        raise TypeError(
            "loader must be something that can be read more than once, such as a DataLoader or a list of "
            f"batches; got {type(loader).__name__}, which goes on where it was left (check_loader says more)"
        )
    return list(optimizers_of(optimizer, CALL).values())


def _placed(model: nn.Module) -> str:
    """ "float32 on cpu; buffers on cuda:0": buffers only where no parameter is on their device."""
    parameters = list(model.parameters())
    apart = {str(b.device) for b in model.buffers()} - {str(p.device) for p in parameters}
    others = f"; buffers on {', '.join(sorted(apart))}" if apart and parameters else ""
    return kinds_of(parameters) + others if parameters else ""


@dataclasses.dataclass
class _Probes:
    """The probes of one call. work: the model that is used, a copy wherever there can be one; loss_fn: as
    loss_fn(model, batch)."""

    model: nn.Module
    loader: Any
    users_loss_fn: Any
    users_optimizers: list[torch.optim.Optimizer]
    val_loader: Any
    tick: Callable[[str], None]
    deadline: float
    seconds: float

    def __post_init__(self) -> None:
        self.errors, self.unchecked = ProbeErrors(), list[str]()
        self.loss_fn: LossFn
        self.work, self.optimizers = self.model, self.users_optimizers
        with contextlib.suppress(Exception):  # lambdas, locks, tensors with a history: then the original is used
            self.work, self.optimizers = copy.deepcopy((self.model, self.users_optimizers))

    def run(self, overfit: bool) -> StaticFacts:
        """Each probe in turn."""
        self.tick("reading")
        batches = Batches.read(self.loader, self.val_loader)
        if not batches.train:
            raise ValueError("loader gave no batch: there is nothing to examine")
        batch = batches.train[0]
        self.loss_fn, form = loss_call(self.users_loss_fn)
        self.tick("one step")
        step = self._step(batch)
        if isinstance(step, StaticFacts):  # the loss refuses its targets
            calls = tuple(over_all_batches(call, batches.train) for call in step.loss_calls)
            facts = dataclasses.replace(step, loss_form=form, loss_calls=calls)
            return self._finished(dataclasses.replace(facts, attempts=self._attempts(facts, batches, overfit)))
        facts = dataclasses.replace(self._step_facts(step, batches), loss_form=form)
        measured = self._probe(
            "What the outputs can reach",
            lambda: with_measured_reach(self.work, self.loss_fn, batch, facts.loss_calls),
            facts.loss_calls,
        )
        of_pairs = (over_all_batches(call, batches.train) if call.op in SIGNED else call for call in measured)
        facts = dataclasses.replace(facts, loss_calls=tuple(of_pairs))
        self._probe("Inputs and targets", lambda: batches.find_roles(step, facts.loss_calls), None)
        facts = dataclasses.replace(facts, **self._data_facts(batches))
        facts = dataclasses.replace(facts, **self._model_facts(batch, batches))
        facts = dataclasses.replace(facts, attempts=self._attempts(facts, batches, overfit))
        if overfit and not any(a.verified for a in facts.attempts.values()):
            facts = dataclasses.replace(facts, overfit=self._overfit(batch, facts.floor[0]))
        return self._finished(facts)

    def _finished(self, facts: StaticFacts) -> StaticFacts:
        missing = []
        if not self.users_optimizers:
            missing.append(NO_OPTIMIZER)
        if self.val_loader is None:
            missing.append("Training against validation: no val_loader was given")
        return dataclasses.replace(facts, unchecked=(*self.unchecked, *self.errors.lines, *missing))

    def _step(self, batch: Any) -> StepGraph | StaticFacts:
        """One forward and backward; on the original where the loss is not that of the model it is given."""
        for attempts in range(3):
            calls = calls_for(self.work, batch)
            try:
                step = step_graph(calls, self.loss_fn, batch)
            except Exception as error:
                refusal = refused_labels(calls)
                if refusal is not None:
                    return StaticFacts(loss_calls=(refusal,), has_optimizer=bool(self.users_optimizers))
                if self.work is not self.model and isinstance(error, LookupError):
                    self.work, self.optimizers = self.model, self.users_optimizers  # no other can stand in for it
                    continue
                if attempts or not self._moves_batches(error):
                    raise
                continue
            own = {id(p) for p in self.model.parameters()}
            if self.work is not self.model and any(id(p) in own for _, p in calls.parameters):
                # loss_fn uses a model of its own: the original
                self.work, self.optimizers = self.model, self.users_optimizers
                continue
            return step
        return step

    def _moves_batches(self, error: Exception) -> bool:
        """Batches come on the CPU and the loop moves them: do the same from now on."""
        device = next((p.device for p in self.work.parameters()), torch.device("cpu"))
        if device.type == "cpu" or not isinstance(error, (RuntimeError, TypeError)):
            return False
        inner = self.loss_fn
        self.loss_fn = lambda model, batch: inner(model, tree_map_only(torch.Tensor, lambda t: t.to(device), batch))
        return True

    def _parameter_table(self, step: StepGraph) -> tuple[Parameter, ...]:
        """A loss function's own parameters are not copied: the optimizers that were given hold them."""
        every = [*self.optimizers, *self.users_optimizers]
        optimizers = self.optimizers if self.work is self.model else every
        of_loss = loss_parameters(self.users_loss_fn, self.work)
        return held_elsewhere(parameter_table(self.work, optimizers, step, of_loss), self.model, every, of_loss)

    def _step_facts(self, step: StepGraph, batches: Batches) -> StaticFacts:
        table = self._probe("The parameters", lambda: self._parameter_table(step), ())
        has_optimizer = bool(self.users_optimizers)

        def loss_again() -> float:
            return repeatable_loss(self.work, self.loss_fn, batches.train[0])

        return StaticFacts(
            loss=step.value,
            finite=math.isfinite(step.value),
            has_optimizer=has_optimizer,
            optimizer=optimizer_code(self.users_optimizers),
            parameters=table,
            placed=_placed(self.model),
            bad_gradients=tuple(
                name for name, p in step.calls.parameters if name and has_nonfinite(step.gradients.get(id(p)))
            ),
            at_bound=self._probe("Where all values are at a bound", lambda: at_bound(step), None),
            detached=self._probe(
                "Cuts of the graph",
                lambda: (
                    *detached_places(step, table, has_optimizer, loss_again),
                    *hiding_masks(step.calls, batches.train[0]),
                ),
                (),
            ),
            foreign=self._probe(
                "Tensors of another model in the optimizer",
                lambda: foreign_tensors(self.work, self.optimizers, step),
                None,
            ),
            never_frozen=self._probe("Lines that freeze nothing", lambda: self._never_frozen(table), None),
            wrong_calls=self._probe("Calls that can't be meant", lambda: self._wrong_calls(step, batches), ()),
            loss_calls=self._probe("The inputs of the loss", lambda: loss_calls(step.calls), ()),
            broadcasts=self._probe("Shapes in the loss", lambda: broadcasts(step.calls), ()),
            first_layers=self._probe("The scale of the inputs", lambda: first_layers(step), ()),
            weights=self._probe("The initial weights", lambda: initial_weights(step), ()),
            normalized=any("Norm" in type(m).__name__ for m in self.work.modules()),
            samples=batches.samples,
            batch_size=batch_size(batches.train[0]),
            eval_mode=not self.model.training,
        )

    def _cut_across(self, batches: Batches) -> Iterator[WrongCall]:
        """A text in columns whose next word stands beside a word, and not below it: where it was given its shape."""
        along, across, by_chance = batches.columns_of_text() or (0.0, 0.0, 0.0)
        if across <= 2 * max(along, by_chance):
            return
        sites = {
            Site(file, node.lineno, "")
            for file in users_files(self.model, self.users_loss_fn)
            for node in nodes_of(file)
            if isinstance(node, ast.Call) and name_of(node) in SHAPED and len(node.args) == 2
            if all(isinstance(argument, ast.Name) for argument in node.args)
        }
        where = at_site(Where(), sites.pop()) if len(sites) == 1 else Where()
        yield WrongCall("text cut across", "view", where, (across, along, by_chance))

    def _wrong_calls(self, step: StepGraph, batches: Batches) -> tuple[WrongCall, ...]:
        batch = batches.train[0]
        in_eval = calls_for(self.work, batch)
        with mode(self.work, False), preserve_rng(self.loss_fn), torch.no_grad():
            record(in_eval, self.loss_fn, batch)
            wrong = *wrong_calls(step.calls), *always_dropping(in_eval, self.work), *_normalized_alone(in_eval)
            more = *unshifted_edges(in_eval, batch), *self._cut_across(batches), *other_partners(step.calls, batch)
            left = batches.left_out(lambda b: loss_value(self.loss_fn(self.work, b)))
            wrong = *wrong, *more, *([] if left is None else [WrongCall("left out", "forward", Where(), left)])
        return *wrong, *own_backwards(self.work)

    def _never_frozen(self, table: tuple[Parameter, ...]) -> tuple[tuple[str, ...], Where] | None:
        moving = [p.name for p in table if p.trained and p.reached and p.held is not False and not p.outside]
        return never_frozen(self.model, moving, users_files(self.model, self.users_loss_fn))

    def _data_facts(self, batches: Batches) -> dict[str, Any]:
        self.tick("data")
        facts: dict[str, Any] = {
            "labels": self._probe("The labels", batches.labels, None),
            "input_shift": self._probe("Training against validation inputs", batches.input_shift, None),
            "overlap": self._probe("Rows in both training and validation", batches.overlap, None),
        }
        facts["drawn"] = self._probe("The sampler's weights", batches.drawn, None)
        facts["reread"] = self._probe("A sample that is read again", batches.reread, "")
        facts["silent_end"] = self._probe("Ends that are no targets", batches.silent_end, None)
        facts["wraps"] = self._probe("Whether a target is an angle", batches.wrapping, None)
        facts["padding"] = self._probe("Padding", batches.padding, 0.0)
        if facts["drawn"] is None:  # else a few rows come again and again, and any column tells their labels
            facts["answers"] = self._probe("Answers among the inputs", batches.answers_among_inputs, None)
        facts["groups"] = self._probe(
            "Subjects in both training and validation", lambda: batches.groups(self.users_loss_fn), None
        )
        self.tick("workers")
        facts["workers"], why = self._probe(
            "What the workers draw",
            lambda: worker_draws(self.loader, max(1.0, (self.deadline - time.monotonic()) / 2)),
            (None, ""),
        )
        self.unchecked += [why] * bool(why)
        return facts

    def _model_facts(self, batch: Any, batches: Batches) -> dict[str, Any]:
        self.tick("samples")
        topic = "Whether samples mix"
        mixed = self._probe("Rows that are mixed", lambda: mixed_samples(self.work, self.loss_fn, batches), None)
        mixing, why = None, ""
        text = self._probe("Which dimension of a text is time", batches.columns_of_text, None)
        if text is not None:
            why = "Whether samples mix: the first dimension of a batch is time"
        elif mixed is None:
            mixing, why = self._probe(topic, lambda: batch_mixing(self.work, self.loss_fn, batch), (None, ""))
        self.unchecked += [why] * bool(why)
        if (
            mixing is None and text is None and len(batches.train) > 1
        ):  # one batch in one order may have a code for each row
            mixing = self._probe("Whether a row matters", lambda: by_place(self.work, self.loss_fn, batch), None)
        facts: dict[str, Any] = {
            "mixing": mixing,
            "mixed": mixed,
            "ahead": self._probe(
                "Whether outputs see what they predict", lambda: sees_ahead(self.work, self.loss_fn, batch), None
            ),
            "twins": self._probe("Keys twice in a batch", lambda: twins(self.work, self.loss_fn, batch), None),
            "scores_for_shares": self._probe(
                "Whether a loss of overlaps gets raw scores",
                lambda: scores_for_shares(self.work, self.loss_fn, batch),
                None,
            ),
            "mixing_checked": topic not in self.errors.by_topic and not self._late and not why and mixed is None,
            "ignores_input": self._probe(
                "Whether the input matters", lambda: ignores_input(self.work, self.loss_fn, batch, batches.inputs), None
            ),
        }
        self.tick("activations")
        facts["units"] = self._probe(
            "Dead and saturated units",
            lambda: activation_units(self.work, self.loss_fn, batches.train[:UNITS_FROM])[0],
            (),
        )
        facts["reduction"] = self._probe(
            "Half batches against the whole", lambda: loss_reduction(self.work, self.loss_fn, batch), ""
        )
        drawn = self._probe("Whether validation items are drawn", lambda: [*drawn_validation(self.val_loader)], [])
        facts["notes"] = (*environment_notes(self.model, self.loader, self.users_loss_fn), *drawn)
        return facts

    def _overfit(self, batch: Any, floor: float) -> OverfitResult | None:
        topic = "Overfitting one batch"
        if self._too_large:
            self.unchecked.append(f"{topic}: {self._too_large}")
            return None
        self.tick("one batch")
        return self._probe(
            topic, lambda: overfit_batch(self.work, self.optimizers, self.loss_fn, batch, self.deadline, floor), None
        )

    def _attempts(self, facts: StaticFacts, batches: Batches, overfit: bool) -> dict[str, Attempt]:
        """The fixes of the causes that these facts name, tried; by the cause."""
        self.tick("fixes")
        attempts: dict[str, Attempt] = {}
        for finding in name_all(TrainingFacts(facts)):
            name = slug(finding)
            if overfit or name not in RUN_SHOWS:
                attempts[name] = self._probe(
                    f"Whether the fix of {name} helps",
                    lambda f=finding: self._attempt(f, facts, batches),  # type: ignore[misc]
                    Attempt(why="there was no time" if self._late else "trying it failed"),
                )
        return attempts

    def _attempt(self, finding: Finding, facts: StaticFacts, batches: Batches) -> Attempt:
        """As an edit of the user's own lines, where one can be written and run; else as an experiment."""
        if self._too_large:
            return Attempt(why=self._too_large)
        tries = (self.work, self.optimizers, self.loss_fn, batches.train[0])
        undecided = None
        for fix in edit_fixes(finding, facts, self.work, self.loss_fn, batches.train, batches.inputs):
            result = attempt(*tries, fix, self.deadline)
            if finding.code == "training/batch-mixing" and fix.edit is not None and result.fixed:
                with contextlib.nullcontext() if fix.patch is not None else edited_functions(fix.edit):
                    left = batch_mixing(self.work, patched(self.loss_fn, fix), batches.train[0])
                others, kept = (0, "") if left[0] is None else (None, result.why)
                result = dataclasses.replace(result, verified=left == (None, ""), others=others, why=kept)
            if result.verified:
                return result
            undecided = result if undecided is None and result.verified is None and result.fixed else undecided
        other = fix_for(finding, facts, self.work, batches.train, batches.inputs)
        if undecided is not None:
            return undecided
        return Attempt(why=other) if isinstance(other, str) else attempt(*tries, other, self.deadline)

    @property
    def _too_large(self) -> str:
        parameters = sum(p.numel() * p.element_size() for p in self.work.parameters())
        return f"it takes copies, and the model is large ({size(parameters)})" if parameters > LARGE else ""

    @property
    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _probe(self, topic: str, probe: Callable[[], Any], default: Any) -> Any:
        """The border: where a probe of ours fails, or no time is left for it, the report says so, and others go on."""
        if self._late:
            self.unchecked.append(f"{topic}: the {self.seconds:g} s for preflight were over")
            return default
        return self.errors.run(topic, probe, default)


def _normalized_alone(calls: Calls) -> Iterator[WrongCall]:
    """A normalization of what comes from the batch, each of whose groups is a single number: by a function of torch's,
    or written out as the difference from a mean along a dimension with one entry."""
    for call in calls.calls:
        x, groups = next(iter(call.inputs), None), 0
        if x is None or not call.leaves or x.numel() < 2:
            continue
        if call.op == "layer_norm":
            groups = x.numel() // max(math.prod(call.argument(1, "normalized_shape")), 1)
        elif call.op == "group_norm":
            groups = len(x) * call.argument(1, "num_groups")
        elif call.op in DIFFERENCES and len(call.inputs) == 2:
            mean = calls.dependence(call.inputs[1]).maker
            groups = call.inputs[1].numel() if mean is not None and mean.op == "mean" and mean.inputs[0] is x else 0
        if groups == x.numel() and bool((x != x.flatten()[0]).any()):
            yield WrongCall("normalized alone", call.op, call.where, tuple(x.shape))


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs in eager, so that every call is recorded."""
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
