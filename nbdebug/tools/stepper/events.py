"""Where a step can wait: before and after each call of a layer, at the loss, and around each layer's backward."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.locations import Site
from nbdebug.observe.tensors import can_be_nonfinite, dense
from nbdebug.text import count

FINE, INF, NAN = range(3)
BINS = 24
MOST = 8
"""Tensors of a layer that are described on either side."""
AT_ONCE = 2**24
"""Elements that are read at a time: no copy of a large tensor is made. A histogram is drawn of no more than these."""
_LIKE_FLOAT = torch.float64


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """For what is computed about the step: no graph, and no mode of the user's that would see it."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        yield


def value_range(tensors: list[torch.Tensor]) -> tuple[float | None, float | None, int]:
    """The smallest and the largest element, and the worst that there is: FINE, INF or NAN. One read for each device;
    (None, None, FINE) where nothing can be read."""
    with unobserved():
        ends = [end for tensor in tensors if (values := _values(tensor)) is not None for end in values.aminmax()]
        numbers: list[float] = []
        for device in {end.device for end in ends}:
            wide = torch.float32 if device.type == "mps" else torch.float64
            numbers += torch.stack([end.to(wide) for end in ends if end.device == device]).tolist()
    if not numbers:
        return None, None, FINE
    if all(map(math.isfinite, numbers)):
        return min(numbers), max(numbers), FINE
    return None, None, NAN if any(map(math.isnan, numbers)) else INF


def worst_value(tensors: list[torch.Tensor]) -> int:
    return value_range([tensor for tensor in tensors if can_be_nonfinite(tensor)])[2]


def finite(tensors: list[torch.Tensor]) -> bool:
    return worst_value(tensors) == FINE


def row(name: str, tensor: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(row of the table, histogram) of a tensor. min, max, mean, std: of the finite elements, std with
    n in its denominator; zeros: their share; NaN, inf: how many."""
    known = {
        "tensor": name,
        "shape": "×".join(map(str, tensor.shape)) or "number",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    try:
        with unobserved():
            values = _values(tensor)
            if values is None:
                return known, None
            flat = values.reshape(-1)
            counted = _ValueCount()
            for start in range(0, flat.numel(), AT_ONCE):
                counted.add(flat[start : start + AT_ONCE])
            return known | counted.facts(), _histogram(name, flat, counted)
    except RuntimeError as wrong:  # no memory left, or an op that the device lacks: the layer is shown without numbers
        return known | {"min": f"not read: {type(wrong).__name__}"}, None


@dataclasses.dataclass
class _ValueCount:
    """What has been counted so far."""

    total: int = 0
    finite: int = 0
    nan: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0  # of the distances from the mean, summed

    def add(self, part: torch.Tensor) -> None:
        wide = part.to(torch.float32 if part.device.type == "mps" else _LIKE_FLOAT)
        good = wide[torch.isfinite(wide)]
        self.total, self.nan = self.total + part.numel(), self.nan + int(wide.isnan().sum())
        self.zeros += int((wide == 0).sum())
        count = good.numel()
        if not count:
            return
        self.low, self.high = min(self.low, float(good.min())), max(self.high, float(good.max()))
        mean = float(good.mean())
        apart, both = mean - self.mean, self.finite + count
        self.squares += float((good - mean).square().sum()) + apart * apart * self.finite * count / both
        self.mean, self.finite = self.mean + apart * count / both, both

    def facts(self) -> dict[str, Any]:
        some = self.finite > 0
        return {
            "min": self.low if some else None,
            "max": self.high if some else None,
            "mean": self.mean if some else None,
            "std": math.sqrt(self.squares / self.finite) if some else None,
            "zeros": self.zeros / self.total,
            "NaN": self.nan,
            "inf": self.total - self.finite - self.nan,
        }


def _histogram(name: str, flat: torch.Tensor, counted: _ValueCount) -> dict[str, Any]:
    """Counts in BINS equal parts between the smallest and the largest finite element."""
    low, high = counted.low, counted.high
    every = -(-flat.numel() // AT_ONCE)
    counts: list[int] = []
    if counted.finite and high > low:
        wide = flat[::every].to(torch.float32 if flat.device.type == "mps" else _LIKE_FLOAT)
        wide = wide[torch.isfinite(wide)]
        places = ((wide / 2 - low / 2) / (high / 2 - low / 2) * BINS).long().clamp(0, BINS - 1)
        counts = torch.bincount(places, minlength=BINS).tolist()
    return {
        "name": name,
        "low": low if counted.finite else None,
        "high": high if counted.finite else None,
        "counts": counts,
        "finite": counted.finite,
        "zeros": counted.zeros,
        "NaN": counted.nan,
        "inf": counted.total - counted.finite - counted.nan,
        "every": every,
    }


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements as ordinary numbers; None where there are none, or none that can be read."""
    if tensor.device.type == "meta" or tensor.is_quantized:
        return None
    values = dense(tensor)
    if values is None or values.numel() == 0:
        return None
    values = values.detach()
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def named_tensors(tree: Any, name: str, depth: int = 3) -> list[tuple[str, torch.Tensor]]:
    """The tensors of what a layer returned, by names such as "output[0]" or "output.logits"."""
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    if depth == 0:
        return []
    if isinstance(tree, (tuple, list)):
        fields = getattr(tree, "_fields", None)
        parts = [(f"{name}.{f}" if fields else f"{name}[{f}]", x) for f, x in zip(fields or range(len(tree)), tree)]
    elif isinstance(tree, Mapping):
        parts = [(f"{name}.{key}", x) for key, x in tree.items()]
    elif isinstance(tree, nn.Module) or not hasattr(tree, "__dict__") or isinstance(tree, type):
        return []
    else:
        parts = [(f"{name}.{key}", x) for key, x in vars(tree).items()]
    return [pair for part, x in parts for pair in named_tensors(x, part, depth - 1)]


def argument_tensors(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a layer is given, by the names of forward's parameters."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    names = [plain[i] if i < len(plain) else f"{rest}[{i - len(plain)}]" for i in range(len(args))]
    return [pair for name, value in (*zip(names, args), *kwargs.items()) for pair in named_tensors(value, name)]


BEFORE, AFTER, LOSS, BACKWARD, BACKWARD_DONE = "before", "after", "loss", "backward", "backward done"
PHASES = (BEFORE, AFTER, LOSS, BACKWARD, BACKWARD_DONE)
LEAVING = frozenset({AFTER, LOSS, BACKWARD_DONE})
"""Phases in which a layer's work lies behind."""


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """name: the module's dotted name, "" for the model itself. phase: one of PHASES. depth: how many calls of other
    layers are around it. call: which call of this module in this step, from 1."""

    name: str
    module_type: str
    phase: str
    depth: int
    call: int = 1

    @property
    def layer(self) -> str:
        """ "`blocks.1.attn` (Attention)", with the call where it is not the first."""
        if self.phase == LOSS:
            return "the loss"
        named = f"`{self.name}` ({self.module_type})" if self.name else f"the model ({self.module_type})"
        return named + (f", call {self.call}" if self.call > 1 else "")

    def __str__(self) -> str:
        return {
            BEFORE: "before {}",
            AFTER: "after {}",
            LOSS: "at {}",
            BACKWARD: "before the backward of {}",
            BACKWARD_DONE: "after the backward of {}",
        }[self.phase].format(self.layer)


@dataclasses.dataclass(eq=False)
class LayerCall:
    """One call of a layer. nodes: the sequence numbers of autograd's nodes between which its own lie. worst: of what it
    was given (numbers.FINE, INF or NAN). finite_gradient: whether what has come to it in backward is finite. blamed:
    something non-finite was made inside it already. handled: the exception that was being handled when it began.
    received, returned: the names of its tensors by their place in autograd's graph (a node, and which of its outputs);
    leaves: of those that have none, by id."""

    module: nn.Module
    name: str
    number: int
    parent: LayerCall | None
    depth: int
    nodes: tuple[int, int] = (0, 0)
    worst: int = FINE
    finite_gradient: bool = True
    blamed: bool = False
    given: list[tuple[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    versions: list[int | None] = dataclasses.field(default_factory=list)
    received: dict[tuple[Any, int], str] = dataclasses.field(default_factory=dict)
    leaves: dict[int, str] = dataclasses.field(default_factory=dict)
    returned: dict[tuple[Any, int], str] = dataclasses.field(default_factory=dict)
    site: Site | None = None
    handled: BaseException | None = None

    def place(self, phase: str) -> LayerPlace:
        return LayerPlace(self.name, type(self.module).__name__, phase, self.depth, self.number)

    def spoils(self, worst: int) -> bool:
        """Whether it, and nothing inside it, has made what is worse than what it was given; made: the worst of that. It
        is not blamed for a NaN made of an inf, unless the inf came with the batch, as in a mask: else the one that has
        made the inf is."""
        above, brought = self, self.worst > FINE
        while brought and above.parent is not None:
            above = above.parent
            brought = above.worst > FINE
        return worst > self.worst and not self.blamed and (self.worst == FINE or brought)

    def blame(self) -> None:
        """Its callers are not the innermost ones any more."""
        above = self.parent
        while above is not None:
            above.blamed, above = True, above.parent


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """Something that a goal may want to stop at. culprit: it made something non-finite of finite values, and nothing
    inside it did."""

    place: LayerPlace
    culprit: bool = False

    @property
    def leaving(self) -> bool:
        return self.place.phase in LEAVING

    @property
    def backward(self) -> bool:
        return self.place.phase in (BACKWARD, BACKWARD_DONE)


@dataclasses.dataclass
class StepStop:
    """A place where the step waits, and what is known there. given, made: tensors by name; in the forward what a layer
    is given and what it has made of it, in backward the gradients that came and those that it hands on."""

    place: LayerPlace
    given: list[tuple[str, torch.Tensor]]
    made: list[tuple[str, torch.Tensor]]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    histograms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    site: Site | None = None
    culprit: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)

    def read(self) -> None:
        """The tensors in numbers."""
        for side, tensors in (("in", self.given), ("out", self.made)):
            for name, tensor in tensors[:MOST]:
                entry, histogram = row(name, tensor)
                self.rows.append({"": side, "gradient": self.place.phase in (BACKWARD, BACKWARD_DONE), **entry})
                self.histograms += [histogram] if histogram else []
            if len(tensors) > MOST:
                more = count(len(tensors) - MOST, "more tensor is", "more tensors are")
                self.notes.append(f"{more} not shown ({side}).")
