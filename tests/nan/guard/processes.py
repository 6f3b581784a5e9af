"""Scenes that two processes play together, each with a time limit: what hangs is ended, and fails.

A module of scenes has functions, marked by `@scene`, that are given a `Stage` and return what is to be judged. All
scenes of a module are played one after the other by the same two processes, since importing torch takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import importlib
import os
import pathlib
import pickle
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).parents[3]
SCENES: dict[str, Callable[[Stage], Any]] = {}


@dataclasses.dataclass
class Stage:
    """Where a scene is played. device: of this process; folder: that both can write to."""

    rank: int
    device: torch.device
    folder: pathlib.Path


def scene(play: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
    SCENES[play.__name__] = play
    return play


class Played:
    """The outcomes, by scene: a list with each process's own. Asking for one that was not finished fails."""

    def __init__(self, folder: pathlib.Path, said: list[str]) -> None:
        self.folder, self.said = folder, said

    def __getitem__(self, name: str) -> list[Any]:
        paths = [self.folder / f"{name}.{rank}" for rank in range(2)]
        absent = [rank for rank, path in enumerate(paths) if not path.exists()]
        if absent:
            said = "\n".join(self.said[rank][-4000:] for rank in absent)
            raise AssertionError(f"processes {absent} did not finish:\n{said}")
        outcomes = [pickle.loads(path.read_bytes()) for path in paths]
        if failed := [f"process {rank} failed:\n{failure}" for rank, (_, failure, _) in enumerate(outcomes) if failure]:
            raise AssertionError("\n".join(failed))
        return [outcome for outcome, _, _ in outcomes]

    def warned(self, name: str) -> list[list[str]]:
        """What each process was warned of."""
        return [pickle.loads((self.folder / f"{name}.{rank}").read_bytes())[2] for rank in range(2)]


def play(module: str, folder: pathlib.Path, device: str = "cpu", seconds: float = 400, only: str = "") -> Played:
    """Play the scenes of a module (those in `only`, with commas between) in two processes, ended after `seconds`."""
    command = [sys.executable, "-m", __name__, module, str(folder), device, str(seconds), only]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    said = [folder / f"said.{rank}" for rank in range(2)]
    with contextlib.ExitStack() as stack:
        running = [
            subprocess.Popen(
                [*command, str(rank)],
                cwd=ROOT,
                env=environment,
                stderr=subprocess.STDOUT,
                stdout=stack.enter_context(said[rank].open("w")),
            )
            for rank in range(2)
        ]
        until = time.monotonic() + seconds + 20
        try:
            for process in running:
                process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in running:
                process.kill()
                process.wait()
    return Played(folder, [path.read_text() for path in said])


def main(module: str, folder: str, device: str, seconds: str, only: str, rank: str) -> None:
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    stage = Stage(
        int(rank), torch.device(device, int(rank)) if device == "cuda" else torch.device("cpu"), pathlib.Path(folder)
    )
    if device == "cuda":
        torch.cuda.set_device(stage.device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=stage.rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=40),
    )
    scenes = importlib.import_module("tests.nan.guard.processes").SCENES
    importlib.import_module(module)
    names = only.split(",") if only else [name for name, play in scenes.items() if play.__module__ == module]
    for number, name in enumerate(names):
        if number:
            with contextlib.suppress(RuntimeError):  # the other process may have failed
                dist.barrier()
        print("scene", name, flush=True)
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            outcome, failure = None, ""
            try:
                outcome = scenes[name](stage)
            except Exception:
                failure = traceback.format_exc()
        print(f"took {time.monotonic() - began:.1f} s", flush=True)
        told = [str(w.message) for w in caught if "nbdebug" in str(w.message)]
        (stage.folder / f"{name}.{rank}.part").write_bytes(pickle.dumps((outcome, failure, told)))
        os.replace(stage.folder / f"{name}.{rank}.part", stage.folder / f"{name}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
