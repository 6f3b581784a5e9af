"""What an op was given at the moment its result went bad, as plain numbers for the rules.

The first few origins of a step also get copies of the tensors themselves, so that the fault can be reproduced alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from nbdebug.observe.locations import at_site
from nbdebug.observe.ops import Schema, named_arguments
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import StorageInfo, can_be_nonfinite, dense, exponents, finite, reach_names, storage_key
from nbdebug.report import Where
from nbdebug.tools.nan.facts import Operand

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
    return dataclasses.replace(at_site(place, op.site), **more)
