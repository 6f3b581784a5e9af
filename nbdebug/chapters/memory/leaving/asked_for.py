"""What an out-of-memory error says of itself: read from its message, whoever raised it."""

from __future__ import annotations

import re

from nbdebug.chapters.memory.facts_failure import Asked

MESSAGES = re.compile(
    r"out of memory|can't allocate memory|not enough memory: you tried|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Storage size calculation overflowed|"
    r"Unable to allocate .* for an array",
    re.IGNORECASE,
)
"""How torch's allocators, CUDA's libraries and numpy say that memory has run out."""
_SIZE = r"([\d.]+)\s*(bytes|[KMGTP]i?B)"
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


def says_so(error: BaseException) -> bool:
    """Whether this exception means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(MESSAGES.search(message(error)))


def message(error: BaseException) -> str:
    """The text of an exception, as far as it was given as text: no `__str__` of the user's is asked."""
    if str(type.__getattribute__(type(error), "__module__")).startswith("numpy."):  # it is given a shape and a dtype
        return str(error)
    return " ".join(arg for arg in BaseException.args.__get__(error) if isinstance(arg, str))  # type: ignore[attr-defined]


def read(error: BaseException) -> Asked:
    """What it says. Raises nothing: what is not said is None."""
    text = message(error)
    gpu = re.search(r"GPU (\d+)", text)
    device = (
        f"cuda:{gpu[1]}"
        if gpu
        else "cuda"
        if re.search(r"CUDA|CUBLAS|CUDNN", text)
        else ("mps" if "MPS" in text else "xpu" if "XPU" in text else "cpu")
    )
    return Asked(
        device,
        _asked(text),
        total=_size(text, rf"total capacity of {_SIZE}") or _size(text, rf"{_SIZE} total cap"),
        free=_size(text, rf"of which {_SIZE} is free") or _size(text, rf"{_SIZE} free"),
        allowed=_size(text, rf"{_SIZE} allowed") or _size(text, rf"max allowed: {_SIZE}"),
        allocated=_size(text, rf"{_SIZE} is allocated by PyTorch") or _size(text, rf"{_SIZE} already allocated"),
        unused=_size(text, rf"{_SIZE} is reserved by PyTorch but unallocated"),
        process=_size(text, rf"this process has {_SIZE} memory in use"),
    )


def _asked(text: str) -> int | None:
    found = _size(text, rf"[Tt]ried to allocate {_SIZE}") or _size(text, rf"Unable to allocate {_SIZE}")
    if found is not None:
        return found
    overflown = re.search(r"sizes=\[([\d, ]+)\]", text)
    if overflown is None:
        return None
    count = 4
    for side in overflown[1].split(","):
        count *= int(side)
    return count


def _size(text: str, pattern: str) -> int | None:
    found = re.search(pattern, text)
    return int(float(found[1]) * _UNITS[found[2][0].lower()]) if found else None
