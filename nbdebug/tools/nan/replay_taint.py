"""Taint in a replay of which a scan has told already which results are bad (`suspects.py`), with few device reads.

Each look at a value makes an accelerator wait. So most results are not looked at: those that are known to be finite,
and those of ops whose bad operands all have a single origin: it is assumed that the results only carry it on. The
assumptions are computed on the device and read once, at the end (`holds`); if one is wrong, the replay is worth
nothing, and another one has to look at everything. In the forward, a result may be bad only in rows where an operand
was; one that has other rows than its operands must be finite once they are repaired. In backward it is enough that an
operand is bad.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Hashable
from typing import Any

import torch

from nbdebug.observe.ops import Schema
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import (
    can_be_nonfinite,
    dense,
    finite,
    optional_storage_key,
    read_scalars,
    storage_key,
    walk_tensors,
)
from nbdebug.tools.nan.origins import EMPTIES, Overwritten
from nbdebug.tools.nan.suspects import OpKeys, Suspects
from nbdebug.tools.nan.taint import ABSORBERS, COMPARES, TaintedStorage, TaintTracker, results_of

_NOTED = COMPARES | ABSORBERS | {"mul"}
"""Ops whose use of bad values is noted even where nothing bad comes out."""
_NONE: frozenset[int] = frozenset()
_ANY: frozenset[int] = frozenset({-1})
"""No telling which result is bad."""


class ReplayTaintTracker(TaintTracker):
    """suspects: what the scan has found. exact: look at the bad results all the same. in_backward: to be set while
    backward runs. replayed: the suspects that have run."""

    def __init__(self, recorder: Recorder, suspects: Suspects, exact: bool):
        super().__init__(recorder)
        self.suspects, self.exact, self.in_backward = suspects, exact, False
        self.replayed: list[Hashable] = []
        self._keys = OpKeys()
        self._bad = _NONE
        # what is assumed: sizes by rows (where the first is bad, so is the second), sizes that are bad, that are finite
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bad_sizes: list[torch.Tensor] = []
        self._finite_sizes: list[torch.Tensor] = []
        if not exact:
            self.recent = collections.deque(maxlen=0)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, Overwritten]:
        if self.in_backward and not self.suspects.complete:
            at = self.suspects.born_at
            self._bad = _ANY if op.forward is not None and op.forward.index == at else _NONE
        else:
            name = self._keys.next(op.forward, schema.base) if self.in_backward else op.index
            self._bad = self.suspects.results.get(name, _NONE)
            if self._bad:
                self.replayed.append(name)
        needed = self._bad or (self.storages and (self.exact or schema.base in _NOTED))
        if not schema.writes or not needed:
            return {}
        with torch.no_grad():
            return super().before(op, schema, args, kwargs)

    def after(
        self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, overwritten: dict[int, Overwritten]
    ) -> None:
        if schema.view and not schema.writes:
            return
        if not self._bad and not self.storages:
            return
        with torch.no_grad():
            if not self._bad:
                self._all_finite(op, schema, args, kwargs, out, overwritten)
            elif self.exact or self._bad is _ANY or not self._carry_on(op, schema, args, kwargs, out):
                super().after(op, schema, args, kwargs, out, overwritten)

    def _all_finite(
        self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, overwritten: dict[int, Overwritten]
    ) -> None:
        if self.exact or schema.base in _NOTED:
            operands = self._operand_masks(args, kwargs, overwritten)
            if operands:
                self._note_use(op, schema, args, operands)
                self._note_absorbed(op, schema, operands, set())
        for _, tensor in results_of(schema, args, kwargs, out):
            if (
                optional_storage_key(tensor) in self.storages
                and (values := dense(tensor)) is not None
                and can_be_nonfinite(values)
            ):
                self._clear(values)

    def _carry_on(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any) -> bool:
        """Give the bad results the origin of the operands; False where that takes a look."""
        storages = [
            (t, self.storages.get(optional_storage_key(t) or 0)) for _, t in walk_tensors((*args, *kwargs.values()))
        ]
        operands = [t for t, storage in storages if storage is not None]
        origins = {origin for _, storage in storages if storage is not None for origin in storage.origins}
        if len(origins) != 1 or schema.writes or schema.base in EMPTIES:
            return False
        origin = self.origins[index := origins.pop()]
        results = [t for n, (_, t) in enumerate(results_of(schema, args, kwargs, out)) if n in self._bad]
        if origin.intended or origin.storage is not None or not all(map(_is_plain, (*operands, *results))):
            return False
        if not self._assume(op, schema, args, kwargs, operands, results):
            return False
        self._note_use(op, schema, args, {id(t): {index: t} for t in operands})
        for result in results:
            self._write_lone(result, index)
            if (origin.rows is None or origin.made != "nan") and self.origins.batch_size:
                self.origins.note_rows(index, ~finite(result), op)
        self.last_bad = {index}
        self.modules.add(op.module)
        return True

    def _assume(
        self,
        op: Op,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        operands: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> bool:
        """Note what must hold if the results carry on what the operands have; False where that can't be said."""
        if self.in_backward:
            self._bad_sizes.append(_worst([_sizes(t, ()) for t in operands]))
            return True
        rows, others = [], False
        for result in results:
            alike = [t for t in operands if t.dim() and result.dim() and len(t) == len(result)]
            if alike:
                rows.append((_sizes(result, (0,)), _worst([_sizes(t, (0,)) for t in alike])))
            others = others or not alike
        if others:
            repaired = _repaired(op, schema, args, kwargs, operands)
            if repaired is None:
                return False
            self._finite_sizes += [_sizes(t, ()) for n, t in enumerate(repaired) if n in self._bad]
        self._rows += rows
        return True

    def _write_lone(self, values: torch.Tensor, origin: int) -> None:
        storage = self.storages.get(storage_key(values))
        if storage is None or values.numel() == storage.elements:
            self.storages[storage_key(values)] = TaintedStorage(values, origin)
        elif storage.lone != origin:
            self._write(values, {origin: ~finite(values)})

    def holds(self) -> bool:
        """Whether all that was assumed is so; to be called at the end: it waits for the device."""
        alike: dict[tuple, list[tuple[torch.Tensor, torch.Tensor]]] = collections.defaultdict(list)
        for result, operand in self._rows:
            alike[result.device, result.shape, result.dtype, operand.dtype].append((result, operand))
        wrong = []
        for pairs in alike.values():
            results, operands = (torch.stack(group) for group in zip(*pairs, strict=True))
            wrong.append((torch.isfinite(operands) & ~torch.isfinite(results)).any())
        values = read_scalars([*wrong, *self._bad_sizes, *self._finite_sizes])
        sizes = values[len(wrong) :]
        bad, sound = sizes[: len(self._bad_sizes)], sizes[len(self._bad_sizes) :]
        return not any(values[: len(wrong)]) and not any(map(math.isfinite, bad)) and all(map(math.isfinite, sound))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.element_size() > 1 and dense(tensor) is tensor


def _sizes(values: torch.Tensor, kept_dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitudes along the dimension that is kept (or of all); NaN goes through."""
    others = tuple(d for d in range(values.dim()) if d not in kept_dims)
    return torch.linalg.vector_norm(values.detach(), math.inf, dim=others) if others else values.detach().abs()


def _worst(sizes: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.maximum, sizes)


def _repaired(
    op: Op, schema: Schema, args: tuple, kwargs: dict, operands: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    """What the op gives with 1 in place of all that is bad in its operands; None where it can't be run once more."""
    if schema.random or op.func.namespace != "aten":
        return None
    clean = {id(t): torch.nan_to_num(t, 1.0, 1.0, 1.0) for t in operands}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([swap(v) for v in value])
        return clean.get(id(value), value)

    try:
        args, kwargs = swap(args), {k: swap(v) for k, v in kwargs.items()}
        return [t for _, t in results_of(schema, args, kwargs, op.func(*args, **kwargs))]
    except Exception:  # the op refuses its arguments in this form
        return None
