"""Which ops of a step make something bad? Found without a wait for the device at each.

The largest magnitude of each result is measured on the device, for many results at a time, and all are read at once
when the step is over. A scout goes along with a recording (of a step that is known to be bad), or else with a replay.

An op is known by a key that is the same in every run of the step: in the forward its number on the tape, in backward
the forward op whose derivative it computes, its name, and how often that has been met before.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.chapters.nan.course import StopCell
from nbdebug.chapters.nan.flow import results_of
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.observe.engine import Backward
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import Schema, schema_of, tensors_given
from nbdebug.observe.tensors import all_finite, can_be_bad, dense, each_largest, memory_key, read

_next_number = torch._C._autograd._get_sequence_nr
_GROUP, _GROUP_BYTES = 64, 2**28
"""Results wait to be measured together, and keep their memory meanwhile: at most so many of them, or so many bytes."""


class Sighted(NamedTuple):
    """What a scout brings back. suspects: the bad results of each op that has any, by their places among its results;
    in order. roots: those of the ops that were given nothing bad: what is bad was born there. modules: where bad values
    went through. gradients: the leaves, by number, whose gradients are bad."""

    suspects: dict[Hashable, frozenset[int]]
    roots: list[Hashable]
    modules: set[str]
    gradients: list[int]


class Keys:
    """Numbers the ops of backward."""

    def __init__(self) -> None:
        self._met: collections.Counter[tuple] = collections.Counter()

    def next(self, forward: Op | None, name: str) -> Hashable:
        """The key of an op that runs now, as a part of the derivative of `forward`."""
        known = -1 if forward is None else forward.index, name
        self._met[known] += 1
        return *known, self._met[known]


class _Passed(NamedTuple):
    """An op that has run: what memories it was given, and for each of its results: memory, whether it is all of that
    memory, and which measurement is its size."""

    key: Hashable
    module: str
    given: tuple[int | None, ...]
    made: list[tuple[int | None, bool, int | None]]


class Scout:
    """A watcher of forward ops, and the one who runs those of backward, for a recorder that is light."""

    def __init__(self, recorder: Recorder):
        self.recorder, self._keys = recorder, Keys()
        self._passed: list[_Passed] = []
        self._waiting: list[torch.Tensor] = []
        self._bytes = 0
        self._sizes: list[torch.Tensor] = []
        self._gradients: dict[int, torch.Tensor] = {}  # sizes, by the leaf's number
        recorder.numbered = True

    @classmethod
    def along(cls, probe: Probe) -> Scout:
        """A scout that goes along with a recording, which ends with StopCell at the first loss that is bad."""
        scout = cls(probe.recorder)
        began, ended = probe.engine.began, probe.engine.ended

        def at_backward(call: Backward) -> None:
            began(call)
            with _disable_current_modes(), torch.no_grad():
                if call.accumulate and not all(all_finite(r) for r in call.roots if can_be_bad(r)):
                    probe.tape.backward(call, ())
                    raise StopCell
            probe.recorder.in_backward = scout.in_backward

        def after_backward(call: Backward, result: Any) -> None:
            probe.recorder.in_backward = None
            ended(call, result)
            scout.note_gradients({n: leaf.grad for n, leaf in probe.tape.leaves.items() if leaf.grad is not None})

        probe.recorder.watchers.append(scout)
        probe.engine.began, probe.engine.ended, probe.engine.unseen = at_backward, after_backward, False
        return scout

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        if schema.writes:
            self._measure()  # before what waits is changed

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        self._note(op.index, op.module, schema, args, kwargs, out)

    def in_backward(self, func: Any, schema: Schema, args: tuple, kwargs: dict, node: Any) -> Any:
        """Run an op of backward. A fault of ours must not stop it."""
        if self.recorder.blind:
            return func(*args, **kwargs)
        if schema.writes:
            self._safely(self._measure)
        out = func(*args, **kwargs)
        self._safely(self._note_backward, node, schema, args, kwargs, out)
        return out

    def _safely(self, look: Any, *given: Any) -> None:
        try:
            look(*given)
        except Exception as fault:  # the border
            self.recorder.go_blind(fault)

    def _note_backward(self, node: Any, schema: Schema, args: tuple, kwargs: dict, out: Any) -> None:
        forward = self.recorder.forward_op(node)
        module = forward.module if forward is not None else ""
        self._note(self._keys.next(forward, schema.base), module, schema, args, kwargs, out)

    def _note(self, key: Hashable, module: str, schema: Schema, args: tuple, kwargs: dict, out: Any) -> None:
        if schema.view and not schema.writes:
            return
        made = [self._result(tensor) for _, tensor in results_of(schema, args, kwargs, out)]
        if made:
            given = tuple([memory_key(t) for t in tensors_given(args, kwargs)])
            self._passed.append(_Passed(key, module, given, made))

    def _result(self, tensor: torch.Tensor) -> tuple[int | None, bool, int | None]:
        values = dense(tensor)
        if values is None:
            return None, False, None
        storage = values.untyped_storage()
        whole = values.numel() * values.element_size() == storage.nbytes()
        if not can_be_bad(values):
            return storage._cdata, whole, None
        self._waiting.append(values.detach())
        self._bytes += values.nbytes
        number = len(self._sizes) + len(self._waiting) - 1
        if len(self._waiting) >= _GROUP or self._bytes > _GROUP_BYTES:
            self._measure()
        return storage._cdata, whole, number

    def _measure(self) -> None:
        if self._waiting:
            self._sizes += each_largest(self._waiting)
            self._waiting, self._bytes = [], 0

    def note_gradients(self, gradients: dict[int, torch.Tensor]) -> None:
        """After a backward: the leaves' gradients, by the leaves' numbers."""
        kept = {n: g for n, g in gradients.items() if (v := dense(g)) is not None and can_be_bad(v)}
        with _disable_current_modes(), torch.no_grad():
            self._gradients = dict(zip(kept, each_largest(list(kept.values())), strict=True))

    def report(self) -> Sighted:
        """What was found: reads all measurements, and follows bad memories from op to op."""
        self._measure()
        sizes = read([*self._sizes, *self._gradients.values()])
        finite = [math.isfinite(size) for size in sizes]
        found = Sighted({}, [], set(), [n for n, sound in zip(self._gradients, finite[len(self._sizes):], strict=True)
                                        if not sound])
        spoiled: set[int | None] = set()
        for passed in self._passed:
            bad = frozenset([n for n, (*_, size) in enumerate(passed.made) if size is not None and not finite[size]])
            if bad:
                found.suspects[passed.key] = bad
                found.modules.add(passed.module)
                if not spoiled.intersection(passed.given):
                    found.roots.append(passed.key)
            elif not spoiled:
                continue
            for n, (memory, whole, _) in enumerate(passed.made):
                if n in bad:
                    spoiled.add(memory)
                elif whole:
                    spoiled.discard(memory)
        return found


def scouted(probe: Probe, seen: Seen) -> Sighted:
    """Let a scout go along with a replay, up to what went bad."""
    recorder = Recorder(probe.stack, [], lambda *_: None)
    recorder.light = True
    scout = Scout(recorder)
    recorder.in_backward = scout.in_backward

    def forward(op: Op, args: tuple, kwargs: dict) -> Any:
        schema = schema_of(op.func)
        scout.before(op, schema, args, kwargs)
        out = op.func(*args, **kwargs)
        recorder.number(op, _next_number())
        scout.after(op, schema, args, kwargs, out, None)
        return out

    loss_only = seen.target.kind == "loss"
    replay = Replay(probe.tape, around=forward, during_engine=lambda: recorder).run(seen.position, loss_only)
    if recorder.fault is not None:
        raise recorder.fault
    scout.note_gradients(replay.gradients)
    return scout.report()
