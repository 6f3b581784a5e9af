"""Find the origin of a bad value after the step, by replaying the recorded ops.

On an accelerator a look at every op while the step runs makes the host wait at each. So the step is only recorded; when
its end shows something bad (`locate_origins`), it is replayed:

1. A scan tells which ops made something bad (`suspects.py`): it went along with the recording, or is a replay of its
   own.
2. One more replay propagates taint for those ops alone (`ReplayLocator`, with `ReplayTaintTracker`). A fault of the
   forward needs the forward only; one that was born in backward, at a single op, needs backward down to that op. Where
   autograd's graph of the recording is still there, that op's derivative is run instead (`GraphLocator`).

Ops of the forward are replayed one by one, so they can be looked at as they come; those of backward are run by torch's
engine, and are seen by a dispatch mode.

Most results are not looked at: those that are known to be finite, and those of ops whose bad operands all have a single
origin: it is assumed that the results only carry it on. The assumptions are computed on the device and read once, at
the end (`holds`); if one is wrong, the replay is worth nothing, and another one has to look at everything. In the
forward, a result may be bad only in rows where an operand was; one that has other rows than its operands must be finite
once they are repaired. In backward it is enough that an operand is bad.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.interrupts import uncollected
from nbdebug.observe.locations import Site
from nbdebug.observe.ops import Schema, schema_of
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.replay import Replay, storages_of
from nbdebug.observe.tape import ExternalTensor, Ref
from nbdebug.observe.tensors import (
    PARAMETER,
    TARGET,
    StorageInfo,
    all_finite,
    can_be_nonfinite,
    dense,
    each_largest,
    finite,
    optional_storage_key,
    read_scalars,
    storage_key,
    walk_tensors,
)
from nbdebug.report import Where
from nbdebug.text import clip
from nbdebug.tools.nan.facts import Target
from nbdebug.tools.nan.origins import EMPTIES, Overwritten
from nbdebug.tools.nan.probe import Detection, Probe, mark_input
from nbdebug.tools.nan.reproducer import Reproduction
from nbdebug.tools.nan.suspects import OpKeys, RecordingScan, Suspects, needs_graph, scan_replay
from nbdebug.tools.nan.taint import ABSORBERS, COMPARES, TaintedStorage, TaintTracker, results_of

_NOTED = COMPARES | ABSORBERS | {"mul"}
"""Ops whose use of bad values is noted even where nothing bad comes out."""
_NONE: frozenset[int] = frozenset()
_ANY: frozenset[int] = frozenset({-1})
"""No telling which result is bad."""


class ReplayTaintTracker(TaintTracker):
    """suspects: what the scan has found. exact: look at the bad results all the same. in_backward: to be set while
    backward runs. replayed: the suspects that have run."""

    def __init__(self, recorder: Recorder, suspects: Suspects, exact: bool):
        super().__init__(recorder)
        self.suspects, self.exact, self.in_backward = suspects, exact, False
        self.replayed: list[Hashable] = []
        self._keys = OpKeys()
        self._bad = _NONE
        # what is assumed: sizes by rows (where the first is bad, so is the second), sizes that are bad, that are finite
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bad_sizes: list[torch.Tensor] = []
        self._finite_sizes: list[torch.Tensor] = []
        if not exact:
            self.recent = collections.deque(maxlen=0)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> dict[int, Overwritten]:
        if self.in_backward and not self.suspects.complete:
            at = self.suspects.born_at
            self._bad = _ANY if op.forward is not None and op.forward.index == at else _NONE
        else:
            name = self._keys.next(op.forward, schema.base) if self.in_backward else op.index
            self._bad = self.suspects.results.get(name, _NONE)
            if self._bad:
                self.replayed.append(name)
        needed = self._bad or (self.storages and (self.exact or schema.base in _NOTED))
        if not schema.writes or not needed:
            return {}
        with torch.no_grad():
            return super().before(op, schema, args, kwargs)

    def after(
        self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, overwritten: dict[int, Overwritten]
    ) -> None:
        if schema.view and not schema.writes:
            return
        if not self._bad and not self.storages:
            self.note_determinant(op, schema, args, kwargs, out)
            return
        with torch.no_grad():
            if not self._bad:
                self._all_finite(op, schema, args, kwargs, out, overwritten)
            elif self.exact or self._bad is _ANY or not self._carry_on(op, schema, args, kwargs, out):
                super().after(op, schema, args, kwargs, out, overwritten)

    def _all_finite(
        self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, overwritten: dict[int, Overwritten]
    ) -> None:
        if self.exact or schema.base in _NOTED:
            operands = self._operand_masks(args, kwargs, overwritten)
            if operands:
                self._note_use(op, schema, args, operands)
                self._note_absorbed(op, schema, operands, set())
        for _, tensor in results_of(schema, args, kwargs, out):
            if (
                optional_storage_key(tensor) in self.storages
                and (values := dense(tensor)) is not None
                and can_be_nonfinite(values)
            ):
                self._clear(values)

    def _carry_on(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any) -> bool:
        """Give the bad results the origin of the operands; False where that takes a look."""
        storages = [
            (t, self.storages.get(optional_storage_key(t) or 0)) for _, t in walk_tensors((*args, *kwargs.values()))
        ]
        operands = [t for t, storage in storages if storage is not None]
        origins = {origin for _, storage in storages if storage is not None for origin in storage.origins}
        if len(origins) != 1 or schema.writes or schema.base in EMPTIES:
            return False
        origin = self.origins[index := origins.pop()]
        results = [t for n, (_, t) in enumerate(results_of(schema, args, kwargs, out)) if n in self._bad]
        if origin.intended or origin.storage is not None or not all(map(_is_plain, (*operands, *results))):
            return False
        if not self._assume(op, schema, args, kwargs, operands, results):
            return False
        self._note_use(op, schema, args, {id(t): {index: t} for t in operands})
        for result in results:
            self._write_lone(result, index)
            if (origin.rows is None or origin.made != "nan") and self.origins.batch_size:
                self.origins.note_rows(index, ~finite(result), op)
        self.last_bad = {index}
        self.modules.add(op.module)
        return True

    def _assume(
        self,
        op: Op,
        schema: Schema,
        args: tuple,
        kwargs: dict,
        operands: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> bool:
        """Note what must hold if the results carry on what the operands have; False where that can't be said."""
        if self.in_backward:
            self._bad_sizes.append(_worst([_sizes(t, ()) for t in operands]))
            return True
        rows, others = [], False
        for result in results:
            alike = [t for t in operands if t.dim() and result.dim() and len(t) == len(result)]
            if alike:
                rows.append((_sizes(result, (0,)), _worst([_sizes(t, (0,)) for t in alike])))
            others = others or not alike
        if others:
            repaired = _repaired(op, schema, args, kwargs, operands)
            if repaired is None:
                return False
            self._finite_sizes += [_sizes(t, ()) for n, t in enumerate(repaired) if n in self._bad]
        self._rows += rows
        return True

    def _write_lone(self, values: torch.Tensor, origin: int) -> None:
        storage = self.storages.get(storage_key(values))
        if storage is None or values.numel() == storage.elements:
            self.storages[storage_key(values)] = TaintedStorage(values, origin)
        elif storage.lone != origin:
            self._write(values, {origin: ~finite(values)})

    def holds(self) -> bool:
        """Whether all that was assumed is so; to be called at the end: it waits for the device."""
        alike: dict[tuple, list[tuple[torch.Tensor, torch.Tensor]]] = collections.defaultdict(list)
        for result, operand in self._rows:
            alike[result.device, result.shape, result.dtype, operand.dtype].append((result, operand))
        wrong = []
        for pairs in alike.values():
            results, operands = (torch.stack(group) for group in zip(*pairs, strict=True))
            wrong.append((torch.isfinite(operands) & ~torch.isfinite(results)).any())
        values = read_scalars([*wrong, *self._bad_sizes, *self._finite_sizes])
        sizes = values[len(wrong) :]
        bad, sound = sizes[: len(self._bad_sizes)], sizes[len(self._bad_sizes) :]
        return not any(values[: len(wrong)]) and not any(map(math.isfinite, bad)) and all(map(math.isfinite, sound))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.element_size() > 1 and dense(tensor) is tensor


def _sizes(values: torch.Tensor, kept_dims: tuple[int, ...]) -> torch.Tensor:
    """Largest magnitudes along the dimension that is kept (or of all); NaN goes through."""
    others = tuple(d for d in range(values.dim()) if d not in kept_dims)
    return torch.linalg.vector_norm(values.detach(), math.inf, dim=others) if others else values.detach().abs()


def _worst(sizes: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.maximum, sizes)


def _repaired(
    op: Op, schema: Schema, args: tuple, kwargs: dict, operands: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    """What the op gives with 1 in place of all that is bad in its operands; None where it can't be run once more."""
    if schema.random or op.func.namespace != "aten":
        return None
    clean = {id(t): torch.nan_to_num(t, 1.0, 1.0, 1.0) for t in operands}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([swap(v) for v in value])
        return clean.get(id(value), value)

    try:
        args, kwargs = swap(args), {k: swap(v) for k, v in kwargs.items()}
        return [t for _, t in results_of(schema, args, kwargs, op.func(*args, **kwargs))]
    except Exception:  # the op refuses its arguments in this form
        return None


_next_number = torch._C._autograd._get_sequence_nr


class NotLocated(RuntimeError):
    """A step went bad, and replaying it does not show where. The message says why, and what to do instead."""


class NotEnoughMemory(NotLocated):
    """A replay needs more memory than the device has left."""


TOO_LITTLE = "there is not enough memory to run it again"
"""Why a step has no place."""


def locate_origins(probe: Probe, detection: Detection, scan: RecordingScan | None = None) -> None:
    """Fill in the origins of `detection`, and give `probe` the taint of the replay. scan: one that went along with the
    recording. Raises NotLocated."""
    with uncollected():
        locator = None
        if scan is not None and scan.complete and probe.recorder.fault is None:
            suspects = scan.suspects()
            locator = _on_graph(probe, detection, suspects, scan)
            scan.close()
            locator = locator or _in_replay(probe, detection, suspects)
        locator = locator or _in_replay(probe, detection)
        if not detection.origins:  # perhaps it read memory that nobody had written, where something else lies now
            probe.tape.unwritten_as_nan = True
            locator = _in_replay(probe, detection)
    if locator is None or not detection.origins:
        raise NotLocated(_message(probe, detection, "it is finite when it is replayed"))
    locator.taint.storages.clear()  # masks as large as the tensors that they belong to
    probe.taint, probe.recorder, probe.reproduced = locator.taint, locator.recorder, True
    probe.reproductions = locator.reproductions


def locate_buffer_origins(probe: Probe) -> None:
    """A buffer went bad in a step that is otherwise sound: find the origin now, for the step in which it will show."""
    detection = Detection(Target("buffer", Where(step=probe.step)), set(), len(probe.tape.entries) - 1)
    try:
        locator, replay = _replay(probe, detection, None)
    except NotLocated:
        return  # then it will be a buffer that was bad from outside
    for number, tensor in replay.changed.items():
        storage = probe.tape.externals[number].storage
        for origin in sorted(locator.taint.origins_of(tensor))[:1]:
            if storage is not None and storage.role == "buffer":
                probe.bad_buffers.setdefault(storage.name, locator.taint.origins[origin])


def _in_replay(probe: Probe, detection: Detection, suspects: Suspects | None = None) -> ReplayLocator | None:
    """The locator that filled in the origins; None where a replay does not show again what `suspects` tells."""
    locator, replay = _replay(probe, detection, suspects)
    _fill_in(detection, locator, replay)
    if suspects is not None and not (locator.complete and detection.origins):
        detection.origins = set()
        return None
    return locator


def _on_graph(probe: Probe, detection: Detection, suspects: Suspects, scan: RecordingScan) -> ReplayLocator | None:
    """The locator that ran the one derivative in which all was born that is bad, where the recording's graph can
    tell."""
    fits = detection.target.kind == "gradient" and scan.call is not None and scan.born_at is not None
    if not fits or suspects.results or probe.recorder.custom_backward or _bad_external(probe):
        return None
    locator = GraphLocator(probe, detection, suspects, scan)
    try:
        locator.run_node()
    except RuntimeError:  # such as too little memory; a replay may need less
        return None
    if locator.origins:
        _fill_in(detection, locator, None)
    return locator if locator.origins else None


def _bad_external(probe: Probe) -> set[int]:
    """The numbers of the tensors that were bad when the step got them: one wait for the device."""
    external = {
        n: h.tensor
        for n, h in probe.tape.externals.items()
        if h.grad_of is None and can_be_nonfinite(h.tensor) and h.tensor.layout is torch.strided
    }
    sizes = read_scalars(each_largest(list(external.values())))
    return {n for n, size in zip(external, sizes, strict=True) if not math.isfinite(size)}


def _replay(probe: Probe, detection: Detection, suspects: Suspects | None) -> tuple[ReplayLocator, Replay]:
    """A replay with taint; before it, if need be, one that tells which ops made something bad. Where the device has too
    little memory, it is tried once more with the activations in the host's. Raises NotLocated."""
    try:
        return _traced_replay(probe, detection, suspects)
    except torch.OutOfMemoryError:
        pass  # what it held is freed with this exception
    free_memory()
    probe.spilled = True
    for held in probe.tape.externals.values():
        held.to_host()
    try:
        with activations_on_host():
            return _traced_replay(probe, detection, suspects)
    except torch.OutOfMemoryError as reason:
        free_memory()
        raise NotEnoughMemory(_message(probe, detection, TOO_LITTLE)) from reason.with_traceback(None)


def _traced_replay(probe: Probe, detection: Detection, suspects: Suspects | None) -> tuple[ReplayLocator, Replay]:
    locator = None
    try:
        bad_external = _bad_external(probe)
        suspects = suspects or scan_replay(probe, detection)
        locator = ReplayLocator(probe, detection, suspects, bad_external)
        replay = locator.run()
        if not locator.taint.holds():
            locator = ReplayLocator(probe, detection, suspects, bad_external, exact=True)
            replay = locator.run()
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:
        if locator is not None and locator.recorder.fault is reason:
            raise
        text = clip(str(reason).partition("\n")[0], 200)
        why = f"the step can't be replayed ({type(reason).__name__}: {text})"
        raise NotLocated(_message(probe, detection, why)) from reason
    return locator, replay


def free_memory() -> None:
    """After a replay that had too little: what refers to itself is freed only by the collector."""
    gc.collect()
    torch.cuda.empty_cache()


def activations_on_host() -> contextlib.AbstractContextManager:
    """What autograd saves for backward waits in the host's memory, out of sight of the modes that watch."""

    def pack(saved: torch.Tensor) -> Any:
        if saved.requires_grad and saved.is_leaf:  # a parameter: it stays where it is all the same
            return saved
        with _disable_current_modes(), torch.no_grad():
            return saved.device, saved.detach().to("cpu")

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with _disable_current_modes(), torch.no_grad():
            return packed[1].to(packed[0])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _fill_in(detection: Detection, locator: ReplayLocator, replay: Replay | None) -> None:
    """The origins of bad gradients, parameters, buffers and returned tensors (those of a loss are known on the way)."""
    detection.origins |= locator.origins
    kind, held = detection.target.kind, locator.probe.tape.externals
    if replay is None or (locator.origins and kind == "gradient"):
        _name_first(detection, held, locator.suspects.gradients)
        return
    buffers = {n: t for n, t in replay.changed.items() if (m := held[n].storage) is not None and m.role == "buffer"}
    tensors = {"gradient": replay.gradients, "parameter": replay.leaves, "buffer": buffers}.get(kind, {})
    for number, tensor in tensors.items():
        origins = locator.taint.origins_of(tensor)
        if kind in ("parameter", "buffer"):
            origins = {origin for origin in origins if locator.taint.origins[origin].storage is None}
        if origins and not detection.origins:
            _name_first(detection, held, [number])
        detection.origins |= origins
    if kind == "returned" and replay.value is not None and not all_finite(replay.value):
        detection.origins |= locator.taint.origins_of(replay.value)


def _name_first(detection: Detection, held: dict[int, ExternalTensor], numbers: list[int]) -> None:
    """Name the first bad one of the leaves that were looked at together."""
    storage = held[numbers[0]].storage if numbers and numbers[0] in held else None
    detection.rename(storage.name if storage is not None else "")


def _message(probe: Probe, detection: Detection, reason: str) -> str:
    if probe.recorder.custom_backward and detection.target.kind != "loss":
        reason = f"its backward can't be replayed: it uses {probe.recorder.custom_backward}"
    if reason == TOO_LITTLE:
        return f"{reason}: free some (`%free`), or make the batch smaller"
    return (
        f"Step {probe.step} went bad (its {detection.target.kind} is not finite), but {reason}. "
        "Run it again with strategy='trace', which looks at every op while the step runs."
    )


class StopReplay(BaseException):
    """Ends a replay once there is nothing more to be learned from it. (Recorders let it pass.)"""


class ReplayLocator:
    """One replay with taint, under a recorder that knows each recorded op's line and module. origins: of what was
    detected, where that was a loss, or where one origin is all there is. reproductions: what the forward op was given
    whose derivative goes bad."""

    def __init__(
        self, probe: Probe, detection: Detection, suspects: Suspects, bad_external: set[int], exact: bool = False
    ):
        self.probe, self.detection, self.suspects, self.bad_external = probe, detection, suspects, bad_external
        self.recorder = Recorder(probe.stack, [], self._ignore_external)
        self.recorder.step = probe.step
        self.taint = ReplayTaintTracker(self.recorder, suspects, exact or bool(bad_external))
        recorded = probe.taint.origins
        self.taint.origins.batch, self.taint.origins.folds = recorded.batch, set(recorded.folds)
        self.taint.origins.leading = recorded.leading.copy()
        self.recorder.watchers = [self, self.taint]
        self.origins: set[int] = set()
        self.reproductions: dict[int, Reproduction] = {}
        born_in_backward = detection.target.kind == "gradient" and not self.taint.exact
        self._born_at = suspects.born_at if born_in_backward else None
        self._there = False  # the derivative of that op has begun
        self._given = collections.deque(probe.given)  # calls of a model that are still to come

    def run(self) -> Replay:
        """Replay the step, up to what went bad."""
        self._replay = replay = Replay(
            self.probe.tape,
            on_outside=self._introduce,
            on_backward=self._backward,
            around=self._forward,
            during_engine=self._engine,
            keep=self.detection.ref,
            graph=needs_graph(self.probe, self.detection),
        )
        with contextlib.suppress(StopReplay):
            replay.run(self.detection.position, forward_only=self.detection.target.kind == "loss")
            self._conclude()
        if self.recorder.fault is not None:
            raise self.recorder.fault
        return replay

    @property
    def complete(self) -> bool:
        """Whether all that the scan had found has come again."""
        all_replayed = self.suspects.results.keys() == set(self.taint.replayed)
        return bool(self._born_at is not None and self.origins) or (
            all_replayed and (self.suspects.complete or self.detection.target.kind in ("loss", "buffer"))
        )

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, op: Op, args: tuple, kwargs: dict) -> Any:
        schema, taint = schema_of(op.func), self.taint
        try:
            while self._given and self._given[0][0] <= op.index:
                self._give(*self._given.popleft()[1:])
            reach = self.recorder.record_operands(op, args, kwargs)
            overwritten = taint.before(op, schema, args, kwargs)
            if op.index == self._born_at:
                self.reproductions[op.index] = Reproduction.of_call(op.func, args, kwargs)
        except Exception as fault:  # of ours, and none of the replay's
            self.recorder.fault = fault
            raise
        out = op.func(*args, **kwargs)
        try:
            self.recorder.number(op, _next_number())
            self.recorder.record_results(op, schema, args, kwargs, out, reach)
            taint.after(op, schema, args, kwargs, out, overwritten)
            if op.index in self.reproductions:
                self.reproductions[op.index].copy_gradients_of(out)
        except Exception as fault:
            self.recorder.fault = fault
            raise
        return out

    def _give(self, tensors: tuple, site: Site | None) -> None:
        """A model is called with these: what of it is bad is its input."""
        for ref in tensors if self.taint.storages else ():
            values = self._replay.value_of(ref) if isinstance(ref, Ref) else None
            if values is not None and (values := dense(values)) is not None:
                mark_input(self.recorder, self.taint, values, site)

    def _backward(self, roots: list[torch.Tensor], done: bool) -> None:
        if done:
            self.taint.origins.segment += 1
        elif self.detection.target.kind == "loss":
            self.origins |= {origin for root in roots for origin in self.taint.origins_of(root)}

    # -- backward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _engine(self) -> Iterator[None]:
        self.taint.in_backward = True
        with self.recorder:
            yield
        self.taint.in_backward = False

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        """As a watcher in backward, before the taint: is the derivative over in which all was born?"""
        if self._born_at is not None:
            there = op.forward is not None and op.forward.index == self._born_at
            if self._there and not there:
                self._conclude()
            self._there = there

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: Any) -> None:
        """See `before`."""

    def _conclude(self) -> None:
        """Ends the replay where enough is known: what was born in backward is born, and so are its rows; all that went
        bad before is a mask's."""
        origins = self.taint.origins
        born = {
            origin
            for origin in origins
            if (op := origin.op) is not None
            and op.forward is not None
            and not origin.intended
            and op.forward.index == self._born_at
        }
        rows_known = all(origin.rows is not None or not origins.batch_size for origin in born)
        if born and rows_known and all(origin in born or origin.intended for origin in origins):
            self.origins = {origin.index for origin in born}
            self.taint.modules |= self.suspects.modules
        if self.origins or not self.suspects.complete:
            raise StopReplay

    # -- what comes from outside --------------------------------------------------------------------------------------

    def _introduce(self, number: int, tensor: torch.Tensor, held: ExternalTensor) -> None:
        """A tensor from outside, under the name that it had in the step."""
        with torch.no_grad():
            values, known = dense(tensor), held.storage
            if values is None:
                return
            if known is None and not held.changed:  # a part of it may have been given to the model later
                known = self.probe.recorder.storages.get(storage_key(held.tensor))
            if known is None or not known.role:
                reach, role = (PARAMETER, "parameter") if held.leaf else (TARGET, "target")
                known = StorageInfo(values.untyped_storage(), None, reach, role)
            # of a data set in one storage, batches are introduced in turn
            storage = self.recorder.storages.get(storage_key(values))
            if storage is None:
                storage = StorageInfo(values.untyped_storage(), None, known.reach, known.role, known.name, known.module)
                storage.entered = known.entered
                self.recorder.storages[storage_key(values)] = storage
            earlier = self.probe.bad_buffers.get(storage.name) if known.role == "buffer" else None
            if number in self.bad_external and earlier is not None:
                self.taint.adopt(earlier, values)
            elif number in self.bad_external:
                self.taint.external(tensor, storage)
            elif known.role == "target":
                self.taint.origins.note_shape(tensor)

    def _ignore_external(self, tensor: torch.Tensor, storage: StorageInfo) -> None:
        """Everything from outside has been introduced; views of it need no second look."""


class GraphLocator(ReplayLocator):
    """Taint of one node of the recording's graph. It is of use only if `origins` is filled in."""

    def __init__(self, probe: Probe, detection: Detection, suspects: Suspects, scan: RecordingScan):
        super().__init__(probe, detection, suspects, set())
        self.scan, self._inside = scan, 0

    def run_node(self) -> None:
        """Run backward as far as that node."""
        call, node = self.scan.call, self.scan.born_in
        assert call is not None and node is not None, "there is a graph to look at"
        storages = storages_of(self.probe.tape)
        self.recorder.continue_from(self.probe.recorder, storages)
        for held in self.probe.tape.externals.values():
            known = storages.get(storage_key(held.tensor))
            if known is not None and known.role == "target":
                self.taint.origins.note_shape(held.tensor)
        self.taint.in_backward = True
        self.taint.origins.segment = self.probe.taint.origins.segment - 1
        handles = [node.register_prehook(self._enter), node.register_hook(self._leave)]
        try:
            with contextlib.suppress(StopReplay), torch.enable_grad():
                torch.autograd.backward(call.roots, call.seeds, inputs=call.inputs or None)
        finally:
            for handle in handles:
                handle.remove()
            while self._inside:  # the derivative has failed; the engine may have taken our mode off with its own
                with contextlib.suppress(RuntimeError):
                    self._exit()
        if self.recorder.fault is not None:
            raise self.recorder.fault

    def _enter(self, gradients: tuple) -> None:
        op = self.scan.born_at
        assert op is not None and self._born_at is not None, "the node is an op's"
        self.reproductions[self._born_at] = Reproduction(op.func, None, None)
        self.reproductions[self._born_at].copy_gradients(gradients)
        self.recorder.__enter__()
        self._inside += 1

    def _exit(self) -> None:
        self._inside -= 1
        self.recorder.__exit__(None, None, None)

    def _leave(self, passed: Any, received: Any) -> None:
        self._exit()
        self._conclude()
