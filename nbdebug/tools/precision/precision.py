"""`precision(model, batch, loss_fn)`: which modules must stay in float32 for a step to work in half precision.

The same step runs in float32 and in half precision, and every module is compared by itself; trials of the whole step,
forward and backward, search the smallest set that has to be kept; each kept module is examined op by op; and the mixed
model is tried. The user's model is left as it is.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.observe.validation import OUTPUT_FORM, check_loss, check_model, loss_call
from nbdebug.report import Plot, Report, RuledOut, Symptom, Table
from nbdebug.text import count, figures, listed, percent, size
from nbdebug.tools.precision.casting import MODES, CastCopies
from nbdebug.tools.precision.causes import facts_after_search, facts_before_search, module_tree
from nbdebug.tools.precision.compare import ReferenceRun
from nbdebug.tools.precision.rules import (
    Exact,
    HalfStep,
    PrecisionFacts,
    Tried,
    distance,
    module_list,
    module_name,
    name_all,
)
from nbdebug.tools.precision.search import MinimalSetSearch, SearchStopped, search
from nbdebug.tools.precision.trial import HalfTrials, OwnStep, gradients_aside, off
from nbdebug.tools.precision.unscale_order import check_unscale_order

TOLERANCE = 0.05
"""Relative distance of the loss from which a step counts as wrong: our choice. Healthy steps in half precision were off
by less than 0.1% in all models tried, those at fault by 5% and more."""


@interruptible
def precision(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    dtype: str | torch.dtype = "float16",
    *,
    mode: str = "autocast",
    tolerance: float = TOLERANCE,
    budget: float | None = None,
    more_batches: Sequence[Any] = (),
    optimizer: Any = None,
    step: Callable[[], Any] | None = None,
    progress: bool = True,
) -> PrecisionReport:
    """Find the smallest set of modules that must stay in float32; the report's `fp32_modules`.

    loss_fn: `loss_fn(model, batch)`, or a criterion of (outputs, targets) for batches of a pair; it may make the whole
    step itself (backward, GradScaler, clipping): it then ends where the optimizer would step. batch, more_batches: as
    it takes them; the step has to work on each. dtype: "float16" or "bfloat16". mode: "autocast" (the model as it is,
    under torch.autocast) or "cast" (weights and inputs cast, as by `model.half()`). A step works when loss and
    gradients are finite and every loss is within `tolerance` of the float32 loss, relative. budget: seconds for the
    search (None: until done); Ctrl-C ends it as well, and the best set so far is reported, as not shown to be minimal.
    optimizer: its epsilon is compared with the dtype. step: a whole training step of your own, called without
    arguments; run up to the place where the optimizer would step, to see whether the order of scaler and clipping is
    right. Raises TypeError and ValueError for arguments of another kind; an exception of `loss_fn` in float32 passes.
    """
    half = _dtype(dtype)
    _check(model, loss_fn, mode, tolerance, budget)
    if step is not None and not callable(step):
        raise TypeError(f"step is a function without arguments; got {type(step).__name__}")
    model = getattr(model, "_orig_mod", model)
    batch_loss, form = loss_call(loss_fn)
    if form == OUTPUT_FORM:
        batch_loss, _ = loss_call(_promoted(loss_fn))
    copies, trials = CastCopies(model, half, mode), HalfTrials(batch_loss, [batch, *more_batches])
    with gradients_aside(model):
        reference = ReferenceRun(copies, trials)
        if reference.outcome.error:
            with OwnStep():
                batch_loss(model, batch)  # the user's own exception, as it is
            raise RuntimeError(f"the step fails on a float32 copy of the model: {reference.outcome.error}")
        facts = facts_before_search(copies, trials, reference, tolerance, optimizer)
        if reference.outcome.finite:  # else nothing can be compared, and the cause is another tool's
            facts = _searched(facts, copies, trials, reference, budget, progress)
        if step is not None or trials.scaler is not None:
            whole = step or (lambda: batch_loss(model, batch))
            order = check_unscale_order(whole, model, trials, None if step else trials.scaler)
            facts = dataclasses.replace(facts, order=order)
    return report_of(facts, mode, model)


def _promoted(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """The loss, with floating outputs and targets in the wider of their dtypes: torch up to 2.11 at least refuses some
    losses of a half and a float32 tensor."""

    def loss(outputs: Any, targets: Any) -> Any:
        if all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in (outputs, targets)):
            wide = torch.promote_types(outputs.dtype, targets.dtype)
            outputs, targets = outputs.to(wide), targets.to(wide)
        return loss_fn(outputs, targets)

    return loss


def _searched(
    facts: PrecisionFacts,
    copies: CastCopies,
    trials: HalfTrials,
    reference: ReferenceRun,
    budget: float | None,
    progress: bool,
) -> PrecisionFacts:
    """The facts with the smallest set, and with what goes wrong in its modules."""
    distances: dict[frozenset[str], float] = {}
    ends = None if budget is None else time.monotonic() + budget

    def works(fp32: frozenset[str]) -> bool:
        if ends is not None and time.monotonic() > ends:
            raise SearchStopped
        if not fp32:  # that step has been made
            distances[fp32] = facts.half.off
        else:
            distances[fp32] = off(trials.run(copies.half(fp32), copies.running), reference.outcome)
        return distances[fp32] <= facts.tolerance

    tree, tries, stopped = module_tree(copies.model, reference), MinimalSetSearch(works), ""
    tries.spread = tree.spread
    with progress_bar("search", "tries", wanted=progress) as bar:

        def on_try(tries: MinimalSetSearch) -> None:
            best = "" if tries.best is None else f"at most {count(len(tries.best), 'module')}"
            bar.set_postfix_str(best, refresh=False)
            bar.update()

        tries.on_try = on_try
        try:
            smallest = search(tree, tries, reference.suspects(), reference.broken())
        except (SearchStopped, KeyboardInterrupt) as early:
            stopped = "the time was up" if isinstance(early, SearchStopped) else "it was interrupted"
            smallest = tries.best if tries.best is not None else frozenset({""})
    rows = tuple(Tried(tuple(sorted(t.kept)), t.worked, distances[t.kept]) for t in tries.tries)
    return facts_after_search(facts, copies, trials, reference, tree.ordered(smallest), rows, tries, stopped)


DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    half = dtype if dtype in DTYPES.values() else DTYPES.get(str(dtype).removeprefix("torch."))
    if not isinstance(half, torch.dtype):
        raise ValueError(f'dtype is "float16" or "bfloat16"; got {dtype!r}')
    return half


def _check(model: Any, loss_fn: Any, mode: str, tolerance: float, budget: float | None) -> None:
    call = "precision(model, batch, loss_fn)"
    check_model(model, call)
    check_loss(loss_fn, call)
    if mode not in MODES:
        raise ValueError(f"mode is {' or '.join(map(repr, MODES))}; got {mode!r}")
    for name, value in (("tolerance", tolerance), ("budget", budget)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ValueError(f"{name} is a number above zero; got {value!r}")


FLOAT32_OFF = 1e-3
"""Relative distance of float32 from float64 from which the reference is in doubt: our choice. Healthy steps were off by
1e-6 and less, and half precision's own errors begin at 1e-3."""


@dataclasses.dataclass(repr=False)
class PrecisionReport(Report):
    """A Report that knows the set. fp32_modules: names of the modules that must stay in float32, in the model's order;
    ("",) is the whole model."""

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        return tuple(self.facts.get("fp32_modules", ()))


def report_of(facts: PrecisionFacts, mode: str, model: Any) -> PrecisionReport:
    """The report on one search."""
    return PrecisionReport(
        f'precision(model, batch, loss_fn, "{facts.dtype}", mode="{mode}")',
        tuple(name_all(facts)),
        _ruled_out(facts),
        _unchecked(facts),
        _notes(facts),
        f"a model of type {type(model).__name__}",
        {"fp32_modules": list(facts.kept), "tries": len(facts.tries)},
        headline=_headline(facts),
        symptoms=() if facts.float32.finite else (Symptom(_headline(facts)),),
        tables=(_tries(facts), _costs(facts), _modules(facts)),
        plots=(Plot("ranges", _ranges(facts)),),
    )


def _headline(facts: PrecisionFacts) -> str:
    off = f"in {facts.dtype} the loss is off by {distance(facts.half.off)}"
    if not facts.float32.finite:
        return "The step is not finite in float32 either: %nan_trace names the op that causes it."
    if not facts.kept and facts.order is not None:
        return f"No module needs float32, but the order of the step is wrong; {off}."
    if not facts.kept:
        return f"Nothing needs float32: {off}."
    if facts.kept == ("",):
        return f"No part of the model works in {facts.dtype}: all of it, or its own code, needs float32."
    proof = (
        "taking any one out fails" if facts.minimal else f"not shown to be the smallest set: {_why_not_minimal(facts)}"
    )
    tries = count(len(facts.tries), "try", "tries")
    return f"{count(len(facts.kept), 'module')} must stay in float32: {module_list(facts.kept, 8)} ({tries}; {proof})."


def _why_not_minimal(facts: PrecisionFacts) -> str:
    return facts.stopped or "some tries contradict each other"


def _ruled_out(facts: PrecisionFacts) -> tuple[RuledOut, ...]:
    result = []
    fine = [m for m in facts.modules if m.leaf and not m.broken and m.name not in facts.kept and m.largest]
    if fine:
        nearest = max(fine, key=lambda m: m.largest)
        limit = f"the largest {facts.dtype} is {figures(facts.largest)}"
        because = f"their largest value is {figures(nearest.largest)} (`{nearest.name}`), {limit}"
        result.append(RuledOut("an overflow in other modules", because))
    if facts.scaling is None and facts.half.finite:
        result.append(RuledOut("gradients that vanish", "every parameter with a gradient in float32 has one"))
    return tuple(result)


def _unchecked(facts: PrecisionFacts) -> tuple[str, ...]:
    lines = list(facts.unchecked)
    if facts.half.error:
        lines.append(f"The step in {facts.dtype} without changes: it raised {facts.half.error}")
    if not facts.minimal and facts.kept:
        lines.append(f"Whether a smaller set works: {_why_not_minimal(facts)}")
    return tuple(lines)


def _notes(facts: PrecisionFacts) -> tuple[str, ...]:
    half = f"in {facts.dtype} " + ("the step fails" if facts.half.error else figures(facts.half.loss))
    bad = len(facts.half.bad)
    gradients = f"; {count(bad, 'gradient')} {'is' if bad == 1 else 'are'} not finite" if bad else ""
    notes = [f"The loss is {figures(facts.float32.loss)} in float32, {half}{gradients}."]
    if facts.exact is not None:
        notes.append(_float32_note(facts.exact))
    if facts.mixed is not None:
        notes.append(_cost(facts.mixed, facts.float32, "with these modules in float32"))
        notes.append(
            "The same without nbdebug, around the call of each of these modules: "
            "`with torch.autocast(x.device.type, enabled=False): y = module(x.float()).to(x.dtype)`."
        )
    elif facts.half.finite:
        notes.append(_cost(facts.half, facts.float32, f"in {facts.dtype}"))
    return tuple(notes)


def _cost(step: HalfStep, plain: HalfStep, how: str) -> str:
    memory = ""
    if step.memory is not None and plain.memory:
        memory = f"; its peak memory was {size(step.memory)}, in float32 {size(plain.memory)}"
    seconds = f"{1000 * step.seconds:.0f} ms, in float32 {1000 * plain.seconds:.0f} ms"
    return f"A step {how} took {seconds}{memory}."


def _float32_note(exact: Exact) -> str:
    """How good the reference is."""
    off = f"{percent(exact.off)} in the loss"
    if exact.norm_off is not None:
        off += f" and {percent(exact.norm_off)} in the norm of all gradients"
    if max(exact.off, exact.norm_off or 0.0) <= FLOAT32_OFF:
        return f"float32 is accurate enough as the reference: it differs from float64 by {off}."
    worst = max(exact.errors, key=lambda name: exact.errors[name], default=None)
    where = f", most in {module_name(worst)} by itself ({percent(exact.errors[worst])})" if worst is not None else ""
    return (
        f"float32 itself differs from float64 by {off}{where}: the errors of half precision are measured against "
        "float32, and the modules named here may need float64."
    )


# Tables


def _tries(facts: PrecisionFacts) -> Table:
    return Table(
        "What was tried",
        ("try", "kept in float32", "the step", "loss off by"),
        [
            [i, listed(t.kept, 6, quote="") or "nothing", "works" if t.worked else "fails", distance(t.off)]
            for i, t in enumerate(facts.tries, 1)
        ],
        "A step works when loss and gradients are finite and the loss is within "
        f"{100 * facts.tolerance:g}% of float32's.",
    )


def _costs(facts: PrecisionFacts) -> Table:
    """Time and memory of the mixed step, between all in half and all in float32."""
    steps = [("all in float32", facts.float32), (f"all in {facts.dtype}", facts.half)]
    if facts.mixed is not None:
        steps.append(("the set in float32", facts.mixed))
    known = [(how, step) for how, step in steps if not step.error]
    memory = all(step.memory is not None for _, step in known)
    return Table(
        "What a step costs",
        ("the step", "ms", *["peak memory (bytes)"] * memory, "loss", "loss off by"),
        [[how, 1000 * step.seconds, *[step.memory] * memory, step.loss, distance(step.off)] for how, step in known],
        "Forward and backward of all batches, the better of two runs"
        + ("; peak memory above what was held before." if memory else ". Memory is measured on an accelerator only."),
    )


def _modules(facts: PrecisionFacts) -> Table:
    """Headroom and errors, module by module."""
    double = facts.exact is not None
    rows = [
        [
            m.name,
            m.kind,
            m.largest,
            facts.largest / m.largest if m.largest else None,
            100 * m.tiny,
            math.inf if m.broken else 100 * m.error,
            *([None if m.float32_error is None else 100 * m.float32_error] * double),
            m.gradient,
            100 * m.gradient_tiny,
        ]
        for m in facts.modules
    ]
    columns = ["module", "type", "largest", "headroom", "tiny %", "error %", *["float32 %"] * double]
    return Table(
        "Values and errors of each module",
        (*columns, "gradient", "tiny grad. %"),
        rows,
        f"largest, gradient: in the float32 step. headroom: {figures(facts.largest)}, the largest {facts.dtype}, over "
        f"the largest value. tiny: below {figures(facts.tiny)}, its smallest normal number. error: of the output by "
        "itself in half, on the same inputs (inf: not finite)"
        + ("; float32: the same of float32 against float64." if double else "."),
    )


def _ranges(facts: PrecisionFacts) -> dict[str, Any]:
    """For the picture: exponents of every leaf's values, with what overflowed inside a kept one, and of its
    gradients."""

    def powers(low: float, high: float) -> list[float] | None:
        return [math.log2(low), math.log2(high)] if 0 < low <= high < math.inf else None

    inner = {c.module: max([e.size for e in c.events if e.what == "overflow"], default=0.0) for c in facts.culprits}
    leaves = [m for m in facts.modules if m.leaf or m.name in facts.kept]
    return {
        "dtype": facts.dtype,
        "modules": [
            {
                "name": m.name,
                "values": powers(m.smallest, max(m.largest, inner.get(m.name, 0.0))),
                "kept": m.name in facts.kept,
                "gradient": math.log2(m.gradient) if 0 < m.gradient < math.inf else None,
            }
            for m in leaves
        ],
    }
