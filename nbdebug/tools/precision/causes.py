"""What goes wrong in a module that has to be kept: its ops in half precision, one by one, on the float32 step's inputs.

An op that makes a value beyond the dtype from finite operands has overflowed; a small constant that is zero in the
dtype guards nothing; a value that is zero in half and not in float32 is lost. Where no op stands out, two runs tell:
the module in float32 with its inputs and buffers rounded to the dtype, and with its operations alone in half.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nbdebug.observe.locations import USER, Site, at_site, kind_of, locate
from nbdebug.observe.ops import WatchMode
from nbdebug.observe.tensors import base_name
from nbdebug.report import Where
from nbdebug.tools.precision.casting import CastCopies, cast
from nbdebug.tools.precision.compare import ReferenceRun, compare_with_float64
from nbdebug.tools.precision.rules import (
    Culprit,
    HalfEvent,
    HalfStep,
    LossScaling,
    ModulePrecision,
    PrecisionFacts,
    Tried,
)
from nbdebug.tools.precision.search import MinimalSetSearch, Tree
from nbdebug.tools.precision.trial import HalfTrials, TrialOutcome, norm_off, off

MOST = 12
"""Events of one module that are recorded."""
LOST = 0.05
"""Share of an op's values that become zero, from which it is an event."""
MOVES = frozenset(
    "to copy clone view expand slice select transpose permute detach t unsqueeze squeeze masked_fill where full "
    "full_like scalar_tensor empty empty_like new_empty empty_strided".split()
)
"""Ops that compute nothing, put constants where the user wants them, or hand out memory as it is."""


class HalfOps(WatchMode):
    """Watches ops in half precision. events: in order."""

    def __init__(self, dtype: torch.dtype, phase: str = "forward", module: str = ""):
        super().__init__()
        self.dtype, self.phase, self.module, self.outside = dtype, phase, module, locate()
        self.smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        self.events: list[HalfEvent] = []

    def __torch_dispatch__(self, op: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        output = op(*args, **kwargs)
        name = base_name(op)
        if name == "to" and output.dtype == self.dtype:
            self._compare(f"cast to {str(self.dtype).removeprefix('torch.')}", output, args[0])
        if len(self.events) < MOST and name not in MOVES and not op._schema.name.split("::")[-1].endswith("_"):
            halves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.dtype == self.dtype]
            if halves:
                self._examine(op, name, args, kwargs, halves)
        return output

    def _examine(self, op: Any, name: str, args: tuple, kwargs: dict, halves: list[torch.Tensor]) -> None:
        operands = [t for t in tree_leaves((args, kwargs)) if _is_float(t)]
        rng_states = [v for v in tree_leaves((args, kwargs)) if isinstance(v, float)]
        guards = [v for v in rng_states if v and abs(v) < self.smallest]
        if guards and name in ("add", "clamp_min", "clamp", "maximum", "sub"):
            self._note("guard", name, min(guards, key=abs), 1.0)
        if any(not bool(t.isfinite().all()) for t in operands) or not all(map(math.isfinite, rng_states)):
            return
        with contextlib.suppress(Exception):  # an op that float32 operands do not suit tells nothing
            outputs = tree_leaves(op(*cast(args, torch.float32), **cast(kwargs, torch.float32)))
            for half, full in zip(halves, filter(_is_float, outputs)):
                self._compare(name, half, full, torch.Tag.nondeterministic_seeded in op.tags)

    def _compare(self, name: str, half: torch.Tensor, full: torch.Tensor, random: bool = False) -> None:
        """random: the op may draw anew, and then zeros elsewhere (dropout) tell nothing."""
        beyond = ~half.isfinite() & full.isfinite()
        if bool(beyond.any()):
            self._note("overflow", name, float(full[beyond].abs().max()), float(beyond.double().mean()))
            return
        if random:
            return
        flushed = (half == 0) & (full != 0)
        share = float(flushed.double().mean()) if flushed.numel() else 0.0
        if share > LOST:
            self._note("underflow", name, float(full[flushed].abs().max()), share)

    def _note(self, what: str, op: str, size: float, share: float) -> None:
        stack = locate()  # a line that is around all of this is not the op's: the op is in code of torch's
        site = stack.library if stack.user == self.outside.user else stack.site
        where = at_site(Where(phase=self.phase, module=self.module, op=op), site)
        self.events.append(HalfEvent(what, op, size, share, self.phase, where))


def module_events(
    names: Iterable[str], copies: CastCopies, trials: HalfTrials
) -> dict[str, tuple[tuple[HalfEvent, ...], Where]]:
    """For each of these modules (none of them in another), what its ops do in half precision: forward, then backward,
    in the step's first call of it; and the line to show where none of them stands out: that of its forward, or for a
    module of torch's that which calls it. One float32 step gives the inputs and gradients of all."""
    reference, half = copies.reference(torch.float32), copies.half()
    calls: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, call in calls.items():
        reference.get_submodule(name).register_forward_hook(_recorder(call), with_kwargs=True)
    trials.run(reference)
    events: dict[str, tuple[tuple[HalfEvent, ...], Where]] = {}
    for name, call in calls.items():
        if "inputs" not in call:
            events[name] = (), Where(phase="forward", module=name)
            continue
        with trials.same_numbers(), torch.enable_grad():
            own = tuple(_events_of_call(name, half.get_submodule(name), copies, call))
        call["inputs"] = call["gradients"] = None
        events[name] = own, at_site(Where(phase="forward", module=name), call["site"])
    return events


def _recorder(call: dict[str, Any]) -> Callable[..., None]:
    """A hook that saves a module's first call: its inputs, its site, and the gradients of its outputs."""

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if "inputs" in call:
            return
        call["site"] = _forward_of(module) or locate().site
        call["inputs"] = tree_map(_copy, (args, kwargs))
        floats = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        call["gradients"] = [None] * len(floats)
        for place, tensor in enumerate(floats):
            tensor.register_hook(lambda g, place=place: call["gradients"].__setitem__(place, _copy(g)))

    return after


def _forward_of(module: nn.Module) -> Site | None:
    """Where the user has written this module's forward; None where it is torch's or a library's."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or kind_of(code) != USER:
        return None
    return Site(code.co_filename, code.co_firstlineno, code.co_name)


def _events_of_call(name: str, half: nn.Module, copies: CastCopies, call: dict[str, Any]) -> Iterator[HalfEvent]:
    args, kwargs = tree_map(lambda v: v.requires_grad_() if _is_float(v) else v, call["inputs"])
    forward, backward = HalfOps(copies.dtype, "forward", name), HalfOps(copies.dtype, "backward", name)
    if copies.mode == "cast":
        yield from _cast_weights(name, copies)
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        with forward, copies.running():
            output = half(*args, **kwargs)
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs, call["gradients"]) if g is not None]
        if pairs and all(bool(t.isfinite().all()) for t, _ in pairs):
            with backward:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    yield from forward.events
    yield from backward.events


def _cast_weights(name: str, copies: CastCopies) -> Iterator[HalfEvent]:
    """Weights and buffers that the cast itself has made infinite."""
    module = copies.model.get_submodule(name)
    for own, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            size = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            if torch.finfo(copies.dtype).max < size < math.inf:
                yield HalfEvent("overflow", f"cast of {own}", size, where=Where(phase="parameter", module=name))


def with_rounded_inputs(name: str, copies: CastCopies, fp32: frozenset[str]) -> nn.Module:
    """A copy in which this module computes in float32, and only its inputs and buffers are rounded to the dtype first
    (whole numbers too)."""
    model = copies.half(fp32)
    module = model.get_submodule(name)
    for part in module.modules():
        for key, buffer in part._buffers.items():
            part._buffers[key] = _rounded(buffer, copies.dtype)
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda v: _rounded(v, copies.dtype), (args, kwargs))
        return own(*args, **kwargs)

    module.forward = forward
    return model


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex():
        return value
    return value.to(dtype).to(value.dtype)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


SCALES = (2.0**10, 2.0**16)
"""Loss scales to try: a usual one for networks that need little, and GradScaler's first one."""
QUICK = 0.5
"""Seconds of a step up to which it is run once more for its time."""
CULPRITS = 16
"""So many kept modules are examined op by op."""


def half_step(outcome: TrialOutcome, reference: TrialOutcome) -> HalfStep:
    """The plain facts of an outcome."""
    bad = [loss for loss in outcome.losses if not math.isfinite(loss)]
    loss = bad[0] if bad else outcome.losses[0] if outcome.losses else math.nan
    return HalfStep(loss, off(outcome, reference), outcome.bad, outcome.seconds, outcome.memory, outcome.error)


def best_of_two(
    trials: HalfTrials, model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext
) -> TrialOutcome:
    """A step, made twice where it is quick: the first time warms up, the better time counts."""
    outcome = trials.run(model, around)
    if outcome.error or outcome.seconds > QUICK:
        return outcome
    return dataclasses.replace(outcome, seconds=min(outcome.seconds, trials.run(model, around).seconds))


def facts_before_search(
    copies: CastCopies, trials: HalfTrials, reference: ReferenceRun, tolerance: float, optimizer: Any
) -> PrecisionFacts:
    """The facts before the search."""
    info = torch.finfo(copies.dtype)
    plain = best_of_two(trials, copies.reference(torch.float32))  # again, with nothing beside it
    half = best_of_two(trials, copies.half(), copies.running)
    double = compare_with_float64(copies, trials, plain)
    errors = {} if isinstance(double, str) else double.errors
    unchecked = (f"How far off float32 itself is, against float64: {double}",) if isinstance(double, str) else ()
    modules = tuple(
        ModulePrecision(
            s.name,
            s.kind,
            s.largest,
            s.smallest,
            s.tiny,
            s.error,
            s.broken,
            s.gradient,
            s.gradient_tiny,
            s.calls,
            s.leaf,
            errors.get(s.name),
        )
        for s in reference.modules.values()
    )
    return PrecisionFacts(
        str(copies.dtype).removeprefix("torch."),
        copies.mode,
        tolerance,
        info.max,
        info.tiny,
        half_step(plain, reference.outcome),
        half_step(half, reference.outcome),
        modules=modules,
        scaling=_scaling(half, copies, trials, plain),
        epsilon=_epsilon(optimizer, copies),
        exact=None if isinstance(double, str) else double,
        unchecked=unchecked,
    )


def module_tree(model: nn.Module, reference: ReferenceRun) -> Tree:
    plain = [name for name, module in model.named_modules() if type(module) is nn.Sequential]
    return Tree([name for name, _ in model.named_modules()], ["", *reference.modules], plain)


def facts_after_search(
    facts: PrecisionFacts,
    copies: CastCopies,
    trials: HalfTrials,
    reference: ReferenceRun,
    fp32: tuple[str, ...],
    tried: tuple[Tried, ...],
    tries: MinimalSetSearch,
    stopped: str,
) -> PrecisionFacts:
    """The facts with what the search has found."""
    facts = dataclasses.replace(
        facts, tries=tried, kept=fp32, stopped=stopped, minimal=not fp32 or (not stopped and tries.minimal())
    )
    if not fp32:
        return facts
    mixed = half_step(best_of_two(trials, copies.half(fp32), copies.running), reference.outcome)
    events = module_events(fp32[:CULPRITS], copies, trials)
    if not any(own for own, _ in events.values()):  # in float32 it can spare another module's op from overflowing
        beyond = tuple(e for e in module_events([""], copies, trials)[""][0] if e.what == "overflow")
        events = {name: (beyond, e.where) if (e := next(iter(beyond), None)) else events[name] for name in events}
    culprits = tuple(
        _culprit(name, *events[name], copies, trials, reference, frozenset(fp32), facts.tolerance) for name in events
    )
    more = (f"What goes wrong in {len(fp32) - CULPRITS} further modules",) if len(fp32) > CULPRITS else ()
    return dataclasses.replace(facts, mixed=mixed, culprits=culprits, unchecked=facts.unchecked + more)


def _culprit(
    name: str,
    events: tuple[HalfEvent, ...],
    place: Where,
    copies: CastCopies,
    trials: HalfTrials,
    reference: ReferenceRun,
    fp32: frozenset[str],
    tolerance: float,
) -> Culprit:
    without = trials.run(copies.half(fp32 - {name}), copies.running)
    rounded = None
    if not any(e.what == "overflow" for e in events):
        outcome = trials.run(with_rounded_inputs(name, copies, fp32), copies.running)
        rounded = off(outcome, reference.outcome) > tolerance
    measurement = reference.modules.get(name)
    kind = type(copies.model.get_submodule(name)).__name__
    return Culprit(
        name,
        kind,
        off(without, reference.outcome),
        events,
        rounded,
        measurement.error if measurement else 0.0,
        measurement.largest if measurement else 0.0,
        without.bad,
        place,
        without.error,
    )


def _scaling(half: TrialOutcome, copies: CastCopies, trials: HalfTrials, reference: TrialOutcome) -> LossScaling | None:
    """Gradients that are zero in half precision and not in float32, and whether a loss scale brings them back."""
    vanished = _vanished(half, reference)
    if trials.scaler is not None:
        return None  # the step scales its loss itself
    if copies.dtype != torch.float16 or not vanished or not half.finite:
        return None
    tried = [(scale, trials.run(copies.half(), copies.running, scale)) for scale in SCALES]
    good = [(scale, outcome) for scale, outcome in tried if outcome.finite]
    if not good:
        return None
    scale, scaled = min(good, key=lambda pair: len(_vanished(pair[1], reference)))
    if len(_vanished(scaled, reference)) > len(vanished) / 2:
        return None  # no scale helps: something else is wrong
    return LossScaling(tuple(vanished), norm_off(half, reference), scale, norm_off(scaled, reference))


def _vanished(outcome: TrialOutcome, reference: TrialOutcome) -> list[str]:
    return [name for name, norm in reference.norms.items() if norm > 0 and outcome.norms.get(name, norm) == 0]


def _epsilon(optimizer: Any, copies: CastCopies) -> tuple[float, str, str] | None:
    """An epsilon that is zero in the dtype of the weights that the optimizer updates: (epsilon, class, dtype)."""
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    for one in optimizers:
        for group in one.param_groups:
            eps = group.get("eps")
            dtypes = {p.dtype for p in group["params"]}
            if copies.mode == "cast":
                dtypes |= {copies.dtype}
            for dtype in dtypes & {torch.float16, torch.bfloat16}:
                if isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
                    return eps, type(one).__name__, str(dtype).removeprefix("torch.")
    return None
