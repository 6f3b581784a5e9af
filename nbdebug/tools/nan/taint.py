"""Where did each bad value come from?

Every inf or NaN has a birth: an op whose operands were finite there, or an op that made a NaN of an inf. From then on
the value travels. For each memory that holds bad values this keeps, per birth, a mask of the elements that come from
it; so a value that something absorbs on the way (a softmax, a `where`, a clamp) is gone from the books, and what
reaches the loss leads back to its births and to nothing else.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nbdebug.observe.ops import Schema, named_arguments
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import (
    INPUT,
    PARAMETER,
    StorageInfo,
    all_finite,
    can_be_nonfinite,
    dense,
    finite,
    storage_key,
    walk_tensors,
)
from nbdebug.tools.nan.origins import EMPTIES, Origin, Origins

_CHOOSES = frozenset({"where", "masked_fill", "masked_scatter", "fmax", "fmin", "copysign", "nan_to_num"})
"""Elementwise ops that drop an operand at some elements: a broadcast mask would accuse what was dropped."""


class OpTaint:
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
        if inner is None or not can_be_nonfinite(inner):
            return before.clone() if id(value) in self.written else before
        if before.layout is not torch.strided:
            raise TypeError("sparse")
        clean = torch.where(finite(before), before, torch.ones((), dtype=before.dtype, device=before.device))
        return clean if mask is None else clean.masked_fill_(mask, float("nan"))


class TaintedStorage:
    """A memory that holds bad values: one mask over all its elements for each birth that they come from. lone: the one
    birth of whatever is bad in it, where no mask has been made yet."""

    __slots__ = ("dtype", "elements", "lone", "masks", "size")

    def __init__(self, values: torch.Tensor, lone: int | None = None):
        self.size, self.dtype = values.element_size(), values.dtype
        self.elements = values.untyped_storage().nbytes() // self.size
        self.masks: dict[int, torch.Tensor] = {}
        self.lone = lone

    @property
    def births(self) -> set[int]:
        return set(self.masks) if self.lone is None else {self.lone}

    def settle(self, values: torch.Tensor) -> None:
        """Make the mask of a lone birth, of the memory that `values` lies in; to be called when its values change."""
        if self.lone is not None:
            whole = torch.empty(0, dtype=self.dtype, device=values.device)
            whole.set_(values.untyped_storage(), 0, (self.elements,), (1,))
            self.masks, self.lone = {self.lone: ~finite(whole)}, None

    def view(self, flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The part of a mask that `values` shows."""
        if values.element_size() != self.size:  # seen as another dtype: complex as real, or bytes
            ratio = values.element_size() / self.size
            flat = flat.repeat_interleave(int(1 / ratio)) if ratio < 1 else flat.view(-1, int(ratio)).any(1)
        return flat.as_strided(values.shape, values.stride(), values.storage_offset())


COMPARES = frozenset(
    {"eq", "ne", "isnan", "isinf", "isposinf", "isneginf", "lt", "gt", "le", "ge", "local_scalar_dense"}
)
"""Ops with which a program asks for values."""
ABSORBERS = frozenset(
    {
        "where",
        "masked_fill",
        "index",
        "index_select",
        "gather",
        "masked_select",
        "select",
        "slice",
        "nan_to_num",
        "masked_scatter",
        "index_put",
    }
)
"""Ops with which a program drops values."""
_READERS = 64


class TaintTracker:
    """A watcher: keeps the books of bad values, op by op."""

    def __init__(self, recorder: Recorder, take_scene: Any):
        self.recorder = recorder
        self.births = Origins(recorder, take_scene)
        self.spoiled: dict[int, TaintedStorage] = {}
        self.settled: set[int] = set()  # once the loss is bad, or a gradient: the births behind it, and all later ones
        self.checked: set[int] = set()  # births that the user's code looked at, after a backward
        self.last_read: set[int] = set()
        self.last_bad: set[int] = set()
        self.recent: collections.deque = collections.deque(maxlen=16)  # bad results of this step: masks, origins
        self.touched: set[str] = set()  # modules that bad values went through

    # -- what the recorder calls ------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, tuple]:
        """Keep what the op is about to overwrite: value, masks, maker."""
        if not schema.writes or self.settled:
            return {}
        kept = {}
        for name, value in named_arguments(schema, args, kwargs):
            if name in schema.writes:
                for _, tensor in walk_tensors((value,)):
                    values = dense(tensor)
                    if values is not None and values.device.type != "meta":
                        memory = self.recorder.storages[storage_key(values)]
                        kept[id(tensor)] = (tensor.clone(), self.masks(values), memory.maker, memory.reach)
        return kept

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: dict[int, tuple]) -> None:
        if schema.view and not schema.writes:
            return
        suspects = self._suspects(args, kwargs, kept) if self.spoiled else {}
        if suspects:
            self._note_use(op, schema, args, suspects)
        made: set[int] = set()
        for index, tensor in results_of(schema, args, kwargs, out):
            values = dense(tensor)
            if values is None or not can_be_nonfinite(values):
                continue
            if all_finite(values):
                self._clear(values)
                continue
            if self.settled:
                origins = dict.fromkeys(self.settled, ~finite(values))
            else:
                origins = self._explain(op, schema, args, kwargs, kept, suspects, index, tensor)
            self._write(values, origins)
            self.recent.append((~finite(values), origins))
            made |= origins.keys()
        if made:
            self.last_bad = made
            self.touched.add(op.module)
        self._note_absorbed(op, schema, suspects, made)

    def _note_absorbed(self, op: Op, schema: Schema, suspects: dict, made: set[int]) -> None:
        if suspects and op.during == "forward" and schema.base in ABSORBERS:
            for birth in {b for masks in suspects.values() for b in masks} - made:
                self.births[birth].absorbed_by.add(schema.base)

    def _note_use(self, op: Op, schema: Schema, args: tuple, suspects: dict) -> None:
        """An op is given bad values: who reads them, whether the user's code asks about them, what multiplies them."""
        births = {b for masks in suspects.values() for b in masks}
        for birth in births:
            if self.births[birth].memory is not None and len(self.births[birth].readers) < _READERS:
                self.births[birth].readers.append(op)
        if schema.base in COMPARES:
            self.last_read = births
            if op.during == "forward" and self.births.segment:
                self.checked |= births
        if schema.base == "mul" and op.during == "forward":
            self._note_factors(args, suspects)

    def _note_factors(self, args: tuple, suspects: dict) -> None:
        for _, factor in walk_tensors(args):
            memory = self.recorder.storage_info(factor)
            free = (
                memory is not None
                and not memory.reach & (PARAMETER | INPUT)
                and memory.maker is not None
                or (memory is not None and memory.role == "target")
            )
            if not factor.dim():  # one number for all, such as the scale of a GradScaler: no label
                continue
            if id(factor) not in suspects and free and factor.numel() and not factor.is_complex():
                low, high = factor.aminmax()
                for birth in {b for masks in suspects.values() for b in masks}:
                    self.births[birth].factors.append((low.item(), high.item()))

    def external(self, tensor: torch.Tensor, memory: StorageInfo) -> None:
        """A tensor from outside is seen for the first time: is it bad already?"""
        if memory.role == "target":
            self.births.note_shape(tensor)
        values = dense(tensor)
        if values is None or not can_be_nonfinite(values) or all_finite(values) or self.masks(values):
            return
        twin = self._left_and_came_back(values) if memory.role == "target" else None
        self._write(values, twin or self.births.external(tensor, memory))

    def _left_and_came_back(self, values: torch.Tensor) -> dict[int, torch.Tensor] | None:
        """Values that went through NumPy come back as a new tensor:
        known by as many elements, bad at the same places."""
        bad = ~finite(values)
        for mask, origins in reversed(self.recent):
            alike = mask.numel() == bad.numel() and mask.device == bad.device
            if alike and bool((mask.flatten() == bad.flatten()).all()):
                return {b: part.reshape(bad.shape) for b, part in origins.items()}
        return None

    def adopt(self, record: Origin, values: torch.Tensor) -> None:
        """A memory that an earlier step spoiled, whose birth is known from then."""
        record = copy.copy(record)
        record.parents = set()
        self._write(values, {self.births.add(record): ~finite(values)})

    # -- the books ----------------------------------------------------------------------------------------------------

    def masks(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """{birth: mask of the elements of `values` that come from it}, without empty ones."""
        held = self.spoiled.get(storage_key(values))
        if held is None:
            return {}
        if held.lone is not None:
            seen = {held.lone: ~finite(values)}
        else:
            seen = {b: held.view(flat, values) for b, flat in held.masks.items()}
        return {b: mask for b, mask in seen.items() if bool(mask.any())}

    def origins(self, tensor: torch.Tensor) -> set[int]:
        """The births that the bad values of a tensor come from."""
        values = dense(tensor)
        return set() if values is None else set(self.masks(values))

    def _clear(self, values: torch.Tensor) -> None:
        held = self.spoiled.get(storage_key(values))
        if held is not None:
            self._write(values, {})

    def _write(self, values: torch.Tensor, origins: dict[int, torch.Tensor]) -> None:
        held = self.spoiled.get(storage_key(values))
        if held is None or held.size != values.element_size():
            held = self.spoiled[storage_key(values)] = TaintedStorage(values)
        held.settle(values)
        for flat in held.masks.values():
            held.view(flat, values).fill_(False)
        for birth, mask in origins.items():
            flat = held.masks.setdefault(birth, torch.zeros(held.elements, dtype=torch.bool, device=values.device))
            held.view(flat, values).logical_or_(mask)
        held.masks = {b: flat for b, flat in held.masks.items() if bool(flat.any())}
        if not held.masks:
            del self.spoiled[storage_key(values)]

    def begin_step(self) -> None:
        """Drop the books of memories that are gone; to be called after the recorder has begun a new step."""
        self.spoiled = {k: s for k, s in self.spoiled.items() if k in self.recorder.storages}
        self.settled, self.checked, self.last_read, self.last_bad = set(), set(), set(), set()
        self.recent.clear()
        self.births.begin_step({birth for held in self.spoiled.values() for birth in held.births})

    def _suspects(self, args: tuple, kwargs: dict, kept: dict[int, tuple]) -> dict[int, dict[int, torch.Tensor]]:
        """{id of an operand: {birth: mask}} for operands that hold bad values."""
        found = {}
        for _, tensor in walk_tensors((*args, *kwargs.values())):
            values = dense(tensor)
            if values is not None:
                masks = kept[id(tensor)][1] if id(tensor) in kept else self.masks(values)
                if masks:
                    found[id(tensor)] = masks
        return found

    # -- births -------------------------------------------------------------------------------------------------------

    def _explain(
        self,
        op: Op,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        kept: dict,
        suspects: dict,
        index: Any,
        tensor: torch.Tensor,
    ) -> dict[int, torch.Tensor]:
        """{birth: mask} of a bad result; new births are entered."""
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        bad, nan = ~finite(values), torch.isnan(values)
        if schema.base in EMPTIES or not suspects or tensor.layout is not torch.strided:
            return self._inherit_all(op, schema, args, kwargs, kept, suspects, tensor, bad, nan)
        dye = OpTaint(op.func, schema, args, kwargs, {i: k[0] for i, k in kept.items()}, _picker(index), tensor.shape)
        operands = {id(t): kept[id(t)][0] if id(t) in kept else t for _, t in walk_tensors((*args, *kwargs.values()))}
        nans = {i: torch.isnan(operands[i]) for i in suspects}
        infs = {i: torch.isinf(operands[i]) for i in suspects}
        from_nan, from_inf = _reached(dye, nans, bad), _reached(dye, infs, bad)
        derived = nan & ~from_nan & from_inf
        if schema.base == "nll_loss" and all(self.births[b].intended for masks in suspects.values() for b in masks):
            derived = bad  # the label of a class that a mask had ruled out
        fresh = bad & ~from_nan & ~from_inf
        origins: dict[int, torch.Tensor] = {}
        parents: set[int] = set()
        births = sorted({b for masks in suspects.values() for b in masks})
        for birth in births:
            own = {i: m[birth] for i, m in suspects.items() if birth in m}
            mine = bad if len(births) == 1 else _reached(dye, own, bad)
            if bool((mine & derived).any()):
                parents.add(birth)
            passed = mine & bad & ~derived & ~fresh
            if bool(passed.any()):
                origins[birth] = passed
                self.births.learn_rows(birth, passed, op)
        scene = (op, schema, args, kwargs, kept, tensor)
        if parents:
            origins[self.births.enter(scene, derived, nan, parents, infs)] = derived
        if bool(fresh.any()):
            origins |= self.births.born(scene, fresh, nan)
        return origins or {births[0]: bad}

    def _inherit_all(
        self,
        op: Op,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        kept: dict,
        suspects: dict,
        tensor: torch.Tensor,
        bad: torch.Tensor,
        nan: torch.Tensor,
    ) -> dict[int, torch.Tensor]:
        """A result with no suspects is born here; one that can't be told apart comes from all of them."""
        births = {b for masks in suspects.values() for b in masks}
        if births and schema.base not in EMPTIES:
            return dict.fromkeys(births, bad)
        return self.births.born((op, schema, args, kwargs, kept, tensor), bad, nan)


def results_of(schema: Schema, args: tuple, kwargs: dict, out: Any) -> list[tuple[Any, torch.Tensor]]:
    """What an op made or changed: (how to find it again in another run, tensor)."""
    results: list[tuple[Any, torch.Tensor]] = []
    changed: set[int] = set()
    if schema.writes:
        for position, (name, value) in enumerate(named_arguments(schema, args, kwargs)):
            if name in schema.writes:
                for nth, (_, tensor) in enumerate(walk_tensors((value,))):
                    results.append(((name, position, nth), tensor))
        changed = {id(t) for _, t in results}
    for nth, (_, tensor) in enumerate(walk_tensors(out if isinstance(out, (list, tuple)) else (out,))):
        if id(tensor) not in changed:
            results.append(((None, 0, nth), tensor))
    return results


def _picker(index: Any) -> Any:
    """How to find a result again after another run of the op."""
    name, position, nth = index

    def pick(out: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        if name is None:
            tensors = walk_tensors(out if isinstance(out, (list, tuple)) else (out,))
        else:
            tensors = walk_tensors((args[position] if position < len(args) else kwargs[name],))
        return [t for _, t in tensors][nth]

    return pick


def _reached(dye: OpTaint, suspects: dict[int, torch.Tensor], bad: torch.Tensor) -> torch.Tensor:
    suspects = {i: mask for i, mask in suspects.items() if bool(mask.any())}
    if not suspects:
        return torch.zeros_like(bad)
    reached = dye.reach(suspects)
    return bad if reached is None or reached.shape != bad.shape else reached & bad
