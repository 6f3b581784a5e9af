"""What is written of a step that was not finite: its report, and what it takes to run it again elsewhere.

    report.json, report.html    what `locate` found, where it was called
    step.json                   the numbers of the step and of those before it; the calls and ops of the step
    tensors.safetensors         what these were given from outside: inputs, targets, random numbers
    weights.safetensors         parameters and buffers as they were before the step

What can't be written is left out, and step.json says why. The folder gets its name when it is complete.

A record may come from a stranger, so it may ask only for ops of ATen that compute with tensors and numbers, by their
public names. ATen also has ops that open files, that take memory without asking how large it is, or that are for its
own use and check nothing. So an op whose name begins with an underscore must be on a list, some others are refused, and
of texts only the few that name a reduction or a rounding are let through.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from nbdebug import __version__
from nbdebug.observe.locations import Site
from nbdebug.observe.modules import plain_name
from nbdebug.observe.recorder import Op
from nbdebug.observe.snapshot import random_sources
from nbdebug.observe.tape import BackwardEntry, CallEntry, ExternalTensor, Ref, Tape, TapeEntry
from nbdebug.text import listed, size
from nbdebug.tools.guard.distributed import unwrapped
from nbdebug.tools.guard.record.files import PART, WORDS, strict, trip_name
from nbdebug.tools.guard.record.trips import FORM
from nbdebug.tools.guard.step import Trip

_INNER = frozenset(
    "_softmax _log_softmax _safe_softmax _masked_softmax _to_copy _unsafe_view _local_scalar_dense _cdist_forward "
    "_euclidean_dist _pdist_forward _weight_norm_interface _fft_r2c _fft_c2r _fft_c2c _linalg_det _linalg_eigh "
    "_linalg_slogdet _linalg_solve_ex _linalg_svd _trilinear _conj _neg_view _ctc_loss _prelu_kernel "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _unique2 _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _stack _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _upsample_bilinear2d_aa _upsample_bicubic2d_aa _assert_async".split()
)
"""Ops that torch's public functions are made of, and that check what they are given."""
_REFUSED = frozenset(
    "from_file set_ set_data set record_stream data resize resize_ resize_as_ resize_as_sparse_ "
    "copy_sparse_to_sparse_ pin_memory is_pinned".split()
)
TEXTS = frozenset(
    "none mean sum prod amax amin add multiply floor trunc tanh left right linear lower higher midpoint nearest L U "
    "ij xy reduced complete r".split()
)
"""The texts that an op may be given: reductions, roundings, sides."""
_NAME = re.compile(r"aten\.([A-Za-z0-9_]{1,80})\.([A-Za-z0-9_]{1,80})", re.ASCII)
_OPERATORS = frozenset({"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"})


def name_of(op: Any) -> str | None:
    """The name under which a record has an op, "aten.log.default"; None where it may not have it."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return None
    name = f"aten.{op._schema.name.split('::')[-1]}.{op._overloadname}"
    return name if _allowed(name) else None


def op_of(name: Any) -> torch._ops.OpOverload:
    """The op of this name. Raises ValueError for one that there is not, or that a record may not ask for."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or not _allowed(name):
        raise ValueError(f"the record asks for the op {str(name)[:100]!r}, which is not among those it may ask for")
    try:
        op = getattr(getattr(torch.ops.aten, match[1]), match[2])
    except AttributeError:
        op = None
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"this torch ({torch.__version__}) has no op {name}")
    return op


def check_texts(value: Any, name: str) -> None:
    """Raises ValueError where an op would be given a text that is none of TEXTS."""
    if isinstance(value, str) and value not in TEXTS:
        raise ValueError(f"the record gives {value[:40]!r} to the op {name}, which takes no such text")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_texts(inner, name)


def _allowed(name: str) -> bool:
    base = name.split(".")[1]
    if base.startswith("_"):
        return base in _INNER or base in _OPERATORS or base.startswith("_foreach_")
    return base not in _REFUSED


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
        held = [self._held(number, one) for number, one in self.tape.externals.items()]
        return {
            "entries": entries,
            "held": held,
            "cuda_random": len(self.tape.cuda_random),
            "generators": generators,
            "wanted": [list(w) for w in self.tape.later_leaves.items()],
            "device": self.home,
            "hidden": self.tape.recorder.custom_backward,
        }, self.tensors

    def _held(self, number: int, held: ExternalTensor) -> dict[str, Any]:
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

    def _entry(self, position: int, entry: TapeEntry | CallEntry | BackwardEntry) -> dict[str, Any]:
        if isinstance(entry, CallEntry):
            if entry.model.partition("/")[0] not in self.models:
                raise Unwritable("the models were not known when it was written")
            args, kwargs = entry.arguments
            return {
                "call": entry.model,
                "args": self._value(args, f"the model `{entry.model}`"),
                "kwargs": self._value(kwargs, f"the model `{entry.model}`"),
                "results": list(entry.results),
                "site": _site(entry.site),
                "surroundings": self._environment(position, entry.environment),
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

    def _environment(self, position: int, environment: Any) -> dict[str, Any]:
        saved = []
        names = [name for name, _, _ in random_sources()]
        if len(names) != len(environment.random):  # one came into use since: only these two are certain
            known = {random.setstate: names[0], torch.set_rng_state: "torch's random numbers"}
            names = [known.get(write, "") for write, _ in environment.random]
        for n, (name, (_, state)) in enumerate(zip(names, environment.random, strict=True)):
            key = f"random/{position}/{n}"
            if isinstance(state, torch.Tensor):
                self.tensors[key], rest = state, []
            elif isinstance(state[0], int):  # Python's: version, state, a number that waits
                self.tensors[key], rest = torch.tensor(state[1], device="cpu"), [state[0], state[2]]
            elif state[0] == "MT19937":  # NumPy's
                self.tensors[key], rest = (
                    torch.tensor(state[1].astype("int64"), device="cpu"),
                    [int(state[2]), *state[3:]],
                )
            else:
                continue
            saved.append({"source": name, "tensor": key, "rest": rest})
        return {
            "random": saved,
            "autocast": [[kind, on, _name(dtype)] for kind, on, dtype in environment.autocast],
            "training": environment.training,
            "grad": environment.grad,
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


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


def weights_of(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names in the record. Raises Unwritable where one has no plain values."""
    weights: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models.values()):
        for name, tensor in _named_tensors(model):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise Unwritable(
                    f"`{name}` is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, "
                    "which can't be written as it is"
                )
            weights[f"{number}/{name}"] = tensor.detach()
    return weights


def plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them: on the CPU, without gaps, no memory shared, complex numbers as pairs."""
    storages: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().resolve_neg().resolve_conj()
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if memory in storages or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain


def load_weights(models: Iterable[nn.Module], recorded: Mapping[str, torch.Tensor]) -> None:
    """Give the models the recorded weights. Raises ValueError, naming what differs, where they do not fit."""
    mine = {f"{number}/{name}": tensor for number, model in enumerate(models) for name, tensor in _named_tensors(model)}
    shapes = {name: _shape(tensor) for name, tensor in mine.items()}
    differ = [
        f"{_name_in_model(name)} has shape {tuple(recorded[name].shape)} in the record and {tuple(shape)} in the model"
        for name, shape in shapes.items()
        if name in recorded and recorded[name].shape != shape
    ]
    missing, unexpected = mine.keys() - recorded.keys(), recorded.keys() - mine.keys()
    problems = [f"the record has no {_names(missing)}"] * bool(missing)
    problems += [f"the model has no {_names(unexpected)}"] * bool(unexpected) + differ[:5]
    if problems:
        raise ValueError("The model is not built as the one in the record: " + "; ".join(problems) + ".")
    with torch.no_grad():
        for name, tensor in mine.items():
            values = recorded[name]
            tensor.detach().copy_(torch.view_as_complex(values) if tensor.is_complex() else values)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(plain_name(name), t) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _name_in_model(name: str) -> str:
    return name.partition("/")[2] or name


def _names(names: Iterable[str]) -> str:
    return listed(map(_name_in_model, sorted(names)), 5, quote="")


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size([*tensor.shape, 2]) if tensor.is_complex() else tensor.shape


def write_trip(
    record: pathlib.Path, trip: Trip, run: str, rank: int, models: Mapping[str, nn.Module] | None, history: Any = None
) -> pathlib.Path:
    """Write the folder of `trip` into the record; returns its path. Raises OSError where nothing can be written.

    models: by the names that the tape knows; without them weights are left out. history: the run until then, for the
    rules (a `RunHistory`).
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
                "course": _history(history),
                **_step(part, trip, {n: unwrapped(m) for n, m in (models or {}).items()}),
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
    data: dict[str, Any] = {"models": [{"name": n, "type": type(m).__name__} for n, m in models.items()]}
    try:
        tape, tensors = pack(trip.tape, models)
        save_file(plain_tensors(tensors), folder / "tensors.safetensors")
        data |= {"tape": tape, "no_replay": ""}
    except Unwritable as reason:
        return {**data, "no_replay": str(reason), "no_weights": "they were not needed"}
    except Exception as error:  # a full disk: the report must be saved all the same
        (folder / "tensors.safetensors").unlink(missing_ok=True)
        return {**data, "no_replay": f"its tensors could not be written ({error})", "no_weights": "the same"}
    try:
        data["no_weights"] = _weights(folder, models)
    except Exception as error:
        (folder / "weights.safetensors").unlink(missing_ok=True)
        data["no_weights"] = f"they could not be written ({error})"
    return data


def _weights(folder: pathlib.Path, models: Mapping[str, nn.Module]) -> str:
    """Write parameters and buffers; returns why they were left out, or "" (also where the step calls no model)."""
    try:
        weights = weights_of(models)
    except Unwritable as reason:
        return str(reason)
    needed, free = sum(t.nbytes for t in weights.values()), shutil.disk_usage(folder).free
    if free < 2 * needed:
        return f"they take {size(needed)}, and only {size(free)} were free on the disk"
    save_file(plain_tensors(weights), folder / "weights.safetensors")
    return ""


def _history(run: Any) -> dict[str, Any]:
    """What the rules read of the run before the step."""
    if run is None:
        return {}
    return {
        "losses": run.losses[-200:],
        "first_sizes": run.first_sizes,
        "first_input": run.first_input,
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
