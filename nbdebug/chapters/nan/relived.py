"""One replay with the books kept.

Ops of the forward are replayed one by one, so they can be looked at as they come; those of backward are run by torch's
engine, and are seen by a dispatch mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.repro import Reproduction
from nbdebug.chapters.nan.scene import SceneTaker
from nbdebug.chapters.nan.scout import Sighted
from nbdebug.chapters.nan.scouted import ScoutedFlow
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import Schema, schema_of
from nbdebug.observe.tape import Held
from nbdebug.observe.tensors import PARAMETER, TARGET, Memory, dense, key

_next_number = torch._C._autograd._get_sequence_nr


class Found(BaseException):
    """Ends a replay once there is nothing more to be learned from it. (Recorders let it pass.)"""


class Relived:
    """One replay with the books kept, under a recorder that knows each recorded op's line and module."""

    def __init__(self, probe: Probe, seen: Seen, sighted: Sighted, bad_outside: set[int], exact: bool = False):
        self.probe, self.seen, self.sighted, self.bad_outside = probe, seen, sighted, bad_outside
        self.recorder = Recorder(probe.stack, [], self._external)
        self.recorder.step = probe.step
        self.flow = ScoutedFlow(self.recorder, SceneTaker(self.recorder), sighted, exact or bool(bad_outside))
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
        with contextlib.suppress(Found):
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
            reach = self.recorder.operands(op, args, kwargs)
            kept = flow.before(op, schema, args, kwargs)
            if op.index == self._born_at:
                self.caught[op.index] = Reproduction.given(op.func, args, kwargs)
        except Exception as fault:  # of ours, and none of the replay's
            self.recorder.fault = fault
            raise
        out = op.func(*args, **kwargs)
        try:
            self.recorder.number(op, _next_number())
            self.recorder.results(op, schema, args, kwargs, out, reach)
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
            raise Found

    # -- what comes from outside --------------------------------------------------------------------------------------

    def _introduce(self, number: int, tensor: torch.Tensor, held: Held) -> None:
        """A tensor from outside, under the name that it had in the step."""
        with torch.no_grad():
            values, known = dense(tensor), held.memory
            if values is None:
                return
            if known is None and not held.changed:  # a part of it may have been given to the model later
                known = self.probe.recorder.memories.get(key(held.tensor))
            if known is None or not known.role:
                known = Memory(
                    values.untyped_storage(),
                    None,
                    PARAMETER if held.leaf else TARGET,
                    "parameter" if held.leaf else "target",
                )
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
