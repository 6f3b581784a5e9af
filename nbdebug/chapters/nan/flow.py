"""Where did each bad value come from?

Every inf or NaN has a birth: an op whose operands were finite there, or an op that made a NaN of an inf. From then on the
value travels. For each memory that holds bad values this keeps, per birth, a mask of the elements that come from it; so a
value that something absorbs on the way (a softmax, a `where`, a clamp) is gone from the books, and what reaches the loss
leads back to its births and to nothing else.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import torch

from nbdebug.chapters.nan.dye import Dye
from nbdebug.observe.record import Op, Recorder, Schema, named_arguments
from nbdebug.observe.tensors import INPUT, PARAMETER, Memory, all_finite, can_be_bad, dense, finite, folds_of, key, rows_of, walk

_FILLS = frozenset({"fill", "masked_fill", "full", "full_like", "new_full", "scalar_tensor", "constant_pad_nd", "lift_fresh"})
_EMPTIES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_LOGS = frozenset({"log", "log2", "log10"})
_COMPARES = frozenset({"eq", "ne", "isnan", "isinf", "isposinf", "isneginf", "lt", "gt", "le", "ge", "local_scalar_dense"})
_ABSORBERS = frozenset({"where", "masked_fill", "index", "index_select", "gather", "masked_select", "select", "slice",
                        "nan_to_num", "masked_scatter", "index_put"})
_MANY = 64
"""A step with more births than this has gone bad everywhere; the first ones tell why."""


class Record:
    """A birth, as the books keep it. op is None for a tensor that came bad from outside: then memory tells of it, and
    readers are the ops that used it. trail: (op, rows) wherever it then showed. segment: how many backwards had run before, in this step. factors: ranges (low, high) of the parameter-free factors that it was multiplied by.
    after_model: born after the model had returned."""

    __slots__ = ("absorbed_by", "after_model", "bad", "custom", "dtype", "factors", "index", "intended", "made", "memory",
                 "numbers", "op", "parents", "readers", "rows", "segment", "shape", "step", "trail", "whole")

    def __init__(self, index: int, op: Op | None, made: str, step: int):
        self.index, self.op, self.made, self.step = index, op, made, step
        self.parents: set[int] = set()
        self.rows: tuple[int, ...] | None = None
        self.memory: Memory | None = None
        self.readers: list[Op] = []
        self.trail: list[tuple[int, tuple[int, ...]]] = []
        self.segment = 0
        self.intended = self.whole = self.custom = self.after_model = False
        self.absorbed_by: set[str] = set()
        self.factors: list[tuple[float, float]] = []
        self.numbers: Any = None


class Spoiled:
    """A memory that holds bad values: one mask over all its elements for each birth that they come from."""

    __slots__ = ("elements", "masks", "size")

    def __init__(self, values: torch.Tensor):
        self.size = values.element_size()
        self.elements = values.untyped_storage().nbytes() // self.size
        self.masks: dict[int, torch.Tensor] = {}

    def view(self, flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The part of a mask that `values` shows."""
        if values.element_size() != self.size:  # seen as another dtype: complex as real, or bytes
            ratio = values.element_size() / self.size
            flat = flat.repeat_interleave(int(1 / ratio)) if ratio < 1 else flat.view(-1, int(ratio)).any(1)
        return flat.as_strided(values.shape, values.stride(), values.storage_offset())


class Flow:
    """A watcher: keeps the books of bad values, op by op. `births` are in the order in which they came."""

    def __init__(self, recorder: Recorder, take_scene: Any):
        self.recorder, self.take_scene = recorder, take_scene
        self.births: list[Record] = []
        self.spoiled: dict[int, Spoiled] = {}
        self.batch: int | None = None
        self.folds: set[int] = set()
        self.leading: collections.Counter[int] = collections.Counter()
        self.model_returned = False
        self.segment = 0
        self.checked = False  # the user's code looked whether something bad was finite
        self.last_read: set[int] = set()
        self.last_bad: set[int] = set()
        self.touched: set[str] = set()  # modules that bad values went through

    # -- what the recorder calls ------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, tuple]:
        """Keep what the op is about to overwrite: value, masks, maker."""
        if not schema.writes:
            return {}
        kept = {}
        for name, value in named_arguments(schema, args, kwargs):
            if name in schema.writes:
                for _, tensor in walk((value,)):
                    values = dense(tensor)
                    if values is not None and values.device.type != "meta":
                        memory = self.recorder.memories[key(values)]
                        kept[id(tensor)] = (tensor.clone(), self.masks(values), memory.maker, memory.reach)
        return kept

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if schema.view and not schema.writes:
            return
        suspects = self._suspects(args, kwargs, kept) if self.spoiled else {}
        for birth in {b for masks in suspects.values() for b in masks}:
            if self.births[birth].memory is not None and len(self.births[birth].readers) < _MANY:
                self.births[birth].readers.append(op)
        if suspects and schema.base in _COMPARES:
            self.checked = self.checked or op.during == "forward"
            self.last_read = {b for masks in suspects.values() for b in masks}
        if suspects and schema.base == "mul":
            self._note_factors(args, suspects)
        made: set[int] = set()
        for index, tensor in self._results(schema, args, kwargs, out):
            values = dense(tensor)
            if values is None or not can_be_bad(values):
                continue
            if all_finite(values):
                self._clear(values)
                continue
            origins = self._explain(op, schema, args, kwargs, kept, suspects, index, tensor)
            self._write(values, origins)
            made |= origins.keys()
        if made:
            self.last_bad = made
            self.touched.add(op.module)
        if suspects and op.during == "forward" and schema.base in _ABSORBERS:
            for masks in suspects.values():
                for birth in masks.keys() - made:
                    self.births[birth].absorbed_by.add(schema.base)

    def _note_factors(self, args: tuple, suspects: dict) -> None:
        for _, factor in walk(args):
            memory = self.recorder.memory(factor)
            free = memory is not None and not memory.reach & (PARAMETER | INPUT) and memory.maker is not None or (
                memory is not None and memory.role == "target")
            if id(factor) not in suspects and free and factor.numel() and not factor.is_complex():
                low, high = factor.aminmax()
                for birth in {b for masks in suspects.values() for b in masks}:
                    self.births[birth].factors.append((low.item(), high.item()))

    # -- the books ----------------------------------------------------------------------------------------------------

    def masks(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """{birth: mask of the elements of `values` that come from it}, without empty ones."""
        held = self.spoiled.get(key(values))
        if held is None:
            return {}
        seen = {b: held.view(flat, values) for b, flat in held.masks.items()}
        return {b: mask for b, mask in seen.items() if bool(mask.any())}

    def origins(self, tensor: torch.Tensor) -> set[int]:
        """The births that the bad values of a tensor come from."""
        values = dense(tensor)
        return set() if values is None else set(self.masks(values))

    def _clear(self, values: torch.Tensor) -> None:
        held = self.spoiled.get(key(values))
        if held is not None:
            self._write(values, {})

    def _write(self, values: torch.Tensor, origins: dict[int, torch.Tensor]) -> None:
        held = self.spoiled.get(key(values))
        if held is None or held.size != values.element_size():
            held = self.spoiled[key(values)] = Spoiled(values)
        for flat in held.masks.values():
            held.view(flat, values).fill_(False)
        for birth, mask in origins.items():
            flat = held.masks.setdefault(birth, torch.zeros(held.elements, dtype=torch.bool, device=values.device))
            held.view(flat, values).logical_or_(mask)
        held.masks = {b: flat for b, flat in held.masks.items() if bool(flat.any())}
        if not held.masks:
            del self.spoiled[key(values)]

    @property
    def batch_size(self) -> int | None:
        """What the model was given, or, with no model, the commonest first dimension of what came from outside."""
        if self.batch is None and self.leading:
            return self.leading.most_common(1)[0][0]
        return self.batch

    def forget_dead(self) -> None:
        """Drop the books of memories that are gone; to be called when the recorder begins a new step."""
        self.spoiled = {k: s for k, s in self.spoiled.items() if k in self.recorder.memories}
        self.checked, self.last_read, self.last_bad = False, set(), set()
        self.leading.clear()
        self.folds.clear()

    def _suspects(self, args: tuple, kwargs: dict, kept: dict[int, tuple]) -> dict[int, dict[int, torch.Tensor]]:
        """{id of an operand: {birth: mask}} for operands that hold bad values."""
        found = {}
        for _, tensor in walk((*args, *kwargs.values())):
            values = dense(tensor)
            if values is not None:
                masks = kept[id(tensor)][1] if id(tensor) in kept else self.masks(values)
                if masks:
                    found[id(tensor)] = masks
        return found

    def _results(self, schema: Schema, args: tuple, kwargs: dict, out: Any) -> list[tuple[Any, torch.Tensor]]:
        """What the op made or changed: (how to find it again in another run, tensor)."""
        results: list[tuple[Any, torch.Tensor]] = []
        for position, (name, value) in enumerate(named_arguments(schema, args, kwargs)):
            if name in schema.writes:
                for nth, (_, tensor) in enumerate(walk((value,))):
                    results.append(((name, position, nth), tensor))
        changed = {id(t) for _, t in results}
        for nth, (_, tensor) in enumerate(walk(out if isinstance(out, (list, tuple)) else (out,))):
            if id(tensor) not in changed:
                results.append(((None, 0, nth), tensor))
        return results

    # -- births -------------------------------------------------------------------------------------------------------

    def _explain(self, op: Op, schema: Schema, args: tuple, kwargs: dict, kept: dict, suspects: dict, index: Any,
                 tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        """{birth: mask} of a bad result; new births are entered."""
        values = dense(tensor)
        bad, nan = ~finite(values), torch.isnan(values)
        if schema.base in _EMPTIES or not suspects or tensor.layout is not torch.strided:
            return self._inherit_all(op, schema, args, kwargs, kept, suspects, tensor, bad, nan)
        dye = Dye(op.func, schema, args, kwargs, {i: k[0] for i, k in kept.items()}, _picker(index), tensor.shape)
        operands = {id(t): kept[id(t)][0] if id(t) in kept else t for _, t in walk((*args, *kwargs.values()))}
        nans = {i: torch.isnan(operands[i]) for i in suspects}
        infs = {i: torch.isinf(operands[i]) for i in suspects}
        from_nan, from_inf = _reached(dye, nans, bad), _reached(dye, infs, bad)
        derived = nan & ~from_nan & from_inf
        fresh = bad & ~from_nan & ~from_inf
        origins: dict[int, torch.Tensor] = {}
        parents: set[int] = set()
        births = sorted({b for masks in suspects.values() for b in masks})
        for birth in births:
            mine = bad if len(births) == 1 else _reached(dye, {i: m[birth] for i, m in suspects.items() if birth in m}, bad)
            if bool((mine & derived).any()):
                parents.add(birth)
            passed = mine & bad & ~derived & ~fresh
            if bool(passed.any()):
                origins[birth] = passed
                self._learn_rows(birth, passed, op)
        scene = (op, schema, args, kwargs, kept, tensor)
        if parents:
            origins[self._enter(scene, derived, nan, parents, infs)] = derived
        if bool(fresh.any()):
            origins |= self._born(scene, fresh, nan)
        return origins or {births[0]: bad}

    def _inherit_all(self, op: Op, schema: Schema, args: tuple, kwargs: dict, kept: dict, suspects: dict,
                     tensor: torch.Tensor, bad: torch.Tensor, nan: torch.Tensor) -> dict[int, torch.Tensor]:
        """A result with no suspects is born here; one that can't be told apart comes from all of them."""
        births = {b for masks in suspects.values() for b in masks}
        if births and schema.base not in _EMPTIES:
            return dict.fromkeys(births, bad)
        return self._born((op, schema, args, kwargs, kept, tensor), bad, nan)

    def _born(self, scene: tuple, mask: torch.Tensor, nan: torch.Tensor) -> dict[int, torch.Tensor]:
        """A birth from sound operands. An infinity written as a number (`x * -inf`) is a mask's where it stays one, and a
        fault where it makes a NaN: two births."""
        op, _, args, kwargs = scene[:4]
        infinite = any(isinstance(a, float) and math.isinf(a) for a in (*args, *kwargs.values()))
        parts = [mask & ~nan, mask & nan] if infinite else [mask]
        return {self._enter(scene, part, nan, self._of_forward(op), {}): part for part in parts if bool(part.any())}

    def _of_forward(self, op: Op) -> set[int]:
        """Births at the forward op whose derivative this one computes (its operand was already out of bounds there), or that
        it computes again."""
        if op.recomputed:
            first = [b.index for b in self.births if b.op is not None and b.step == op.step and not b.op.recomputed
                     and (b.op.site, b.op.name, b.op.module) == (op.site, op.name, op.module)]
            return set(first[:1])
        return {b.index for b in self.births if op.forward is not None and b.op is op.forward and not b.intended}

    def _enter(self, scene: tuple, mask: torch.Tensor, nan: torch.Tensor, parents: set[int], infs: dict) -> int:
        """Enter a birth in the books."""
        op, schema, args, kwargs, kept, tensor = scene
        if len(self.births) >= _MANY:
            return self.births[-1].index
        values = dense(tensor)
        birth = Record(len(self.births), op, _made(values, mask, nan), op.step)
        birth.parents = set(parents)
        birth.whole, birth.bad = bool(mask.all()), int(mask.sum())
        birth.shape, birth.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        birth.custom, birth.segment = op.custom, self.segment
        birth.after_model = self.model_returned and not self.recorder.stack.inside
        birth.rows = self._rows(mask)
        birth.numbers = self.take_scene(scene, mask, infs)
        birth.intended = self._intended(birth, schema, infs)
        self.births.append(birth)
        return birth.index

    def _intended(self, birth: Record, schema: Schema, infs: dict) -> bool:
        """A mask's infinity: written there as a number, or the log of a 0/1 tensor that no parameter reached."""
        if infs or "nan" in birth.made or birth.made == "mixed":
            return False
        if schema.base in _FILLS or any(isinstance(v, float) and math.isinf(v) for v in birth.numbers.scalars.values()):
            return True
        operand = next(iter(birth.numbers.operands), None)
        return (schema.base in _LOGS and birth.made == "-inf" and operand is not None and operand.two_valued
                and "parameter" not in operand.reached_by)

    def external(self, tensor: torch.Tensor, memory: Memory) -> None:
        """A tensor from outside is seen for the first time: is it bad already?"""
        values = dense(tensor)
        if memory.role == "target" and tensor.dim() and len(tensor) > 1:
            self.leading[len(tensor)] += 1
            self.folds |= folds_of(tensor.shape)
        if values is None or not can_be_bad(values) or all_finite(values) or self.masks(values):
            return
        bad, nan = ~finite(values), torch.isnan(values)
        birth = Record(len(self.births), None, _made(values, bad, nan), self.recorder.step)
        birth.memory, birth.segment = memory, self.segment
        birth.whole, birth.bad = bool(bad.all()), int(bad.sum())
        birth.shape, birth.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        birth.rows = self._rows(bad) if memory.role in ("input", "target") else None
        birth.numbers = self.take_scene((None, None, (), {}, {}, tensor), bad, {})
        birth.intended = _mask_like(values, bad, nan, memory.role)
        self.births.append(birth)
        self._write(values, {birth.index: bad})

    def _rows(self, mask: torch.Tensor) -> tuple[int, ...] | None:
        return rows_of(mask, self.batch_size, self.folds)

    def _learn_rows(self, birth: int, mask: torch.Tensor, op: Op) -> None:
        """Where a birth's own tensor shows no batch dimension, the first that it reaches and that has one tells the rows; of
        a tensor from outside, of which parts may be dropped on the way, every later one is noted."""
        record = self.births[birth]
        if record.memory is None and record.op.name not in _EMPTIES:
            record.rows = self._rows(mask) if record.rows is None else record.rows
        elif (record.memory is None or record.memory.role in ("input", "target")) and (rows := self._rows(mask)) is not None:
            record.trail.append((op.index, rows))

    def ancestors(self, births: set[int]) -> set[int]:
        """These births and all that they were made of."""
        found, todo = set(), list(births)
        while todo:
            birth = todo.pop()
            if birth not in found:
                found.add(birth)
                todo.extend(self.births[birth].parents)
        return found


def _picker(index: Any) -> Any:
    """How to find a result again after another run of the op."""
    name, position, nth = index

    def pick(out: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        if name is None:
            tensors = walk(out if isinstance(out, (list, tuple)) else (out,))
        else:
            tensors = walk((args[position] if position < len(args) else kwargs[name],))
        return [t for _, t in tensors][nth]

    return pick


def _reached(dye: Dye, suspects: dict[int, torch.Tensor], bad: torch.Tensor) -> torch.Tensor:
    suspects = {i: mask for i, mask in suspects.items() if bool(mask.any())}
    if not suspects:
        return torch.zeros_like(bad)
    reached = dye.reach(suspects)
    return bad if reached is None or reached.shape != bad.shape else reached & bad


def _made(values: torch.Tensor, mask: torch.Tensor, nan: torch.Tensor) -> str:
    """What came into being: "nan", "inf", "-inf", or "mixed"."""
    kinds = []
    if bool((mask & nan).any()):
        kinds.append("nan")
    if bool((mask & ~nan).any()):
        real = values.real if values.is_complex() else values
        signs = real[mask & ~nan]
        kinds += [k for k, hit in (("inf", signs > 0), ("-inf", signs < 0)) if bool(hit.any())]
    return kinds[0] if len(kinds) == 1 else "mixed"


def _mask_like(values: torch.Tensor, bad: torch.Tensor, nan: torch.Tensor, role: str) -> bool:
    """An infinity that a mask from outside holds on purpose: no NaN, and all other values equal; in a buffer, any others."""
    if role == "parameter" or bool(nan.any()) or values.is_complex():
        return False
    others = values[~bad]
    if role == "buffer":
        return bool((values[bad] < 0).all())
    return others.numel() == 0 or bool((others == others.flatten()[0]).all())
