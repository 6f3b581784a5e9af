"""%nbdebug: the panel, the catalogue, the last fix made, and off.

The panel shows what is on, what was found, memory, gradients and the loss; its buttons act on the training that runs. A
click may arrive in another thread than the one that trains (ipykernel 7): an action then waits for the end of a step,
or is done at once in the main thread where no cell runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug import registry
from nbdebug.arguments import discover
from nbdebug.magics._arguments import FULL, HELP, answer, parse, summary, usage_errors
from nbdebug.report import Edit, Plot, Report, Table
from nbdebug.text import count, module_name
from nbdebug.tools.monitor.incident import GivenReport

MOST_FINDINGS = 100
"""Findings remembered; the oldest go."""
MOST_REPORTS = 50
NOTHING_ON = "Nothing is on: nbdebug watches only when you ask for it."


class ShownReports:
    """The findings of reports that cells returned, assigned, or raised with an error (or their symptoms); and the last
    of these reports themselves, which hold no tensors."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.rows: list[list[Any]] = []
        self.edit: Edit | None = None  # the last one that was tried and works
        self.kept: collections.deque[GivenReport] = collections.deque(maxlen=MOST_REPORTS)
        self._known: set[int] = set()

    def close(self) -> None:
        self.rows, self._known, self.edit = [], set(), None
        self.kept.clear()

    def after_cell(self, result: Any) -> None:
        """Note what the cell has found. result: IPython's, or None."""
        candidates = [
            getattr(result, "result", None),
            _report_of(getattr(result, "error_in_exec", None)),
            *(v for n, v in list(self.shell.user_ns.items()) if type(v) is Report and not n.startswith("_")),
        ]
        cell = f"In [{getattr(result, 'execution_count', None) or self.shell.execution_count - 1}]"
        reports = {id(report): report for report in candidates if isinstance(report, Report)}
        for key, report in reports.items():
            if key in self._known:
                continue
            if report.question != "%nbdebug":
                self.kept.append(GivenReport(cell, time.time(), dataclasses.replace(report, saver=None)))
            with contextlib.suppress(ValueError):  # it has none
                self.edit = report.edit
            rows = [[cell, f.title, f.where.place, f.code] for f in report.findings]
            for row in rows or [[cell, symptom.what, "", report.verdict] for symptom in report.symptoms]:
                if row[1:] not in [known[1:] for known in self.rows]:
                    self.rows = [*self.rows, row][-MOST_FINDINGS:]
        self._known = set(reports)  # a report that is gone may leave its id to another

    def table(self) -> Table | None:
        """Newest first; None while there is none."""
        if not self.rows:
            return None
        return Table("Found so far", ("cell", "what", "where", "cause"), list(reversed(self.rows)), open=True)


def _report_of(error: BaseException | None) -> Any:
    """The report that nbdebug has attached to an error. The error may be the user's own: none of its code runs."""
    if error is None:
        return None
    if module_name(type(error)).startswith("nbdebug."):
        return getattr(error, "report", None)
    return BaseException.__getattribute__(error, "__dict__").get("report")


class PanelState:
    """The state behind the panel. watches: the magics that may be on; message: what the last button says; layers: of
    the last traced step; changed: redraws the panel; lines: the magics by name."""

    def __init__(self, shell: Any, watches: Sequence[Any]):
        self.shell, self.watches = shell, watches
        self.reports, self.message = ShownReports(shell), ""
        self.layers: Table | None = None
        self.changed: Callable[[], None] = lambda: None
        self.lines: Mapping[str, Any] = {}
        self.opened = False  # whether its buttons are there
        self._pending: collections.deque[Callable[[], str]] = collections.deque()  # actions that wait
        self._step_hook: Any = None  # acts at the end of a step, while a cell runs
        self._tracing: Any = None  # the step that is traced next
        self._running = self._stopping = False
        self._events = (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell))
        for event, callback in self._events:
            shell.events.register(event, callback)

    def close(self) -> None:
        """Forget what waits, and leave the shell's events."""
        self._pending.clear()
        self._ignore_steps()
        self._end_tracing()
        self.reports.close()
        for event, callback in self._events:
            try:
                self.shell.events.unregister(event, callback)
            except ValueError:  # gone already
                continue

    # -- what is shown ------------------------------------------------------------------------------------------------

    def report(self, layers: str = "") -> Report:
        """The present state as plain data; a saved notebook keeps it. layers: a pattern for the gradients' rows."""
        on = [line for watch in self.watches for line in watch.active()]
        active = sum(line.startswith("Active:") for line in on)  # the other lines are warnings
        findings = count(len(self.reports.rows), "finding") if self.reports.rows else "no finding"
        watch = self.gradients
        return Report(
            "%nbdebug",
            subject=f"nbdebug {nbdebug.__version__}",
            notes=tuple(on) or (NOTHING_ON,),
            headline=f"nbdebug: {active or 'nothing'} on, {findings} so far.",
            tables=[table for table in (self.layers, self.reports.table(), _magics(self.lines)) if table],
            plots=(Plot("memory", _memory()), *(watch.glance(layers).plots if watch is not None else ())),
        )

    @property
    def gradients(self) -> Any:
        """The gradient watch that runs, if one does."""
        return next((w.shown() for w in self.watches if hasattr(w, "shown") and w.shown() is not None), None)

    def is_on(self, name: str) -> bool:
        return self._watch(name).on

    def _watch(self, name: str) -> Any:
        return next(watch for watch in self.watches if getattr(watch, "magic", "") == name)

    def say(self, message: str) -> None:
        self.message = message
        self.changed()

    # -- what the buttons do ------------------------------------------------------------------------------------------

    def after_step(self, action: Callable[[], str], message: str) -> None:
        """Act in the main thread: between two steps where a cell runs, else at once. message: what the panel says until
        then."""
        if threading.current_thread() is threading.main_thread():
            self.say(action())
            return
        self.say(message)
        self._pending.append(action)
        loop = getattr(getattr(self.shell, "kernel", None), "io_loop", None)
        if self._running:
            self._await_steps()
        elif loop is not None:
            loop.add_callback(self._act)

    def _act(self) -> None:
        while self._pending:
            action = self._pending.popleft()
            try:
                self.say(action())
            except Exception as fault:  # nbdebug's own: it must not end the training
                self.say(f"{type(fault).__name__}: {fault}")

    def _await_steps(self) -> None:
        """From here on `_step_ended` is called after each step, in the thread that trains."""
        if self._step_hook is None:
            from nbdebug.observe.step_hooks import StepHook  # imports torch: %load_ext must stay quick

            self._step_hook = StepHook(self._step_ended, after=True)

    def _ignore_steps(self) -> None:
        hook, self._step_hook, self._stopping = self._step_hook, None, False
        if hook is not None:
            hook.remove()

    def _step_ended(self, *_: Any) -> None:
        __tracebackhide__ = True
        self._act()
        if self._stopping:
            from nbdebug.observe.step_hooks import stop_training

            self._stopping = False
            stop_training()

    def trace(self) -> None:
        """Record the next step, layer by layer."""
        models = discover("model", dict(self.shell.user_ns))  # a copy: a cell may be writing
        if not models:
            self.say("There is no model among your variables.")
            return
        self.after_step(lambda: self._trace(models), WAITING)

    def _trace(self, models: dict[str, Any]) -> str:
        from nbdebug.observe.step_hooks import StepSummary

        self._end_tracing()
        self._tracing = StepSummary(models, self._traced)
        return WAITING

    def _end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None

    def _traced(self, layers: list[Any], fault: str = "") -> None:
        self._tracing = None
        if fault:
            self.say(f"The step could not be traced ({fault}); the training continues.")
            return
        self.layers = _layers(layers)
        bad = next((layer.name or "the model" for layer in layers if layer.nonfinite), None)
        self.say(
            f"Traced a step: {bad} is the first layer whose output is not finite; %nan_trace names the line."
            if bad
            else f"Traced a step: the outputs of {count(len(layers), 'layer')} are finite."
        )

    def stop(self) -> None:
        """Stop the training that runs, after a whole step."""
        if not self._running:
            self.say("No cell is running.")
            return
        self.say("Stopping after this step …")
        self._stopping = True
        self._await_steps()

    def free(self) -> None:
        """Free the last traceback, its exceptions and the cache of the allocators."""
        from nbdebug.tools.memory.free import free

        report = free("traceback", "exceptions", "cache", names=self.shell.user_ns, shell=self.shell)
        self.say(f"Freed the last traceback and the caches. {report.headline}".rstrip())

    def off(self) -> None:
        """End every watch."""
        self.after_step(self._off, "Ending everything after this step …")

    def _off(self) -> str:
        for watch in self.watches:
            watch.close_all()
        return "Everything is off."

    def switch(self, name: str, on: bool) -> None:
        """Turn a watch on with its default settings, or off."""
        self.after_step(lambda: self._switch(name, on), f"Turning {name} {'on' if on else 'off'} after this step …")

    def _switch(self, name: str, on: bool) -> str:
        try:
            return str(self._watch(name).switch(on))
        except Exception as error:  # what the magic would have said
            return f"{name}: {error}"

    # -- cells --------------------------------------------------------------------------------------------------------

    def _before_cell(self, info: Any = None) -> None:
        self._running = True
        self._act()  # what was clicked a moment ago
        if self.opened and "torch" in sys.modules:
            self._await_steps()  # now, not with a click in another thread, when a step may be calling its hooks

    def _after_cell(self, result: Any = None) -> None:
        self._running = False
        self._ignore_steps()  # a stop was meant for the cell that is over, not for the next
        self._act()
        self.reports.after_cell(result)
        self.changed()


WAITING = "Waiting for the next step …"


def _magics(lines: Mapping[str, Any]) -> Table:
    """What can be typed, each with the first sentence of its help; those for every day come first."""
    rows = [[f"%{name}", summary(method)] for name, method in lines.items()]
    return Table("What you can type", ("magic", "what it does"), rows)


def _layers(layers: Sequence[Any]) -> Table:
    rows = [
        [
            layer.name or "(the model)",
            layer.kind,
            str(list(layer.shape)),
            layer.dtype,
            layer.low,
            layer.high,
            layer.std,
            layer.nonfinite,
            layer.gradient,
        ]
        for layer in layers
    ]
    return Table(
        "The step that was traced, by layer",
        ("layer", "type", "output", "dtype", "min", "max", "std", "bad", "gradient"),
        rows,
        "The values are those of each layer's output. bad: how many are NaN or infinite. gradient: 2-norm over the "
        "layer's own weights, before the update.",
        open=True,
    )


def _memory() -> dict[str, Any]:
    """What this process holds, on the accelerator in use or else on the machine."""
    import psutil

    rss, machine = psutil.Process().memory_info().rss, psutil.virtual_memory()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        limit = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        parts = [["tensors on the GPU", used], ["cached by its allocator", reserved - used]]
        return {"title": "Memory of the GPU now", "parts": parts, "total": reserved, "limit": limit}
    parts = [["this notebook", rss], ["other programs", max(0, machine.total - machine.available - rss)]]
    return {"title": "Memory of this machine now", "parts": parts, "limit": machine.total}


@magics_class
class NbdebugMagics(Magics):
    """%nbdebug. watches: the magics that may be on; unregister: takes all magics from a shell."""

    def __init__(self, shell: Any, watches: Sequence[Any], unregister: Callable[[Any], None]) -> None:
        super().__init__(shell)
        self.watches, self.unregister = watches, unregister
        self.state = PanelState(shell, watches)

    def close(self) -> None:
        """Leave the shell's events."""
        self.state.close()

    @no_var_expand
    @magic_arguments("nbdebug")
    @FULL
    @HELP
    @argument(
        "request",
        nargs="?",
        choices=("status", "catalogue", "apply", "off"),
        help="status: the same as a report, without controls\n"
        "catalogue: list every cause that nbdebug can name\n"
        "apply: make the last fix that was tried: the mended cell comes below, to be run by you\n"
        "off: end everything, and remove the magics and hooks",
    )
    @argument("--write", action="store_true", help="with apply: write the file, where the line is not in a cell")
    @line_magic("nbdebug")
    def control(self, line: str) -> Report | None:
        """Open the panel: what is on, what was found, memory, gradients, the loss, and buttons for the rest.

            %nbdebug
            %nbdebug catalogue

        Guard and Gradients switch the two watches. Trace next step records one step, layer by layer. Stop ends the
        running cell after a whole step. Free drops the last traceback. All off ends everything that watches.
        """
        if (args := parse(self.control, line)) is None:
            return None
        if args.request == "catalogue":
            print(registry.listing())
        elif args.request == "off":
            self._off()
        elif args.request == "apply":
            self._apply(args.write)
        elif args.request is None and hasattr(self.shell, "kernel"):
            from nbdebug.views import widgets  # imports ipywidgets, which a terminal does not need

            self.state.opened = True
            display(widgets.panel(self.state))
        else:
            return answer(self.state.report(), args, line)
        return None

    def _apply(self, write: bool) -> None:
        from nbdebug import patch  # only here: %load_ext must stay quick

        if self.state.reports.edit is None:
            raise UsageError("No report of this session has a fix that was tried and is a change of a line of yours.")
        with usage_errors():
            patch.apply(self.state.reports.edit, write)

    def _off(self) -> None:
        for magics in self.watches:
            magics.close_all()
        if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
            self.unregister(self.shell)
        print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
