"""What is written of a step that was not finite: its report, and what it takes to run it again elsewhere.

    report.json, report.html    what `locate` found, where it was asked
    step.json                   the numbers of the step and of those before it; the calls and ops of the step
    tensors.safetensors         what these were given from outside: inputs, targets, random numbers
    weights.safetensors         parameters and buffers as they were before the step

What can't be had is left out, and step.json says why. The folder gets its name when it is whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save_file
from torch import nn

from nbdebug import __version__
from nbdebug.chapters.nan.guard.lines import strict
from nbdebug.chapters.nan.guard.parallel import alone
from nbdebug.chapters.nan.guard.record_files import PART, trip_name
from nbdebug.chapters.nan.guard.record_trips import FORM
from nbdebug.chapters.nan.guard.trip import Trip
from nbdebug.chapters.nan.guard.trip_folder_pack import Unwritable, pack
from nbdebug.chapters.nan.guard.trip_folder_weights import plain_tensors, weights_of


def write(
    record: pathlib.Path, trip: Trip, run: str, rank: int, models: Mapping[str, nn.Module] | None, course: Any = None
) -> pathlib.Path:
    """Write the folder of `trip` into the record; returns its path. Raises OSError where nothing can be written.

    models: by the names that the tape knows; without them weights are left out. course: the run until then, as the
    tracer's rules take it (a `Run`).
    """
    part = record / f".{trip_name(trip.step, rank)}-{run}{PART}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        if trip.report is not None:
            _write_json(part / "report.json", trip.report.to_dict())
            trip.report.save(part / "report.html")
        _write_json(
            part / "step.json",
            {
                "form": FORM,
                "nbdebug": __version__,
                "run": run,
                "time": time.time(),
                "rank": rank,
                "step": trip.step,
                "reason": trip.reason,
                "loss": trip.loss,
                "norm": trip.norm,
                "late": trip.late,
                "bad_ranks": list(trip.bad_ranks),
                "lines": [line.to_json() for line in trip.lines],
                "course": _course(course),
                **_step(part, trip, {n: alone(m) for n, m in (models or {}).items()}),
            },
        )
        for file in part.glob("*.safetensors"):
            shutil.copymode(part / "step.json", file)  # else only its writer could read it
        return _named(part, record, trip.step, rank)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _step(folder: pathlib.Path, trip: Trip, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What a replay needs, written as far as it can be."""
    told: dict[str, Any] = {"models": [{"name": n, "type": type(m).__name__} for n, m in models.items()]}
    try:
        tape, tensors = pack(trip.tape, models)
        save_file(plain_tensors(tensors), folder / "tensors.safetensors")
        told |= {"tape": tape, "no_replay": ""}
    except Unwritable as reason:
        return {**told, "no_replay": str(reason), "no_weights": "they were not needed"}
    except Exception as error:  # a full disk: the report must be saved all the same
        (folder / "tensors.safetensors").unlink(missing_ok=True)
        return {**told, "no_replay": f"its tensors could not be written ({error})", "no_weights": "the same"}
    try:
        told["no_weights"] = _weights(folder, models)
    except Exception as error:
        (folder / "weights.safetensors").unlink(missing_ok=True)
        told["no_weights"] = f"they could not be written ({error})"
    return told


def _weights(folder: pathlib.Path, models: Mapping[str, nn.Module]) -> str:
    """Write parameters and buffers; returns why they were left out, or "" (also where the step calls no model)."""
    try:
        weights = weights_of(models)
    except Unwritable as reason:
        return str(reason)
    size, free = sum(t.nbytes for t in weights.values()), shutil.disk_usage(folder).free
    if free < 2 * size:
        return f"they take {size / 1e9:.2g} GB, and only {free / 1e9:.2g} GB were free on the disk"
    save_file(plain_tensors(weights), folder / "weights.safetensors")
    return ""


def _course(run: Any) -> dict[str, Any]:
    """What the rules ask of the run before the step."""
    if run is None:
        return {}
    return {
        "losses": run.losses[-200:],
        "first_sizes": run._first_sizes,
        "first_input": run._first_input,
        "first_step": run.first_step,
        "optimizer": run.optimizer,
        "learning_rate": run.learning_rate,
        "optimizer_steps": run.optimizer_steps,
        "optimizer_line": dataclasses.asdict(run.optimizer_line) if run.optimizer_line is not None else None,
    }


def _write_json(path: pathlib.Path, values: Any) -> None:
    path.write_text(json.dumps(strict(values), allow_nan=False, indent=1), encoding="utf-8")


def _named(part: pathlib.Path, record: pathlib.Path, step: int, rank: int) -> pathlib.Path:
    """Give the finished folder its name: the first that is free."""
    again = 0
    while (path := record / trip_name(step, rank, again)).exists():
        again += 1
    os.rename(part, path)
    return path
