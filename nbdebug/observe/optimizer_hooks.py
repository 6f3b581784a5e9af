"""Hooks of optimizers that come and go at any time, from inside of a step as well.

torch iterates over its ordered dicts of step hooks while it calls them: an entry that is added or removed meanwhile
ends the user's `optimizer.step()` with a RuntimeError. So nbdebug has one entry in a dict, a slot, and mostly changes
what this calls. The slot itself comes and goes where torch is not between two entries of its dict; else a hook on the
other side of the update (before it, after it), whose dict is not iterated then, makes the change.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as torch_optimizer

from nbdebug.observe.interrupts import uninterrupted

_STEP = torch_optimizer.Optimizer.profile_hook_step(lambda self: None).__code__
"""torch's code around each `step`: it calls the hooks."""
_LONGEST_WAIT = 1.0
"""Seconds to wait for a step in another thread."""


class HookSlot:
    """nbdebug's one entry in a dict of step hooks."""

    def __init__(self) -> None:
        self.hooks: list[StepHook] = []

    def __call__(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        __tracebackhide__ = True
        for hook in list(self.hooks):
            if hook.function is not None:  # else one before it has removed it
                hook.function(optimizer, args, kwargs)


class StepHook:
    """Calls `function(optimizer, args, kwargs)` before each update of this optimizer (None: of every one), or after it;
    until `remove`. A function that is added while the hooks of its side run is called from the next update on."""

    def __init__(self, function: Callable[[Any, tuple, dict], Any], optimizer: Any = None, *, after: bool = False):
        if optimizer is None:
            dicts = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
        else:
            dicts = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        self.function: Callable[[Any, tuple, dict], Any] | None = function
        self._optimizer, self._after, self._dict = optimizer, after, dicts[after]
        if (slot := self._slot()) is not None:
            slot.hooks.append(self)
        else:
            self._between_hooks(self._enter)

    @uninterrupted
    def remove(self) -> None:
        """The function is not called any more. May be called twice."""
        self.function, slot = None, self._slot()
        if slot is not None and self in slot.hooks:
            slot.hooks.remove(self)
            if not slot.hooks:
                self._between_hooks(self._leave)

    def _slot(self) -> HookSlot | None:
        return next((entry for entry in list(self._dict.values()) if type(entry) is HookSlot), None)

    def _enter(self) -> None:
        if self.function is None:
            return
        slot = self._slot()
        if slot is None:
            slot = HookSlot()
            if self._optimizer is None:
                register = (
                    torch_optimizer.register_optimizer_step_post_hook
                    if self._after
                    else torch_optimizer.register_optimizer_step_pre_hook
                )
                register(slot)
            elif self._after:
                self._optimizer.register_step_post_hook(slot)
            else:
                self._optimizer.register_step_pre_hook(slot)
        slot.hooks.append(self)

    def _leave(self) -> None:
        for key, entry in list(self._dict.items()):
            if type(entry) is HookSlot and not entry.hooks:
                self._dict.pop(key, None)

    def _between_hooks(self, change: Callable[[], None]) -> None:
        """Make this change of the dict when torch does not iterate over it."""
        _wait_for_other_threads()
        if not _is_iterated(self._dict):
            change()
            return

        def make(*_: Any) -> None:
            change()
            once.remove()

        once = StepHook(make, self._optimizer, after=not self._after)


def _is_iterated(hooks: Any) -> bool:
    """Whether this thread is in a step among these hooks, and not at the last: torch goes on in the dict then."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            names = frame.f_locals
            running = names.get("post_hook" if "out" in names else "pre_hook")
            entries = list(hooks.values())
            if any(entry is running for entry in entries[:-1]):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _wait_for_other_threads() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    while _others_step() and time.monotonic() < end:
        time.sleep(0.001)


def _others_step() -> bool:
    for thread, frame in sys._current_frames().items():
        while thread != threading.get_ident() and frame is not None:
            if frame.f_code is _STEP:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False
