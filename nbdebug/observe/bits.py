"""Tensors as the bits they are made of: a NaN is equal to itself here, and -0.0 is not 0.0."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x1E3779B97F4A7C15  # odd and without pattern, so that neighbouring positions have unlike numbers


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold a tensor's content: itself, or the inner ones of a sparse or wrapping tensor."""
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, jagged nested tensors, quantized weights
        return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a strided tensor as whole numbers, in one row."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().flatten().view(_WHOLE[tensor.element_size()])


def memory_bits(memory: torch.UntypedStorage) -> torch.Tensor:
    """A piece of memory as the bytes in it: an alias, not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, device, shape and a 64-bit digest of the bits: equal tensors have equal ones, others by a rare accident."""
    digests = [_digest(part) for part in parts(tensor.detach()) if part.device.type != "meta"]
    return str(tensor.dtype), str(tensor.device), tuple(tensor.shape), *digests


def _digest(part: torch.Tensor) -> int | str:
    whole = bits(part)
    if whole.device.type == "cpu":
        return hashlib.blake2b(whole.numpy().data, digest_size=8).hexdigest()
    mixed = torch.arange(whole.numel(), device=whole.device) * _STEP  # wraps around, as it should
    mixed ^= whole  # an element counts by its place, too
    return int((mixed * mixed + mixed).sum())  # computed where the tensor lies; one number comes back
