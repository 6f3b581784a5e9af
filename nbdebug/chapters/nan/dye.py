"""Which results of an op come from which of its bad operands?

As a plumber finds a leak: dye the suspect, run the water, look where the colour comes out. The op is run once more with
NaN at the suspect elements and ordinary numbers in place of all other bad ones; results that are NaN then are those
that the suspect reaches. This follows any op, matrix products and attention included, with no table of ops. Elementwise
ops need no second run: the mask is broadcast. Where an op can't be run again (random, or it refuses NaN) every suspect
reaches everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nbdebug.observe.schema import Schema
from nbdebug.observe.tensors import can_be_bad, dense, finite

_CHOOSES = frozenset({"where", "masked_fill", "masked_scatter", "fmax", "fmin", "copysign", "nan_to_num"})
"""Elementwise ops that drop an operand at some elements: a broadcast mask would accuse what was dropped."""


class Dye:
    """One op, its operands as they were before it ran, and the result to be explained.

    written: {id of an argument: its value before the op}, for arguments that the op changed.
    pick: takes the result of another run to the tensor that matters.
    """

    def __init__(
        self,
        func: Any,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        written: dict[int, torch.Tensor],
        pick: Callable[[Any, tuple, dict], torch.Tensor],
        shape: torch.Size,
    ):
        self.func, self.schema, self.args, self.kwargs = func, schema, args, kwargs
        self.written, self.pick, self.shape = written, pick, shape

    def reach(self, suspects: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Mask of the results that the suspects reach; None for all. suspects: {id of an operand: bool mask}."""
        if self.func.namespace != "aten":  # it may talk to other processes, or have other effects
            return None
        if self.schema.pointwise and self.schema.base not in _CHOOSES:
            return self._broadcast(suspects)
        if self.schema.random:
            same = all(mask.shape == self.shape for mask in suspects.values())
            return self._broadcast(suspects) if same else None
        try:
            return self._run(suspects)
        except Exception:  # the op refuses NaN, or its arguments in this form: no telling
            return None

    def _broadcast(self, suspects: dict[int, torch.Tensor]) -> torch.Tensor | None:
        try:
            masks = [mask.broadcast_to(self.shape) for mask in suspects.values()]
        except RuntimeError:
            return None
        total = masks[0].clone()
        for mask in masks[1:]:
            total |= mask
        return total

    def _run(self, suspects: dict[int, torch.Tensor]) -> torch.Tensor:
        made: dict[int, torch.Tensor] = {}

        def dyed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                made[id(value)] = self._dyed(value, suspects.get(id(value)))
            return made[id(value)]

        args, kwargs = tree_map(dyed, self.args), tree_map(dyed, self.kwargs)
        with torch.no_grad():
            return torch.isnan(self.pick(self.func(*args, **kwargs), args, kwargs))

    def _dyed(self, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        before = self.written.get(id(value), value)
        inner = dense(before)
        if inner is None or not can_be_bad(inner):
            return before.clone() if id(value) in self.written else before
        if before.layout is not torch.strided:
            raise TypeError("sparse")
        clean = torch.where(finite(before), before, torch.ones((), dtype=before.dtype, device=before.device))
        return clean if mask is None else clean.masked_fill_(mask, float("nan"))
