"""`describe(x)`: a line for each tensor of anything, and a model's devices and types at a glance.

It reads what is there and runs nothing of the user's: no property, no `__len__`, no `__iter__`, no method of a
subclass. A DataLoader is not iterated. Values are read in place, in pieces, so that nothing is copied.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.rerun import has_nonfinite
from nbdebug.observe.tensors import dense, kinds_of
from nbdebug.observe.variables import attributes, key_text, members, named_parameters
from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, listed, module_name, percent, size

PIECE = 1 << 20
"""Elements that are read at once where a temporary of their size is needed."""
DEPTH = 12
MOST = 100_000
"""Objects that are looked into."""
LISTS = (list, tuple, collections.deque)
NO_RANGE = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
"""Types for which torch has no minimum: their pieces are widened."""


@dataclasses.dataclass(frozen=True)
class TensorLine:
    """What is known of one tensor. low, high: of its finite values, None where there are none or they can't be read;
    size: bytes of its elements."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    low: float | None = None
    high: float | None = None
    nan: int | None = None
    inf: int | None = None
    size: int = 0

    @property
    def row(self) -> list[Any]:
        shape = "not known yet" if self.shape is None else str(list(self.shape))
        return [self.name, shape, self.dtype, self.device, self.low, self.high, self.nan, self.inf]


def describe(x: Any, *, name: str = "x") -> Report:
    """A line for each tensor in anything: shape, type, device, the range of its finite values, NaN and inf counted.

    x: a tensor, a numpy array, nested dicts, lists and objects, a batch, a module (parameters, buffers, and gradients
    that are not finite), an optimizer (its state), a DataLoader (its tensors; no batch is taken). name: what the lines
    begin with. Nothing is copied and nothing of the user's runs; a tensor on a card is read there. Of a tensor on
    "meta", or of a subclass that keeps its values elsewhere, the values are not read.

    `report.frame()` has all lines. A NaN is a symptom, an inf is not: a mask may want it. Raises nothing.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        found = list(_tensors(name, x))
        lines = [_line(label, tensor) for label, tensor in found]
        glance = [text for text in (_of_model(name, x), _of_optimizer(name, x), _of_loader(name, x)) if text]
    lines.sort(key=lambda line: not (line.nan or line.inf))
    bad = [line for line in lines if line.nan]
    columns = ("tensor", "shape", "type", "device", "min", "max", "NaN", "inf")
    symptoms = [Symptom(_holds_nan(bad), "%nan_trace step() names what makes it.")] if bad else []
    return Report(
        "describe(x)",
        headline=" ".join(glance or [_summary(name, lines, x)]),
        notes=tuple(_notes(lines, bool(glance))),
        symptoms=symptoms,
        tables=(Table("Tensors", columns, [line.row for line in lines], open=True),) if lines else (),
        facts={"tensors": len(lines), "bytes": sum(line.size for line in lines)},
    )


# -- what there is ----------------------------------------------------------------------------------------------------


def _tensors(name: str, root: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of all tensors, each once, in the order in which a person would write them."""
    visited: dict[int, Any] = {}
    todo: list[tuple[str, Any, int]] = [(name, root, 0)]
    while todo and len(visited) < MOST:
        label, thing, depth = todo.pop()
        kind = type(thing)
        if kind in (str, bytes, int, float, bool, complex, type(None)) or id(thing) in visited:
            continue
        visited[id(thing)] = thing
        tensor = _as_tensor(thing)
        if tensor is not None:
            yield label, tensor
            grad = tensor.grad if issubclass(kind, torch.Tensor) and tensor.is_leaf else None
            if grad is not None and (depth == 0 or has_nonfinite(grad)):
                yield f"{label}.grad", grad
        elif depth < DEPTH:
            todo += reversed([(child, value, depth + 1) for child, value in _children(label, thing)])


def _as_tensor(thing: Any) -> torch.Tensor | None:
    """The thing as a tensor on the same memory; None for what is none."""
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        return thing
    if kind in LISTS and 1 < len(thing) <= MOST and all(type(v) in (int, float) for v in thing):
        return torch.tensor(list(thing), dtype=torch.float64, device="cpu")
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        try:
            with warnings.catch_warnings():  # that it can't be written to: nobody does
                warnings.simplefilter("ignore")
                return torch.from_numpy(thing if min(thing.strides, default=0) >= 0 else thing.copy())
        except (TypeError, ValueError):  # objects, texts, dates
            return None
    return None


def _children(label: str, thing: Any) -> list[tuple[str, Any]]:
    kind = type(thing)
    if issubclass(kind, torch.nn.Module):
        return [(f"{label}.{path}", value) for path, value in named_parameters(thing, buffers=True)]
    if issubclass(kind, torch.optim.Optimizer):
        return _of_state(label, thing)
    if issubclass(kind, dict):
        inside = [(f"{label}[{key_text(key)}]", value) for key, value in list(dict.items(thing))]
        return inside if kind is dict else inside + _attributes(label, thing)
    if issubclass(kind, (tuple, list)):
        iterate = tuple.__iter__ if issubclass(kind, tuple) else list.__iter__
        names = getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()
        own = names if type(names) is tuple else ()
        return [(f"{label}.{own[i]}" if i < len(own) else f"{label}[{i}]", v) for i, v in enumerate(iterate(thing))]
    if module_name(kind).partition(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        columns = (
            [(f"{label}[{key!r}]", thing[key]) for key in thing] if kind.__name__ == "DataFrame" else [(label, thing)]
        )
        return [(name, column.to_numpy()) for name, column in columns if column.dtype.kind in "biufc"]
    if kind in (set, frozenset, collections.deque):
        return [(f"{label}[{i}]", value) for i, value in enumerate(list(thing))]
    return _attributes(label, thing)


def _attributes(label: str, thing: Any) -> list[tuple[str, Any]]:
    """Of an object; not of a class, a function or a module of Python's."""
    if isinstance(thing, type) or module_name(type(thing)) in ("builtins", "types", "functools"):
        return []
    return [(f"{label}.{key}", value) for key, value in attributes(thing).items() if not key.startswith("__")]


def _of_state(label: str, optimizer: Any) -> list[tuple[str, Any]]:
    """The state of an optimizer by the place of its parameter: "optimizer.state[3].exp_avg"."""
    own = members(optimizer)
    places = {
        id(parameter): number
        for number, parameter in enumerate(p for g in own.get("param_groups", ()) for p in g.get("params", ()))
    }
    return [
        (f"{label}.state[{places.get(id(parameter), '?')}].{key}", value)
        for parameter, state in list(own.get("state", {}).items())
        if type(state) is dict
        for key, value in state.items()
    ]


# -- the values of one ------------------------------------------------------------------------------------------------


def _line(name: str, tensor: torch.Tensor) -> TensorLine:
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    if torch.nn.parameter.is_lazy(tensor):
        return TensorLine(name, None, dtype, device)
    try:
        known = TensorLine(name, None if tensor.is_nested else tuple(map(int, tensor.shape)), dtype, device)
        values = None if tensor.device.type == "meta" else dense(tensor)
        if values is None:
            return known
        values, repeats = _without_repeats(values.detach())
        found = _range(values)
        found |= {"nan": found["nan"] * repeats, "inf": found["inf"] * repeats}
        return dataclasses.replace(known, size=values.numel() * values.element_size(), **found)
    except Exception as fault:  # a type that has no such values: what is known stands
        return TensorLine(name, None, f"{dtype} ({type(fault).__name__})", device)


def _without_repeats(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(tensor, how often each value stands there) of an expanded one: each value once."""
    repeats = 1
    for axis in range(tensor.dim() - 1, -1, -1):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            repeats *= tensor.shape[axis]
            tensor = tensor.select(axis, 0)
    return tensor, repeats


def _range(tensor: torch.Tensor) -> dict[str, Any]:
    """The range of the finite values, and how many are NaN and inf: at once where all are finite, else by pieces."""
    if tensor.numel() == 0:
        return {"nan": 0, "inf": 0}
    low, high, nan, inf = math.inf, -math.inf, 0, 0
    whole = tensor.is_contiguous() and tensor.dtype not in NO_RANGE
    least, most = _ends(_plain(tensor)) if whole else (math.nan, math.nan)
    if math.isfinite(least) and math.isfinite(most):
        return {"low": least, "high": most, "nan": 0, "inf": 0}
    for piece in map(_plain, _pieces(tensor)):
        least, most = _ends(piece)
        if not (math.isfinite(least) and math.isfinite(most)):
            bad_nan, bad_inf = piece.isnan(), piece.isinf()
            nan, inf = nan + int(bad_nan.sum()), inf + int(bad_inf.sum())
            piece = piece.masked_select(~(bad_nan | bad_inf))
            least, most = _ends(piece) if piece.numel() else (math.inf, -math.inf)
        low, high = min(low, least), max(high, most)
    found = low <= high
    return {"low": low if found else None, "high": high if found else None, "nan": nan, "inf": inf}


def _ends(piece: torch.Tensor) -> tuple[float, float]:
    """(min, max) of a piece; NaN where it holds one."""
    least, most = torch.aminmax(piece)
    return least.item(), most.item()


def _plain(piece: torch.Tensor) -> torch.Tensor:
    if piece.is_complex():
        return torch.view_as_real(piece.resolve_conj())
    return piece.float() if piece.dtype in NO_RANGE else piece


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values in pieces of at most PIECE elements, all of them views."""
    if tensor.numel() <= PIECE:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE)
    else:
        axis = max(range(tensor.dim()), key=lambda i: tensor.shape[i])
        for part in tensor.split((tensor.shape[axis] + 1) // 2, axis):
            yield from _pieces(part)


# -- in sentences -----------------------------------------------------------------------------------------------------


def _of_model(name: str, x: Any) -> str:
    if not issubclass(type(x), torch.nn.Module):
        return ""
    parameters = [p for _, p in named_parameters(x)]
    if not parameters:
        return f"`{name}` ({type(x).__name__}) has no parameters."
    made = [p for p in parameters if not torch.nn.parameter.is_lazy(p)]
    trained, total = sum(p.numel() for p in made if p.requires_grad), sum(p.numel() for p in made)
    share = "all trained" if trained == total else f"{percent(trained / max(total, 1))} of them trained"
    grads = [p.grad for p in made if p.grad is not None]
    bad = sum(has_nonfinite(g) for g in grads)
    gradients = f"gradients in {len(grads)} of {count(len(made), 'tensor')}" if grads else "no gradients yet"
    mode = "train" if attributes(x).get("training") else "eval"
    return (
        f"`{name}` ({type(x).__name__}): {count(total, 'parameter')} in {count(len(made), 'tensor')}, {share}, "
        f"{kinds_of(parameters)}; {mode} mode; {gradients}{f', {bad} of them not finite' if bad else ''}."
    )


def _of_optimizer(name: str, x: Any) -> str:
    if not issubclass(type(x), torch.optim.Optimizer):
        return ""
    groups = attributes(x).get("param_groups", [])
    parameters = [p for group in groups for p in group["params"]]
    rates = listed(dict.fromkeys(f"{float(group['lr']):g}" for group in groups if _is_number(group.get("lr"))), 4, "")
    held = f"{count(len(parameters), 'parameter tensor')} in {count(len(groups), 'group')}"
    steps = len(attributes(x).get("state", {}))
    state = f"state for {steps} of them" if steps else "no state yet"
    return f"`{name}` ({type(x).__name__}): {held}, learning rate {rates or 'not known'}, {state}."


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or type(value) is torch.Tensor and value.numel() == 1


def _of_loader(name: str, x: Any) -> str:
    if not issubclass(type(x), torch.utils.data.DataLoader):
        return ""
    own: Mapping[str, Any] = attributes(x)
    workers, rows = own.get("num_workers", 0), own.get("batch_size")
    batches = f"batches of {rows}" if rows else "batches by its own sampler"
    kind = f"DataLoader of {type(own.get('dataset')).__name__}"
    return f"`{name}` ({kind}): {batches}, {count(workers, 'worker')}; no batch was taken."


def _summary(name: str, lines: list[TensorLine], x: Any) -> str:
    if not lines:
        return f"`{name}` ({type(x).__name__}) holds no tensor."
    total = size(sum(line.size for line in lines))
    places = dict.fromkeys(f"{line.dtype} on {line.device}" for line in lines)
    bad = [line for line in lines if line.nan or line.inf]
    state = f"{count(len(bad), 'holds', 'hold')} NaN or inf" if bad else "all values are finite"
    unread = sum(line.nan is None for line in lines)
    state = "no values were read" if unread == len(lines) else state
    return f"`{name}` ({type(x).__name__}): {count(len(lines), 'tensor')}, {total}, {listed(places, 3, '')}; {state}."


def _holds_nan(bad: list[TensorLine]) -> str:
    first = bad[0]
    more = f", and {count(len(bad) - 1, 'other tensor holds', 'other tensors hold')} NaN too" if len(bad) > 1 else ""
    total = math.prod(first.shape or ()) or 1
    return f"`{first.name}` holds NaN in {first.nan:,} of {count(total, 'value')}{more}."


def _notes(lines: list[TensorLine], at_a_glance: bool) -> Iterator[str]:
    devices = list(dict.fromkeys(line.device for line in lines))
    if len(devices) > 1 and at_a_glance:
        yield f"Not all on one device: {listed(devices, 4, '')}."
    unread = [line.name for line in lines if line.nan is None]
    if unread:
        yield f"Values not read (no memory of their own, or not yet made): {listed(unread, 3)}."
