"""The caching allocator of torch's CUDA device, as a model: what a sequence of allocations and frees makes it reserve.

Rules (c10/cuda/CUDACachingAllocator.cpp, default settings, one stream): sizes are rounded up to 512 bytes. Up to 1 MiB
comes from segments of 2 MiB; above, up to 10 MiB from segments of 20 MiB; above that a segment is the size rounded up
to 2 MiB. The smallest free piece that is large enough is taken; it is split where what is left over is at least 512
bytes (small) or more than 1 MiB (large), else the whole piece counts as allocated. Freed pieces join their free
neighbours. Where the card has no room for a segment, those that are wholly free are given back first."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

MIB = 1 << 20
UNIT, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB
SHARE = 2 * MIB


@dataclasses.dataclass(frozen=True)
class Reserved:
    """allocated, reserved: at most, in bytes; at: event of the allocated peak; failed: event at which the limit was
    met, or None; returned: bytes given back to the card to make room."""

    allocated: int
    reserved: int
    at: int
    failed: int | None = None
    returned: int = 0


class Stretch:
    """A stretch of a segment."""

    __slots__ = ("address", "before", "free", "next", "size", "small")

    def __init__(self, address: int, size: int, small: bool):
        self.address, self.size, self.small, self.free = address, size, small, False
        self.before: Stretch | None = None
        self.next: Stretch | None = None


class Allocator:
    """limit: bytes that it may reserve; None for as many as it wants."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # free pieces: (size, address), sorted
        self.pieces: dict[int, Stretch] = {}
        self.allocated = self.reserved = self.returned = 0
        self._address = 0

    def allocate(self, size: int) -> Stretch | None:
        """A piece for so many bytes, or None where the limit does not let it."""
        size = max(UNIT, -(-size // UNIT) * UNIT)
        small = size <= SMALL
        pool = self.pools[small]
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            piece = self.pieces[pool.pop(at)[1]]
        else:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // SHARE) * SHARE
            if self.limit is not None and self.reserved + segment > self.limit:
                self._give_back()
                if self.reserved + segment > self.limit:
                    return None
            piece = self._segment(segment, small)
        self._split(piece, size)
        piece.free = False
        self.allocated += piece.size
        return piece

    def free(self, piece: Stretch) -> None:
        """Give a piece back to its pool."""
        self.allocated -= piece.size
        for other in (piece.before, piece.next):
            if other is not None and other.free:
                self._leave(other)
                piece = self._joined(*((other, piece) if other.address < piece.address else (piece, other)))
        piece.free = True
        bisect.insort(self.pools[piece.small], (piece.size, piece.address))

    def _segment(self, size: int, small: bool) -> Stretch:
        piece = Stretch(self._address, size, small)
        self._address += size + SHARE
        self.pieces[piece.address] = piece
        self.reserved += size
        return piece

    def _split(self, piece: Stretch, size: int) -> None:
        left = piece.size - size
        if left < UNIT if piece.small else left <= SMALL:
            return
        rest = Stretch(piece.address + size, left, piece.small)
        rest.before, rest.next, rest.free = piece, piece.next, True
        if piece.next is not None:
            piece.next.before = rest
        piece.next, piece.size = rest, size
        self.pieces[rest.address] = rest
        bisect.insort(self.pools[rest.small], (rest.size, rest.address))

    def _joined(self, first: Stretch, second: Stretch) -> Stretch:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.before = first
        del self.pieces[second.address]
        return first

    def _leave(self, piece: Stretch) -> None:
        pool = self.pools[piece.small]
        del pool[bisect.bisect_left(pool, (piece.size, piece.address))]

    def _give_back(self) -> None:
        """Segments that are wholly free go back to the card."""
        for pool in self.pools.values():
            for size, address in list(pool):
                piece = self.pieces[address]
                if piece.before is None and piece.next is None:
                    pool.remove((size, address))
                    del self.pieces[address]
                    self.reserved -= size
                    self.returned += size


def replay(events: Sequence[int], sizes: Sequence[int], limit: int | None = None) -> Reserved:
    """What a sequence of allocations (number) and frees (~number) reserves; it ends where it fails."""
    allocator = Allocator(limit)
    pieces: dict[int, Stretch] = {}
    allocated = reserved = 0
    place = -1
    for at, number in enumerate(events):
        if number < 0:
            if (piece := pieces.pop(~number, None)) is not None:
                allocator.free(piece)
            continue
        piece = allocator.allocate(sizes[number])
        if piece is None:
            return Reserved(allocated, reserved, place, at, allocator.returned)
        pieces[number] = piece
        reserved = max(reserved, allocator.reserved)
        if allocator.allocated > allocated:
            allocated, place = allocator.allocated, at
    return Reserved(allocated, reserved, place, None, allocator.returned)


TO_FLOAT32 = frozenset({"prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"})
"""Ops whose result CUDA's autocast wants in float32 unless the user says a dtype."""
NARROW = frozenset(
    {
        "_convolution",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "addmv",
        "addr",
        "mv",
        "chain_matmul",
        "einsum",
        "linalg_multi_dot",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "gru_cell",
        "lstm_cell",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "_scaled_dot_product_flash_attention",
    }
)
"""Ops of CUDA's autocast whose inner products are cast anyway, on the CPU as well."""
WIDEST = frozenset(
    {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"}
)
"""Ops that it computes in the widest dtype of what they are given, as plain type promotion does."""


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """CPU tensors are treated as a card would treat its own. Everything is as before afterwards."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _register(library)
        with _autocast(), _Elsewhere():
            yield
    finally:
        library._destroy()


def _register(library: Any) -> None:
    for name, here in _differences():
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        if here:  # cast on the CPU, not on a card
            library.impl(op, torch.library.fallthrough_kernel, "AutocastCPU")
        elif base not in NARROW | WIDEST:
            library.impl(op, _to_float32(op) if base in TO_FLOAT32 else _in_float32(op), "AutocastCPU")
    library.impl(torch.ops.aten.dropout.default, _dropout, "AutogradCPU")
    library.impl(torch.ops.aten.scaled_dot_product_attention.default, _attention, "AutogradCPU")
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        library.impl(torch.ops.aten.rms_norm.default, _rms_norm, "AutogradCPU")


@functools.cache
def _differences() -> tuple[tuple[str, bool], ...]:
    """The ops that one autocast knows and the other does not, by the dispatcher; True: the CPU's knows it."""
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    pairs = [
        (name, known(name, "AutocastCPU"), known(name, "AutocastCUDA"))
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    ]
    return tuple((name, here) for name, here, there in pairs if here != there and not name.endswith(".padding"))


HALVES = (torch.float16, torch.bfloat16)
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _in_float32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            wide = tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in HALVES else t, (args, kwargs))
            return op(*wide[0], **wide[1])

    return kernel


def _to_float32(op: Any) -> Callable[..., Any]:
    place = next(n for n, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") if len(args) <= place else args[place]
        if dtype is None and args[0].dtype in HALVES:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return op(*args, **kwargs)

    return kernel


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not values.numel():
        return values
    if p == 1:
        return values * torch.zeros((), dtype=values.dtype, device="cpu")
    return torch.native_dropout(values, p, train)[0]


def _rms_norm(values: torch.Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> torch.Tensor:
    return torch.ops.aten._fused_rms_norm(values, shape, weight, eps)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention in half precision without a mask, the memory-efficient one for all else, as torch prefers."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if query.dim() != 4 or query.shape[-1] != value.shape[-1] and mask is None and causal:
        return _by_hand(query, key, value, mask, dropout, causal, scale)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and query.shape[-1] <= 256:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
        return out[0]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.where(
                mask,
                torch.zeros((), dtype=query.dtype, device="cpu"),
                torch.full((), -math.inf, dtype=query.dtype, device="cpu"),
            )
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    wants = any(t.requires_grad for t in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, wants, dropout, causal, scale=scale
    )[0]


def _by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale
    )[0]


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    """`torch.autocast("cuda")` turns on the CPU's, whose choices are steered."""
    kind = torch.amp.autocast_mode.autocast
    original = kind.__init__

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        original(self, device_type, dtype, enabled, cache_enabled)

    kind.__init__ = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__init__ = original  # type: ignore[method-assign]


class _Elsewhere(TorchFunctionMode):
    """The user's `.cuda()`, `.to("cuda")` and `device="cuda"` stay where the copy is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
            return args[0]
        args = tuple(_here(a) for a in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _here(kwargs["device"])}
        return func(*args, **kwargs)


def _here(value: Any) -> Any:
    """A card, given as a device or by its name, becomes the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value
