"""The ranks' start, the comparison while they run, and their end.

`run_script` starts torchrun with the user's script in each rank; under a torchrun of the user's the first rank of a
machine starts `compare`. Both read the ranks' files every 0.1 s. A verdict about a rank that has left stops all ranks
(file "stop": each writes its stack and exits with 1); verdicts about silent faults come when the run is over.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil

from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, figures
from nbdebug.tools.distributed.facts import RankLog, RanksFacts
from nbdebug.tools.distributed.paths import STILL, waiting
from nbdebug.tools.distributed.rules import certain, locates, name_cause, torn_down

POLL, LOCATE, NOTICE = 0.1, 4.0, 30.0
"""Seconds between two looks; the most that are given to a rank that looks for the op behind its loss; the wait for a
rank after which a line tells where that stands, or half of the timeout where that is less."""
FOLDER = "NBDEBUG_RANKS"


def alive(process: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


class Comparer:
    """Reads the ranks' files into facts. launched: how many were; 0 where the script itself starts them."""

    def __init__(self, folder: pathlib.Path, launched: int) -> None:
        self.folder, self.launched, self.facts = folder, launched, RanksFacts(launched)
        self.positions = Counter[pathlib.Path]()
        self.began = self.still = time.monotonic()
        self.noticed: list[Any] = []

    def read(self) -> bool:
        """Whether there is something to judge: new events, or none for a while. A rank begins a file anew after 1 MiB;
        those that were read are removed."""
        new, names = False, [re.split("[-.]", path.name) for path in self.folder.glob("rank-*.jsonl")]
        parts = sorted((int(part), int(rank)) for _, rank, part, _ in names)
        last = {rank: part for part, rank in parts}
        for part, rank in parts:
            path = self.folder / f"rank-{rank}.{part}.jsonl"
            with open(path, "rb") as file:
                file.seek(self.positions[path])
                whole = (data := file.read())[: data.rfind(b"\n") + 1]
            self.positions[path] += len(whole)
            for event in map(json.loads, whole.splitlines()):
                known, new = self.facts.ranks, True
                complete = rank in known or 0 < self.facts.launched <= len(known)
                if event["k"] == "start" and complete and all(map(RankLog.ended, known.values())):
                    self.facts.over = True  # the script starts other ranks, after these
                    before = name_cause(self.facts)
                    self.facts = RanksFacts(self.launched, sources=self.facts.sources, before=before)
                self.facts.add(rank, event)
                for name in {*(line[0] for line in event.get("lines", ())), event.get("file")} - {None, ""}:
                    if name not in self.facts.sources:
                        with contextlib.suppress(OSError, UnicodeDecodeError):
                            self.facts.sources[name] = pathlib.Path(name).read_text(encoding="utf-8")
            if part < last[rank]:
                path.unlink()
        self.facts.now = time.time()
        if not self.facts.launched and (self.folder / "all-launched").exists():
            self.facts.launched = len(list(self.folder.glob("launched-*")))
        if new:
            self.facts.forget()
            self.still = time.monotonic()
        elif time.monotonic() > self.still + 2 * STILL:
            self.still, new = time.monotonic(), True
        return new

    def notice(self) -> None:
        """Tell once of each line at which ranks wait long for another: where that stands. The run goes on."""
        for call, absent in waiting(self.facts, min(NOTICE, self.facts.timeout() / 2)):
            if call.lines[:1] in self.noticed or not absent:
                continue
            self.noticed.append(call.lines[:1])
            (self.folder / f"ask-{len(self.noticed)}").touch()
            time.sleep(5 * POLL)
            self.read()
            for rank in absent:
                stack = self.facts.ranks[rank].one("stack")
                line = stack["lines"][0] if stack and stack["lines"] else ("", 0)
                told = f"ranks wait in {call} for rank {rank}, which is at {line[0]}, line {line[1]}"
                why = f"{self.facts.text(line).strip()} (distributed/collective-mismatch, if it never comes)"
                print(f"nbdebug: {told}: {why}", file=sys.stderr, flush=True)

    def read_while(self, goes_on: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while goes_on() and time.monotonic() < until:
            time.sleep(POLL / 2)
            self.read()
        self.read()

    def stop(self) -> None:
        """End the ranks: their own threads do it, and tell their stacks first; what is left after 2 s is killed."""
        (self.folder / "stop").touch()
        self.read_while(lambda: any(map(alive, self.processes())), 2)
        for process in filter(alive, self.processes()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                own = os.getpgid(process) == process
                (os.killpg if own else os.kill)(process, signal.SIGKILL)

    def follow(self, question: str, over: Callable[[], bool], printed: Iterable[str] = (), status: Any = int) -> Report:
        """Until the run is over, or a fault is certain: the ranks are then ended first. status: of the launcher."""
        sure, seconds = False, 0.0
        while not sure and not over():
            if self.read():
                self.facts.output = "".join(list(printed))
                sure = certain(self.facts)
            seconds = time.monotonic() - self.began
            time.sleep(POLL)
            self.notice()
        if sure:
            time.sleep(POLL)
            self.read_while(lambda: locates(self.facts), LOCATE)
            self.stop()
        else:
            self.read()
            self.facts.output = "".join(list(printed))
        self.facts.over = True
        return report_of(self.facts, question, seconds, 0 if sure else status())

    def processes(self) -> list[int]:
        starts = [log.one("start") for log in self.facts.ranks.values()]
        return [start["pid"] for start in starts if start is not None]


def run_script(
    script: str, arguments: Sequence[str] = (), nproc: int = 2, echo: bool = True, limit: float | None = None
) -> Report:
    """Run a script on `nproc` processes under observation. echo: pass on what they print; limit: seconds after which
    they are ended.

    Raises FileNotFoundError where there is no such script."""
    if not pathlib.Path(script).is_file():
        raise FileNotFoundError(f"no such script: {script}")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nbdebug-ranks-"))
    (folder / "launcher").write_text(str(os.getpid()))
    own = starts_ranks(pathlib.Path(script).read_text(encoding="utf-8", errors="replace"))
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m", "nbdebug.rank"]
    command = [sys.executable, *(["-m", "nbdebug.rank", "--starts-ranks"] if own else command), script, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(command, env={**os.environ, FOLDER: str(folder)}, **pipes)
    comparer, printed = Comparer(folder, 0 if own else nproc), deque[str](maxlen=400)
    reader = threading.Thread(target=pass_on, args=(process.stdout, printed, echo), daemon=True)
    reader.start()

    def over() -> bool:
        if process.poll() is not None:
            reader.join(2)
        return process.poll() is not None or bool(limit and time.monotonic() > comparer.began + limit)

    try:
        return comparer.follow(f"nbdebug ranks {pathlib.Path(script).name}", over, printed, process.poll)
    finally:
        comparer.stop()
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def starts_ranks(source: str) -> bool:
    """Whether a script starts its ranks itself, by torch.multiprocessing."""
    says = functools.partial(re.search, string=source)
    by_hand = says(r"\bProcess\(") and says(r"\b(init_method|MASTER_PORT)\b")
    return bool(says(r"\bmultiprocessing\b") and (by_hand or says(r"\b(spawn|start_processes)\(")))


def pass_on(stream: Iterable[bytes], printed: deque[str], echo: bool) -> None:
    for line in stream:
        text = line.decode("utf-8", "replace")
        printed.append(text)
        if echo:
            sys.stdout.write(text)
            sys.stdout.flush()


def end(process: subprocess.Popen[bytes]) -> None:
    """torchrun, after its ranks."""
    for number, seconds in ((0, 1.5), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def compare(folder: pathlib.Path, local: int, launched: int) -> int:
    """Beside a user's torchrun: until all ranks of this machine have ended, or one has left."""
    comparer = Comparer(folder, launched)

    def over() -> bool:
        processes = comparer.processes()
        ended = len(processes) >= local and not any(map(alive, processes))
        never = not processes and time.monotonic() > comparer.began + 300
        return ended or never or len(list(folder.glob("end-*"))) >= local

    report = comparer.follow("nbdebug.rank", over)
    print(report, file=sys.stderr, flush=True)
    (folder / "verdict").write_text(str(int(not report.ok)))
    time.sleep(1)
    comparer.stop()
    shutil.rmtree(folder, ignore_errors=True)
    return int(not report.ok)


# -- the report -------------------------------------------------------------------------------------------------------


def report_of(facts: RanksFacts, question: str, seconds: float = 0.0, status: int | None = 0) -> Report:
    """seconds: from the start to the verdict; status: of the launcher, None where it had to be ended."""
    finding = name_cause(facts)
    symptoms = []
    late = torn_down(facts) if finding is None else ""
    if finding is None and status is None:
        symptoms.append(Symptom("The ranks did not end within the limit, and all are in the same call."))
    elif finding is None and status and not late.startswith("All"):
        symptoms.append(Symptom(f"The launcher ended with status {status}.", "Its output above tells more."))
    if finding is None and (growth := facts.growth_of_loss()):
        symptoms.append(Symptom(f"{growth[0].upper()}{growth[1:]}.", "Ask %diagnose of it, in one process."))
    if fault := facts.fault():
        symptoms.append(Symptom("nbdebug failed while it watched a rank: nothing was compared.", fault))
    calls = sum(log.made(group) for log in facts.ranks.values() for group in log.calls)
    steps = max((len(log.events.get("loss", ())) for log in facts.ranks.values()), default=0)
    well = "All ranks made the same calls, and nothing differs that should be the same."
    came = f"The verdict came {figures(seconds)} s after the start."
    return Report(
        question,
        (finding,) if finding is not None else (),
        subject=f"{count(len(facts.ranks), 'rank')}, {count(calls, 'collective')} compared",
        facts={"ranks": {rank: log.marks for rank, log in facts.ranks.items()}, "seconds": round(seconds, 2)},
        headline="" if finding is not None or symptoms else well,
        symptoms=tuple(symptoms),
        notes=tuple(filter(None, [late, came * bool(seconds and finding is not None)])),
        steps=steps or int(bool(calls)),
        tables=tuple(table for table in tables(facts) if table.rows),
    )


def tables(facts: RanksFacts) -> Iterator[Table]:
    """The last call of each rank, and where it stood."""
    last, frames = [], []
    for rank, log in facts.ranks.items():
        line = log.last.lines[0] if log.last and log.last.lines else None
        place = f"{line[0].rpartition('/')[2]}, line {line[1]}" if line else ""
        ended = error["type"] if (error := log.one("error")) else "ended" if log.one("end") else "running"
        last.append([rank, sum(map(log.made, log.calls)), str(log.last or "none"), place, ended])
        frames += [[rank, line] for line in (log.one("stack") or {}).get("stack", ())]
    yield Table("The last call of each rank", ("rank", "calls", "last call", "line", "state"), last, open=True)
    yield Table("Where each rank stood", ("rank", "frame"), frames, "the main thread, its last 12 frames", open=False)
