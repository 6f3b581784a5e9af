"""Rules over what the loss is given: outputs and losses that do not fit each other, and shapes that do not."""

from __future__ import annotations

import math

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import LossCall, Mixing, TrainingFacts
from nbdebug.tools.training.rules.wording import finding, line, shape, short, without

SQUASHES = ("softmax", "softmin", "sigmoid", "hardsigmoid")
LEAST_FLOOR = 0.05
"""A lowest loss below this stands in nobody's way (nats; a probability of 95%)."""
OUT_OF_REACH = 0.05
"""Share of the targets' variance that the output can never explain. A few noisy targets below zero stay under it."""
SUMS_TO_MORE = 0.1
"""Log of what the exponentials sum to. Log-probabilities give 0; rounding and smoothing stay below this."""


def _lines(facts: TrainingFacts) -> tuple[LossCall, ...]:
    return () if facts.before is None else facts.before.losses


@rule(
    code="training/double-softmax",
    title="Softmax (or sigmoid) is applied twice: by the model and by the loss.",
    symptom="The loss falls slowly to a floor far above zero and stays there, although the predictions become right.",
    cause="`cross_entropy` and `binary_cross_entropy_with_logits` apply it themselves and want raw scores. "
    "Probabilities lie between 0 and 1, so that the second softmax can hardly tell them apart.",
    confirm="`output.sum(1)` is 1 for each row. The lowest loss that is possible with K classes is "
    "ln(1 + (K - 1) / e): 1.46 for 10 classes.",
    fix="Return the raw scores from the model; apply softmax only where you want to read probabilities.",
    reference="https://github.com/pytorch/pytorch/issues/55902",
)
def double_softmax(facts: TrainingFacts) -> Finding | None:
    for call in _lines(facts):
        twice = call.op == "cross_entropy" and (call.probabilities or call.activation in ("softmax", "softmin"))
        logits = call.op == "binary_cross_entropy_with_logits" and call.activation in SQUASHES
        if (twice or logits) and call.over != 1 and (call.floor or 0.0) > LEAST_FLOOR:
            made = call.activation if call.activation in SQUASHES else "softmax"
            title = (
                f"`{call.op}` is given what `{made}` has made already{line(call.activation_where)}: the loss can "
                f"never go below {short(call.floor or 0.0)}"
            )
            remedy = Fix("Give the loss the raw scores.", without(call.activation_where.text, made) or "return scores")
            return finding(
                "double-softmax",
                title,
                ["forward", made, call.activation_where.module or "", "loss_fn"],
                [remedy],
                place=call.activation_where if call.activation_where.line else call.where,
                lowest_loss_possible=call.floor,
                loss_now=facts.before.loss if facts.before else None,
                outputs=f"from {short(call.low)} to {short(call.high)}",
                classes=call.classes,
            )
    return None


@rule(
    code="training/missing-log-softmax",
    title="The loss wants log-probabilities and is given something else.",
    symptom="The loss is negative, or falls without end while the predictions stay at chance.",
    cause="`nll_loss` takes its input's value at the label as it is: raw scores can grow for ever, and probabilities "
    "make it a loss with a vanishing slope. Only log-probabilities, which sum to one, make it a likelihood.",
    confirm="`output.exp().sum(1)` should be 1 for each row.",
    fix="Use `F.cross_entropy(scores, target)` with raw scores, or put `F.log_softmax(scores, dim=1)` before "
    "`nll_loss`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html",
)
def missing_log_softmax(facts: TrainingFacts) -> Finding | None:
    for call in _lines(facts):
        if call.op not in ("nll_loss", "kl_div", "ctc_loss") or call.above is None or call.over == 1:
            continue
        if call.across is not None:
            return _across(call)
        if call.probabilities or (call.high > 1e-4 and abs(call.above) > SUMS_TO_MORE) or call.above > SUMS_TO_MORE:
            what = "probabilities" if call.probabilities else "raw scores"
            title = (
                f"`{call.op}` is given {what}{line(call.where)}, from {short(call.low)} to {short(call.high)}: "
                f"their exponentials sum to {short(math.exp(min(call.above, 700)))} instead of 1"
            )
            fix = (
                Fix("Use the loss that takes raw scores.", "F.cross_entropy(scores, target)")
                if call.op == "nll_loss" and not call.probabilities
                else Fix(
                    "Give it log-probabilities.", "F.log_softmax(scores, dim=-1)  # in place of softmax, or of nothing"
                )
            )
            return finding(
                "missing-log-softmax",
                title,
                ["loss_fn", call.op, "forward"],
                [fix],
                place=call.where,
                lowest=call.low,
                highest=call.high,
                sum_of_exponentials=math.exp(min(call.above, 700)),
            )
    return None


def _across(call: LossCall) -> Finding:
    """Normalised along another dimension than that of the classes."""
    at = call.activation_where
    title = (
        f"`{call.activation}` runs over dimension {call.across}{line(at)}, which has {call.over}, and not over "
        "the "
        f"{call.classes} classes: what `{call.op}` is given are no log-probabilities"
    )
    fix = Fix("Normalise over the classes.", "F.log_softmax(scores, dim=1)")
    return finding(
        "missing-log-softmax",
        title,
        ["forward", call.activation or "", "loss_fn", call.op],
        [fix],
        place=at if at.line else call.where,
        dimension=call.across,
        shape=list(call.shape),
    )


@rule(
    code="training/wrong-loss-shape",
    title="Outputs and targets are broadcast against each other.",
    symptom="The loss stays near the variance of the targets, and every prediction drifts to their mean. Torch warns "
    "of a size that differs, once.",
    cause="(N, 1) against (N,) gives (N, N): each prediction is compared with all targets, and the best answer to "
    "that is their mean.",
    confirm="Print `output.shape` and `target.shape` where the loss is computed.",
    fix="Make the shapes the same: `target.squeeze(-1)` or `output.squeeze(-1)`.",
    reference="https://github.com/pytorch/pytorch/issues/16045",
)
def wrong_loss_shape(facts: TrainingFacts) -> Finding | None:
    if facts.before is None or not facts.before.broadcasts:
        return None
    met = facts.before.broadcasts[0]
    title = (
        f"The loss compares each of {shape(met.output)} outputs with all of {shape(met.target)} targets"
        f"{line(met.where)}: the best it can reach is the targets' variance, {short(met.variance)}"
    )
    fix = Fix("Give both the same shape.", "target = target.view_as(output)")
    return finding(
        "wrong-loss-shape",
        title,
        ["loss_fn", met.op],
        [fix],
        place=met.where,
        output_shape=list(met.output),
        target_shape=list(met.target),
        compared_as=list(met.result),
        variance_of_the_targets=met.variance,
        a_perfect_model_would_score=2 * met.variance,
    )


@rule(
    code="training/wrong-output-activation",
    title="The last activation keeps the targets out of reach.",
    symptom="The loss stops half-way. Some targets are met, those beyond an edge never are.",
    cause="A ReLU gives nothing below zero, a sigmoid nothing outside 0 to 1, a tanh nothing outside -1 to 1. Where "
    "the targets lie beyond, no weights can reach them; where the loss expects scores, they cannot become sure.",
    confirm="Compare `output.min(), output.max()` with `target.min(), target.max()`.",
    fix="Leave the last activation out, or scale the targets into its range.",
    reference="https://github.com/tsinghua-rll/VoxelNet-tensorflow/issues/10",
)
def wrong_output_activation(facts: TrainingFacts) -> Finding | None:
    for call in _lines(facts):
        at, span = call.activation_where, call.reach
        if call.unreachable > OUT_OF_REACH and span is not None:
            title = (
                f"The output comes from `{call.activation}`{line(at)}, which gives {_between(span)}, and the "
                f"targets go from {short(call.target_low or 0.0)} to {short(call.target_high or 0.0)}: "
                f"{call.unreachable:.0%} of "
                "their variance is out of reach"
            )
        elif call.over == 1 and call.activation in ("softmax", "log_softmax"):
            title = (
                f"`{call.activation}` runs over a single output{line(at)}: it gives the same number whatever comes in"
            )
        elif _unsure(call):
            title = (
                f"`{call.op}` wants raw scores and is given what `{call.activation}` leaves{line(at)}, which "
                f"gives {_between(span or (0, 1))}: the loss can never go below {short(call.floor or 0.0)}"
            )
        else:
            continue
        fix = Fix(
            "Leave the last activation out.", without(at.text, call.activation or "") or f"# without {call.activation}"
        )
        return finding(
            "wrong-output-activation",
            title,
            [at.module or "", call.activation or "", "forward"],
            [fix],
            place=at if at.line else call.where,
            output=f"from {short(call.low)} to {short(call.high)}",
            out_of_reach=call.unreachable,
            lowest_loss_possible=call.floor,
        )
    return None


def _unsure(call: LossCall) -> bool:
    """Scores that are kept from becoming sure, for a loss that wants them free."""
    takes = call.op == "cross_entropy" or call.op == "binary_cross_entropy_with_logits"
    return (
        takes
        and call.activation not in ("softmax", "softmin", "log_softmax", "logsigmoid", None)
        and (call.floor is not None and call.floor > LEAST_FLOOR)
        and not (call.op.startswith("binary") and call.activation in SQUASHES)
    )


def _between(span: tuple[float, float]) -> str:
    low, high = span
    if math.isinf(high):
        return f"nothing below {short(low)}"
    return f"nothing above {short(high)}" if math.isinf(low) else f"only {short(low)} to {short(high)}"


@rule(
    code="training/batch-mixing",
    title="One sample's output hangs on other samples of the batch.",
    symptom="With a batch size of one it learns; with larger batches it hardly does, and a sample's score changes with "
    "its neighbours.",
    cause="A `view` or `reshape` where a `transpose` was needed (both give the same shape), a recurrent layer without "
    "`batch_first`, a softmax or a mean over dimension 0.",
    confirm="Change one row of the input in eval mode: only its own row of the output may change.",
    fix="Use `transpose` or `permute` to exchange dimensions, `reshape` only to join neighbours; look at "
    "`batch_first` and "
    "`dim`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html",
)
def batch_mixing(facts: TrainingFacts) -> Finding | None:
    met = None if facts.before is None else facts.before.mixing
    if met is None:
        return None
    if met.rows is not None:
        return _crossed(met)
    by = f"`{met.op}`{line(met.where)} mixes the samples" if met.op else "The model mixes the samples"
    title = (
        f"{by}: replacing sample {met.sample} of the batch changes the outputs of {met.others} of the "
        f"{met.batch - 1} others"
    )
    fix = Fix(
        "Bring the batch to the front before you join dimensions.",
        "x = x.transpose(0, 1)  # then: x.reshape(len(x), -1)",
    )
    return finding(
        "batch-mixing",
        title,
        [met.module, "forward", met.op],
        [fix],
        place=met.where,
        sample_replaced=met.sample,
        other_samples_changed=met.others,
        batch_size=met.batch,
    )


def _crossed(met: Mixing) -> Finding:
    """Outputs beside the targets of other samples."""
    outputs, targets = (", ".join(map(str, rows)) for rows in met.rows or ((), ()))
    title = (
        f"`{met.op}` compares outputs with targets of other samples{line(met.where)}: sample {met.sample} has its "
        f"outputs in rows {outputs} …, and its targets in rows {targets} …"
    )
    fix = Fix(
        "Bring both into the same order before they are flattened.",
        "output = output.transpose(0, 1)  # batch first, as the targets; then: output.flatten(0, 1)",
    )
    return finding(
        "batch-mixing",
        title,
        ["loss_fn", "forward", met.op],
        [fix],
        place=met.where,
        rows_of_the_outputs=outputs,
        rows_of_the_targets=targets,
        batch_size=met.batch,
    )


@rule(
    code="training/label-out-of-range",
    title="A target is beyond the classes that the output has.",
    symptom="`IndexError: Target … is out of bounds` on the CPU, a device-side assert on a GPU.",
    cause="Labels count from 1, a class was added, or the padding label is not the loss's ignore_index.",
    confirm="`target.min(), target.max()` must lie in 0 to `output.shape[1] - 1`.",
    fix="Make the output as wide as there are classes, or map the labels to 0 … K - 1; give padding with "
    "`ignore_index=…`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
)
def label_out_of_range(facts: TrainingFacts) -> Finding | None:
    for call in _lines(facts):
        if call.outside and call.classes:
            title = (
                f"{call.outside} of {math.prod(call.target_shape):,} targets lie outside 0 to "
                f"{call.classes - 1}, the "
                f"classes of the output{line(call.where)}: they go from {short(call.target_low or 0.0)} to "
                f"{short(call.target_high or 0.0)}"
            )
            from_one = (call.target_low or 0.0) >= 1 and call.target_high == call.classes
            fix = (
                Fix("Count the labels from 0.", "target = target - 1")
                if from_one
                else Fix("Make room for all labels, or map them.", f"nn.Linear(…, {int(call.target_high or 0) + 1})")
            )
            return finding(
                "label-out-of-range",
                title,
                ["train_loader", "loss_fn", call.op],
                [fix],
                place=call.where,
                targets_outside=call.outside,
                classes=call.classes,
            )
    return None
