"""A card's choices on a machine whose torch knows no card.

There, tensors without data pretend to lie on the CPU, whose autocast casts other ops and whose attention and dropout
are others. For the time of a prediction the dispatcher is told, for CPU tensors: cast as CUDA's autocast does, take the
fused dropout, and the attention that a card would take. `cuda` in the user's own code is read as `cpu`."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

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
        asked = kwargs.get("dtype") if len(args) <= place else args[place]
        if asked is None and args[0].dtype in HALVES:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return op(*args, **kwargs)

    return kernel


def _dropout(given: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not given.numel():
        return given
    if p == 1:
        return given * torch.zeros((), dtype=given.dtype)
    return torch.native_dropout(given, p, train)[0]


def _rms_norm(given: torch.Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> torch.Tensor:
    return torch.ops.aten._fused_rms_norm(given, shape, weight, eps)[0]


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
            mask = torch.where(mask, torch.zeros((), dtype=query.dtype), torch.full((), -math.inf, dtype=query.dtype))
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
    begun = kind.__init__

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begun(self, device_type, dtype, enabled, cache_enabled)

    kind.__init__ = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__init__ = begun  # type: ignore[method-assign]


class _Elsewhere(TorchFunctionMode):
    """The user's `.cuda()`, `.to("cuda")` and `device="cuda"` stay where the mirror is."""

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
