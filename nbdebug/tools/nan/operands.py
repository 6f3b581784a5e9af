"""What an op was given at the moment a bad value was born: counted then and there, kept as plain numbers.

The tensors themselves are kept only for the first few births, as copies, so that the fault can be reproduced alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from nbdebug.observe.locations import at_site
from nbdebug.observe.ops import Schema, named_arguments
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import StorageInfo, can_be_nonfinite, dense, exponents, finite, reach_names, storage_key
from nbdebug.report import Where
from nbdebug.tools.nan.facts import Operand


def where_of(op: Op, **more: Any) -> Where:
    """The place of an op. In backward the op named is the forward op whose derivative ran, unless the user wrote it."""
    named = op.forward.name if op.forward is not None and not op.custom else op.name
    place = Where(step=op.step, phase=op.during, module=op.module, module_type=op.module_type, op=named)
    return dataclasses.replace(at_site(place, op.site), **more)


_MOVES = frozenset(
    {
        "clone",
        "to",
        "index",
        "index_select",
        "gather",
        "select",
        "slice",
        "cat",
        "stack",
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "permute",
        "transpose",
        "t",
        "copy",
        "contiguous",
        "detach",
        "alias",
        "repeat",
        "flip",
        "roll",
        "narrow",
        "split",
        "chunk",
        "unbind",
        "flatten",
        "lift_fresh",
        "unsafe_view",
    }
)
_KEEP = 8
"""Births whose operands are kept as tensors."""
_KEEP_BYTES = 64 * 2**20


@dataclasses.dataclass
class OperandSnapshot:
    """operands and scalars for the facts; exponents for the figure;
    tensors by argument name, to reproduce the fault."""

    operands: tuple[Operand, ...]
    scalars: dict[str, Any]
    exponents: dict[str, Any]
    func: Any = None
    tensors: dict[str, Any] = dataclasses.field(default_factory=dict)


class OperandRecorder:
    """Called by the books at each birth."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.taken = recorder, 0

    def __call__(self, scene: tuple, mask: torch.Tensor) -> OperandSnapshot:
        op, schema, args, kwargs, kept, result = scene
        if op is None:
            return OperandSnapshot((), {}, _histogram("the tensor itself", result, mask))
        operands, tensors = [], {}
        for name, tensor in _named_tensors(schema, args, kwargs, result):
            before, memory = self._before(tensor, kept)
            at = _at_fault(schema, before, mask)
            operands.append(_operand(name, before, memory, at, kept.get(id(tensor))))
            tensors[name] = before
        guilty = _guilty(operands, tensors)
        histogram = {}
        if guilty is not None:
            histogram = _histogram(f"input of {op.name}", guilty, _at_fault(schema, guilty, mask, True))
        made = OperandSnapshot(tuple(operands[:4]), _scalars(op, schema, args, kwargs, tensors, result), histogram)
        self.taken += 1
        if self.taken <= _KEEP and sum(t.nbytes for t in tensors.values() if t.layout is torch.strided) < _KEEP_BYTES:
            made.func = op.func
            made.tensors = {name: _copy(self._whole(v, kept)) for name, v in named_arguments(schema, args, kwargs)}
        return made

    def _before(self, tensor: torch.Tensor, kept: dict) -> tuple[torch.Tensor, StorageInfo | None]:
        values = dense(tensor)
        memory = None if values is None else self.recorder.storages.get(storage_key(values))
        return (kept[id(tensor)][0] if id(tensor) in kept else tensor), memory

    def _whole(self, value: Any, kept: dict) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._whole(v, kept) for v in value]
        return kept[id(value)][0] if isinstance(value, torch.Tensor) and id(value) in kept else value


def _guilty(operands: list[Operand], tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The operand to be drawn: one that is zero where the result went bad,
    else the first of numbers that can be bad."""
    zero = [o.name for o in operands if o.zeros_at_fault]
    return next((tensors[n] for n in (*zero, *tensors) if can_be_nonfinite(tensors[n])), None)


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _named_tensors(schema: Schema, args: tuple, kwargs: dict, result: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The op's tensors by name; of the lists of a foreach op those that go with the result."""
    found = []
    nth = next(
        (
            i
            for _, v in named_arguments(schema, args, kwargs)
            if isinstance(v, (list, tuple))
            for i, t in enumerate(v)
            if t is result
        ),
        None,
    )
    for name, value in named_arguments(schema, args, kwargs):
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, (list, tuple)):
            found += [
                (f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, torch.Tensor) and nth in (None, i)
            ]
    return [(n, t) for n, t in found if dense(t) is not None and t.device.type != "meta"]


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
    name: str, tensor: torch.Tensor, memory: StorageInfo | None, at: torch.Tensor | None, kept: Any
) -> Operand:
    """One operand, counted."""
    values = dense(tensor)
    assert values is not None, "operands that can't be read are left out"
    maker = kept[2] if kept else (memory.maker if memory else None)
    source = _source(maker)
    reach = kept[3] if kept else (memory.reach if memory else 0)
    fields: dict[str, Any] = _counts(values.real if values.is_complex() else values)
    if at is not None and at.numel() and not at.is_complex():
        sound = at[finite(at)] if at.is_floating_point() else at
        fields["zeros_at_fault"] = int((at == 0).sum())
        if sound.numel():
            fields["low_at_fault"], fields["high_at_fault"] = sound.min().item(), sound.max().item()
    role = "activation" if memory is None or not memory.role else memory.role
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
    found: dict[str, Any] = {"elements": values.numel(), "zeros": int((values == 0).sum())}
    if values.dtype is torch.bool or not values.numel():
        return found
    sound = values[finite(values)] if values.is_floating_point() else values
    if values.is_floating_point():
        found |= {
            "nans": int(torch.isnan(values).sum()),
            "infs": int((values == math.inf).sum()),
            "neg_infs": int((values == -math.inf).sum()),
        }
    if sound.numel():
        low, high = sound.min().item(), sound.max().item()
        found |= {
            "low": low,
            "high": high,
            "negatives": int((sound < 0).sum()),
            "constant": low == high,
            "two_valued": found["zeros"] + int((sound == 1).sum()) == values.numel(),
        }
    return found


def _source(maker: Op | None) -> Op | None:
    """The op that computed the values, past ops that only moved them."""
    for _ in range(32):
        if maker is None or maker.name not in _MOVES or not maker.inputs:
            break
        maker = maker.inputs[0]
    return maker


def _scalars(op: Op, schema: Schema, args: tuple, kwargs: dict, tensors: dict, result: torch.Tensor) -> dict[str, Any]:
    """The op's number arguments, and a few counts that only some ops have."""
    found = {n: v for n, v in named_arguments(schema, args, kwargs) if isinstance(v, (int, float, bool))}
    first = next(iter(tensors.values()), None)
    if first is not None and result.numel() and first.numel() != result.numel():
        found["group"] = first.numel() / result.numel()
    if first is not None:
        found["elements"] = first.numel()
    if schema.base in ("softmax", "log_softmax") and first is not None:
        found["rows_all_masked"] = int((first == -math.inf).all(found.get("dim", -1)).sum())
    if schema.base == "nll_loss" and "target" in tensors:
        target = tensors["target"]
        found["ignored"], found["labels"] = int((target == found.get("ignore_index", -100)).sum()), target.numel()
    if op.forward is not None:
        found |= {f"forward_{k}": v for k, v in op.forward.scalars.items()}
    return found


def _histogram(title: str, tensor: torch.Tensor, at: torch.Tensor | None) -> dict[str, Any]:
    """Plain numbers for the figure."""
    values = dense(tensor)
    if values is None or not can_be_nonfinite(values) or values.layout is not torch.strided:
        return {}
    real = values.abs() if values.is_complex() else values
    guilty = real[at] if at is not None and at.shape == real.shape else real.flatten()[:0]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "operand": title,
        "counts": exponents(real),
        "zeros": int((real == 0).sum()),
        "nans": int(torch.isnan(real).sum()),
        "infs": int((real == math.inf).sum()),
        "neg_infs": int((real == -math.inf).sum()),
        "bad_counts": exponents(guilty),
        "bad_zeros": int((guilty == 0).sum()),
    }
