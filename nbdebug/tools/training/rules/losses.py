"""Rules over the loss function: outputs and losses that do not fit, shapes that do not."""

from __future__ import annotations

import math
import re

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import figures, percent
from nbdebug.tools.training.facts import Experiment, TrainingFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    at_line,
    finding,
    shape,
    tested_fix,
    without_call,
    wrong_call,
)
from nbdebug.tools.training.rules.signs import MUCH_BETTER, frozen_head, helps
from nbdebug.tools.training.static_facts import (
    LossCall,
    StaticFacts,
)
from nbdebug.verdict import AGREES

SQUASHES = ("softmax", "softmin", "sigmoid", "hardsigmoid")
LEAST_FLOOR = 0.05
"""A lowest loss below this is in nobody's way (nats; a probability of 95%)."""
OUT_OF_REACH = 0.05
"""Share of the targets' variance that the output can never explain. A few noisy targets below zero stay under it."""
SUMS_TO_MORE = 0.1
"""Log of what the exponentials sum to. Log-probabilities give 0; rounding and smoothing stay below this."""


@rule(
    code="training/double-softmax",
    title="Softmax (or sigmoid) is applied twice: by the model and by the loss.",
    symptom="The loss falls slowly to a floor far above zero and stays there, although the predictions become right.",
    cause="`cross_entropy` and `binary_cross_entropy_with_logits` apply it themselves and expect raw scores. "
    "Probabilities lie between 0 and 1, so that the second softmax can hardly tell them apart.",
    confirm="`output.sum(1)` is 1 for each row. The lowest possible loss with K classes is ln(1 + (K - 1) / e): 1.46 "
    "for 10 classes.",
    fix="Return the raw scores from the model; apply softmax only where you want to read probabilities.",
    reference="https://github.com/pytorch/pytorch/issues/55902",
)
def double_softmax(facts: TrainingFacts) -> Finding | None:
    for call in facts.static.loss_calls:
        twice = call.op == "cross_entropy" and (call.probabilities or call.activation in ("softmax", "softmin"))
        logits = call.op == "binary_cross_entropy_with_logits" and call.activation in SQUASHES
        if (twice or logits) and call.softmax_size != 1 and (call.floor or 0.0) > LEAST_FLOOR:
            where = call.activation_where
            squash = call.activation if call.activation in SQUASHES else "softmax"
            what = f"the output of `{squash}`" if call.activation == squash else "probabilities"
            return finding(
                "double-softmax",
                f"`{call.op}` expects raw scores and gets {what}{at_line(where)}: the loss can never fall below "
                f"{figures(call.floor or 0.0)}",
                ["forward", squash, where.module or "", "loss_fn"],
                [Fix("Give the loss the raw scores.", without_call(where.text, squash) or "return scores")],
                place=where if where.line else call.where,
                evidence={
                    "lowest loss possible": call.floor,
                    "loss now": facts.static.loss,
                    "outputs": f"from {figures(call.low)} to {figures(call.high)}",
                    "classes": call.classes,
                },
            )
    return None


@rule(
    code="training/missing-log-softmax",
    title="The loss expects log-probabilities and gets something else.",
    symptom="The loss is negative, or falls without end while the predictions stay at chance.",
    cause="`nll_loss` uses its input's value at the label as it is: raw scores can grow for ever, and with "
    "probabilities its slope vanishes. Only log-probabilities, which sum to one, make it a likelihood.",
    confirm="`output.exp().sum(1)` should be 1 for each row.",
    fix="Use `F.cross_entropy` with raw scores, or put `F.log_softmax(scores, dim=1)` before `nll_loss`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html",
)
def missing_log_softmax(facts: TrainingFacts) -> Finding | None:
    for call in facts.static.loss_calls:
        if call.op not in ("nll_loss", "kl_div", "ctc_loss") or call.log_sum is None or call.softmax_size == 1:
            continue
        if call.softmax_dim is not None:
            return _wrong_dimension(call)
        above = call.log_sum > SUMS_TO_MORE or call.high > 1e-4 and abs(call.log_sum) > SUMS_TO_MORE
        if call.probabilities or above:
            what = "probabilities" if call.probabilities else "raw scores"
            sums = math.exp(min(call.log_sum, 700))
            fix = (
                Fix("Use the loss that expects raw scores.", "F.cross_entropy(scores, target)")
                if call.op == "nll_loss" and not call.probabilities
                else Fix("Give it log-probabilities.", "F.log_softmax(scores, dim=-1)  # in place of softmax, if any")
            )
            return finding(
                "missing-log-softmax",
                f"`{call.op}` expects log-probabilities and gets {what}{at_line(call.where)}, from {figures(call.low)} "
                f"to {figures(call.high)}: their exponentials sum to {figures(sums)} instead of 1",
                ["loss_fn", call.op, "forward"],
                [fix],
                place=call.where,
                evidence={"lowest": call.low, "highest": call.high, "sum of exponentials": sums},
            )
    title = "`{op}` with log_target=True expects log-probabilities as targets, and gets probabilities{line}"
    fix = Fix("Leave log_target out, or give it logarithms.", "F.kl_div(log_probabilities, target)")
    return wrong_call(facts.static, "log_target", "missing-log-softmax", title, ["loss_fn", "log_target"], fix)


def _wrong_dimension(call: LossCall) -> Finding:
    """Normalized along another dimension than that of the classes."""
    where = call.activation_where
    title = (
        f"`{call.activation}` runs over dimension {call.softmax_dim}{at_line(where)}, which has size "
        f"{call.softmax_size}, and not over the {call.classes} classes: `{call.op}` gets no log-probabilities"
    )
    return finding(
        "missing-log-softmax",
        title,
        ["forward", call.activation or "", "loss_fn", call.op],
        [Fix("Normalize over the classes.", "F.log_softmax(scores, dim=1)")],
        place=where if where.line else call.where,
        evidence={"dimension": call.softmax_dim, "shape": list(call.shape)},
    )


@rule(
    code="training/wrong-loss-shape",
    title="Outputs and targets are broadcast against each other.",
    symptom="The loss stays near the variance of the targets, and every prediction drifts to their mean. Torch warns "
    "once that the sizes differ.",
    cause="(N, 1) against (N,) gives (N, N): each prediction is compared with all targets, and then the best "
    "prediction is their mean.",
    confirm="Print `output.shape` and `target.shape` where the loss is computed.",
    fix="Make the shapes the same: `target.squeeze(-1)` or `output.squeeze(-1)`.",
    reference="https://github.com/pytorch/pytorch/issues/16045",
)
def wrong_loss_shape(facts: TrainingFacts) -> Finding | None:
    if not facts.static.broadcasts:
        return _wrong_weights(facts.static)
    broadcast = facts.static.broadcasts[0]
    return finding(
        "wrong-loss-shape",
        f"The loss compares each output with all targets: the output has shape {shape(broadcast.output)}, the target "
        f"{shape(broadcast.target)}{at_line(broadcast.where)}. The best it can reach is the targets' variance, "
        f"{figures(broadcast.variance)}",
        ["loss_fn", broadcast.op],
        [Fix("Give both the same shape.", "target = target.view_as(output)")],
        place=broadcast.where,
        evidence={
            "output shape": list(broadcast.output),
            "target shape": list(broadcast.target),
            "shape when compared": list(broadcast.result),
            "variance of the targets": broadcast.variance,
            "loss of a perfect model": 2 * broadcast.variance,
        },
    )


@rule(
    code="training/wrong-output-activation",
    title="The last activation keeps the targets out of reach.",
    symptom="The loss stops half-way. Some targets are reached, those beyond an edge never are.",
    cause="A ReLU gives nothing below zero, a sigmoid nothing outside 0 to 1, a tanh nothing outside -1 to 1. Where "
    "the targets lie beyond, no weights can reach them; where the loss expects scores, they cannot become certain. A "
    "loss of overlaps (Dice, IoU) needs a sigmoid: of raw scores it has no lowest value.",
    confirm="Compare `output.min(), output.max()` with `target.min(), target.max()`.",
    fix="Leave the last activation out, or scale the targets into its range.",
    reference="https://github.com/tsinghua-rll/VoxelNet-tensorflow/issues/10",
)
def wrong_output_activation(facts: TrainingFacts) -> Finding | None:
    raw = facts.static.scores_for_shares
    if raw is not None and not raw.reversed:
        right, wrong, beyond = map(figures, raw.losses)
        return finding(
            "wrong-output-activation",
            f"The loss compares shares of 0 to 1 and gets raw scores, from {figures(raw.low)} to {figures(raw.high)}"
            f"{at_line(raw.where)}: outputs that equal the targets give {right}, their opposite {wrong}, and ten times "
            f"the targets {beyond}, so that there is no end to how large scores pay",
            ["loss_fn", "forward"],
            [Fix("Give it probabilities.", "output = torch.sigmoid(output)  # one of several classes: softmax(1)")],
            place=raw.where,
            evidence={"lowest output": raw.low, "highest output": raw.high},
        )
    for call in facts.static.loss_calls:
        tries = [e for n, e in (facts.run.experiments.items() if facts.run else ()) if n.startswith("scores*")]
        scaled = min(tries, key=lambda e: e.end_changed, default=None)
        where, name = call.activation_where, call.activation or ""
        if call.target_sum is not None and (call.floor is None or call.floor > LEAST_FLOOR):
            title = (
                f"The outputs of a sample sum to 1{at_line(where)}, and its targets to {figures(call.target_sum, 2)} "
                "on average: each target is there or not by itself, and they can't all be reached"
            )
        elif call.unreachable > OUT_OF_REACH and call.reach is not None and call.bounded:
            title = (
                f"Whatever the weights, the output gives {_interval(call.reach)} (measured with random weights), and "
                f"the targets range from {figures(call.target_low or 0.0)} to {figures(call.target_high or 0.0)}: "
                f"{percent(call.unreachable)} of their variance is out of reach"
            )
        elif name == "cosine_similarity" and _keeps_scores_small(call) and (scaled is None or helps(scaled)):
            title = (
                f"`{call.op}` gets cosines{at_line(where)}, which lie between -1 and 1: without a scale the loss can "
                f"never fall below {figures(call.floor or 0.0)}"
            )
        elif call.bounded and call.op == "cross_entropy" and helps(scaled, MUCH_BETTER) and not frozen_head(facts):
            title = (
                f"Whatever the weights, the scores stay small (from {figures(call.low)} to {figures(call.high)} at the "
                f"start){at_line(call.where)}, so that `{call.op}` can't become certain"
            )
        elif call.unreachable > OUT_OF_REACH and call.reach is not None:
            title = (
                f"The output comes from `{name}`{at_line(where)}, which gives {_interval(call.reach)}, and the targets "
                f"range from {figures(call.target_low or 0.0)} to {figures(call.target_high or 0.0)}: "
                f"{percent(call.unreachable)} of their variance is out of reach"
            )
        elif call.softmax_size == 1 and name in ("softmax", "log_softmax"):
            title = f"`{name}` runs over a single output{at_line(where)}: it gives the same number for any input"
        elif _keeps_scores_small(call) and name != "cosine_similarity":
            title = (
                f"`{call.op}` expects raw scores and gets the output of `{name}`{at_line(where)}, which gives "
                f"{_interval(call.reach or (0, 1))}: the loss can never fall below {figures(call.floor or 0.0)}"
            )
        else:
            continue
        return finding(
            "wrong-output-activation",
            title,
            [where.module or "", name, "forward", *(["normalize"] if name == "cosine_similarity" else [])],
            [_other_output(call, scaled)],
            place=where if where.line else call.where,
            evidence={
                "output": f"from {figures(call.low)} to {figures(call.high)}",
                "share of variance out of reach": call.unreachable,
                "lowest loss possible": call.floor,
            },
        )
    return None


def _other_output(call: LossCall, scaled: Experiment | None) -> Fix:
    text, name = call.activation_where.text or "", call.activation or ""
    if call.target_sum is not None:
        code = re.sub(r"\bsoftmax\((.*?)(, *(dim=)?-?\d+)?\)", r"sigmoid(\1)", text) if "softmax(" in text else ""
        return Fix("Use a sigmoid: each output stands for itself.", code or "torch.sigmoid(scores)  # no softmax")
    if name == "cosine_similarity" or call.op == "cross_entropy" and call.bounded:
        scale = "10" if scaled is None else scaled.what.removeprefix("scores*")
        code = f"scores = {scale} * scores  # or divided by a temperature, or a learned scale"
        return tested_fix("Multiply the scores by a scale.", code, scaled)
    if call.bounded:
        return Fix("Let the output reach the targets.", "# no bound at the end, or targets scaled into the range")
    return Fix("Leave the last activation out.", without_call(text, name) or f"# without {name}")


def _keeps_scores_small(call: LossCall) -> bool:
    """Scores that an activation keeps from becoming certain, for a loss that expects them free."""
    return (
        call.op in ("cross_entropy", "binary_cross_entropy_with_logits")
        and not call.probabilities  # that is softmax twice
        and call.activation not in ("softmax", "softmin", "log_softmax", "logsigmoid", None)
        and (call.floor is not None and call.floor > LEAST_FLOOR)
        and not (call.op.startswith("binary") and call.activation in SQUASHES)
    )


def _interval(reach: tuple[float, float]) -> str:
    low, high = reach
    if math.isinf(high):
        return f"nothing below {figures(low)}"
    return f"nothing above {figures(high)}" if math.isinf(low) else f"only {figures(low)} to {figures(high)}"


def _wrong_weights(static: StaticFacts) -> Finding | None:
    """Of factors of the samples' losses that don't reach each its own."""
    names = ["loss_fn", "weights"]
    title = "`{op}` multiplies a loss that is a mean already by weights of shape {sizes}{line}: they have no effect"
    fix = Fix("Keep the losses of the samples apart.", 'F.cross_entropy(out, y, reduction="none") * weights')
    if found := wrong_call(static, "weighted mean", "wrong-loss-shape", title, names, fix):
        return found
    title = "`{op}` of shapes [{0}, 1] and [{0}] gives [{0}, {0}]{line}: the loss multiplies each sample's term by the "
    title += "numbers of all {0} samples, and not by its own alone"
    fix = Fix("Drop the dimension of size 1 of the operand that has it.", "operand.squeeze(-1)")
    return wrong_call(static, "all with all", "wrong-loss-shape", title, names, fix)


@rule(
    code="training/loss-sign",
    title="What ought to grow is minimized.",
    symptom="The loss falls fast and smoothly, often below zero, and predictions become the opposite of the targets.",
    cause="The optimizer makes the loss as small as it can. An overlap (Dice, IoU), a cosine similarity and a "
    "log-probability are large where output and target agree: minimized itself, it teaches to miss the target.",
    confirm="Give the loss the targets in place of the outputs, and then their opposite: the targets must give less.",
    fix="Minimize one minus the overlap or the similarity, and the negative of a log-probability.",
    reference="https://arxiv.org/abs/1606.04797",
)
def loss_sign(facts: TrainingFacts) -> Finding | None:
    turned, run = facts.static.scores_for_shares, facts.run
    if run is not None and run.agreement is not None and signs.turns_away(run) and run.agreement.turned > AGREES:
        known, call = run.agreement, next(iter(facts.static.loss_calls), None)
        start, end, cured = map(figures, (known.start, known.end, known.turned))
        return finding(
            "loss-sign",
            f"The loss falls as outputs become the opposite of the targets: their agreement goes from {start} to {end} "
            f"(1 is full agreement); from the same start, with the sign of the loss turned, it comes to {cured}",
            ["loss_fn", "" if call is None else call.op],
            [Fix("Turn the sign of the loss.", "loss = -loss  # of a similarity: 1 - similarity")],
            run=run,
            place=None if call is None else call.where,
            evidence={"agreement at the end": known.end, "with the sign turned": known.turned},
        )
    if turned is None or not turned.reversed:
        return None
    right, wrong, constant = map(figures, turned.losses)
    return finding(
        "loss-sign",
        f"The loss is lowest where the outputs miss the targets{at_line(turned.where)}: outputs that equal the targets "
        f"give {right}, their opposite {wrong}, one answer everywhere {constant}",
        ["loss_fn", "forward"],
        [Fix("Minimize one minus the overlap.", "loss = 1 - overlap")],
        run=facts.run,
        place=turned.where,
        evidence={"loss of the targets": turned.losses[0], "of their opposite": turned.losses[1]},
    )
