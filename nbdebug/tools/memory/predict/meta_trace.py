"""A training step over tensors without data: each block of memory with its allocation, its end, its size and its use.

A dispatch mode sees each op below autograd, as a kernel would. A result whose storage is new is an allocation; the
storage's own end frees it. What a kernel takes besides its results is added right after the
results, and freed before the next op.

What CUDA kernels take besides their results, as measured op by op on an H200 (torch 2.11, CUDA 13, cuDNN 9.19).

    matrix products       a workspace for each thread that calls cuBLAS, kept: 32 MiB on Hopper and later, else 8.1
                          (`CUBLAS_WORKSPACE_CONFIG` says otherwise), and 1 MiB for products with a bias
    sums over rows        one partial result for each thread block, from the launch rules of torch's reduction kernel
    attention, backward   gradients of the queries in float32, and a number for each query
    convolutions          tensor-core kernels want the channels last: copies of what is given and made otherwise
    embeddings, backward  indices are sorted

`on_cpu` does the same for the CPU. Sizes are in bytes. Each rule gives what was measured; convolutions are the least
sure, as cuDNN picks among kernels.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import functools
import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdebug.observe.ops import WatchMode

PHASES = ("start", "zero_grad", "forward", "backward", "optimizer")
Workspaces = Callable[[Any, Sequence[Any], Any, "MetaRecorder"], Sequence["Extra"]]


@dataclasses.dataclass(frozen=True)
class Extra:
    """Memory that a kernel takes besides its results. after: behind how many of the results it comes; kept: it stays
    for good (a library's workspace)."""

    bytes: int
    after: int = 99
    kept: bool = False


@dataclasses.dataclass(slots=True)
class PredictedBlock:
    """One piece of memory. step: 0-based; phase: index into PHASES; category: one of facts.CATEGORIES, once known."""

    size: int
    step: int
    phase: int
    module: str
    op: str
    category: str = ""


@dataclasses.dataclass
class Trace:
    """events: number of an allocated block, or its complement (~number) where it is freed, in order; marks:
    (step, phase, index of the first event)."""

    blocks: list[PredictedBlock]
    events: array.array[int]
    marks: list[tuple[int, int, int]]

    def replay(self, sizes: Sequence[int] | None = None) -> Peak:
        """Live bytes over the events. sizes: of each block, where they shall be others than those that were seen."""
        sizes = [b.size for b in self.blocks] if sizes is None else sizes
        now, best, place = 0, 0, -1
        for at, number in enumerate(self.events):
            now += sizes[number] if number >= 0 else -sizes[~number]
            if now > best:
                best, place = now, at
        return Peak(best, place)

    def alive(self, place: int) -> list[int]:
        """Numbers of the blocks that are alive right after an event."""
        live: dict[int, None] = {}
        for number in self.events[: place + 1]:
            if number >= 0:
                live[number] = None
            else:
                live.pop(~number, None)
        return list(live)

    def phase_of(self, place: int) -> tuple[int, int]:
        """(step, phase) in which an event fell."""
        index = bisect.bisect_right([first for _, _, first in self.marks], place) - 1
        return self.marks[max(index, 0)][:2] if self.marks else (0, 0)


@dataclasses.dataclass(frozen=True)
class Peak:
    """bytes, and the event at which they were reached."""

    bytes: int
    place: int


class MetaRecorder(WatchMode):
    """Records allocations and frees on devices of one kind ("cpu", "cuda")."""

    def __init__(self, device: str, workspaces: Workspaces | None = None):
        super().__init__()
        self.device, self.workspaces = device, workspaces
        self.trace = Trace([], array.array("q"), [])
        self.live: dict[int, int] = {}  # address of the storage → number of its block
        self.watches: dict[int, Any] = {}
        self.modules: list[str] = []
        self.numbered: list[tuple[int, str]] = []  # sequence numbers of autograd, with the module of the forward
        self.step, self.phase = 0, 0
        self.closed = False
        self.doubts: set[str] = set()
        sole_holder()  # measured now: inside of an op it could not be

    def mark(self, step: int, phase: str) -> None:
        """From here on it is this phase of this step."""
        self.step, self.phase = step, PHASES.index(phase)
        self.trace.marks.append((self.step, self.phase, len(self.trace.events)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked for in every op, so without a detour
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if out is None or func is _DEVICE:
            return out
        if self.phase == 3 and func in REPLACED and not torch.is_grad_enabled() and self._in_place(func, args, out):
            return out
        outputs = (
            [out] if isinstance(out, torch.Tensor) else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        )
        if self.phase == 2:
            self._number()
        if func.namespace not in KNOWN:
            self.doubts.add(f"{func.namespace}::{func._schema.name.split('::')[-1]}")
        extras = list(self.workspaces(func, args, out, self)) if self.workspaces is not None else []
        for index, tensor in enumerate(outputs):
            for extra in [e for e in extras if e.after == index]:
                self._workspace(extra, func)
            extras = [e for e in extras if e.after != index]
            self.record(tensor, op=str(func))
        for extra in extras:
            self._workspace(extra, func)
        return out

    def record(self, tensor: torch.Tensor, op: str = "", category: str = "") -> int | None:
        """Note a tensor's memory. Returns the number of its block; None where it is on another device or has none."""
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self.live.get(key)
        if number is None and (size := storage.nbytes()) > 0:
            number = self._allocate(size, op, category)
            self._watch(storage, number)
        elif number is not None and category:
            self.trace.blocks[number].category = category
        return number

    def number_of(self, tensor: Any) -> int | None:
        """The block of a tensor that was seen."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        return self.live.get(tensor.untyped_storage()._cdata)

    def belongs(self, number: int | None, parameter: Any) -> None:
        """Put a gradient or a state to the module of its parameter."""
        if number is not None and (own := self.number_of(parameter)) is not None:
            self.trace.blocks[number].module = self.trace.blocks[own].module

    def _allocate(self, size: int, op: str, category: str = "") -> int:
        number = len(self.trace.blocks)
        if not category and self.phase == 3 and torch.is_grad_enabled():
            category = "activations"  # a checkpointed forward, computed again
        self.trace.blocks.append(PredictedBlock(size, self.step, self.phase, self.module(), op, category))
        self.trace.events.append(number)
        return number

    def _watch(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata
        self.live[key] = number
        self.watches[key] = weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        self.watches.pop(key, None)
        number = self.live.pop(key, None)
        if number is not None and not self.closed:
            self.trace.events.append(~number)

    def _workspace(self, extra: Extra, func: Any) -> None:
        number = self._allocate(extra.bytes, str(func), "other")
        if extra.kept:
            self.trace.blocks[number].module = "libraries"
        if not extra.kept:
            self.trace.events.append(~number)

    def module(self) -> str:
        """The module at work; in the backward that of the forward whose derivative is computed."""
        if self.modules:
            return self.modules[-1]
        if self.phase != 3 or not self.numbered:
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        index = bisect.bisect_right(self.numbered, (node._sequence_nr(), "\uffff")) - 1
        return self.numbered[index][1] if index >= 0 else ""

    def _number(self) -> None:
        """Remember which module the next node of autograd belongs to."""
        here, now = self.modules[-1] if self.modules else "", torch._C._autograd._get_sequence_nr()
        if not self.numbered or self.numbered[-1][1] != here:
            self.numbered.append((now, here))

    def _in_place(self, func: Any, args: Any, out: torch.Tensor) -> bool:
        """Autograd works in place where nobody else holds what it changes: where two gradients meet, and where one is
        put into zeros. It does not do so for tensors of another class or under a mode, as here: then the result takes
        over the memory of what it replaces."""
        first = args[0]
        if first.layout != torch.strided or first.shape != out.shape:
            return False
        old, output = first.untyped_storage(), out.untyped_storage()
        if old._cdata not in self.live or old.nbytes() != output.nbytes():
            return False
        if func is _ADD:
            good = len(args) > 1 and isinstance(args[1], torch.Tensor) and holders(first) == sole_holder()
        else:
            good = "zeros" in self.trace.blocks[self.live[old._cdata]].op
        if good:
            self.watches.pop(old._cdata, None)
            self._watch(output, self.live.pop(old._cdata))
        return good


KNOWN = frozenset({"aten", "prim", "prims", "profiler", "inductor"})
_ATEN = torch.ops.aten
REPLACED = frozenset(
    {
        _ATEN.add.Tensor,
        _ATEN.index_put.default,
        _ATEN.scatter.src,
        _ATEN.scatter.value,
        _ATEN.index_add.default,
        _ATEN.scatter_add.default,
        _ATEN.masked_scatter.default,
    }
)
"""Ops of which autograd takes the form that works in place, where it can."""
_ADD, _DEVICE = torch.ops.aten.add.Tensor, torch.ops.prim.device.default


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its memory."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


class _Counting(TorchDispatchMode):
    """Notes the holders of what is added to."""

    counted: tuple[int, int] = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _ADD and not torch.is_grad_enabled():
            self.counted = holders(args[0])
        return out


@functools.cache
def sole_holder() -> tuple[int, int]:
    """What `holders` says of a gradient that only autograd's own buffer holds: measured on a graph that is known to
    have such a one, as the count differs between versions of torch."""
    with unset_fake_temporarily(), FakeTensorMode(), _Counting() as counting, torch.enable_grad():
        leaf = torch.empty(2, requires_grad=True, device="cpu")
        (leaf.exp() + leaf.sin()).sum().backward()
    return counting.counted


MIB = 1 << 20
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"})


@dataclasses.dataclass(frozen=True)
class CardModel:
    """What of a card counts. processors: its streaming multiprocessors; threads: that one of them holds."""

    name: str
    major: int = 9
    processors: int = 132
    threads: int = 2048

    @classmethod
    def here(cls, device: torch.device) -> CardModel:
        """The card of this machine, or an H100 where there is none, or none is asked about."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls("an H100 is assumed")
        properties = torch.cuda.get_device_properties(device)
        return cls(
            properties.name,
            properties.major,
            properties.multi_processor_count,
            getattr(properties, "max_threads_per_multi_processor", 2048),
        )

    @property
    def workspace(self) -> int:
        """Of cuBLAS, in bytes: the pairs ":KiB:count" of the environment, or torch's default."""
        sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if sizes:
            return sum(int(size) * int(count) for size, count in sizes) * 1024
        return 32 * MIB if self.major >= 9 else (4096 * 2 + 16 * 8) * 1024


class OnCuda:
    """For each op what it takes besides its results; called by the recorder."""

    def __init__(self, card: CardModel):
        self.card = card
        self.kept: set[tuple[str, bool]] = set()

    def __call__(self, func: Any, args: Sequence[Any], out: Any, recorder: MetaRecorder) -> list[Extra]:
        name = func._schema.name
        base = name[6:] if name.startswith("aten::") else ""
        if base in PRODUCTS:
            return self._product(base, args, backward=recorder.phase == 3)
        rule = RULES.get(base)
        return rule(self.card, args, out) if rule is not None else []

    def _product(self, base: str, args: Sequence[Any], backward: bool) -> list[Extra]:
        """The forward and the backward run in threads of their own."""
        buffers = [("product", self.card.workspace)]
        if base == "addmm" and args[0].dim() == 1 and args[1].numel():
            buffers.append(("bias", MIB))
        fresh = [(what, size) for what, size in buffers if (what, backward) not in self.kept]
        self.kept.update((what, backward) for what, _ in fresh)
        return [Extra(size, kept=True) for _, size in fresh]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _power(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (max(n, 1).bit_length() - 1)


def reduction(card: CardModel, outputs: int, inputs: int, item: int, inner: bool) -> int:
    """The buffer of partial results of torch's reduction kernel (aten/src/ATen/native/cuda/Reduce.cuh).

    outputs: results; inputs: numbers that each is made of; item: bytes of one in the accumulator; inner: what is summed
    lies side by side in memory."""
    width = 1 if inner else next(w for w in (4, 2, 1) if outputs % w == 0)
    across, along = (inputs, outputs) if inner else (outputs // width, inputs)
    most = 512 // width
    x = min(_power(across), 32)
    y = min(_power(along), most // x)
    x = min(_power(across), most // y)
    steps, grid = (inputs, outputs) if not inner else (-(-inputs // x), outputs)
    if not inner:
        grid = -(-outputs // (x * width))
    split = steps >= min(y * 16, 256)
    if split:
        steps = -(-steps // y)
    else:
        grid = -(-grid // y)
    target = card.processors * (card.threads // (x * y))
    if not split or steps < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-steps // 16)), -(-steps // 256))
    return item * outputs * blocks * (1 if inner else x * width) if blocks > 1 else 0


def _summed(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    values = args[0]
    if not isinstance(out, torch.Tensor) or not values.is_floating_point() or not out.numel():
        return []
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else list(range(values.dim()))
    dims = [d % max(values.dim(), 1) for d in (dims or range(values.dim()))]
    inner = (values.dim() - 1) in dims or values.dim() == 0
    size = reduction(card, out.numel(), values.numel() // out.numel(), max(4, values.element_size()), inner)
    return [Extra(size), Extra(64)] if size else []


def _attention_backward(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    query = args[1]
    rows = query.numel() // max(query.shape[-1], 1) * 4
    return [Extra(query.numel() * 4 + rows + 256)]


def _efficient_backward(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    query = args[1]
    rows = query.numel() // max(query.shape[-1], 1) * 4
    return [Extra(query.numel() * 4 + rows), Extra(rows), Extra(query.numel() * 4 + 12288)]


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether the channels of images lie side by side."""
    return tensor.dim() >= 3 and tensor.stride(1) == 1 and tensor.shape[1] > 1


def _convolved(values: torch.Tensor, weight: torch.Tensor, outputs: int, groups: int) -> int:
    """Copies with the channels last of what is given (channels filled up to what a kernel reads at once), of the
    weights and of what is made."""
    if channels_last(values) or groups > 1 or values.dim() < 4:
        return 256
    width = 16 // values.element_size()
    full = max(1, width / values.shape[1])
    weights = _bytes(weight) if weight[0, 0].numel() > 1 else 0
    return int((_bytes(values) + weights) * full) + outputs + 16


def _convolution(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    values, weight = args[0], args[1]
    outputs = _bytes(out)
    if 16 <= values.shape[1] <= 64 and weight[0, 0].numel() == 1:
        return []  # a plain matrix product
    if 16 <= values.shape[1] <= 64 and values.dtype == torch.float32:
        outputs = 0  # such a kernel writes the channels first
    return [Extra(_convolved(values, weight, outputs, args[8] if len(args) > 8 else 1))]


def _convolution_backward(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    """First the gradient of what was given, then that of the weights, each with a workspace of its own; the second is
    summed in parts where its tiles (128×128) would leave processors idle."""
    grad, values, weight, groups = args[0], args[1], args[2], args[9] if len(args) > 9 else 1
    size = _convolved(values, weight, _bytes(grad), groups)
    tiles = -(-weight.shape[0] // 128) * -(-weight[0].numel() // 128)
    parts = min(14, card.processors // tiles) if size > 256 else 0
    partial = parts * weight.numel() * 4 if parts > 1 else 0
    mask = args[10] if len(args) > 10 else (True, True, True)
    product = values.dtype == torch.float32 and values.shape[1] <= 128 and weight[0, 0].numel() == 1
    extras = [Extra(size, after=1)] if mask[0] and out[1] is not None and not product else []
    return [*extras, Extra(size + partial, after=1 + bool(mask[0]) if out[2] is not None else 99)]


def on_cpu(func: Any, args: Sequence[Any], out: Any, recorder: MetaRecorder) -> list[Extra]:
    """On the CPU convolutions go through oneDNN, which copies what it is given into blocks of 16 channels (measured
    with the profiler's allocation events, torch 2.13); small ones of one pixel do not."""
    backward = func is torch.ops.aten.convolution_backward.default
    if func is not torch.ops.aten.convolution.default and not backward:
        return []
    values, weight = args[1:3] if backward else args[:2]
    strided = any(step > 1 for step in args[4 if backward else 3])
    plain = weight[0, 0].numel() == 1 and not strided and values.shape[0] < 16 and torch.get_num_threads() == 1
    if channels_last(values) or plain:
        return []
    copied = _bytes(values) if values.shape[1] >= 16 else 0
    if not backward:
        return [Extra(copied + _bytes(weight) + (_blocked(out) if out.shape[1] < 16 else 0))]
    extras = [Extra(_blocked(args[0]) + _bytes(weight) + (0 if copied else _blocked(values)), after=1)]
    if strided:
        extras.append(Extra(2 * _bytes(values), after=1))
    return [*extras, Extra(_blocked(args[0]) + copied)]


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes with the channels filled up to blocks of 16."""
    return _bytes(tensor) * (-(-tensor.shape[1] // 16) * 16) // tensor.shape[1]


def _embedded_backward(card: CardModel, args: Sequence[Any], out: Any) -> list[Extra]:
    count = args[1].numel()
    return [Extra(8 * count)] * 4 if count > 3072 else []


RULES: dict[str, Callable[[CardModel, Sequence[Any], Any], list[Extra]]] = {
    "sum": _summed,
    "mean": _summed,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedded_backward,
}
