"""What outputs can be reached at all, whatever the weights: measured, for outputs that no known activation bounds.

All trained parameters are drawn at random, with a deviation of 30 and of 1,000. An output that nothing bounds grows
with them; one that is bounded (twice a tanh, a clamp, a cosine) stays where it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from nbdebug.tools.training.facts import LossCall
from nbdebug.tools.training.run.data import preserve_rng
from nbdebug.tools.training.run.evaluate import LossFn
from nbdebug.tools.training.static.one_step import calls_for, record
from nbdebug.tools.training.static.outputs import REACH, REGRESSIONS, outputs_and_targets, unreachable

DEVIATIONS = (30.0, 1000.0)
DRAWS = 8
"""For each deviation: with fewer, an element of an output would miss one of its ends too often."""
GROWS = 1.5
"""Largest output with the larger deviation over that with the smaller; without a bound it is 33 for a linear layer."""
SAME, MOST = 0.02, 0.9
"""An end is the same where it moves by less than this part of the range, in that share of the elements."""


def with_measured_reach(
    model: nn.Module, loss_fn: LossFn, batch: object, loss_calls: Sequence[LossCall]
) -> tuple[LossCall, ...]:
    """The calls with `reach`, `unreachable` and `bounded` measured, where no known activation gives them. Raises what
    the loss raises; the parameters are put back."""
    wanted = [i for i, call in enumerate(loss_calls) if _is_unknown(call)]
    if not wanted:
        return tuple(loss_calls)
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    values, ends = [p.detach().clone() for p in trained], []
    try:
        with preserve_rng(loss_fn):
            torch.manual_seed(0)
            for deviation in DEVIATIONS:
                draws = [_outputs(model, loss_fn, batch, trained, deviation) for _ in range(DRAWS)]
                if any(len(outputs) != len(loss_calls) for outputs in draws):
                    return tuple(loss_calls)
                columns = [torch.stack([pair[0] for pair in column]) for column in zip(*draws)]
                ends.append([(c.amin(0), c.amax(0)) for c in columns])
            targets = [pair[1] for pair in draws[0]]
    finally:
        with torch.no_grad():
            for p, value in zip(trained, values):
                p.copy_(value)
    calls = list(loss_calls)
    for i in wanted:
        calls[i] = _measured(calls[i], ends[0][i], ends[1][i], targets[i])
    return tuple(calls)


def _is_unknown(call: LossCall) -> bool:
    regression = call.op in REGRESSIONS and not call.moving
    return (call.activation or "") not in REACH and (regression or call.op == "cross_entropy")


def _outputs(
    model: nn.Module, loss_fn: LossFn, batch: object, trained: Sequence[torch.Tensor], deviation: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and target of each loss call with other weights."""
    with torch.no_grad():
        for p in trained:
            p.normal_(0, deviation)
    calls = calls_for(model, batch)
    record(calls, loss_fn, batch)
    return [(output.detach().float(), target.detach()) for _, output, target in outputs_and_targets(calls)]


def _measured(
    call: LossCall,
    small: tuple[torch.Tensor, torch.Tensor],
    large: tuple[torch.Tensor, torch.Tensor],
    target: torch.Tensor,
) -> LossCall:
    """small, large: lowest and highest value of each element, with weights of either size."""
    if not all(bool(torch.isfinite(end).all()) for end in (*small, *large)):
        return call
    top, top_before = (float(torch.stack([e.abs() for e in ends]).max()) for ends in (large, small))
    if call.op == "cross_entropy":
        return dataclasses.replace(call, bounded=0 < top < GROWS * top_before)
    width = max(float((large[1] - large[0]).max()), 1e-12)
    same = [float(((a - b).abs() < SAME * width).float().mean()) > MOST for a, b in zip(small, large)]
    low = torch.minimum(small[0], large[0]) if same[0] else torch.full_like(large[0], -math.inf)
    high = torch.maximum(small[1], large[1]) if same[1] else torch.full_like(large[1], math.inf)
    if not any(same):
        return call
    reach = float(low.min()), float(high.max())
    beyond = unreachable(target.float(), low, high, call.variance or 0.0)
    return dataclasses.replace(call, reach=reach, unreachable=beyond, bounded=True)
