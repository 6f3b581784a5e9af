"""The request (FitRequest), the answer (Prediction), batches of other sizes, and the user's model, batch and optimizer
once more, of tensors that have no data; the user's own stay as they are.

The model is copied object by object, but wherever the copy meets a tensor it takes one without data (FakeTensorMode). A
model that refuses to be copied is used itself for the time of a prediction: its parameters and buffers are exchanged
and everything on its modules is put back as it was.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from nbdebug.observe.validation import wrong_type
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


class MetaCopy:
    """mode: the fake mode that all tensors without data belong to; device: where they pretend to lie."""

    def __init__(self, device: torch.device):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the real one stays, so that its id does

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor without data like this one, always the same for the same one. What lies on a device, or in a model
        on the CPU that is predicted for a GPU, is on the requested device."""
        if isinstance(real, FakeTensor) and real.fake_mode is self.mode:
            return real
        if id(real) not in self.known:
            self.known[id(real)] = real, self._empty_copy(real)
        return self.known[id(real)][1]

    def _empty_copy(self, real: torch.Tensor) -> torch.Tensor:
        plain = real.detach()
        with self.mode, torch.no_grad():
            if isinstance(real, FakeTensor) or real.is_meta or real.layout != torch.strided:
                empty = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=self.device)
            else:
                empty = self.mode.from_tensor(plain)
                if empty.device != self.device and empty.dim():
                    empty = torch.empty_strided(empty.size(), empty.stride(), dtype=empty.dtype, device=self.device)
                elif empty.device.type != self.device.type:
                    empty = torch.empty((), dtype=empty.dtype, device=self.device)
            if isinstance(real, nn.Parameter):
                return nn.Parameter(empty, requires_grad=real.requires_grad)
        return empty.requires_grad_(real.requires_grad)

    def batch(self, batch: Any) -> Any:
        """The batch without data, on the device."""
        return mapped(self.tensor, batch)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of a model without data. Raises whatever a part of it raises that refuses to be copied."""
        memo: dict[int, Any] = {id(t): self.tensor(t) for t in (*model.parameters(), *model.buffers())}
        with _Copying(self):
            clone = copy.deepcopy(model, memo)
        for module in clone.modules():  # the user's hooks watch the user's tensors, not these
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                getattr(module, hooks).clear()
        return clone

    @contextlib.contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[nn.Module]:
        """The user's own model with its tensors exchanged, for as long as this lasts."""
        saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        try:
            for module, *_ in saved:
                for held in (module._parameters, module._buffers):
                    held.update({k: t if t is None else self.tensor(t) for k, t in held.items()})  # type: ignore[misc]
            yield model
        finally:
            for module, members, parameters, buffers in saved:
                module.__dict__.clear()
                module.__dict__.update(members)
                for held, before in ((module._parameters, parameters), (module._buffers, buffers)):
                    held.clear()
                    held.update(before)  # type: ignore[arg-type]

    def optimizer(self, source: Any, parameters: Iterable[torch.Tensor], cuda: bool) -> torch.optim.Optimizer | None:
        """The optimizer of the copy: of the same class with the same groups, or made by the class or partial
        given."""
        if source is None:
            return None
        if isinstance(source, torch.optim.Optimizer):
            clone = self._optimizer(source)
        else:
            clone = source([p for p in parameters if p.requires_grad])
            if not isinstance(clone, torch.optim.Optimizer):
                call, what = "fit(model, batch, loss_fn, optimizer=)", "what optimizer(parameters) makes"
                raise wrong_type(call, what, "a torch.optim.Optimizer", clone)
        for group in clone.param_groups:
            choose(group, cuda)
        return clone

    def _optimizer(self, source: torch.optim.Optimizer) -> torch.optim.Optimizer:
        clone = source.__class__.__new__(source.__class__)
        clone.__dict__.update(
            {k: copy.copy(v) if isinstance(v, dict) and "hooks" in k else v for k, v in vars(source).items()}
        )
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            clone.__dict__[name] = type(vars(source)[name])() if name in vars(source) else {}
        clone.param_groups = [
            {key: [self.tensor(p) for p in value] if key == "params" else _plain(value) for key, value in group.items()}
            for group in source.param_groups
        ]
        clone.state = collections.defaultdict(dict)
        for parameter, state in source.state.items():
            clone.state[self.tensor(parameter)] = (
                {k: self._state(v) for k, v in state.items()} if isinstance(state, dict) else state
            )
        return clone

    def _state(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() or value.device.type != "cpu":
            return self.tensor(value)
        with self.mode:
            # a counter on the host: its value is read, and any will do
            return torch.tensor(1.0, dtype=value.dtype, device="cpu")


class _Copying(TorchFunctionMode):
    """While a model is copied, each tensor becomes one without data."""

    def __init__(self, meta: MetaCopy):
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone) and isinstance(args[0], torch.Tensor):
            return self.meta.tensor(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """`model.cuda()`, `.to(...)` and `.half()` exchange the parameters. torch wants to change them in place, which
    those without data refuse."""
    usual = nn.Module._apply
    copies: dict[int, Any] = {}

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(t, FakeTensor) for t in (*module.parameters(), *module.buffers())):
            return usual(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for held in (module._parameters, module._buffers):
            for key, old in held.items():
                if old is not None:
                    held[key] = _converted(old, fn, copies)  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = usual  # type: ignore[method-assign]


def _converted(old: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], copies: dict[int, Any]) -> torch.Tensor:
    """Tied ones stay tied. copies: by id of the old one, which is held so that its id stays its own."""
    if id(old) not in copies:
        with torch.no_grad():
            new = fn(old)
        if new is not old and isinstance(old, nn.Parameter):
            new = nn.Parameter(new.detach(), old.requires_grad)
        copies[id(old)] = old, new
    return copies[id(old)][1]


def _plain(value: Any) -> Any:
    """A rate that is a tensor is read once: without data it could not be."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def choose(group: dict[str, Any], cuda: bool) -> None:
    """Which form of the step a group takes. torch takes the one of many tensors at once on a card, but does not know
    tensors without data as ordinary ones, so it is told."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return
    group["foreach"] = cuda and not group.get("differentiable", False)
