"""A remembered step as plain data and tensors, for a file: `pack`. `trip_folder_unpack` is its reverse.

Written down are calls of the models with arguments made of dicts, lists, tuples, numbers, strings and tensors; ops of
ATen; calls of backward. Anything else (a model that was given an object of the user's, an op of a custom library) can't
be rebuilt from plain data, and Unwritable says so.

    tensors and other values in arguments     {"ref": 3}, {"dtype": "float32"}, {"tuple": [...]}, 1.5, "mean", …
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.nan.guard.lines import WORDS
from nbdebug.chapters.nan.guard.trip_folder_ops import name_of
from nbdebug.observe.record import Op
from nbdebug.observe.sites import Site
from nbdebug.observe.state import sources
from nbdebug.observe.tape import BackwardEntry, CallEntry, Entry, Held, Ref, Tape

NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Values that are written as the name that they have in `torch`."""
OP_TEXTS = ("name", "module", "module_type", "during")


class Unwritable(Exception):
    """The step can't be written down; the message says why."""


def pack(tape: Tape, models: Mapping[str, nn.Module]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(plain data, tensors by name). Raises Unwritable."""
    return _Packer(tape, models).packed()


class _Packer:
    def __init__(self, tape: Tape, models: Mapping[str, nn.Module]):
        self.tape, self.models = tape, models
        self.tensors: dict[str, torch.Tensor] = {"random": tape.random}
        self.generators = list(tape.generators)
        self.home = str(next((p.device for m in models.values() for p in m.parameters()), "cpu"))
        self.parameters = {
            id(p): [model, name] for model, module in models.items() for name, p in module.named_parameters()
        }

    def packed(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self.models and not any(isinstance(entry, CallEntry) for entry in self.tape.entries):
            raise Unwritable("no call of a model was seen in it, perhaps because the code around it is compiled")
        for n, state in enumerate(self.tape.cuda_random):
            self.tensors[f"cuda_random/{n}"] = state
        entries = [self._entry(n, entry) for n, entry in enumerate(self.tape.entries)]
        generators = []
        for n, (generator, state) in enumerate(self.tape.generators.values()):
            self.tensors[f"generator/{n}"] = state
            generators.append(str(generator.device))
        held = [self._held(number, one) for number, one in self.tape.held.items()]
        return {
            "entries": entries,
            "held": held,
            "cuda_random": len(self.tape.cuda_random),
            "generators": generators,
            "wanted": [list(w) for w in self.tape.wanted.items()],
            "device": self.home,
            "hidden": self.tape.recorder.hidden,
        }, self.tensors

    def _held(self, number: int, held: Held) -> dict[str, Any]:
        """A tensor from outside: the parameter that it is, or its values."""
        if held.grad_of is not None:
            return {"number": number, "grad_of": held.grad_of}
        known = {"number": number, "leaf": held.leaf, "changed": held.changed, "device": str(held.tensor.device)}
        leaf = self.tape.leaves.get(number)
        if leaf is not None and id(leaf) in self.parameters:
            return {**known, "parameter": self.parameters[id(leaf)]}
        if held.tensor.device.type == "meta" or held.tensor.is_quantized:
            raise Unwritable(f"it uses a tensor on {held.tensor.device} of type {held.tensor.dtype}")
        self.tensors[f"held/{number}"] = held.tensor
        return {**known, "complex": held.tensor.is_complex(), "stride": list(held.tensor.stride())}

    def _entry(self, position: int, entry: Entry | CallEntry | BackwardEntry) -> dict[str, Any]:
        if isinstance(entry, CallEntry):
            if entry.model.partition("/")[0] not in self.models:
                raise Unwritable("the models were not at hand when it was written")
            args, kwargs = entry.arguments
            return {
                "call": entry.model,
                "args": self._value(args, f"the model `{entry.model}`"),
                "kwargs": self._value(kwargs, f"the model `{entry.model}`"),
                "results": list(entry.results),
                "site": _site(entry.site),
                "surroundings": self._surroundings(position, entry.surroundings),
            }
        if isinstance(entry, BackwardEntry):
            groups = {k: [self._value(r) for r in getattr(entry, k)] for k in ("roots", "seeds", "inputs")}
            return {
                "backward": True,
                **groups,
                "results": list(entry.results),
                "retain": entry.retain,
                "create": entry.create,
                "accumulate": entry.accumulate,
                "site": _site(entry.site),
            }
        if entry.unfit:
            raise Unwritable(entry.unfit)
        name = name_of(entry.op.func)
        if name is None:
            raise Unwritable(f"it runs the op `{entry.op.func}` outside of a model, and a record holds only common ops")
        return {
            **_op(entry.op),
            "op": name,
            "args": self._value(entry.args, name),
            "kwargs": self._value(entry.kwargs, name),
            "results": list(entry.results),
            "grad": entry.grad,
        }

    def _surroundings(self, position: int, given: Any) -> dict[str, Any]:
        kept = []
        names = [name for name, _, _ in sources()]
        if len(names) != len(given.random):  # one came into use since: only these two are certain
            known = {random.setstate: names[0], torch.set_rng_state: "torch's random numbers"}
            names = [known.get(write, "") for write, _ in given.random]
        for n, (name, (_, state)) in enumerate(zip(names, given.random, strict=True)):
            key = f"random/{position}/{n}"
            if isinstance(state, torch.Tensor):
                self.tensors[key], rest = state, []
            elif isinstance(state[0], int):  # Python's: version, state, a number that waits
                self.tensors[key], rest = torch.tensor(state[1]), [state[0], state[2]]
            elif state[0] == "MT19937":  # NumPy's
                self.tensors[key], rest = torch.tensor(state[1].astype("int64")), [int(state[2]), *state[3:]]
            else:
                continue
            kept.append({"source": name, "tensor": key, "rest": rest})
        return {
            "random": kept,
            "autocast": [[kind, on, _name(dtype)] for kind, on, dtype in given.autocast],
            "training": given.training,
        }

    def _value(self, value: Any, owner: str = "it") -> Any:
        """An argument as plain data."""
        if isinstance(value, Ref):
            view = None if value.view is None else [list(value.view[0]), list(value.view[1]), value.view[2]]
            return {"ref": value.value, "view": view, "detached": value.detached}
        if type(value) is list:
            return [self._value(v, owner) for v in value]
        if type(value) in (tuple, torch.Size):
            return {"tuple": [self._value(v, owner) for v in value]}
        if type(value) is dict and all(type(k) in (str, int) for k in value):
            return {"dict": [[k, self._value(v, owner)] for k, v in value.items()]}
        return self._single(value, owner)

    def _single(self, value: Any, owner: str) -> Any:
        if value is None or type(value) in (bool, int, float):
            return value  # `strict` writes the numbers that JSON lacks as words,
        if type(value) is str:
            return {"text": value} if value in WORDS else value  # so that such a word must be told from them
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Generator) and id(value) in self.generators:
            return {"generator": self.generators.index(id(value))}
        for kind, named in NAMED.items():
            if isinstance(value, named):
                return {kind: _name(value)}
        raise Unwritable(f"{owner} was given a {type(value).__name__}, which can't be rebuilt from a file")


def _op(op: Op) -> dict[str, Any]:
    """What a report says of an op."""
    return {
        "index": op.index,
        **{key: getattr(op, key) for key in OP_TEXTS},
        "site": _site(op.site),
        "library": _site(op.library),
        "after_model": op.after_model,
        "op_grad": op.grad,
    }


def _site(site: Site | None) -> list[Any] | None:
    return None if site is None else [site.file, site.line, site.function]


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
