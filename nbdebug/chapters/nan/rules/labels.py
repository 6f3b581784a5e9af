"""Rules for targets: labels that a loss can't take, that are all ignored, or that do not fit into their frames."""

from typing import Any

from nbdebug.catalogue import rule
from nbdebug.chapters.nan.facts import Birth, NanFacts
from nbdebug.chapters.nan.rules.words import answer, fix, verb
from nbdebug.chapters.nan.signs import LOGS, forward_sign
from nbdebug.finding import Finding, Fix


@rule(
    code="nan/all-labels-ignored",
    title="Every label of the batch is ignored.",
    symptom="The loss is NaN in a single step. Its gradient may be zero, so that the weights live on while every "
    "average of the losses is NaN.",
    cause="With reduction='mean' `F.cross_entropy` divides by the number of labels that count. If all are "
    "`ignore_index` (-100), it is 0/0. A prompt that fills the context leaves no label; so does a class "
    "weight of 0 for all that are present.",
    confirm="`(labels != -100).sum()` is 0 for this batch.",
    fix="Divide yourself: `F.cross_entropy(logits, labels, reduction='sum') / (labels != "
    "-100).sum().clamp_min(1)`. Better, keep such samples out: truncate the prompt, not the answer, and drop "
    "samples without a label from the dataset.",
    reference="https://github.com/pytorch/pytorch/issues/70348",
)
def all_labels_ignored(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external or birth.op != "nll_loss" or birth.made != "nan" or birth.parents or birth.during == "backward":
        return None
    return answer(
        facts,
        "all-labels-ignored",
        "has no label that counts: the mean loss divides by zero",
        Fix(
            "Divide by the number of labels that count, and at least by one; better, keep such batches out.",
            "F.cross_entropy(logits, labels, reduction='sum') / (labels != -100).sum().clamp_min(1)",
        ),
        labels=birth.scalars.get("labels"),
        ignored=birth.scalars.get("ignored"),
    )


@rule(
    code="nan/ctc-infeasible",
    title="CTC was given a target that does not fit into its frames.",
    symptom="The loss is inf for some samples, and NaN gradients follow.",
    cause="CTC needs a frame for each symbol and one more between two equal ones: 'aaa' needs 5 frames. With "
    "fewer no alignment exists, the probability is 0 and the loss -log(0). Striding in the encoder "
    "shortens the frames.",
    confirm="For each sample: `input_length >= target_length + (target[1:] == target[:-1]).sum()`.",
    fix="Drop or split such samples, or use less stride. `F.ctc_loss(..., zero_infinity=True)` sets their loss "
    "and gradient to zero, which is right for a few bad samples and hides it when there are many: count "
    "them. Give input_lengths after striding.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CTCLoss.html",
)
def ctc_infeasible(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external or "ctc_loss" not in (birth.op, birth.where.op):
        return None
    return answer(
        facts,
        "ctc-infeasible",
        f"{verb(birth.where, 'has', 'have')} fewer frames than the text needs",
        Fix(
            "Drop such samples, or use less stride; zero_infinity sets their loss and gradient to zero.",
            "F.ctc_loss(log_probs, targets, input_lengths, target_lengths, zero_infinity=True)",
        ),
    )


@rule(
    code="nan/label-out-of-range",
    title="A target lies outside what the loss can take.",
    symptom="inf or NaN in the loss for some samples, while the model's output is finite. Or a loss that turns "
    "negative first.",
    cause="A mask read as 0 and 255 in place of 0 and 1; a target of exactly 0 or 1 for a log-likelihood that is "
    "infinite there (Beta, Gamma); log of a target that is 0. `F.binary_cross_entropy` and "
    "`F.cross_entropy` raise an error on such targets; `F.binary_cross_entropy_with_logits` and "
    "hand-written losses do not.",
    confirm="`target.min(), target.max()`, beside the loss's formula.",
    fix="Bring targets into range where they are read: `mask / 255`, `(mask > 0).float()`, `target.clamp(1e-4, 1 "
    "- 1e-4)` for a Beta, `torch.log1p(target)` in place of log for counts. Distributions check support for "
    "you with `validate_args=True`, except at the closed ends.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html",
)
def label_out_of_range(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external or birth.during != "forward":
        return None
    if not (_log_of_target(birth) or _weighed_wrongly(birth) or _picks_masked(birth)):
        return None
    factors = [list(f) for f in birth.factors[:2]]
    shown: dict[str, Any] = {"target range": factors} if factors else {}
    return answer(
        facts,
        "label-out-of-range",
        f"{verb(birth.where, 'has a target', 'have targets')} that the loss can't take",
        fix(
            birth,
            "Bring the targets into range where they are read.",
            "{}.clamp_min(1e-6)",
            "target = target / 255  # or (target > 0).float()",
        ),
        **shown,
    )


def _log_of_target(birth: Birth) -> bool:
    """The log of something that neither a parameter nor the model's input reached, after the model."""
    if birth.op not in LOGS or not birth.after_model or forward_sign(birth) != "log-of-nonpositive":
        return False
    return not any({"parameter", "input"} & o.reached_by for o in birth.operands)


def _weighed_wrongly(birth: Birth) -> bool:
    """A log's -inf, multiplied by a target outside 0 to 1: with a proper one the model would have had no reason to go
    there."""
    return birth.op in LOGS and any(low < 0 or high > 1 for low, high in birth.factors)


def _picks_masked(birth: Birth) -> bool:
    """The label of a class that a mask had ruled out."""
    return birth.op == "nll_loss" and bool(birth.parents)
