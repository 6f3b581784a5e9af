"""A guard that has had a fault of its own still takes part in what the processes decide together, until all have heard.

Else the others would wait for its numbers for ever. It says that it has left; those that hear it leave too, in the same
way, and once every row of the table says so nobody asks any more.
"""

from __future__ import annotations

import contextlib
from typing import Any

from nbdebug.chapters.nan.guard.ranks import Ranks


class Parting:
    """Stands in for the rounds of a guard with a fault. after: the others ask after the optimizer's step, not before.
    stepped: the optimizers that were asked about in the step that has begun."""

    def __init__(self, ranks: Ranks, after: bool, stepped: set[int]):
        self.ranks, self._after, self._stepped = ranks, after, stepped
        try:
            self.over = not ranks.together
        except Exception:  # it was this that had the fault
            self.over = len(ranks.members) < 2
        if ranks.promised:
            with contextlib.suppress(Exception):
                ranks.share(None)

    def before(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """An optimizer is about to step."""
        self._stepped.add(id(optimizer))
        if not self.ranks.asked:
            self._after = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            if not self._after:
                self._tell()

    def after(self) -> None:
        """An optimizer has stepped."""
        if self._after and not self.ranks.asked:
            self._tell()
        self._after = False

    def scaler_updates(self, scaler: Any, optimizers: Any) -> None:
        """The GradScaler sets its scale: the others ask here about the optimizers that it has kept from stepping."""
        for optimizer in optimizers:
            asked = self.ranks.asked or id(optimizer) in self._stepped
            if not asked and kept_from_stepping(scaler, optimizer):
                self._tell()
        self._stepped.clear()

    def _tell(self) -> None:
        if self.over:
            return
        try:
            self.over = self.ranks.say_left()
        except Exception:  # the others are gone
            self.over = True


def kept_from_stepping(scaler: Any, optimizer: Any) -> bool:
    """Whether the scaler's `step` has been called for an optimizer since the scaler's last `update`."""
    return getattr(scaler._per_optimizer_states[id(optimizer)].get("stage"), "name", "") == "STEPPED"
