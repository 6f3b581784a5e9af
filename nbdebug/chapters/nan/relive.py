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

from nbdebug.chapters.nan.facts import Target
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.repro import Reproduction
from nbdebug.chapters.nan.scene import SceneTaker
from nbdebug.chapters.nan.scout import Scout, Sighted, scouted
from nbdebug.chapters.nan.scouted import ScoutedFlow
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.finding import Where
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import Schema, schema_of
from nbdebug.observe.tape import Held
from nbdebug.observe.tensors import PARAMETER, TARGET, Memory, all_finite, can_be_bad, dense, each_largest, key, read

_next_number = torch._C._autograd._get_sequence_nr


class NotLocated(RuntimeError):
    """A step went bad, and replaying it does not show where. The message says why, and what to do instead."""


class _Found(BaseException):
    """Ends a replay once there is nothing more to be learned from it. (Recorders let it pass.)"""


class Relived:
    """One replay with the books kept, under a recorder that knows each recorded op's line and module."""

    def __init__(self, probe: Probe, seen: Seen, sighted: Sighted, bad_outside: set[int],
                 exact: bool = False):
        self.probe, self.seen, self.sighted, self.bad_outside = probe, seen, sighted, bad_outside
        self.recorder = Recorder(probe.stack, [], self._external)
        self.recorder.step = probe.step
        self.flow = ScoutedFlow(self.recorder, SceneTaker(self.recorder), sighted.suspects, exact or bool(bad_outside))
        births = probe.flow.births
        self.flow.births.batch, self.flow.births.folds = births.batch, set(births.folds)
        self.flow.births.leading = births.leading.copy()
        self.recorder.watchers = [self.flow, self]
        self.origins: set[int] = set()  # of what was seen, where that was a loss, or where one birth is all there is
        self._only = self._only_root()
        self.caught: dict[int, Reproduction] = {}  # what the forward op was given whose derivative goes bad

    def _only_root(self) -> tuple | None:
        """The op at which all that is bad was born, if that is a single one in backward."""
        roots, suspects = self.sighted.roots, self.sighted.suspects
        if len(roots) != 1 or self.flow.exact or self.seen.target.kind != "gradient":
            return None
        first = next(iter(suspects))
        return first if isinstance(first, tuple) and first == roots[0] else None

    def run(self) -> Replay:
        """Replay the step, up to what went bad."""
        replay = Replay(self.probe.tape, on_outside=self._introduce, on_backward=self._backward, around=self._forward,
                        during_engine=self._engine, keep=self.seen.ref)
        with contextlib.suppress(_Found):
            replay.run(self.seen.position, forward_only=self.seen.target.kind == "loss")
        if self.recorder.fault is not None:
            raise self.recorder.fault
        return replay

    @property
    def complete(self) -> bool:
        """Whether all came again that the scout had seen."""
        return bool(self.origins and self._only) or self.sighted.suspects.keys() == set(self.flow.met)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, args: tuple, kwargs: dict) -> Any:
        schema, flow = schema_of(op.func), self.flow
        with self._own_fault():
            reach = self.recorder.operands(op, args, kwargs)
            kept = flow.before(op, schema, args, kwargs)
            if self._only is not None and op.index == self._only[0]:
                self.caught[op.index] = Reproduction.given(op.func, args, kwargs)
        out = op.func(*args, **kwargs)
        if op.index in self.caught:
            self.caught[op.index].listen(out)
        with self._own_fault():
            self.recorder.number(op, _next_number())
            self.recorder.results(op, schema, args, kwargs, out, reach)
            flow.after(op, schema, args, kwargs, out, kept)
        return out

    def _backward(self, roots: list[torch.Tensor], done: bool) -> None:
        if done:
            self.flow.births.segment += 1
        elif self.seen.target.kind == "loss":
            self.origins |= {birth for root in roots for birth in self.flow.origins(root)}

    @contextlib.contextmanager
    def _own_fault(self) -> Iterator[None]:
        """A fault in our own look is none of the replay's."""
        try:
            with torch.no_grad():
                yield
        except Exception as fault:
            self.recorder.fault = fault
            raise

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _engine(self) -> Iterator[None]:
        self.flow.in_backward = True
        with self.recorder:
            yield
        self.flow.in_backward = False

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        """As a watcher in backward, after the books."""

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        """Enough is known when the one birth is, and its rows are."""
        births = self.flow.births
        if self._only is None or len(births) != 1 or self.flow.met[:1] != [self._only]:
            return
        record = next(iter(births))
        if not record.intended and (record.rows is not None or not births.batch_size):
            self.origins = {record.index}
            self.flow.touched |= self.sighted.modules
            raise _Found

    # -- what comes from outside --------------------------------------------------------------------------------------

    def _introduce(self, number: int, tensor: torch.Tensor, held: Held) -> None:
        """A tensor from outside, under the name that it had in the step."""
        with torch.no_grad():
            values, known = dense(tensor), held.memory
            if values is None:
                return
            if known is None or not known.role:
                known = Memory(values.untyped_storage(), None, PARAMETER if held.leaf else TARGET,
                               "parameter" if held.leaf else "target")
            role = known.role
            # of a data set in one memory, batches are introduced in turn
            memory = self.recorder.memories.get(key(values))
            if memory is None:
                memory = Memory(values.untyped_storage(), None, known.reach, role, known.name, known.module)
                memory.entered = known.entered
                self.recorder.memories[key(values)] = memory
            earlier = self.probe.spoiled_buffers.get(memory.name) if role == "buffer" else None
            if number in self.bad_outside and earlier is not None:
                self.flow.adopt(earlier, values)
            elif number in self.bad_outside:
                self.flow.external(tensor, memory)
            elif role == "target":
                self.flow.births.note_shape(tensor)

    def _external(self, tensor: torch.Tensor, memory: Memory) -> None:
        """Everything from outside has been introduced; views of it need no second look."""


def relive(probe: Probe, seen: Seen, scout: Scout | None = None) -> None:
    """Fill in the origins of `seen`, and let `probe` have the books. scout: one that went along with the recording.
    Raises NotLocated."""
    with uncollected():
        second = None
        if scout is not None and probe.recorder.fault is None:
            second = _located(probe, seen, scout.report())
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
    seen = Seen(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    try:
        second, replay = _replayed(probe, seen, None)
    except NotLocated:
        return  # then it will be a buffer that came bad from outside
    for number, tensor in replay.changed.items():
        memory = probe.tape.held[number].memory
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


def _located(probe: Probe, seen: Seen, sighted: Sighted | None = None) -> Relived | None:
    """The books, with the origins of `seen` filled in; None where a replay does not show again what `sighted` tells."""
    second, replay = _replayed(probe, seen, sighted)
    _judge(seen, second, replay)
    if sighted is not None and not (second.complete and seen.origins):
        seen.origins = set()
        return None
    return second


def _replayed(probe: Probe, seen: Seen, sighted: Sighted | None) -> tuple[Relived, Replay]:
    """A replay with the books kept; before it, if need be, one that tells which ops made something bad."""
    outside = {n: h.tensor for n, h in probe.tape.held.items() if h.grad_of is None and can_be_bad(h.tensor)
               and h.tensor.layout is torch.strided}
    second = None
    try:
        sizes = read(each_largest(list(outside.values())))
        bad_outside = {n for n, size in zip(outside, sizes, strict=True) if not math.isfinite(size)}
        sighted = sighted or scouted(probe, seen)
        second = Relived(probe, seen, sighted, bad_outside)
        replay = second.run()
        if not second.flow.holds():
            second = Relived(probe, seen, sighted, bad_outside, exact=True)
            replay = second.run()
    except Exception as reason:
        if second is not None and second.recorder.fault is reason and not isinstance(reason, torch.OutOfMemoryError):
            raise
        said = str(reason).partition("\n")[0][:200]
        why = f"the step can't be replayed ({type(reason).__name__}: {said})"
        raise NotLocated(_sorry(probe, seen, why)) from reason
    return second, replay


def _judge(seen: Seen, second: Relived, replay: Replay) -> None:
    """Where the bad values of gradients, parameters, buffers and returned tensors came from (a loss was asked on the
    way)."""
    seen.origins |= second.origins
    kind, held = seen.target.kind, second.probe.tape.held
    if second.origins and kind == "gradient":
        _name_first(seen, held, second.sighted.gradients)
        return
    buffers = {n: t for n, t in replay.changed.items() if (m := held[n].memory) is not None and m.role == "buffer"}
    tensors = {"gradient": replay.gradients, "parameter": replay.leaves, "buffer": buffers}.get(kind, {})
    for number, tensor in tensors.items():
        born = {b for b in second.flow.origins(tensor) if kind not in ("parameter", "buffer")
                or second.flow.births[b].memory is None}
        if born and not seen.origins:
            _name_first(seen, held, [number])
        seen.origins |= born
    if kind == "returned" and replay.kept is not None and not all_finite(replay.kept):
        seen.origins |= second.flow.origins(replay.kept)


def _name_first(seen: Seen, held: dict[int, Held], numbers: list[int]) -> None:
    """Name the first bad one of the leaves that were looked at together."""
    memory = held[numbers[0]].memory if numbers and numbers[0] in held else None
    seen.rename(memory.name if memory is not None else "")


def _sorry(probe: Probe, seen: Seen, reason: str) -> str:
    if probe.recorder.hidden and seen.target.kind != "loss":
        reason = f"its backward can't be replayed: it uses {probe.recorder.hidden}"
    return (f"Step {probe.step} went bad (its {seen.target.kind} is not finite), but {reason}. "
            "Run it again with strategy='trace', which looks at every op while the step runs.")
