"""Ops by which processes talk to each other. They can't be run again: in a replay nobody would answer."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def talks(func: Any) -> bool:
    """Whether an op talks to other processes."""
    return func.namespace in NAMESPACES


def lost_with(tape: Any, op: Any, args: tuple, out: Any) -> list[int]:
    """The numbers of all on a tape that lies in the memory of what such an op was given and made; none for other ops. A
    replay lacks it, and may do without it, as where a loss is averaged for a log."""
    numbers: list[int] = []
    for tensor in tree_leaves((args, out)) if talks(op.func) else ():
        place = tape._place(tensor) if isinstance(tensor, torch.Tensor) else None
        if place is not None:
            if tape.find(tensor) is None:
                tape._enter(tensor, None, place)
            numbers += tape.by_memory.get(place[0], ())
    return numbers
