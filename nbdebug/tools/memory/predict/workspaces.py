"""What CUDA kernels take besides their results, as measured op by op on an H200 (torch 2.11, CUDA 13, cuDNN 9.19).

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

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nbdebug.tools.memory.predict.meta_trace import Extra, MetaRecorder

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
        """The card of this machine, or an H100 where there is none."""
        if not torch.cuda.is_available():
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
WORDS = {"convolution": "workspaces of convolutions, which cuDNN picks", "_cudnn_rnn": "buffers of recurrent layers"}
"""What is modelled with less certainty."""
