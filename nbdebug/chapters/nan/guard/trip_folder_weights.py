"""Parameters and buffers of models, to a safetensors file and back into a copy of the models.

A name says which model of the record, and where in it: "0/head.weight". What wrappers add to names (`torch.compile`,
`DistributedDataParallel`) is left out, so that weights recorded with the wrapper fit the model without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from nbdebug.chapters.nan.guard.trip_folder_pack import Unwritable

_USUAL = (torch.Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (torch.Tensor, nn.Parameter)


def weights_of(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names in the record. Raises Unwritable where one has no plain values."""
    found: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models.values()):
        for name, tensor in _named(model):
            if type(tensor) not in _USUAL or tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise Unwritable(
                    f"`{name}` is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, "
                    "which can't be written as it is"
                )
            found[f"{number}/{name}"] = tensor.detach()
    return found


def plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them: on the CPU, without gaps, no memory shared, complex numbers as pairs."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().resolve_neg().resolve_conj()
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain


def put_into(models: Iterable[nn.Module], recorded: Mapping[str, torch.Tensor]) -> None:
    """Give the models the recorded weights. Raises ValueError, naming what differs, where they do not fit."""
    mine = {f"{number}/{name}": tensor for number, model in enumerate(models) for name, tensor in _named(model)}
    shapes = {name: _shape(tensor) for name, tensor in mine.items()}
    differ = [
        f"{_short(name)} has shape {tuple(recorded[name].shape)} in the record and {tuple(shape)} in the model"
        for name, shape in shapes.items()
        if name in recorded and recorded[name].shape != shape
    ]
    missing, unexpected = mine.keys() - recorded.keys(), recorded.keys() - mine.keys()
    problems = [f"the record has no {_listed(missing)}"] * bool(missing)
    problems += [f"the model has no {_listed(unexpected)}"] * bool(unexpected) + differ[:5]
    if problems:
        raise ValueError("The model is not built as the one in the record: " + "; ".join(problems) + ".")
    with torch.no_grad():
        for name, tensor in mine.items():
            values = recorded[name]
            tensor.detach().copy_(torch.view_as_complex(values) if tensor.is_complex() else values)


def bare(name: str) -> str:
    """The name of a parameter or module without what wrappers add."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(bare(name), t) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size([*tensor.shape, 2]) if tensor.is_complex() else tensor.shape


def _short(name: str) -> str:
    return name.partition("/")[2] or name


def _listed(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(_short(n) for n in ordered[:most]) + (
        f" and {len(ordered) - most} more" if len(ordered) > most else ""
    )
