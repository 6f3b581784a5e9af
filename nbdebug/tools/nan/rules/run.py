"""Rules for what only the run around a fault can tell: an earlier step, a learning rate, an optimizer, a compiler."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.tools.nan.facts import CompiledFacts, NanFacts, OriginFact, RunFacts, UnlocatedStep
from nbdebug.tools.nan.rules.signatures import OVERFLOW_LIKE, backward_sign, forward_sign
from nbdebug.tools.nan.rules.wording import answer

GREW = 10.0
"""Largest parameter now, relative to its first size. Tuned on 29 generated divergences and 20 data faults: all
told apart."""
ROSE = 30.0
"""Loss relative to the first loss, on the same runs."""
SAME_DATA = 30.0
"""Inputs larger than this many times the first ones are a data fault, not a divergence."""


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
