"""Tensors: identity by storage, finiteness, bits, norms, and the values of sparse, distributed and wrapped ones.

Tensor objects are short-lived (autograd makes new ones of the same values), so a value is identified by its storage. A
weak reference keeps the storage's record from being taken for another's, and does not keep the memory alive.

Norms, one of all tensors together or one of each, are computed on the device in a few fused kernels, and not read. That
of a 16-bit gradient is computed in 32 bits: it may overflow 16 bits though every element is finite. A 32-bit norm that
overflows is computed again in 64 bits before it is reported (`exact_norm`, and `group_norms` with `wide`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from nbdebug.text import count, listed

SMALL = 4096
"""Up to this many elements `isfinite` on each takes no longer than a sum (measured: about 18 µs on a CPU)."""
PARAMETER, INPUT, TARGET = 1, 2, 4
REACH_NAMES = {PARAMETER: "parameter", INPUT: "input", TARGET: "target"}
_NO_SUM = {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32")
    if hasattr(torch, name)
}
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x1E3779B97F4A7C15  # odd and irregular, so that neighbouring positions have unlike numbers
_ALIASES = {
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "safe_softmax": "softmax",
    "nll_loss2d": "nll_loss",
    "nll_loss_nd": "nll_loss",
    "true_divide": "div",
    "thnn_fused_lstm_cell": "lstm_cell",
    "to_copy": "to",
}


class StorageInfo:
    """The record of one storage. ref: a weak reference to it; reach: which of PARAMETER, INPUT, TARGET flowed into it;
    maker: the op that wrote it last (None: it came from outside); role, name, module: of a storage from outside;
    entered: the line that passed it to the model; views: the parts of it that have been checked."""

    __slots__ = ("entered", "maker", "module", "name", "reach", "ref", "role", "views")

    def __init__(
        self,
        storage: torch.UntypedStorage | StorageWeakRef,
        maker: Any,
        reach: int,
        role: str = "",
        name: str = "",
        module: str = "",
    ):
        self.ref = storage if isinstance(storage, StorageWeakRef) else StorageWeakRef(storage)
        self.maker, self.reach, self.role, self.name, self.module = maker, reach, role, name, module
        self.entered: Any = None
        self.views: set[Any] | None = None


def reach_names(reach: int) -> frozenset[str]:
    return frozenset(name for bit, name in REACH_NAMES.items() if reach & bit)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, as long as a `StorageInfo` of it exists."""
    return tensor.untyped_storage()._cdata


def optional_storage_key(tensor: torch.Tensor) -> int | None:
    """The same for any tensor; None where it has no storage of its own. (Written to be fast: it runs for every op.)"""
    try:
        if type(tensor) is not torch.Tensor and not _has_memory(tensor):
            return None
        return tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):  # a lazy parameter may raise any of them
        values = dense(tensor)
        return None if values is None else values.untyped_storage()._cdata


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The strided tensor that holds the values: itself, or those of a sparse or a strided nested tensor; None where
    there is none."""
    if _is_wrapped(tensor):  # inside torch.func: the values come again, unwrapped, one level below
        return None
    if tensor.is_nested:  # it has no shape; nn.TransformerEncoder makes such ones by itself
        return tensor.detach().values() if type(tensor) is torch.Tensor else None
    if tensor.layout is torch.strided:
        return tensor if type(tensor) is torch.Tensor or _has_memory(tensor) else None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr) else None


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor inside torch.func the one that holds its values, with the mapped axis."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not for a subclass that handles ops itself, which wraps other tensors; nor for a lazy parameter, not yet."""
    if is_lazy(tensor) or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def plain_values(tensor: Any) -> torch.Tensor:
    """The values as a strided real tensor: of a DTensor this process's part, of a sparse tensor its entries, of a
    complex one pairs."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold a tensor's content: itself, or the inner ones of a sparse or wrapper tensor."""
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, jagged nested tensors, quantized weights
        return [part for name in tensor.__tensor_flatten__()[0] for part in strided_parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def loss_in(result: Any) -> Any:
    """The `loss` in what a step or a model returned, of a mapping or an object; None without one. The object may be the
    user's, whose attributes run code of theirs that may raise anything."""
    try:
        return result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    except Exception:
        return None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return tensors


def output_tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, always in the same order. The output may be any object that holds tensors, as a
    distribution."""
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, Mapping):
            tensors += output_tensors(list(leaf.values()))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            tensors += tensors_in(list(vars(leaf).values()))
    return tensors


def walk_tensors(values: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The tensors among an op's flat arguments with their position; lists of tensors (foreach ops) are entered."""
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield position, value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield position, item


def can_be_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be read and that can be inf or NaN."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type != "meta" and tensor.numel() > 0


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite. A finite sum proves it, and is 15 times faster; so the sum comes first."""
    if tensor.layout is not torch.strided:
        inner = dense(tensor)
        return inner is None or all_finite(inner)
    if tensor.numel() > SMALL and tensor.dtype not in _NO_SUM:
        half = tensor.dtype in (torch.float16, torch.bfloat16) and tensor.device.type == "cpu"
        total = tensor.sum(dtype=torch.float32 if half else None).item()
        if math.isfinite(abs(total)):
            return True
    return bool(finite(tensor).all())


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """`torch.isfinite`, also for dtypes that lack it."""
    return torch.isfinite(tensor.float() if tensor.dtype in _NO_SUM and not tensor.is_complex() else tensor)


def largest(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitudes, not read: a 0-dimensional float32 tensor per device and dtype; NaN if an element is."""
    return [torch.stack([size for _, size in group]).amax().float() for group in _magnitudes(tensors)]


def each_largest(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude of each, not read: 0-dimensional tensors; NaN if an element is."""
    sizes = {number: size for group in _magnitudes(tensors) for number, size in group}
    return [sizes[n] for n in range(len(tensors))]


def _magnitudes(tensors: list[torch.Tensor]) -> list[list[tuple[int, torch.Tensor]]]:
    """The position and the largest magnitude of each, in groups of one device and dtype."""
    groups: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        values = dense(tensor)
        assert values is not None, "only for tensors that can be read"
        if values.requires_grad:
            values = values.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        elif values.dtype in _NO_SUM:
            values = values.float()
        groups.setdefault((values.device, values.dtype), []).append((number, values))
    return [
        list(zip([n for n, _ in group], torch._foreach_norm([t for _, t in group], ord=math.inf), strict=True))
        for group in groups.values()
    ]


def read_scalars(sizes: list[torch.Tensor]) -> list[float]:
    """The values of 0-dimensional tensors, in order, with one read for each device and dtype."""
    values: dict[int, float] = {}
    for device in {s.device for s in sizes}:
        on_device = [i for i, s in enumerate(sizes) if s.device == device]
        for dtype in {sizes[i].dtype for i in on_device}:
            group = [i for i in on_device if sizes[i].dtype is dtype]
            values |= zip(group, torch.stack([sizes[i] for i in group]).tolist(), strict=True)
    return [values[i] for i in range(len(sizes))]


def exponents(tensor: torch.Tensor) -> dict[str, int]:
    """How many finite non-zero elements have each binary exponent, floor(log2|x|)."""
    values = tensor.detach().abs().double().flatten()
    values = values[torch.isfinite(values) & (values > 0)]
    powers, counts = torch.frexp(values).exponent.sub(1).unique(return_counts=True)
    return {str(int(p)): int(c) for p, c in zip(powers.tolist(), counts.tolist(), strict=True)}


def rows_of(
    mask: torch.Tensor, batch: int | None, folds: frozenset[int] | set[int] = frozenset()
) -> tuple[int, ...] | None:
    """The batch rows in which `mask` (bool) is set: along dimension 0 or 1 if that has the batch's size, or along
    dimension 0 if batch and time are folded there, batch first. None when the mask has no such dimension.

    folds: how many elements a row may be folded into, for masks of one dimension (others may be folded into any
    number).
    """
    if not batch or batch < 2:
        return None
    shape = mask.shape
    dim = next((d for d in (0, 1) if len(shape) > d and shape[d] == batch), None)
    if dim is None:
        folded = shape and shape[0] > batch and shape[0] % batch == 0
        if not folded or (len(shape) == 1 and shape[0] // batch not in folds):
            return None
        mask, dim = mask.reshape(batch, -1), 0
    other = [d for d in range(mask.dim()) if d != dim]
    rows = mask.any(dim=tuple(other)) if other else mask
    return tuple(rows.nonzero().flatten().tolist())


def row_candidates(mask: torch.Tensor, batch: int | None) -> dict[str, tuple[int, ...]]:
    """The rows in which `mask` (bool) is set, for each dimension that may be the batch: by the dimension's number, or
    "batch first" and "batch last" where it may be folded into the first one. Sets of all rows are left out."""
    if not batch or batch < 2:
        return {}
    views = {str(d): mask.movedim(d, 0) for d, size in enumerate(mask.shape) if size == batch}
    if mask.dim() and mask.shape[0] > batch and mask.shape[0] % batch == 0:
        views["batch first"] = mask.reshape(batch, -1)
        views["batch last"] = mask.reshape(-1, batch, *mask.shape[1:]).movedim(1, 0)
    found = {name: view.reshape(batch, -1).any(1).nonzero().flatten().tolist() for name, view in views.items()}
    return {name: tuple(rows) for name, rows in found.items() if 0 < len(rows) < batch}


def folds_of(shape: torch.Size) -> set[int]:
    """The numbers of elements that a batch row of this shape may be folded into: each dimension after the first, and
    the products of these from the first of them on."""
    return {*shape[1:], *itertools.accumulate(shape[1:], operator.mul)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a strided tensor as integers of the same bits, flattened."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().flatten().view(_INTEGERS[tensor.element_size()])


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of its bytes: an alias, not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, device, shape and a 64-bit digest of the bits: equal tensors have equal ones, others by a rare accident."""
    digests = [_digest(part) for part in strided_parts(tensor.detach()) if part.device.type != "meta"]
    return str(tensor.dtype), str(tensor.device), tuple(tensor.shape), *digests


def _digest(part: torch.Tensor) -> int | str:
    integers = bits(part)
    if integers.device.type == "cpu":
        return hashlib.blake2b(integers.numpy().data, digest_size=8).hexdigest()
    mixed = torch.arange(integers.numel(), device=integers.device) * _STEP  # overflow wraps around, as intended
    mixed ^= integers  # an element's position counts, too
    return int((mixed * mixed + mixed).sum())  # computed on the device; one number is read


def base_name(op: Any) -> str:
    """The ATen base name of an op: `aten._log_softmax_backward_data.default` → "log_softmax"."""
    name = (op if isinstance(op, str) else op.__name__).split("::")[-1].split(".")[0].strip("_")
    for prefix in ("foreach_", "fused_"):
        name = name.removeprefix(prefix)
    for suffix in ("_backward_data", "_backward", "_forward"):
        name = name.removesuffix(suffix)
    return _ALIASES.get(name, name)


def kinds_of(tensors: Iterable[torch.Tensor]) -> str:
    """ "float32 on cpu", or each of several with its number of tensors."""
    kinds = collections.Counter(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in tensors)
    if len(kinds) == 1:
        return next(iter(kinds))
    return listed((f"{kind} ({count(n, 'tensor')})" for kind, n in kinds.most_common()), 4, quote="")


_HALF = (torch.float16, torch.bfloat16)
PART = 1024
"""Elements in a part of a sum on a CPU: as fast as one long sum, and right to 1 in 10 million."""


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that the optimizer is about to use: this process's part of each, and of a sparse one its values."""
    return [
        g
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
        if (g := plain_values(p.grad)).numel()
    ]


def total_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients together: a 0-dimensional float32 tensor on `device`, not read; inf or NaN if an
    element is."""
    groups: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient)
    norms: list[torch.Tensor] = []
    for (_, dtype), members in groups.items():
        each = torch._foreach_norm(members, 2, dtype=torch.float32 if dtype in _HALF else None)
        norms += [n.to(device, torch.float32, non_blocking=True) for n in each]
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(norms))


def exact_norm(gradients: list[torch.Tensor]) -> float:
    """The 2-norm of all gradients together in 64 bits, read; NaN if an element is not finite."""
    if not all(map(math.isfinite, read_scalars(largest(gradients)))):
        return math.nan
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients))


class GroupNorms(NamedTuple):
    """2-norms of some parameters' gradients (or weights, or updates), by the parameters' numbers; not read."""

    numbers: tuple[int, ...]
    values: torch.Tensor

    def over(self, scale: torch.Tensor | None) -> GroupNorms:
        """Divided by a gradient scaler's scale."""
        if scale is None:
            return self
        return GroupNorms(self.numbers, self.values / scale.to(self.values.device).reshape(()))


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Within, nothing is recorded: not by autograd, not by the modes of another watch."""
    with torch.no_grad(), _disable_current_modes():
        yield


def has_norm(tensor: Any) -> bool:
    """Whether the norm of a parameter can be computed: a float or complex tensor with its own storage, or a DTensor."""
    numeric = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    if not numeric or tensor.device.type == "meta":
        return False
    return hasattr(tensor, "to_local") or not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def group_norms(tensors: Sequence[tuple[int, Any]], wide: bool = False) -> list[GroupNorms]:
    """The norms of numbered tensors: one `GroupNorms` for each device and dtype. Empty tensors have none. wide: in
    float64."""
    groups: dict[tuple, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in tensors:
        values = plain_values(tensor)
        if values.numel():
            groups[values.device, values.dtype].append((number, values))
    norms = []
    for (device, dtype), members in groups.items():
        within = torch.float64 if wide and device.type != "mps" else torch.float32 if dtype in _HALF else None
        each = (_on_cpu if device.type == "cpu" else _fused)([values for _, values in members], within)
        stacked = torch.stack(each)
        if device.type == "cpu" and not wide and bool(torch.isinf(stacked).any()):
            stacked = torch.stack(_on_cpu([values for _, values in members], torch.float64))
        norms.append(GroupNorms(tuple(number for number, _ in members), stacked))
    return norms


def _fused(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def _on_cpu(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Small tensors together, each large one in parts."""
    small = [t for t in tensors if t.numel() <= 4 * PART]
    norms = iter(_fused(small, dtype) if small else ())
    return [next(norms) if t.numel() <= 4 * PART else _in_parts(t.reshape(-1), dtype) for t in tensors]


def _in_parts(flat: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the norms of rows of PART elements, and of the rest."""
    rows = flat.numel() // PART
    each = torch.linalg.vector_norm(flat[: rows * PART].view(rows, PART), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[rows * PART :], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([each, rest.reshape(1)]))


def reads_asynchronously(device: torch.device) -> bool:
    """Whether this device works asynchronously, so that a read is deferred until an event says that it is done."""
    return device.type == "cuda"


def is_capturing_graph() -> bool:
    """Whether ops are only recorded for a CUDA graph: there are no values to measure."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
