"""A recorded step run again, with a copy of the user's model that gets the weights of the record.

The first part is the reverse of `pack.py`, for files that may come from a stranger. Every number, name and text is
looked at before it is used; ops are looked up by name among those that a record may ask for. Whatever is not as `pack`
writes it raises a ValueError that says what. Tensors go to the device on which the model is now.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import re
import stat
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_flatten

from nbdebug.arguments import Subject
from nbdebug.observe import locations as sites
from nbdebug.observe.locations import Site
from nbdebug.observe.modules import ModuleNames, ModuleStack, plain_name
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.snapshot import CallEnvironment, random_sources
from nbdebug.observe.tape import BackwardEntry, CallEntry, ExternalTensor, Ref, Tape, TapeEntry
from nbdebug.observe.validation import models_of, optimizers_of
from nbdebug.report import Finding, Report, Where
from nbdebug.text import count
from nbdebug.tools.guard.distributed import unwrapped
from nbdebug.tools.guard.locate import locate
from nbdebug.tools.guard.record.files import WORDS, open_plain
from nbdebug.tools.guard.record.pack import NAMED, OP_TEXTS, check_texts, load_weights, op_of
from nbdebug.tools.guard.record.trips import REASONS, RecordedTrip, plain, step_data, where_from
from nbdebug.tools.guard.step import Trip
from nbdebug.tools.nan.probe import RunHistory

# -- from numbers to objects -------------------------------------------------------------------------------------------


_SOURCE = 32 * 2**20
"""Bytes; no file of source is larger."""


def site_of(raw: Any) -> Site | None:
    """A source line. None where it is not known, or where its file is no file of Python source: reports read the line
    out of it."""
    if raw is None:
        return None
    file, line, function = list_of(raw, exactly=3)
    file, function = text(file), text(function)
    if len(file) > 4096 or "\0" in file or not re.fullmatch(r"<.*>|.*\.pyw?|.*[\\/]ipykernel_\d+[\\/].*", file):
        return None
    try:
        status = os.stat(file)
    except (OSError, ValueError):  # a cell of a notebook, or another machine's file
        return Site(file, whole(line), function)
    return Site(file, whole(line), function) if stat.S_ISREG(status.st_mode) and status.st_size < _SOURCE else None


def with_strides(tensor: torch.Tensor, raw: dict[str, Any]) -> torch.Tensor:
    """A tensor with the strides that it had, where it has no gaps."""
    if raw.get("complex") is True:
        if tensor.shape[-1:] != (2,) or not tensor.is_floating_point():
            raise ValueError("a complex tensor is damaged")
        tensor = torch.view_as_complex(tensor)
    stride = [whole(s) for s in list_of(raw.get("stride"))]
    dense = (
        len(stride) == tensor.dim()
        and tensor.numel()
        and 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride)) == tensor.numel()
    )
    if not dense or tuple(stride) == tensor.stride():
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def python_state(state: torch.Tensor, rest: list) -> Any:
    made = rest[0], tuple(state.tolist()), rest[1]
    if rest[1] is not None and not isinstance(rest[1], float):
        raise ValueError("the state of Python's random numbers is damaged")
    try:
        random.Random().setstate(made)
    except (ValueError, TypeError, OverflowError) as reason:
        raise ValueError(f"the state of Python's random numbers is damaged ({reason})") from None
    return made


def numpy_state(state: torch.Tensor, rest: list) -> Any:
    import numpy as np

    position, has_gauss, gauss = rest
    if state.shape != (624,) or state.dtype != torch.int64 or not 0 <= whole(position) <= 624:
        raise ValueError("the state of NumPy's random numbers is damaged")
    return "MT19937", state.numpy().astype(np.uint32), position, int(whole(has_gauss) > 0), float(gauss)


def torch_state(state: torch.Tensor) -> torch.Tensor:
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as reason:
        raise ValueError(f"the state of torch's random numbers is damaged ({reason})") from None
    return state


def torch_value(kind: str, name: Any) -> Any:
    """A dtype, a layout or a memory format, by its name in torch."""
    value = getattr(torch, name, None) if kind in NAMED and isinstance(name, str) and name.isidentifier() else None
    if value is None or not isinstance(value, NAMED[kind]):
        raise ValueError(f"{kind[:40]!r}: {str(name)[:80]!r} is not a value that a step may have")
    return value


def device_of(raw: Any) -> torch.device:
    try:
        return torch.device(text(raw))
    except RuntimeError:
        raise ValueError(f"{raw[:80]!r} is no device") from None


def key_of(pair: Any) -> Any:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ValueError("a dict's key is neither text nor number")
    return pair[0]


def mapping(raw: Any, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is not a JSON object")
    return raw


def list_of(raw: Any, exactly: int | None = None) -> list[Any]:
    if not isinstance(raw, list) or (exactly is not None and len(raw) != exactly):
        raise ValueError("a list is missing, or has another length than it should")
    return raw


def text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("a text is missing")
    return raw


def whole(raw: Any) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw < 2**62:
        raise ValueError("a whole number from 0 is missing")
    return raw


_DEEPEST = 40
_PHASES = ("forward", "backward", "optimizer")


class RecordedEnvironment(CallEnvironment):
    """What surrounded a call of a model, as the record has it."""

    def __init__(self, random: list, autocast: list, training: bool, grad: bool):
        self.random, self.autocast, self.training, self.grad = random, autocast, training, grad


class Unpacker:
    """tensors: of tensors.safetensors. models: by the names in the record. notes: what is not as it was."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], models: Mapping[str, nn.Module]):
        self.tensors, self.models, self.notes = tensors, models, list[str]()
        self.generators: list[torch.Generator] = []
        self.device = next((p.device for m in models.values() for p in m.parameters()), torch.device("cpu"))
        self.recorded_device = torch.device("cpu")

    def tape(self, raw: Any) -> Tape:
        """The step. Raises ValueError for anything that `pack` does not write."""
        data = mapping(raw, "tape")
        self.recorded_device = device_of(data.get("device"))
        tape = Tape(Recorder(ModuleStack(ModuleNames({}), lambda *_: None), [], lambda *_: None))
        tape.recorder.custom_backward = text(data.get("hidden"))[:200]
        tape.random = torch_state(self._tensor("random"))
        states = [self._tensor(f"cuda_random/{n}") for n in range(min(whole(data.get("cuda_random")), 64))]
        if states and (self.device.type != "cuda" or len(states) > torch.cuda.device_count()):
            self.notes.append("The random numbers of its GPU can't be restored here: dropout differs.")
            states = []
        tape.cuda_random = states
        for n, device in enumerate(list_of(data.get("generators"))):
            generator = self._generator(n, device_of(device))
            tape.generators[id(generator)] = generator, generator.get_state()
        for held in list_of(data.get("held")):
            self._held(mapping(held, "a tensor"), tape)
        wanted = [list_of(pair, exactly=2) for pair in list_of(data.get("wanted"))]
        tape.later_leaves = {whole(number): whole(position) for number, position in wanted}
        tape.entries = [self._entry(mapping(entry, "an entry")) for entry in list_of(data.get("entries"))]
        return tape

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise ValueError(f"tensors.safetensors lacks `{name}`")
        return self.tensors[name]

    def _moved(self, device: torch.device) -> torch.device:
        """Where something is now that was on `device` then."""
        if device == self.recorded_device:
            return self.device
        there = device.type == self.device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        return device if there or device.type == "cpu" else self.device

    def _generator(self, n: int, device: torch.device) -> torch.Generator:
        generator = torch.Generator(self._moved(device))
        if generator.device.type == device.type:
            try:
                generator.set_state(self._tensor(f"generator/{n}"))
            except (RuntimeError, TypeError) as reason:
                raise ValueError(f"a generator's state is damaged ({reason})") from None
        else:
            self.notes.append(f"A generator on {device} can't be restored here: its random numbers differ.")
        self.generators.append(generator)
        return generator

    def _held(self, raw: dict[str, Any], tape: Tape) -> None:
        number = whole(raw.get("number"))
        if "grad_of" in raw:
            tape.externals[number] = ExternalTensor(torch.empty(0, device="cpu"), False, grad_of=whole(raw["grad_of"]))
            return
        leaf = raw.get("leaf") is True
        if "parameter" in raw:
            tensor = self._parameter(raw["parameter"])
        else:
            tensor = with_strides(self._tensor(f"held/{number}"), raw).to(self._moved(device_of(raw.get("device"))))
            tensor = tensor.requires_grad_(leaf)
        held = tape.externals[number] = ExternalTensor(tensor.detach(), leaf)
        held.changed = raw.get("changed") is True
        if leaf:
            tape.leaves[number] = tensor

    def _parameter(self, raw: Any) -> torch.Tensor:
        model, name = (text(part) for part in list_of(raw, exactly=2))
        known = self.models[model].named_parameters() if model in self.models else ()
        parameters = {plain_name(n): p for n, p in known}
        if plain_name(name) not in parameters:
            raise ValueError(f"the step uses the parameter `{name}`, which the model lacks")
        return parameters[plain_name(name)]

    # -- entries ------------------------------------------------------------------------------------------------------

    def _entry(self, raw: dict[str, Any]) -> TapeEntry | CallEntry | BackwardEntry:
        results = tuple([None if r is None else whole(r) for r in list_of(raw.get("results"))])
        site = site_of(raw.get("site"))
        if "call" in raw:
            return self._call(raw, results, site)
        if raw.get("backward") is True:
            roots, seeds, inputs = (
                tuple(self._value(v) for v in list_of(raw.get(k))) for k in ("roots", "seeds", "inputs")
            )
            if not all(isinstance(r, Ref) for r in (*roots, *inputs, *(s for s in seeds if s is not None))):
                raise ValueError("backward starts from something that is no tensor")
            retain, create, accumulate = (raw.get(k) is True for k in ("retain", "create", "accumulate"))
            return BackwardEntry(roots, seeds, inputs, results, retain, create, accumulate, site)
        func = op_of(raw.get("op"))
        args, kwargs = self._arguments(raw)
        names = [a.name for a in func._schema.arguments]
        if len(args) > len(names) or not set(kwargs) <= set(names):
            raise ValueError(f"the op {raw['op']} takes no such arguments")
        check_texts((args, kwargs), raw["op"])
        return TapeEntry(_op(raw, func, site), args, kwargs, results, raw.get("grad") is True)

    def _call(self, raw: dict[str, Any], results: tuple, site: Any) -> CallEntry:
        name, _, part = text(raw["call"]).partition("/")
        try:
            self.models[name].get_submodule(part)
        except (KeyError, AttributeError):
            raise ValueError(f"the step calls the model {raw['call'][:80]!r}, which is not there") from None
        leaves, spec = tree_flatten(self._arguments(raw), is_leaf=lambda x: isinstance(x, Ref))
        surroundings = mapping(raw.get("surroundings"), "surroundings")
        autocast = [self._autocast(list_of(a, exactly=3)) for a in list_of(surroundings.get("autocast"))]
        random = [s for part in list_of(surroundings.get("random")) for s in self._random(mapping(part, "random"))]
        return CallEntry(
            raw["call"],
            tuple(leaves),
            spec,
            results,
            site,
            RecordedEnvironment(
                random, autocast, surroundings.get("training") is True, surroundings.get("grad") is not False
            ),
        )

    def _arguments(self, raw: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = self._value(raw.get("args")), self._value(raw.get("kwargs"))
        if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
            raise ValueError("arguments are a tuple and a dict")
        return args, kwargs

    def _autocast(self, raw: list) -> tuple[str, bool, torch.dtype]:
        kind, enabled, dtype = raw
        return self._moved(device_of(kind)).type, enabled is True, torch_value("dtype", dtype)

    def _random(self, raw: dict[str, Any]) -> list[tuple[Any, Any]]:
        """How to set one source of random numbers to what it was; nothing where it is not there."""
        source, state = text(raw.get("source")), self._tensor(text(raw.get("tensor")))
        write = {name: write for name, _, write in random_sources()}.get(source)
        if write is None:
            note = "Not all sources of its random numbers can be restored here."
            self.notes += [note] * (note not in self.notes)
            return []
        if source.startswith("Python"):
            return [(write, python_state(state, list_of(raw.get("rest"), exactly=2)))]
        if source.startswith("NumPy"):
            return [(write, numpy_state(state, list_of(raw.get("rest"), exactly=3)))]
        return [(write, torch_state(state) if source.startswith("torch") else state.to(torch.uint8))]

    # -- values -------------------------------------------------------------------------------------------------------

    def _value(self, raw: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("arguments are nested without end")
        if isinstance(raw, list):
            return [self._value(v, depth + 1) for v in raw]
        if isinstance(raw, dict):
            return self._marked(raw, depth + 1)
        return WORDS.get(raw, raw) if isinstance(raw, str) else raw

    def _marked(self, raw: dict[str, Any], depth: int) -> Any:
        """What JSON has no form for: an object of one key (a tensor has more) that says what it is."""
        if "ref" in raw:
            view = raw.get("view")
            if view is not None:
                shape, stride, offset = list_of(view, exactly=3)
                view = tuple(map(whole, list_of(shape))), tuple(map(whole, list_of(stride))), whole(offset)
            return Ref(whole(raw["ref"]), view, raw.get("detached") is True)
        kind, inner = next(iter(raw.items()), ("", None))
        if kind == "tuple":
            return tuple([self._value(v, depth) for v in list_of(inner)])
        if kind == "dict":
            return {key_of(pair): self._value(pair[1], depth) for pair in list_of(inner)}
        if kind == "text":
            return text(inner)
        if kind == "complex":
            return complex(*(float(self._value(v)) for v in list_of(inner, exactly=2)))
        if kind == "device":
            return self._moved(device_of(inner))
        if kind == "generator" and whole(inner) < len(self.generators):
            return self.generators[whole(inner)]
        return torch_value(kind, inner)


def _op(raw: dict[str, Any], func: Any, site: Any) -> Op:
    index, texts = raw.get("index"), [raw.get(key) for key in OP_TEXTS]
    name, module, module_type, during = texts
    if not all(isinstance(t, str) for t in (name, module, module_type or "")) or during not in _PHASES:
        raise ValueError("an op's name or module is no text")
    op = Op(whole(index), func, name, 0)  # type: ignore[arg-type]
    op.module, op.module_type, op.during, op.site = module, module_type, during, site  # type: ignore[assignment]
    op.library, op.after_model = site_of(raw.get("library")), raw.get("after_model") is True
    op.grad = raw.get("op_grad") is True
    return op


# -- the replay --------------------------------------------------------------------------------------------------------


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
