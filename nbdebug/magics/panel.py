"""%nbdebug: what is active, the catalogue, and off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug import registry
from nbdebug.arguments import discover
from nbdebug.magics._arguments import HELP, ends_in_semicolon, parse, summary
from nbdebug.report import Plot, Report, Table

MOST = 100
"""Findings remembered; the oldest go."""


class ShownReports:
    """Reports that cells returned, assigned, or raised with an error."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.rows: list[list[Any]] = []
        self._known: set[int] = set()

    @property
    def count(self) -> int:
        return len(self.rows)

    def close(self) -> None:
        self.rows, self._known = [], set()

    def after(self, result: Any) -> None:
        """A cell is over: note what it has found. result: IPython's, or None."""
        given = [
            getattr(result, "result", None),
            _raised_with(getattr(result, "error_in_exec", None)),
            *(v for n, v in list(self.shell.user_ns.items()) if type(v) is Report and not n.startswith("_")),
        ]
        cell = f"In [{getattr(result, 'execution_count', None) or self.shell.execution_count - 1}]"
        now: set[int] = set()
        for report in given:
            if isinstance(report, Report) and id(report) not in now:
                now.add(id(report))
                if id(report) not in self._known:
                    self._note(report, cell)
        self._known = now  # a report that is gone may leave its number to another

    def _note(self, report: Report, cell: str) -> None:
        rows = [[cell, f.title, f.where.place, f.code] for f in report.findings]
        self.rows = [*self.rows, *(row for row in rows if row[1:] not in [r[1:] for r in self.rows])][-MOST:]

    def table(self) -> Table | None:
        """Newest first; None while there is none."""
        return (
            Table("Found so far", ("cell", "what", "where", "cause"), list(reversed(self.rows)), open=True)
            if self.rows
            else None
        )


def _raised_with(error: BaseException | None) -> Any:
    """The report that nbdebug has left with an error, read as it lies there: the error may be the user's own."""
    if error is None:
        return None
    if type(error).__module__.startswith("nbdebug."):
        return getattr(error, "report", None)
    return BaseException.__getattribute__(error, "__dict__").get("report")


CALM = "Nothing is on: nbdebug watches only while you ask for it."


class PanelState:
    """The state behind the panel. watches: the magics that may be on, by what a person calls them."""

    def __init__(self, shell: Any, watches: Sequence[Any]):
        self.shell, self.watches = shell, watches
        self.told, self.words = ShownReports(shell), ""
        self.step: Report | None = None  # of the last traced step
        self.changed: Callable[[], None] = lambda: None  # who shows this
        self.lines: Mapping[str, Any] = {}
        self._waiting: list[Any] = []
        self._stopping: Any = None  # a stop that was asked for
        self._events = (("pre_run_cell", self._begins), ("post_run_cell", self._ended))
        self._running = False
        for event, call in self._events:
            shell.events.register(event, call)

    def close(self) -> None:
        """Forget what waits, and hear no more of cells."""
        for waiting in self._waiting:
            waiting.cancel()
        self._waiting = []
        self.told.close()
        for event, call in self._events:
            try:
                self.shell.events.unregister(event, call)
            except ValueError:  # gone already
                continue

    # -- what is shown ------------------------------------------------------------------------------------------------

    def report(self, layers: str = "") -> Report:
        """As things stand: plain data, also what a saved notebook keeps."""
        on = [line for watch in self.watches for line in watch.active()]
        watch = self.gradients
        gradients = watch.glance(layers).plots if watch is not None else ()
        return Report(
            "%nbdebug",
            subject=f"nbdebug {nbdebug.__version__}",
            notes=tuple(on) or (CALM,),
            headline=self._headline(on),
            tables=[t for t in (self._step_table(), self.told.table(), _magics(self.lines)) if t],
            plots=(Plot("memory", _memory()), *gradients),
        )

    @property
    def gradients(self) -> Any:
        """The gradient watch that runs, if one does."""
        return next((w.shown() for w in self.watches if hasattr(w, "shown") and w.shown() is not None), None)

    def _headline(self, on: Sequence[str]) -> str:
        count = self.told.count
        said = f"{count} finding{'s' * (count != 1)} so far" if count else "no finding so far"
        active = sum(line.startswith("Active:") for line in on)  # the others are remarks on these
        return f"nbdebug: {active or 'nothing'} on, {said}."

    def _step_table(self) -> Table | None:
        return self.step.tables[0] if self.step is not None else None

    # -- what is done -------------------------------------------------------------------------------------------------

    def soon(self, action: Callable[[], str], word: str) -> None:
        """Do it in the thread that trains. word: what is said while it waits."""
        if threading.current_thread() is threading.main_thread():
            self.say(action())
            return
        from nbdebug.observe.step_hooks import StepEndCallback  # brings torch, which %load_ext does not wait for

        waiting = StepEndCallback(lambda: self._do(waiting, action))
        self._waiting.append(waiting)
        self.say(word if self._running else f"{word} (with the next cell)")
        waiting.begin()  # last: the step may be over before the next line

    def _do(self, waiting: Any, action: Callable[[], str]) -> None:
        __tracebackhide__ = True
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            try:
                self.say(action())
            except Exception as fault:  # ours must not end the training in which it is done
                self.say(f"{type(fault).__name__}: {fault}")

    def say(self, words: str) -> None:
        self.words = words
        self.changed()

    def trace(self) -> None:
        """Look at the next step, layer by layer."""
        models = discover("model", self.shell.user_ns)
        if not models:
            self.say("There is no model among your variables.")
            return
        self.soon(lambda: self._trace(models), "Waiting for the next step …")

    def _trace(self, models: dict[str, Any]) -> str:
        from nbdebug.observe.step_hooks import StepSummary

        for waiting in [w for w in self._waiting if isinstance(w, _Tracing)]:
            waiting.cancel()
            self._waiting.remove(waiting)
        tracing = _Tracing(StepSummary(models, self._traced))
        self._waiting.append(tracing)
        return "Waiting for the next step …"

    def _traced(self, layers: list[Any], fault: str = "") -> None:
        self._waiting = [w for w in self._waiting if not isinstance(w, _Tracing)]
        if fault:
            self.say(f"The step could not be traced ({fault}); the training goes on.")
            return
        self.step = Report("trace of the next step", tables=(_layers(layers),))
        bad = next((seen.name or "the model" for seen in layers if seen.nonfinite), None)
        self.say(
            f"Traced a step: {bad} is the first layer whose output is not finite; %nan_trace names the line."
            if bad
            else f"Traced a step: the outputs of {len(layers)} layers are finite."
        )

    def stop(self) -> None:
        """Stop the training that runs, after a whole step."""
        from nbdebug.observe.step_hooks import StepEndCallback, stop_training

        if not self._running:
            self.say("No cell is running.")
            return
        self._waiting.append(stopping := StepEndCallback(stop_training))
        self._stopping = stopping
        self.say("Stopping after this step …")
        stopping.begin()

    def free(self) -> None:
        """Let go of what nobody asks for any more: the last traceback, its exceptions, the allocators' cache."""
        from nbdebug.tools.memory.free import free

        report = free("traceback", "exceptions", "cache", names=self.shell.user_ns, shell=self.shell)
        self.say(f"Let go of the last traceback and of caches. {report.headline}".rstrip())

    def off(self) -> None:
        """End every watch."""
        self.soon(self._off, "Switching off after this step …")

    def _off(self) -> str:
        for watch in self.watches:
            watch.close_all()
        return "Everything is off."

    def switch(self, name: str, on: bool) -> None:
        """Turn a watch on with its defaults, or off."""
        self.soon(lambda: self._switch(name, on), f"{name} is switched {'on' if on else 'off'} after this step …")

    def _switch(self, name: str, on: bool) -> str:
        watch = next(w for w in self.watches if getattr(w, "magic", "") == name)
        try:
            return str(watch.switch(on))
        except Exception as wrong:  # what %guard would have said
            return f"{name}: {wrong}"

    def is_on(self, name: str) -> bool:
        return any(w.running is not None for w in self.watches if getattr(w, "magic", "") == name)

    # -- cells --------------------------------------------------------------------------------------------------------

    def _begins(self, info: Any = None) -> None:
        self._running = True

    def _ended(self, result: Any = None) -> None:
        self._running = False
        if self._stopping is not None:  # it was meant for the cell that is over, not for the next
            self._stopping.cancel()
            self._waiting = [waiting for waiting in self._waiting if waiting is not self._stopping]
            self._stopping = None
        self.told.after(result)
        self.changed()


class _Tracing:
    """A step that is waited for."""

    def __init__(self, step: Any):
        self.step = step

    def cancel(self) -> None:
        self.step.close()


def _magics(lines: Mapping[str, Any]) -> Table:
    """What can be typed, each with the first sentence of its help."""
    rows = [[f"%{name}", summary(method)] for name, method in sorted(lines.items())]
    return Table("What you can type", ("magic", "answers"), rows)


def _layers(layers: Sequence[Any]) -> Table:
    rows = [
        [
            seen.name or "(the model)",
            seen.kind,
            str(list(seen.shape)),
            seen.dtype,
            seen.low,
            seen.high,
            seen.std,
            seen.nonfinite,
            seen.gradient,
        ]
        for seen in layers
    ]
    return Table(
        "The step that was traced, by layer",
        ("layer", "type", "output", "dtype", "least", "largest", "std", "bad", "gradient"),
        rows,
        "Of each layer's output; bad: values "
        "that are NaN or infinite; gradient: 2-norm over the layer's own weights, before the update.",
        open=True,
    )


def _memory() -> dict[str, Any]:
    """What this process holds, on the machine and on the accelerator in use."""
    import sys

    import psutil

    rss, machine = psutil.Process().memory_info().rss, psutil.virtual_memory()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        limit = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        parts = [["tensors on the GPU", used], ["kept by its allocator", reserved - used]]
        return {"title": "Memory of the GPU now", "parts": parts, "total": reserved, "limit": limit}
    parts = [["this notebook", rss], ["other programs", max(0, machine.total - machine.available - rss)]]
    return {"title": "Memory of this machine now", "parts": parts, "limit": machine.total}


REQUESTS = ("status", "catalogue", "off")


@magics_class
class NbdebugMagics(Magics):
    """What tells and ends the rest. watches: the magics that may be on; unregister: takes all magics from a shell."""

    def __init__(self, shell: Any, watches: Sequence[Any], unregister: Callable[[Any], None]) -> None:
        super().__init__(shell)
        self.watches, self.unregister = watches, unregister
        self.board = PanelState(shell, watches)

    def close(self) -> None:
        """The shell is left: hear no more of its cells."""
        self.board.close()

    @no_var_expand
    @magic_arguments("nbdebug")
    @HELP
    @argument(
        "request",
        nargs="?",
        choices=REQUESTS,
        help="status: the same as a report, without controls\n"
        "catalogue: list every cause that nbdebug can name\n"
        "off: end everything, and remove the magics and hooks",
    )
    @line_magic("nbdebug")
    def control(self, line: str) -> Report | None:
        """Open the panel: what is on, what was found, memory, gradients, the loss, and buttons for the rest.

            %nbdebug
            %nbdebug catalogue

        Guard and Gradients switch the two watches. Trace next step records one step, layer by layer. Stop ends the
        running cell after a whole step. Free drops the last traceback. All off ends everything that watches.
        """
        args = parse(self.control, line)
        if args is None:
            return None
        if args.request == "catalogue":
            print(registry.listing())
        elif args.request == "off":
            self._off()
        elif args.request is None and hasattr(self.shell, "kernel"):
            from nbdebug.views import widgets as dashboard  # brings ipywidgets, which a terminal does not need

            display(dashboard.board(self.board))
        elif not ends_in_semicolon(line):
            return self.board.report()
        return None

    def _off(self) -> None:
        for magics in self.watches:
            magics.close_all()
        if self.shell.extension_manager.unload_extension("nbdebug") is not None:  # not loaded by %load_ext
            self.unregister(self.shell)
        print("nbdebug is off: its magics and hooks are gone. %load_ext nbdebug brings the magics back.")
