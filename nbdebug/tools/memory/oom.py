"""The out-of-memory card: what was requested, who held what, whether it grew or was too large at once, what would help.

It reads the error, the frames of its traceback (which still hold what they held) and the user's variables; nothing is
run again and nothing is freed.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe import variables as shells
from nbdebug.observe.frames import Frame, Owners, exception_chain, frames, phase, running_module
from nbdebug.observe.variables import MODULES_OWN, ShellPlaces, attributes, frame_variables, user_variables
from nbdebug.report import Plot, Report, Symptom, Table, Where
from nbdebug.text import size
from nbdebug.tools.memory.facts import FailedWork, Failure, Holding, RefusedRequest
from nbdebug.tools.memory.free import kept_by_notebook
from nbdebug.tools.memory.reachability import HeldBlock, ReachabilityWalk

MESSAGES = re.compile(
    r"out of memory|can't allocate memory|not enough memory: you tried|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Storage size calculation overflowed|"
    r"Unable to allocate .* for an array",
    re.IGNORECASE,
)
"""How torch's allocators, CUDA's libraries and numpy say that memory has run out."""
_SIZE = r"([\d.]+)\s*(bytes|[KMGTP]i?B)"
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: torch's on any device, CUDA's libraries', numpy's, Python's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(MESSAGES.search(message(error)))


def message(error: BaseException) -> str:
    """The text of an exception, as far as it was given as text: no `__str__` of the user's is asked."""
    if str(type.__getattribute__(type(error), "__module__")).startswith("numpy."):  # it is given a shape and a dtype
        return str(error)
    return " ".join(arg for arg in BaseException.args.__get__(error) if isinstance(arg, str))  # type: ignore[attr-defined]


def refused_request(error: BaseException) -> RefusedRequest:
    """The numbers in its message. Raises nothing: what is missing is None."""
    text = message(error)
    gpu = re.search(r"GPU (\d+)", text)
    device = (
        f"cuda:{gpu[1]}"
        if gpu
        else "cuda"
        if re.search(r"CUDA|CUBLAS|CUDNN", text)
        else ("mps" if "MPS" in text else "xpu" if "XPU" in text else "cpu")
    )
    return RefusedRequest(
        device,
        _requested(text),
        total=_size(text, rf"total capacity of {_SIZE}") or _size(text, rf"{_SIZE} total cap"),
        free=_size(text, rf"of which {_SIZE} is free") or _size(text, rf"{_SIZE} free"),
        allowed=_size(text, rf"{_SIZE} allowed") or _size(text, rf"max allowed: {_SIZE}"),
        allocated=_size(text, rf"{_SIZE} is allocated by PyTorch") or _size(text, rf"{_SIZE} already allocated"),
        unused=_size(text, rf"{_SIZE} is reserved by PyTorch but unallocated"),
        process=_size(text, rf"this process has {_SIZE} memory in use"),
    )


def _requested(text: str) -> int | None:
    requested = _size(text, rf"[Tt]ried to allocate {_SIZE}") or _size(text, rf"Unable to allocate {_SIZE}")
    if requested is not None:
        return requested
    overflown = re.search(r"sizes=\[([\d, ]+)\]", text)
    if overflown is None:
        return None
    count = 4
    for side in overflown[1].split(","):
        count *= int(side)
    return count


def _size(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return int(float(match[1]) * _UNITS[match[2][0].lower()]) if match else None


@dataclasses.dataclass
class HoldersAtFailure:
    """Who holds what. activations: the blocks that the frames and the graph hold."""

    holdings: list[Holding]
    activations: list[HeldBlock]


def held(
    names: Mapping[str, Any], trail: list[Frame], owners: Owners, places: ShellPlaces, device: str
) -> HoldersAtFailure:
    """All of it on this device, each storage at its first owner, largest first."""
    stop = [t for t in [names, *places.namespaces, places.outputs, places.shell] if t is not None]
    walk = ReachabilityWalk(graphs=False, tracebacks=False, stop=stop)
    parts = [*_weights(owners, walk)]
    parts += [
        ("variable", name, walk(value), Where())
        for name, value in user_variables(names).items()
        if id(value) not in owners.modules
    ]
    local = list(_locals(trail, owners, walk))
    saved = ReachabilityWalk(after=walk, stop=stop)
    graph = [("graph", "saved for backward", saved(*walk.nodes), Where())]
    outputs = [("cell output", name, walk(value), Where()) for name, value, _ in places.displayed()]
    holdings = [h for part in _merged([*parts, *local, *graph, *outputs]) if (h := _holding(*part, device)) is not None]
    active = [b for _, _, blocks, _ in [*local, *graph] for b in blocks if b.on(device)]
    return HoldersAtFailure(sorted(holdings, key=lambda h: -h.bytes), active)


def _weights(owners: Owners, walk: ReachabilityWalk) -> Iterator[tuple[str, str, list[HeldBlock], Where]]:
    for name, model in owners.models.items():
        weights = list(model.parameters())
        grads = [p.grad for p in weights if p.grad is not None]
        yield "parameter", f"{name}'s parameters", walk.take(weights), Where()
        yield "gradient", f"{name}'s gradients", walk.take(grads), Where()
        yield "buffer", f"{name}'s buffers", walk.take(model.buffers()), Where()
        for path, part in model.named_modules(prefix=name):
            for key, value in attributes(part).items():
                if key not in MODULES_OWN:
                    yield "variable", f"{path}.{key}", walk(value), Where()
    for name, optimizer in owners.optimizers.items():
        yield "optimizer state", f"{name}'s state", walk(optimizer.state), Where()


def _locals(
    trail: list[Frame], owners: Owners, walk: ReachabilityWalk
) -> Iterator[tuple[str, str, list[HeldBlock], Where]]:
    """The variables of each frame, the user's frames first; of an object that the method belongs to, its attributes."""
    lines: list[Where] = []
    for frame in trail:  # a frame of torch's gets the user's line that led there
        lines.append(frame.where if frame.users or not lines else lines[-1])
    for frame, where in sorted(zip(trail, lines), key=lambda pair: not pair[0].users):
        path = owners.paths.get(id(frame.module))
        inside = f"{path}.{frame.site.function}" if path else frame.site.function
        for name, value in frame.names.items():
            if name != "self":
                known = frame.users or path
                yield "variable", f"{name} in {inside}" if known else "operands of this line", walk(value), where
            elif frame.module is None:
                for key, part in attributes(value).items():
                    yield "variable", f"self.{key}", walk(part), where


def _merged(parts: list[tuple[str, str, list[HeldBlock], Where]]) -> list[tuple[str, str, list[HeldBlock], Where]]:
    """Those of one name at one line as one."""
    groups: dict[tuple[str, str, Where], list[HeldBlock]] = {}
    for kind, name, blocks, where in parts:
        groups.setdefault((kind, name, where), []).extend(blocks)
    return [(kind, name, blocks, where) for (kind, name, where), blocks in groups.items()]


def _holding(kind: str, name: str, blocks: list[HeldBlock], where: Where, device: str) -> Holding | None:
    mine = [block for block in blocks if block.on(device)]
    if not mine:
        return None
    largest = max(mine, key=lambda b: b.bytes)
    return Holding(
        kind, name, sum(b.bytes for b in mine), len(mine), largest.device, largest.dtype, largest.shape, where=where
    )


CLOSE = 0.01
"""How far a size may be from the size in the error, which is rounded to two decimals of its unit, or to blocks."""


def failed_work(trail: list[Frame], owners: Owners, active: list[HeldBlock], holdings: list[Holding]) -> FailedWork:
    """The step as its frames show it."""
    outer = next((frame for frame in trail if frame.module is not None), None)
    root = outer.module if outer is not None else next(iter(owners.models.values()), None)
    batch = _rows(outer.names) if outer is not None else None
    of_kind = collections.Counter[str]()
    for holding in holdings:
        of_kind[holding.kind] += holding.bytes
    optimizer = next(iter(owners.optimizers.values()), None)
    return FailedWork(
        batch,
        sum(b.bytes for b in active if batch and b.shape and b.shape[0] and b.shape[0] % batch == 0),
        sum(b.bytes for b in active),
        sum(b.bytes for b in active if b.dtype == "float32"),
        None if root is None else bool(root.training),
        _records(outer),
        None if root is None else _blocks(root),
        of_kind["parameter"],
        of_kind["optimizer state"],
        None if optimizer is None else _steps(optimizer),
        "" if optimizer is None else type(optimizer).__name__,
        _through(running_module(trail, owners)[0], None if root is None else _blocks(root)),
    )


def _rows(names: Mapping[str, Any]) -> int | None:
    """The rows of the first tensor among the arguments of a forward."""
    todo = [value for name, value in names.items() if name != "self"]
    while todo:
        value = todo.pop(0)
        if issubclass(type(value), torch.Tensor):
            return int(value.shape[0]) if value.dim() else None
        if type(value) in (list, tuple):
            todo = [*value, *todo]
        elif type(value) is dict:
            todo = [*value.values(), *todo]
    return None


def _records(frame: Frame | None) -> bool:
    """Whether outputs in the forward have a graph; where there are none, whether autograd records now."""
    outputs = [] if frame is None else [v for v in frame.names.values() if issubclass(type(v), torch.Tensor)]
    return (
        torch.is_grad_enabled()
        if not outputs
        else any(v.grad_fn is not None for v in outputs) or torch.is_grad_enabled()
    )


def _blocks(model: nn.Module) -> tuple[str, int] | None:
    """The container with the most children of one class, at least three that have children of their own."""
    candidates: list[tuple[int, str]] = []
    for name, part in model.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            kinds = collections.Counter(type(child) for child in part if next(child.children(), None) is not None)
            if kinds:
                candidates.append((kinds.most_common(1)[0][1], name))
    count, name = max(candidates, default=(0, ""))
    return (name, count) if count >= 3 else None


def _steps(optimizer: torch.optim.Optimizer) -> int | None:
    """How many steps it has done, where it counts them; 0 where its state is empty and it would count."""
    for state in optimizer.state.values():
        step: Any = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, (int, float)):
            return int(step)
        if issubclass(type(step), torch.Tensor) and step.numel() == 1:
            return int(step.item())
    counts = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop))
    return 0 if counts and not optimizer.state else None


def purpose(trail: list[Frame], request: int | None) -> tuple[str, tuple[int, ...]]:
    """What the memory was for, and its shape, where the variables of the innermost lines explain its size; else ""."""
    if not request:
        return "", ()
    for frame in reversed(trail):
        for words, shape, item in _candidates(frame):
            if abs(math.prod(shape) * item - request) <= CLOSE * request:
                return f"{words}, of shape {tuple(shape)}", tuple(shape)
        if frame.users:
            break
    return "", ()


def _candidates(frame: Frame) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(words, shape, bytes of an element) of what this frame may have been computing."""
    tensors = {name: value for name, value in frame.names.items() if issubclass(type(value), torch.Tensor)}
    module = frame.module
    if isinstance(module, (nn.Linear, nn.Embedding)):
        wide = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        for value in tensors.values():
            before = value.shape[:-1] if isinstance(module, nn.Linear) else value.shape
            yield f"the output of a {type(module).__name__}", (*before, wide), module.weight.element_size()
    for one, other in _pairs(tensors):
        a, b = tensors[one], tensors[other]
        if a.dim() > 1 and b.dim() > 1 and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]:
            yield f"the product of `{one}` and `{other}`", (*a.shape[:-1], b.shape[-1]), a.element_size()
        if a.dim() > 1 and a.dim() == b.dim() and a.shape[-1] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]:
            yield f"all pairs of rows of `{one}` and `{other}`", (*a.shape[:-1], b.shape[-2]), a.element_size()
    for name, value in tensors.items():
        yield f"as much as `{name}`", tuple(value.shape), value.element_size()
    sizes = {name: value for name, value in frame.names.items() if type(value) is int and value > 1}
    for one, other in _pairs(sizes):
        n, m = sizes[one], sizes[other]
        yield f"`{one}` by `{other}`", (n, m), 4
        yield f"`{one} * {other}` squared", (n * m, n * m), 4


def _pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """All pairs, those of two different names first."""
    ordered = list(names)
    return sorted(((one, other) for one in ordered for other in ordered), key=lambda pair: pair[0] == pair[1])


def _through(module: str | None, blocks: tuple[str, int] | None) -> float | None:
    """The share of the model's blocks that the forward had run: where it fails in the third of four, a half and an
    eighth; None outside of them."""
    if module is None or blocks is None:
        return None
    name, count = blocks
    inside = module.removeprefix(f"{name}.") if name else module
    place = inside.partition(".")[0]
    return (int(place) + 0.5) / count if place.isdigit() and (inside != module or not name) else None


SMALL = 1024
"""Bytes below which an owner is not listed."""


def cause_of(error: BaseException) -> BaseException | None:
    """The out-of-memory among an exception and those that led to it; None where there is none."""
    return next((one for one in exception_chain(error) if is_out_of_memory(one)), None)


def out_of_memory(
    error: BaseException, names: Mapping[str, Any] | None = None, *, course: Sequence[int] = (), shell: Any = None
) -> Report:
    """The card of one failure.

    error: the exception, with its traceback. names: the user's variables; left out: those that the caller sees.
    course: live bytes after each earlier step; left out: those that `mem(step)` has counted, if it ran the step.
    shell: IPython's; left out: the one that runs.

    Raises ValueError for an exception that is no out-of-memory.
    """
    if not isinstance(error, BaseException) or not is_out_of_memory(error):
        raise ValueError(f"out_of_memory takes an exception that says that memory ran out; got {type(error).__name__}.")
    caller = sys._getframe(1)
    shell = shells.running_shell() if shell is None else shell
    if names is None:
        names = {**getattr(shell, "user_ns", {}), **caller.f_globals, **frame_variables(caller)}
    facts = _failure(error, names, tuple(int(count) for count in course or _watched(error)), shell)
    from nbdebug.tools.memory.rules.out_of_memory import out_of_memory as rule

    finding = rule(facts)
    tables, plots = _drawings(facts)
    return Report(
        "out of memory",
        findings=(finding,) if finding else (),
        symptoms=(Symptom("Memory ran out.", "The table shows who held what when it did."),),
        unchecked=facts.unchecked,
        notes=_notes(facts),
        facts={"failure": dataclasses.asdict(facts)},
        tables=tables,
        plots=plots,
    )


def _watched(error: BaseException) -> Sequence[int]:
    """Live bytes after each earlier step, where mem(step) measured them and attached its report to the error."""
    report = vars(error).get("report")
    after = report.facts.get("after") if isinstance(report, Report) else None
    return after if isinstance(after, list) else ()


def _failure(error: BaseException, names: Mapping[str, Any], course: tuple[int, ...], shell: Any) -> Failure:
    gc.collect()  # an earlier failure, replaced by this one, may be left as garbage: it is free in all but name
    request = refused_request(error)
    trail = frames(error)
    owners = Owners.among(names, trail)
    holders = held(names, trail, owners, shells.ShellPlaces(shell, names), request.device)
    total = sum(holding.bytes for holding in holders.holdings)
    used = request.allocated
    limit, free = _room(request)
    leftovers = kept_by_notebook(names, shell, error, request.device)
    expression, shape = purpose(trail, request.bytes)
    left = max(0, used - total) if used is not None else 0
    return Failure(
        type(error).__name__,
        request,
        _where(trail, owners),
        expression,
        tuple(holders.holdings),
        leftovers,
        failed_work(trail, owners, holders.activations, holders.holdings),
        course,
        limit,
        free,
        left,
        min(left, _freed_since(request)),
        sum(b.bytes for b in holders.activations if shape and b.shape == shape),
    )


def _where(trail: list[Frame], owners: Owners) -> Where:
    users = [frame for frame in trail if frame.users]
    at = users[-1].where if users else Where()
    module, kind = running_module(trail, owners)
    return dataclasses.replace(at, phase=phase(trail), module=module, module_type=kind)


def _room(request: RefusedRequest) -> tuple[int | None, int | None]:
    """(total, available) on the device; on the CPU as it is now, under the process's own limit."""
    if request.device != "cpu" or request.free is not None:
        limit = request.allowed or request.total
        free = request.free
        if request.allowed is not None and request.allocated is not None:
            free = min(
                max(0, request.allowed - request.allocated - (request.unused or 0)), request.free or request.allowed
            )
        return limit, free
    import psutil

    machine = psutil.virtual_memory()
    limit, free = int(machine.total), int(machine.available)
    own = _own_limit()
    if own is not None:
        address_space = int(psutil.Process().memory_info().vms)
        limit, free = min(limit, own), min(free, max(0, own - address_space))
    return limit, free


def _freed_since(request: RefusedRequest) -> int:
    """Bytes that were in use when it failed and are in use no longer."""
    if request.allocated is None:
        return 0
    if request.device.startswith("cuda:") and torch.cuda.is_initialized():
        return max(0, request.allocated - torch.cuda.memory_allocated(request.device))
    return request.allocated if request.device == "cpu" else 0  # whatever has no name by now


def _own_limit() -> int | None:
    """The process's own limit of its address space, if it has one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _notes(facts: Failure) -> tuple[str, ...]:
    notes = []
    if facts.asked.device != "cpu" and torch.cuda.is_initialized() and facts.held:
        notes.append("The frames of the failed cell keep their tensors until `%free traceback` or the next error.")
    elif facts.held:
        notes.append("`%free traceback` frees what the failed cell holds; `%debug` works until then.")
    return tuple(notes)


def _drawings(facts: Failure) -> tuple[tuple[Table, ...], tuple[Plot, ...]]:
    """The numbers for the views."""
    held = [*facts.held]
    parts: dict[str, int] = {}
    for holding in held:
        word = {"variable": "variables", "graph": "saved for backward"}.get(holding.kind, holding.kind)
        parts[word] = parts.get(word, 0) + holding.bytes
    if facts.gone:
        parts["gone since"] = facts.gone
    if facts.left > facts.gone:
        parts["not found by name"] = facts.left - facts.gone
    rows: list[list[Any]] = [
        [
            h.name,
            h.kind,
            h.bytes,
            h.where.place,
            f"{h.dtype} {h.shape}" + (f" and {h.storages - 1} more" if h.storages > 1 else ""),
        ]
        for h in held
        if h.bytes >= SMALL
    ]
    rows += [
        [f"({name})", "unknown", count, "", remark]
        for name, count, remark in (
            ("gone since", facts.gone, "in use when it failed, free now"),
            ("no name found", facts.left - facts.gone, "allocated, in no tensor that was found"),
        )
        if count > 0
    ]
    total = sum(parts.values())
    table = Table(
        f"Held when it failed: {size(total)} on {facts.asked.device}",
        ("name", "kind", "held (bytes)", "where", "largest"),
        rows,
        "Each storage counted once, at its first owner.",
    )
    if not parts:
        return (table,) if rows else (), ()
    picture: dict[str, Any] = {
        "title": "Held when it failed",
        "parts": sorted(([k, v] for k, v in parts.items()), key=lambda pair: -int(pair[1])),
        "total": total,
        "limit": facts.limit,
        "course": [[i, b] for i, b in enumerate(facts.course)],
        "axis": "steps",
    }
    return (table,) if rows else (), (Plot("memory", picture),)
