"""The books of bad values, in a replay of which a scout has told already which results are bad.

Each look at a value makes an accelerator wait. So most results are not looked at: those that are known to be finite,
and those of ops whose bad operands all come from a single birth: it is assumed that the results only carry them on.
What this takes for granted is computed on the device, and read once, at the end; if it does not hold, the replay is
worth nothing, and another one has to look at everything. In the forward, a result may be bad only in rows where an
operand was; one that has other rows than its operands must be finite once they are mended. In backward it is enough
that an operand is bad.
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
from nbdebug.tools.nan.origins import EMPTIES
from nbdebug.tools.nan.suspects import Keys, Suspects
from nbdebug.tools.nan.taint import ABSORBERS, COMPARES, TaintedStorage, TaintTracker, results_of

_ASKED = COMPARES | ABSORBERS | {"mul"}
"""Ops that the books take note of even where nothing bad comes out."""
_NOTHING: frozenset[int] = frozenset()
_ANY: frozenset[int] = frozenset({-1})
"""No telling which result is bad."""


class ReplayTaintTracker(TaintTracker):
    """sighted: what the scout saw. exact: look at the bad results all the same. in_backward: to be set while backward
    runs. met: the suspects that have run."""

    def __init__(self, recorder: Recorder, take_scene: Any, sighted: Suspects, exact: bool):
        super().__init__(recorder, take_scene)
        self.sighted, self.exact, self.in_backward = sighted, exact, False
        self.met: list[Hashable] = []
        self._keys = Keys()
        self._bad = _NOTHING
        # what is assumed: sizes by rows (where the first is bad, so is the second), sizes that are bad, that are finite
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bad_sizes: list[torch.Tensor] = []
        self._finite_sizes: list[torch.Tensor] = []
        if not exact:
            self.recent = collections.deque(maxlen=0)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, tuple]:
        if self.in_backward and not self.sighted.whole:
            at = self.sighted.born_at
            self._bad = _ANY if op.forward is not None and op.forward.index == at else _NOTHING
        else:
            name = self._keys.next(op.forward, schema.base) if self.in_backward else op.index
            self._bad = self.sighted.suspects.get(name, _NOTHING)
            if self._bad:
                self.met.append(name)
        wanted = self._bad or (self.spoiled and (self.exact or schema.base in _ASKED))
        if not schema.writes or not wanted:
            return {}
        with torch.no_grad():
            return super().before(op, schema, args, kwargs)

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if schema.view and not schema.writes:
            return
        if not self._bad and not self.spoiled:
            return
        with torch.no_grad():
            if not self._bad:
                self._nothing_bad(op, schema, args, kwargs, out, kept)
            elif self.exact or self._bad is _ANY or not self._carried_on(op, schema, args, kwargs, out):
                super().after(op, schema, args, kwargs, out, kept)

    def _nothing_bad(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if self.exact or schema.base in _ASKED:
            suspects = self._suspects(args, kwargs, kept)
            if suspects:
                self._note_use(op, schema, args, suspects)
                self._note_absorbed(op, schema, suspects, set())
        for _, tensor in results_of(schema, args, kwargs, out):
            if (
                optional_storage_key(tensor) in self.spoiled
                and (values := dense(tensor)) is not None
                and can_be_nonfinite(values)
            ):
                self._clear(values)

    def _carried_on(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any) -> bool:
        """Enter the bad results as carrying on what the operands have; False where that takes a look."""
        held = [(t, self.spoiled.get(optional_storage_key(t) or 0)) for _, t in walk_tensors((*args, *kwargs.values()))]
        operands = [t for t, spoiled in held if spoiled is not None]
        births = {b for _, spoiled in held if spoiled is not None for b in spoiled.births}
        if len(births) != 1 or schema.writes or schema.base in EMPTIES:
            return False
        record = self.births[only := births.pop()]
        results = [t for n, (_, t) in enumerate(results_of(schema, args, kwargs, out)) if n in self._bad]
        if record.intended or record.memory is not None or not all(map(_plain, (*operands, *results))):
            return False
        if not self._assume(op, schema, args, kwargs, operands, results):
            return False
        self._note_use(op, schema, args, {id(t): {only: t} for t in operands})
        for result in results:
            self._lone(result, only)
            if record.rows is None and self.births.batch_size:
                self.births.learn_rows(only, ~finite(result), op)
        self.last_bad = {only}
        self.touched.add(op.module)
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
            mended = _mended(op, schema, args, kwargs, operands)
            if mended is None:
                return False
            self._finite_sizes += [_sizes(t, ()) for n, t in enumerate(mended) if n in self._bad]
        self._rows += rows
        return True

    def _lone(self, values: torch.Tensor, birth: int) -> None:
        held = self.spoiled.get(storage_key(values))
        if held is None or values.numel() == held.elements:
            self.spoiled[storage_key(values)] = TaintedStorage(values, birth)
        elif held.lone != birth:
            self._write(values, {birth: ~finite(values)})

    def holds(self) -> bool:
        """Whether all that was assumed is so; to be asked at the end: it waits for the device."""
        alike: dict[tuple, list[tuple[torch.Tensor, torch.Tensor]]] = collections.defaultdict(list)
        for result, operand in self._rows:
            alike[result.device, result.shape, result.dtype, operand.dtype].append((result, operand))
        wrong = []
        for pairs in alike.values():
            results, operands = (torch.stack(group) for group in zip(*pairs, strict=True))
            wrong.append((torch.isfinite(operands) & ~torch.isfinite(results)).any())
        read_now = read_scalars([*wrong, *self._bad_sizes, *self._finite_sizes])
        sizes = read_now[len(wrong) :]
        bad, sound = sizes[: len(self._bad_sizes)], sizes[len(self._bad_sizes) :]
        return not any(read_now[: len(wrong)]) and not any(map(math.isfinite, bad)) and all(map(math.isfinite, sound))


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.element_size() > 1 and dense(tensor) is tensor


def _sizes(values: torch.Tensor, kept: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitudes along the dimension that is kept (or of all); NaN goes through."""
    others = tuple(d for d in range(values.dim()) if d not in kept)
    return torch.linalg.vector_norm(values.detach(), math.inf, dim=others) if others else values.detach().abs()


def _worst(sizes: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.maximum, sizes)


def _mended(
    op: Op, schema: Schema, args: tuple, kwargs: dict, operands: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    """What the op gives when ones stand for all that is bad in its operands; None where it can't be run once more."""
    if schema.random or op.func.namespace != "aten":
        return None
    mended = {id(t): torch.nan_to_num(t, 1.0, 1.0, 1.0) for t in operands}

    def swapped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([swapped(v) for v in value])
        return mended.get(id(value), value)

    try:
        args, kwargs = swapped(args), {k: swapped(v) for k, v in kwargs.items()}
        return [t for _, t in results_of(schema, args, kwargs, op.func(*args, **kwargs))]
    except Exception:  # the op refuses its arguments in this form
        return None
