"""A recorded step run again, with a copy of the user's model that gets the weights of the record."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nbdebug.arguments import Subject
from nbdebug.observe import locations as sites
from nbdebug.observe.validation import models_of, optimizers_of
from nbdebug.report import Finding, Report, Where
from nbdebug.text import count
from nbdebug.tools.guard.distributed import unwrapped
from nbdebug.tools.guard.locate import locate
from nbdebug.tools.guard.record.files import open_plain
from nbdebug.tools.guard.record.pack import load_weights
from nbdebug.tools.guard.record.trips import REASONS, RecordedTrip, plain, step_data, where_from
from nbdebug.tools.guard.record.unpack import Unpacker
from nbdebug.tools.guard.trip import Trip
from nbdebug.tools.nan.probe import RunHistory


def replay(recorded: RecordedTrip, model: Any, optimizer: Any = None) -> Report:
    """See `Record.replay`. Model, optimizer and random numbers of the caller stay as they are."""
    if recorded.no_replay:
        raise ValueError(f"Step {recorded.step} can't be replayed from disk: {recorded.no_replay}.")
    data = _checked(recorded, lambda: step_data(recorded.folder))
    users = _by_name(models_of(model, "replay(model)"), data)
    optimizers = optimizers_of(optimizer, "replay(model, optimizer)")
    models, optimizers = _copy(users, optimizers)
    notes = []
    if recorded.no_weights:
        notes.append(f"The weights are those of your model: the record has none ({recorded.no_weights}).")
    elif models:
        load_weights(models.values(), _checked(recorded, lambda: _tensors(recorded, "weights.safetensors")))
    unpacker = Unpacker(_checked(recorded, lambda: _tensors(recorded, "tensors.safetensors")), models)
    tape = _checked(recorded, lambda: unpacker.tape(data.get("tape")))
    trip = Trip(
        recorded.step,
        recorded.reason if recorded.reason in REASONS else "loss",
        recorded.loss,
        recorded.norm,
        recorded.lines,
        [],
        tape,
        rank=recorded.rank or None,
        bad_ranks=recorded.bad_ranks,
    )
    question = f"open_record({recorded.folder.parent.name}).replay(model)"
    redo = trip.reason == "parameter"  # the update made it bad: it has to be made again
    history, caller = _checked(recorded, lambda: _history(recorded, data)), sites.locate().site
    report = locate(
        trip,
        models,
        optimizers,
        history=history,
        question=question,
        subject=str(Subject(users, optimizers, True)),
        redo=(lambda: [one.step() for one in optimizers.values()]) if redo and optimizers else None,
    )
    if redo and history.optimizer_line is not None and caller is not None:
        report.findings = tuple(_moved(f, caller, history.optimizer_line) for f in report.findings)
    if recorded.reason == "parameter" and not optimizers:
        notes.append("The update made a parameter bad: pass `optimizer=` to run the update again.")
    report.notes = (*notes, *unpacker.notes, *report.notes)
    return report


def _checked(recorded: RecordedTrip, read: Any) -> Any:
    """What `read` gives; where that fails, a ValueError that names the folder."""
    try:
        return read()
    except FileNotFoundError as error:
        raise ValueError(f"{recorded.folder} lacks {error.filename or 'a file'}: it can't be replayed.") from error
    except (ValueError, OSError, SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"What a replay needs can't be read from {recorded.folder}: {error}.") from error


def _tensors(recorded: RecordedTrip, name: str) -> dict[str, torch.Tensor]:
    with open_plain(recorded.folder / name):  # a plain file, and no link
        return load_file(recorded.folder / name)


def _by_name(models: Mapping[str, nn.Module], data: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The models by the names of the record: by their own where these are the same, else in order."""
    listed = data.get("models")
    names = (
        [m["name"] for m in listed if isinstance(m, dict) and isinstance(m.get("name"), str)]
        if isinstance(listed, list)
        else []
    )
    if len(names) != len(models):
        raise ValueError(
            f"The record has {count(len(names), 'model')} ({', '.join(names)[:200]}); replay got {len(models)}."
        )
    same = set(names) == set(models)
    named = {name: models[name] for name in names} if same else dict(zip(names, models.values()))
    return {name: unwrapped(model) for name, model in named.items()}


def _copy(models: dict[str, nn.Module], optimizers: dict[str, Any]) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Copies of both that belong together. Raises ValueError for a model that can't be copied."""
    try:
        return copy.deepcopy((models, optimizers))
    except Exception as error:  # whatever a module of the user's raises
        raise ValueError(
            f"The model can't be copied ({type(error).__name__}: {error}), and a replay must not touch "
            "the one that you use."
        ) from error


def _moved(finding: Finding, caller: sites.Site, line: Where) -> Finding:
    """The update is made again where the replay is called; what it did belongs to the line that made it then."""

    def place(where: Where) -> Where:
        if (where.file, where.line) != (caller.file, caller.line):
            return where
        return dataclasses.replace(where, file=line.file, line=line.line, text=line.text, cell=line.cell)

    def text(sentence: str) -> str:
        return sentence.replace(sites.at_site(Where(), caller).place, line.place)

    chain = tuple(dataclasses.replace(link, what=text(link.what), where=place(link.where)) for link in finding.chain)
    return dataclasses.replace(finding, title=text(finding.title), where=place(finding.where), chain=chain)


def _history(recorded: RecordedTrip, data: Mapping[str, Any]) -> RunHistory:
    """The run until then, as far as it was written down."""
    saved = plain(data.get("course"))
    saved = saved if isinstance(saved, dict) else {}
    losses = _numbers(saved.get("losses")) or [x.loss for x in recorded.lines[:-1] if x.loss is not None]
    rate = recorded.lines[-1].lr if recorded.lines else None
    run = RunHistory(losses=losses, first_step=recorded.step, optimizer_steps=recorded.step, learning_rate=rate)
    run.first_sizes = _numbers(saved.get("first_sizes"))
    run.first_input = next(iter(_numbers([saved.get("first_input")])), 0.0)
    run.optimizer = saved["optimizer"] if isinstance(saved.get("optimizer"), str) else ""
    with contextlib.suppress(ValueError):
        run.optimizer_line = where_from(saved["optimizer_line"], "where") if saved.get("optimizer_line") else None
    return run


def _numbers(values: Any) -> list[float]:
    """The numbers of a list; none where one of them is no number."""
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) and abs(v) < 1e300 for v in values):
        return []
    return [float(v) for v in values]
