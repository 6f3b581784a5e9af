"""Try a fix on the very step that failed.

The step is on tape. First it is replayed unchanged: only if it fails again as it did is a replay worth anything. Then
the op at fault (or the tensor that came bad from outside) is replaced by its mended form, and the step is replayed to
the same point: are the loss and all gradients finite now, and did the values that were sound stay as they were?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.observe.record import Op
from nbdebug.observe.replay import Replay
from nbdebug.observe.schema import schema_of
from nbdebug.observe.tape import Entry, Unfit
from nbdebug.observe.tensors import all_finite, can_be_bad, dense, each_largest, finite, read, tensors_in

Patch = Callable[..., Any]
Mended = tuple[dict[int, Patch], dict[int, Callable[[torch.Tensor], torch.Tensor]], float]
"""A fix as a replay takes it: ops replaced, by index; tensors from outside changed, by number; a factor on the loss."""


class Trial:
    """One failing step, ready to be replayed. `why_not` says why it can't be, else it is empty."""

    def __init__(self, probe: Probe, seen: Seen, guilty: Op | None):
        self.tape, self.seen, self.guilty, self.caught = probe.tape, seen, guilty, probe.caught
        self.alike = (
            []
            if guilty is None
            else [  # a fix to the line changes every run of it: loops, reused modules
                e.op
                for e in probe.tape.entries
                if isinstance(e, Entry) and (e.op.site, e.op.name) == (guilty.site, guilty.name)
            ]
        )
        self.why_not = ""
        self.same: list[tuple[int, int]] = []  # a mended op's sound results: how many stayed as they were, of how many
        if probe.proven:
            return
        try:
            original = self.replay({}, forward_only=seen.target.kind == "loss")
        except Unfit as reason:
            self.why_not = f"the step can't be replayed: {reason}"
        except Exception as error:  # an op that is not to be run alone; nothing was changed
            self.why_not = f"the step can't be replayed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            if self.sound(original):
                self.why_not = "the step came out finite when it was replayed: it does not repeat"

    def replay(
        self,
        patches: Mapping[int, Patch],
        inputs: Mapping[int, Callable] | None = None,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> Replay:
        """Run the step again, up to what went bad."""
        return Replay(self.tape, patches, inputs, scale=scale, keep=self.seen.ref).run(self.seen.position, forward_only)

    def everywhere(self, patch: Patch) -> Mended:
        """The patch at every run of the line at fault."""
        return {op.index: self._compared(patch, self.caught.get(op.index)) for op in self.alike}, {}, 1.0

    def _compared(self, patch: Patch, caught: Any = None) -> Patch:
        """The patch, which also counts the sound results of the op that it leaves as they are. caught: a Reproduction
        of the op."""

        def compared(func: Any, args: Any, kwargs: Any) -> Any:
            if caught is not None:
                caught.take(args, kwargs)
            changes = bool(schema_of(func).writes)
            with torch.no_grad():
                before = None if changes else next(iter(tensors_in(func(*args, **kwargs))), None)
            out = patch(func, args, kwargs)
            now = next(iter(tensors_in(out)), None)
            if before is not None and now is not None and before.shape == now.shape and can_be_bad(before):
                good = finite(before)
                same = torch.isclose(before[good], now.detach()[good], rtol=1e-5, atol=1e-6)
                self.same.append((int(same.sum()), int(good.sum())))
            return out

        return compared

    def sound(self, replay: Replay) -> bool:
        """Whether what went bad in the step is finite in a replay."""
        kind = self.seen.target.kind
        if kind == "loss":
            return not count_bad(replay.losses)
        if kind == "gradient":
            return not count_bad(replay.gradients.values())
        if kind == "parameter":
            return not count_bad(replay.leaves.values())
        return replay.kept is not None and all_finite(replay.kept)

    def everything_sound(self, replay: Replay) -> bool:
        tensors = [*replay.losses, *replay.gradients.values(), *([replay.kept] if replay.kept is not None else [])]
        tensors += replay.leaves.values() if self.seen.target.kind == "parameter" else []
        return not count_bad(tensors)


def count_bad(tensors: Iterable[torch.Tensor]) -> int:
    """How many of these are not finite; read in one go."""
    values = [v for t in tensors if (v := dense(t)) is not None and can_be_bad(v)]
    return sum(not math.isfinite(size) for size in read(each_largest(values)))
