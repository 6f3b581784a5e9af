"""The books of bad values, in a replay of which a scout has told already which results are bad.

Each look at a value makes an accelerator wait. So most results are not looked at: those that are known to be finite,
and those that can only carry on the values of a single birth, because no op but that one made something bad of sound
operands. For the latter it is assumed that all their bad elements come from it. What this takes for granted (in the
forward, that the result is bad only in rows where an operand was) is computed on the device, and read once, at the end:
if it does not hold, the replay is worth nothing, and another one has to look at everything.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from nbdebug.chapters.nan.births import EMPTIES
from nbdebug.chapters.nan.flow import ABSORBERS, COMPARES, Flow, results_of
from nbdebug.chapters.nan.scout import Keys
from nbdebug.chapters.nan.spoiled import Spoiled
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.schema import Schema
from nbdebug.observe.tensors import can_be_bad, dense, finite, key, memory_key, read, walk

_ASKED = COMPARES | ABSORBERS | {"mul"}
"""Ops that the books take note of even where nothing bad comes out."""
_NOTHING: frozenset[int] = frozenset()


class _Assumed(NamedTuple):
    """Sizes, row by row, of a bad result, and of an operand with as many rows; in backward of the operand alone."""

    result: torch.Tensor | None
    operand: torch.Tensor

    def wrong(self) -> torch.Tensor:
        sound = torch.isfinite(self.operand)
        return sound if self.result is None else (sound & ~torch.isfinite(self.result)).any()


class ScoutedFlow(Flow):
    """suspects: the bad results of each op that has any. exact: look at those all the same. in_backward: to be set
    while backward runs. met: the suspects that have run."""

    def __init__(self, recorder: Recorder, take_scene: Any, suspects: Mapping[Hashable, frozenset[int]], exact: bool):
        super().__init__(recorder, take_scene)
        self.suspects, self.exact, self.in_backward = suspects, exact, False
        self.met: list[Hashable] = []
        self._keys = Keys()
        self._bad = _NOTHING
        self._assumed: list[list[_Assumed]] = []
        if not exact:
            self.recent = collections.deque(maxlen=0)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, tuple]:
        name = self._keys.next(op.forward, schema.base) if self.in_backward else op.index
        self._bad = self.suspects.get(name, _NOTHING)
        if self._bad:
            self.met.append(name)
        wanted = self._bad or (self.spoiled and (self.exact or schema.base in _ASKED))
        return super().before(op, schema, args, kwargs) if schema.writes and wanted else {}

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if schema.view and not schema.writes:
            return
        if not self._bad:
            if self.spoiled:
                self._nothing_bad(op, schema, args, kwargs, out, kept)
        elif self.exact or not self._carried_on(op, schema, args, kwargs, out):
            super().after(op, schema, args, kwargs, out, kept)

    def _nothing_bad(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if self.exact or schema.base in _ASKED:
            suspects = self._suspects(args, kwargs, kept)
            if suspects:
                self._note_use(op, schema, args, suspects)
                self._note_absorbed(op, schema, suspects, set())
        for _, tensor in results_of(schema, args, kwargs, out):
            if memory_key(tensor) in self.spoiled and (values := dense(tensor)) is not None and can_be_bad(values):
                self._clear(values)

    def _carried_on(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any) -> bool:
        """Enter the bad results as carrying on what the operands have; False where that takes a look."""
        held = [(t, self.spoiled.get(memory_key(t) or 0)) for _, t in walk((*args, *kwargs.values()))]
        operands = [t for t, spoiled in held if spoiled is not None]
        births = {b for _, spoiled in held if spoiled is not None for b in spoiled.births}
        if len(births) != 1 or schema.writes or schema.base in EMPTIES:
            return False
        record = self.births[only := births.pop()]
        results = [t for n, (_, t) in enumerate(results_of(schema, args, kwargs, out)) if n in self._bad]
        if record.intended or record.memory is not None or not all(map(_plain, (*operands, *results))):
            return False
        assumed = [self._assume(op, operands, result) for result in results]
        if not all(assumed):
            return False
        self._assumed += assumed
        self._note_use(op, schema, args, {id(t): {only: t} for t in operands})
        for result in results:
            self._lone(result, only)
            if record.rows is None and self.births.batch_size:
                self.births.learn_rows(only, ~finite(result), op)
        self.last_bad = {only}
        self.touched.add(op.module)
        return True

    def _assume(self, op: Op, operands: list[torch.Tensor], result: torch.Tensor) -> list[_Assumed]:
        """What must hold of one of the operands; [] where that can't be said of any."""
        if self.in_backward:
            return [_Assumed(None, _sizes(t, ())) for t in operands]
        alike = [t for t in operands if t.dim() and result.dim() and len(t) == len(result)]
        return [_Assumed(_sizes(result, (0,)), _sizes(t, (0,))) for t in alike]

    def _lone(self, values: torch.Tensor, birth: int) -> None:
        held = self.spoiled.get(key(values))
        if held is None or values.numel() == held.elements:
            self.spoiled[key(values)] = Spoiled(values, birth)
        elif held.lone != birth:
            self._write(values, {birth: ~finite(values)})

    def holds(self) -> bool:
        """Whether all that was assumed is so; to be asked at the end: it waits for the device."""
        flat = [one for alternatives in self._assumed for one in alternatives]
        wrong = read([one.wrong() for one in flat])
        true = {id(one) for one, bad in zip(flat, wrong, strict=True) if not bad}
        return all(any(id(one) in true for one in alternatives) for alternatives in self._assumed)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.element_size() > 1 and dense(tensor) is tensor


def _sizes(values: torch.Tensor, kept: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitudes along the dimension that is kept (or of all); NaN goes through."""
    others = tuple(d for d in range(values.dim()) if d not in kept)
    return torch.linalg.vector_norm(values.detach(), math.inf, dim=others) if others else values.detach().abs()
