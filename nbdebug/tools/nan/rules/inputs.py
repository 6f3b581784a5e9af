"""Rules for what was bad before the step did anything: weights, buffers, the batch, uninitialized memory."""

from __future__ import annotations

from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, listed
from nbdebug.tools.nan.facts import NanFacts, OriginFact
from nbdebug.tools.nan.rules.signatures import LOGS, forward_sign
from nbdebug.tools.nan.rules.wording import MADE, answer, verb


@rule(
    code="nan/uninitialized-memory",
    title="Memory is used that was never initialized.",
    symptom="NaN, inf or absurd numbers on some days and none on others, from the same script and the same seed.",
    cause="`torch.empty`, `torch.empty_like`, `x.new_empty` and `torch.Tensor(n)` return memory with whatever it "
    "contains. A parameter made of it needs an initialization; every place of a buffer made of it must be written "
    "before it is read.",
    confirm="`torch.use_deterministic_algorithms(True)` before you build the model fills such memory with NaN, so "
    "that it fails every time.",
    fix="Write the initialization: `nn.init.xavier_uniform_(self.weight)` or `nn.init.normal_(self.weight, std=0.02)`, "
    "in the module's own `__init__`, so that it runs however the model is loaded. For buffers use `torch.zeros`.",
    reference="https://docs.pytorch.org/docs/stable/deterministic.html",
)
def uninitialized_memory(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    whole = origin.external == "parameter" and origin.whole and origin.made == "nan" and not facts.state.spoiled
    if not whole and not origin.op.startswith(("empty", "new_empty")):
        return None
    clause = "uses uninitialized memory" + (f" in `{origin.name}`" if origin.name else "")
    code = (
        f'nn.init.normal_(model.get_parameter("{origin.name or "a tensor"}"), std=0.02)'
        if origin.external
        else "torch.zeros(...)  # in place of torch.empty"
    )
    return answer(facts, "uninitialized-memory", clause, Fix("Initialize it.", code))


@rule(
    code="nan/parameter-nonfinite",
    title="A weight or a buffer was already NaN or inf before the step.",
    symptom="NaN at the very first batch, whatever the data. Loading the checkpoint gave no warning.",
    cause="An earlier step went bad and its update was made: then nearly all weights are NaN, and each later step is "
    "(the usual reason, when a loop has run before). Or the weights were loaded so: `load_state_dict` compares names "
    "and shapes, not values; the file was saved after a run had gone bad, or was damaged by a conversion, such as a "
    "cast to float16 of a weight above 65,504.",
    confirm="`[n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]`, before the first step.",
    fix="After a bad step: build model and optimizer again, and run the loop under `%%nan_trace` or after `%guard on`, "
    "which name the cause in the step where it starts. For a bad file: go back to an older checkpoint in which this "
    "list is empty, or reinitialize the layers named there (`layer.reset_parameters()`) and train them again. From now "
    "on check before `torch.save`, and keep more than one checkpoint.",
    reference="https://github.com/pytorch/pytorch/issues/10008",
)
def parameter_nonfinite(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.external not in ("parameter", "buffer"):
        return None
    if facts.state.spoiled:
        return _spoiled(facts)
    fill = f"""with torch.no_grad():
    t = model.get_{origin.external}("{origin.name}")
    t[~torch.isfinite(t)] = 0"""
    check = """bad = [n for n, t in model.state_dict().items() if not torch.isfinite(t).all()]
assert not bad, bad  # after load_state_dict, and before torch.save"""
    return answer(
        facts,
        "parameter-nonfinite",
        f"starts with {MADE[origin.made]} in the {origin.external} `{origin.name}` "
        f"({origin.bad_elements:,} of {origin.elements:,} elements)",
        Fix("To go on, fill the bad elements. Better: load good weights, or reinitialize the layer.", fill),
        Fix("Check for this from now on.", check, None, {"why not": "it is a check"}),
    )


def _spoiled(facts: NanFacts) -> Finding:
    """Weights that an earlier step has made bad."""
    origin, state = facts.origin, facts.state
    when = "by the update of an earlier step" if state.trained or state.finite_steps else "by an earlier run"
    others = f" and {count(len(state.bad) - 1, 'other tensor')}" if len(state.bad) > 1 else ""
    clause = f"starts with weights that were spoiled {when}: {MADE[origin.made]} in `{origin.name}`{others}"
    evidence: dict[str, Any] = {
        "bad before the step": f"{len(state.bad)} of {count(state.tensors, 'tensor')}: {listed(state.bad)}"
    }
    if state.trained:
        evidence["trained before"] = state.trained
    if state.finite_steps:
        evidence["steps with a finite loss before"] = f"{state.finite_steps:,}"
    fresh = Fix(
        "Build model and optimizer again (or load weights from before), then let the loop run under the tracer: it "
        "stops at the step that spoils them and names the cause.",
        "%%nan_trace\n# the cell with the training loop, after model and optimizer were built again",
        None,
        {"why not": "the step that spoiled the weights is over"},
    )
    return answer(facts, "parameter-nonfinite", clause, fresh, **evidence)


@rule(
    code="nan/input-nonfinite",
    title="The batch already contains NaN or inf.",
    symptom="NaN from the first layer on, in some rows of one batch. The same data may train for hours before "
    "that row comes up.",
    cause="A missing value that was read as NaN, a column divided by a standard deviation of zero, a log of zero in "
    "the preprocessing, a cast to float16 of a large number. A mask does not help afterwards: 0 * NaN is NaN.",
    confirm="`torch.isfinite(x).flatten(1).all(1)` marks the good rows; in pandas `df.isna().sum()` and "
    "`np.isinf(df).sum()`.",
    fix="Repair the data where it is made: `df.dropna()`, or fill and tell the model, `x = "
    "torch.cat([torch.nan_to_num(x), x.isnan().float()], -1)`. Give `torch.nan_to_num` its `posinf` and "
    "`neginf`: the default for inf is the largest number of the dtype. An assertion in the Dataset costs almost "
    "nothing: `assert torch.isfinite(x).all(), index`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.isfinite.html",
)
def input_nonfinite(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.external is None:
        return None
    what = "the model's input" if origin.external == "input" else "a tensor from outside the model"
    return answer(
        facts,
        "input-nonfinite",
        f"{verb(origin.where, 'has', 'have')} {MADE[origin.made]} in {what}",
        Fix(
            "As a stopgap, fill the missing values. Better: repair the data where it is read.",
            "x = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)",
        ),
        Fix(
            "Tell the model which values are missing.",
            "x = torch.cat([torch.nan_to_num(x), x.isnan().to(x.dtype)], -1)",
            None,
            {"why not": "it changes the model's input width"},
        ),
    )


@rule(
    code="nan/all-labels-ignored",
    title="Every label of the batch is ignored.",
    symptom="The loss is NaN in a single step. Its gradient may be zero, so that the weights stay finite while every "
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
    origin = facts.origin
    if (
        origin.external
        or origin.op != "nll_loss"
        or origin.made != "nan"
        or origin.parents
        or origin.during == "backward"
        or origin.scalars.get("labels") == 0
    ):
        return None
    return answer(
        facts,
        "all-labels-ignored",
        "has no label that counts, so the mean loss divides by zero",
        Fix(
            "Divide by the number of labels that count, and at least by one. Better: keep such batches out.",
            "F.cross_entropy(logits, labels, reduction='sum') / (labels != -100).sum().clamp_min(1)",
        ),
        labels=origin.scalars.get("labels"),
        ignored=origin.scalars.get("ignored"),
    )


@rule(
    code="nan/ctc-infeasible",
    title="A CTC target does not fit into its frames.",
    symptom="The loss is inf for some samples, and NaN gradients follow.",
    cause="CTC needs a frame for each symbol and one more between two equal ones: 'aaa' needs 5 frames. With "
    "fewer, no alignment exists, the probability is 0 and the loss -log(0). Strides in the encoder "
    "reduce the number of frames.",
    confirm="For each sample: `input_length >= target_length + (target[1:] == target[:-1]).sum()`.",
    fix="Drop or split such samples, or use a smaller stride. `F.ctc_loss(..., zero_infinity=True)` sets their loss "
    "and gradient to zero, which is right for a few bad samples and hides the problem when there are many: count "
    "them. Pass the input_lengths after the strides.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.CTCLoss.html",
)
def ctc_infeasible(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.external or "ctc_loss" not in (origin.op, origin.where.op):
        return None
    return answer(
        facts,
        "ctc-infeasible",
        f"{verb(origin.where, 'has', 'have')} fewer frames than the CTC target needs",
        Fix(
            "Drop such samples, or use a smaller stride; zero_infinity sets their loss and gradient to zero.",
            "F.ctc_loss(log_probs, targets, input_lengths, target_lengths, zero_infinity=True)",
        ),
    )


@rule(
    code="nan/label-out-of-range",
    title="A target is outside the range that the loss accepts.",
    symptom="inf or NaN in the loss for some samples, while the model's output is finite. Or a loss that turns "
    "negative first.",
    cause="A mask read as 0 and 255 in place of 0 and 1; a target of exactly 0 or 1 for a log-likelihood that is "
    "infinite there (Beta, Gamma); log of a target that is 0. `F.binary_cross_entropy` and "
    "`F.cross_entropy` raise an error for such targets; `F.binary_cross_entropy_with_logits` and "
    "hand-written losses do not.",
    confirm="Compare `target.min(), target.max()` with the formula of the loss.",
    fix="Bring targets into range where they are read: `mask / 255`, `(mask > 0).float()`, `target.clamp(1e-4, 1 "
    "- 1e-4)` for a Beta, `torch.log1p(target)` in place of log for counts. Distributions check the support "
    "with `validate_args=True`, except at the closed ends.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html",
)
def label_out_of_range(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.external or origin.during != "forward":
        return None
    masked_class = origin.op == "nll_loss" and bool(origin.parents)  # a mask had ruled out the class of the label
    # a log's -inf, times a target outside 0 to 1: with a proper target the model would have no reason to go there
    bad_weight = origin.op in LOGS and any(low < 0 or high > 1 for low, high in origin.factors)
    if not (_log_of_target(origin) or bad_weight or masked_class):
        return None
    factors = [list(f) for f in origin.factors[:2]]
    evidence: dict[str, Any] = {"target range": factors} if factors else {}
    return answer(
        facts,
        "label-out-of-range",
        f"{verb(origin.where, 'has a target', 'have targets')} that the loss does not accept",
        Fix("Bring the targets into range where they are read.", "target = target / 255  # or (target > 0).float()"),
        **evidence,
    )


def _log_of_target(origin: OriginFact) -> bool:
    """The log of something that neither a parameter nor the model's input reached, after the model."""
    if origin.op not in LOGS or not origin.after_model or forward_sign(origin) != "log-of-nonpositive":
        return False
    return not any({"parameter", "input"} & o.reached_by for o in origin.operands)
