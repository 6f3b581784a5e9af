"""Ops by their schema: arguments by name, which of them an op writes to, whether its result is a view; and the modes
that watch them."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbdebug.interrupts import undone_by, uninterrupted
from nbdebug.observe.tensors import base_name, optional_storage_key


class Schema(NamedTuple):
    """What an op's signature says. base: its name without namespace and overload; writes: names of the arguments that
    it changes; view: its result shares an argument's storage; ignored: it computes nothing (the profiler's)."""

    base: str
    names: tuple[str, ...]
    writes: frozenset[str]
    view: bool
    pointwise: bool
    random: bool
    ignored: bool


# Training-mode batch norm changes its running statistics without saying so in its signature.
_SILENT_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)
_schemas: dict[Any, Schema] = {}


def schema_of(func: Any) -> Schema:
    """The op's schema, read once."""
    known = _schemas.get(func)
    if known is None:
        s = func._schema
        raw = s.name.split("::")[-1]
        writes = {a.name for a in s.arguments if a.alias_info and a.alias_info.is_write}
        writes.update(_SILENT_WRITES.get(raw, ()))
        view = bool(s.returns) and any(r.alias_info and not r.alias_info.is_write for r in s.returns)
        known = _schemas[func] = Schema(
            base_name(func),
            tuple(a.name for a in s.arguments),
            frozenset(writes),
            view,
            torch.Tag.pointwise in func.tags,
            torch.Tag.nondeterministic_seeded in func.tags,
            func.namespace == "profiler",
        )
    return known


def argument_tensors(args: Any, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among an op's arguments; lists of tensors (foreach ops) are entered."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if len(tensors) < len(args) or kwargs:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, (list, tuple)):
                tensors += [v for v in value if isinstance(v, torch.Tensor)]
        tensors += [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    return tensors


def written_tensors(schema: Schema, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an op changes."""
    return [
        t
        for name, value in named_arguments(schema, args, kwargs)
        if name in schema.writes
        for t in argument_tensors((value,), {})
    ]


def named_arguments(schema: Schema, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """The op's arguments with their names."""
    return [*zip(schema.names, args, strict=False), *kwargs.items()]


def is_distributed(func: Any) -> bool:
    """Whether an op exchanges data with other processes."""
    return func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def distributed_tensors(tape: Any, op: Any, args: tuple, out: Any) -> list[int]:
    """The numbers of all tensors on a tape that share storage with the inputs and outputs of a distributed op; none for
    other ops. A replay lacks these tensors, and may not need them, as where a loss is averaged for a log."""
    numbers: list[int] = []
    for tensor in tree_leaves((args, out)) if is_distributed(op.func) else ():
        place = tape._place(tensor) if isinstance(tensor, torch.Tensor) else None
        if place is not None:
            if tape.find(tensor) is None:
                tape._enter(tensor, None, place)
            numbers += tape.by_storage.get(place[0], ())
    return numbers


class WatchMode(TorchDispatchMode):
    """A mode beside which `torch.ctc_loss` takes the way that it takes without one. Beside a mode torch passes the
    lengths on as tensors, and its kernel refuses those of a CPU beside scores on a GPU, which work otherwise."""

    _entered: ClassVar[int] = 0
    _ctc_loss: ClassVar[Any] = None

    @undone_by("__exit__")
    def __enter__(self) -> Any:
        if not WatchMode._entered:
            WatchMode._ctc_loss, torch.ctc_loss = torch.ctc_loss, _ctc_loss
        WatchMode._entered += 1
        return super().__enter__()

    @uninterrupted
    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*(error or (None, None, None)))
        finally:
            self.left()

    @staticmethod
    def left() -> None:
        """A mode is off the stack: it has left, or autograd's engine has put back a stack without it."""
        WatchMode._entered -= 1
        if not WatchMode._entered:
            torch.ctc_loss = WatchMode._ctc_loss


def _ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *more: Any, **named: Any) -> Any:
    lengths = [input_lengths, target_lengths]
    if all(isinstance(t, torch.Tensor) and t.device.type == "cpu" != log_probs.device.type for t in lengths):
        lengths = [t.tolist() for t in lengths]
    return WatchMode._ctc_loss(log_probs, targets, *lengths, *more, **named)


_BY_NUMBER = frozenset("gather index_select index_add index_copy index_fill scatter scatter_add scatter_reduce".split())
"""Ops whose second argument is the dimension that they read or write by numbers."""


class RowsByNumber(WatchMode):
    """Sees whether an op reads or writes the rows of a batch by their numbers, as a network of graphs does: with fewer
    rows a number may lie beyond them, and on an accelerator that is no exception but the end of every tensor there.

    model: its own tensors have no rows. rows: of the batch. seen: whether there was such an op on a dimension that the
    rows may be folded into, as its size is a multiple of theirs."""

    def __init__(self, model: nn.Module, rows: int):
        super().__init__()
        self.rows, self.seen = rows, False
        self._own = {optional_storage_key(t) for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = base_name(func)
        if args and isinstance(args[0], torch.Tensor) and optional_storage_key(args[0]) not in self._own:
            sizes: list[int] = []
            if name in ("index", "index_put"):
                numbers = [index is not None and index.dtype not in (torch.bool, torch.uint8) for index in args[1]]
                sizes = list(itertools.compress(args[0].shape, numbers))
            elif name == "take":
                sizes = [args[0].numel()]
            elif name in _BY_NUMBER and args[0].dim():
                sizes = [args[0].shape[args[1]]]
            self.seen = self.seen or any(size and size % self.rows == 0 for size in sizes)
        return func(*args, **(kwargs or {}))
