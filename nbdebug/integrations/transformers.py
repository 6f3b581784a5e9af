"""The guard as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from nbdebug.report import Report
from nbdebug.tools.guard.guard import Guard, guard


class GuardCallback(TrainerCallback):
    """Watches each `trainer.train()` with `nbdebug.guard`, whose options it takes. guard: of the last training.

    Raises NonFiniteStep out of `trainer.train()`, as the guard does. The Trainer tells no callback of an exception:
    after one the guard stays on the model until `close()` or the next training.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.guard = options, None

    guard: Guard | None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        self.guard = guard(model, **self.options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the guard. Its numbers and its report stay."""
        if self.guard is not None:
            self.guard.close()

    def report(self) -> Report:
        """The report of the guard of the last training. Raises ValueError where there was none."""
        if self.guard is None:
            raise ValueError("This GuardCallback has watched no training yet: call trainer.train() first.")
        return self.guard.report()
