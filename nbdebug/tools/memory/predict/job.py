"""The request (FitRequest), the answer (Prediction), and batches of other sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nbdebug.tools.memory.facts import CATEGORIES
from nbdebug.tools.memory.predict import allocator
from nbdebug.tools.memory.predict.meta_trace import PHASES, PredictedBlock, Trace


@dataclasses.dataclass(frozen=True)
class FitRequest:
    """What shall be predicted.

    model: a Module, or a function that builds one; device: "cpu" or "cuda…"; half: the autocast dtype that fit itself
    puts around the loss, or None; accumulate: backwards before a step of the optimizer, each of `batch`; change:
    applied to the copy of the model before the steps (a remedy), such as checkpointing its blocks; groups: entries that
    the optimizer's groups shall have instead of theirs."""

    model: Any
    batch: Any
    loss_fn: Callable[..., Any]
    optimizer: Any
    device: torch.device
    half: torch.dtype | None = None
    steps: int = 2
    accumulate: int = 1
    change: Callable[[nn.Module], None] | None = None
    groups: dict[str, Any] | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def emulated(self) -> bool:
        """Whether a card is meant that this machine does not have."""
        return self.cuda and not torch.cuda.is_available()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a few steps take, in bytes.

    peak: allocated at most, as `torch.cuda.max_memory_allocated` counts it (pieces as the allocator cuts them; on the
    CPU as requested); reserved: what the allocator takes from the card, None on the CPU; at_peak: by category; modules:
    what is alive at the peak, by module; place: (step, phase) of the peak, at event `index`; phases: (step, phase, most
    in it); parameters: bytes of them; trained: how many of them want a gradient; doubts: what is modelled with less
    certainty."""

    trace: Trace
    peak: int
    reserved: int | None
    at_peak: dict[str, int]
    modules: dict[str, int]
    place: tuple[int, str]
    index: int
    phases: tuple[tuple[int, str, int], ...]
    parameters: int = 0
    trained: int = 0
    doubts: tuple[str, ...] = ()

    @property
    def needs(self) -> int:
        """What has to be there: the reserved bytes, or on the CPU the allocated ones."""
        return self.peak if self.reserved is None else self.reserved

    def course(self, most: int = 240) -> list[tuple[int, int]]:
        """Live bytes over the events, thinned; of each stretch the largest is kept."""
        live, points = 0, []
        for at, number in enumerate(self.trace.events):
            live += self.trace.blocks[number].size if number >= 0 else -self.trace.blocks[~number].size
            points.append((at, live))
        apart = max(1, len(points) // most)
        return [max(points[n : n + apart], key=lambda p: p[1]) for n in range(0, len(points), apart)]


def prediction(
    trace: Trace, cuda: bool, parameters: int = 0, trained: int = 0, doubts: tuple[str, ...] = ()
) -> Prediction:
    """What a trace says."""
    settle(trace)
    if cuda:
        held = allocator.replay(trace.events, [b.size for b in trace.blocks])
        peak, reserved, index = held.allocated, held.reserved, held.at
    else:
        totals = trace.replay()
        peak, reserved, index = totals.bytes, None, totals.place
    at_peak: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    modules: dict[str, int] = {}
    for number in trace.alive(index):
        block = trace.blocks[number]
        at_peak[block.category] += block.size
        modules[block.module] = modules.get(block.module, 0) + block.size
    at_peak["other"] += peak - sum(at_peak.values())
    step, phase = trace.phase_of(index)
    return Prediction(
        trace,
        peak,
        reserved,
        at_peak,
        modules,
        (step, PHASES[phase]),
        index,
        phases(trace),
        parameters,
        trained,
        doubts,
    )


def resized(original: Prediction, sizes: list[int], cuda: bool) -> Prediction:
    """The same sequence with other sizes: what a change of sizes alone would make of it."""
    blocks = [dataclasses.replace(b, size=size) for b, size in zip(original.trace.blocks, sizes)]
    trace = dataclasses.replace(original.trace, blocks=blocks)
    return prediction(trace, cuda, original.parameters, original.trained, original.doubts)


def settle(trace: Trace) -> None:
    """Give each block that has none yet its category, by when it was allocated and freed."""
    died: dict[int, int] = {}
    for at, number in enumerate(trace.events):
        if number < 0:
            died[~number] = at
    ends = {step: first for step, phase, first in trace.marks if PHASES[phase] == "backward"}
    for number, block in enumerate(trace.blocks):
        if not block.category:
            block.category = _category(block, died.get(number), ends)


def _category(block: PredictedBlock, death: int | None, ends: dict[int, int]) -> str:
    if PHASES[block.phase] == "forward":
        end = ends.get(block.step)
        return "activations" if death is None or (end is not None and death >= end) else "temporaries"
    return "temporaries"


def phases(trace: Trace) -> tuple[tuple[int, str, int], ...]:
    """The most that was alive in each phase of each step, in bytes as requested."""
    best: dict[tuple[int, int], int] = {}
    marks = [*trace.marks, (0, 0, len(trace.events))]
    live = 0
    for (step, phase, first), (_, _, last) in itertools.pairwise(marks):
        most = live
        for number in trace.events[first:last]:
            live += trace.blocks[number].size if number >= 0 else -trace.blocks[~number].size
            most = max(most, live)
        best[step, phase] = max(most, best.get((step, phase), 0))
    return tuple((step, PHASES[phase], most) for (step, phase), most in best.items())


def root(value: Any) -> torch.Tensor:
    """The loss among what loss_fn returned: the tensor itself, or the first scalar that wants a gradient.

    Raises TypeError where there is none."""
    if isinstance(value, torch.Tensor):
        return value
    named = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    candidates = [t for t in (named, *tree_leaves(value)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not candidates:
        raise TypeError(
            "loss_fn has to return a tensor (or a tuple, dict or object that holds it); it returned "
            f"{type(value).__name__}"
        )
    return candidates[0]


def mapped(change: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A batch with each tensor changed; shapes (torch.Size) count as float32 tensors. Containers of other classes that
    behave like a dict become dicts."""
    if isinstance(batch, torch.Size):
        return change(torch.empty(batch, device="meta"))
    if isinstance(batch, Mapping) and type(batch) is not dict:
        values = {key: mapped(change, value) for key, value in batch.items()}
        try:
            return type(batch)(values)  # type: ignore[call-arg]
        except Exception:  # a class of its own: what it holds is what counts
            return values
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{f.name: mapped(change, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        )
    return tree_map(
        lambda leaf: (
            change(leaf)
            if isinstance(leaf, torch.Tensor)
            else (mapped(change, leaf) if isinstance(leaf, (torch.Size, Mapping)) else leaf)
        ),
        batch,
        is_leaf=lambda leaf: isinstance(leaf, torch.Size) or (isinstance(leaf, Mapping) and type(leaf) is not dict),
    )


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    mapped(keep, batch)
    return tensors


def rows_of(batch: Any) -> int | None:
    """How many samples: the first dimension that all tensors (with at least one) share; None where they differ."""
    firsts = {t.shape[0] for t in tensors_of(batch) if t.dim()}
    return firsts.pop() if len(firsts) == 1 else None


def resized_argument(batch: Any, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """A batch of the same form without data ("meta"), with each shape changed."""
    return mapped(lambda t: torch.empty(change(tuple(t.shape)), dtype=t.dtype, device="meta"), batch)
