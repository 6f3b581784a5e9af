"""Gradients between backward and the update: measured when backward ends, and again if something has changed them
since.

Each backward that changes a gradient of ours is measured when it ends; the last one before an optimizer steps gives the
norms before clipping. A gradient has a version, which counts the writes into it: where it is the same tensor in the
same version when the optimizer steps, nothing has clipped it, and it is not measured again. Writes through `.data` are
not counted; so now and then all are measured again, and if one of those differs, from then on always.
"""

from __future__ import annotations

from typing import Any

from nbdebug.chapters.training.watch.norms import Norms, measure
from nbdebug.chapters.training.watch.roster import Roster

Mark = tuple[int, int]


class Gradients:
    """What is known of gradients since they were last used. trusted: versions have told the truth so far. wide: a norm
    was beyond float32, so float64 is used."""

    def __init__(self, roster: Roster):
        self.roster, self.trusted, self.wide = roster, True, False
        self._before: dict[int, Mark] = {}  # when the running backward began
        self._marks: dict[int, Mark] = {}  # when the last backward ended that changed them
        self._norms: list[Norms] = []
        self._used: set[int] = set()

    def _marked(self) -> dict[int, Mark]:
        return {number: (id(g), g._version) for number, g in self.roster.gradients()}

    def began(self) -> None:
        self._before = self._marked()

    def ended(self) -> tuple[list[int], bool]:
        """The numbers of the parameters whose gradients this backward has changed; whether none of these had one."""
        now, before = self._marked(), self._before
        self._before = {}
        changed = [number for number, mark in now.items() if before.get(number) != mark]
        return changed, before.keys().isdisjoint(changed)

    def look(self, changed: list[int]) -> None:
        """Measure these; what was known of them before is out of date."""
        found = measure(list(self.roster.gradients(changed)), self.wide)
        new = set(changed)
        self._norms = [n for n in self._norms if not new.issuperset(n.numbers)] + found
        self._used -= new
        for number, gradient in self.roster.gradients(changed):
            self._marks[number] = id(gradient), gradient._version

    def overlook(self, changed: list[int]) -> None:
        """These have changed, and are not measured."""
        self._used.update(changed)

    def at_the_step(self, numbers: list[int], again: bool) -> tuple[list[int], list[Norms], list[Norms]]:
        """The optimizer that holds these is about to step: those that have a gradient, norms before clipping (later
        ones count), norms now of those that are not as they were. again: measure all, to see whether versions can be
        trusted."""
        held = list(self.roster.gradients(numbers))
        unknown = [(n, g) for n, g in held if n in self._used or n not in self._marks]
        new = {n for n, _ in unknown}
        wanted = {n for n, _ in held} - new
        before = [n for n in self._norms if not wanted.isdisjoint(n.numbers)] + measure(unknown, self.wide)
        every = again or not self.trusted
        changed = [(n, g) for n, g in held if n not in new and (every or self._marks[n] != (id(g), g._version))]
        return [n for n, _ in held], before, measure(changed, self.wide)

    def unmarked(self, numbers: list[int]) -> set[int]:
        """Those of which a changed norm would not be known without measuring again."""
        return {n for n, g in self.roster.gradients(numbers) if self._marks.get(n) == (id(g), g._version)}

    def written(self, numbers: list[int]) -> list[tuple[int, Any]]:
        """Those that something has written into since the last backward, as far as that is known."""
        known = [(n, g) for n, g in self.roster.gradients(numbers) if n not in self._used and n in self._marks]
        return known if not self.trusted else [(n, g) for n, g in known if self._marks[n] != (id(g), g._version)]

    def used(self, numbers: list[int]) -> None:
        """The optimizer has stepped with these."""
        self._used.update(numbers)
        self._norms = [n for n in self._norms if not self._used.issuperset(n.numbers)]

    def forget(self) -> None:
        self._before, self._marks, self._norms = {}, {}, []


def scaler_around(frame: Any) -> Any:
    """The GradScaler in whose `step` an optimizer steps, found in the frames around; None where there is none."""
    for _ in range(16):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in ("step", "_maybe_opt_step") and code.co_filename.endswith("grad_scaler.py"):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
