"""%monitor, %read_log and %incident: a run from outside. Their answers: the functions of these names."""

from __future__ import annotations

import dataclasses
from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

import nbdebug
from nbdebug.magics._arguments import FULL, HELP, answer, parse, report_magic, unquote, usage_errors, variables
from nbdebug.magics._watch import request_argument
from nbdebug.report import Report
from nbdebug.text import count
from nbdebug.tools.monitor.incident import session_reports


@magics_class
class MonitorMagics(Magics):
    """%monitor, %read_log and %incident. running: the monitor that is on; last: the one that was."""

    running: Any = None
    last: Any = None

    @magic_arguments()
    @FULL
    @HELP
    @argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (default 1)")
    @argument("--live", action="store_true", help="draw below this cell while training runs")
    @request_argument()
    @line_magic
    def monitor(self, line: str) -> Report | None:
        """Watch the machine beside a training: card, processor, memory, disk, network, and steps a second.

            %monitor on --live
            report = %monitor off

        A thread of its own looks once a second. What was found meanwhile is marked. A verdict comes only where it is
        certain: memory or disk that end soon, a card that slows itself down, or that waits for one busy core. In a
        script: with nbdebug.monitor() as watch: ...
        """
        __tracebackhide__ = True
        if (args := parse(self.monitor, line)) is None:
            return None
        if args.request == "on" or args.live and args.request is None:
            with usage_errors():
                self._turn_on(args)
            return None
        watch = self.running if self.running is not None else self.last
        if args.request == "off":
            self.close()
        if watch is None:
            print("Nothing is monitored. %monitor on begins.")
            return None
        self._mark(watch)
        return answer(dataclasses.replace(watch.report(), question="%monitor"), args, line)

    def _turn_on(self, args: Any) -> None:
        if self.running is None or args.request == "on":
            watch = nbdebug.monitor(every=args.every)
            self.close()
            self.running = watch
            print("The machine is watched. %monitor shows it so far, %monitor off ends it.")
        if args.live and (handle := display(_bundle(""), raw=True, display_id=True)) is not None:
            self.running.live(lambda html: handle.update(_bundle(html), raw=True))

    def _mark(self, watch: Any) -> None:
        """What reports of this session have found while it watched."""
        reports = [r for r in session_reports(self.shell) if r.when >= watch.began and r.report.findings]
        watch.marks.clear()
        watch.marks.extend((one.when, one.report.findings[0].code) for one in reports[-8:])

    def active(self) -> list[str]:
        """A line for %nbdebug while the machine is watched."""
        return [f"Active: %monitor, {count(self.running.steps, 'step')}. %monitor off ends it."] if self.running else []

    def close(self) -> None:
        """End it."""
        if self.running is not None:
            self.last, self.running = self.running.close(), None

    close_all = close

    @magic_arguments()
    @HELP
    @argument("--save", metavar="FILE", help="write the page to FILE (.md), too")
    @argument("title", nargs="*", metavar="TITLE", help="of the page (default: the first cause)")
    @line_magic
    def incident(self, line: str) -> Any:
        """Make a page in five parts of what nbdebug has found in this session: problem, facts, cause, cure, prevention.

            %incident
            %incident --save page.md "The run of Tuesday night"

        It takes the last 50 reports that cells gave, with the cells and the times. No name of a person or a host, no
        token and no home folder stands in it. In a script: nbdebug.incident([report, ...]).
        """
        __tracebackhide__ = True
        if (args := parse(self.incident, line)) is None:
            return None
        with usage_errors():
            page = nbdebug.incident(session_reports(self.shell), title=" ".join(map(unquote, args.title)))
            if args.save:
                print(f"Written to {page.save(unquote(args.save))}.")
        return page

    @report_magic
    @argument("--follow", action="store_true", help="show the report anew whenever the log has grown, until Ctrl-C")
    @argument("path", metavar="PATH", help="a log, a folder of them, or a variable that holds the path of one")
    @line_magic
    def read_log(self, line: str, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Read the log of a run, and say what went wrong in it and on which line.

            %read_log train.log
            %read_log lightning_logs --full
            %read_log --follow slurm-1234.out

        Text of any usual form, JSON Lines, CSV, TensorBoard's event files, trainer_state.json, a guard's record. The
        losses are judged as in %grad_watch, a traceback as in %explain. It finds NaN, jumps, a rise, a level loss, a
        rising validation loss, rates of zero, restarts that lost their state, and runs that were killed. In a script:
        nbdebug.read_log(path); in a shell: python -m nbdebug read-log PATH.
        """
        __tracebackhide__ = True
        if (args := parse(self.read_log, line)) is None:
            return None
        names = variables(self.shell, local_ns)
        path = names.get(unquote(args.path), unquote(args.path))
        with usage_errors(OSError):
            report = _followed(path) if args.follow else nbdebug.read_log(path)
        return answer(report and dataclasses.replace(report, question=f"%read_log {args.path}"), args, line)


def _followed(path: Any) -> Report | None:
    """Show each report in the place of the one before; the last one, after Ctrl-C."""
    report, handle = None, None
    for report in nbdebug.read_log(path, follow=True):
        if handle is None:
            handle = display(report, display_id=True)
        else:
            handle.update(report)
    return report


def _bundle(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": "the machine (a picture)"}
