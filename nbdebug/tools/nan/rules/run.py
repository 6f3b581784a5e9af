"""Rules for what surrounds the arithmetic: first what was bad from outside (memory, weights, inputs, labels), then what
only the run tells (an earlier step, a learning rate, an optimizer, a compiler).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count, listed
from nbdebug.tools.nan.facts import CompiledFacts, NanFacts, OriginFact, RunFacts, UnlocatedStep
from nbdebug.tools.nan.rules.arithmetic import LOGS, OVERFLOW_LIKE, backward_sign, droppers_of, forward_sign
from nbdebug.tools.nan.rules.wording import MADE, answer, verb

GREW = 10.0
"""Largest parameter now, relative to its first size. Tuned on 29 generated divergences and 20 data faults: all
told apart."""
ROSE = 30.0
"""Loss relative to the first loss, on the same runs."""
SAME_DATA = 30.0
"""Inputs larger than this many times the first ones are a data fault, not a divergence."""


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
    "the preprocessing, a cast to float16 of a large number. A mask does not help afterwards: 0 * NaN is NaN. A number "
    "in your own line that is NaN (a weight of a loss, the mean of an empty list) does the same.",
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
    if origin.external is None and origin.during == "forward" and forward_sign(origin) == "input-nonfinite":
        return answer(
            facts,
            "input-nonfinite",
            f"{verb(origin.where, 'computes', 'compute')} with a number that is NaN",
            Fix(
                "Look where this number is computed: a mean of an empty list, 0/0 in NumPy, a missing value.",
                "assert math.isfinite(number), number",
            ),
        )
    if origin.external is None or droppers_of(facts):
        return None
    if origin.argument in ("weight", "pos_weight") and any(w in origin.reader for w in ("loss", "cross_entropy")):
        numbers = origin.numbers
        shares = "counts.sum() / (len(counts) * counts.clamp(min=1))"
        shares = shares if origin.argument == "weight" else "negatives / positives.clamp(min=1)"
        classes = f" (class{'es' * (len(numbers) > 1)} {listed(numbers, 6, quote='')})" if numbers else ""
        return answer(
            facts,
            "input-nonfinite",
            f"{verb(origin.where, 'has', 'have')} {MADE[origin.made]} in the `{origin.argument}` of the loss{classes}",
            Fix(
                "A class of which no row was counted has a weight of 1/0. Count the labels of all rows, and such a "
                "class as one.",
                f"{origin.argument} = {shares}",
            ),
        )
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
    if origin.external or origin.made != "nan" or origin.parents or origin.during == "backward":
        return None
    mean = origin.op == "nll_loss" and origin.scalars.get("labels") != 0
    if not mean and not _sum_of_no_label(origin):
        return None
    counts = {"labels": origin.scalars.get("labels"), "ignored": origin.scalars.get("ignored")} if mean else {}
    return answer(
        facts,
        "all-labels-ignored",
        f"has no label that counts{' (all are -100)' * (not mean)}, so the mean loss divides by zero",
        Fix(
            "Divide by the number of labels that count, and at least by one. Better: keep such batches out.",
            "F.cross_entropy(logits, labels, reduction='sum') / (labels != -100).sum().clamp_min(1)",
        ),
        **counts,
    )


def _sum_of_no_label(origin: OriginFact) -> bool:
    """A sum of cross entropies that is exactly zero, over a number of labels that is zero."""
    operands = {operand.name: operand for operand in origin.operands}
    total, number = operands.get("self"), operands.get("other")
    if origin.op != "div" or total is None or number is None or total.source_op != "nll_loss":
        return False
    return bool(total.zeros_at_fault and number.zeros_at_fault) and "parameter" not in number.reached_by


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
    least = -1 if origin.op == "log1p" else 0  # below it the log is NaN, whatever it is multiplied by
    bad_weight = bad_weight and not any(o.low_at_fault is not None and o.low_at_fault < least for o in origin.operands)
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


@rule(
    code="nan/running-stats-nonfinite",
    title="A running statistic became NaN or inf in an earlier step and stays so.",
    symptom="Training looks fine and evaluation gives NaN; or a NaN from one batch stays although the data is "
    "clean again.",
    cause="A running mean is old * 0.9 + new * 0.1, so a single NaN or inf stays for good. In training BatchNorm "
    "normalizes with the statistics of the batch and hides it. A step that GradScaler skips still updates "
    "the buffers.",
    confirm="`[n for n, b in model.named_buffers() if not torch.isfinite(b).all()]`, after each step, finds the "
    "step in which it happened.",
    fix="Repair the batch that caused it (one row only: `drop_last=True`; a bad row: leave it out). In your own "
    "layer, check before the update: `if torch.isfinite(new).all(): self.running.lerp_(new, 0.1)`. To go on with "
    "this model: `norm.reset_running_stats()`, then some batches in train mode. With `%guard on` (or "
    "`nbdebug.guard(model, optimizer)`) the batch is stopped in its own step, and the statistics stay finite.",
    reference="https://github.com/pytorch/pytorch/issues/1206",
)
def running_stats_nonfinite(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    where = dataclasses.replace(origin.where, step=facts.step)
    if facts.target.kind == "buffer":
        where = dataclasses.replace(where, phase="forward")
        clause = f"makes the running statistic `{facts.target.name}` non-finite, while the loss is still finite"
        why_not = "it changes the layer, not one value"
    elif origin.external or not origin.earlier_step or facts.target.kind == "gradient":
        return None
    else:
        clause = f"uses a running statistic that has been non-finite since step {origin.step}"
        why_not = f"step {origin.step}, which caused it, is over; only the last step can be replayed"
    cure = Fix(
        "Update the statistic only with finite values.",
        "if torch.isfinite(new).all():\n    self.running_var.lerp_(new, 0.1)",
        None,
        {"why not": why_not},
    )
    return answer(facts, "running-stats-nonfinite", clause, cure, where=where)


@rule(
    code="nan/optimizer-eps-underflow",
    title="The optimizer divides by zero: its eps is 0 in this dtype.",
    symptom="Loss and gradients are finite, and after `optimizer.step()` some weights are NaN or inf. It affects "
    "weights with a zero or tiny gradient, such as rows of an embedding that the batch did not use.",
    cause="Adam divides by sqrt(v) + eps. With float16 weights the default eps of 1e-8 rounds to 0, and v, a "
    "thousandth of the squared gradient at first, rounds to 0 for a gradient below about 5e-3: 0/0 is NaN, "
    "m/0 is inf. With eps=0 the same happens in float32.",
    confirm="`torch.tensor(1e-8, dtype=torch.float16)` is 0. Check the dtype of the weights and "
    "`optimizer.param_groups[0]['eps']`.",
    fix="Keep the weights in float32 and use `torch.autocast`: mixed precision works this way. If the weights must "
    "be float16: `torch.optim.Adam(params, lr, eps=1e-4)`. bfloat16 can represent 1e-8 and is not affected.",
    reference="https://github.com/pytorch/pytorch/issues/147437",
)
def optimizer_eps_underflow(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.during != "optimizer" or not _denominator_is_zero(origin):
        return None
    owner = facts.target.name.rpartition(".")[0]
    place = facts.history.optimizer_line or origin.where
    where = dataclasses.replace(
        origin.where,
        phase="optimizer",
        module=owner,
        file=place.file,
        line=place.line,
        text=place.text,
        cell=place.cell,
    )
    return answer(
        facts,
        "optimizer-eps-underflow",
        f"divides by zero in {facts.history.optimizer or 'the optimizer'}, in the update of `{facts.target.name}` "
        f"({origin.dtype})",
        Fix(
            "Give the optimizer an eps that this dtype can represent, or keep the weights in float32.",
            f"torch.optim.{facts.history.optimizer or 'Adam'}(model.parameters(), eps=1e-4)",
        ),
        where=where,
    )


@rule(
    code="nan/lr-divergence",
    title="The learning rate is too high: the weights grow until they overflow.",
    symptom="The loss rises step by step, often tenfold each, then is inf, then NaN. The op at which it happens "
    "differs from run to run.",
    cause="Each step overshoots and makes the next gradient larger. The op that overflows in the end is not the "
    "cause: it is only the first to reach the end of its dtype.",
    confirm="Print the losses before the failure: they rise. The largest weight grows by a factor each step. "
    "With a tenth of the learning rate the run is stable. `guard(..., max_grad_norm=1.0)` counts the steps that it "
    "clips: if it clips more than half of them, the rate is too high.",
    fix="Lower `lr` (divide by 10 until the loss falls), warm up (`torch.optim.lr_scheduler.LinearLR(optimizer, "
    "0.01, total_iters=500)`), and clip gradients: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` "
    "before `optimizer.step()`. Scale targets to about 1, and scale `lr` with the batch size if you took it "
    "from a run on more devices. `guard(model, optimizer, max_grad_norm=1.0)` clips, stops the first bad step, and "
    "leaves weights from which the run can continue with a lower rate.",
    reference="https://github.com/pytorch/examples/issues/736",
)
def lr_divergence(facts: NanFacts) -> Finding | None:
    origin, history = facts.origin, facts.history
    in_update = origin.during == "optimizer" and facts.target.kind == "parameter"
    if (in_update and history.nonfinite_settings) or not _overflow_like(origin):
        return None
    if not (in_update or diverged(history, facts.step)):
        return None
    place = history.optimizer_line or Where()
    step = facts.target.where.step
    where = dataclasses.replace(
        origin.where,
        step=facts.step if step is None else step,
        phase="optimizer",
        file=place.file or origin.where.file,
        line=place.line or origin.where.line,
        text=place.text or origin.where.text,
        cell=place.cell or origin.where.cell,
        samples=None,
    )
    lr = history.learning_rate
    lower = (
        f"torch.optim.{history.optimizer or 'SGD'}(model.parameters(), lr={lr / 10:g})"
        if lr is not None
        else "optimizer.param_groups[0]['lr'] /= 10"
    )
    rate = f"lr={lr:g}" if lr is not None else "this learning rate"
    return answer(
        facts,
        "lr-divergence",
        f"overflows in a run that diverges at {rate}",
        Fix(
            "Lower the learning rate, and clip gradients so that no single step can do this.",
            f"{lower}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            None,
            {"why not": "it needs the run from its start"},
        ),
        where=where,
        **{
            "losses": [round(x, 4) for x in history.losses[-8:]],
            "growth of the largest parameter": [round(x, 2) for x in history.parameter_growth[-8:]],
        },
    )


@rule(
    code="nan/compiled-differs",
    title="The compiled model gives NaN where the eager one is finite.",
    symptom="NaN or inf appears with `torch.compile` only. In eager mode the same batch and the same weights give "
    "finite numbers.",
    cause="A compiler may reorder, fuse and recompute ops; its kernels round differently, and some are wrong at the "
    "edge of a range. Then no line of yours is to blame, but values near the end of their dtype make it more "
    "likely.",
    confirm="Run the step under `torch.compiler.set_stance('force_eager')`: finite. Then find the stage: "
    "`torch.compile(model, backend='eager')`, then 'aot_eager', then 'inductor'; the first that gives "
    "NaN is the one.",
    fix="Exclude the part at fault and compile the rest: `@torch.compiler.disable` above that module's "
    "`forward`. Keep values far from the ends of the dtype, and report the bug to PyTorch with the smallest module "
    "that shows it.",
    reference="https://github.com/pytorch/pytorch/issues/178084",
)
def compiled_differs(facts: NanFacts | CompiledFacts) -> Finding | None:
    if not isinstance(facts, CompiledFacts):
        return None
    where = dataclasses.replace(
        facts.where, step=facts.step, phase="forward", module=facts.module, module_type=facts.module_type
    )
    return Finding(
        "nan/compiled-differs",
        f"Step {facts.step} is finite in eager mode but not when compiled: {facts.module_type} ({where.place})",
        where,
        {"eager": "finite", "compiled": f"{facts.bad:,} of {facts.elements:,} output elements are inf or NaN"},
        (Fix("Exclude this module from compilation.", "@torch.compiler.disable\ndef forward(self, ...):"),),
    )


def diverged(history: RunFacts, step: int) -> bool:
    """Whether the run was diverging before `step`, on data like the first."""
    at = step - history.first_step
    if step < 1 or max(history.input_growth[max(at - 1, 0) : at + 1], default=1.0) > SAME_DATA:
        return False
    grew = history.parameter_growth[at] >= GREW if at < len(history.parameter_growth) else False
    losses = [abs(x) for x in history.earlier_losses if x == x and abs(x) != float("inf")]
    return grew or (len(losses) > 1 and max(losses[1:]) > ROSE * max(losses[0], 1e-6))


def _overflow_like(origin: OriginFact) -> bool:
    if origin.external:
        return False
    sign = backward_sign(origin) if origin.during == "backward" else forward_sign(origin)
    return sign in OVERFLOW_LIKE


def _denominator_is_zero(origin: OriginFact) -> bool:
    if origin.op in ("adam", "adamw"):
        return origin.made != "inf"
    below = [o for o in origin.operands if o.name.startswith(("tensor2", "other"))]
    return origin.op in ("addcdiv", "div") and any(o.zeros for o in below)


@rule(
    code="nan/not-located",
    title="A step is not finite, and it is not known where this starts.",
    symptom="The guard stopped a step and names no op. Weights and optimizer state are as before it: nothing is lost, "
    "and training can go on.",
    cause="The guard runs the step again to find the place. Some steps are finite when they run again: a number came "
    "from outside (the clock, `os.urandom`, a random generator of your own), the batch was changed in place after it "
    "was used, an op is not deterministic, or the hardware failed. Some can't run again: the loss is "
    "compiled, or the model is called where nbdebug does not see it. With `on_trip='raise'` the guard does not search "
    "until you ask.",
    confirm="`name, args, kwargs = error.trip.inputs[0]` is what the model was given (not a copy). Compute the loss of "
    "that batch ten times: if it changes, the step does not repeat. If all ten are finite and the same, suspect a "
    "batch that was changed since, or the machine.",
    fix="If nobody has searched yet: `error.trip.locate()` does it. Otherwise watch the run: `%%nan_trace` above the "
    "loop, or `%nan_trace step()` on that batch. To make steps repeat: seed every generator, "
    "`torch.use_deterministic_algorithms(True)`, `.clone()` a batch before you write into it. To tolerate a "
    "rare one: `guard(..., on_trip='skip')` drops it and counts.",
    reference="https://docs.pytorch.org/docs/stable/notes/randomness.html",
)
def not_located(facts: NanFacts | CompiledFacts | UnlocatedStep) -> Finding | None:
    if not isinstance(facts, UnlocatedStep):
        return None
    evidence = {
        f"{what} before": [x for x in values if x is not None]
        for what, values in (("losses", facts.losses), ("gradient norms", facts.norms))
    }
    search = Fix(
        "Search for the cause: the step can still be replayed.",
        facts.locate_call,
        None,
        {"why not": "it takes the time of a few steps"},
    )
    watch = Fix(
        "Watch the run, from the start or from your last checkpoint.",
        "nbdebug.nan_trace(step, model=model, max_steps=1000)",
        None,
        {"why not": "it needs the run from its start"},
    )
    skip = Fix(
        "If only a rare step is bad: drop it, and count.",
        'nbdebug.guard(model, optimizer, on_trip="skip")',
        None,
        {"why not": "you decide whether a step may be dropped"},
    )
    return Finding(
        "nan/not-located",
        f"{facts.sentence}; {facts.reason}",
        Where(step=facts.step),
        {key: values for key, values in evidence.items() if values},
        (search,) if facts.locate_call else (watch, skip),
    )
