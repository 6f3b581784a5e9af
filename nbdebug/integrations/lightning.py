"""The guard as a callback of Lightning's Trainer (packages `pytorch_lightning` and `lightning`)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from nbdebug.report import Report
from nbdebug.tools.guard.guard import Guard, guard

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_PACKAGE = next((name for name in _NAMES if name in sys.modules), "")
if not _PACKAGE:
    _PACKAGE = next((name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])), _NAMES[0])
Callback: Any = importlib.import_module(_PACKAGE).Callback


class GuardCallback(Callback):
    """Watches each `trainer.fit()` with `nbdebug.guard`, whose options it takes, and ends with it. guard: of the last
    training. Raises NonFiniteStep out of `trainer.fit()`, as the guard does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.guard = options, None

    guard: Guard | None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        self.guard = guard(pl_module, **self.options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """End the guard. Its numbers and its report stay."""
        if self.guard is not None:
            self.guard.close()

    def report(self) -> Report:
        """The report of the guard of the last training. Raises ValueError where there was none."""
        if self.guard is None:
            raise ValueError("This GuardCallback has watched no training yet: call trainer.fit(...) first.")
        return self.guard.report()
