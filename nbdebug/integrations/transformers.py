"""The guard as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from nbdebug.integrations import TrainerGuard


class GuardCallback(TrainerGuard, TrainerCallback):
    """Watches each `trainer.train()` with `nbdebug.guard`, whose options it takes. guard: of the last training.

    Raises NonFiniteStep out of `trainer.train()`, as the guard does. The Trainer tells no callback of an exception:
    after one the guard stays on the model until `close()` or the next training.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begin(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
