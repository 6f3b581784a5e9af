"""`nan_trace`: run a training step, and name what first made a NaN or an inf that mattered.

On a CPU each op is looked at while the step runs ("trace"). On an accelerator, where each look makes the host wait, the
step is only recorded, and looked at in a replay if it went bad ("replay").
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.arguments import Subject, discover
from nbdebug.interrupts import interruptible, uncollected
from nbdebug.observe.modules import eager
from nbdebug.observe.snapshot import StepState, has_hooks
from nbdebug.observe.tensors import tensors_in
from nbdebug.observe.validation import check_count, check_step, models_of, names_used_by, optimizers_of
from nbdebug.report import Report
from nbdebug.text import count
from nbdebug.tools.nan.facts import CompiledFacts, UnlocatedStep
from nbdebug.tools.nan.probe import Probe, StopCell
from nbdebug.tools.nan.report import compare_compiled, report_of
from nbdebug.tools.nan.rules import name_it
from nbdebug.tools.nan.trials import StepTrial

CALL = "nan_trace(step, model=, optimizer=)"
STRATEGIES = ("auto", "trace", "replay", "bisect")
Step = Callable[[], Any]


@interruptible
def nan_trace(
    step: Step,
    *,
    model: Any = None,
    optimizer: Any = None,
    max_steps: int = 1,
    strategy: str = "auto",
    restore: bool = False,
) -> Report:
    """Run a training step under observation and name what first made a NaN or an inf that mattered.

    step: a function of no arguments that performs one whole training step and returns its loss (a tensor, a float, a
    dict or an object with `loss`, or nothing if it calls `backward`). model: a Module, or a dict or list of them;
    optimizer: an Optimizer or a list. Left out, both are looked for among the variables that `step` uses. max_steps:
    call `step` until it fails, at most this often. strategy: "trace" looks at every op while the step runs; "replay"
    only records the step, and looks for the place in a replay of the recorded ops once something went bad (quicker on
    an accelerator, where each look makes the host wait); "bisect" runs the step itself again, with few looks, and
    refuses where it does not repeat; "auto" takes "replay" for models on an accelerator and "trace" elsewhere. restore:
    leave model, optimizer and random numbers as they were before, instead of where the steps have taken them.

    Returns a Report with one finding, or with none. An exception of the step passes through; when something was already
    not finite by then, the report on that is attached as `error.report`. Raises TypeError or ValueError for arguments
    that make no sense, StepDoesNotRepeat with strategy="bisect", NotLocated where a replay can't tell (if for
    want of memory, the report says so).
    """
    check(step, max_steps, strategy)
    arguments = StepArguments.of(step, model, optimizer)
    with _restored(arguments) if restore else contextlib.nullcontext():
        if strategy == "bisect":
            from nbdebug.tools.nan.bisect import bisect

            optimizers = list(arguments.optimizers.values())
            return bisect(
                step, arguments.models, optimizers, others=arguments.others, trace=lambda: _trace(arguments, 1, True)
            )
        return _trace(arguments, max_steps, _is_live(strategy, arguments))


@interruptible
def trace_cell(
    run: Step,
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    strategy: str = "auto",
) -> Report:
    """Watch a whole cell, a training loop included; it is stopped after the step that went bad.

    A step ends where the optimizers have stepped and the model is called again. Raises ValueError for
    strategy="bisect": a cell is run once. Exceptions of the cell pass through as with `nan_trace`.
    """
    if strategy == "bisect":
        raise ValueError(
            "A cell runs only once, so it can't be bisected; use strategy='trace', or %nan_trace with one step."
        )
    check_models(models)
    question, arguments = "%%nan_trace", StepArguments(run, dict(models), dict(optimizers), False, [])
    live = _is_live(strategy, arguments)
    probe = Probe(arguments.models, arguments.optimizers, scaler=True, cell=True, live=live, named=False)
    with contextlib.closing(probe):
        with eager() as notes, probe:
            probe.begin_step(0)
            try:
                run()
            except StopCell:
                pass
            except Exception as error:
                _attach(error, probe, question, arguments.subject, probe.step + 1)
                raise
            else:
                probe.end_step()
            detection = probe.detections.first
            if detection is not None and not probe.live:
                probe.__exit__()
                if unlocated := _locate(probe, detection, question, arguments.subject, probe.step + 1):
                    return unlocated
        with uncollected():
            return report_of(probe, detection, question, arguments.subject, probe.step + 1, notes=tuple(notes))


def _trace(arguments: StepArguments, max_steps: int, live: bool) -> Report:
    question, subject = "nan_trace(step)", arguments.subject
    probe = Probe(arguments.models, arguments.optimizers, arguments.scaler, live=live, named=arguments.named)
    detection, compiled, steps = None, None, 0
    states = _States(arguments)
    with contextlib.closing(probe):
        with eager() as notes:
            with probe:
                for steps in _counted(max_steps):
                    with uncollected():
                        states.take()
                        probe.begin_step(steps - 1)
                        try:
                            returned = arguments.step()
                        except StopIteration:
                            if steps == 1:
                                raise
                            steps -= 1
                            notes.append(f"The data ended after {count(steps, 'step')}.")
                            break
                        except Exception as error:
                            _attach(error, probe, question, subject, steps)
                            raise
                        detection = probe.end_step(returned)
                        del returned  # its graph must not outlive the step
                        if detection is None and probe.buffer_went_bad:
                            from nbdebug.tools.nan.locate import locate_buffer_origins

                            locate_buffer_origins(probe)
                        if detection is None and probe.compiled_calls:
                            compiled = _compare_compiled(probe, steps - 1)
                        if detection is not None or compiled is not None or probe.recorder.disabled_by:
                            break
            searched = detection is not None and not probe.live
            if searched and (unlocated := _locate(probe, detection, question, subject, steps)):
                return unlocated
        again = states.trial(steps - 1) if detection is not None else None
        with uncollected():
            return report_of(probe, detection, question, subject, steps, compiled, tuple(notes), again)


SMALL = 64 * 2**20
"""Bytes of a model and its optimizer on an accelerator that are copied before each step: an Adam that is yet to make
its state makes 400 MiB of them."""


class _States:
    """What the first step and the present one start from, so that a fix can be tried by the user's own code. With hooks
    on the models, and where a copy would take much of the memory, nothing is saved."""

    def __init__(self, arguments: StepArguments):
        self.arguments = arguments
        self.states: list[StepState] = []
        models, optimizers = arguments.models, arguments.optimizers
        self.possible = not has_hooks(models, optimizers) and arguments.is_small

    def take(self) -> None:
        if self.possible and not (self.states and self.states[0].why_not):
            arguments = self.arguments
            with _disable_current_modes():
                state = StepState.take(arguments.step, arguments.models, arguments.optimizers, arguments.others)
            self.states = [*self.states[:1], state]

    def trial(self, failing: int) -> StepTrial | None:
        if not self.states:
            return None
        a = self.arguments
        first, start = self.states[0], self.states[-1]
        return StepTrial(a.step, start, first, failing, a.models, a.optimizers, a.others, a.scaler)


@contextlib.contextmanager
def _restored(arguments: StepArguments) -> Iterator[None]:
    """Afterwards models, optimizers and random numbers are as they were before."""
    from nbdebug.observe.snapshot import Snapshot  # only restore= needs it

    before = Snapshot.take(arguments.models, arguments.optimizers, others=arguments.others)
    try:
        yield
    finally:
        before.restore()


def _locate(probe: Probe, detection: Any, question: str, subject: str, steps: int) -> Report | None:
    """Locate a recorded step; the report on it, where that takes more memory than there is."""
    from nbdebug.tools.nan.locate import NotEnoughMemory, locate_origins  # only a recorded step needs a replay

    try:
        locate_origins(probe, detection)
    except NotEnoughMemory as reason:
        sentence = f"In step {probe.step} the {detection.target.kind} is not finite"
        finding = name_it(UnlocatedStep(probe.step, sentence, str(reason)))
        return Report(question, (finding,), subject=subject, steps=steps)
    return None


def _is_live(strategy: str, arguments: StepArguments) -> bool:
    """Whether to look while the step runs: as asked, else on a CPU only."""
    return arguments.on_cpu if strategy == "auto" else strategy != "replay"


def _attach(error: Exception, probe: Probe, question: str, subject: str, steps: int) -> None:
    """Give the user's own exception the report on what was not finite before it."""
    detection = probe.end_step(None, error)
    probe.__exit__()
    if detection is None:
        return
    report = report_of(probe, detection, question, subject, steps)
    error.report = report  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note(
            f"nbdebug: before this error, {report.findings[0].title} [{report.findings[0].code}]. "
            "The whole report is the exception's attribute `report`."
        )


def _compare_compiled(probe: Probe, step: int) -> CompiledFacts | None:
    """A compiled model that was finite in eager: is it finite compiled, on the same batch?"""
    probe.__exit__()
    try:
        return compare_compiled(probe, probe.compiled_calls.pop(), step)
    finally:
        probe.__enter__()


def _counted(most: int) -> Iterable[int]:
    if most == 1:
        return (1,)
    from nbdebug.live import progress_range  # here: a single step has no bar

    return progress_range(range(1, most + 1), "nan_trace", "steps")


# -- arguments ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class StepArguments:
    """A step, and what it uses. named: the user named the models.
    others: gradient scalers and schedulers near the step."""

    step: Step
    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    named: bool
    others: list[Any]

    @classmethod
    def of(cls, step: Any, model: Any, optimizer: Any) -> StepArguments:
        """Raises TypeError or ValueError for what is no model or no optimizer."""
        names = names_used_by(step)
        models = discover("model", names) if model is None else models_of(model, CALL, names)
        check_models(models)
        optimizers = discover("optimizer", names) if optimizer is None else optimizers_of(optimizer, CALL, names)
        return cls(step, models, optimizers, model is not None, _others(names))

    @property
    def subject(self) -> str:
        return str(Subject(self.models, self.optimizers, self.named))

    @property
    def scaler(self) -> bool:
        return any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in self.others)

    @property
    def is_small(self) -> bool:
        """Whether two copies of models and optimizers take less than a tenth of the memory that is free; beside an
        accelerator, where a step may need all the rest, whether they are of `SMALL` bytes."""
        parameters = {id(p): p.nbytes for m in self.models.values() for p in m.parameters()}
        state = [t.nbytes for o in self.optimizers.values() for s in o.state.values() for t in tensors_in(s)]
        held = sum(parameters.values()) + sum(state)
        return 20 * 2 * held < psutil.virtual_memory().available and (self.on_cpu or held <= SMALL)

    @property
    def on_cpu(self) -> bool:
        """Whether looking at values makes no device wait."""
        tensors = [
            *(p for m in self.models.values() for p in m.parameters()),
            *(p for o in self.optimizers.values() for g in o.param_groups for p in g["params"]),
        ]
        return all(t.device.type == "cpu" for t in tensors)


def check(step: Any, max_steps: Any, strategy: Any) -> None:
    """Raises TypeError or ValueError where the arguments of `nan_trace` make no sense."""
    check_step(step, "nan_trace")
    check_count(max_steps, "max_steps")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}.")


def check_models(models: Mapping[str, nn.Module]) -> None:
    """Raises ValueError for a model without values."""
    for model in models.values():
        meta = next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)
        if meta is not None:
            raise ValueError(
                f"The parameter {meta!r} is on the meta device: it has no values to look at. "
                "Move the model with model.to_empty(device=...) and load its weights first."
            )


def _others(names: dict[str, Any]) -> list[Any]:
    """What else a step may change: gradient scalers and schedulers among the variables that it uses."""
    kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    return list({id(v): v for v in names.values() if isinstance(v, kinds)}.values())
