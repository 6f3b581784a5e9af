"""`step_through(model, batch)`: a training step, layer by layer, while the notebook stays alive."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import nbdebug
from nbdebug.observe.locations import USER, Site, cell_name, kind_of, source_text
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import output_tensors
from nbdebug.observe.validation import check_loss, check_model, loss_call, optimizers_of
from nbdebug.report import Finding, Plot, Report, Symptom, Table
from nbdebug.text import count
from nbdebug.tools.stepper import events as numbers
from nbdebug.tools.stepper import run as goals
from nbdebug.tools.stepper.events import AFTER, BACKWARD, BACKWARD_DONE, BEFORE, LOSS, LayerPlace, StepStop
from nbdebug.tools.stepper.hooks import Layers
from nbdebug.tools.stepper.run import TIMEOUT, CallContext, StepRun

if TYPE_CHECKING:
    from nbdebug.tools.stepper.run import StepRun

QUESTION = "step_through(model, batch)"
COLUMNS = ("", "tensor", "shape", "NaN", "inf", "min", "max", "mean", "std", "zeros", "dtype", "device")


def report_of(run: StepRun, call: tuple[str, str], note: str) -> Report:
    """The report of a run so far. call: the question, and its subject."""
    stop = None if run.turns.running else run.stop
    notes = [note] * bool(note)
    tables: list[Table] = []
    if stop is not None:
        notes += _stop_notes(stop)
        tables = [_table(stop)] if stop.rows else []
    if run.error is not None:
        notes += _error_notes(run)
    if run.fault:
        notes.append(f"nbdebug could not follow the step any further ({run.fault}); the step itself was not changed.")
    headline = _headline(run, stop)
    spoiled = stop.culprit or any(row.get("NaN") for row in stop.rows) if stop is not None else _spoiled(run.result)
    failed = run.error is not None or bool(run.fault) or spoiled
    return Report(
        call[0],
        findings=run.explained or (),
        subject=call[1],
        notes=tuple(notes),
        headline=headline,
        symptoms=[Symptom(headline)] * failed,
        tables=tables,
        plots=(Plot("stepper", _picture(run, stop)),),
    )


def findings_of(error: BaseException) -> tuple[Finding, ...]:
    """The cause of the exception that the step raised, where it is known."""
    try:
        return nbdebug.explain(error).findings if isinstance(error, Exception) else ()
    except Exception:  # it only helps: the error is reported without it, too
        return ()


def _headline(run: StepRun, stop: StepStop | None) -> str:
    if stop is not None:
        return f"{str(stop.place)[:1].upper()}{str(stop.place)[1:]}{_state(stop)}."
    if not run.turns.over:
        return "The step is running."
    if run.error is not None:
        where = ""
        if run.raised is not None:
            where = f" in {'the backward of ' * (run.raised.phase == BACKWARD)}{run.raised.layer}"
        return f"The step failed{where}: {type(run.error).__name__}: {_first_line(run.error)}"
    if run.turns.abandoned:
        return "The step was abandoned; model, gradients and random numbers are as before."
    end = "Model, gradients and random numbers are as before." if run.restore else "The model is as a step leaves it."
    return f"The step is over{_result(run.result)}. {end}"


def _state(stop: StepStop) -> str:
    """Whether the values there are finite, in a few words."""
    bad = [row for row in stop.rows if row.get("NaN") or row.get("inf")]
    if not any("NaN" in row for row in stop.rows):
        return ""
    if not bad:
        return ": all finite"
    phase, outputs = stop.place.phase, [row for row in bad if row[""] == "out"]
    if stop.culprit and phase == BEFORE:
        return f": its input has {_counts(bad)}"
    if stop.culprit and phase == BACKWARD:
        return ": its gradient is not finite, and no layer made it so: the cause is between the model and the loss"
    if stop.culprit:
        masked = any(row.get("inf") for row in bad if row[""] == "in")
        text = {
            AFTER: "from inputs with inf and no NaN" if masked else "from finite inputs",
            LOSS: "from finite outputs of the model",
            BACKWARD_DONE: "from finite gradients",
        }[phase]
        return f": {_counts(outputs or bad)}, {text}"
    return f": {_counts(outputs or bad)}"


def _counts(rows: list[dict[str, Any]]) -> str:
    counts = [(sum(row[kind] for row in rows), kind) for kind in ("NaN", "inf")]
    text = " and ".join(f"{number:,} {kind}" for number, kind in counts if number)
    of = "the gradient of " if rows[0].get("gradient") else ""
    return f"{text} in {of}`{rows[0]['tensor']}`" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def _result(result: Any) -> str:
    if isinstance(result, float) or hasattr(result, "numel") and result.numel() == 1 and result.device.type != "meta":
        return f": it returned {float(result):.4g}" if not getattr(result, "is_complex", bool)() else ""
    outputs = output_tensors(result)
    return f": it returned {count(len(outputs), 'tensor')}" if outputs else ""


def _spoiled(result: Any) -> bool:
    """Whether the step returned a NaN, or a loss that is not finite; inf elsewhere may be a mask."""
    with contextlib.suppress(Exception):  # tensors without values, or of a layout that these ops do not take
        tensors = [torch.as_tensor(result)] if isinstance(result, float) else output_tensors(result)
        return any(bool((t.isnan() if t.numel() > 1 else ~t.isfinite()).any()) for t in tensors)
    return False


def _stop_notes(stop: StepStop) -> list[str]:
    called = [f"Called from {_place(stop.site)}"] if stop.site is not None else []
    return [*called, *stop.notes]


def _error_notes(run: StepRun) -> list[str]:
    """Where in the user's code the error was raised, and how to see its traceback."""
    assert run.error is not None
    sites = [
        Site(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(run.error.__traceback__)
        if kind_of(frame.f_code) == USER
    ]
    notes = [f"It was raised from {_place(sites[-1])}"] if sites else []
    message = str(run.error).strip()
    if "\n" in message:
        notes.append(message)
    notes.append(
        "Everything is as it was before the step. " * run.restore + "The exception is in `.error` of the stepper: "
        "raise it to see its traceback."
    )
    return notes


def _place(site: Site) -> str:
    place = f"{cell_name(site.file) or site.file.replace(chr(92), '/').rpartition('/')[2]}, line {site.line}"
    text = source_text(site)
    return f"{place}: `{text}`" if text else f"{place}."


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _table(stop: StepStop) -> Table:
    rows = [[_cell(name, row.get(name)) for name in COLUMNS] for row in stop.rows]
    gradients = stop.place.phase in (BACKWARD, BACKWARD_DONE)
    bad = any(row.get("NaN") or row.get("inf") for row in stop.rows)
    return Table(
        "Gradients at this layer" if gradients else "Tensors of this layer",
        list(COLUMNS),
        rows,
        "min, max, mean and std are those of the finite elements." if bad else "",
    )


def _cell(column: str, value: Any) -> Any:
    if column == "zeros" and value is not None:
        return f"{value:.1%}" if 0 < value < 1 else f"{value:.0%}"
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _picture(run: StepRun, stop: StepStop | None) -> dict[str, Any]:
    """For the view: the layers, where the step waits among them, and histograms."""
    at = stop.place if stop is not None else run.raised
    layers = [
        {
            "name": layer.name,
            "type": layer.kind,
            "depth": layer.depth,
            "calls": layer.calls,
            "low": layer.low,
            "high": layer.high,
            "finite": layer.finite,
            "gradient": layer.gradient,
        }
        for layer in run.layers.all.values()
    ]
    state = (
        "waits"
        if stop is not None
        else "runs"
        if not run.turns.over
        else "failed"
        if run.error is not None
        else "abandoned"
        if run.turns.abandoned
        else "over"
    )
    return {
        "state": state,
        "at": None if at is None else {"name": at.name, "phase": at.phase, "said": str(at)},
        "layers": layers,
        "histograms": stop.histograms if stop is not None else [],
    }


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
    """Run one training step that waits at its layers, and keep the notebook usable meanwhile.

    loss_fn: `loss_fn(model, batch)`, or a criterion of (outputs, targets) for batches of a pair; left out, the model is
    called with the batch: a dict by keywords, a tuple as arguments (or only its first part, where that is what forward
    takes). backward: run the backward as well, where there is a loss and the step has not done so itself.
    optimizer: one or a list that the step changes; no step of it is made here. restore: at the end the model, its
    gradients, the optimizer and the random numbers are as before, unlike after nan_trace, because looking is not
    training; False: as one plain step leaves them. A step that is abandoned is always taken back.

    The step runs in a thread with the caller's autocast, grad mode, inference mode, torch modes, default device, GPU
    and stream. It waits before the model's first layer. Its random numbers are its own: what you draw between its
    layers changes nothing. What it raises is kept as `.error`. A stepper that waits already is abandoned.

    Raises TypeError for arguments of another kind.
    """
    global _latest
    call = "step_through(model, batch, loss_fn)"
    check_model(model, call)
    if loss_fn is not None:
        check_loss(loss_fn, call)
    optimizers = optimizers_of(optimizer, call)
    before, note = active_stepper(), ""
    if before is not None:
        note = "The stepper before this one was abandoned."
        before.abandon()
    caller = CallContext()
    with numbers.unobserved():
        step, form = _step(model, batch, loss_fn)
        run = StepRun(
            step,
            Layers(model, batch, loss_fn),
            Snapshot.take(model, optimizers),
            caller,
            backward=backward,
            restore=restore,
        )
    stepper = Stepper(run, f"model {type(model).__name__}, called as {form}", note)
    _latest = weakref.ref(stepper)
    stepper._go(goals.into)
    return stepper


def active_stepper() -> Stepper | None:
    """The stepper whose step waits or runs; there is one at most."""
    stepper = _latest() if _latest is not None else None
    return stepper if stepper is not None and not stepper.done else None


class Stepper:
    """A step that waits. Each method lets it run on, returns when it waits again or is over, and gives the report.

    Its controls are shown in a notebook where it is the last expression of a cell; elsewhere it is shown as its report.
    asked: the call that was made, and what was taken."""

    def __init__(self, run: StepRun, subject: str, note: str = "") -> None:
        self.asked, self._run, self._note = (QUESTION, subject), run, note
        self._one_at_a_time, self._panel = threading.RLock(), None
        # The hooks and the thread know the run, not this: when nobody holds this any more, the step ends.
        ended = weakref.finalize(self, run.turns.abandon, 1.0)
        ended.atexit = False  # the thread ends with the process

    _panel: Any

    def next(self) -> Report:
        """On to the end of this layer, over those inside it; from there to the end of the next one beside it, or of the
        one around it. Stops at the loss, and where backward begins."""
        return self._go(goals.end_of_layer(self._here()))

    def into(self) -> Report:
        """On to the very next thing that happens: the first layer inside this one, or its end."""
        return self._go(goals.into)

    def out(self) -> Report:
        """On to the end of the layer around this one."""
        return self._go(goals.end_of_parent(self._here()))

    def run_to(self, pattern: str) -> Report:
        """On to where a layer begins (in backward: its backward) whose name or type is this, or fits it as a pattern:
        "blocks.1.attn", "*.attn", "Linear"; "loss": to the loss. Where none comes any more the step runs to its end.
        Raises ValueError where no layer of the model fits."""
        goals.check(pattern, {layer.name: layer.kind for layer in self._run.layers.all.values()})
        return self._go(goals.start_of(pattern.strip()))

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
                f"The step does not end: for {2 * TIMEOUT:g} seconds it has been in code that cannot "
                f"be interrupted ({turns.place() or 'not in yours'}). It ends, and the model is put "
                "back, when that returns."
            )
        return self._redrawn_report()

    close = abandon

    @property
    def at(self) -> LayerPlace | None:
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
            self._run.explained = findings_of(self.error)
        with numbers.unobserved():
            return report_of(self._run, self.asked, self._note)

    @property
    def _stop(self) -> StepStop | None:
        return None if self._run.turns.running else self._run.stop

    def _here(self) -> LayerPlace:
        return self.at or self._run.last or LayerPlace("", "", "before", 0)

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
        return self._redrawn_report()

    def _redrawn_report(self) -> Report:
        if self._panel is not None:
            self._panel.redraw()
        return self.report()

    def _ipython_display_(self) -> None:
        if self._panel is None:
            self._panel = self.report()._view("widgets", "steps", weakref.ref(self))
        self._panel._ipython_display_()

    def __repr__(self) -> str:
        return str(self.report())


def _step(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> tuple[Callable[[], Any], str]:
    """The step, and how it is called."""
    if loss_fn is not None:
        ask, form = loss_call(loss_fn)
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
