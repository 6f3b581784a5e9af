"""What is measured while a step runs: its gradients between backward and the update, when backward ends and again if
something has changed them since; and its dead and saturated units.

Each backward that changes a gradient of ours is measured when it ends; the last one before an optimizer steps gives the
norms before clipping. A gradient has a version, which counts the writes into it: where it is the same tensor in the
same version when the optimizer steps, nothing has clipped it, and it is not measured again. Writes through `.data` are
not counted; so now and then all are measured again, and if one of those differs, from then on always.

A ReLU's unit is dead when it is zero for every sample of several batches: no gradient passes it, and training can't
revive it. A unit of tanh or sigmoid is saturated where its slope is under a hundredth of the largest. Masks stay on the
device until somebody asks. Activations that are called as functions (`F.relu`) have no module, and are not seen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.modules import ModelHook, ModuleNames
from nbdebug.observe.tensors import GroupNorms, group_norms, has_norm, is_capturing_graph, plain_values, unobserved


class WatchedParameters:
    """names, layers, sizes: of each parameter by its number; parameters: they themselves, until `forget`. optimizers
    are read again at each step: groups may be added, and lazy parameters get their shape late."""

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]):
        self.models, self.optimizers = dict(models), dict(optimizers)
        self.names: list[str] = []
        self.layers: list[str] = []
        self.sizes: list[int] = []
        self.matrix: list[bool] = []
        self.parameters: list[Any] = []
        self.odd: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._known = ModuleNames(self.models)
        for tensor, (role, name, module) in self._known.all_tensors():
            if role == "parameter" and tensor.requires_grad:
                self._add(tensor, self._known.owner(tensor) or (role, name, module))
        self._held: dict[int, list[int]] = {}
        for optimizer in self.optimizers.values():
            self.refresh(optimizer)

    def _add(self, parameter: Any, place: tuple[str, str, str]) -> int:
        number = self._numbers[id(parameter)] = len(self.names)
        self.parameters.append(parameter)
        self.names.append(place[1])
        self.layers.append(place[2] or place[1])
        self.sizes.append(parameter.numel())
        self.matrix.append(parameter.dim() > 1)
        return number

    def refresh(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """The numbers of what an optimizer holds now."""
        numbers = []
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                number = self._numbers.get(id(parameter))
                if number is None:
                    if not has_norm(parameter) or torch.nn.parameter.is_lazy(parameter):
                        self.odd.add(id(parameter))
                        continue
                    number = self._add(parameter, self._place(parameter, optimizer, group, place))
                numbers.append(number)
        self._held[id(optimizer)] = numbers
        return numbers

    def _place(self, parameter: Any, optimizer: Any, group: int, place: int) -> tuple[str, str, str]:
        if self._known.owner(parameter) is None:
            self._known = ModuleNames(self.models)  # something may have been added, or a lazy one made
        owner = self._known.owner(parameter)
        if owner is not None:
            return owner
        name = next(name for name, known in self.optimizers.items() if known is optimizer)
        layer = f"{name}.param_groups[{group}]"
        return "parameter", f"{layer}['params'][{place}]", layer

    def held(self, optimizer: torch.optim.Optimizer) -> list[int]:
        return self._held.get(id(optimizer), [])

    def unheld(self) -> list[str]:
        """The model's parameters that want a gradient and that no optimizer holds."""
        held = {number for numbers in self._held.values() for number in numbers}
        return [
            name
            for number, name in enumerate(self.names)
            if number not in held and (self.parameters[number] is None or self.parameters[number].requires_grad)
        ]

    def foreign(self) -> list[str]:
        """Parameters that an optimizer holds and that are in none of the models."""
        return [name for name in self.names if "param_groups[" in name]

    def gradients(self, numbers: list[int] | None = None) -> Iterator[tuple[int, Any]]:
        """The gradients that there are, by number."""
        for number in range(len(self.parameters)) if numbers is None else numbers:
            gradient = self.parameters[number].grad
            if gradient is not None:
                yield number, gradient

    def forget(self) -> None:
        """Hold no parameter any more; the names stay."""
        self.parameters = [None] * len(self.names)
        self.models, self.optimizers = {}, {}
        self._known = ModuleNames({})
        self._numbers.clear()


Mark = tuple[int, int]


class GradientProbe:
    """What is known of gradients since they were last used. trusted: every write so far has raised a version. wide: a
    norm was beyond float32, so float64 is used."""

    def __init__(self, roster: WatchedParameters):
        self.roster, self.trusted, self.wide = roster, True, False
        self._before: dict[int, Mark] = {}  # when the running backward began
        self._marks: dict[int, Mark] = {}  # when the last backward ended that changed them
        self._norms: list[GroupNorms] = []
        self._used: set[int] = set()

    def _marked(self) -> dict[int, Mark]:
        return {number: (id(g), g._version) for number, g in self.roster.gradients()}

    def began(self) -> None:
        self._before = self._marked()

    def ended(self) -> tuple[list[int], bool]:
        """The numbers of the parameters whose gradients this backward has changed; whether none of these had one."""
        now, before = self._marked(), self._before
        self._before = {}
        changed = [number for number, mark in now.items() if before.get(number) != mark]
        return changed, before.keys().isdisjoint(changed)

    def measure(self, changed: list[int]) -> None:
        """Measure these; what was measured of them before is out of date."""
        norms = group_norms(list(self.roster.gradients(changed)), self.wide)
        new = set(changed)
        self._norms = [n for n in self._norms if not new.issuperset(n.numbers)] + norms
        self._used -= new
        for number, gradient in self.roster.gradients(changed):
            self._marks[number] = id(gradient), gradient._version

    def skip(self, changed: list[int]) -> None:
        """These have changed, and are not measured."""
        self._used.update(changed)

    def at_the_step(self, numbers: list[int], again: bool) -> tuple[list[int], list[GroupNorms], list[GroupNorms]]:
        """The optimizer that holds these is about to step: those that have a gradient, norms before clipping (later
        ones count), norms now of those that are not as they were. again: measure all, to see whether versions can be
        trusted."""
        held = list(self.roster.gradients(numbers))
        unknown = [(n, g) for n, g in held if n in self._used or n not in self._marks]
        new = {n for n, _ in unknown}
        marked = {n for n, _ in held} - new
        before = [n for n in self._norms if not marked.isdisjoint(n.numbers)] + group_norms(unknown, self.wide)
        every = again or not self.trusted
        changed = [(n, g) for n, g in held if n not in new and (every or self._marks[n] != (id(g), g._version))]
        return [n for n, _ in held], before, group_norms(changed, self.wide)

    def unmarked(self, numbers: list[int]) -> set[int]:
        """Those of which a changed norm would not be known without measuring again."""
        return {n for n, g in self.roster.gradients(numbers) if self._marks.get(n) == (id(g), g._version)}

    def written(self, numbers: list[int]) -> list[tuple[int, Any]]:
        """Those that something has written into since the last backward, as far as that is known."""
        known = [(n, g) for n, g in self.roster.gradients(numbers) if n not in self._used and n in self._marks]
        return known if not self.trusted else [(n, g) for n, g in known if self._marks[n] != (id(g), g._version)]

    def used(self, numbers: list[int]) -> None:
        """The optimizer has stepped with these."""
        self._used.update(numbers)
        self._norms = [n for n in self._norms if not self._used.issuperset(n.numbers)]

    def forget(self) -> None:
        self._before, self._marks, self._norms = {}, {}, []


def calling_scaler(frame: Any) -> Any:
    """The GradScaler in whose `step` an optimizer steps, found in the frames around; None where there is none."""
    for _ in range(16):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in ("step", "_maybe_opt_step") and code.co_filename.endswith("grad_scaler.py"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


class Updates:
    """Copies of one optimizer's weights while it steps. full: a device had no room for them; no more are made."""

    def __init__(self, roster: WatchedParameters):
        self.roster, self.full = roster, False
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._weights: list[GroupNorms] = []

    def before(self, numbers: list[int]) -> None:
        """The optimizer that holds these is about to step."""
        self.forget()
        if self.full:
            return
        try:
            now = [(n, plain_values(self.roster.parameters[n])) for n in numbers]
            copies = [torch.empty_like(p, memory_format=torch.preserve_format) for _, p in now]
            for group in _same_kind([p for _, p in now]):
                torch._foreach_copy_([copies[i] for i in group], [now[i][1] for i in group])
            self._copies = [(n, copy) for (n, _), copy in zip(now, copies)]
            self._weights = group_norms(self._copies)
        except torch.OutOfMemoryError:
            self.full = True
            self.forget()

    def after(self) -> tuple[list[GroupNorms], list[GroupNorms]]:
        """The optimizer has stepped: norms of the weights before, and of what the step has added."""
        weights, copies = self._weights, self._copies
        for group in _same_kind([copy for _, copy in copies]):
            now = [plain_values(self.roster.parameters[copies[i][0]]) for i in group]
            torch._foreach_sub_([copies[i][1] for i in group], now)
        moved = group_norms(copies)
        self.forget()
        return weights, moved

    def forget(self) -> None:
        self._copies, self._weights = [], []


def _same_kind(tensors: list[Any]) -> list[list[int]]:
    """Places of tensors of one device and dtype each: fused kernels take no mixture."""
    groups: dict[tuple, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(groups.values())


BATCHES, VALUES = 3, 100
"""Batches, and values in them, before a unit is judged."""
_LAST = 8
_MOSTLY = 0.8
"""A unit is saturated when this share of its values is."""
_FLAT: dict[type, Callable[[Any, Any], torch.Tensor]] = {
    nn.Tanh: lambda module, y: y.abs() > 0.995,
    nn.Sigmoid: lambda module, y: y * (1 - y) < 0.0025,
    nn.Softsign: lambda module, y: y.abs() > 0.9,
    nn.Hardtanh: lambda module, y: (y <= module.min_val) | (y >= module.max_val),
    nn.Hardsigmoid: lambda module, y: (y <= 0) | (y >= 1),
}
_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


@dataclasses.dataclass(frozen=True)
class LayerUnits:
    """One activation module. feeds: the layer before it, by name. share: of its units that are dead (kind "dead") or
    saturated ("saturated"), in the last sampled batches; batches: how many these are."""

    module: str
    type: str
    kind: str
    feeds: str
    units: int
    share: float
    batches: int


class UnitWatch:
    """The activation modules between a model's first and last layer. error_boundary: calls something of ours, and
    keeps its faults from the training; due: the step, if its units are sampled. why_not: why none are, or ""."""

    def __init__(self, models: Mapping[str, nn.Module], error_boundary: Callable, due: Callable[[], int | None]):
        self.error_boundary, self.due = error_boundary, due
        self._modules: dict[str, tuple[nn.Module, str, bool]] = {}
        self._masks: dict[tuple[str, int], collections.deque] = {}
        self._handles: list[Any] = []
        self.seen: list[LayerUnits] = []
        self.why_not = ""
        modules = [m for model in models.values() for m in model.modules()]
        if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
            self.why_not = "the model is compiled: its activations can't be seen"
            return
        names = ModuleNames(models)
        for model in models.values():
            self._find(list(model.modules()), names)
        if models and not self._modules:
            self.why_not = (
                "the model has no activation modules such as nn.ReLU between its layers (F.relu is not "
                "seen here; nbdebug.diagnose sees it)"
            )

    def _find(self, modules: list[nn.Module], names: ModuleNames) -> None:
        layers = [i for i, m in enumerate(modules) if any(p.dim() > 1 for p in m._parameters.values() if p is not None)]
        for place, module in enumerate(modules):
            if not isinstance(module, (nn.ReLU, nn.ReLU6, *_FLAT)) or not layers or place > layers[-1]:
                continue  # the last activation is the model's answer: it may saturate
            before = [m for m in modules[:place] if any(p is not None for p in m._parameters.values())]
            first = bool(before) and isinstance(before[-1], _CHANNELS_FIRST)
            feeds = next((names.of(modules[i]) or "" for i in reversed(layers) if i < place), "")
            self._modules.setdefault(names.of(module) or "", (module, feeds, first))

    def attach(self) -> None:
        self._handles = [
            module.register_forward_hook(ModelHook(self, "ran", name)) for name, (module, _, _) in self._modules.items()
        ]

    def detach(self) -> None:
        """Leave the modules, and hold plain numbers only."""
        while self._handles:
            self._handles.pop().remove()

    def ran(self, name: str, args: tuple, output: Any) -> None:
        """An activation module has run."""
        step = self.due()
        if step is None or not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() < 2:
            return
        if not torch.is_grad_enabled() or not output.requires_grad or is_capturing_graph():
            return
        module, _, first = self._modules[name]
        with unobserved():
            values = output.detach()
            by_unit = values.movedim(1 if first else -1, 0).flatten(1)
            flat = next((test for kind, test in _FLAT.items() if isinstance(module, kind)), None)
            dead = isinstance(module, nn.ReLU6) or flat is None  # ReLU6 is a Hardtanh
            mask = (by_unit > 0).any(1) if dead or flat is None else flat(module, by_unit).float().mean(1)
            self._note(name, step, mask, by_unit.shape[1])

    def _note(self, name: str, step: int, mask: torch.Tensor, values: int) -> None:
        """Several calls within one step count as one batch."""
        masks = self._masks.setdefault((name, mask.numel()), collections.deque(maxlen=_LAST))
        if masks and masks[-1][0] == step:
            _, before, more = masks.pop()
            mask = before | mask if mask.dtype is torch.bool else (before * more + mask * values) / (more + values)
            values += more
        masks.append((step, mask, values))

    def read(self) -> list[LayerUnits]:
        """What the last batches showed, of modules that were sampled in enough of them; waits for the device."""
        results = []
        for (name, units), samples in self._masks.items():
            module, feeds, _ = self._modules[name]
            if len(samples) < BATCHES or sum(values for _, _, values in samples) < VALUES:
                continue
            masks = torch.stack([mask for _, mask, _ in samples])
            dead = masks.dtype is torch.bool
            share = float((~masks.any(0)).float().mean() if dead else (masks.mean(0) >= _MOSTLY).float().mean())
            results.append(
                LayerUnits(
                    name, type(module).__name__, "dead" if dead else "saturated", feeds, units, share, len(samples)
                )
            )
        self.seen = results
        return results

    def forget(self) -> None:
        """Hold no module and no mask any more; `seen` stays."""
        self.detach()
        self._masks.clear()
        self._modules.clear()
