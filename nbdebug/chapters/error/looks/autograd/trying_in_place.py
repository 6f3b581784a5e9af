"""Does backward pass when the result goes to a new tensor? Tried with torch's own ops, on random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nbdebug.chapters.error.facts_autograd import Change

LARGEST = 100_000
"""Elements of what is tried on; a larger tensor is stood for by one of this many."""
OWN_RESULT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Exp": torch.exp,
    "Sqrt": torch.sqrt,
    "Softmax": lambda x: torch.softmax(x, -1),
    "LogSoftmax": lambda x: torch.log_softmax(x, -1),
    "Reciprocal": torch.reciprocal,
    "Rsqrt": torch.rsqrt,
    "Expm1": torch.expm1,
}
"""Ops whose derivative is computed from their own result, by the names of their nodes."""
CHANGES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "Add": (lambda y, r: y.add_(r), lambda y, r: y + r),
    "Sub": (lambda y, r: y.sub_(r), lambda y, r: y - r),
    "Mul": (lambda y, r: y.mul_(r), lambda y, r: y * r),
    "Div": (lambda y, r: y.div_(r), lambda y, r: y / r),
    "CopySlices": (lambda y, r: y.copy_(r), lambda y, r: y.clone().copy_(r)),
}
"""The change in place, and the same into a new tensor, by the names of their nodes."""


def tried(change: Change | None, saved_by: str, shape: tuple[int, ...] | None) -> bool | None:
    """Whether backward fails with the change and passes without; None where that can't be tried with torch alone."""
    if change is None or saved_by not in OWN_RESULT or change.op not in CHANGES or not shape or change.how == "step":
        return None
    size = 1
    for n in shape:
        size *= n
    source = torch.Generator().manual_seed(0)  # the user's own generator stays as it is
    start = torch.rand(shape if size <= LARGEST else (LARGEST,), generator=source) + 0.5
    added = torch.rand(start.shape, generator=source) + 0.5
    op, (in_place, anew) = OWN_RESULT[saved_by], CHANGES[change.op]
    return not _passes(start, added, op, in_place) and _passes(start, added, op, anew)


def _passes(
    start: torch.Tensor,
    added: torch.Tensor,
    op: Callable[[torch.Tensor], torch.Tensor],
    then: Callable[[torch.Tensor, torch.Tensor], object],
) -> bool:
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = start.clone().requires_grad_()
        y = op(x)
        after = then(y, added)
        try:
            (after if isinstance(after, torch.Tensor) else y).sum().backward()
        except RuntimeError:
            return False
    return x.grad is not None
