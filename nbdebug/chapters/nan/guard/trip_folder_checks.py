"""Single parts of a step out of a record, each looked at before it is believed. All of these raise ValueError."""

from __future__ import annotations

import os
import random
import re
import stat
from typing import Any

import torch

from nbdebug.chapters.nan.guard.trip_folder_pack import NAMED
from nbdebug.observe.sites import Site

_SOURCE = 32 * 2**20
"""Bytes; no file of source is larger."""


def site_of(given: Any) -> Site | None:
    """A source line. None where it is not known, or where its file is no file of Python source: reports read the line
    out of it."""
    if given is None:
        return None
    file, line, function = list_of(given, exactly=3)
    file, function = text(file), text(function)
    if len(file) > 4096 or "\0" in file or not re.fullmatch(r"<.*>|.*\.pyw?|.*[\\/]ipykernel_\d+[\\/].*", file):
        return None
    try:
        status = os.stat(file)
    except (OSError, ValueError):  # a cell of a notebook, or another machine's file
        return Site(file, whole(line), function)
    return Site(file, whole(line), function) if stat.S_ISREG(status.st_mode) and status.st_size < _SOURCE else None


def laid_out(tensor: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """A tensor with the strides that it had, where it has no gaps."""
    if given.get("complex") is True:
        if tensor.shape[-1:] != (2,) or not tensor.is_floating_point():
            raise ValueError("a complex tensor is damaged")
        tensor = torch.view_as_complex(tensor)
    stride = [whole(s) for s in list_of(given.get("stride"))]
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


def named(kind: str, name: Any) -> Any:
    """A dtype, a layout or a memory format, by its name in torch."""
    found = getattr(torch, name, None) if kind in NAMED and isinstance(name, str) and name.isidentifier() else None
    if found is None or not isinstance(found, NAMED[kind]):
        raise ValueError(f"{kind[:40]!r}: {str(name)[:80]!r} is nothing that a step may be given")
    return found


def device_of(given: Any) -> torch.device:
    try:
        return torch.device(text(given))
    except RuntimeError:
        raise ValueError(f"{given[:80]!r} is no device") from None


def key_of(pair: Any) -> Any:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ValueError("a dict's key is neither text nor number")
    return pair[0]


def mapping(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is no object of JSON")
    return given


def list_of(given: Any, exactly: int | None = None) -> list[Any]:
    if not isinstance(given, list) or (exactly is not None and len(given) != exactly):
        raise ValueError("a list is missing, or has another length than it should")
    return given


def text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError("a text is missing")
    return given


def whole(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 2**62:
        raise ValueError("a whole number from 0 is missing")
    return given
