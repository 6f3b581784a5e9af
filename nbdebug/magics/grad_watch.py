"""%grad_watch: one watch for a shell, turned on and off by name; what it shows comes from `nbdebug.grad_watch`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug.magics._arguments import HELP, WatchSubject, parsed_in_any_order, visible

REQUESTS = ("on", "off", "status")
OPTIONS = ("model", "optimizer", "every", "ratios_every", "keep")
MAGIC = "%grad_watch on"


@magics_class
class GradWatchMagics(Magics):
    """What watches gradients. running: the watch that %grad_watch has turned on, None while there is none; last: the
    one that was turned off last, which can still be shown."""

    magic = "grad_watch"
    running: Any = None
    watched: Any = None  # what it watches, a Watched
    last: Any = None

    @needs_local_scope
    @magic_arguments()
    @HELP
    @argument(
        "--model",
        action="append",
        metavar="NAME",
        help="the model; may be given more than once. Left out: "
        "every model among your variables is taken, and it is said which",
    )
    @argument("--optimizer", action="append", metavar="NAME", help="the same for the optimizer")
    @argument("--every", type=int, metavar="N", help="measure gradients in every N-th step (default 1)")
    @argument(
        "--ratios-every",
        type=int,
        metavar="N",
        help="measure in every N-th step how far the weights move (default 10; 0: never)",
    )
    @argument("--keep", type=int, metavar="N", help="steps to keep whole (default 1000); older ones are thinned out")
    @argument("--live", action="store_true", help="draw the norms below this cell while training runs")
    @argument(
        "--panel",
        action="store_true",
        help="the same with controls: filter layers, logarithmic or linear, "
        "pause. After the run it opens over what was kept",
    )
    @argument("--off", action="store_true", help="stop watching and give the last report, as %%grad_watch off does")
    @argument(
        "request",
        nargs="?",
        choices=REQUESTS,
        help="on: watch from now on; off: stop, give the last report; status: give the report so far",
    )
    @line_magic
    def grad_watch(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Watch gradient norms by layer, clipping, update sizes, dead units and the loss while training runs.

        %grad_watch on takes the model and optimizer among your variables and watches them until %grad_watch --off.
        %grad_watch and %grad_watch --off give a report: shown when it comes last, assignable (rep = %grad_watch),
        silenced by a semicolon; rep.figure() draws it. In a script: with nbdebug.grad_watch(model, optimizer) as watch:
        …
        """
        __tracebackhide__ = True
        typed = line.rstrip()
        args = parsed_in_any_order(self.grad_watch, typed.rstrip(";"))
        if args is None:
            return None
        request = _request(args)
        if request == "on":
            self._on(args, visible(self.shell, local_ns))
            return None
        shown = self._report(request)
        return None if typed.endswith(";") else shown

    def _on(self, args: Any, names: dict[str, Any]) -> None:
        given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
        if not given and args.request is None and (known := self._known(args.panel)) is not None:
            self._draw(known, args.panel)
            return
        print(self._start(args, names, given))
        if args.live or args.panel:
            self._draw(self.running, args.panel)

    def _start(self, args: Any, names: dict[str, Any], given: dict[str, Any]) -> str:
        before = f"The watch of {self.watched.things} ({_counted(self.running)})" if self.running else ""
        try:
            watched = WatchSubject.chosen(args, names, self.shell.user_ns, MAGIC)
            pace = {name: value for name, value in given.items() if name not in ("model", "optimizer")}
            started = nbdebug.grad_watch(watched.subject.models, watched.subject.optimizers, **pace)
        except (TypeError, ValueError) as wrong:
            raise UsageError(f"{str(wrong).rstrip('.')}.") from None
        self.close()
        self.running, self.watched = started, watched
        return (
            f"grad_watch is on, watching {watched}.\n%grad_watch shows what it has seen, %grad_watch --off ends it."
            + (f"\n{before} has been closed: this one replaces it." if before else "")
        )

    def switch(self, on: bool) -> str:
        """On with the usual settings, or off; what is to be said of it. Raises UsageError where there is no model."""
        if on:
            return self._start(parsed_in_any_order(self.grad_watch, "on"), self.shell.user_ns, {})
        self.close()
        return "grad_watch is off."

    def shown(self) -> Any:
        """The watch whose picture a panel shows: the one that %grad_watch has started, else the user's only one."""
        own = list(self._own().values())
        return self.running if self.running is not None else own[0] if len(own) == 1 else None

    def _known(self, panel: bool) -> Any:
        """The watch that --live or --panel alone is about: the running one; for a panel also the user's own one, or the
        one that ran last. None: one is to be started."""
        if self.running is not None or not panel:
            return self.running
        own = list(self._own().values())
        return own[0] if len(own) == 1 else self.last[0] if self.last is not None else None

    def _draw(self, watch: Any, panel: bool) -> None:
        """A place for the picture below this cell, drawn anew while training runs."""
        if panel:
            display(watch.panel())
            return
        handle = display(_bundle(watch.html()), raw=True, display_id=True)
        if handle is not None:
            watch.live(lambda html: handle.update(_bundle(html), raw=True))

    def _report(self, request: str) -> Any:
        """The report so far, with what was asked and of what; None, and a word, while there is none."""
        __tracebackhide__ = True
        watch, watched, outdated = self.running, self.watched, ""
        if watch is None and self.last is not None and request == "status":
            watch, watched = self.last
        if watch is None:
            print(
                "grad_watch is not on. %grad_watch on starts it."
                + "".join(f" (`{name}` is one of your own: {name}.report() shows it.)" for name in self._own())
            )
            return None
        if watch is self.running:
            outdated = watched.outdated(self.shell.user_ns)
        if request == "off":
            self.close()
        report = watch.report()
        notes = (outdated, *report.notes) if outdated and request == "status" else report.notes
        asked = "%grad_watch" if request == "status" else "%grad_watch --off"
        return dataclasses.replace(report, question=asked, subject=str(watched), notes=notes)

    def active(self) -> list[str]:
        """A line for each watch that is on, for %nbdebug status."""
        lines = []
        if self.running is not None:
            outdated = self.watched.outdated(self.shell.user_ns)
            lines += [
                f"Active: grad_watch of {self.watched.things} ({_counted(self.running)}). %grad_watch shows its "
                "report, %grad_watch --off ends it."
            ] + [outdated] * bool(outdated)
        return lines + [
            f"Active: the watch `{name}` ({_counted(watch)}). {name}.close() ends it."
            for name, watch in self._own().items()
        ]

    def close(self) -> None:
        """End the watch that %grad_watch has turned on, if any."""
        running, watched = self.running, self.watched
        self.running = self.watched = None
        if running is not None:
            running.close()
            self.last = running, watched

    def close_all(self) -> None:
        """The same, and the watches among the user's variables."""
        self.close()
        for watch in self._own().values():
            watch.close()

    def _own(self) -> dict[str, Any]:
        """The active watches that the user's own code has made, by the user's names."""
        module = sys.modules.get("nbdebug.tools.grad_watch.grad_watch")  # never imported: there is none
        return (
            {}
            if module is None
            else {
                name: value
                for name, value in self.shell.user_ns.items()
                if isinstance(value, module.GradWatch) and value.active and not name.startswith("_")
            }
        )


def _request(args: Any) -> str:
    """on, off or status; options alone mean on. Raises UsageError where options come with what takes none."""
    options = [f"--{name.replace('_', '-')}" for name in OPTIONS if getattr(args, name) is not None]
    options += ["--live"] * args.live + ["--panel"] * args.panel
    request = "off" if args.off else args.request or ("on" if options else "status")
    if args.off and args.request in ("on", "status"):
        raise UsageError(f"%grad_watch takes {args.request} or --off, not both")
    if options and request != "on":
        raise UsageError(
            f"%grad_watch {request} takes no options; {' and '.join(options)} can only be given to {MAGIC}"
        )
    return str(request)


def _bundle(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": "gradient norms (a picture)"}


def _counted(watch: Any) -> str:
    if watch.fault:
        return f"it stopped watching: {watch.fault}"
    steps, clipped = watch.steps, watch.history.clipped
    return f"{steps} step{'s' * (steps != 1)} watched" + (f", {clipped} clipped" if clipped else "")
