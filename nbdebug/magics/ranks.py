"""%ranks and %%ranks: cells on several processes, each a rank of one process group."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument
from IPython.display import display

from nbdebug.magics._arguments import answer, evaluate, parse, report_magic, variables
from nbdebug.magics._user_code import called_from
from nbdebug.report import Report


@magics_class
class RanksMagics(Magics):
    """%ranks and %%ranks."""

    engines: Any = None

    @report_magic
    @argument("--backend", choices=("gloo", "nccl"), help="of the group (default: nccl with a card for each rank)")
    @argument("--profile", metavar="NAME", help="of ipyparallel: use the cluster that runs under it, on any machines")
    @argument("--send", metavar="NAMES", help="copy these variables of the notebook to all ranks first: --send lr,rows")
    @argument("--fetch", metavar="NAMES", help="bring these back afterwards, as a list with one value for each rank")
    @argument("action", nargs="?", choices=("start", "status", "stop"), help="what to do with the processes")
    @argument("count", nargs="?", type=int, default=2, metavar="N", help="processes to start (default 2)")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Report | None:
        """Run cells on several processes at once, each a rank of one process group.

            %ranks start 2
            %%ranks --fetch loss

        %%ranks runs the cell below it on every rank, and shows what each prints. The group is there: init_process_group
        may stay in the cell, and does nothing. rank and world_size are set, and nbdebug's magics work inside. When one
        rank fails, its error is shown at once; when ranks part, the report names the rank and the line. The others are
        freed, and the next cell has a new group. For scripts: python -m nbdebug ranks.
        """
        __tracebackhide__ = True
        if (args := parse(self.ranks, line)) is None:
            return None
        if cell is None:
            self._act(args)
            return None
        if args.action:
            raise UsageError("%%ranks runs the cell below it: start the processes with %ranks start, in a cell before.")
        if self.engines is None:
            raise UsageError("%%ranks needs processes: %ranks start 2")
        return answer(self._run(cell, args, variables(self.shell, local_ns)), args, cell)

    def _act(self, args: Any) -> None:
        if args.action == "start":
            self._start(args)
        elif args.action == "stop":
            print("The processes have ended." if self.engines is not None else "No process runs.")
            self.close()
        elif self.engines is None:
            print("No process runs. %ranks start 2 starts two.")
        else:
            print("\n".join(self.engines.status()))

    def _start(self, args: Any) -> None:
        if args.count < 1:
            raise UsageError(f"%ranks start takes a number of processes of at least 1; got {args.count}.")
        from nbdebug.tools.distributed.engines import Engines  # imports torch: %load_ext must stay quick

        self.close()
        try:
            self.engines = Engines(args.count, args.backend, args.profile)
        except (ImportError, OSError, RuntimeError) as error:
            raise UsageError(str(error)) from None
        print(
            "\n".join([*self.engines.status(), "%%ranks above a cell runs it on all of them. %ranks stop ends them."])
        )

    def _run(self, cell: str, args: Any, names: dict[str, Any]) -> Report | None:
        __tracebackhide__ = True
        engines, (number, _) = self.engines, called_from(self.shell)
        try:
            engines.send({name: evaluate(name, names) for name in _names(args.send)})
            outcome = engines.run(self._source(cell), f"In [{number}]", _show)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"{error}.") from None
        if outcome.raised is not None:
            if outcome.report is not None:
                display(outcome.report)
            raise outcome.raised
        for name in _names(args.fetch) if not outcome.errors else ():
            try:
                self.shell.user_ns[name] = engines.fetch(name)
            except ValueError as error:
                raise UsageError(f"{error}.") from None
        return outcome.report

    def _source(self, cell: str) -> str:
        """The cell with as many lines above it as the user sees; a cell magic must stay its first line."""
        if cell.lstrip().startswith("%%"):
            return cell
        raw = self.shell.history_manager.input_hist_raw[-1]
        above = raw.rstrip()[: -len(cell.rstrip())].count("\n") if raw.rstrip().endswith(cell.rstrip()) else 0
        return "# %%ranks\n" * above + cell

    def active(self) -> list[str]:
        """A line for %nbdebug while processes run."""
        return [] if self.engines is None else [f"Active: %ranks, {self.engines.status()[0]}. %ranks stop ends them."]

    def close(self) -> None:
        """End the processes."""
        if self.engines is not None:
            self.engines.stop()
            self.engines = None

    close_all = close


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _show(rank: int, kind: str, value: Any) -> None:
    if kind == "display":
        text = value["data"].get("text/plain", "")
        if set(value["data"]) <= {"text/plain"} and "\n" not in text:
            print(f"[rank {rank}] {text}")
        else:
            print(f"[rank {rank}]")
            display(value["data"], raw=True, metadata=value.get("metadata", {}))
    else:
        print(f"[rank {rank}] {value}", file=sys.stderr if kind == "stderr" else sys.stdout)
