"""Try a fix: on the tape of the failing step, and by the user's own code as edited.

`FixTrial` is the recorded step, replayed with some ops changed; it must fail again when it is replayed unchanged, or
the trial proves nothing. `StepTrial` runs the user's own step again from what it started from, with the edited text in
the user's functions, and two more steps behind it. Both leave everything as it was.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nbdebug.observe.ops import schema_of
from nbdebug.observe.recorder import Op
from nbdebug.observe.replay import Replay
from nbdebug.observe.rerun import Rerun
from nbdebug.observe.snapshot import StepState
from nbdebug.observe.sources import edited_functions
from nbdebug.observe.tape import CannotReplay, Ref, TapeEntry
from nbdebug.observe.tensors import all_finite, can_be_nonfinite, dense, each_largest, finite, read_scalars, tensors_in
from nbdebug.report import Edit
from nbdebug.text import clip, count, listed
from nbdebug.tools.nan.probe import Detection, Probe

Patch = Callable[..., Any]
TapeChange = tuple[dict[int, Patch], dict[int, Callable[[torch.Tensor], torch.Tensor]], float]
"""A fix as a replay takes it: ops replaced, by index; tensors from outside changed, by number; a factor on the loss."""
MORE = 2
"""Steps that a fix must survive behind the failing one, where the program has them."""
LONGEST = 60
"""Steps of a run that is run again from its first one, at most: it takes as long as the trace of it, or less."""
AUTOCAST = frozenset("to mm bmm addmm baddbmm addbmm matmul linear convolution einsum".split())
"""Where autocast casts: to, and what gets its operands in half precision by it."""


def error_text(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {clip(first, 120)}"


class FixTrial:
    """One failing step, ready to be replayed. `why_not` says why it can't be, else it is empty."""

    def __init__(self, probe: Probe, detection: Detection, op: Op | None):
        self.tape, self.detection, self.op, self.reproductions = probe.tape, detection, op, probe.reproductions
        self.name_of = probe.names.owner
        self.why_not = ""
        self.unchanged: list[tuple[int, int]] = []  # a patched op's finite results: how many stayed, of how many
        if probe.reproduced:
            return
        try:
            original = self.replay({}, forward_only=detection.target.kind == "loss")
        except CannotReplay as reason:
            self.why_not = f"the step can't be replayed: {reason}"
        except Exception as error:  # an op that is not to be run alone; nothing was changed
            self.why_not = f"the step can't be replayed: {error_text(error)}"
        else:
            if self._is_cured(original):
                self.why_not = "the step is finite when it is replayed: it does not repeat"

    def replay(
        self,
        patches: Mapping[int, Patch],
        inputs: Mapping[int, Callable] | None = None,
        scale: float = 1.0,
        forward_only: bool = False,
    ) -> Replay:
        """Run the step again, up to what went bad."""
        replay = Replay(self.tape, patches, inputs, scale=scale, keep=self.detection.ref)
        return replay.run(self.detection.position, forward_only)

    def ops(self, fits: Callable[[Op], bool]) -> list[Op]:
        """The recorded ops that fit."""
        return [e.op for e in self.tape.entries if isinstance(e, TapeEntry) and not e.unfit and fits(e.op)]

    def writing_infinities(self) -> list[Op]:
        """The ops that got an infinity as a number, written in the code."""

        def infinite(value: Any) -> bool:
            held = self.tape.externals.get(value.value) if isinstance(value, Ref) else None
            if held is not None and not held.tensor.dim() and can_be_nonfinite(held.tensor):
                return bool(torch.isinf(held.tensor))
            return isinstance(value, float) and math.isinf(value)

        entries = [e for e in self.tape.entries if isinstance(e, TapeEntry) and not e.unfit]
        return [e.op for e in entries if any(map(infinite, (*e.args, *e.kwargs.values())))]

    def patch(self, ops: Iterable[Op], patch: Patch) -> TapeChange:
        """The patch at each of these ops."""
        return {op.index: self._compared(patch, self.reproductions.get(op.index)) for op in ops}, {}, 1.0

    def in_float32(self, ops: Iterable[Op]) -> TapeChange | None:
        """These ops in float32, casts to float16 among them left out; those behind get float16 as autocast gives it.
        None where that can't be told."""
        chosen = {op.index for op in ops}

        def full(func: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = _cast((args, kwargs), torch.float16, torch.float32)
            return args[0] if kwargs.get("dtype") == torch.float16 else func(*args, **kwargs)

        def half(func: Any, args: Any, kwargs: Any) -> Any:
            return func(*_cast(args, torch.float32, torch.float16), **kwargs)

        def normalized(func: Any, args: Any, kwargs: Any) -> Any:
            x, dim, half_to_float = args  # CUDA's cast within, from float16 alone
            return func(x, dim, half_to_float and x.dtype == torch.float16, **kwargs)

        if self._lowered is None:
            return None
        softmax = [op.index for op in self.ops(lambda o: o.name in ("softmax", "log_softmax"))]
        changes = {**dict.fromkeys(self._lowered, half), **dict.fromkeys(softmax, normalized)}
        return {**changes, **dict.fromkeys(chosen, full)}, {}, 1.0

    @functools.cached_property
    def _lowered(self) -> set[int] | None:
        """The ops that got float16 in the step, of those that autocast gives it to."""
        lowered: set[int] = set()

        def noted(op: Op, func: Any, args: Any, kwargs: Any) -> Any:
            if any(t.dtype == torch.float16 for t in tensors_in((args, kwargs))):
                lowered.add(op.index)
            return func(*args, **kwargs)

        ops = self.ops(lambda o: o.name in AUTOCAST and o.name != "to")
        try:
            self.replay({op.index: functools.partial(noted, op) for op in ops}, forward_only=True)
        except Exception:  # as in `attempt`: of any op
            return None
        return lowered

    def attempt(self, change: TapeChange) -> tuple[bool, dict[str, Any]]:
        """Whether the recorded step is cured by this change, and the numbers that show it."""
        self.unchanged = []
        patches, inputs, scale = change
        try:
            replay = self.replay(patches, inputs, scale)
            return self.is_all_finite(replay), self.numbers(replay)
        except Exception as error:
            return False, {"why not": error_text(error)}

    def _compared(self, patch: Patch, reproduction: Any = None) -> Patch:
        """The patch, which also counts the finite results of the op that it leaves as they are."""

        def compared(func: Any, args: Any, kwargs: Any) -> Any:
            if reproduction is not None:
                reproduction.copy_arguments(args, kwargs)
            with torch.no_grad():
                before = None if schema_of(func).writes else next(iter(tensors_in(func(*args, **kwargs))), None)
            out = patch(func, args, kwargs)
            now = next(iter(tensors_in(out)), None)
            if before is not None and now is not None and before.shape == now.shape and can_be_nonfinite(before):
                good = finite(before)
                same = torch.isclose(before[good], now.detach()[good], rtol=1e-5, atol=1e-6)
                self.unchanged.append((int(same.sum()), int(good.sum())))
            return out

        return compared

    def _is_cured(self, replay: Replay) -> bool:
        """Whether what went bad in the step is finite in a replay."""
        kind = self.detection.target.kind
        if kind == "loss":
            return not count_bad(replay.losses)
        if kind == "gradient":
            return not count_bad(replay.gradients.values())
        if kind == "parameter":
            return not count_bad(replay.leaves.values())
        return replay.value is not None and all_finite(replay.value)

    def is_all_finite(self, replay: Replay) -> bool:
        """Whether losses, gradients, and what went bad in the step are finite in a replay."""
        tensors = [*replay.losses, *replay.gradients.values(), *([replay.value] if replay.value is not None else [])]
        tensors += replay.leaves.values() if self.detection.target.kind == "parameter" else []
        return not count_bad(tensors)

    def numbers(self, replay: Replay) -> dict[str, Any]:
        """What a replay with the fix shows."""
        numbers: dict[str, Any] = {}
        finals = replay.losses or ([replay.value] if replay.value is not None else [])
        if finals and finals[-1].numel() == 1 and not finals[-1].is_complex():
            numbers["loss"] = float(finals[-1])
        gradients = [g for g in replay.gradients.values() if can_be_nonfinite(g)]
        if gradients:
            bad = count_bad(gradients)
            sound = f"all {len(gradients)} finite" if len(gradients) > 1 else "finite"
            numbers["gradients"] = f"{bad} of {len(gradients)} not finite" if bad else sound
        if self.detection.target.kind == "parameter":
            numbers["parameters"] = "not finite" if count_bad(replay.leaves.values()) else "finite"
        same, total = (sum(column) for column in zip((0, 0), *self.unchanged, strict=True))
        if total:
            numbers["finite values"] = f"{same:,} of {total:,} unchanged"
        if stopped := self._without_gradient(replay):
            numbers["note"] = f"stops the gradient of {listed(stopped)}"
        return numbers

    def _without_gradient(self, replay: Replay) -> list[str]:
        """The parameters that go into a changed op by themselves, and get no gradient any more."""
        direct = {
            ref.value
            for e in self.tape.entries
            if isinstance(e, TapeEntry) and e.op.index in replay.patches
            for ref in e.args
            if isinstance(ref, Ref)
        }
        zero = [n for n in direct if n in replay.gradients and not bool(replay.gradients[n].any())]
        owners = [self.name_of(self.tape.leaves[n]) for n in zero]
        return [owner[1] for owner in owners if owner is not None]


def _cast(tree: Any, dtype: torch.dtype, to: torch.dtype) -> Any:
    """The tree with its tensors of one dtype in another."""
    return tree_map(lambda v: v.to(to) if isinstance(v, torch.Tensor) and v.dtype == dtype else v, tree)


def count_bad(tensors: Iterable[torch.Tensor]) -> int:
    """How many of these are not finite; read in one go."""
    values = [v for t in tensors if (v := dense(t)) is not None and can_be_nonfinite(v)]
    return sum(not math.isfinite(size) for size in read_scalars(each_largest(values)))


class Outcome(NamedTuple):
    """Of a step run again, and those behind it. ran: whether the edited text ran at all; steps: how many were finite;
    behind: how many of them came after the one that failed."""

    ran: bool
    cured: bool
    steps: int = 0
    behind: int = 0
    loss: float | None = None
    why_not: str = ""

    @property
    def span(self) -> str:
        before = self.steps - self.behind - 1
        run = f"the run from its start, {count(self.steps, 'step')}" if before > 0 else "the failing step"
        return run if before > 0 or not self.behind else f"{run} and {self.behind} more"


class Trial(Protocol):
    """Of a step that runs again as edited. why_not: why it can't, else it is empty."""

    why_not: str

    def __call__(self) -> contextlib.AbstractContextManager[Any]: ...
    def run(self, edit: Edit, cure: Any) -> Outcome: ...


class StepTrial:
    """The failing step by the user's own code. start: what it started from; first: what the first step of the run
    started from, `failing` steps before. scaler: a GradScaler may skip a step whose gradients are not finite. Within a
    `with` of its call anything may change; afterwards all is as the failing step has left it."""

    def __init__(
        self,
        step: Callable[[], Any],
        start: StepState,
        first: StepState,
        failing: int,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        others: Iterable[Any],
        scaler: bool,
    ):
        self.step, self.start, self.first, self.failing = step, start, first, failing
        self.models, self.optimizers, self.others, self.scaler = models, optimizers, list(others), scaler
        self.why_not = start.why_not

    @contextlib.contextmanager
    def __call__(self) -> Iterator[StepTrial]:
        """The place to try in. `why_not` is filled in where the step does not fail again as it did."""
        end = StepState.take(self.step, self.models, self.optimizers, self.others)
        self.why_not = self.why_not or end.why_not
        if self.why_not:
            yield self
            return
        try:
            if self._run(self.start, 1, 0).cured:
                self.why_not = "the step is finite when it runs again: it does not repeat"
            yield self
        finally:
            end.leave()

    def run(self, edit: Edit, cure: Any) -> Outcome:
        """Run the step as edited, and if it is finite the next ones; or the run from its first step, where the cure
        asks for that. An argument of what was made long ago is set there."""
        if cure.whole_run and (self.first.why_not or self.failing > LONGEST):
            return Outcome(False, False)
        with contextlib.ExitStack() as stack:
            exchanged = stack.enter_context(edited_functions(edit))
            if not exchanged and cure.setting is None:
                return Outcome(False, False)
            state, failing = (self.first, self.failing) if cure.whole_run else (self.start, 0)
            return self._run(state, failing + 1, MORE, cure.setting or contextlib.nullcontext)

    def _run(
        self,
        state: StepState,
        needed: int,
        more: int,
        setting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> Outcome:
        state.restore()
        losses: list[float | None] = []
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), setting():
            warnings.simplefilter("ignore")
            for number in range(needed + more):
                done = Rerun(self.models, self._parameters).run(self.step)
                if done.error is not None:
                    if number >= needed and isinstance(done.error, (StopIteration, IndexError)):
                        break  # the data has ended
                    return Outcome(True, False, number, 0, None, error_text(done.error))
                if any(event.bad for event in done.events if not (self.scaler and event.what == "gradients")):
                    later = number - needed + 1
                    return Outcome(True, False, number, 0, None, f"step {later} behind it is bad" if later > 0 else "")
                losses.append(done.loss)
        return Outcome(True, True, len(losses), len(losses) - needed, losses[needed - 1])

    def _parameters(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {
            f"{name}.{n}": p for name, model in self.models.items() for n, p in model.named_parameters()
        }
        known = {id(p) for p in named.values()}
        for name, optimizer in self.optimizers.items():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if id(p) not in known:
                    named[f"{name}[{i}]"] = p
        return named
