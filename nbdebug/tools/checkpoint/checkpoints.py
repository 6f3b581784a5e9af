"""`Checkpoints`: a folder of checkpoints whose last good file survives a kill at any moment and a full disk.

A save writes a temporary file, flushes it to the disk, reads it back against its checksums, and only then renames it;
older files go after that. Each file holds all that a run needs to go on as if it had not stopped: tensors as
safetensors, all else as JSON in the header of the same file, and no pickle.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import re
import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from nbdebug.observe.modules import unwrapped
from nbdebug.observe.snapshot import random_states, set_random_states
from nbdebug.text import in_a_line, listed
from nbdebug.tools.checkpoint.check_checkpoint import WHOLE, compare
from nbdebug.tools.checkpoint.formats import SAFETENSORS, decoded, header_checksum, loaded, read_file, within
from nbdebug.tools.checkpoint.rules import CheckpointFacts, SavedFile, name_all
from nbdebug.tools.checkpoint.run_state import form, read, write

NAME = re.compile(r"step_(\d+)\.safetensors$")
SHORT = {dtype: name for name, dtype in SAFETENSORS.items()}


class Checkpoints:
    """The checkpoints of a run in a folder.

        ckpt = nbdebug.Checkpoints("runs", keep=3, model=model, optimizer=optimizer, scheduler=scheduler)
        start = ckpt.resume()
        for step in range(start, steps):
            ...
            ckpt.save(step + 1, loss=loss.item())

    parts: all that the run changes, by name: the model, the optimizer, the scheduler, the scaler, the average, the
    sampler (whatever has `state_dict` and `load_state_dict`), and generators (torch's). The random states of torch, its
    accelerators, Python and numpy are saved by themselves. Models are saved without DataParallel and torch.compile.

    keep: how many of the newest files stay. best: the name of a value given to `save` ("loss"); the file with the
    smallest stays too; with "+accuracy" the largest counts. every: `save` writes only at multiples of it. config: your
    settings, plain values, which are kept in each file; `resume` warns where they are others now.

    Raises ValueError where keep or every is below 1, TypeError for a part that has no state.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        best: str | None = None,
        every: int | None = None,
        config: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"keep and every begin at 1; got keep={keep}, every={every}.")
        for name, part in parts.items():
            if form(part) in ("value", "values"):
                raise TypeError(f"{name} has no state_dict(): {type(part).__name__}.")
            if name in ("step", "random", "values"):
                raise ValueError(f"A part can't be called {name!r}: that name is taken in the file.")
        self.folder, self.keep, self.best, self.every = pathlib.Path(folder), keep, best, every
        self.config = dict(config or {})
        self.parts = {name: unwrapped(part)[0] for name, part in parts.items()}

    def paths(self) -> list[pathlib.Path]:
        """The files, by step, the newest last. Temporary ones are none of them."""
        steps = {path: int(match[1]) for path in self.folder.glob("step_*") if (match := NAME.fullmatch(path.name))}
        return sorted(steps, key=steps.__getitem__)

    def save(self, step: int, **values: float) -> pathlib.Path | None:
        """Write the state after `step` steps; the path, or None where it is no multiple of `every`.

        values: numbers to keep beside it, such as the loss. Raises OSError where the file can't be written whole (a
        full disk): all earlier files are there, and nothing of the new one; TypeError where a part's state holds
        objects other than tensors and plain values."""
        if self.every is not None and step % self.every:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "values": {name: float(v) for name, v in values.items()}, "random": random_states()}
        state |= {"config": self.config, **{name: read(part) for name, part in self.parts.items()}}
        path = self.folder / f"step_{step:08d}.safetensors"
        temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
        try:
            _write(state, temporary)
            os.replace(temporary, path)
        except BaseException as error:  # also Ctrl-C: no half of a file stays
            temporary.unlink(missing_ok=True)
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            last = next((path.name for path in reversed(self.paths())), "none")
            reason = f"step {step} was not saved ({in_a_line(error)}). The last good checkpoint is {last}."
            raise OSError(reason) from error
        if os.name == "posix":  # the rename itself, to the disk; Windows has no such call, and needs none
            handle = os.open(self.folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        self._rotate()
        return path

    def resume(self) -> int:
        """Put the newest checkpoint that is whole back into the parts; the step to go on from, 0 where there is none.

        A file that is not whole is passed over with a warning. Raises ValueError, with the reason, for a checkpoint of
        another model or optimizer, and where it lacks a part."""
        for path in self.folder.glob(".step_*.tmp"):  # what a killed process left half written
            writer = int(path.name.split(".")[-2])
            if writer == os.getpid() or not psutil.pid_exists(writer):
                path.unlink(missing_ok=True)
        for path in reversed(self.paths()):
            held = read_file(path)
            if held.fault:
                warnings.warn(f"{path.name} is passed over: {held.fault}.", stacklevel=2)
                continue
            self._refuse_others(path, held)
            with safe_open(path, "pt") as file:
                state = decoded(json.loads(file.metadata()["nbdebug"])["tree"], load_file(path))
            for name, part in self.parts.items():
                write(part, state[name])
            set_random_states(state["random"])
            there = state.get("config", {})
            names = [name for name in dict.fromkeys((*there, *self.config)) if there.get(name) != self.config.get(name)]
            if there and self.config and names:
                both = listed([f"{name} {there.get(name)!r} → {self.config.get(name)!r}" for name in names], quote="")
                warnings.warn(f"{path.name} was written with other settings: {both}.", stacklevel=2)
            return int(state["step"])
        return 0

    def steps(self, total: int) -> Iterable[int]:
        """Resume, and give the steps up to `total` that are left, with a progress bar that stands where the run does:
        `for step in ckpt.steps(1000): ...; ckpt.save(step + 1)`. Raises as `resume` does."""
        from tqdm.auto import tqdm  # here, because it looks for a notebook when it is imported

        start = self.resume()
        return tqdm(range(start, total), initial=start, total=total)

    def _refuse_others(self, path: pathlib.Path, held: SavedFile) -> None:
        if lacking := [name for name in self.parts if name not in held.tree]:
            raise ValueError(f"{path.name} does not hold {', '.join(lacking)}; it was written without.")
        for name, part in self.parts.items():
            facts = CheckpointFacts(dataclasses.replace(held, tree=held.tree[name]), f"`{name}` of {path.name}")
            model, optimizer = (part if isinstance(part, kind) else None for kind in (nn.Module, torch.optim.Optimizer))
            compare(facts, model, optimizer)
            if (reason := next(name_all(facts), None)) is not None:
                raise ValueError(f"{path.name} is not of this run: {reason.title}.")

    def _rotate(self) -> None:
        """Delete what is neither among the newest nor the best."""
        paths = self.paths()
        stay = set(paths[-self.keep :])
        if self.best is not None:
            name, sign = self.best.lstrip("+"), -1 if self.best.startswith("+") else 1
            values = {path: read_file(path, values=False).tree["values"].get(name) for path in paths}
            rated = [(sign * value, path) for path, value in values.items() if value is not None and value == value]
            stay |= {min(rated)[1]} if rated else set()
        for path in paths:
            if path not in stay:
                path.unlink(missing_ok=True)


def _write(state: dict[str, Any], temporary: pathlib.Path) -> None:
    """Write, flush to the disk, and read it back. Raises OSError where what is there is not what was written."""
    tensors: dict[str, torch.Tensor] = {}
    tree = encoded(state, "", tensors, {})
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins at a multiple of its size
    pieces = {name: tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in order}
    text = json.dumps({"tree": tree, "checksums": {name: zlib.crc32(piece) for name, piece in pieces.items()}})
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "nbdebug": text}}
    at = 0
    for name, piece in pieces.items():
        shape, end = list(tensors[name].shape), at + len(piece)
        header[name] = {"dtype": SHORT[tensors[name].dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    header["__metadata__"]["nbdebug_checksum"] = str(header_checksum(header))
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    with open(temporary, "wb") as file:  # safetensors' own save_file writes to a temporary file that a kill leaves
        file.write(len(start).to_bytes(8, "little") + start)
        for piece in pieces.values():
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if fault := read_file(temporary).fault:
        raise OSError(f"it was read back, and {fault}")


def encoded(value: Any, path: str, tensors: dict[str, torch.Tensor], names: dict[Any, str]) -> Any:
    """A state as JSON, its tensors in `tensors`, each once. Raises TypeError for what is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.dtype not in SHORT:
            kind = f"{value.dtype} tensor of {value.layout}"
            raise TypeError(f"{path} is a {kind}, which safetensors can't hold: save it in another form.")
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else path
        if key not in names:
            names[key], bare = path, value.detach().cpu().contiguous()
            whole = bare.untyped_storage().nbytes() == bare.nbytes
            tensors[path] = bare if whole else bare.clone()
        return {"tensor": names[key]}
    if isinstance(value, Mapping):
        pairs = [[key, encoded(each, f"{path}.{key}".strip("."), tensors, names)] for key, each in value.items()]
        if all(key is None or isinstance(key, (int, float, str)) for key, _ in pairs):
            return {"Counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [encoded(each, f"{path}.{place}", tensors, names) for place, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"{path} holds an object of {kind}: keep tensors and plain values in state_dict().")


def write_mended(facts: Mapping[str, Any], path: pathlib.Path) -> pathlib.Path:
    """What a report of check_checkpoint is about, with the model's names, at a new path: one file; or a folder as the
    one that was examined, where that is a folder's checkpoint and the new path has no ending of a file."""
    source = pathlib.Path(facts["path"])
    if not (facts.get("names") or facts.get("copies")) or NAME.search(source.name):
        raise ValueError("New names do not mend this file: see what the report says.")
    if path.exists():
        raise FileExistsError(f"{path} is there already; mended() replaces no file.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if source.name in WHOLE and not path.suffix:
            _mended_folder(source, temporary, facts)
        else:
            _mended_file(source, temporary, facts, path.suffix or source.suffix)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)
    return path


def _mended_file(source: pathlib.Path, path: pathlib.Path, facts: Mapping[str, Any], suffix: str) -> list[str]:
    """Write one file; the names of its weights."""
    whole = loaded(source)
    state, safe = within(whole, facts["entry"]), suffix == ".safetensors"
    new = {facts["names"].get(name, name): value for name, value in state.items()}
    copies = {name: state[old] for name, old in facts["copies"].items() if old in state}
    new |= {name: value.clone() if safe else value for name, value in copies.items()}
    state.clear()
    state.update(new)
    if safe and whole is not state:
        raise ValueError("safetensors holds weights alone, and this file holds more: choose a path that ends in .pt.")
    if path.name == ".metadata":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            importlib.import_module("torch.distributed.checkpoint").save(whole, checkpoint_id=path.parent, no_dist=True)
    elif safe:
        save_file({name: value.contiguous() for name, value in new.items()}, path, {"format": "pt"})
    else:
        torch.save(whole, path)
    return list(new)


def _mended_folder(source: pathlib.Path, folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """The same files: weights with new names, one file after the other, an index of them, and all others copied."""
    index = json.loads(source.read_text(encoding="utf-8")) if source.suffix == ".json" else {}
    shards = sorted({*index.get("weight_map", {"": source.name}).values()})
    folder.mkdir()
    for each in source.parent.iterdir():
        if each.is_file() and each.name not in (*shards, source.name) and each.suffix != ".distcp":
            shutil.copy2(each, folder)
    places: dict[str, str] = {}
    for shard in shards:
        names = _mended_file(source.parent / shard, folder / shard, facts, pathlib.Path(shard).suffix)
        places |= dict.fromkeys(names, shard)
    if index:
        (folder / source.name).write_text(json.dumps({**index, "weight_map": places}, indent=2), encoding="utf-8")
