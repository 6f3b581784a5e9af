"""What the loss functions are given: values, the activation before them, shapes, and the lowest loss that can come out.

Judged by values wherever they tell (probabilities sum to one), by the op that made the output elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from nbdebug.report import Where
from nbdebug.tools.training.facts import Broadcast, LossCall
from nbdebug.tools.training.static.one_step import Calls, OpCall
from nbdebug.tools.training.static.signals import picked

INF = math.inf
REACH = {
    "relu": (0.0, INF),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "softmin": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softplus": (0.0, INF),
    "elu": (-1.0, INF),
    "celu": (-1.0, INF),
    "selu": (-1.7581, INF),
    "silu": (-0.2785, INF),
    "gelu": (-0.17, INF),
    "mish": (-0.3088, INF),
    "exp": (0.0, INF),
    "log_softmax": (-INF, 0.0),
    "logsigmoid": (-INF, 0.0),
    "softsign": (-1.0, 1.0),
    "abs": (0.0, INF),
    "square": (0.0, INF),
}
"""The closed range of each activation, with the settings that torch gives it."""


def reach_of(activation: str | None) -> tuple[float, float] | None:
    """The range of an activation; None where it has no bounds that we know."""
    return REACH.get(activation or "")


def unreachable(targets: torch.Tensor, span: tuple[float, float] | None, variance: float) -> float:
    """The mean squared distance of the targets from a range, over their variance: the share of it that no training can
    ever explain. A single value beyond, beside many within, is taken for the mark of a missing target: 0."""
    if span is None or variance <= 0:
        return 0.0
    low, high = span
    short = (low - targets).clamp(min=0) if math.isfinite(low) else torch.zeros_like(targets)
    over = (targets - high).clamp(min=0) if math.isfinite(high) else torch.zeros_like(targets)
    beyond = (short + over) > 0
    if len(targets[beyond].unique()) == 1 and len(targets[~beyond].unique()) > 2:
        return 0.0
    return float((short + over).square().mean()) / variance


CLASSES = frozenset({"cross_entropy", "nll_loss"})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
REGRESSION = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
LOGS = frozenset({"kl_div", "ctc_loss"})
LOSSES = CLASSES | BINARY | REGRESSION | LOGS
DIFFERENCES = frozenset({"sub", "__sub__", "rsub", "__rsub__"})
SURE = 80.0
"""A score that is as good as infinite: beyond it the logistic loss is zero in single precision."""
MOST = 1 << 22
"""Numbers of one tensor that are looked at."""


def losses(calls: Calls, loss: torch.Tensor) -> tuple[LossCall, ...]:
    """The loss functions that were given something that hangs on a parameter, in order."""
    found = []
    for call in calls.calls:
        if call.op in LOSSES:
            output, target = call.argument(0, "input"), call.argument(1, "target")
            if calls.dye(output).params and isinstance(target, torch.Tensor):
                found.append(_loss(calls, call, output, target))
    if not found:
        found = [line for call in calls.calls if (line := _by_hand(calls, call)) is not None]
    return tuple(found)


def _loss(calls: Calls, call: OpCall, output: torch.Tensor, target: torch.Tensor) -> LossCall:
    o, t = output.detach().float(), target.detach()
    low, high = (float(v) for v in torch.aminmax(o)) if o.numel() else (math.nan, math.nan)
    made, where, over = activation(calls, output)
    line = LossCall(
        call.op,
        call.where,
        tuple(o.shape),
        tuple(t.shape),
        low,
        high,
        activation=made,
        activation_where=where,
        over=over,
        weighted=_weighted(call),
        target=_leaf(calls, target),
    )
    if call.op in CLASSES:
        return dataclasses.replace(_of_classes(line, call, o, t), across=_across(calls, output))
    if call.op in BINARY:
        return _of_binary(line, t.float())
    if call.op in LOGS:
        dim = o.dim() - 1
        summed = float(o.exp().sum(dim).mean()) if o.dim() else 0.0
        return dataclasses.replace(line, probabilities=_probabilities(o, dim), above=_log(summed))
    return _of_regression(calls, line, output, target)


def _of_classes(line: LossCall, call: OpCall, o: torch.Tensor, t: torch.Tensor) -> LossCall:
    dim = 1 if o.dim() > 1 else 0
    classes = o.shape[dim]
    above = float(o.logsumexp(dim).abs().mean()) if classes else math.nan
    sums = float(o.logsumexp(dim).mean()) if classes else math.nan
    ignore = call.argument(4, "ignore_index", -100)
    more: dict[str, Any] = {}
    if not t.is_floating_point():
        counted = t != ignore
        outside = int(((t < 0) | (t >= classes))[counted].sum())
        more = {"outside": outside, "ignored": 1 - float(counted.float().mean()) if t.numel() else 0.0}
        inside = t[counted]
        if inside.numel():
            more |= {"target_low": float(inside.min()), "target_high": float(inside.max())}
    span = reach_of(line.activation)
    floor = None
    if call.op == "cross_entropy" and span is not None and math.isfinite(span[1] - span[0]) and classes > 1:
        floor = math.log1p((classes - 1) * math.exp(span[0] - span[1]))
    probable = _probabilities(o, dim) and classes > 1
    if probable and floor is None and call.op == "cross_entropy":
        floor = math.log1p((classes - 1) * math.exp(-1))
    return dataclasses.replace(
        line,
        classes=classes,
        above=sums if call.op == "nll_loss" else above,
        probabilities=probable,
        floor=floor,
        guess=_log(classes),
        reach=span,
        **more,
    )


def _of_binary(line: LossCall, t: torch.Tensor) -> LossCall:
    low, high = (float(v) for v in torch.aminmax(t)) if t.numel() else (math.nan, math.nan)
    span, floor = reach_of(line.activation), None
    if line.op.endswith("logits") and span is not None:
        best = torch.logit(t.clamp(0, 1)).clamp(*(min(max(end, -SURE), SURE) for end in span))
        floor = float((torch.nn.functional.softplus(best) - t * best).mean())
    share = float(t.mean()) if t.numel() else 0.0
    guess = math.log(2) if 0 <= share <= 1 else None
    return dataclasses.replace(line, target_low=low, target_high=high, reach=span, floor=floor, guess=guess)


def _of_regression(calls: Calls, line: LossCall, output: torch.Tensor, target: torch.Tensor) -> LossCall:
    t = target.detach().float()
    if not t.numel():
        return line
    low, high = (float(v) for v in torch.aminmax(t))
    variance = float(t.var(unbiased=False)) if t.numel() > 1 else 0.0
    span = reach_of(line.activation)
    far = 0.0 if calls.dye(target).params or line.weighted else unreachable(t, span, variance)
    return dataclasses.replace(
        line,
        target_low=low,
        target_high=high,
        variance=variance,
        reach=span,
        unreachable=far,
        guess=variance if line.op == "mse_loss" else None,
    )


def _by_hand(calls: Calls, call: OpCall) -> LossCall | None:
    """A difference of output and target outside of the model: a regression written by hand."""
    pair = _pair(calls, call)
    if pair is None or pair[0].shape != pair[1].shape:
        return None
    output, target = pair
    made, where, over = activation(calls, output)
    low, high = (float(v) for v in torch.aminmax(output.detach().float()))
    line = LossCall(
        "difference",
        call.where,
        tuple(output.shape),
        tuple(target.shape),
        low,
        high,
        activation=made,
        activation_where=where,
        over=over,
        target=_leaf(calls, target),
    )
    return _of_regression(calls, line, output, target)


def _pair(calls: Calls, call: OpCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(output, target) of a difference: the one hangs on parameters, the other only on the batch."""
    if call.inside or call.op not in DIFFERENCES or len(call.args) < 2:
        return None
    a, b = call.args[:2]
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.numel() and b.numel()):
        return None
    first, second = calls.dye(a), calls.dye(b)
    if first.params and not second.params and second.leaves and b.is_floating_point():
        return a, b
    return (b, a) if second.params and not first.params and first.leaves and a.is_floating_point() else None


def broadcasts(calls: Calls) -> tuple[Broadcast, ...]:
    """Outputs and targets of which both are stretched to compare them: each with all of the others."""
    found = []
    for call in calls.calls:
        pair: Any = None
        if call.op in REGRESSION:
            pair = call.argument(0, "input"), call.argument(1, "target")
            if not calls.dye(pair[0]).params or not isinstance(pair[1], torch.Tensor):
                continue
        elif (pair := _pair(calls, call)) is None or pair[0].dim() == pair[1].dim():
            continue  # a dimension that the user has put in (None, unsqueeze) is meant
        output, target = pair
        try:
            result = torch.broadcast_shapes(output.shape, target.shape)
        except RuntimeError:
            continue
        size = math.prod(result)
        if size > output.numel() and size > target.numel():
            found.append(
                Broadcast(
                    call.op,
                    call.where,
                    tuple(output.shape),
                    tuple(target.shape),
                    tuple(result),
                    float(target.detach().float().var(unbiased=False)),
                )
            )
    return tuple(found)


def activation(calls: Calls, output: Any) -> tuple[str | None, Where, int | None]:
    """(op, where, size of its dimension) of what made an output, past views of it."""
    call = calls.maker(output)
    if call is None:
        return None, Where(), None
    over = None
    if call.op in ("softmax", "log_softmax", "softmin") and call.given:
        shape = call.given[0].shape
        over = shape[_dim(call, len(shape))] if shape else None
    return call.op.rstrip("_") if not call.op.startswith("__") else call.op, call.where, over


def _across(calls: Calls, output: torch.Tensor) -> int | None:
    """The dimension of the softmax that made this very tensor, where it is not the one of the classes."""
    call = calls.dye(output).maker
    if call is None or call.op not in ("softmax", "log_softmax") or output.dim() < 2:
        return None
    dim = _dim(call, output.dim())
    return None if dim == 1 else dim


def _dim(call: OpCall, dims: int) -> int:
    """The dimension that a softmax runs over; torch chooses one where none is given."""
    dim = call.argument(1, "dim")
    return dim % dims if isinstance(dim, int) and dims else 0 if dims in (0, 1, 3) else 1


def _weighted(call: OpCall) -> bool:
    """Whether classes or samples count differently: weights are given, or the losses are kept apart to be weighted."""
    return (
        any(isinstance(call.kwargs.get(k), torch.Tensor) for k in ("weight", "pos_weight"))
        or any(isinstance(a, torch.Tensor) for a in call.args[2:])
        or call.kwargs.get("reduction") == "none"
    )


def _leaf(calls: Calls, target: torch.Tensor) -> int | None:
    leaves = calls.has(calls.dye(target).leaves)
    return leaves[0] if len(leaves) == 1 else None


def _probabilities(o: torch.Tensor, dim: int) -> bool:
    if not o.numel() or o.dim() < 1 or o.shape[dim] < 2 or float(o.min()) < 0:
        return False
    return bool(((o.sum(dim) - 1).abs() < 1e-3).all())


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def refused(calls: Calls) -> LossCall | None:
    """The loss function that raised because of targets beyond its classes; None where something else raised."""
    call = calls.failed
    if call is None or call.op not in CLASSES:
        return None
    output, target = call.argument(0, "input"), call.argument(1, "target")
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    line = _of_classes(
        LossCall(call.op, call.where, tuple(output.shape), tuple(target.shape), 0.0, 0.0, target=_leaf(calls, target)),
        call,
        output.detach().float(),
        target.detach(),
    )
    return line if line.outside else None


def over_all(call: LossCall, batches: Sequence[Any]) -> LossCall:
    """A loss that refuses its targets, with the lowest and highest target of all these batches, where the first one's
    own tensor is what it was given."""
    rows = [t for batch in batches for t in picked(batch, [call.target])] if call.target is not None else []
    ends = [(float(t.min()), float(t.max())) for t in rows if t.numel()]
    if not ends or ends[0] != (call.target_low, call.target_high):
        return call
    return dataclasses.replace(call, target_low=min(low for low, _ in ends), target_high=max(high for _, high in ends))
