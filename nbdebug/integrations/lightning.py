"""The guard as a callback of Lightning's Trainer (packages `pytorch_lightning` and `lightning`)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from nbdebug.integrations import TrainerGuard

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_PACKAGE = next((name for name in _NAMES if name in sys.modules), "")
if not _PACKAGE:
    _PACKAGE = next((name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])), _NAMES[0])
Callback: Any = importlib.import_module(_PACKAGE).Callback


class GuardCallback(TrainerGuard, Callback):
    """Watches each `trainer.fit()` with `nbdebug.guard`, whose options it takes, and ends with it. guard: of the last
    training. Raises NonFiniteStep out of `trainer.fit()`, as the guard does."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()
