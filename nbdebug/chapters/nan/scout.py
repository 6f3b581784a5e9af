"""Which ops of a step make something bad? Found in a replay, without a wait for the device at each.

The largest magnitude of each result is measured on the device, for many results at a time, and all are read at once
when the replay is over.

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

from nbdebug.chapters.nan.flow import results_of
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.observe.record import Op, Recorder
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import Schema, schema_of, tensors_given
from nbdebug.observe.tensors import can_be_bad, dense, each_largest, memory_key, read

_next_number = torch._C._autograd._get_sequence_nr
_GROUP, _GROUP_BYTES = 64, 2**28
"""Results wait to be measured together, and keep their memory meanwhile: at most so many of them, or so many bytes."""


class Sighted(NamedTuple):
    """What a scout brings back. suspects: the bad results of each op that has any, by their places among its results;
    in order. born_at: the number of the forward op at whose derivative all was born that is bad in backward, if that is
    a single one. whole: whether the suspects of backward are known, too, and not only that op. modules: where bad
    values went through. gradients: the leaves, by number, whose gradients are bad."""

    suspects: dict[Hashable, frozenset[int]]
    born_at: int | None
    whole: bool
    modules: set[str]
    gradients: list[int]


class Sizes:
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
        return [math.isfinite(size) for size in read(self._sizes)]


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
    memory, and the number of its size."""

    key: Hashable
    module: str
    given: tuple[int | None, ...]
    made: list[tuple[int | None, bool, int | None]]


class Scout:
    """Looks at each op of a replay."""

    def __init__(self, recorder: Recorder):
        self.recorder, self._keys, self._sizes = recorder, Keys(), Sizes()
        self._passed: list[_Passed] = []
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
        return storage._cdata, whole, self._sizes.add(values) if can_be_bad(values) else None

    def report(self, gradients: dict[int, torch.Tensor]) -> Sighted:
        """What was found: reads all sizes, and follows bad memories from op to op. gradients: by the leaves' numbers,
        as the replay left them."""
        sizes = {n: self._sizes.add(g) for n, g in gradients.items() if dense(g) is g and can_be_bad(g)}
        finite = self._sizes.finite()
        suspects, roots, modules, spoiled = {}, [], set(), set[int | None]()
        for passed in self._passed:
            bad = frozenset([n for n, (*_, size) in enumerate(passed.made) if size is not None and not finite[size]])
            if bad:
                suspects[passed.key] = bad
                modules.add(passed.module)
                if not spoiled.intersection(passed.given):
                    roots.append(passed.key)
            if bad or spoiled:
                spoiled -= {memory for n, (memory, whole, _) in enumerate(passed.made) if whole and n not in bad}
                spoiled |= {passed.made[n][0] for n in bad}
        born = {key[0] if isinstance(key, tuple) else None for key in roots}
        return Sighted(
            suspects,
            born.pop() if len(born) == 1 else None,
            True,
            modules,
            [n for n, size in sizes.items() if not finite[size]],
        )


def scouted(probe: Probe, seen: Seen) -> Sighted:
    """Let a scout look at a replay, up to what went bad."""
    recorder = Recorder(probe.stack, [], lambda *_: None)
    recorder.light = True
    scout = Scout(recorder)
    loss_only = seen.target.kind == "loss"
    replay = Replay(probe.tape, around=scout.forward, during_engine=lambda: recorder).run(seen.position, loss_only)
    with _disable_current_modes(), torch.no_grad():
        return scout.report(replay.gradients)
