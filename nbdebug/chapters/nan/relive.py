"""Find out afterwards where a bad value came from: replay the recorded step, and look.

On an accelerator a look at every op while the step runs makes the host wait at each. So the step is only recorded; when
its end shows something bad, it is replayed. A scout, which went along with the recording or with a replay of its own,
tells which ops made something bad; one more replay keeps the books, for those ops alone. A fault in the forward needs
the forward only; one that was born in backward, at a single op, needs backward down to that op.

Ops of the forward are replayed one by one, so they can be looked at as they come; those of backward are run by torch's
engine, and are seen by a dispatch mode.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator

import torch

from nbdebug.chapters.nan.alongside import Alongside
from nbdebug.chapters.nan.facts import Target
from nbdebug.chapters.nan.on_graph import OnGraph
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.relived import Relived
from nbdebug.chapters.nan.scout import Sighted, scouted
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.finding import Where
from nbdebug.observe.replay import Replay
from nbdebug.observe.tape import Held
from nbdebug.observe.tensors import all_finite, can_be_bad, each_largest, read

_next_number = torch._C._autograd._get_sequence_nr


class NotLocated(RuntimeError):
    """A step went bad, and replaying it does not show where. The message says why, and what to do instead."""


def relive(probe: Probe, seen: Seen, scout: Alongside | None = None) -> None:
    """Fill in the origins of `seen`, and let `probe` have the books. scout: one that went along with the recording.
    Raises NotLocated."""
    with uncollected():
        second = None
        if scout is not None and probe.recorder.fault is None:
            sighted = scout.report()
            second = _on_graph(probe, seen, sighted, scout)
            scout.let_go()
            second = second or _located(probe, seen, sighted)
        second = second or _located(probe, seen)
        if not seen.origins:  # perhaps it read memory that nobody had written, where something else lies now
            probe.tape.unwritten_as_nan = True
            second = _located(probe, seen)
    if second is None or not seen.origins:
        raise NotLocated(_sorry(probe, seen, "it came out finite when it was replayed"))
    second.flow.spoiled.clear()  # masks as large as the tensors that they belong to
    probe.flow, probe.recorder, probe.proven, probe.caught = second.flow, second.recorder, True, second.caught


def relive_buffers(probe: Probe) -> None:
    """A buffer went bad in a step that is otherwise sound: find its birth now, for the step in which it will show."""
    seen = Seen(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    try:
        second, replay = _replayed(probe, seen, None)
    except NotLocated:
        return  # then it will be a buffer that came bad from outside
    for number, tensor in replay.changed.items():
        memory = probe.tape.held[number].memory
        for birth in sorted(second.flow.origins(tensor))[:1]:
            if memory is not None and memory.role == "buffer":
                probe.spoiled_buffers.setdefault(memory.name, second.flow.births[birth])


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running: with all of torch in memory, one run of it takes as long as a few
    steps."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _located(probe: Probe, seen: Seen, sighted: Sighted | None = None) -> Relived | None:
    """The books, with the origins of `seen` filled in; None where a replay does not show again what `sighted` tells."""
    second, replay = _replayed(probe, seen, sighted)
    _judge(seen, second, replay)
    if sighted is not None and not (second.complete and seen.origins):
        seen.origins = set()
        return None
    return second


def _on_graph(probe: Probe, seen: Seen, sighted: Sighted, scout: Alongside) -> Relived | None:
    """The books of the one derivative in which all was born that is bad, where the recording's graph can tell."""
    fits = seen.target.kind == "gradient" and scout.call is not None and scout.born_at is not None
    if not fits or sighted.suspects or probe.recorder.hidden or _bad_outside(probe):
        return None
    found = OnGraph(probe, seen, sighted, scout)
    try:
        found.look()
    except RuntimeError:  # such as too little memory; a replay may need less
        return None
    if found.origins:
        _judge(seen, found, None)
    return found if found.origins else None


def _bad_outside(probe: Probe) -> set[int]:
    """The numbers of the tensors that were bad when the step got them: one wait for the device."""
    outside = {
        n: h.tensor
        for n, h in probe.tape.held.items()
        if h.grad_of is None and can_be_bad(h.tensor) and h.tensor.layout is torch.strided
    }
    sizes = read(each_largest(list(outside.values())))
    return {n for n, size in zip(outside, sizes, strict=True) if not math.isfinite(size)}


def _replayed(probe: Probe, seen: Seen, sighted: Sighted | None) -> tuple[Relived, Replay]:
    """A replay with the books kept; before it, if need be, one that tells which ops made something bad."""
    second = None
    try:
        bad_outside = _bad_outside(probe)
        sighted = sighted or scouted(probe, seen)
        second = Relived(probe, seen, sighted, bad_outside)
        replay = second.run()
        if not second.flow.holds():
            second = Relived(probe, seen, sighted, bad_outside, exact=True)
            replay = second.run()
    except Exception as reason:
        if second is not None and second.recorder.fault is reason and not isinstance(reason, torch.OutOfMemoryError):
            raise
        said = str(reason).partition("\n")[0][:200]
        why = f"the step can't be replayed ({type(reason).__name__}: {said})"
        raise NotLocated(_sorry(probe, seen, why)) from reason
    return second, replay


def _judge(seen: Seen, second: Relived, replay: Replay | None) -> None:
    """Where the bad values of gradients, parameters, buffers and returned tensors came from (a loss was asked on the
    way)."""
    seen.origins |= second.origins
    kind, held = seen.target.kind, second.probe.tape.held
    if replay is None or (second.origins and kind == "gradient"):
        _name_first(seen, held, second.sighted.gradients)
        return
    buffers = {n: t for n, t in replay.changed.items() if (m := held[n].memory) is not None and m.role == "buffer"}
    tensors = {"gradient": replay.gradients, "parameter": replay.leaves, "buffer": buffers}.get(kind, {})
    for number, tensor in tensors.items():
        born = {
            b
            for b in second.flow.origins(tensor)
            if kind not in ("parameter", "buffer") or second.flow.births[b].memory is None
        }
        if born and not seen.origins:
            _name_first(seen, held, [number])
        seen.origins |= born
    if kind == "returned" and replay.kept is not None and not all_finite(replay.kept):
        seen.origins |= second.flow.origins(replay.kept)


def _name_first(seen: Seen, held: dict[int, Held], numbers: list[int]) -> None:
    """Name the first bad one of the leaves that were looked at together."""
    memory = held[numbers[0]].memory if numbers and numbers[0] in held else None
    seen.rename(memory.name if memory is not None else "")


def _sorry(probe: Probe, seen: Seen, reason: str) -> str:
    if probe.recorder.hidden and seen.target.kind != "loss":
        reason = f"its backward can't be replayed: it uses {probe.recorder.hidden}"
    return (
        f"Step {probe.step} went bad (its {seen.target.kind} is not finite), but {reason}. "
        "Run it again with strategy='trace', which looks at every op while the step runs."
    )
