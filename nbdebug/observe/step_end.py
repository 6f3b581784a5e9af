"""Something to do once, in the thread that trains, when a step is over: weights and optimizer state are whole then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from nbdebug.raised import ShownAtUsersLine


class Stopped(KeyboardInterrupt):
    """A training was asked to stop, and did so after a whole step."""

    _render_traceback_ = ShownAtUsersLine._render_traceback_


class StepEnd:
    """Calls `then` after the next step of any optimizer once it is begun, and once only. What that raises passes into
    the training; `cancel` before that takes it away."""

    def __init__(self, then: Callable[[], Any]):
        self.then = then
        self._handle: Any = None

    def begin(self) -> None:
        """From here on: the very next step may be over at once, in another thread."""
        self._handle = register_optimizer_step_post_hook(self._over)

    def cancel(self) -> bool:
        """Whether it was still to come."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(KeyError):
                handle.remove()
        return handle is not None

    def _over(self, *stepped: Any) -> None:
        __tracebackhide__ = True
        if self.cancel():
            self.then()


def stop() -> None:
    """What ends a training from inside of it."""
    raise Stopped("Stopped after a whole step, as you asked: weights and optimizer state are those after it.")
