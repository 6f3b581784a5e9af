"""`precision(model, batch, loss_fn)`: which modules must stay in float32 for a step to work in half precision.

The same step runs in float32 and in half precision, and every module is compared by itself; trials of the whole step,
forward and backward, search the smallest set that has to be kept; each kept module is examined op by op; and the mixed
model is tried. The user's model is left as it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.interrupts import interruptible
from nbdebug.live import progress_bar
from nbdebug.observe.validation import check_loss, check_model, loss_call
from nbdebug.text import count
from nbdebug.tools.precision.casting import MODES, CastCopies
from nbdebug.tools.precision.causes import facts_after_search, facts_before_search, module_tree
from nbdebug.tools.precision.compare import ReferenceRun
from nbdebug.tools.precision.facts import PrecisionFacts, Tried
from nbdebug.tools.precision.report import PrecisionReport, report_of
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
    batch_loss = loss_call(loss_fn)[0]
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
