"""Callbacks for the trainers of other packages, for those who prefer them to `%guard on`: each in a module that is
named as its package, which importing it imports.

    from nbdebug.integrations.transformers import GuardCallback     Trainer(..., callbacks=[GuardCallback()])
    from nbdebug.integrations.lightning import GuardCallback        pl.Trainer(callbacks=[GuardCallback()])
"""

from __future__ import annotations

from typing import Any

from nbdebug.report import Report
from nbdebug.tools.guard.guard import Guard, guard


class TrainerGuard:
    """What the callbacks share: a guard for each training, with the options that the callback was given. guard: of the
    last training."""

    guard: Guard | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def begin(self, model: Any) -> None:
        """Watch a training of this model; the guard of the training before ends."""
        self.close()
        self.guard = guard(model, **self.options)

    def close(self) -> None:
        """End the guard. Its numbers and its report stay."""
        if self.guard is not None:
            self.guard.close()

    def report(self) -> Report:
        """The report of the guard of the last training. Raises ValueError where there was none."""
        if self.guard is None:
            raise ValueError("This GuardCallback has watched no training yet: start the trainer first.")
        return self.guard.report()
