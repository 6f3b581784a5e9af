"""The calls of loss functions: the values of their inputs, the activation before them, shapes, lowest loss.

Losses are judged by values wherever they tell (probabilities sum to one), by the op that made the output elsewhere;
what no known op bounds is measured, with random weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.observe.backward import graph_leaves, graph_nodes
from nbdebug.observe.tensors import output_tensors
from nbdebug.report import Where
from nbdebug.text import percent
from nbdebug.tools.training.evaluate import LossFn, OtherCalls, deterministic, loss_value, preserve_rng, targets_of
from nbdebug.tools.training.one_step import Calls, OpCall, calls_for, record
from nbdebug.tools.training.signals import tensors_at
from nbdebug.tools.training.static_facts import Broadcast, DetachedAt, LossCall, ScoresForShares, WrongCall

INF, MASKED = math.inf, -1e4
"""Scores from the second down stand for none."""
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
    "cosine_similarity": (-1.0, 1.0),
}
"""The closed range of each activation, with the settings that torch gives it."""
CLASSES = frozenset({"cross_entropy", "nll_loss"})
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
REGRESSION = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
LOGS = frozenset({"kl_div", "ctc_loss"})
LOSSES = CLASSES | BINARY | REGRESSION | LOGS
SIGNED = {"soft_margin_loss": 1, "hinge_embedding_loss": 1, "cosine_embedding_loss": 2, "margin_ranking_loss": 2}
"""Losses of targets 1 and -1, and the place of the target among their arguments."""
DIFFERENCES = frozenset({"sub", "__sub__", "rsub", "__rsub__"})
REGRESSIONS = REGRESSION | {"difference"}
MEASURES, LEAST_ROWS = REGRESSION | DIFFERENCES, 32
PRODUCTS = frozenset("matmul __matmul__ mm bmm linear einsum inner".split())
NORMS = frozenset("norm linalg_vector_norm linalg_norm vector_norm".split())
DRAWN = re.compile("rand|normal|bernoulli|uniform|poisson|multinomial")
INSERTS = frozenset({"unsqueeze", "__getitem__"})
"""Ops by which a user inserts a dimension."""
UNLIKE = 0.2
"""Mean distance of the targets' sum from 1; smoothed and mixed labels sum to 1."""
ALIKE = 0.05
"""Relative difference of the entropies of smoothed labels, by rounding."""
SAME_NUMBERS = 0.999
"""Cosine of two rows: of a thousandth of the variance, little is told."""
CERTAIN = 80.0
"""A score that is as good as infinite: beyond it the logistic loss is zero in single precision."""


def loss_calls(calls: Calls) -> tuple[LossCall, ...]:
    """The loss functions whose input depends on a parameter, in order; differences of output and target where there
    are none."""
    return tuple(_loss_call(calls, *known) for known in outputs_and_targets(calls))


def outputs_and_targets(calls: Calls, moving: bool = False) -> list[tuple[OpCall, torch.Tensor, torch.Tensor]]:
    """The same with output and target, as tensors. moving: also differences to targets that a model gives."""
    result = []
    for call in calls.calls:
        if call.op in LOSSES:
            output, target = call.argument(0, "input"), call.argument(1, "target")
            if call.op in REGRESSION and not calls.dependence(output).params:
                output, target = target, output  # as good
            if calls.dependence(output).params and isinstance(target, torch.Tensor):
                result.append((call, output, target))
        elif (place := SIGNED.get(call.op)) is not None:
            pair = call.argument(0, "input" if place == 1 else "input1"), call.argument(place, "target")
            if all(isinstance(t, torch.Tensor) for t in pair) and calls.dependence(pair[0]).params:
                result.append((call, *pair))
    if result:
        return result
    pairs = ((call, _output_and_target(calls, call, moving)) for call in calls.calls)
    return [(call, *pair) for call, pair in pairs if pair is not None and pair[0].shape == pair[1].shape]


def _loss_call(calls: Calls, call: OpCall, output: torch.Tensor, target: torch.Tensor) -> LossCall:
    """A difference of output and target outside of the model is a regression written by hand."""
    o, t = output.detach().float(), target.detach()
    if call.op in DIFFERENCES:
        return _regression_loss(calls, _describe(calls, "difference", call, output, target), output, target)
    loss = _describe(calls, call.op, call, output, target)
    if call.op in REGRESSION:
        loss = dataclasses.replace(loss, noise=_is_noise(calls, output, target), given=_given(calls, target))
    if call.op in CLASSES:
        further: dict[str, Any] = {"across": _across(calls, output, target)}
        return dataclasses.replace(
            _class_loss(loss, call, o, t), softmax_dim=_wrong_softmax_dim(calls, output), **further
        )
    if call.op in BINARY:
        return _binary_loss(loss, o, t.float())
    if call.op in SIGNED:
        low, high = (float(v) for v in torch.aminmax(t)) if t.numel() else (math.nan, math.nan)
        return dataclasses.replace(loss, target_low=low, target_high=high, outside=int((t == 0).sum()))
    if call.op in LOGS:
        dim = o.dim() - 1
        total = float(o.exp().sum(dim).mean()) if o.dim() else 0.0
        return dataclasses.replace(loss, probabilities=_are_probabilities(o, dim), log_sum=_log(total))
    return _regression_loss(calls, loss, output, target)


JOINS = ("view", "reshape", "flatten")


def _across(calls: Calls, output: torch.Tensor, target: torch.Tensor) -> tuple[tuple[int, ...], Where] | None:
    """Scores of (N, classes, …) that a view makes rows of: each row has neighbours of one class then, and not the
    classes of one place. The targets of (N, …) are joined in their own order."""
    made, joined = (calls.dependence(t).maker for t in (output, target))
    if made is None or joined is None or made.op not in JOINS or joined.op not in JOINS or output.dim() != 2:
        return None
    shape, places = (tuple(call.inputs[0].shape) for call in (made, joined))
    ends = {math.prod(shape[k:]) for k in range(2, len(shape))}
    across = len(shape) > 2 and shape[1] == output.shape[1] and places == (shape[0], *shape[2:])
    return (shape, made.where) if across and output.shape[1] not in ends else None


def _given(calls: Calls, target: torch.Tensor) -> float:
    """Of a target that is drawn at random, the share of the samples whose numbers are an input of the model's, up to a
    factor."""
    drawn, t = _draws(calls).get(id(target), frozenset()), target.detach().float()
    if not drawn or -1 in drawn or t.dim() < 2:
        return 0.0
    inputs = (x.detach().float().flatten(1) for x in calls.entered if x.shape == t.shape)
    return max(
        (float((nn.functional.cosine_similarity(x, t.flatten(1)) > SAME_NUMBERS).float().mean()) for x in inputs),
        default=0.0,
    )


def _draws(calls: Calls) -> dict[int, frozenset[int]]:
    """By tensor, the calls that drew the random numbers in it; -1: something else is in it."""
    made = {i: frozenset({-1}) for i, known in calls.dependences.items() if known.maker is None}
    for call in calls.calls:
        own = (
            frozenset({call.index})
            if DRAWN.match(call.op)
            else frozenset().union(*(made.get(id(t), ()) for t in call.inputs))
        )
        made |= {id(t): own for t in call.outputs}
    return made


def _is_noise(calls: Calls, output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the target is nothing but numbers drawn at random, around zero, which the output has nothing of."""
    made = _draws(calls)
    drawn, values = made.get(id(target), frozenset()), target.detach().float()
    unknown = drawn and -1 not in drawn and drawn.isdisjoint(made.get(id(output), ()))
    return bool(unknown) and float(values.mean().abs()) < float(values.std())


def hiding_masks(calls: Calls, batch: Any) -> Iterator[DetachedAt]:
    """Attention whose padding mask leaves one and the same value of the batch visible, and hides the others."""
    for call in calls.calls:
        name, mask = _padding_mask(call)
        for x in output_tensors(batch) if mask is not None else ():
            hidden = mask[:, -x.shape[1] if x.dim() > 1 else 0 :]
            if x.shape[:2] != hidden.shape or not 0 < int(hidden.sum()) < hidden.numel() - 1:
                continue
            seen, unseen = x[~hidden], x[hidden]
            if bool((seen == seen[0]).all()) and not bool((unseen == unseen[0]).all()):
                yield DetachedAt(name, "mask", (call.module or call.op,), call.where)
                return


def _padding_mask(call: OpCall) -> tuple[str, Any]:
    """(name, which places are hidden, by sample), of torch's attention and of a softmax over masked scores; None where
    no place is hidden from all others."""
    mask: Any = call.kwargs.get("key_padding_mask") if call.op == "multi_head_attention_forward" else None
    if mask is not None:
        return "key_padding_mask", mask != 0 if mask.dim() == 2 else None
    if call.op == "scaled_dot_product_attention":
        mask = call.argument(3, "attn_mask")
        hidden = None if mask is None else ~mask if mask.dtype == torch.bool else mask <= MASKED
    elif call.op == "softmax" and call.inputs and _softmax_dim(call, call.inputs[0].dim()) == call.inputs[0].dim() - 1:
        hidden = call.inputs[0].detach() <= MASKED
    else:
        return "", None
    if hidden is None or hidden.dim() < 3:
        return "", None
    return "mask", hidden.flatten(1, -2).all(1)


DROPOUTS = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split())
TIMES, MATRIX_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__"}), frozenset({"matmul", "__matmul__", "bmm"})
SCALES = TIMES | frozenset("div __truediv__ add __add__ masked_fill where".split())
LINEAR = TIMES | DIFFERENCES | frozenset("div __truediv__ add __add__ neg __neg__ detach clamp".split())

SILENT = 4
"""Samples of a batch that must all be without a say."""


def wrong_calls(calls: Calls) -> Iterator[WrongCall]:
    """Calls that can't be meant: weights of samples times a loss that is a mean already, or all with all; log_target
    with probabilities; dropout of the outputs; attention whose weights sum to 1 along another dimension than it adds;
    an input whose dimensions a view exchanges; padding_idx on a number that real samples have."""
    pairs = [(call, output) for call, output, _ in outputs_and_targets(calls)]
    for call, output in pairs:
        made = calls.maker(output)
        if made is not None and call.op != "kl_div" and (rate := _drops(made)):
            yield WrongCall("dropped outputs", made.op, made.where, (rate,))
        target = call.argument(1, "target")
        if call.op == "kl_div" and call.argument(5, "log_target") and _are_probabilities(target, target.dim() - 1):
            yield WrongCall("log_target", call.op, call.where, tuple(float(v) for v in torch.aminmax(target.detach())))
    losses = {id(t) for call, _ in pairs for t in call.outputs if t.numel() == 1}
    for call in calls.calls:
        operands = [t for t in call.args[:2] if isinstance(t, torch.Tensor)]
        if call.op in TIMES and len(operands) == 2 and not call.inside:
            yield from _weighted_mean(calls, call, operands, losses)
            yield from _all_with_all(calls, call, operands)
        elif call.op in MATRIX_PRODUCTS and operands:
            yield from _other_axis(calls, call, operands[0])
        elif call.op == "embedding":
            yield from _silent_row(call, [output for _, output in pairs])
        elif call.op in ("view", "reshape") and call.leaves and not call.params and call.inputs:
            yield from _exchanged(call, tuple(call.inputs[0].shape), tuple(call.outputs[0].shape))


def always_dropping(calls: Calls, model: nn.Module) -> Iterator[WrongCall]:
    """Of a forward in eval mode: dropout by a function that is not told of the mode."""
    for call in calls.calls:
        rate = call.kwargs.get("dropout_p") if call.op == "scaled_dot_product_attention" else _drops(call)
        own = call.inside and not model.get_submodule(call.module).training
        if own and rate and not re.search(r"training\s*=\s*True", call.where.text or ""):  # it is wanted there
            yield WrongCall("drops in eval mode", call.op, call.where, (rate,))


def _drops(call: OpCall) -> float:
    """The rate of a dropout that is on; 0 of another call."""
    on = call.op in DROPOUTS and call.argument(2, "training", True)
    return float(call.argument(1, "p", 0.5)) if on else 0.0


def _weighted_mean(calls: Calls, call: OpCall, operands: list[torch.Tensor], losses: set[int]) -> Iterator[WrongCall]:
    for loss, weights in (operands, operands[::-1]):
        known = calls.dependence(weights)
        of_batch = id(loss) in losses and weights.numel() > 1 and known.leaves and not known.params
        if of_batch and bool((weights != weights.flatten()[0]).any()):
            yield WrongCall("weighted mean", call.op, call.where, tuple(weights.shape))


def _all_with_all(calls: Calls, call: OpCall, operands: list[torch.Tensor]) -> Iterator[WrongCall]:
    """A term of each of N samples times what (N, 1) and (N,) of unlike origin have made (N, N), all of it added up."""
    term, factor = operands if operands[0].requires_grad else operands[::-1]
    made, n, wide = call, term.numel(), {id(call.outputs[0])}
    if not term.requires_grad or factor.requires_grad or n < 2 or call.outputs[0].numel() != n * n:
        return
    while before := [calls.dependence(t).maker for t in made.inputs if t.numel() == n * n]:
        if len(before) > 1 or before[0] is None or before[0].op not in LINEAR:
            return
        made = before[0]
    pair = {t.dim(): t.data_ptr() for t in made.inputs if t.numel() == n}
    for later in calls.calls[:0] if len(set(pair.values())) < 2 else calls.calls:
        if later.index > call.index and not wide.isdisjoint(map(id, later.inputs)):
            wide |= {id(t) for t in later.outputs if t.numel() == n * n}
            if all(t.numel() == 1 for t in later.outputs):
                return (yield WrongCall("all with all", made.op, made.where, (n,)))


def _other_axis(calls: Calls, call: OpCall, weights: torch.Tensor) -> Iterator[WrongCall]:
    """Products of queries and keys, normalized along one dimension and added up along another, with nothing between
    that would normalize them again."""
    made = calls.dependence(weights).maker
    while made is not None and made.op in DROPOUTS and made.inputs:
        made = calls.dependence(made.inputs[0]).maker
    if made is None or made.op != "softmax" or not made.inputs:
        return
    scores, dim = made.inputs[0], _softmax_dim(made, made.inputs[0].dim())
    product = calls.dependence(scores).maker
    while product is not None and product.op in SCALES and product.inputs:
        product = next((c for t in product.inputs if (c := calls.dependence(t).maker) is not None), None)
    of_both = product is not None and product.op in MATRIX_PRODUCTS | {"einsum"} and len(product.inputs) == 2
    if not of_both or product is None or dim == scores.dim() - 1 or scores.shape[dim] < 2:
        return
    if all(known.params and known.leaves for known in map(calls.dependence, product.inputs)):
        yield WrongCall("other axis", made.op, made.where, (dim, scores.dim() - 1, *scores.shape))


def _silent_row(call: OpCall, outputs: list[torch.Tensor]) -> Iterator[WrongCall]:
    """One number for each sample, where those with padding_idx all get the same output, whatever else they hold: the
    row that never learns multiplies the rest away. A number that stands for "none" leaves the rest its say."""
    numbers, padding = call.argument(0, "input"), call.argument(2, "padding_idx")
    if not isinstance(numbers, torch.Tensor) or numbers.numel() != len(numbers) or padding is None or padding < 0:
        return
    silent = numbers.flatten() == padding
    share = float(silent.float().mean())
    for output in outputs:
        if output.dim() and len(output) == len(silent) and int(silent.sum()) >= SILENT and share < 1:
            rows, others = (output.detach().flatten(1)[mask] for mask in (silent, ~silent))
            if bool((rows == rows[:1]).all()) and not bool((others == others[:1]).all()):
                yield WrongCall("silent row", call.op, call.where, (int(padding), percent(share)))


def _exchanged(call: OpCall, before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[WrongCall]:
    """A view of (N, …, C) as (N, C, …), or back."""
    last, first = (before[0], before[-1], *before[1:-1]), (before[0], *before[2:], before[1]) if before[1:] else ()
    if len(before) > 2 and min(before[1:]) > 1 and after != before and after in (last, first):
        yield WrongCall("exchanged dimensions", call.op, call.where, (len(before), *before, *after))


def _describe(calls: Calls, op: str, call: OpCall, output: torch.Tensor, target: torch.Tensor) -> LossCall:
    """What is the same for all kinds of losses."""
    o = output.detach().float()
    shown = o[o > MASKED] if op == "cross_entropy" else o
    low, high = (float(v) for v in torch.aminmax(shown)) if shown.numel() else (math.nan, math.nan)
    name, where, size = _activation(calls, output)
    return LossCall(
        op,
        call.where,
        tuple(output.shape),
        tuple(target.shape),
        low,
        high,
        activation=name,
        activation_where=where,
        softmax_size=size,
        weighted=op != "difference" and _weighted(call),
        weights=class_weights(op, call.args, call.kwargs),
        value=float(call.outputs[0]) if len(call.outputs) == 1 == call.outputs[0].numel() else None,
        target=_batch_position(calls, target),
        computed=bool(calls.dependence(target).params),
    )


def _class_loss(loss: LossCall, call: OpCall, o: torch.Tensor, t: torch.Tensor) -> LossCall:
    dim = 1 if o.dim() > 1 else 0
    classes = o.shape[dim]
    log_sums = o.logsumexp(dim) if classes else torch.full((1,), math.nan, device="cpu")
    ignore = call.argument(4, "ignore_index", -100)
    labels: dict[str, Any] = {}
    if not t.is_floating_point():
        counted = t != ignore
        outside = int(((t < 0) | (t >= classes))[counted].sum())
        labels = {
            "ignore_index": ignore,
            "outside": outside,
            "ignored": 1 - float(counted.float().mean()) if t.numel() else 0.0,
        }
        if t[counted].numel():
            labels |= {"target_low": float(t[counted].min()), "target_high": float(t[counted].max())}
    reach = REACH.get(loss.activation or "")
    probabilities = _are_probabilities(o, dim) and classes > 1
    floor = None
    if call.op == "cross_entropy" and reach is not None and math.isfinite(reach[1] - reach[0]) and classes > 1:
        floor = math.log1p((classes - 1) * math.exp(reach[0] - reach[1]))
    elif call.op == "cross_entropy" and probabilities:
        floor = math.log1p((classes - 1) * math.exp(-1))
    return dataclasses.replace(
        loss,
        classes=classes,
        log_sum=float((log_sums if call.op == "nll_loss" else log_sums.abs()).mean()),
        probabilities=probabilities,
        floor=floor,
        guess=_log(classes),
        reach=reach,
        **labels,
        **_smoothing(loss, call, classes, t, dim),
    )


def _smoothing(loss: LossCall, call: OpCall, classes: int, t: torch.Tensor, dim: int) -> dict[str, Any]:
    """Of a cross entropy: smoothing (by the argument, or by hand: each sample's targets have the same entropy), and the
    entropy that it leaves where all classes weigh the same."""
    share = float(call.argument(7, "label_smoothing", 0.0) or 0.0)
    if call.op != "cross_entropy" or loss.weighted or classes < 2 or call.argument(6, "reduction", "mean") != "mean":
        return {}
    if not t.is_floating_point():
        targets = (torch.arange(classes, device="cpu") == 0).float()
    elif bool((t < 0).any()) or float((t.sum(dim) - 1).abs().max()) > UNLIKE / 100:
        return {}
    else:
        targets = t.float().movedim(dim, -1)
    smoothed = (1 - share) * targets + share / classes
    entropies = torch.special.entr(smoothed).sum(-1)
    entropy = float(entropies.mean())
    alike = float((entropies - entropy).abs().max()) < ALIKE * entropy  # mixed labels, or a teacher's, are not
    by_hand = 1 - float(smoothed.amax(-1).mean())
    return {"smoothing": share or by_hand * classes / (classes - 1), "entropy": entropy} if alike else {}


def _binary_loss(loss: LossCall, o: torch.Tensor, t: torch.Tensor) -> LossCall:
    low, high = (float(v) for v in torch.aminmax(t)) if t.numel() else (math.nan, math.nan)
    reach, floor = REACH.get(loss.activation or ""), None
    if loss.op.endswith("logits") and reach is not None:
        best = torch.logit(t.clamp(0, 1)).clamp(*(min(max(end, -CERTAIN), CERTAIN) for end in reach))
        floor = float((torch.nn.functional.softplus(best) - t * best).mean())
    share = float(t.mean()) if t.numel() else 0.0
    guess = math.log(2) if 0 <= share <= 1 and not loss.weighted else None
    sums = _target_sum(o, t)
    if sums is not None and loss.op == "binary_cross_entropy":
        floor = _shared_floor(t)
    return dataclasses.replace(
        loss, target_low=low, target_high=high, reach=reach, floor=floor, guess=guess, target_sum=sums
    )


def _target_sum(o: torch.Tensor, t: torch.Tensor) -> float | None:
    """The mean sum of a sample's targets, all of 0 to 1, where its outputs sum to 1 and most targets do not."""
    dim = 1 if o.dim() > 2 else o.dim() - 1
    if o.shape != t.shape or not _are_probabilities(o, dim) or bool(((t < 0) | (t > 1)).any()):
        return None
    sums = t.sum(dim)
    return float(sums.mean()) if float((sums - 1).abs().mean()) > UNLIKE else None


def _shared_floor(t: torch.Tensor) -> float:
    """The lowest binary cross entropy of outputs that sum to 1 for each sample: they share it among its targets."""
    sums = t.sum(-1, keepdim=True)
    best = torch.where(sums > 0, t / sums.clamp_min(1e-8), torch.ones_like(t) / t.shape[-1]).clamp(1e-6, 1 - 1e-6)
    return float(torch.nn.functional.binary_cross_entropy(best, t))


def _regression_loss(calls: Calls, loss: LossCall, output: torch.Tensor, target: torch.Tensor) -> LossCall:
    t = target.detach().float()
    if not t.numel():
        return loss
    low, high = (float(v) for v in torch.aminmax(t))
    variance = float(t.var(unbiased=False)) if t.numel() > 1 else 0.0
    reach = REACH.get(loss.activation or "")
    moving = calls.dependence(target).params or loss.weighted
    return dataclasses.replace(
        loss,
        target_low=low,
        target_high=high,
        variance=variance,
        reach=reach,
        unreachable=0.0 if moving or reach is None else unreachable(t, *reach, variance),
        guess=variance if loss.op == "mse_loss" else None,
        moving=bool(moving),
        target_sum=_target_sum(output.detach().float(), t),
    )


def unreachable(targets: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor, variance: float) -> float:
    """The mean squared distance of the targets from a range, over their variance: the share of it that no training can
    ever explain. A single value beyond, beside many within, counts as the mark of a missing target: 0."""
    if variance <= 0:
        return 0.0
    ends = [torch.as_tensor(end).to(targets) for end in (low, high)]
    below, above = (ends[0] - targets).clamp(min=0), (targets - ends[1]).clamp(min=0)
    outside = (below + above) > 0
    if len(targets[outside].unique()) == 1 and len(targets[~outside].unique()) > 2:
        return 0.0
    return float((below + above).square().mean()) / variance


def _output_and_target(calls: Calls, call: OpCall, computed: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of a difference outside of the model: the one depends on parameters, the other only on the batch. computed: or on
    parameters, too, without a gradient, as the targets of a Q-function do."""
    if call.inside or call.op not in DIFFERENCES or len(call.args) < 2:
        return None
    a, b = call.args[:2]
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.numel() and b.numel()):
        return None
    first, second = calls.dependence(a), calls.dependence(b)
    if computed and first.params and second.params and a.requires_grad != b.requires_grad:
        return (a, b) if a.requires_grad else (b, a)
    if first.params and not second.params and second.leaves and b.is_floating_point():
        return a, b
    return (b, a) if second.params and not first.params and first.leaves and a.is_floating_point() else None


def broadcasts(calls: Calls) -> tuple[Broadcast, ...]:
    """Outputs and targets that are both stretched to compare them: each with all of the others."""
    result = []
    for call in calls.calls:
        pair: Any = None
        if call.op in REGRESSION:
            pair = call.argument(0, "input"), call.argument(1, "target")
            if not calls.dependence(pair[0]).params or not isinstance(pair[1], torch.Tensor):
                continue
        elif (pair := _output_and_target(calls, call, True)) is None or pair[0].dim() == pair[1].dim():
            continue  # a dimension that the user has inserted (None, unsqueeze) is meant
        elif any(made is not None and made.op in INSERTS for t in pair for made in [calls.dependence(t).maker]):
            continue
        output, target = pair
        try:
            shape = torch.broadcast_shapes(output.shape, target.shape)
        except RuntimeError:
            continue
        if math.prod(shape) > max(output.numel(), target.numel()):
            variance = float(target.detach().float().var(unbiased=False))
            shapes = tuple(output.shape), tuple(target.shape), tuple(shape)
            result.append(Broadcast(call.op, call.where, *shapes, variance))
    return tuple(result)


def _activation(calls: Calls, output: Any) -> tuple[str | None, Where, int | None]:
    """(op, where, size of its dimension) of the call that made an output, past views of it."""
    call = calls.maker(output)
    if call is None:
        return None, Where(), None
    size = None
    if call.op in PRODUCTS and len(call.inputs) > 1 and all(_is_normalized(calls, t) for t in call.inputs[:2]):
        return "cosine_similarity", call.where, None
    if call.op in ("softmax", "log_softmax", "softmin") and call.inputs:
        shape = call.inputs[0].shape
        size = shape[_softmax_dim(call, len(shape))] if shape else None
    return call.op.rstrip("_") if not call.op.startswith("__") else call.op, call.where, size


def _is_normalized(calls: Calls, vectors: torch.Tensor) -> bool:
    """Vectors that were divided by their norm."""
    call = calls.maker(vectors)
    if call is None or call.op == "normalize":
        return call is not None
    divisors = [calls.dependence(t).maker for t in call.inputs[1:]] if call.op in ("div", "__truediv__") else []
    while divisors and divisors[0] is not None and divisors[0].op in ("clamp", "clamp_min", "add", "__add__"):
        divisors = [calls.dependence(t).maker for t in divisors[0].inputs[:1]]
    return bool(divisors) and divisors[0] is not None and divisors[0].op in NORMS


def _wrong_softmax_dim(calls: Calls, output: torch.Tensor) -> int | None:
    """The dimension of the softmax that made this very tensor, where it is not the one of the classes."""
    call = calls.dependence(output).maker
    if call is None or call.op not in ("softmax", "log_softmax") or output.dim() < 2:
        return None
    dim = _softmax_dim(call, output.dim())
    return None if dim == 1 else dim


def _softmax_dim(call: OpCall, dims: int) -> int:
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


def class_weights(op: str, args: Any, kwargs: Any) -> tuple[float, ...]:
    """The weights of the classes in a call of a loss of labels; () where there are none, or samples have their own."""
    if op in CLASSES:
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        shape = getattr(args[0] if args else kwargs.get("input"), "shape", ())
        known = isinstance(weight, torch.Tensor) and len(shape) > 1 and weight.shape == shape[1:2]
        return tuple(weight.detach().tolist()) if known else ()
    weight = kwargs.get("pos_weight") if op == "binary_cross_entropy_with_logits" else None
    return (1.0, float(weight)) if isinstance(weight, torch.Tensor) and weight.numel() == 1 else ()


def _batch_position(calls: Calls, target: torch.Tensor) -> int | None:
    """The one tensor of the batch that a target depends on, by position; None for several."""
    leaves = calls.positions(calls.dependence(target).leaves)
    return leaves[0] if len(leaves) == 1 else None


def _are_probabilities(o: torch.Tensor, dim: int) -> bool:
    if not o.numel() or o.dim() < 1 or o.shape[dim] < 2 or float(o.min()) < 0:
        return False
    return bool(((o.sum(dim) - 1).abs() < 1e-3).all())


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def refused_labels(calls: Calls) -> LossCall | None:
    """The loss function that raised because of targets beyond its classes; None where something else raised."""
    call = calls.failed
    if call is None or call.op not in CLASSES:
        return None
    output, target = call.argument(0, "input"), call.argument(1, "target")
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    position = _batch_position(calls, target)
    loss = LossCall(call.op, call.where, tuple(output.shape), tuple(target.shape), 0.0, 0.0, target=position)
    loss = _class_loss(loss, call, output.detach().float(), target.detach())
    return loss if loss.outside else None


def over_all_batches(call: LossCall, batches: Sequence[Any]) -> LossCall:
    """A loss that refuses its targets, with the lowest and highest target of all these batches, where its target is the
    first batch's own tensor."""
    rows = [t for batch in batches for t in tensors_at(batch, [call.target])] if call.target is not None else []
    ends = [(float(t.min()), float(t.max())) for t in rows if t.numel()]
    if not ends or ends[0] != (call.target_low, call.target_high):
        return call
    return dataclasses.replace(call, target_low=min(low for low, _ in ends), target_high=max(high for _, high in ends))


# What outputs can reach

WEIGHTS = (30.0, 1000.0)
"""Deviations of random weights. An output that nothing bounds grows with them; one that is bounded (twice a tanh, a
clamp, a cosine) stays where it was."""
DRAWS = 8
"""For each deviation: with fewer, an element of an output would miss one of its ends too often."""
GROWS = 1.5
"""Largest output with the larger deviation over that with the smaller; without a bound it is 33 for a linear layer."""
SAME_END, MOST_ELEMENTS = 0.02, 0.9
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
            for deviation in WEIGHTS:
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
    sizes = (torch.stack([e.abs() for e in ends]) for ends in (large, small))
    top, top_before = (float(size.where(size < -MASKED, 0.0).max()) for size in sizes)
    if call.op == "cross_entropy":
        return dataclasses.replace(call, bounded=0 < top < GROWS * top_before)
    width = max(float((large[1] - large[0]).max()), 1e-12)
    same = [float(((a - b).abs() < SAME_END * width).float().mean()) > MOST_ELEMENTS for a, b in zip(small, large)]
    low = torch.minimum(small[0], large[0]) if same[0] else torch.full_like(large[0], -math.inf)
    high = torch.maximum(small[1], large[1]) if same[1] else torch.full_like(large[1], math.inf)
    if not any(same):
        return call
    reach = float(low.min()), float(high.max())
    beyond = unreachable(target.float(), low, high, call.variance or 0.0)
    return dataclasses.replace(call, reach=reach, unreachable=beyond, bounded=True)


def lost_level(model: nn.Module, loss_fn: LossFn, batches: Sequence[Any]) -> float:
    """Of outputs that stay what they are when each sample's inputs are moved by a number of its own: the share of the
    squared errors that a line through the inputs' mean explains; 0 of others, and where the loss is no regression."""
    means, errors, inputs = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()

    def move(module: nn.Module, args: Any) -> Any:
        """The second time, the rows of the first input are each moved by another number."""
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
            return None
        inputs.append(x)
        by = torch.linspace(-1, 1, len(x), device=x.device) * x.std()
        return (x + by.view(-1, *[1] * (x.dim() - 1)), *args[1:]) if len(inputs) > 1 else None

    for batch in batches:
        inputs.clear()
        pairs = []
        with deterministic(model), preserve_rng(loss_fn), torch.no_grad(), model.register_forward_pre_hook(move):
            for _ in range(2):
                torch.manual_seed(0)
                record(calls := calls_for(model, batch), loss_fn, batch)
                pairs.append(outputs_and_targets(calls))
        if len(inputs) != 2 or any(len(pair) != 1 for pair in pairs) or pairs[0][0][0].op not in MEASURES:
            return 0.0
        (_, out, target), (_, other, _), x = pairs[0][0], pairs[1][0], inputs[0]
        same = out.shape == target.shape == other.shape and out.dim() and len(out) == len(x)
        if not same or float((out - other).abs().max()) > 1e-3 * float(target.float().std()):
            return 0.0
        means.append(x.detach().float().flatten(1).mean(1))
        errors.append((target - out).detach().float().reshape(len(x), -1).mean(1))
    both = torch.stack([torch.cat(means), torch.cat(errors)]) if means else torch.zeros(2, 0, device="cpu")
    known = both.shape[1] >= LEAST_ROWS and bool((both.std(1) > 0).all())
    return float(torch.corrcoef(both)[0, 1].square()) if known else 0.0


OVERLAP, BEYOND = (0.85, 1.1), 0.3
"""A loss of overlaps rises by so much from the targets to their opposite; where it takes raw scores, outputs of ten
times the targets bring it below that of the targets themselves by more than the second."""


def scores_for_shares(model: nn.Module, loss_fn: LossFn, batch: Any) -> ScoresForShares | None:
    """Where outputs beyond 0 to 1 go into a loss of overlaps with masks, which these reward the more the larger they
    are; and where it is the overlap itself that is minimized. Other terms of the loss, by functions of torch's, are
    left out."""
    target, outputs = targets_of(batch), list[torch.Tensor]()
    if target is None:
        return None
    calls = calls_for(model, batch)
    with deterministic(model), preserve_rng(loss_fn), torch.no_grad():
        with model.register_forward_hook(lambda module, args, out: outputs.append(out)):
            record(calls, loss_fn, batch)
        out = outputs[0] if len(outputs) == 1 else None
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.numel() < 2 * len(out):
            return None
        if out.dim() == target.dim() + 1 and not target.is_floating_point() and int(target.max()) < out.shape[1]:
            target = nn.functional.one_hot(target.long().clamp_min(0), out.shape[1]).movedim(-1, 1)
        low, high = float(out.min()), float(out.max())
        if target.numel() != out.numel() or not bool(((target == 0) | (target == 1)).all()) or not target.sum() > 0:
            return None
        mask = target.reshape(out.shape).to(out)
        answers = mask, 1 - mask, 10 * mask, torch.zeros_like(mask), torch.ones_like(mask)
        alone = OtherCalls(lambda name, _, args, kwargs: args[0].sum() * 0 if name in LOSSES and args else None)
        with alone:  # as shares, and as scores of which a sigmoid makes such
            shares = [_loss_of(model, loss_fn, batch, o) for o in answers]
            scores = [_loss_of(model, loss_fn, batch, 40 * o - 20) for o in answers]
    right, wrong, beyond, *_ = shares
    first = next((c for c in calls.calls if not c.inside and any(t is out for t in c.inputs)), None)
    where = Where(phase="forward") if first is None else first.where
    for right_, wrong_, _, *constant in (shares, scores):
        falls = OVERLAP[0] < right_ - wrong_ < OVERLAP[1] and float(mask.mean()) < MOST_ELEMENTS
        if falls and min(constant) < wrong_ + 0.05:  # a loss of the opposite mask is not served by a constant
            return ScoresForShares(low, high, (right_, wrong_, min(constant)), where, reversed=True)
    rise = wrong - right
    perfect = min(abs(right), abs(right + rise)) < 0.02 and (low < -SAME_END or high > 1 + SAME_END)
    if not (OVERLAP[0] < rise < OVERLAP[1] and perfect and beyond < right - BEYOND):
        return None
    return ScoresForShares(low, high, (right, wrong, beyond), where)


def _loss_of(model: nn.Module, loss_fn: LossFn, batch: Any, out: torch.Tensor) -> float:
    with model.register_forward_hook(lambda *_: out):
        return loss_value(loss_fn(model, batch))


# -- what is left out of a loss ----------------------------------------------------------------------------------------


LOOKS, MOST_VALUES = 4, 5000
EXPLAINED = 1e-3
"""Of the deviation of what a loss multiplies by: what rounding leaves of it."""


class FirstLosses:
    """What the loss of each of the first steps is made of. divisors: see `_divisors`."""

    def __init__(self) -> None:
        self.divisors = list[tuple[float, ...] | None]()
        self._looks = list[dict[str, tuple[bool, dict[int, tuple[torch.Tensor, int]], int]]]()

    def note(self, names: Mapping[str, Any], loss: torch.Tensor) -> None:
        """Before a backward. names: the variables of the functions that are running."""
        reached, found = {id(leaf) for leaf in graph_leaves(loss)}, {}
        for name, value in names.items() if len(self._looks) < LOOKS else ():
            parts = value[:MOST_VALUES] if type(value) is list else [value]
            if not parts or not all(issubclass(type(t), torch.Tensor) and t.grad_fn is not None for t in parts):
                continue
            nodes = list(graph_nodes([t.grad_fn for t in parts]))
            leaves = {id(n.variable): n.variable for n in nodes if hasattr(n, "variable")}
            own = {key: (leaf, leaf._version) for key, leaf in leaves.items() if key not in reached}
            numbers = own and _is_multiplied(parts, loss, names)
            if own and (numbers or all(t.numel() == 1 for t in parts)):
                found[name] = bool(numbers), own, len(nodes)
        self.divisors += [_divisors(loss)] * (len(self._looks) < LOOKS)
        self._looks += [found] * (len(self._looks) < LOOKS)

    def left_out(self, held: set[int], names: Mapping[int, str], where: Where) -> DetachedAt | None:
        """At the end of the run: a loss that is never added, or values that come in by their numbers alone. It is the
        variable with the largest graph, of those of each step, to parameters that the loss does not reach, and that
        have stayed as they were, though an optimizer steps that holds them (held: ids)."""
        always = (
            [n for n in self._looks[0] if all(n in look for look in self._looks)] if len(self._looks) == LOOKS else []
        )
        for name in sorted(always, key=lambda n: -self._looks[-1][n][2]):
            numbers, own, _ = self._looks[0][name]
            still = [
                names[k] for k, (leaf, version) in own.items() if k in held and k in names and leaf._version == version
            ]
            if still and len(still) == sum(key in names for key in own):
                return DetachedAt(name, "number" if numbers else "dropped", tuple(still), where)
        return None

    def accumulation(
        self, stepped: Sequence[Sequence[int]], used: Sequence[int], waiting: Sequence[int]
    ) -> tuple[int, float, int] | None:
        """(batches whose gradients one step adds up, what the mean loss of each is divided by, batches of the last step
        of a pass where these are fewer, else 0); None where each batch has its step, or the loss is no mean. stepped,
        used: see UpdateWatch; waiting: how often gradients that waited for a step were gone, and still there."""
        gaps = [b - a for a, b in itertools.pairwise([-1, *(i for i, row in enumerate(stepped) if row)])]
        every, times = Counter(gaps).most_common(1)[0] if len(gaps) >= LOOKS else (1, 0)
        kept = waiting[1] > 0 == waiting[0] and len(set(used[:every])) == every > 1
        known = self.divisors[0] if kept and len(set(self.divisors)) == 1 else None
        if known is None or times < len(gaps) / 2:
            return None
        by = float(every) if any(abs(abs(n) - every) < 1e-3 for n in known) else math.prod(n for n in known if n > 0)
        short = [gap for gap in gaps if gap < every]
        return every, by, short[0] if len(set(short)) == 1 and len(short) > 1 else 0


def _divisors(loss: torch.Tensor) -> tuple[float, ...] | None:
    """What a mean is divided by, the last first; None of another loss. A squared error may be halved. What it is
    multiplied by is -1 / n: that may be the weight of a term as well."""
    node: Any = loss.grad_fn
    divisors: list[float] = []
    while type(node).__name__ in ("DivBackward0", "MulBackward0") and len(node.next_functions) == 2:
        constant = node._saved_other
        if node.next_functions[1][0] is not None or not isinstance(constant, torch.Tensor) or constant.numel() != 1:
            return None
        factor = float(constant) or math.inf
        divisors.append(factor if type(node).__name__ == "DivBackward0" else -1 / factor)
        node = node.next_functions[0][0]
    of_squares = type(node).__name__ in ("MseLossBackward0", "MeanBackward0")
    mean = getattr(node, "_saved_reduction", None) == 1 or type(node).__name__ == "MeanBackward0"
    return tuple(divisors[: -1 if of_squares and divisors[-1:] == [2.0] else None]) if mean else None


def _is_multiplied(values: Sequence[torch.Tensor], loss: torch.Tensor, names: Mapping[str, Any]) -> bool:
    """Whether the loss multiplies by numbers that are a sum of these values, times a factor, and of a variable, as an
    advantage is of values and rewards."""
    v = torch.cat([t.detach().flatten().double().cpu() for t in values])
    saved = [
        [getattr(n, "_saved_self", None), getattr(n, "_saved_other", None)]
        for n in graph_nodes([loss.grad_fn])
        if type(n).__name__ == "MulBackward0" and None in [m for m, _ in n.next_functions]
    ]
    rows = [c.detach().flatten().double().cpu() for pair in saved for c in pair if isinstance(c, torch.Tensor)]
    rows += [torch.cat(single)] if (single := [row for row in rows if row.numel() == 1]) else []
    known = [r for value in names.values() if (r := _numbers(value)) is not None and len(r) == len(v) > 4]
    for row in (row for row in rows if len(row) == len(v) > 4 and float(row.std()) > 0):
        for other in known:
            left = [_unexplained(row, [other, *more]) for more in ([], [v])]
            if left[1] < EXPLAINED < 10 * EXPLAINED < left[0]:
                return True
    return False


def _unexplained(row: torch.Tensor, columns: Sequence[torch.Tensor]) -> float:
    """The share of a row's deviation that a linear function of these columns leaves."""
    matrix = torch.stack([torch.ones_like(row), *columns], 1)
    fit = torch.linalg.lstsq(matrix, row[:, None], driver="gelsd").solution
    return float((row - (matrix @ fit)[:, 0]).std() / row.std())


def _numbers(value: Any) -> torch.Tensor | None:
    """A tensor without a graph, or a list of numbers, as a row."""
    if issubclass(type(value), torch.Tensor) and not value.requires_grad and not value.is_complex():
        return value.detach().flatten().double().cpu() if 4 < value.numel() < MOST_VALUES else None
    known = type(value) is list and 4 < len(value) < MOST_VALUES and all(type(n) in (int, float) for n in value)
    return torch.tensor(value, dtype=torch.float64, device="cpu") if known else None
