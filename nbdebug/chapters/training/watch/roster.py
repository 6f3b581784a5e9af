"""The parameters that are watched: each has a number, a name, and the module that it belongs to.

Names are those of the models. A parameter that only an optimizer holds is called by its place there; one that only the
model holds is no part of the training, and is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.training.watch.norms import can_be_measured
from nbdebug.observe.modules import ModuleNames


class Roster:
    """names, layers, sizes: of each parameter by its number; parameters: they themselves, until `forget`. optimizers
    are asked again at each step: groups may be added, and lazy parameters get their shape late."""

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
        found = []
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                number = self._numbers.get(id(parameter))
                if number is None:
                    if not can_be_measured(parameter) or _lazy(parameter):
                        self.odd.add(id(parameter))
                        continue
                    number = self._add(parameter, self._place(parameter, optimizer, group, place))
                found.append(number)
        self._held[id(optimizer)] = found
        return found

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


def _lazy(parameter: Any) -> bool:
    return bool(torch.nn.parameter.is_lazy(parameter))
