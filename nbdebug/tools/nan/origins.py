"""The register of origins: each place where an inf or a NaN came into being, and what is known of it there and then.

An origin is an op whose operands were finite where its result is not, an op that made a NaN of an infinity (its parents
are the origins of that infinity), or a tensor that was bad when the step got it. Some are intended: the -inf that an
attention mask writes is no fault unless it becomes a NaN. `taint.py` tells which elements come from which origin.

The operands of that op, at the moment its result went bad, are kept as plain numbers for the rules. The first few
origins of a step also get copies of the tensors themselves, so that the fault can be reproduced alone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.ops import Schema, named_arguments
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import (
    INPUT,
    PARAMETER,
    StorageInfo,
    can_be_nonfinite,
    dense,
    exponents,
    finite,
    folds_of,
    reach_names,
    row_candidates,
    rows_of,
    storage_key,
)
from nbdebug.report import LibraryLine, Where
from nbdebug.tools.nan.facts import Operand

EMPTIES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Ops that hand out memory as it is: they are the origin of what is bad in it."""
_FILLS = frozenset("fill masked_fill full full_like new_full scalar_tensor constant_pad_nd lift_fresh".split())
_LOGS = frozenset({"log", "log2", "log10"})
_MOST_CANDIDATES = 6
"""Sets of rows that are noted for an origin: later ops only mix rows."""
_MOST = 512
"""A step with more origins than this that nobody intended has gone bad everywhere; the first ones tell why."""


class Origin:
    """One origin. op: None for a tensor that was bad when the step got it: then `storage` describes it, and readers are
    the ops that used it. made: "nan", "inf", "-inf" or "mixed". rows: the batch rows; folded_rows: the same if the only
    dimension is batch and time folded, and nothing later shows the rows better; row_sets: what they may be instead, by
    the dimension taken for the batch. trail: (number of an op, rows) wherever it then showed. segment: how many
    backwards had run before, in this step. factors: ranges (low, high) of the parameter-free factors that it was
    multiplied by. after_model: the model had returned by then."""

    __slots__ = (
        "absorbed_by",
        "after_model",
        "bad",
        "custom",
        "dtype",
        "factors",
        "folded_rows",
        "index",
        "intended",
        "made",
        "op",
        "parents",
        "readers",
        "row_sets",
        "rows",
        "segment",
        "shape",
        "snapshot",
        "step",
        "storage",
        "trail",
        "whole",
    )

    def __init__(self, op: Op | None, step: int, segment: int, tensor: torch.Tensor, bad: torch.Tensor, made: str):
        self.index, self.op, self.step, self.segment, self.made = -1, op, step, segment, made
        self.whole, self.bad = bool(bad.all()), int(bad.sum())
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.parents: set[int] = set()
        self.rows: tuple[int, ...] | None = None
        self.folded_rows: tuple[int, ...] | None = None
        self.row_sets: dict[tuple, tuple[int, ...]] = {}
        self.storage: StorageInfo | None = None
        self.readers: list[Op] = []
        self.trail: list[tuple[int, tuple[int, ...]]] = []
        self.intended = False
        self.custom, self.after_model = (False, False) if op is None else (op.custom, op.after_model)
        self.absorbed_by: set[str] = set()
        self.factors: list[tuple[float, float]] = []
        self.snapshot: OperandSnapshot

    @property
    def of_weights(self) -> bool:
        """Whether only parameters and constants went into the op: no row of the batch is at fault."""
        op = self.op if self.op is None or self.op.forward is None else self.op.forward
        return op is not None and op.reach == PARAMETER and self.op is op


class Origins:
    """All origins that still count, oldest first, by number. batch, folds: of what the model was given, to know batch
    rows by (set by the probe). segment: how many backwards have run in this step."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.operand_recorder = recorder, OperandRecorder(recorder)
        self._origins: dict[int, Origin] = {}
        self._next = 0
        self.begin_step(())

    def begin_step(self, alive: Iterable[int]) -> None:
        """Forget what only one step needs, and the origins of values that no storage holds any more (`alive`: held)."""
        needed = self.ancestors(alive)
        self._origins = {number: origin for number, origin in self._origins.items() if number in needed}
        self.operand_recorder.count = 0
        self._unintended: list[int] = []
        self.batch: int | None = None
        self.folds: set[int] = set()
        self.leading: collections.Counter[int] = collections.Counter()
        self.segment = 0

    def __getitem__(self, index: int) -> Origin:
        return self._origins[index]

    def __len__(self) -> int:
        return len(self._origins)

    def __iter__(self) -> Iterator[Origin]:
        return iter(self._origins.values())

    @property
    def batch_size(self) -> int | None:
        """What the model was given, or, with no model, the commonest first dimension of what came from outside."""
        if self.batch is None and self.leading:
            return self.leading.most_common(1)[0][0]
        return self.batch

    def ancestors(self, origins: Iterable[int]) -> set[int]:
        """These origins and all that they were made of."""
        ancestors, todo = set(), list(origins)
        while todo:
            index = todo.pop()
            if index in self._origins and index not in ancestors:
                ancestors.add(index)
                todo.extend(self._origins[index].parents)
        return ancestors

    # -- new origins --------------------------------------------------------------------------------------------------

    def add(self, origin: Origin) -> int:
        """Give an origin the next number."""
        origin.index, self._next = self._next, self._next + 1
        self._origins[origin.index] = origin
        if not origin.intended:
            self._unintended.append(origin.index)
        return origin.index

    def add_external(self, tensor: torch.Tensor, storage: StorageInfo) -> dict[int, torch.Tensor]:
        """A tensor that was bad when the step got it: {origin: mask of its bad elements}."""
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        bad, nan = ~finite(values), torch.isnan(values)
        origin = Origin(None, self.recorder.step, self.segment, tensor, bad, _made(values, bad, nan))
        origin.storage = storage
        origin.rows = self._rows(bad) if storage.role in ("input", "target") else None
        origin.snapshot = self.operand_recorder.of_tensor(tensor, bad)
        origin.intended = _is_mask(values, bad, nan, storage.role)
        return {self.add(origin): bad}

    def add_from_finite(self, bad: BadResult, mask: torch.Tensor, nan: torch.Tensor) -> dict[int, torch.Tensor]:
        """Bad elements of a result whose operands were sound there. An infinity written as a number (`x * -inf`) is a
        mask's where it stays one, and a fault where it makes a NaN: two origins."""
        infinite = any(isinstance(a, float) and math.isinf(a) for a in (*bad.args, *bad.kwargs.values()))
        parts = [mask & ~nan, mask & nan] if infinite else [mask]
        parents = self._of_forward(bad.op)
        return {self.add_at_op(bad, part, nan, parents, False): part for part in parts if bool(part.any())}

    def add_at_op(
        self, bad: BadResult, mask: torch.Tensor, nan: torch.Tensor, parents: set[int], from_infinity: bool
    ) -> int:
        """The bad elements `mask` of a result came into being at this op; returns the origin's number. from_infinity:
        an operand was infinite."""
        op, schema, args, *_, tensor = bad
        if len(self._unintended) >= _MOST:
            return self._unintended[-1]
        values = dense(tensor)
        assert values is not None, "its bad elements have been seen"
        origin = Origin(op, op.step, self.segment, tensor, mask, _made(values, mask, nan))
        origin.parents = set(parents)
        if not origin.of_weights:
            ctc = schema.base == "ctc_loss" and mask.dim() == 1
            origin.rows = rows_of(mask, len(mask)) if ctc else self._rows(mask)
            origin.folded_rows = rows_of(mask, self.batch_size, self.folds) if origin.rows is None else None
            self._note_candidates(origin, mask, op)
        if schema.base == "nll_loss" and origin.rows is None:
            origin.rows = self._label_rows(*args[:2])
        origin.snapshot = self.operand_recorder.of_op(bad, mask)
        origin.intended = not from_infinity and _is_intended(origin, schema)
        return self.add(origin)

    def _of_forward(self, op: Op) -> set[int]:
        """Origins at the forward op whose derivative this one computes (its operand was already out of bounds there),
        or that it computes again."""
        if op.recomputed:
            first = [
                o.index
                for o in self
                if o.op is not None
                and o.step == op.step
                and not o.op.recomputed
                and (o.op.site, o.op.name, o.op.module) == (op.site, op.name, op.module)
            ]
            return set(first[:1])
        return {o.index for o in self if op.forward is not None and o.op is op.forward and not o.intended}

    # -- batch rows ---------------------------------------------------------------------------------------------------

    def note_shape(self, tensor: torch.Tensor) -> None:
        """A tensor from outside: with no model to ask, the commonest first dimension of these is the batch size."""
        if tensor.dim() and len(tensor) > 1:
            self.leading[len(tensor)] += 1
            self.folds |= folds_of(tensor.shape)

    def note_model_input(self, index: int, mask: torch.Tensor, values: torch.Tensor, site: Site | None) -> None:
        """Bad values that came from outside, or that the code has written (`x[3] = inf`), are given to the model at
        `site`, among `values`: these are their rows, and they are no mask where the other values differ."""
        origin = self._origins[index]
        storage = origin.storage
        written = origin.op is not None and origin.op.name in (*_FILLS, "copy", "index_put")
        if not (written if storage is None else storage.role in ("target", "input")):
            return
        if origin.intended and (origin.made == "-inf" or _is_mask(values, mask, torch.isnan(values), "input")):
            if storage is not None:
                storage.role, storage.entered = "input", storage.entered or site
            return
        if storage is None:
            storage = origin.storage = StorageInfo(values.untyped_storage(), None, INPUT, "input")
        elif origin.intended and origin.readers:  # a number that was written into the batch
            storage.entered = origin.readers[0].site
        storage.role, storage.entered = "input", storage.entered or site
        origin.rows, origin.intended = self._rows(mask), False

    def note_rows(self, index: int, mask: torch.Tensor, op: Op) -> None:
        """Where an origin's own tensor shows no batch dimension, the first that it reaches and that has one tells the
        rows; of a tensor from outside, of which parts may be dropped on the way, every later one is noted."""
        origin = self._origins[index]
        if origin.of_weights:
            return
        if origin.storage is None and not (origin.op is not None and origin.op.name in EMPTIES):
            rows = self._rows(mask)
            origin.rows = rows if origin.rows is None else origin.rows
            if rows is not None and origin.made != "nan":
                origin.trail.append((op.index, rows))
            self._note_candidates(origin, mask, op)
        elif origin.storage is None or origin.storage.role in ("input", "target"):
            rows = self._rows(mask)
            if rows is not None:
                origin.trail.append((op.index, rows))

    def _note_candidates(self, origin: Origin, mask: torch.Tensor, op: Op) -> None:
        if len(origin.row_sets) < _MOST_CANDIDATES:
            for name, rows in row_candidates(mask, self.batch_size).items():
                if rows not in origin.row_sets.values():
                    origin.row_sets[op.site, op.name, name] = rows

    def _rows(self, mask: torch.Tensor) -> tuple[int, ...] | None:
        return rows_of(mask, self.batch_size)

    def _label_rows(self, scores: torch.Tensor, labels: torch.Tensor) -> tuple[int, ...] | None:
        """Rows whose label picks a bad score, for a loss that shows none of its rows any more."""
        if scores.dim() != 2 or labels.dim() != 1:
            return None
        counts = (labels >= 0) & (labels < scores.size(1))
        picked = scores.gather(1, labels.clamp(0, scores.size(1) - 1)[:, None])[:, 0]
        bad = ~finite(picked) & counts
        return self._rows(bad) if bool(bad.any()) else None


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


def _is_intended(origin: Origin, schema: Schema) -> bool:
    """A mask's infinity: written there as a number, or the log of a 0/1 tensor that no parameter reached."""
    if "nan" in origin.made or origin.made == "mixed":
        return False
    numbers: Iterable[Any] = origin.snapshot.scalars.values()
    if schema.base in _FILLS or any(isinstance(v, float) and math.isinf(v) for v in numbers):
        return True
    operand = next(iter(origin.snapshot.operands), None)
    return (
        schema.base in _LOGS
        and origin.made == "-inf"
        and operand is not None
        and operand.two_valued
        and "parameter" not in operand.reached_by
    )


def _is_mask(values: torch.Tensor, bad: torch.Tensor, nan: torch.Tensor, role: str) -> bool:
    """An infinity that a mask from outside holds on purpose: no NaN, and all other values equal;
    in a buffer, any others."""
    if role == "parameter" or bool(nan.any()) or values.is_complex():
        return False
    others = values[~bad]
    if role == "buffer":
        return bool((values[bad] < 0).all())
    return others.numel() == 0 or bool((others == others.flatten()[0]).all())


# -- the operands of an origin -----------------------------------------------------------------------------------------


_COPIES = 8
"""Origins of a step whose operands are copied."""
_COPY_BYTES = 64 * 2**20
_MOVES = frozenset(
    "clone to index index_select gather select slice cat stack view reshape unsqueeze squeeze expand permute transpose "
    "t copy contiguous detach alias repeat flip roll narrow split chunk unbind flatten lift_fresh unsafe_view".split()
)
"""Ops that only move values: whoever asks where a value came from means the op before."""


class Overwritten(NamedTuple):
    """An argument as it was before an op wrote into it. masks: its bad elements, by origin."""

    values: torch.Tensor
    masks: dict[int, torch.Tensor]
    maker: Op | None
    reach: int


class BadResult(NamedTuple):
    """A result of an op that is not finite, and what the op was given. overwritten: by the ids of the arguments that
    the op changed."""

    op: Op
    schema: Schema
    args: tuple
    kwargs: dict
    overwritten: dict[int, Overwritten]
    result: torch.Tensor


@dataclasses.dataclass
class OperandSnapshot:
    """operands and scalars for the facts; exponents for the figure; func and tensors (by argument name) to reproduce
    the fault."""

    operands: tuple[Operand, ...]
    scalars: dict[str, Any]
    exponents: dict[str, Any]
    func: Any = None
    tensors: dict[str, Any] = dataclasses.field(default_factory=dict)


class OperandRecorder:
    """Takes a snapshot at each origin. count: how many this step has had."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.count = recorder, 0

    def of_op(self, bad: BadResult, mask: torch.Tensor) -> OperandSnapshot:
        """The operands of an op whose result is bad where `mask` is set."""
        op, schema, args, kwargs, overwritten, result = bad
        operands, tensors = [], {}
        for name, tensor in _named_tensors(schema, args, kwargs, result):
            before = overwritten[id(tensor)].values if id(tensor) in overwritten else tensor
            values = dense(tensor)
            storage = None if values is None else self.recorder.storages.get(storage_key(values))
            at_fault = _at_fault(schema, before, mask)
            operands.append(_operand(name, before, storage, at_fault, overwritten.get(id(tensor))))
            tensors[name] = before
        zero = [o.name for o in operands if o.zeros_at_fault]  # drawn: a zero where the result is bad, else the first
        drawn = next((tensors[n] for n in (*zero, *tensors) if can_be_nonfinite(tensors[n])), None)
        histogram = {}
        if drawn is not None:
            histogram = _histogram(f"input of {op.name}", drawn, _at_fault(schema, drawn, mask, same_shape=True))
        snapshot = OperandSnapshot(tuple(operands[:4]), _scalars(op, schema, args, kwargs, tensors, result), histogram)
        self.count += 1
        size = sum(t.nbytes for t in tensors.values() if t.layout is torch.strided)
        if self.count <= _COPIES and size < _COPY_BYTES:
            snapshot.func = op.func
            snapshot.tensors = {
                name: _copy(value, overwritten) for name, value in named_arguments(schema, args, kwargs)
            }
        return snapshot

    def of_tensor(self, tensor: torch.Tensor, mask: torch.Tensor) -> OperandSnapshot:
        """A tensor that was bad when the step got it."""
        return OperandSnapshot((), {}, _histogram("the tensor itself", tensor, mask))


def _copy(value: Any, overwritten: dict[int, Overwritten]) -> Any:
    """An argument as it was before the op, with copies of its tensors."""
    if isinstance(value, (list, tuple)):
        return [_copy(v, overwritten) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return (overwritten[id(value)].values if id(value) in overwritten else value).detach().clone()


def _named_tensors(schema: Schema, args: tuple, kwargs: dict, result: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The op's tensors by name; of the lists of a foreach op those that go with the result."""
    named = named_arguments(schema, args, kwargs)
    lists = [value for _, value in named if isinstance(value, (list, tuple))]
    place = next((i for values in lists for i, tensor in enumerate(values) if tensor is result), None)
    tensors = []
    for name, value in named:
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif isinstance(value, (list, tuple)):
            tensors += [
                (f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, torch.Tensor) and place in (None, i)
            ]
    return [(n, t) for n, t in tensors if dense(t) is not None and t.device.type != "meta"]


def _at_fault(
    schema: Schema, operand: torch.Tensor, mask: torch.Tensor, same_shape: bool = False
) -> torch.Tensor | None:
    """The operand's elements that the bad results came from (same_shape: a mask of them); None if it can't be told."""
    values = dense(operand)
    if values is None or not schema.pointwise or values.layout is not torch.strided:
        return None
    if same_shape:
        return mask if values.shape == mask.shape else None
    try:
        return values.broadcast_to(mask.shape)[mask]
    except RuntimeError:
        return None


def _operand(
    name: str,
    tensor: torch.Tensor,
    storage: StorageInfo | None,
    at_fault: torch.Tensor | None,
    overwritten: Overwritten | None,
) -> Operand:
    values = dense(tensor)
    assert values is not None, "operands that can't be read are left out"
    history = overwritten or storage
    maker, reach = (None, 0) if history is None else (history.maker, history.reach)
    source = _source(maker)
    fields: dict[str, Any] = _counts(values.real if values.is_complex() else values)
    if at_fault is not None and at_fault.numel() and not at_fault.is_complex():
        sound = at_fault[finite(at_fault)] if at_fault.is_floating_point() else at_fault
        fields["zeros_at_fault"] = int((at_fault == 0).sum())
        if sound.numel():
            fields["low_at_fault"], fields["high_at_fault"] = sound.min().item(), sound.max().item()
    role = "activation" if storage is None or not storage.role else storage.role
    if maker is not None and not reach:
        role = "constant"
    if maker is not None and maker.during == "backward":
        role = "gradient"
    return Operand(
        name,
        role,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        reached_by=reach_names(reach),
        source_op=source.name if source else None,
        source=where_of(source) if source else None,
        **fields,
    )


def _counts(values: torch.Tensor) -> dict[str, Any]:
    counts: dict[str, Any] = {"elements": values.numel(), "zeros": int((values == 0).sum())}
    if values.dtype is torch.bool or not values.numel():
        return counts
    sound = values[finite(values)] if values.is_floating_point() else values
    if values.is_floating_point():
        counts |= {
            "nans": int(torch.isnan(values).sum()),
            "infs": int((values == math.inf).sum()),
            "neg_infs": int((values == -math.inf).sum()),
        }
    if sound.numel():
        low, high = sound.min().item(), sound.max().item()
        counts |= {
            "low": low,
            "high": high,
            "negatives": int((sound < 0).sum()),
            "constant": low == high,
            "two_valued": counts["zeros"] + int((sound == 1).sum()) == values.numel(),
        }
    return counts


def _source(maker: Op | None) -> Op | None:
    """The op that computed the values, past ops that only moved them."""
    for _ in range(32):
        if maker is None or maker.name not in _MOVES or not maker.inputs:
            break
        maker = maker.inputs[0]
    return maker


def _scalars(op: Op, schema: Schema, args: tuple, kwargs: dict, tensors: dict, result: torch.Tensor) -> dict[str, Any]:
    """The op's number arguments, and a few counts that only some ops have."""
    scalars = {n: v for n, v in named_arguments(schema, args, kwargs) if isinstance(v, (int, float, bool))}
    first = next(iter(tensors.values()), None)
    if first is not None and result.numel() and first.numel() != result.numel():
        scalars["group"] = first.numel() / result.numel()
    if first is not None:
        scalars["elements"] = first.numel()
    if schema.base in ("softmax", "log_softmax") and first is not None:
        scalars["rows_all_masked"] = int((first == -math.inf).all(scalars.get("dim", -1)).sum())
    if schema.base == "nll_loss" and "target" in tensors:
        target = tensors["target"]
        scalars["ignored"], scalars["labels"] = int((target == scalars.get("ignore_index", -100)).sum()), target.numel()
    if op.forward is not None:
        scalars |= {f"forward_{k}": v for k, v in op.forward.scalars.items()}
    return scalars


def _histogram(title: str, tensor: torch.Tensor, at_fault: torch.Tensor | None) -> dict[str, Any]:
    """Plain numbers for the figure."""
    values = dense(tensor)
    if values is None or not can_be_nonfinite(values) or values.layout is not torch.strided:
        return {}
    real = values.abs() if values.is_complex() else values
    bad = real[at_fault] if at_fault is not None and at_fault.shape == real.shape else real.flatten()[:0]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "operand": title,
        "counts": exponents(real),
        "zeros": int((real == 0).sum()),
        "nans": int(torch.isnan(real).sum()),
        "infs": int((real == math.inf).sum()),
        "neg_infs": int((real == -math.inf).sum()),
        "bad_counts": exponents(bad),
        "bad_zeros": int((bad == 0).sum()),
    }


def where_of(op: Op, **more: Any) -> Where:
    """The place of an op. In backward the op named is the forward op whose derivative ran, unless the user wrote it."""
    name = op.forward.name if op.forward is not None and not op.custom else op.name
    place = Where(step=op.step, phase=op.during, module=op.module, module_type=op.module_type, op=name)
    inside = None if op.library is None or op.library == op.site else LibraryLine(*op.library)
    return dataclasses.replace(at_site(place, op.site), library=inside, **more)
