"""Run folders of cases: each twin in a process of its own, with a time limit; then read EXPECT and judge."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import tempfile
import types
from collections.abc import Iterable, Iterator
from typing import Any

from tests.cases.asking import ASKERS, SIGNS, WAYS, load, main

# Imports take seconds, a case a fraction of one: import once, then fork a fresh process for each case.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "nbdebug.tools.nan.nan_trace"])

TWINS = ("broken", "repaired")


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one twin. ok is None for a case that was skipped; got then holds the reason."""

    case: str
    kind: str
    twin: str
    ok: bool | None
    expected: dict[str, Any] | None
    got: dict[str, Any]
    right: dict[str, bool]


def find(folders: Iterable[str | pathlib.Path]) -> list[pathlib.Path]:
    """The case files in these folders (or files), at any depth: Python files with an EXPECT and a build()."""
    found: list[pathlib.Path] = []
    for folder in map(pathlib.Path, folders):
        if not folder.exists():
            raise FileNotFoundError(f"no such folder: {str(folder)!r}")
        files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
        found += [f.resolve() for f in files if _expect_node(f) is not None]
    return list(dict.fromkeys(found))


def _expect_node(path: pathlib.Path) -> ast.expr | None:
    """The expression that the file assigns to EXPECT, where the file also defines build()."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if not any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in body):
        return None
    return next(
        (
            node.value
            for node in body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EXPECT" for t in node.targets)
        ),
        None,
    )


def read_expect(path: pathlib.Path) -> dict[str, Any]:
    """EXPECT, without running the case's program where it is written out (nearly everywhere)."""
    node = _expect_node(path)
    assert node is not None, f"{path.name} has no EXPECT"
    try:
        return ast.literal_eval(node)
    except ValueError:  # computed from other names of the file
        return load(path).EXPECT


def judge_for(path: pathlib.Path) -> types.ModuleType:
    """judge.py from the folder above the case's own (or beside the case)."""
    for folder in (path.parent.parent, path.parent):
        if (folder / "judge.py").is_file():
            return load(folder / "judge.py")
    raise FileNotFoundError(f"no judge.py in the folder above {path.name}, nor beside it")


def ask_apart(path: pathlib.Path, twin: str, limit: float, by: str = "trace") -> dict[str, Any]:
    """`asking` in a process of its own. A crash or a timeout gives {"error": message}."""
    with tempfile.TemporaryDirectory() as folder:
        out, printed = pathlib.Path(folder) / "answer.json", pathlib.Path(folder) / "printed.txt"
        begun, begin = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_alone, args=(str(path), twin, str(out), str(printed), by, begin))
        process.start()
        begin.close()
        try:
            if begun.poll(60):  # the first process waits for the imports, which are not the case's time
                process.join(limit)
            if process.is_alive():
                return {"kind": path.parent.name, "error": f"no answer within {limit:g} s"}
        finally:
            _end(process)
        if out.is_file():
            said = json.loads(out.read_text(encoding="utf-8"))
            steps = said.get("answer", {}).get("steps")
            if isinstance(steps, dict):  # JSON makes text of each rank's number
                said["answer"]["steps"] = {int(rank): steps[rank] for rank in sorted(steps, key=int)}
            return said
        said = printed.read_text(errors="replace").strip() if printed.is_file() else ""
    last = (said or "nothing printed").splitlines()[-1]
    return {"kind": path.parent.name, "error": f"the process ended with status {process.exitcode}: {last}"}


def _alone(path: str, twin: str, out: str, printed: str, by: str, begin: multiprocessing.connection.Connection) -> None:
    """What the process of a case does: lead a group of its own, print into a file, ask."""
    os.setsid()
    with open(printed, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method(None, force=True)  # a case is a script: its workers start as a script's do
    begin.send(True)
    import torch

    torch.set_num_threads(1)  # several run side by side
    main(path, twin, out, by)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process that still runs, with what it started (a loader's workers)."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it leads no group yet where it hung before it began
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def run_one(path: pathlib.Path, twin: str, limit: float = 120.0, by: str = "trace") -> Result:
    """Ask about one twin, then judge the answer. by: one of WAYS; on guard, what the bad step changed is judged too."""
    kind = path.parent.name
    askers = ASKERS if by == "trace" else WAYS[by]
    if kind in SIGNS and kind not in askers:  # the folder's name tells: no need to start a process
        said: dict[str, Any] = {"kind": kind, "skipped": f"nbdebug does not cover {kind} yet"}
    else:
        said = ask_apart(path, twin, limit, by)
    case, kind = f"{path.parent.name}/{path.stem}", said["kind"]
    expected = read_expect(path) if twin == "broken" else None
    if "skipped" in said:
        return Result(case, kind, twin, None, expected, {"skipped": said["skipped"]}, {})
    if "error" in said:
        parts = [part for part in expected if part != "also"] if expected is not None else ["silent"]
        return Result(case, kind, twin, False, expected, {"error": said["error"]}, dict.fromkeys(parts, False))
    answer, judge = said["answer"], judge_for(path)
    right = judge.judge(expected, answer, str(path)) if twin == "broken" else {"silent": judge.judge_twin(answer)}
    if by == "guard" and twin == "broken":
        right["intact"] = answer.get("changed") == []
    return Result(case, kind, twin, all(right.values()), expected, answer, right)


def run(
    folders: Iterable[str | pathlib.Path], limit: float = 120.0, jobs: int = 2, by: str = "trace"
) -> Iterator[Result]:
    """Both twins of every case, in order, `jobs` at a time."""
    work = [(path, twin) for path in find(folders) for twin in TWINS]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda item: run_one(*item, limit, by), work)
