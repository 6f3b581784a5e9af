"""%grad_watch: one watch for a shell, turned on and off by name. What it reports comes from `nbdebug.grad_watch`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from nbdebug.magics._arguments import FULL, HELP, MODELS, OPTIMIZERS, answer, parse, variables
from nbdebug.magics._watch import WatchMagics, WatchSubject, request_argument
from nbdebug.report import Report
from nbdebug.text import count

if TYPE_CHECKING:
    from nbdebug.tools.training.loop_frames import LoopSubject


@magics_class
class GradWatchMagics(WatchMagics):
    """%grad_watch. last: the watch that was turned off last, with its subject; its report can still be shown."""

    magic, noun = "grad_watch", "gradient watch"
    home, kind = "nbdebug.tools.grad_watch.grad_watch", "GradWatch"
    options = ("model", "optimizer", "every", "ratios_every", "keep", "live", "panel")
    last: tuple[Any, WatchSubject] | None = None

    @needs_local_scope
    @magic_arguments()
    @FULL
    @HELP
    @MODELS
    @OPTIMIZERS
    @argument("--every", type=int, metavar="N", help="measure the gradients of every Nth step (default 1)")
    @argument(
        "--ratios-every",
        type=int,
        metavar="N",
        help="measure how far the weights move in every Nth step (default 10; 0: never)",
    )
    @argument("--keep", type=int, metavar="N", help="steps to keep in full (default 1000); older ones are thinned out")
    @argument("--live", action="store_true", help="draw the gradient norms below this cell while training runs")
    @argument(
        "--panel",
        action="store_true",
        help="the same with controls: filter layers, linear or logarithmic scale, pause; after the run it shows what "
        "was measured",
    )
    @argument("--off", action="store_true", help=argparse.SUPPRESS)  # an older spelling of `off`
    @request_argument()
    @line_magic
    def grad_watch(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Watch gradient norms by layer, clipping, update sizes, dead units and the loss while training runs.

            %grad_watch on --live
            report = %grad_watch off

        %grad_watch on takes the model and optimizer among your variables, or, before there is one, what a loop calls
        and trains first, and watches them until %grad_watch off.
        %grad_watch and %grad_watch off give a report; report.figure() draws it. In a script:
        with nbdebug.grad_watch(model, optimizer) as watch: ...
        """
        __tracebackhide__ = True
        if (args := parse(self.grad_watch, line)) is None:
            return None
        if args.off and args.request in ("on", "status"):
            raise UsageError(f"%grad_watch takes {args.request} or off, not both.")
        options = self.typed_options(args)
        wanted = "off" if args.off else args.request or ("on" if options else "status")
        self.check_options(args, wanted)
        if wanted != "on":
            report = self.report(wanted)
            return answer(report, args, line)
        known = None if args.request or options.keys() - {"live", "panel"} else self._known(args.panel)
        if known is None:
            print(self.turn_on(args, variables(self.shell, local_ns)))
        shown = self.running if known is None else known
        if shown is not None and (args.live or args.panel):
            _draw(shown, args.panel)
        return None

    def _begin(self, found: LoopSubject) -> None:
        super()._begin(found)
        if self.running is not None and (self._typed.live or self._typed.panel):
            _draw(self.running, self._typed.panel)

    def _new(self, subject: WatchSubject, args: Any) -> Any:
        from nbdebug.tools.grad_watch.grad_watch import grad_watch  # imports torch: %load_ext must stay quick

        settings = {name: value for name, value in self.typed_options(args).items() if name in self.options[2:5]}
        return grad_watch(subject.subject.models, subject.subject.optimizers, **settings)

    def _started(self, args: Any) -> str:
        return (
            f"The gradient watch is on, watching {self.subject}.\n"
            "%grad_watch shows its report so far, %grad_watch off ends it."
        )

    def shown(self) -> Any:
        """The watch whose picture a panel shows: the one that %grad_watch has started, else the user's only one."""
        own = list(self.own().values())
        return self.running if self.running is not None else own[0] if len(own) == 1 else None

    def _known(self, panel: bool) -> Any:
        """The watch that --live or --panel alone is about: the running one; for a panel also the user's own one, or the
        one that ran last. None: one is to be started."""
        if self.running is not None or not panel:
            return self.running
        shown = self.shown()
        return self.last[0] if shown is None and self.last is not None else shown

    def report(self, request: str) -> Report | None:
        """The report so far; after the watch was turned off still the last one, for %grad_watch."""
        __tracebackhide__ = True
        if self.running is None and self.last is not None and request == "status":
            watch, subject = self.last
            return dataclasses.replace(watch.report(), question="%grad_watch", subject=str(subject))
        report = super().report(request)
        return report if report is None or request == "off" else dataclasses.replace(report, question="%grad_watch")

    def close(self) -> None:
        """End the watch that %grad_watch has turned on, if any."""
        if self.running is not None:
            self.last = self.running, self.subject
        super().close()

    def _counts(self, watch: Any) -> list[str]:
        clipped = watch.history.clipped
        return [f"{count(watch.steps, 'step')} watched", *[f"{clipped} clipped"] * bool(clipped)]


def _draw(watch: Any, panel: bool) -> None:
    """A place for the picture below this cell; it is redrawn while training runs."""
    if panel:
        display(watch.panel())
        return
    if (handle := display(_bundle(watch.html()), raw=True, display_id=True)) is not None:
        watch.live(lambda html: handle.update(_bundle(html), raw=True))


def _bundle(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": "gradient norms (a picture)"}
