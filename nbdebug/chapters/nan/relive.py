"""Find out afterwards where a bad value came from: replay the recorded step, and look.

On an accelerator a look at every op while the step runs makes the host wait at each. So the step is only recorded; when
its end shows something bad, it is replayed twice. The first replay keeps the largest magnitude of every op's result on
the device and reads all of them at once: these ops made something bad. The second keeps the books, for those ops alone.
A fault in the forward needs the forward only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nbdebug.chapters.nan.facts import Target
from nbdebug.chapters.nan.flow import Flow
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.scene import SceneTaker
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.finding import Where
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import schema_of, tensors_given, written
from nbdebug.observe.tape import Held
from nbdebug.observe.tensors import PARAMETER, TARGET, Memory, all_finite, can_be_bad, dense, key, largest, read

_GROUP, _GROUP_BYTES = 32, 2**30


class NotLocated(RuntimeError):
    """A step went bad, and replaying it does not show where. The message says why, and what to do instead."""


class Scout(TorchDispatchMode):
    """Which ops' results are bad, without waiting for the device. Ops are known by their number in the replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in Recorder

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._held: list[tuple[int, torch.Tensor]] = []
        self._bytes = 0
        self._numbers: list[int] = []
        self._sizes: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema.ignored:
            return func(*args, **kwargs)
        if schema.writes:
            self._measure()  # before what is held is changed
        out = func(*args, **kwargs)
        self.count += 1
        if not schema.view or schema.writes:
            results = tensors_given(out if isinstance(out, (list, tuple)) else (out,), {})
            for tensor in (*results, *written(schema, args, kwargs)) if schema.writes else results:
                self._hold(tensor)
        return out

    def _hold(self, tensor: torch.Tensor) -> None:
        values = dense(tensor)
        if values is None or not can_be_bad(values):
            return
        values = torch.view_as_real(values.detach().resolve_conj()) if values.is_complex() else values.detach()
        self._held.append((self.count - 1, values))
        self._bytes += values.nbytes
        if len(self._held) >= _GROUP or self._bytes > _GROUP_BYTES:
            self._measure()

    def _measure(self) -> None:
        if self._held:
            self._sizes += torch._foreach_norm([t for _, t in self._held], ord=math.inf)
            self._numbers += [number for number, _ in self._held]
            self._held, self._bytes = [], 0

    def bad(self) -> set[int]:
        """The numbers of the ops that made something bad."""
        self._measure()
        return {n for n, size in zip(self._numbers, read(self._sizes), strict=True) if not math.isfinite(size)}


class Relived:
    """One replay under a recorder of its own, which knows each recorded op's line and module."""

    def __init__(self, probe: Probe, seen: Seen, suspected: set[int] | None = None):
        self.probe, self.seen = probe, seen
        self.recorder = Recorder(probe.stack, [], self._external)
        self.recorder.step = probe.step
        self.flow = Flow(self.recorder, SceneTaker(self.recorder), suspected)
        births = probe.flow.births
        self.flow.births.batch, self.flow.births.folds = births.batch, set(births.folds)
        self.flow.births.leading = births.leading.copy()
        self.bad_outside: set[int] = set()

    def run(self) -> Replay:
        """Replay the step with the books kept."""
        self.recorder.watchers = [self.flow]
        replay = Replay(self.probe.tape, on_op=self._next, on_outside=self._introduce, on_backward=self._backward,
                        keep=self.seen.ref)
        with self.recorder:
            return replay.run(self.seen.position, forward_only=self.seen.target.kind == "loss")

    def _next(self, op: Op | None) -> None:
        self.recorder.replaying = op

    def _backward(self, roots: list[torch.Tensor], done: bool) -> None:
        with _disable_current_modes():
            if done:
                self.flow.births.segment += 1
            elif self.seen.target.kind == "loss":
                for root in roots:
                    self.seen.origins |= self.flow.origins(root)

    def _introduce(self, number: int, tensor: torch.Tensor, held: Held) -> None:
        """A tensor from outside, under the name that it had in the step."""
        with _disable_current_modes():
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


def relive(probe: Probe, seen: Seen) -> None:
    """Fill in the origins of `seen`, and let `probe` have the books. Raises NotLocated."""
    second, replay = _replayed(probe, seen)
    _judge(seen, second, replay)
    if not seen.origins:  # perhaps it read memory that nobody had written, where something else lies now
        probe.tape.unwritten_as_nan = True
        second, replay = _replayed(probe, seen)
        _judge(seen, second, replay)
    if not seen.origins:
        raise NotLocated(_sorry(probe, seen, "it came out finite when it was replayed"))
    probe.flow, probe.recorder, probe.proven = second.flow, second.recorder, True


def relive_buffers(probe: Probe) -> None:
    """A buffer went bad in a step that is otherwise sound: find its birth now, for the step in which it will show."""
    seen = Seen(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    try:
        second, replay = _replayed(probe, seen)
    except NotLocated:
        return  # then it will be a buffer that came bad from outside
    for number, tensor in replay.changed.items():
        memory = probe.tape.held[number].memory
        for birth in sorted(second.flow.origins(tensor))[:1]:
            if memory is not None and memory.role == "buffer":
                probe.spoiled_buffers.setdefault(memory.name, second.flow.births[birth])


def _replayed(probe: Probe, seen: Seen) -> tuple[Relived, Replay]:
    """Two replays: which ops made something bad; then the books, for those ops alone."""
    outside = {n: h.tensor for n, h in probe.tape.held.items() if h.grad_of is None and can_be_bad(h.tensor)
               and h.tensor.layout is torch.strided}
    try:
        scout = Scout()
        with scout:
            Replay(probe.tape).run(seen.position, forward_only=seen.target.kind == "loss")
        sizes = read([size for t in outside.values() for size in largest([t])])
        second = Relived(probe, seen, scout.bad())
        second.bad_outside = {n for n, size in zip(outside, sizes, strict=True) if not math.isfinite(size)}
        replay = second.run()
    except Exception as reason:
        why = f"the step can't be replayed ({type(reason).__name__}: {reason})"
        raise NotLocated(_sorry(probe, seen, why)) from reason
    if second.recorder.fault is not None:
        raise second.recorder.fault
    return second, replay


def _judge(seen: Seen, second: Relived, replay: Replay) -> None:
    """Where the bad values of gradients, parameters and returned tensors came from (a loss was asked on the way)."""
    kind = seen.target.kind
    tensors = {"gradient": replay.gradients, "parameter": replay.leaves}.get(kind, {})
    for number, tensor in tensors.items():
        born = {b for b in second.flow.origins(tensor) if kind != "parameter" or second.flow.births[b].memory is None}
        if born and not seen.origins:
            held = second.probe.tape.held[number].memory
            seen.rename(held.name if held is not None else "")
        seen.origins |= born
    if kind == "returned" and replay.kept is not None and not all_finite(replay.kept):
        seen.origins |= second.flow.origins(replay.kept)


def _sorry(probe: Probe, seen: Seen, reason: str) -> str:
    if probe.recorder.hidden and seen.target.kind != "loss":
        reason = f"its backward can't be replayed: it uses {probe.recorder.hidden}"
    return (f"Step {probe.step} went bad (its {seen.target.kind} is not finite), but {reason}. "
            "Run it again with strategy='trace', which looks at every op while the step runs.")
