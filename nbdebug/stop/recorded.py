"""What is kept of a stop where nobody can type: the tensors at hand, in numbers. No tensor is kept.

Of the locals of a forward only tensors are looked at: any other object stays unread, and unnamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from nbdebug.finding import Report
from nbdebug.observe.tensors import can_be_bad, finite, plain
from nbdebug.stop.hooks import aside

COLUMNS = ["name", "shape", "dtype", "device", "min", "max", "mean", "not finite"]
_MOST = 60
"""Rows of a table."""


def tensors_of(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, by the expression that reads them: inp[0], out['logits']."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping) and depth < 3:
        for key in list(value)[:20]:
            if isinstance(key, (str, int)):
                yield from tensors_of(f"{name}[{key!r}]", value[key], depth + 1)
    elif isinstance(value, (tuple, list)) and depth < 3:
        for place, part in enumerate(value[:20]):
            yield from tensors_of(f"{name}[{place}]", part, depth + 1)


def numbers_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, dtype, device; of what can be read the smallest, the largest and the mean of the finite elements, and how
    many are not finite."""
    facts: dict[str, Any] = {
        "shape": str(tuple(tensor.shape)),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "min": None,
        "max": None,
        "mean": None,
        "not finite": None,
    }
    try:
        with aside():
            values = plain(tensor)
            if values.numel() and values.device.type != "meta":
                facts.update(_range(values))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        pass  # a tensor of a kind whose values can't be read, such as a fake one: its shape is told
    return facts


def _range(values: torch.Tensor) -> dict[str, Any]:
    if not can_be_bad(values):
        wide = values.double() if values.dtype in (torch.uint64, torch.int64) else values.float()
        return {"min": values.min().item(), "max": values.max().item(), "mean": wide.mean().item(), "not finite": 0}
    good = finite(values)
    bad = values.numel() - int(good.sum())
    kept = values.float() if values.element_size() < 4 else values
    kept = kept[good] if bad else kept
    if not kept.numel():
        return {"not finite": bad}
    low, high = kept.aminmax()
    return {"min": low.item(), "max": high.item(), "mean": kept.mean(dtype=torch.float64).item(), "not finite": bad}


def in_words(tensor: torch.Tensor) -> str:
    """ "float32 (16, 4) on cpu, -2.1 to 2.3, mean 0.01, all finite"."""
    facts = numbers_of(tensor)
    said = f"{facts['dtype']} {facts['shape']} on {facts['device']}"
    if facts["min"] is not None:
        said += f", {facts['min']:.4g} to {facts['max']:.4g}, mean {facts['mean']:.4g}"
    if facts["not finite"] is None:
        return said
    return said + (f", {facts['not finite']:,} not finite" if facts["not finite"] else ", all finite")


def locals_of(frame: FrameType, but: Any = ()) -> dict[str, Any]:
    """The tensors among a function's locals, in the order of the code, without those that are shown already."""
    shown = {id(value) for value in but}
    names = (*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars)
    seen = frame.f_locals
    return {name: seen[name] for name in names if name in seen and id(seen[name]) not in shown}


def table(title: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """One row a tensor; None where there is none."""
    found = [pair for name, value in values.items() for pair in tensors_of(name, value)]
    rows = [
        [name, *(facts[column] for column in COLUMNS[1:])]
        for name, tensor in found[:_MOST]
        for facts in [numbers_of(tensor)]
    ]
    left = f"{len(found) - _MOST} more are left out." if len(found) > _MOST else ""
    return {"title": title, "columns": COLUMNS, "rows": rows, "note": left} if rows else None


def report(
    question: str,
    subject: str,
    headline: str,
    facts: Mapping[str, Any],
    given: Mapping[str, Any],
    local: Mapping[str, Any],
    function: str,
    notes: tuple[str, ...] = (),
) -> Report:
    """The record of one stop. given: what is at hand, by name; local: the locals of the function around it."""
    tables = [table("At the stop", given), table(f"Locals of {function}", local)]
    return Report(
        question,
        subject=subject,
        notes=notes,
        facts={"headline": headline, "stop": dict(facts), "tables": [t for t in tables if t is not None]},
    )
