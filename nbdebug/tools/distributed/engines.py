"""Cells on several processes: ipyparallel's engines, each of which is one rank of a process group.

`Engines` stands in the notebook: it starts the processes, sends them a cell, passes on what they print, and compares
their logs while the cell runs. `Member` stands in each process: it makes the group, watches what the cell does (as
`agent` does in a script), refuses a call that another rank has not made, and frees a rank that waits in a collective,
so that the processes with all their variables are there for the next cell.

The store of the group is the notebook's own. A process that cannot reach it any more ends: nothing is left behind.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import datetime
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from nbdebug.observe.variables import running_shell
from nbdebug.report import Report
from nbdebug.tools.distributed.agent import PEER, Agent, CallsDiffer, end_process
from nbdebug.tools.distributed.facts import CollectiveCall
from nbdebug.tools.distributed.launch import LOCATE, Comparer, alive, report_of
from nbdebug.tools.distributed.marks import marked
from nbdebug.tools.distributed.paths import STILL
from nbdebug.tools.distributed.rules import certain, locates

POLL, GRACE = 0.02, 0.2
FREE, INTERRUPT, LOST = 4.0, 6.0, 12.0
"""Seconds after a rank's error, until the others are interrupted, interrupted again, and given up."""
Show = Callable[[int, str, Any], None]
"""rank, "stdout", "stderr" or "display", and the text or the display data."""


# -- in the notebook --------------------------------------------------------------------------------------------------


class CellOutcome(NamedTuple):
    """What became of a cell. errors: rank → ipyparallel's error, the first in time first; report: None where nothing is
    to be told; raised: the user's own error of one rank, the first one."""

    errors: dict[int, Exception]
    report: Report | None
    raised: Exception | None


class Engines:
    """Processes that run cells. Raises ImportError without ipyparallel."""

    def __init__(self, count: int = 2, backend: str | None = None, profile: str | None = None) -> None:
        """count: of processes on this machine; profile: of ipyparallel's, to use its running cluster in place of it."""
        try:
            import ipyparallel
        except ImportError:
            raise ImportError('%ranks needs ipyparallel: pip install "torch-nbdebug[distributed]"') from None
        here = pathlib.Path.cwd() if profile else None  # a folder that other machines have, too
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="nbdebug-engines-", dir=here))
        self.cluster: Any = None
        self.client: Any = None
        self.cells: dict[str, str] = {}
        self.cell, self.broken, self.lost = 0, True, ""
        self.processes: list[int] = []
        self.store: Any = None
        try:
            self._start(ipyparallel, count, profile)
            self._join(backend, profile is None)
        except BaseException:  # Ctrl-C too, and a start that takes too long: no process is left behind
            self.stop()
            raise

    def _start(self, ipyparallel: Any, count: int, profile: str | None) -> None:
        if profile is not None:
            self.client = ipyparallel.Client(profile=profile)
        else:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the processes share the cores
            self.cluster = ipyparallel.Cluster(
                n=count, profile_dir=str(self.folder / "profile"), log_level=40, delay=0.1, controller_ip="127.0.0.1"
            )
            self.cluster.start_cluster_sync(count)
            self.client = self.cluster.connect_client_sync()
            self.client.wait_for_engines(count, interactive=False, timeout=120)
        self.ids = sorted(self.client.ids)

    def _join(self, backend: str | None, local: bool) -> None:
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.backend = backend or ("nccl" if cards >= len(self.ids) else "gloo")
        host = "127.0.0.1" if local else socket.gethostname()
        listener = socket.create_server((host if local else "", 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        controller = getattr(getattr(self.cluster, "controller", None), "pid", None)
        place = len(self.ids), host, port, str(self.folder), self.backend, controller, local
        self._ask(lambda rank: f"join({rank}, *{place!r})", 120)
        self.processes = [int(self.store.get(f"process/{rank}")) for rank in range(len(self.ids))]

    def _ask(self, call: Callable[[int], str], seconds: float) -> None:
        """Call a function of this module in each rank's process; no name is left among the user's."""
        asked = ((own, f'__import__("{__name__}", fromlist=["_"]).{call(rank)}') for rank, own in enumerate(self.ids))
        self._wait([self.client[own].execute(text, block=False) for own, text in asked], seconds)

    def _wait(self, results: Sequence[Any], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not all(result.ready() for result in results):
            if self.gone() or time.monotonic() > until:
                raise RuntimeError(self.gone() or "the ranks do not answer: %ranks stop, then %ranks start")
            time.sleep(POLL)
        for result in results:
            result.get()

    def gone(self) -> str:
        """Why no further cell can run; "" where one can."""
        if self.lost:
            return self.lost
        dead = [rank for rank, process in enumerate(self.processes) if self.cluster and not alive(process)]
        missing = dead or [rank for rank, own in enumerate(self.ids) if own not in self.client.ids]
        if missing:
            self.lost = f"the process of rank {missing[0]} has ended, with its variables: %ranks start begins anew"
        return self.lost

    def send(self, names: dict[str, Any]) -> None:
        """Copies of the user's values, to all ranks. Raises ValueError for one that cannot be sent."""
        for name, value in names.items():
            try:
                self._wait([self.client[own].push({name: value}, block=False) for own in self.ids], 60)
            except RuntimeError:
                raise
            except Exception as error:
                raise ValueError(f"{name} cannot be sent to the ranks ({error}): make it in a %%ranks cell") from None

    def fetch(self, name: str) -> list[Any]:
        """The values of a name, one for each rank. Raises ValueError where a rank has none, or it cannot be sent."""
        try:
            return [self.client[own].pull(name, block=False).get(60) for own in self.ids]
        except Exception as error:
            raise ValueError(f"{name} cannot be fetched from the ranks: {error}") from None

    def run(self, source: str, name: str, show: Show) -> CellOutcome:
        """Run a cell on all ranks. source: with as many lines above it as in the notebook; name: "In [5]".

        Ends when all ranks have ended. A rank that fails, and ranks that have parted, end the others: those that wait
        in a collective are freed, those that compute are interrupted. KeyboardInterrupt passes when all have ended."""
        __tracebackhide__ = True
        if self.gone():
            raise RuntimeError(self.gone())
        self.cell += 1
        source = re.sub(r"\A(\s*\n)+", lambda empty: "#\n" * empty[0].count("\n"), source)  # the shell drops such lines
        self.cells[name] = source
        folder = self.folder / f"cell-{self.cell}"
        folder.mkdir(mode=0o700)
        number = re.sub(r"\D", "", name) or "0"
        self._ask(lambda _: f"member.begin({self.cell}, {name!r}, {number}, {self.broken})", 60)
        self.broken = False
        run = _Run(self, source, folder, show)
        try:
            return run.follow()
        except KeyboardInterrupt:
            run.free(interrupt=True)
            raise
        finally:
            keys = [f"alive/{self.cell}/{rank}" for rank in range(len(self.ids))]
            self.broken |= not (self.store.check(keys) and all(self.store.get(key) == b"1" for key in keys))
            shutil.rmtree(folder, ignore_errors=True)

    def status(self) -> list[str]:
        state = self.gone() or f"{len(self.ids)} ranks, {self.backend}, {self.cell} cells run"
        return [state, *(f"rank {rank}: process {process}" for rank, process in enumerate(self.processes))]

    def stop(self) -> None:
        """End the processes, where this object has started them."""
        with contextlib.suppress(Exception):
            self.store.set("over", "1")
            if self.cluster is None:  # the user's own engines go on: they let go of the store
                time.sleep(0.5)
        for process in filter(alive, self.processes if self.cluster is not None else ()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(Exception):
            if self.cluster is not None:
                self.cluster.stop_cluster_sync()
            if self.client is not None:
                self.client.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Run:
    """One cell on all ranks."""

    def __init__(self, engines: Engines, source: str, folder: pathlib.Path, show: Show) -> None:
        self.engines, self.show = engines, show
        self.comparer = Comparer(folder, len(engines.ids))
        self.comparer.facts.sources.update(engines.cells)
        self.results = [engines.client[own].execute(source, silent=False, block=False) for own in engines.ids]
        self.positions = [{"stdout": 0, "stderr": 0, "outputs": 0} for _ in self.results]
        self.errors: dict[int, Exception] = {}
        self.freed = False

    def running(self) -> Iterator[float]:
        """While a rank runs: seconds from now, with what was printed passed on and the logs read."""
        began = time.monotonic()
        while not all(result.ready() for result in self.results) and not self.engines.gone():
            self.collect()
            self.comparer.read()
            yield time.monotonic() - began
            time.sleep(POLL)

    def follow(self) -> CellOutcome:
        __tracebackhide__ = True
        for _ in self.running():
            if self.errors or certain(self.comparer.facts):  # the others may end by themselves, else they are freed
                for seconds in self.running():
                    if seconds > (LOCATE if locates(self.comparer.facts) else GRACE):
                        self.free()
        for result in filter(lambda result: result.ready(), self.results):
            with contextlib.suppress(Exception):
                result.wait_for_output(1)
        self.collect(last=True)
        return self.outcome()

    def collect(self, last: bool = False) -> None:
        """Pass on what was printed since, whole lines first; note errors. What ranks say of being freed is left out."""
        for rank, (result, position) in enumerate(zip(self.results, self.positions)):
            for stream in ("stdout", "stderr"):
                lines = str(getattr(result, stream) or "").split("\n")
                whole = lines if last and lines[-1] else lines[:-1]
                for line in whole[position[stream] :] if stream == "stdout" or not self.freed else ():
                    self.show(rank, stream, line)
                position[stream] = max(len(whole), position[stream])
            for content in list(result.outputs or ())[position["outputs"] :]:
                position["outputs"] += 1
                self.show(rank, "display", content)
            if last and result.ready() and (value := result.metadata.get("execute_result")):
                self.show(rank, "display", value)
            if rank not in self.errors and result.ready() and not result.successful():
                self.errors[rank] = error = result.exception()
                text = str(error).partition("] ")[2]
                told = text.startswith("CallsDiffer") or self.freed and PEER.search(text)  # by the report
                if len(self.errors) == 1 and not told:
                    self.show(rank, "stderr", text)

    def free(self, interrupt: bool = False) -> None:
        """End the cell on all ranks."""
        engines, waits = self.engines, [0.0 if interrupt else FREE, INTERRUPT]
        engines.broken = self.freed = True
        engines.store.set(f"free/{engines.cell}", "1")
        for seconds in self.running():
            if waits and seconds > waits[0]:
                del waits[0]
                running = [own for own, result in zip(engines.ids, self.results) if not result.ready()]
                engines.client.send_signal(signal.SIGINT, targets=running, block=False)
            if seconds > LOST:
                engines.lost = "a rank does not come back from its call: %ranks start begins anew"

    def outcome(self) -> CellOutcome:
        self.comparer.read()
        facts = self.comparer.facts
        own = {error["rank"]: error for error in facts.all("error")}
        raised = [error for rank, error in self.errors.items() if rank in own and not own[rank]["peer"]]
        facts.over = not own and not self.engines.lost
        if self.freed:  # who waited then would wait still
            facts.now += 2 * STILL
        alike = len({(e["type"], e["text"]) for e in own.values()}) == 1 and len(raised) == len(facts.ranks)
        report = report_of(facts, "%%ranks")
        told = not alike and bool(report.findings or report.symptoms)
        first = next(iter(raised or (() if told else self.errors.values())), None)  # else a syntax error, an interrupt
        if gone := self.engines.gone():
            first = RuntimeError(gone)
        return CellOutcome(self.errors, report if told else None, first)


# -- in each process --------------------------------------------------------------------------------------------------


class Member:
    """One rank: its group, what it writes down of a cell, and the thread that frees it."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.cell, self.freed, self.active, self.name = 0, 0, False, ""
        self.lock = threading.Lock()
        self.shell, self.main = running_shell(), threading.get_ident()
        helper = c10d._new_process_group_helper

        def noting(*args: Any, **kwargs: Any) -> Any:
            before = sockets()
            group = helper(*args, **kwargs)
            self.sockets += [socket.socket(fileno=os.dup(descriptor)) for descriptor, _ in sockets() - before]
            return group

        c10d._new_process_group_helper = noting
        if hasattr(os, "register_at_fork"):  # a loader's worker must not delete a group of an earlier cell: that would
            os.register_at_fork(after_in_child=gc.freeze)  # wait for ever for the group's threads, which it has not
        self.agent = Agent(pathlib.Path(), None)
        self.agent.install()
        self.make_group = c10d.init_process_group
        c10d.init_process_group = dist.init_process_group = self.initialise
        self.agent.agree = self.agree
        if self.shell is not None:
            self.shell.ast_transformers.append(self)
            self.shell.compile.get_code_name = lambda raw, code, number: self.name or f"In [{number}]"
            self.shell.events.register("post_run_cell", self.end)
            self.show_error, self.shell.showtraceback = self.shell.showtraceback, self.showtraceback
            self.shell.extension_manager.load_extension("nbdebug")

    def connect(
        self, rank: int, world: int, host: str, port: int, folder: str, backend: str, controller: Any, local: bool
    ) -> None:
        """Become a rank of these processes. controller: the process of ipyparallel's, which ends with the notebook, as
        this one does; None for the user's own cluster, which goes on."""
        self.rank, self.world, self.backend, self.controller = rank, world, backend, controller
        self.folder, self.agent.rank = pathlib.Path(folder), rank
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), MASTER_ADDR=host, MASTER_PORT=str(port))
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)))
        if local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        self.store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False)
        self.store.set(f"process/{rank}", str(os.getpid()))
        threading.Thread(target=self.watch, daemon=True, name="nbdebug ranks").start()

    def begin(self, cell: int, name: str, number: int, rebuild: bool) -> None:
        """Before a cell: the group, and a log of its own."""
        with self.lock:  # else the last cell's end is taken for this one's
            self.cell, self.name = cell, name
        if rebuild or not dist.is_initialized():
            self.join()
        self.agent.begin(self.folder / f"cell-{cell}")
        self.active = True
        if self.shell is not None:
            self.shell.execution_count = number
            self.shell.user_ns.update(rank=self.rank, world_size=self.world)

    def join(self) -> None:
        """A new group, through the notebook's store. Wrapped models of the old one go over to it."""
        models = []
        if dist.is_initialized():
            old = c10d._get_default_group()
            models = [m for m in self.agent.models if m.process_group is old]
            dist.destroy_process_group()
        while self.sockets:
            self.sockets.pop().close()
        more: dict[str, Any] = {}
        if self.backend == "nccl":  # its communicator is made now: what waits while it is made can't be freed
            more["device_id"] = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(more["device_id"])
        store = PrefixStore(f"group/{self.cell}", self.store.clone())
        self.make_group(self.backend, store=store, rank=self.rank, world_size=self.world, **more)
        for model in models:  # as an unpickled one would
            state = {name: value for name, value in vars(model).items() if name not in ("process_group", "logger")}
            del model.reducer, state["reducer"]
            model.__setstate__({**state, "broadcast_buffers": getattr(model, "broadcast_buffers", True)})

    def initialise(self, backend: str | None = None, *_: Any, **__: Any) -> None:
        """`init_process_group` as the user calls it: the cell's group is there; another backend makes a new one."""
        if backend not in (None, self.backend) or not dist.is_initialized():
            self.backend = backend or self.backend
            self.join()

    def visit(self, tree: ast.Module) -> ast.Module:
        """Marks in a cell (the shell calls this)."""
        return marked(tree, self.name, self.agent.listed) if self.active else tree

    def agree(self, call: CollectiveCall) -> None:
        """Raises CallsDiffer where this call of a group is not what the rank that was there first has called."""
        line = f"{call.lines[0][0]}, line {call.lines[0][1]}" if call.lines else "?"
        own = {"key": list(call.key), "what": f"rank {self.rank} calls {call} ({line})"}
        key = f"call/{self.cell}/{call.group}/{call.n}"
        first = json.loads(self.store.compare_set(key, "", json.dumps(own)))
        if first["key"] != own["key"]:
            raise CallsDiffer(f"{own['what']}; {first['what']}")

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """In the shell's place: an error that the report tells of is one line. All its frames would take seconds, in
        which the rank seems to be in its call still."""
        error: Any = sys.exc_info()[1]
        if isinstance(error, CallsDiffer) or self.freed == self.cell:
            error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]
        self.show_error(*args, **kwargs)
        if error is not None:  # the shell formats it once more, for its history, and ends the cell after that
            error._render_traceback_ = lambda: getattr(self.shell, "_last_traceback", None) or [str(error)]

    def end(self, result: Any) -> None:
        """After a cell."""
        if not self.active:
            return
        self.active = False
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            vars(error).pop("_render_traceback_", None)
            self.agent.attempt(self.agent.failed, error, False)
        else:
            self.agent.attempt(self.agent.finish)
            self.agent.write("end", code=0)
        self.store.set(f"alive/{self.cell}/{self.rank}", str(int(dist.is_initialized())))

    def watch(self) -> None:
        """A thread: free this rank when the notebook says so; end it when the notebook is gone."""
        store = self.store.clone()
        while True:
            time.sleep(0.05)
            try:
                if store.check(["over"]):
                    return
                cell = self.cell
                due = store.check([f"free/{cell}"]) and self.freed != cell
            except Exception:  # whatever torch raises: there is no store
                if self.controller is None:
                    return
                if self.rank == 0:
                    shutil.rmtree(self.folder, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        os.kill(self.controller, signal.SIGTERM)
                end_process(1)
            if due:
                self.freed = cell
                self.free(cell)

    def free(self, cell: int) -> None:
        """Make what waits in a collective raise. gloo: its connections are closed for writing, which the other side
        sees as an end. NCCL: its calls return and raise nothing, so that the cell is told to end first."""
        if self.active:
            self.agent.attempt(self.agent.write_state, False)
        time.sleep(0.1)  # twice as long as the other ranks' threads sleep: they tell their state before this frees them
        with self.lock:
            if cell != self.cell:
                return  # all ranks have ended by themselves: the next cell has a group of its own
            if self.backend == "nccl":
                if self.active:
                    interrupt = ctypes.py_object(KeyboardInterrupt)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main), interrupt)
                c10d._abort_process_group()
            for connection in self.sockets:  # gloo may have closed its own, which ends none that a worker has a copy of
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)


def sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets: a number may be that of another one a moment later."""
    found = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            state = os.fstat(descriptor)
            found |= {(descriptor, state.st_ino)} if stat.S_ISSOCK(state.st_mode) else set()
    return found


member: Any = None


def join(*place: Any) -> None:
    """Become a rank of these processes, as `Member.connect` says."""
    global member
    member = member or Member()
    member.connect(*place)
