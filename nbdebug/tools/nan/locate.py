"""Find out afterwards where a bad value came from: replay the recorded step, and look.

On an accelerator a look at every op while the step runs makes the host wait at each. So the step is only recorded; when
its end shows something bad, it is replayed. A scout, which went along with the recording or with a replay of its own,
tells which ops made something bad; one more replay keeps the books, for those ops alone. A fault in the forward needs
the forward only; one that was born in backward, at a single op, needs backward down to that op.

Ops of the forward are replayed one by one, so they can be looked at as they come; those of backward are run by torch's
engine, and are seen by a dispatch mode.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.observe.ops import Schema, schema_of
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.replay import Replay, storages_of
from nbdebug.observe.tape import ExternalTensor
from nbdebug.observe.tensors import (
    PARAMETER,
    TARGET,
    StorageInfo,
    all_finite,
    can_be_nonfinite,
    dense,
    each_largest,
    read_scalars,
    storage_key,
)
from nbdebug.report import Where
from nbdebug.tools.nan.facts import Target
from nbdebug.tools.nan.operands import OperandRecorder
from nbdebug.tools.nan.probe import Detection, Probe
from nbdebug.tools.nan.replay_taint import ReplayTaintTracker
from nbdebug.tools.nan.reproducer import Reproduction
from nbdebug.tools.nan.suspects import RecordingScan, Suspects, scouted

_next_relived_number = torch._C._autograd._get_sequence_nr


class StopReplay(BaseException):
    """Ends a replay once there is nothing more to be learned from it. (Recorders let it pass.)"""


class ReplayLocator:
    """One replay with the books kept, under a recorder that knows each recorded op's line and module."""

    def __init__(self, probe: Probe, seen: Detection, sighted: Suspects, bad_outside: set[int], exact: bool = False):
        self.probe, self.seen, self.sighted, self.bad_outside = probe, seen, sighted, bad_outside
        self.recorder = Recorder(probe.stack, [], self._external)
        self.recorder.step = probe.step
        self.flow = ReplayTaintTracker(
            self.recorder, OperandRecorder(self.recorder), sighted, exact or bool(bad_outside)
        )
        births = probe.flow.births
        self.flow.births.batch, self.flow.births.folds = births.batch, set(births.folds)
        self.flow.births.leading = births.leading.copy()
        self.recorder.watchers = [self, self.flow]
        self.origins: set[int] = set()  # of what was seen, where that was a loss, or where one birth is all there is
        self.caught: dict[int, Reproduction] = {}  # what the forward op was given whose derivative goes bad
        born_in_backward = seen.target.kind == "gradient" and not self.flow.exact
        self._born_at = sighted.born_at if born_in_backward else None
        self._there = False  # the derivative of that op has begun

    def run(self) -> Replay:
        """Replay the step, up to what went bad."""
        replay = Replay(
            self.probe.tape,
            on_outside=self._introduce,
            on_backward=self._backward,
            around=self._forward,
            during_engine=self._engine,
            keep=self.seen.ref,
        )
        with contextlib.suppress(StopReplay):
            replay.run(self.seen.position, forward_only=self.seen.target.kind == "loss")
            self._conclude()
        if self.recorder.fault is not None:
            raise self.recorder.fault
        return replay

    @property
    def complete(self) -> bool:
        """Whether all came again that the scout had seen."""
        suspects = self.sighted.suspects.keys()
        return bool(self._born_at is not None and self.origins) or (
            suspects == set(self.flow.met) and (self.sighted.whole or self.seen.target.kind in ("loss", "buffer"))
        )

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, args: tuple, kwargs: dict) -> Any:
        schema, flow = schema_of(op.func), self.flow
        try:
            reach = self.recorder.record_operands(op, args, kwargs)
            kept = flow.before(op, schema, args, kwargs)
            if op.index == self._born_at:
                self.caught[op.index] = Reproduction.given(op.func, args, kwargs)
        except Exception as fault:  # of ours, and none of the replay's
            self.recorder.fault = fault
            raise
        out = op.func(*args, **kwargs)
        try:
            self.recorder.number(op, _next_relived_number())
            self.recorder.record_results(op, schema, args, kwargs, out, reach)
            flow.after(op, schema, args, kwargs, out, kept)
            if op.index in self.caught:
                self.caught[op.index].listen(out)
        except Exception as fault:
            self.recorder.fault = fault
            raise
        return out

    def _backward(self, roots: list[torch.Tensor], done: bool) -> None:
        if done:
            self.flow.births.segment += 1
        elif self.seen.target.kind == "loss":
            self.origins |= {birth for root in roots for birth in self.flow.origins(root)}

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _engine(self) -> Iterator[None]:
        self.flow.in_backward = True
        with self.recorder:
            yield
        self.flow.in_backward = False

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        """As a watcher in backward, before the books: has the derivative gone by in which all was born?"""
        if self._born_at is not None:
            there = op.forward is not None and op.forward.index == self._born_at
            if self._there and not there:
                self._conclude()
            self._there = there

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        """See `before`."""

    def _conclude(self) -> None:
        """Ends the replay where enough is known: what was born in backward is born, and so are its rows; all that went
        bad before is a mask's."""
        births = self.flow.births
        born = {
            b
            for b in births
            if b.op is not None and b.op.forward is not None and not b.intended and b.op.forward.index == self._born_at
        }
        known = all(b.rows is not None or not births.batch_size for b in born)
        if born and known and all(b in born or b.intended for b in births):
            self.origins = {b.index for b in born}
            self.flow.touched |= self.sighted.modules
        if self.origins or not self.sighted.whole:
            raise StopReplay

    # -- what comes from outside --------------------------------------------------------------------------------------

    def _introduce(self, number: int, tensor: torch.Tensor, held: ExternalTensor) -> None:
        """A tensor from outside, under the name that it had in the step."""
        with torch.no_grad():
            values, known = dense(tensor), held.memory
            if values is None:
                return
            if known is None and not held.changed:  # a part of it may have been given to the model later
                known = self.probe.recorder.storages.get(storage_key(held.tensor))
            if known is None or not known.role:
                known = StorageInfo(
                    values.untyped_storage(),
                    None,
                    PARAMETER if held.leaf else TARGET,
                    "parameter" if held.leaf else "target",
                )
            role = known.role
            # of a data set in one memory, batches are introduced in turn
            memory = self.recorder.storages.get(storage_key(values))
            if memory is None:
                memory = StorageInfo(values.untyped_storage(), None, known.reach, role, known.name, known.module)
                memory.entered = known.entered
                self.recorder.storages[storage_key(values)] = memory
            earlier = self.probe.spoiled_buffers.get(memory.name) if role == "buffer" else None
            if number in self.bad_outside and earlier is not None:
                self.flow.adopt(earlier, values)
            elif number in self.bad_outside:
                self.flow.external(tensor, memory)
            elif role == "target":
                self.flow.births.note_shape(tensor)

    def _external(self, tensor: torch.Tensor, memory: StorageInfo) -> None:
        """Everything from outside has been introduced; views of it need no second look."""


class GraphLocator(ReplayLocator):
    """The books of one node of the graph. They are of use only if `origins` is filled in."""

    def __init__(self, probe: Probe, seen: Detection, sighted: Suspects, alongside: RecordingScan):
        super().__init__(probe, seen, sighted, set())
        self.alongside = alongside

    def look(self) -> None:
        """Run backward as far as that node."""
        call, node = self.alongside.call, self.alongside.born_in
        assert call is not None and node is not None, "there is a graph to look at"
        memories = storages_of(self.probe.tape)
        self.recorder.continue_from(self.probe.recorder, memories)
        for held in self.probe.tape.externals.values():
            known = memories.get(storage_key(held.tensor))
            if known is not None and known.role == "target":
                self.flow.births.note_shape(held.tensor)
        self.flow.in_backward = True
        self.flow.births.segment = self.probe.flow.births.segment - 1
        handles = [node.register_prehook(self._enter), node.register_hook(self._leave)]
        try:
            with contextlib.suppress(StopReplay), torch.enable_grad():
                torch.autograd.backward(call.roots, call.seeds, inputs=call.inputs or None)
        finally:
            for handle in handles:
                handle.remove()
        if self.recorder.fault is not None:
            raise self.recorder.fault

    def _enter(self, given: tuple) -> None:
        op = self.alongside.born_at
        assert op is not None and self._born_at is not None, "the node is an op's"
        self.caught[self._born_at] = Reproduction(op.func, None, None)
        self.caught[self._born_at].came_back(given)
        self.recorder.__enter__()

    def _leave(self, passed: Any, given: Any) -> None:
        self.recorder.__exit__(None, None, None)
        self._conclude()


_next_number = torch._C._autograd._get_sequence_nr


class NotLocated(RuntimeError):
    """A step went bad, and replaying it does not show where. The message says why, and what to do instead."""


def relive(probe: Probe, seen: Detection, scout: RecordingScan | None = None) -> None:
    """Fill in the origins of `seen`, and let `probe` have the books. scout: one that went along with the recording.
    Raises NotLocated."""
    with uncollected():
        second = None
        if scout is not None and probe.recorder.fault is None:
            sighted = scout.report()
            second = _on_graph(probe, seen, sighted, scout)
            scout.let_go()
            second = second or _located(probe, seen, sighted)
        second = second or _located(probe, seen)
        if not seen.origins:  # perhaps it read memory that nobody had written, where something else lies now
            probe.tape.unwritten_as_nan = True
            second = _located(probe, seen)
    if second is None or not seen.origins:
        raise NotLocated(_sorry(probe, seen, "it came out finite when it was replayed"))
    second.flow.spoiled.clear()  # masks as large as the tensors that they belong to
    probe.flow, probe.recorder, probe.proven, probe.caught = second.flow, second.recorder, True, second.caught


def relive_buffers(probe: Probe) -> None:
    """A buffer went bad in a step that is otherwise sound: find its birth now, for the step in which it will show."""
    seen = Detection(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    try:
        second, replay = _replayed(probe, seen, None)
    except NotLocated:
        return  # then it will be a buffer that came bad from outside
    for number, tensor in replay.changed.items():
        memory = probe.tape.externals[number].memory
        for birth in sorted(second.flow.origins(tensor))[:1]:
            if memory is not None and memory.role == "buffer":
                probe.spoiled_buffers.setdefault(memory.name, second.flow.births[birth])


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running: with all of torch in memory, one run of it takes as long as a few
    steps."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _located(probe: Probe, seen: Detection, sighted: Suspects | None = None) -> ReplayLocator | None:
    """The books, with the origins of `seen` filled in; None where a replay does not show again what `sighted` tells."""
    second, replay = _replayed(probe, seen, sighted)
    _judge(seen, second, replay)
    if sighted is not None and not (second.complete and seen.origins):
        seen.origins = set()
        return None
    return second


def _on_graph(probe: Probe, seen: Detection, sighted: Suspects, scout: RecordingScan) -> ReplayLocator | None:
    """The books of the one derivative in which all was born that is bad, where the recording's graph can tell."""
    fits = seen.target.kind == "gradient" and scout.call is not None and scout.born_at is not None
    if not fits or sighted.suspects or probe.recorder.custom_backward or _bad_outside(probe):
        return None
    found = GraphLocator(probe, seen, sighted, scout)
    try:
        found.look()
    except RuntimeError:  # such as too little memory; a replay may need less
        return None
    if found.origins:
        _judge(seen, found, None)
    return found if found.origins else None


def _bad_outside(probe: Probe) -> set[int]:
    """The numbers of the tensors that were bad when the step got them: one wait for the device."""
    outside = {
        n: h.tensor
        for n, h in probe.tape.externals.items()
        if h.grad_of is None and can_be_nonfinite(h.tensor) and h.tensor.layout is torch.strided
    }
    sizes = read_scalars(each_largest(list(outside.values())))
    return {n for n, size in zip(outside, sizes, strict=True) if not math.isfinite(size)}


def _replayed(probe: Probe, seen: Detection, sighted: Suspects | None) -> tuple[ReplayLocator, Replay]:
    """A replay with the books kept; before it, if need be, one that tells which ops made something bad."""
    second = None
    try:
        bad_outside = _bad_outside(probe)
        sighted = sighted or scouted(probe, seen)
        second = ReplayLocator(probe, seen, sighted, bad_outside)
        replay = second.run()
        if not second.flow.holds():
            second = ReplayLocator(probe, seen, sighted, bad_outside, exact=True)
            replay = second.run()
    except Exception as reason:
        if second is not None and second.recorder.fault is reason and not isinstance(reason, torch.OutOfMemoryError):
            raise
        said = str(reason).partition("\n")[0][:200]
        why = f"the step can't be replayed ({type(reason).__name__}: {said})"
        raise NotLocated(_sorry(probe, seen, why)) from reason
    return second, replay


def _judge(seen: Detection, second: ReplayLocator, replay: Replay | None) -> None:
    """Where the bad values of gradients, parameters, buffers and returned tensors came from (a loss was asked on the
    way)."""
    seen.origins |= second.origins
    kind, held = seen.target.kind, second.probe.tape.externals
    if replay is None or (second.origins and kind == "gradient"):
        _name_first(seen, held, second.sighted.gradients)
        return
    buffers = {n: t for n, t in replay.changed.items() if (m := held[n].memory) is not None and m.role == "buffer"}
    tensors = {"gradient": replay.gradients, "parameter": replay.leaves, "buffer": buffers}.get(kind, {})
    for number, tensor in tensors.items():
        born = {
            b
            for b in second.flow.origins(tensor)
            if kind not in ("parameter", "buffer") or second.flow.births[b].memory is None
        }
        if born and not seen.origins:
            _name_first(seen, held, [number])
        seen.origins |= born
    if kind == "returned" and replay.value is not None and not all_finite(replay.value):
        seen.origins |= second.flow.origins(replay.value)


def _name_first(seen: Detection, held: dict[int, ExternalTensor], numbers: list[int]) -> None:
    """Name the first bad one of the leaves that were looked at together."""
    memory = held[numbers[0]].memory if numbers and numbers[0] in held else None
    seen.rename(memory.name if memory is not None else "")


def _sorry(probe: Probe, seen: Detection, reason: str) -> str:
    if probe.recorder.custom_backward and seen.target.kind != "loss":
        reason = f"its backward can't be replayed: it uses {probe.recorder.custom_backward}"
    return (
        f"Step {probe.step} went bad (its {seen.target.kind} is not finite), but {reason}. "
        "Run it again with strategy='trace', which looks at every op while the step runs."
    )
