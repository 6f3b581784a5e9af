"""The terms of a loss, such as an error and a penalty: their shares, and whether the gradient of each gets through.

A loss is followed back through sums, means and constant factors; what stands before those are its terms. The loss is
linear in them, so a term's share is its value times the loss's gradient there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.observe.backward import graph_leaves, graph_nodes
from nbdebug.observe.locations import at_site, locate
from nbdebug.report import Where
from nbdebug.tools.training.facts import DetachedAt
from nbdebug.tools.training.run.data import preserve_rng
from nbdebug.tools.training.run.evaluate import LossFn, loss_root
from nbdebug.tools.training.static.one_step import VIEWS, Calls, OpCall, calls_for, record
from nbdebug.tools.training.static.parameters import DETACHES, detached_at

SUMS = frozenset("add sub rsub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__".split())
FACTORS = frozenset("mul div neg __mul__ __rmul__ __imul__ __truediv__ __itruediv__ __neg__ mean sum".split())
LINEAR = SUMS | FACTORS | (VIEWS - DETACHES)
MOST = 8
"""Terms: a loss of more is no sum of a few parts with a meaning each."""
UNLIKE = 2
"""Nodes by which the graph of a loss may differ from the one that the loop sends backward: a division, a scale."""


class TermRecorder(TorchFunctionMode):
    """Records sums, means and constant factors while active, so that a loss can be taken apart. sites: also where in
    the user's code each of its numbers is computed, by the tensor's id."""

    def __init__(self, sites: bool = False) -> None:
        super().__init__()
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.ops: dict[int, str] = {}
        self.sites: dict[int, Any] | None = {} if sites else None
        self._alive: list[torch.Tensor] = []  # else an id would be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.dim() <= 1:
            self._note(getattr(func, "__name__", ""), args, out)
        return out

    def _note(self, op: str, args: Any, out: torch.Tensor) -> None:
        op = op if op.startswith("__") else op.rstrip("_")
        if self.sites is not None and out.dim() == 0:
            self.sites[id(out)] = locate().site
        if op not in LINEAR:
            self._alive.append(out)
            return
        parts = [a for a in args if isinstance(a, torch.Tensor)]
        if any(p is out for p in parts):  # in place
            parts = [*self.parts.get(id(out), []), *(p for p in parts if p is not out)] if id(out) in self.parts else []
        self.parts[id(out)], self.ops[id(out)] = parts, op
        self._alive += [out, *parts]

    def terms(self, loss: torch.Tensor, moves: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
        """The terms of a loss, itself where it has no others. moves: whether a value depends on parameters."""
        terms: list[torch.Tensor] = []
        todo = [loss]
        while todo:
            value = todo.pop()
            parts = [p for p in self.parts.get(id(value), []) if moves(p)]
            flat = all(p.dim() <= 1 for p in parts)
            if parts and flat and (len(parts) == 1 or self.ops[id(value)] in SUMS):
                todo += reversed(parts)
            else:
                terms.append(value)
        return terms if len(terms) <= MOST else [loss]


# Shares


def shares(model: nn.Module, loss_fn: LossFn, batch: Any) -> list[float]:
    """What each term adds to the loss of this batch; raises what the loss raises."""
    with torch.enable_grad(), TermRecorder() as recorder:
        loss = loss_root(loss_fn(model, batch))
        terms = recorder.terms(loss, lambda t: t.requires_grad)
    slopes = torch.autograd.grad(loss.sum(), terms, allow_unused=True)
    return [0.0 if g is None else float((g * t.detach()).sum()) for g, t in zip(slopes, terms)]


def term_site(model: nn.Module, loss_fn: LossFn, batch: Any, number: int) -> Where:
    """The user's line that computes a term."""
    with torch.enable_grad(), TermRecorder(sites=True) as recorder:
        terms = recorder.terms(loss_root(loss_fn(model, batch)), lambda t: t.requires_grad)
    return at_site(Where(), (recorder.sites or {}).get(id(terms[number]))) if number < len(terms) else Where()


def weaken(loss_fn: LossFn, number: int, factor: float) -> LossFn:
    """The same loss with the same value, in which the gradient of one term is multiplied by a factor."""

    def loss(model: nn.Module, batch: Any) -> Any:
        with TermRecorder() as recorder:
            whole = loss_root(loss_fn(model, batch))
            terms = recorder.terms(whole, lambda t: t.requires_grad)
        if number < len(terms) and terms[number].grad_fn is not None:
            terms[number].grad_fn.register_prehook(
                lambda grads: tuple(None if g is None else g * factor for g in grads)
            )
        return whole

    return loss


# Cut terms


def graph_signature(loss: torch.Tensor) -> Counter[str]:
    """How often each kind of node stands in the graph behind a loss."""
    return Counter(type(node).__name__ for node in graph_nodes([loss.grad_fn]))


def optimizers_behind(
    signature: Counter[str], known: Sequence[Counter[str]], stepped: Sequence[Sequence[int]]
) -> set[int]:
    """The optimizers, by position, that step after the backward whose loss has this graph; none where no call fits.

    known, stepped: of the first calls of backward, the graph of the loss, and the optimizers that stepped next."""
    positions: set[int] = set()
    for i, other in enumerate(known):
        unlike = ((signature - other) + (other - signature)).total()
        if unlike <= UNLIKE:
            positions.update(next((row for row in stepped[i:] if row), ()))
    return positions


def severed_term(model: nn.Module, loss_fn: LossFn, batch: Any, trained: Collection[int]) -> DetachedAt | None:
    """Where a term of the loss is cut off from all parameters that are trained by it, though it depends on them; None
    where none is. trained: their ids. Raises what the loss raises."""
    calls = calls_for(model, batch)
    with preserve_rng(loss_fn), torch.enable_grad(), TermRecorder() as recorder:
        loss = loss_root(record(calls, loss_fn, batch))
    mask = sum(1 << i for i, (_, p) in enumerate(calls.parameters) if id(p) in trained)
    for term in recorder.terms(loss, lambda t: bool(calls.dependence(t).params)):
        dependence = calls.dependence(term)
        reached = {id(leaf) for leaf in graph_leaves(term)} if term.requires_grad else set()
        on_purpose = dependence.maker is not None and dependence.maker.op in DETACHES
        if dependence.params & mask and not reached & set(trained) and not on_purpose:
            cut = _cut_before(calls, dependence.maker, mask)
            if cut is not None:
                return detached_at(calls, cut, set(calls.positions(cut.params & mask)))
    return None


def _cut_before(calls: Calls, last: OpCall | None, mask: int) -> OpCall | None:
    """The call nearest to this one that cuts these parameters off."""
    cuts = {id(call) for call in calls.detached if call.params & mask}
    todo, visited = deque([last]), set()
    while todo:
        call = todo.popleft()
        if call is None or id(call) in visited:
            continue
        if id(call) in cuts:
            return call
        visited.add(id(call))
        todo += [calls.dependence(t).maker for t in call.inputs]
    return None
