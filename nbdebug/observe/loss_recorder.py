"""A recorder for the few ops around a model's call, which gets out of the way of everything else.

It may stand on the stack of modes from one step to the next, in the middle of a notebook. So it has bounds on what it
records, lets compiled code go on as compiled code, and can step down from beneath others of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from nbdebug.observe.record import Recorder
from nbdebug.observe.schema import schema_of, written
from nbdebug.observe.talk import talks
from nbdebug.observe.tape import Tape

MOST_OPS = 4000
"""Ops recorded between a model's call and backward; a loss takes tens. More is another program's work."""
MOST_BEFORE = 64
"""Ops recorded before a model's first call in a step: a batch is prepared in fewer."""


class LossRecorder(Recorder):
    """A recorder beside which compiled code goes on running: what it does is not seen, then. room: how many ops are to
    be recorded; overrun: there were more, or, while there was no model yet, one wrote to what is not the step's own or
    talked to other processes."""

    room = MOST_OPS
    overrun = False
    on_fault: Callable[[Exception], Any]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True  # which concerns the method below, so it has to stand here

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch.compile would leave compiled code aside while we are there

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            if not (self.paused or self.blind) and (
                self.count >= self.room or self.room == MOST_BEFORE and self._meddles(func, args, kwargs or {})
            ):
                self.overrun = self.paused = True
        except Exception as fault:
            self.go_blind(fault)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def go_blind(self, fault: Exception) -> None:
        """A fault of ours is the border's business."""
        self.blind, self.fault = f"{type(fault).__name__}: {fault}", fault
        self.on_fault(fault)

    def _meddles(self, func: Any, args: tuple, kwargs: dict) -> bool:
        if talks(func):
            return True
        schema, tape = schema_of(func), self.watchers[0]
        assert isinstance(tape, Tape)
        return bool(schema.writes) and any(tape.find(t) is None for t in written(schema, args, kwargs))


def step_down(recorder: LossRecorder) -> bool:
    """Take a recorder off the stack of modes, from beneath those of other guards too; False where it can't be."""
    above = []
    while isinstance(top := _get_current_dispatch_mode(), LossRecorder) and top is not recorder:
        top.__exit__(None, None, None)
        above.append(top)
    if top is recorder:
        recorder.__exit__(None, None, None)
    for other in reversed(above):
        other.__enter__()
    return top is recorder
