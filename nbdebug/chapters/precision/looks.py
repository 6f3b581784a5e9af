"""What is looked up around the search: the step in half precision as it is, the cause in each kept module, the mixed
model, gradients that are lost to zero, an optimizer's epsilon."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.precision import cause, exact
from nbdebug.chapters.precision.copies import Copies
from nbdebug.chapters.precision.facts import Culprit, Event, Module, PrecisionFacts, Scaling, Step, Tried
from nbdebug.chapters.precision.measure import Measured
from nbdebug.chapters.precision.search import Search
from nbdebug.chapters.precision.tree import Tree
from nbdebug.chapters.precision.trial import Outcome, Trials, norm_off, off
from nbdebug.finding import Where

SCALES = (2.0**10, 2.0**16)
"""Loss scales to try: a usual one for networks that need little, and GradScaler's first one."""
QUICK = 0.5
"""Seconds of a step that is made once more for its time."""
CULPRITS = 16
"""So many kept modules are looked into."""


def step_of(outcome: Outcome, reference: Outcome) -> Step:
    """The plain facts of an outcome."""
    bad = [loss for loss in outcome.losses if not math.isfinite(loss)]
    loss = bad[0] if bad else outcome.losses[0] if outcome.losses else math.nan
    return Step(loss, off(outcome, reference), outcome.bad, outcome.seconds, outcome.memory, outcome.error)


def timed(trials: Trials, model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext) -> Outcome:
    """A step, made twice where it is quick: the first time warms up, the better time counts."""
    outcome = trials.run(model, around)
    if outcome.error or outcome.seconds > QUICK:
        return outcome
    return dataclasses.replace(outcome, seconds=min(outcome.seconds, trials.run(model, around).seconds))


def first(copies: Copies, trials: Trials, measured: Measured, tolerance: float, optimizer: Any) -> PrecisionFacts:
    """The facts before the search."""
    info = torch.finfo(copies.dtype)
    plain = timed(trials, copies.reference(torch.float32))  # again, with nothing beside it
    half = timed(trials, copies.half(), copies.running)
    double = exact.look(copies, trials, plain)
    errors = {} if isinstance(double, str) else double.errors
    unchecked = (f"How far off float32 itself is, against float64: {double}",) if isinstance(double, str) else ()
    modules = tuple(
        Module(
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
        for s in measured.modules.values()
    )
    return PrecisionFacts(
        str(copies.dtype).removeprefix("torch."),
        copies.mode,
        tolerance,
        info.max,
        info.tiny,
        step_of(plain, measured.outcome),
        step_of(half, measured.outcome),
        modules=modules,
        scaling=_scaling(half, copies, trials, plain),
        epsilon=_epsilon(optimizer, copies),
        exact=None if isinstance(double, str) else double,
        unchecked=unchecked,
    )


def tree(model: nn.Module, measured: Measured) -> Tree:
    plain = [name for name, module in model.named_modules() if type(module) is nn.Sequential]
    return Tree([name for name, _ in model.named_modules()], ["", *measured.modules], plain)


def finished(
    facts: PrecisionFacts,
    copies: Copies,
    trials: Trials,
    measured: Measured,
    kept: tuple[str, ...],
    tried: tuple[Tried, ...],
    tries: Search,
    stopped: str,
) -> PrecisionFacts:
    """The facts with what the search has found."""
    facts = dataclasses.replace(
        facts, tries=tried, kept=kept, stopped=stopped, minimal=not kept or (not stopped and tries.minimal())
    )
    if not kept:
        return facts
    mixed = step_of(timed(trials, copies.half(kept), copies.running), measured.outcome)
    seen = cause.look(kept[:CULPRITS], copies, trials)
    culprits = tuple(
        _culprit(name, *seen[name], copies, trials, measured, frozenset(kept), facts.tolerance) for name in seen
    )
    more = (f"What goes wrong in {len(kept) - CULPRITS} further modules",) if len(kept) > CULPRITS else ()
    return dataclasses.replace(facts, mixed=mixed, culprits=culprits, unchecked=facts.unchecked + more)


def _culprit(
    name: str,
    events: tuple[Event, ...],
    place: Where,
    copies: Copies,
    trials: Trials,
    measured: Measured,
    kept: frozenset[str],
    tolerance: float,
) -> Culprit:
    without = trials.run(copies.half(kept - {name}), copies.running)
    wrong = None
    if not any(e.what == "overflow" for e in events):
        wrong = off(trials.run(cause.rounded(name, copies, kept), copies.running), measured.outcome) > tolerance
    seen = measured.modules.get(name)
    kind = type(copies.model.get_submodule(name)).__name__
    return Culprit(
        name,
        kind,
        off(without, measured.outcome),
        events,
        wrong,
        seen.error if seen else 0.0,
        seen.largest if seen else 0.0,
        without.bad,
        place,
        without.error,
    )


def _scaling(half: Outcome, copies: Copies, trials: Trials, reference: Outcome) -> Scaling | None:
    """Gradients that are zero in half precision and not in float32, and whether a loss scale brings them back."""
    lost = _lost(half, reference)
    if trials.scaler is not None:
        return None  # the step scales its loss itself
    if copies.dtype != torch.float16 or not lost or not half.finite:
        return None
    tried = [(scale, trials.run(copies.half(), copies.running, scale)) for scale in SCALES]
    good = [(scale, outcome) for scale, outcome in tried if outcome.finite]
    if not good:
        return None
    scale, scaled = min(good, key=lambda pair: len(_lost(pair[1], reference)))
    if len(_lost(scaled, reference)) > len(lost) / 2:
        return None  # no scale helps: something else is wrong
    return Scaling(tuple(lost), norm_off(half, reference), scale, norm_off(scaled, reference))


def _lost(outcome: Outcome, reference: Outcome) -> list[str]:
    return [name for name, norm in reference.norms.items() if norm > 0 and outcome.norms.get(name, norm) == 0]


def _epsilon(optimizer: Any, copies: Copies) -> tuple[float, str, str] | None:
    """An epsilon that is zero in the dtype of the weights that the optimizer updates: (epsilon, class, dtype)."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    for one in given:
        for group in one.param_groups:
            eps = group.get("eps")
            dtypes = {p.dtype for p in group["params"]}
            if copies.mode == "cast":
                dtypes |= {copies.dtype}
            for dtype in dtypes & {torch.float16, torch.bfloat16}:
                if isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=dtype)) == 0:
                    return eps, type(one).__name__, str(dtype).removeprefix("torch.")
    return None
