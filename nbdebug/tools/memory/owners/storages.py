"""The memory behind tensors and arrays: where it lies and how much it is, the same for all that show it.

A view, a tied weight and an expanded tensor have the storage of another; a sparse tensor has those of its parts. What
has no data of its own (fake and meta tensors, wrappers around others) has none.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

Key = tuple[str, int]
"""A device and an address on it."""
_SPARSE = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class StorageView(NamedTuple):
    """One storage as one tensor shows it. bytes: of the storage; shown: of them, what this tensor shows; dtype, shape:
    of the tensor. It holds no memory itself."""

    key: Key
    bytes: int
    shown: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def device(self) -> str:
        return self.key[0]

    def on(self, device: str) -> bool:
        """Whether it is on this device. A device without a number means any of its kind; "" means any at all."""
        return device in ("", self.device, self.device.partition(":")[0])


def pieces(tensor: Any) -> tuple[StorageView, ...]:
    """The storages of a tensor: one, for a sparse one those of its parts, none where there are no data."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            layout = tensor.layout
            if layout is torch.strided and not tensor.is_nested:
                view = _piece(tensor)
                return () if view is None else (view,)
            return tuple(piece for part in _parts(tensor, layout) if (piece := _piece(part)) is not None)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # no storage at all: a wrapper
        return ()


def array_pieces(array: Any) -> tuple[StorageView, ...]:
    """The memory of a numpy array, at the array that owns it; none for one that shows memory of another library."""
    kind = sys.modules["numpy"].ndarray
    owner = array
    while not owner.flags.owndata and issubclass(type(owner.base), kind):
        owner = owner.base
    count = int(owner.nbytes)
    if not owner.flags.owndata or not count or owner.dtype.hasobject:
        return ()
    address = kind.__array_interface__.__get__(owner)["data"][0]
    return (
        StorageView(("cpu", address), count, min(count, int(array.nbytes)), f"numpy {array.dtype}", tuple(array.shape)),
    )


def live() -> list[Any]:
    """All tensors that Python knows of. The list holds them: it must not outlive the caller."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
    return [thing for thing in things if type(thing) in kinds]


def _parts(tensor: Any, layout: Any) -> Iterable[Any]:
    if tensor.is_nested and layout is torch.strided:
        return (tensor.values(),)
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in _SPARSE:
        return (*(getattr(tensor, name)() for name in _SPARSE[layout]), tensor.values())
    if layout is torch.jagged:  # a nested tensor: its values are an attribute, and a tensor themselves
        return ()
    return (tensor,)


def _piece(tensor: Any) -> StorageView | None:
    storage = tensor.untyped_storage()
    device = storage.device
    count = storage.nbytes()
    if not count or device.type == "meta":
        return None
    address = storage.data_ptr()
    if not address:
        return None
    shape = tuple(tensor.shape)
    shown = min(count, math.prod(n for n, step in zip(shape, tensor.stride()) if step) * tensor.element_size())
    return StorageView((_name(device), address), count, shown, _dtype(tensor.dtype), shape)


_names: dict[Any, str] = {}


def _name(device: Any) -> str:
    if device not in _names:
        _names[device] = str(device)
    return _names[device]


def _dtype(dtype: Any) -> str:
    if dtype not in _names:
        _names[dtype] = str(dtype).removeprefix("torch.")
    return _names[dtype]
