"""Rules for what was bad before the step did anything: weights, buffers, the batch, memory that nobody filled."""

from __future__ import annotations

from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts, OriginFact
from nbdebug.tools.nan.rules.signatures import LOGS, forward_sign
from nbdebug.tools.nan.rules.wording import answer, fix, verb


@rule(
    code="nan/uninitialized-memory",
    title="Memory was used that nobody had filled.",
    symptom="NaN, inf or absurd numbers on some days and none on others, from the same script and the same seed.",
    cause="`torch.empty`, `torch.empty_like`, `x.new_empty` and `torch.Tensor(n)` hand out memory as it is. A "
    "parameter made of it needs an init; a buffer made of it must be written in every place before it is "
    "read.",
    confirm="`torch.use_deterministic_algorithms(True)` before building the model fills such memory with NaN, so "
    "that it fails every time.",
    fix="Write the init: `nn.init.xavier_uniform_(self.weight)` or `nn.init.normal_(self.weight, std=0.02)`, in "
    "the module's own `__init__`, so that it runs however the model is loaded. For buffers use `torch.zeros`.",
    reference="https://docs.pytorch.org/docs/stable/deterministic.html",
)
def uninitialized_memory(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    whole = birth.external == "parameter" and birth.whole and birth.made == "nan"
    if not whole and not birth.op.startswith(("empty", "new_empty")):
        return None
    name = birth.name or "a tensor"
    says = "uses memory that was never filled" + (f", in `{name}`" if birth.name else "")
    code = (
        f'nn.init.normal_(model.get_parameter("{name}"), std=0.02)'
        if birth.external
        else "torch.zeros(...)  # in place of torch.empty"
    )
    return answer(facts, "uninitialized-memory", says, Fix("Initialise it.", code), tensor=name)


@rule(
    code="nan/parameter-nonfinite",
    title="A weight or a buffer was already NaN or inf before the step.",
    symptom="NaN at the very first batch, whatever the data. Loading the checkpoint gave no warning.",
    cause="`load_state_dict` compares names and shapes, not values. The file was saved after a run had gone bad, "
    "or was damaged by a conversion, such as a cast to float16 of a weight above 65,504.",
    confirm="`[n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]`, before the first step.",
    fix="Go back to an older checkpoint in which this list is empty, or initialise the layers named there afresh "
    "(`layer.reset_parameters()`) and train them again. From then on check before `torch.save`, and keep "
    "more than one checkpoint.",
    reference="https://github.com/pytorch/pytorch/issues/10008",
)
def parameter_nonfinite(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external not in ("parameter", "buffer"):
        return None
    fill = f"""with torch.no_grad():
    t = model.get_{birth.external}("{birth.name}")
    t[~torch.isfinite(t)] = 0"""
    check = """bad = [n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]
assert not bad, bad  # after load_state_dict, and before torch.save"""
    return answer(
        facts,
        "parameter-nonfinite",
        f"starts with a bad {birth.external}, `{birth.name}` ({birth.bad_elements:,} of {birth.elements:,} elements)",
        Fix("Fill the bad elements to go on; better, load sound weights or initialise the layer afresh.", fill),
        Fix("Look for this from now on.", check, None, {"why not": "it is a check"}),
        tensor=birth.name,
    )


@rule(
    code="nan/input-nonfinite",
    title="The batch already held NaN or inf.",
    symptom="NaN from the first layer on, in some rows of one batch. The same data may train for hours before "
    "that row comes up.",
    cause="A missing value that was read as NaN, a column divided by a spread of zero, a log of zero in the "
    "preprocessing, a cast to float16 of a large number. A mask does not help afterwards: 0 * NaN is NaN.",
    confirm="`torch.isfinite(x).flatten(1).all(1)` names the good rows; in pandas `df.isna().sum()` and "
    "`np.isinf(df).sum()`.",
    fix="Repair the data where it is made: `df.dropna()`, or fill and tell the model, `x = "
    "torch.cat([torch.nan_to_num(x), x.isnan().float()], -1)`. Give `torch.nan_to_num` its `posinf` and "
    "`neginf`: the default for inf is the largest number of the dtype. An assertion in the Dataset costs "
    "nothing: `assert torch.isfinite(x).all(), index`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.isfinite.html",
)
def input_nonfinite(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.external is None:
        return None
    what = "the model's input" if birth.external == "input" else "a tensor from outside the model"
    made = {"nan": "NaN"}.get(birth.made, birth.made if birth.made != "mixed" else "NaN and inf")
    return answer(
        facts,
        "input-nonfinite",
        f"{verb(birth.where, 'brings', 'bring')} {made} in {what}",
        Fix(
            "As a stopgap, fill the holes; better, repair the data where it is read.",
            "x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)",
        ),
        Fix(
            "Tell the model where the holes were.",
            "x = torch.cat([torch.nan_to_num(x), x.isnan().to(x.dtype)], -1)",
            None,
            {"why not": "it changes the model's input width"},
        ),
    )


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


def _log_of_target(birth: OriginFact) -> bool:
    """The log of something that neither a parameter nor the model's input reached, after the model."""
    if birth.op not in LOGS or not birth.after_model or forward_sign(birth) != "log-of-nonpositive":
        return False
    return not any({"parameter", "input"} & o.reached_by for o in birth.operands)


def _weighed_wrongly(birth: OriginFact) -> bool:
    """A log's -inf, multiplied by a target outside 0 to 1: with a proper one the model would have had no reason to go
    there."""
    return birth.op in LOGS and any(low < 0 or high > 1 for low, high in birth.factors)


def _picks_masked(birth: OriginFact) -> bool:
    """The label of a class that a mask had ruled out."""
    return birth.op == "nll_loss" and bool(birth.parents)
