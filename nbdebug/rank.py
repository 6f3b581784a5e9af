"""One rank under observation: `torchrun … -m nbdebug.rank script.py …`; `python -m nbdebug ranks` starts it as well.

A script that starts its ranks itself (torch.multiprocessing.spawn) runs once; each process that it starts is a rank.
"""

from __future__ import annotations

import builtins
import multiprocessing.context
import multiprocessing.process
import multiprocessing.spawn
import os
import pathlib
import platform
import re
import stat
import subprocess
import sys
import threading
import time
import types
from typing import Any

from nbdebug.tools.distributed import launch, marks
from nbdebug.tools.distributed.agent import Agent, end_process


def main() -> None:
    match sys.argv[1:]:
        case ["--compare", folder, local, launched]:
            sys.exit(launch.compare(pathlib.Path(folder), int(local), int(launched)))
        case ["--starts-ranks", script, *arguments]:
            start_ranks(pathlib.Path(os.environ[launch.FOLDER]), script, arguments)
        case [script, *arguments] if launch.FOLDER in os.environ:
            run(pathlib.Path(os.environ[launch.FOLDER]), script, arguments)
        case [script, *arguments]:
            run_with_comparer(script, arguments)
        case _:
            sys.exit("usage: torchrun ... -m nbdebug.rank script.py [arguments]")


def prepared(folder: pathlib.Path, script: str, rank: int | None) -> Agent:
    """An agent in this process, which watches what is imported below the script's folder, too."""
    own = Agent(folder, rank)
    own.install()
    marks.mark_imports(os.path.dirname(script), own.listed)
    return own


def execute(agent: Agent, path: str, name: str = "__main__") -> None:
    """Run a script, with marks in it, as the main module."""
    module = types.ModuleType(name)
    module.__file__, module.__builtins__ = path, builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = sys.modules[name] = module
    exec(marks.compiled(pathlib.Path(path).read_bytes(), path, agent.listed), module.__dict__)


def as_started(script: str, arguments: list[str]) -> str:
    """The path of the script, which finds its arguments and its folder as if Python had started it."""
    path = os.path.abspath(script)
    sys.argv[:], sys.path[0] = [script, *arguments], os.path.dirname(path)
    return path


def run(folder: pathlib.Path, script: str, arguments: list[str]) -> None:
    path = as_started(script, arguments)
    agent = prepared(folder, path, int(os.environ.get("RANK", "0")))
    agent.observe(execute, agent, path)


def run_with_comparer(script: str, arguments: list[str]) -> None:
    """Without our launcher the first rank of this machine starts a comparer, and all wait for its verdict at their end:
    their exit status is 1 where it found a fault."""
    folder = shared_folder()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        command = [sys.executable, "-m", "nbdebug.rank", "--compare", str(folder)]
        ours = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        sizes = [os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("WORLD_SIZE", "1")]
        subprocess.Popen([*command, *sizes], start_new_session=True, env=ours, stdin=subprocess.DEVNULL)
    try:
        run(folder, script, arguments)
    finally:
        verdict, until = folder / "verdict", time.monotonic() + 5
        while time.monotonic() < until and not verdict.exists():
            time.sleep(0.05)
        if verdict.exists() and verdict.read_text() == "1":
            sys.stdout.flush()
            end_process(1)


def shared_folder() -> pathlib.Path:
    """The folder of the ranks of one torchrun on this machine, in a folder that only this user can enter. Raises
    PermissionError where that belongs to somebody else."""
    own = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR") or pathlib.Path.home() / ".cache") / "nbdebug"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = own.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise PermissionError(f"{own} is no folder of this user's")
    own.chmod(0o700)
    run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    name = re.sub(r"[^\w-]", "_", "-".join(["ranks", platform.node(), str(os.getppid()), *run]))
    folder = own / name[:200]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


# -- a script that starts its ranks itself ----------------------------------------------------------------------------


def start_ranks(folder: pathlib.Path, script: str, arguments: list[str]) -> None:
    """Run the script; the processes that its lines start are ranks, numbered in this order, or as mp.spawn does."""
    from torch.multiprocessing.spawn import ProcessContext

    path = as_started(script, arguments)
    agent = rank_or_none(folder, path)
    ranks: list[Any] = []
    process = multiprocessing.process.BaseProcess
    start, line = process.start, multiprocessing.spawn.get_command_line

    def started(one: Any) -> None:
        module = getattr(vars(one).get("_target"), "__module__", None) or ""
        own = module == "torch.multiprocessing.spawn"
        if agent.process == 0 and (own or not module.startswith(("torch.", "multiprocessing."))):
            if (folder / "all-launched").exists() and not any(rank.is_alive() for rank in ranks):  # others, after those
                ranks.clear()
                for path in (folder / "all-launched", *folder.glob("launched-*"), *folder.glob("end-*")):
                    path.unlink(missing_ok=True)
            one.nbdebug_rank = one._args[1] if own else len(ranks)
            ranks.append(one)
            (folder / f"launched-{one.nbdebug_rank}").touch()
        start(one)

    def command(**pipes: Any) -> list[str]:
        *words, code, last = line(**pipes)
        return [*words, f"import nbdebug.rank; nbdebug.rank.spawned({str(folder)!r}, {path!r}); {code}", last]

    process.start = started  # type: ignore
    for owner in (process, ProcessContext):
        agent.wrap(owner, "join", lambda *_, **__: (folder / "all-launched").touch(), "each")
    multiprocessing.spawn.get_command_line = command
    if hasattr(multiprocessing.context, "ForkServerProcess"):  # its server would know nothing of this
        multiprocessing.context.ForkServerProcess._Popen = multiprocessing.context.SpawnProcess._Popen  # type: ignore
    threading.Thread(target=agent.watch, daemon=True, name="nbdebug ranks").start()
    execute(agent, path)


def spawned(folder: str, script: str) -> None:
    """In a new process, before it imports the script."""
    agent = rank_or_none(pathlib.Path(folder), script)
    multiprocessing.spawn._fixup_main_from_path = lambda path: execute(agent, path, "__mp_main__")  # type: ignore


def rank_or_none(folder: pathlib.Path, script: str) -> Agent:
    """An agent that begins its log when this process, or one that it forks, runs with a rank's number."""
    process, agent = multiprocessing.process.BaseProcess, prepared(folder, script, None)
    plain = process.run

    def run(one: Any) -> None:
        agent.rank = vars(one).get("nbdebug_rank")
        if agent.rank is None:
            plain(one)
        else:
            agent.begin(folder)
            agent.observe(plain, one)

    process.run = run  # type: ignore
    return agent


if __name__ == "__main__":
    main()
