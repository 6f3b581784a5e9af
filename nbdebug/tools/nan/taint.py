"""Taint propagation: which elements of a tensor come from which origin of an inf or a NaN.

The loss is NaN. Which op is to blame? Not the first one that made a bad value: an attention mask writes -inf on
purpose, a softmax absorbs it, and a `where` may drop a NaN. To blame is what reached the loss. So each bad value is
followed from its **origin** (`origins.py`) to where it ends.

For each storage that holds bad values, the tracker keeps one bool mask per origin: the elements that come from it. When
an op gives a bad result, three things can have happened to an element of it:

    carried on     an operand's NaN reached it: it has the operand's origins
    derived        only an infinity reached it, and it is a NaN (inf - inf, 0 * inf): a new origin, with parents
    new            nothing bad reached it (log(0), 1/0, an overflow): a new origin, from finite operands

"Reached" is an experiment (`OpTaint`): the op runs once more with NaN at the elements in question, 1 in place of all
other bad elements, and everything else as it was. What comes out NaN was reached. (An elementwise op needs no run: its
result is reached where an operand's element is.) What the result does not show is dropped from the masks, so that what
reaches the loss leads back to its origins and to nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nbdebug.observe.ops import Schema, named_arguments, schema_of
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
from nbdebug.tools.nan.origins import EMPTIES, BadResult, Origin, Origins, Overwritten

_CHOOSES = frozenset({"where", "masked_fill", "masked_scatter", "fmax", "fmin", "copysign", "nan_to_num"})
"""Elementwise ops that drop an operand at some elements: a broadcast mask would accuse what was dropped."""
_ELEMENTWISE = re.compile(
    "dropout|bernoulli|normal|poisson|binomial|rrelu|gamma|uniform|exponential|rand|geometric|cauchy"
)
"""Ops that draw random numbers element by element. Others that may draw mix elements: attention, recurrent layers."""
COMPARES = frozenset("eq ne isnan isinf isposinf isneginf lt gt le ge local_scalar_dense".split())
"""Ops with which a program asks for values."""
ABSORBERS = frozenset(
    "where masked_fill index index_select gather masked_select select slice nan_to_num masked_scatter index_put".split()
)
"""Ops with which a program drops values."""
_READERS = 64

OperandMasks = dict[int, dict[int, torch.Tensor]]
"""{id of an operand: {origin: mask}}, of the operands that hold bad values."""


class TaintedStorage:
    """A storage that holds bad values: one mask over all its elements for each origin that they come from. lone: the
    one origin of whatever is bad in it, where no mask has been made yet."""

    __slots__ = ("dtype", "elements", "lone", "masks", "size")

    def __init__(self, values: torch.Tensor, lone: int | None = None):
        self.size, self.dtype = values.element_size(), values.dtype
        self.elements = values.untyped_storage().nbytes() // self.size
        self.masks: dict[int, torch.Tensor] = {}
        self.lone = lone

    @property
    def origins(self) -> set[int]:
        return set(self.masks) if self.lone is None else {self.lone}

    def make_mask(self, values: torch.Tensor) -> None:
        """Make the mask of a lone origin, of the storage that `values` lies in; to be called before its values
        change."""
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


class TaintTracker:
    """A watcher of the recorder: keeps the masks of all bad values, op by op. origins: the register."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.origins = Origins(recorder)
        self.storages: dict[int, TaintedStorage] = {}
        self.target_origins: set[int] = set()  # of the first bad loss or gradient; all that is bad later has these
        self.checked: set[int] = set()  # origins of what the user's code asked about after a backward
        self.last_read: set[int] = set()
        self.last_bad: set[int] = set()
        self.recent: collections.deque = collections.deque(maxlen=16)  # bad results of this step: mask, masks by origin
        self.modules: set[str] = set()  # that bad values went through
        self.determinant: BadResult | None = None  # what the last ops before this one may be the logdet of

    # -- what the recorder calls ------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, Overwritten]:
        """Save what the op is about to overwrite."""
        if not schema.writes or self.target_origins:
            return {}
        overwritten = {}
        for name, value in named_arguments(schema, args, kwargs):
            if name in schema.writes:
                for _, tensor in walk_tensors((value,)):
                    values = dense(tensor)
                    if values is not None and values.device.type != "meta":
                        storage = self.recorder.storages[storage_key(values)]
                        overwritten[id(tensor)] = Overwritten(
                            tensor.clone(), self.masks(values), storage.maker, storage.reach
                        )
        return overwritten

    def after(
        self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, overwritten: dict[int, Overwritten]
    ) -> None:
        if schema.view and not schema.writes:
            return
        self.note_determinant(op, schema, args, kwargs, out)
        operands = self._operand_masks(args, kwargs, overwritten) if self.storages else {}
        if operands:
            self._note_use(op, schema, args, operands)
        made: set[int] = set()
        for place, tensor in results_of(schema, args, kwargs, out):
            values = dense(tensor)
            if values is None or not can_be_nonfinite(values):
                continue
            if all_finite(values):
                self._clear(values)
                continue
            if self.target_origins:
                masks = dict.fromkeys(self.target_origins, ~finite(values))
            else:
                masks = self._explain(BadResult(op, schema, args, kwargs, overwritten, tensor), operands, place)
            self._write(values, masks)
            self.recent.append((~finite(values), masks))
            made |= masks.keys()
        if made:
            self.last_bad = made
            self.modules.add(op.module)
        self._note_absorbed(op, schema, operands, made)

    def note_determinant(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any) -> None:
        if schema.base == "linalg_slogdet":
            self.determinant = BadResult(op, schema, args, kwargs, {}, out[0])
        elif schema.base not in ("eq", "scalar_tensor"):
            self.determinant = None

    def external(self, tensor: torch.Tensor, storage: StorageInfo) -> None:
        """A tensor from outside is seen for the first time: is it bad already?"""
        if storage.role == "target":
            self.origins.note_shape(tensor)
        values = dense(tensor)
        if values is None or not can_be_nonfinite(values) or all_finite(values) or self.masks(values):
            return
        twin = self._through_numpy(values) if storage.role == "target" else None
        self._write(values, twin or self.origins.add_external(tensor, storage))

    def _through_numpy(self, values: torch.Tensor) -> dict[int, torch.Tensor] | None:
        """Values that went through NumPy come back as a new tensor:
        known by as many elements, bad at the same places."""
        bad = ~finite(values)
        for mask, masks in reversed(self.recent):
            alike = mask.numel() == bad.numel() and mask.device == bad.device
            if alike and bool((mask.flatten() == bad.flatten()).all()):
                return {origin: part.reshape(bad.shape) for origin, part in masks.items()}
        return None

    def adopt(self, origin: Origin, values: torch.Tensor) -> None:
        """A storage that went bad in an earlier step, whose origin is known from then."""
        origin = copy.copy(origin)
        origin.parents = set()
        self._write(values, {self.origins.add(origin): ~finite(values)})

    def begin_step(self) -> None:
        """Drop the masks of storages that are gone; to be called after the recorder has begun a new step."""
        self.storages = {k: s for k, s in self.storages.items() if k in self.recorder.storages}
        self.target_origins, self.checked, self.last_read, self.last_bad = set(), set(), set(), set()
        self.recent.clear()
        self.origins.begin_step({origin for storage in self.storages.values() for origin in storage.origins})

    # -- masks --------------------------------------------------------------------------------------------------------

    def masks(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """{origin: mask of the elements of `values` that come from it}, without empty ones."""
        storage = self.storages.get(storage_key(values))
        if storage is None:
            return {}
        if storage.lone is not None:
            masks = {storage.lone: ~finite(values)}
        else:
            masks = {origin: storage.view(flat, values) for origin, flat in storage.masks.items()}
        return {origin: mask for origin, mask in masks.items() if bool(mask.any())}

    def origins_of(self, tensor: torch.Tensor) -> set[int]:
        """The origins that the bad values of a tensor come from."""
        values = dense(tensor)
        return set() if values is None else set(self.masks(values))

    def _clear(self, values: torch.Tensor) -> None:
        if storage_key(values) in self.storages:
            self._write(values, {})

    def _write(self, values: torch.Tensor, masks: dict[int, torch.Tensor]) -> None:
        storage = self.storages.get(storage_key(values))
        if storage is None or storage.size != values.element_size():
            storage = self.storages[storage_key(values)] = TaintedStorage(values)
        storage.make_mask(values)
        for flat in storage.masks.values():
            storage.view(flat, values).fill_(False)
        for origin, mask in masks.items():
            blank = torch.zeros(storage.elements, dtype=torch.bool, device=values.device)
            storage.view(storage.masks.setdefault(origin, blank), values).logical_or_(mask)
        storage.masks = {origin: flat for origin, flat in storage.masks.items() if bool(flat.any())}
        if not storage.masks:
            del self.storages[storage_key(values)]

    def _operand_masks(self, args: tuple, kwargs: dict, overwritten: dict[int, Overwritten]) -> OperandMasks:
        operands = {}
        for _, tensor in walk_tensors((*args, *kwargs.values())):
            values = dense(tensor)
            if values is not None:
                masks = overwritten[id(tensor)].masks if id(tensor) in overwritten else self.masks(values)
                if masks:
                    operands[id(tensor)] = masks
        return operands

    # -- how a bad value is used --------------------------------------------------------------------------------------

    def _note_use(self, op: Op, schema: Schema, args: tuple, operands: OperandMasks) -> None:
        """An op is given bad values: who reads them, whether the user's code asks about them, what multiplies them."""
        origins = {origin for masks in operands.values() for origin in masks}
        for origin in map(self.origins.__getitem__, origins):
            if origin.storage is not None and len(origin.readers) < _READERS:
                origin.readers.append(op)
        if schema.base in COMPARES:
            self.last_read = origins
            if op.during == "forward" and self.origins.segment:
                self.checked |= origins
        if schema.base == "mul" and op.during == "forward":
            self._note_factors(args, operands, origins)

    def _note_factors(self, args: tuple, operands: OperandMasks, origins: set[int]) -> None:
        for _, factor in walk_tensors(args):
            storage = self.recorder.storage_info(factor)
            if not factor.dim():  # one number for all, such as the scale of a GradScaler: no label
                continue
            if storage is None or id(factor) in operands or not factor.numel() or factor.is_complex():
                continue
            if storage.role == "target" or (storage.maker is not None and not storage.reach & (PARAMETER | INPUT)):
                low, high = factor.aminmax()
                for origin in origins:
                    self.origins[origin].factors.append((low.item(), high.item()))

    def _note_absorbed(self, op: Op, schema: Schema, operands: OperandMasks, made: set[int]) -> None:
        if operands and op.during == "forward" and schema.base in ABSORBERS:
            for origin in {origin for masks in operands.values() for origin in masks} - made:
                self.origins[origin].absorbed_by.add(schema.base)

    # -- origins of a bad result --------------------------------------------------------------------------------------

    def _explain(self, result: BadResult, operands: OperandMasks, place: Any) -> dict[int, torch.Tensor]:
        """{origin: mask} of a bad result; new origins are added. place: how to find the result in another run."""
        op, schema, args, kwargs, overwritten, tensor = result
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        bad, nan = ~finite(values), torch.isnan(values)
        origins = sorted({origin for masks in operands.values() for origin in masks})
        of = self.determinant
        if schema.base == "scalar_tensor" and of is not None and (of.op.site, of.op.call) == (op.site, op.call):
            result = _logdet_of(of, tensor)
        if schema.base in EMPTIES or not origins:
            return self.origins.add_from_finite(result, bad, nan)
        if tensor.layout is not torch.strided or tensor.is_nested:
            return dict.fromkeys(origins, bad)
        taint = OpTaint(
            op.func, schema, args, kwargs, {i: o.values for i, o in overwritten.items()}, _picker(place), tensor.shape
        )
        before = {
            id(t): overwritten[id(t)].values if id(t) in overwritten else t
            for _, t in walk_tensors((*args, *kwargs.values()))
        }
        before = {i: t.values() if t.is_nested else t for i, t in before.items()}
        from_nan = taint.reached({i: torch.isnan(before[i]) for i in operands}, bad)
        from_inf = taint.reached({i: torch.isinf(before[i]) for i in operands}, bad)
        derived = nan & ~from_nan & from_inf
        if schema.base == "nll_loss" and all(self.origins[origin].intended for origin in origins):
            derived = bad  # the label of a class that a mask had ruled out
        new = bad & ~from_nan & ~from_inf
        masks: dict[int, torch.Tensor] = {}
        parents: set[int] = set()
        for origin, reached in self._reached_by(taint, origins, operands, bad).items():
            if bool((reached & derived).any()):
                parents.add(origin)
                self.origins.note_rows(origin, reached & derived, op)
            carried = reached & bad & ~derived & ~new
            if bool(carried.any()):
                masks[origin] = carried
                self.origins.note_rows(origin, carried, op)
        if parents:
            masks[self.origins.add_at_op(result, derived, nan, parents, from_infinity=True)] = derived
        if bool(new.any()):
            masks |= self.origins.add_from_finite(result, new, nan)
        return masks or {origins[0]: bad}

    def _reached_by(
        self, taint: OpTaint, origins: list[int], operands: OperandMasks, bad: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """The bad elements that each origin reaches. Of several, one that is absorbed where another one is bad (the
        -inf beside a NaN in a maximum) reaches none."""
        if len(origins) == 1:
            return {origins[0]: bad}
        own = {o: {i: masks[o] for i, masks in operands.items() if o in masks} for o in origins}
        reached = {o: taint.reached(own[o], bad) for o in origins}
        alone = {o: reached[o] & taint.bad_alone(own[o], bad) for o in origins}
        covered = functools.reduce(torch.logical_or, alone.values())
        return {o: alone[o] | (reached[o] & ~covered) for o in origins}


class OpTaint:
    """One op, its operands as they were before it ran, and the result to be explained.

    overwritten: {id of an argument: its value before the op}, for arguments that the op changed.
    pick: takes the result of another run to the tensor that matters.
    """

    def __init__(
        self,
        func: Any,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        overwritten: dict[int, torch.Tensor],
        pick: Callable[[Any, tuple, dict], torch.Tensor],
        shape: torch.Size,
    ):
        self.func, self.schema, self.args, self.kwargs = func, schema, args, kwargs
        self.overwritten, self.pick, self.shape = overwritten, pick, shape

    def reached(self, operands: dict[int, torch.Tensor], bad: torch.Tensor) -> torch.Tensor:
        """The bad elements that some elements of the operands reach; all where that can't be told. operands: {id: bool
        mask}."""
        operands = {i: mask for i, mask in operands.items() if bool(mask.any())}
        if not operands:
            return torch.zeros_like(bad)
        reached = self.propagate(operands)
        return bad if reached is None or reached.shape != bad.shape else reached & bad

    def bad_alone(self, operands: dict[int, torch.Tensor], bad: torch.Tensor) -> torch.Tensor:
        """The elements that are bad with these elements of the operands as they are, and all others sound."""
        if self.func.namespace != "aten" or self.schema.random:
            return bad
        try:
            alone = self._run(operands, as_they_are=True)
        except Exception:  # as in `propagate`
            return bad
        return bad if alone.shape != bad.shape else alone

    def propagate(self, operands: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Mask of the results that these elements reach; None where that can't be told."""
        if self.func.namespace != "aten":  # it may talk to other processes, or have other effects
            return None
        if self.schema.pointwise and self.schema.base not in _CHOOSES:
            return self._broadcast(operands)
        if self.schema.random and _ELEMENTWISE.search(self.schema.base):
            same = all(mask.shape == self.shape for mask in operands.values())
            return self._broadcast(operands) if same else None
        try:
            with self._random_numbers_restored() if self.schema.random else contextlib.nullcontext():
                return self._run(operands)
        except Exception:  # the op refuses NaN, or its arguments in this form: no telling
            return None

    def _random_numbers_restored(self) -> contextlib.AbstractContextManager[None]:
        """For another run of an op that may draw: attention, recurrent layers."""
        device = next((t.device for _, t in walk_tensors((*self.args, *self.kwargs.values()))), torch.device("cpu"))
        if device.type in ("cpu", "meta"):
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)

    def _broadcast(self, operands: dict[int, torch.Tensor]) -> torch.Tensor | None:
        try:
            masks = [mask.broadcast_to(self.shape) for mask in operands.values()]
        except RuntimeError:
            return None
        total = masks[0].clone()
        for mask in masks[1:]:
            total |= mask
        return total

    def _run(self, operands: dict[int, torch.Tensor], as_they_are: bool = False) -> torch.Tensor:
        tainted: dict[int, torch.Tensor] = {}

        def taint(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in tainted:
                tainted[id(value)] = self._tainted(value, operands.get(id(value)), as_they_are)
            return tainted[id(value)]

        args, kwargs = tree_map(taint, self.args), tree_map(taint, self.kwargs)
        with torch.no_grad():
            result = self.pick(self.func(*args, **kwargs), args, kwargs)
        return ~finite(result) if as_they_are else torch.isnan(result)

    def _tainted(self, value: torch.Tensor, mask: torch.Tensor | None, as_it_is: bool) -> torch.Tensor:
        """A copy of an operand that is NaN (or as it is) at the mask, and finite elsewhere."""
        before = self.overwritten.get(id(value), value)
        inner = dense(before)
        if inner is None or not can_be_nonfinite(inner):
            return before.clone() if id(value) in self.overwritten else before
        if before.layout is not torch.strided or before.is_nested:
            raise TypeError("sparse or nested")
        clean = torch.where(finite(before), before, torch.ones((), dtype=before.dtype, device=before.device))
        if mask is not None and as_it_is:
            return torch.where(mask, before, clean)
        return clean if mask is None else clean.masked_fill_(mask, float("nan"))


_FIRST_OPERANDS = ("query", "log_probs")
"""Of their forward."""


def results_of(schema: Schema, args: tuple, kwargs: dict, out: Any) -> list[tuple[Any, torch.Tensor]]:
    """What an op made or changed: (how to find it again in another run, tensor). What attention and CTC note for their
    backward, beside their first result, is no value of the step's, and holds infinities: attention on a GPU fills the
    logarithms of its sums up to a multiple of 32 with them, CTC gives them to what is not possible."""
    results: list[tuple[Any, torch.Tensor]] = []
    if schema.base.endswith(("attention", "attention_for_cpu", "ctc_loss")) and schema.names[0] in _FIRST_OPERANDS:
        out = out[:1] if isinstance(out, (list, tuple)) else out
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


def _picker(place: Any) -> Callable[[Any, tuple, dict], torch.Tensor]:
    """What finds a result again after another run of the op."""
    name, position, nth = place

    def pick(out: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        if name is None:
            tensors = walk_tensors(out if isinstance(out, (list, tuple)) else (out,))
        else:
            tensors = walk_tensors((args[position] if position < len(args) else kwargs[name],))
        return [t for _, t in tensors][nth]

    return pick


def _logdet_of(determinant: BadResult, nan: torch.Tensor) -> BadResult:
    """logdet is slogdet, and a NaN that is written where the sign is -1: to the user they are one op."""
    op, func = copy.copy(determinant.op), torch.ops.aten.logdet.default
    op.name, op.func = "logdet", func
    return determinant._replace(op=op, schema=schema_of(func), result=nan)
