"""Which ops of a step make something bad? Found without a wait for the device at each op.

The largest magnitude of each result is measured on the device, for many results at a time, and all are read at once
when the scan is over. `SuspectScan` looks at a replay; `RecordingScan` goes along with the recording itself, where that
is made of a step that is known to go bad.

An op is known by a key that is the same in every run of the step: in the forward its number on the tape, in backward
the forward op whose derivative it computes, its name, and how often that has occurred before.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.observe.backward import Backward, graph_nodes
from nbdebug.observe.ops import Schema, argument_tensors, schema_of
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.tape import BackwardEntry
from nbdebug.observe.tensors import (
    all_finite,
    can_be_nonfinite,
    dense,
    each_largest,
    optional_storage_key,
    read_scalars,
)
from nbdebug.tools.nan.probe import Detection, Probe, StopCell
from nbdebug.tools.nan.taint import results_of

_next_number = torch._C._autograd._get_sequence_nr
_GROUP, _GROUP_BYTES = 64, 2**28
"""Results wait to be measured together, and keep their memory meanwhile: at most so many of them, or so many bytes."""


class Suspects(NamedTuple):
    """What a scan has found. results: the bad results of each op that has any, by their places among its results; in
    order. born_at: the number of the forward op at whose derivative all was born that is bad in backward, if that is a
    single one. complete: whether the suspects of backward are known, too, and not only that op. modules: where bad
    values went through. gradients: the leaves, by number, whose gradients are bad."""

    results: dict[Hashable, frozenset[int]]
    born_at: int | None
    complete: bool
    modules: set[str]
    gradients: list[int]


class PendingSizes:
    """Largest magnitudes, measured many at a time, and read in one go."""

    def __init__(self) -> None:
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0
        self._sizes: list[torch.Tensor] = []

    @property
    def waiting(self) -> bool:
        """Whether some are still to be measured."""
        return bool(self._waiting)

    def add(self, values: torch.Tensor) -> int:
        """The number under which the size of this tensor will be found. It must not change before `measure`."""
        number = len(self._sizes) + len(self._waiting)
        self._waiting.append(values.detach())
        self._bytes += values.nbytes
        if len(self._waiting) >= _GROUP or self._bytes > _GROUP_BYTES:
            self.measure()
        return number

    def measure(self) -> None:
        """Measure what waits."""
        if self._waiting:
            self._sizes += each_largest(self._waiting)
            self._waiting, self._bytes = [], 0

    def finite(self) -> list[bool]:
        """Whether each is finite: waits for the device."""
        self.measure()
        return [math.isfinite(size) for size in read_scalars(self._sizes)]


class OpKeys:
    """Numbers the ops of backward."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple] = collections.Counter()

    def next(self, forward: Op | None, name: str) -> Hashable:
        """The key of an op that runs now, as a part of the derivative of `forward`."""
        known = -1 if forward is None else forward.index, name
        self._counts[known] += 1
        return *known, self._counts[known]


class _ScannedOp(NamedTuple):
    """An op that has run. operands: their storages. results: for each its storage, whether it is all of that storage,
    and the number of its size."""

    key: Hashable
    module: str
    operands: tuple[int | None, ...]
    results: list[tuple[int | None, bool, int | None]]


class SuspectScan:
    """Measures the results of each op of a replay."""

    def __init__(self, recorder: Recorder):
        self.recorder, self._keys, self._sizes = recorder, OpKeys(), PendingSizes()
        self._ops: list[_ScannedOp] = []
        recorder.numbered, recorder.in_backward = True, self._in_backward

    def forward(self, op: Op, args: tuple, kwargs: dict) -> Any:
        """Run an op of the forward."""
        schema = schema_of(op.func)
        if schema.writes:
            self._sizes.measure()  # before what waits is changed
        out = op.func(*args, **kwargs)
        self.recorder.number(op, _next_number())
        self._note(op.index, op.module, schema, args, kwargs, out)
        return out

    def _in_backward(self, func: Any, schema: Schema, args: tuple, kwargs: dict, node: Any) -> Any:
        forward = self.recorder.forward_op(node)
        op = Op(-1, func, schema.base, self.recorder.step)
        op.forward = forward
        self.recorder.number(op, _next_number())  # it may have a derivative, too
        if schema.view and not schema.writes:
            return func(*args, **kwargs)
        if schema.writes:
            self._sizes.measure()
        out = func(*args, **kwargs)
        module = forward.module if forward is not None else ""
        self._note(self._keys.next(forward, schema.base), module, schema, args, kwargs, out)
        return out

    def _note(self, key: Hashable, module: str, schema: Schema, args: tuple, kwargs: dict, out: Any) -> None:
        if schema.view and not schema.writes:
            return
        results = [self._measure(tensor) for _, tensor in results_of(schema, args, kwargs, out)]
        if results:
            operands = tuple([optional_storage_key(t) for t in argument_tensors(args, kwargs)])
            self._ops.append(_ScannedOp(key, module, operands, results))

    def _measure(self, tensor: torch.Tensor) -> tuple[int | None, bool, int | None]:
        values = dense(tensor)
        if values is None:
            return None, False, None
        storage = values.untyped_storage()
        whole = values.numel() * values.element_size() == storage.nbytes()
        return storage._cdata, whole, self._sizes.add(values) if can_be_nonfinite(values) else None

    def suspects(self, gradients: dict[int, torch.Tensor]) -> Suspects:
        """Reads all sizes, and follows bad storages from op to op. gradients: by the leaves' numbers, as the replay
        left them."""
        sizes = {n: self._sizes.add(g) for n, g in gradients.items() if dense(g) is g and can_be_nonfinite(g)}
        finite = self._sizes.finite()
        results, origins, modules, tainted = {}, [], set(), set[int | None]()
        for op in self._ops:
            bad = frozenset([n for n, (*_, size) in enumerate(op.results) if size is not None and not finite[size]])
            if bad:
                results[op.key] = bad
                modules.add(op.module)
                if not tainted.intersection(op.operands):
                    origins.append(op.key)
            if bad or tainted:
                tainted -= {storage for n, (storage, whole, _) in enumerate(op.results) if whole and n not in bad}
                tainted |= {op.results[n][0] for n in bad}
        born_at = {key[0] if isinstance(key, tuple) else None for key in origins}
        return Suspects(
            results,
            born_at.pop() if len(born_at) == 1 else None,
            True,
            modules,
            [n for n, size in sizes.items() if not finite[size]],
        )


def needs_graph(probe: Probe, detection: Detection) -> bool:
    """Whether a backward is to be replayed before what went bad is reached. Else a replay keeps no activations."""
    before = probe.tape.entries[: detection.position]
    return detection.target.kind != "loss" or any(isinstance(entry, BackwardEntry) for entry in before)


def scan_replay(probe: Probe, detection: Detection) -> Suspects:
    """The suspects of the recorded step, up to what went bad."""
    recorder = Recorder(probe.stack, [], lambda *_: None)
    recorder.light = True
    scan = SuspectScan(recorder)
    graph = needs_graph(probe, detection)
    replay = Replay(probe.tape, around=scan.forward, during_engine=lambda: recorder, graph=graph)
    replay.run(detection.position, forward_only=detection.target.kind == "loss")
    with _disable_current_modes(), torch.no_grad():
        return scan.suspects(replay.gradients)


class RecordingScan:
    """Attach it before the probe is entered. The recording ends with StopCell at the first loss that is bad, or after
    the first backward that leaves a bad gradient.

    Then `call` is that backward, whose graph is still there; born_in: the node that made the first bad gradient, and
    born_at: its op, if all that is bad was born there. complete: no backward passed anything bad on into the step's
    forward, as one inside it may (`torch.autograd.grad`); the ops of such a one are not among the suspects."""

    def __init__(self, probe: Probe):
        self.probe, self.recorder, self._sizes = probe, probe.recorder, PendingSizes()
        self._results: list[tuple[Op, list[int | None]]] = []
        self._nodes: list[Any] = []
        self._passed_back: list[tuple[int, list[int], list[int]]] = []  # the node's number, sizes given and passed on
        self._known: dict[tuple, int] = {}  # sizes of gradients that still wait: the next node gets what one passes on
        self._handles: list[Any] = []
        self._modules: set[str] = set()
        self._bad_leaves: list[int] = []
        self._derived_again = False  # a backward made nodes, too, which are no op's
        self.call: Backward | None = None
        self.complete = True
        self.born_in: Any = None
        self.born_at: Op | None = None
        self._began, self._ended = probe.engine.before, probe.engine.after
        probe.recorder.numbered = probe.engine.keep_graph = True
        probe.recorder.watchers.append(self)
        probe.engine.before, probe.engine.after = self._backward_begins, self._backward_ended

    # -- forward: a watcher -------------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        if schema.writes:
            self._sizes.measure()  # before what waits is changed

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: Any) -> None:
        if not schema.view or schema.writes:
            results = [dense(t) for _, t in results_of(schema, args, kwargs, out)]
            sizes = [None if v is None or not can_be_nonfinite(v) else self._sizes.add(v) for v in results]
            self._results.append((op, sizes))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_begins(self, call: Backward) -> None:
        self._began(call)
        with _disable_current_modes(), torch.no_grad():
            if call.accumulate and not all(all_finite(r) for r in call.roots if can_be_nonfinite(r)):
                self.probe.tape.backward(call, ())
                raise StopCell
        self._derived_again = self._derived_again or call.create
        self._nodes = _nodes(call.roots)
        self._handles = [
            node.register_hook(functools.partial(self._passes_back, number)) for number, node in enumerate(self._nodes)
        ]

    def _passes_back(self, number: int, passed: tuple, received: tuple) -> None:
        """A hook. A fault of ours must not stop the backward."""
        if self.recorder.disabled_by:
            return
        try:
            with torch.no_grad():
                self._passed_back.append((number, self._measure(received), self._measure(passed)))
        except torch.OutOfMemoryError:
            raise  # of a replay: it may be tried again in another way
        except Exception as fault:  # the error boundary
            self.recorder.disable(fault)

    def _measure(self, gradients: tuple) -> list[int]:
        numbers = []
        for gradient in gradients:
            values = None if gradient is None else dense(gradient)
            if values is None or not can_be_nonfinite(values):
                continue
            place = values.data_ptr(), values.numel()
            number = self._known.get(place)
            if number is None:
                number = self._sizes.add(values)
                if self._sizes.waiting:
                    self._known[place] = number
                else:
                    self._known.clear()
            numbers.append(number)
        return numbers

    def _backward_ended(self, call: Backward, result: Any) -> None:
        self._ended(call, result)
        if self.recorder.disabled_by:
            self.close()
            return
        leaves = self.probe.tape.leaves.items()
        with _disable_current_modes(), torch.no_grad():
            gradients = {
                n: self._sizes.add(leaf.grad)
                for n, leaf in leaves
                if leaf.grad is not None and dense(leaf.grad) is leaf.grad and can_be_nonfinite(leaf.grad)
            }
            passed_finite = self._find_node(self._sizes.finite(), gradients)
        born_in = self.born_in
        self.close()
        if self._bad_leaves and call.accumulate:
            self.call, self.born_in = call, born_in
            raise StopCell
        self.complete = self.complete and passed_finite

    def _find_node(self, finite: list[bool], gradients: dict[int, int]) -> bool:
        """The node of a finished backward that was given finite gradients and passed bad ones on, if it is the only
        one. Returns whether all gradients were finite."""
        self._bad_leaves = [n for n, size in gradients.items() if not finite[size]]
        born: list[Any] = []
        for number, received, passed in self._passed_back:
            if all(finite[n] for n in (*received, *passed)):
                continue
            node = self._nodes[number]
            forward = self.recorder.forward_op(node)
            self._modules.add(forward.module if forward is not None else "")
            if all(finite[n] for n in received):
                born.append(node)
            elif not born:
                born.append(None)  # two sound gradients gave a bad sum
        if len(born) == 1 and born[0] is not None and not self._derived_again:
            self.born_in, self.born_at = born[0], self.recorder.forward_op(born[0])
        return all(finite[n] for _, received, passed in self._passed_back for n in (*received, *passed))

    # -- the answer ---------------------------------------------------------------------------------------------------

    def suspects(self) -> Suspects:
        """What was found: waits for the device."""
        with torch.no_grad():
            finite = self._sizes.finite()
        results: dict[Hashable, frozenset[int]] = {}
        modules = set(self._modules)
        for op, sizes in self._results:
            bad = frozenset([n for n, size in enumerate(sizes) if size is not None and not finite[size]])
            if bad:
                results[op.index] = bad
                modules.add(op.module)
        born_at = None if self.born_at is None else self.born_at.index
        return Suspects(results, born_at, False, modules, self._bad_leaves)

    def close(self) -> None:
        """Let go of the graph. Its nodes hold the hooks, and these the nodes: the collector can't see that circle."""
        while self._handles:
            self._handles.pop().remove()
        self.call = self.born_in = None
        self._passed_back, self._nodes = [], []
        self._known.clear()


def _nodes(roots: tuple[torch.Tensor, ...]) -> list[Any]:
    """The nodes of autograd's graph behind some tensors, other than those that only store gradients."""
    return [node for node in graph_nodes(root.grad_fn for root in roots) if node.next_functions]
