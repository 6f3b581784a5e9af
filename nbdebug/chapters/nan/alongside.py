"""Look at a step while it is recorded, where it is known that it goes bad: what is bad, without a wait at each op.

In the forward each op's results are measured, as they come. A loss that is bad ends the recording: the fault lies
before it. Backward is looked at node by node of autograd's graph, which costs little: hooks see the gradients that come
to a node and those that it passes on. The first node that makes a bad gradient of good ones is where it was born.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.chapters.nan.course import StopCell
from nbdebug.chapters.nan.flow import results_of
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.scout import Sighted, Sizes
from nbdebug.observe.engine import Backward
from nbdebug.observe.record import Op
from nbdebug.observe.schema import Schema
from nbdebug.observe.tensors import all_finite, can_be_bad, dense


class Alongside:
    """Attach it before the probe is entered. The recording ends with StopCell at the first loss that is bad, or after
    the first backward that leaves a bad gradient.

    Then `call` is that backward, whose graph is still there; born_in: the node that made the first bad gradient, and
    born_at: its op, if all that is bad was born there."""

    def __init__(self, probe: Probe):
        self.probe, self.recorder, self._sizes = probe, probe.recorder, Sizes()
        self._made: list[tuple[Op, list[int | None]]] = []
        self._nodes: list[Any] = []
        self._passed_back: list[tuple[int, list[int], list[int]]] = []  # the node's number, sizes given and passed on
        self._known: dict[tuple, int] = {}  # sizes of gradients that still wait: the next node gets what one passes on
        self._handles: list[Any] = []
        self._modules: set[str] = set()
        self._bad_leaves: list[int] = []
        self._derived_again = False  # a backward made nodes, too, which are no op's
        self.call: Backward | None = None
        self.born_in: Any = None
        self.born_at: Op | None = None
        self._began, self._ended = probe.engine.began, probe.engine.ended
        probe.recorder.numbered = probe.engine.keep_graph = True
        probe.recorder.watchers.append(self)
        probe.engine.began, probe.engine.ended = self._backward_begins, self._backward_ended

    # -- forward: a watcher -------------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        if schema.writes:
            self._sizes.measure()  # before what waits is changed

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        if not schema.view or schema.writes:
            made = [dense(t) for _, t in results_of(schema, args, kwargs, out)]
            self._made.append((op, [None if v is None or not can_be_bad(v) else self._sizes.add(v) for v in made]))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_begins(self, call: Backward) -> None:
        self._began(call)
        with _disable_current_modes(), torch.no_grad():
            if call.accumulate and not all(all_finite(r) for r in call.roots if can_be_bad(r)):
                self.probe.tape.backward(call, ())
                raise StopCell
        self._derived_again = self._derived_again or call.create
        self._nodes = _nodes(call.roots)
        self._handles = [
            node.register_hook(functools.partial(self._passes_back, number)) for number, node in enumerate(self._nodes)
        ]

    def _passes_back(self, number: int, passed: tuple, given: tuple) -> None:
        """A hook. A fault of ours must not stop the backward."""
        if self.recorder.blind:
            return
        try:
            with torch.no_grad():
                self._passed_back.append((number, self._numbers(given), self._numbers(passed)))
        except Exception as fault:  # the border
            self.recorder.go_blind(fault)

    def _numbers(self, gradients: tuple) -> list[int]:
        found = []
        for gradient in gradients:
            values = None if gradient is None else dense(gradient)
            if values is None or not can_be_bad(values):
                continue
            place = values.data_ptr(), values.numel()
            number = self._known.get(place)
            if number is None:
                number = self._sizes.add(values)
                if self._sizes.waiting:
                    self._known[place] = number
                else:
                    self._known.clear()
            found.append(number)
        return found

    def _backward_ended(self, call: Backward, result: Any) -> None:
        self._ended(call, result)
        while self._handles:
            self._handles.pop().remove()
        if self.recorder.blind:
            return
        leaves = self.probe.tape.leaves.items()
        with _disable_current_modes(), torch.no_grad():
            gradients = {
                n: self._sizes.add(leaf.grad)
                for n, leaf in leaves
                if leaf.grad is not None and dense(leaf.grad) is leaf.grad and can_be_bad(leaf.grad)
            }
            self._judge(self._sizes.finite(), gradients)
        self._passed_back, self._nodes = [], []
        self._known.clear()
        if self._bad_leaves and call.accumulate:
            self.call = call
            raise StopCell

    def _judge(self, finite: list[bool], gradients: dict[int, int]) -> None:
        """What a backward has shown, once its sizes are at hand."""
        self._bad_leaves = [n for n, size in gradients.items() if not finite[size]]
        born: list[Any] = []
        for number, given, passed in self._passed_back:
            if all(finite[n] for n in (*given, *passed)):
                continue
            node = self._nodes[number]
            forward = self.recorder.forward_op(node)
            self._modules.add(forward.module if forward is not None else "")
            if all(finite[n] for n in given):
                born.append(node)
            elif not born:
                born.append(None)  # two sound gradients gave a bad sum
        if len(born) == 1 and born[0] is not None and not self._derived_again:
            self.born_in, self.born_at = born[0], self.recorder.forward_op(born[0])

    # -- the answer ---------------------------------------------------------------------------------------------------

    def report(self) -> Sighted:
        """What was found."""
        with torch.no_grad():
            finite = self._sizes.finite()
        suspects: dict[Hashable, frozenset[int]] = {}
        modules = set(self._modules)
        for op, sizes in self._made:
            bad = frozenset([n for n, size in enumerate(sizes) if size is not None and not finite[size]])
            if bad:
                suspects[op.index] = bad
                modules.add(op.module)
        return Sighted(suspects, None if self.born_at is None else self.born_at.index, False, modules, self._bad_leaves)

    def let_go(self) -> None:
        """Of the graph."""
        self.call = self.born_in = None


def _nodes(roots: tuple[torch.Tensor, ...]) -> list[Any]:
    """The nodes of autograd's graph behind some tensors, other than those that only store gradients."""
    found: dict[int, Any] = {}
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += [following for following, _ in node.next_functions if following is not None]
    return [node for node in found.values() if node.next_functions]
