"""Rules for faults that show in the backward only: the loss is finite and a gradient is not."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.rules.signatures import backward_sign, forward_sign
from nbdebug.tools.nan.rules.wording import MADE, answer, verb

DROPPERS = frozenset(
    "where masked_fill index masked_select masked_scatter nan_to_num index_select gather index_put".split()
)
"""Ops that drop elements in the forward and send a zero back to them."""


@rule(
    code="nan/where-grad",
    title="torch.where drops a bad value, but not its gradient.",
    symptom="The forward is finite everywhere, gradients are NaN, and the cause is in the branch that was not taken.",
    cause="`torch.where` computes both branches and picks. In backward the branch not taken gets gradient 0, "
    "and 0 times the inf derivative of that branch is NaN. `masked_fill`, indexing after the fact, "
    "`nan_to_num` and multiplying by a mask do the same.",
    confirm="Compute the branch alone: `torch.isfinite(branch).all()`, at the entries that `where` drops.",
    fix="Make the input safe first, then choose (the double where): `safe = torch.where(x > 0, x, 1.0)`, then "
    "`torch.where(x > 0, torch.log(safe), other)`. For exp: `torch.exp(x.clamp(max=0))` in the branch for x "
    "< 0. Or select first: `y[keep] = f(x[keep])`.",
    reference="https://github.com/pytorch/pytorch/issues/68425",
)
def where_grad(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    droppers = sorted(DROPPERS & set(origin.absorbed_by))
    if facts.target.kind != "gradient" or origin.during != "forward" or origin.external or not droppers:
        return None
    if forward_sign(origin) == "fully-masked-softmax":  # no operand can be made safe: the mask is at fault
        return None
    return answer(
        facts,
        "where-grad",
        f"{verb(origin.where, 'computes', 'compute')} {MADE[origin.made]} in {origin.op}; "
        f"{droppers[0]} drops it, but not its gradient",
        Fix(
            "Make the operand safe first, then choose.",
            "safe = torch.where(keep, x, 1.0)  # keep: the condition under which the result of the op is used\n"
            f"y = torch.where(keep, {origin.op}(safe), other)",
        ),
    )


@rule(
    code="nan/sqrt-grad-at-zero",
    title="The derivative of sqrt at zero is infinite.",
    symptom="The loss is finite, even zero, and gradients are NaN. It happens with two identical points, a padded "
    "row, a flat image patch, or a constant feature.",
    cause="The derivative of sqrt(x) is 1 / (2 sqrt(x)), inf at 0. Inside the root there is usually a square, whose "
    "derivative is 0 there, and inf * 0 is NaN. `x.pow(0.5)`, `torch.hypot` and `x.var().sqrt()` do the same.",
    confirm="Count the zeros at the input of sqrt: `(x == 0).sum()`. They are legal in the forward: sqrt(0) is 0.",
    fix="Use a function that handles zero: `torch.linalg.vector_norm(a - b, dim=-1)`, `torch.cdist`, "
    "`x.std()` have gradient 0 there. If you write the root yourself: `torch.sqrt(squared + 1e-12)` or "
    "`torch.sqrt(squared.clamp_min(1e-12))`. To divide by a length: `F.normalize`, as `x / x.norm()` is 0/0 "
    "at zero.",
    reference="https://github.com/pytorch/pytorch/issues/6394",
)
def sqrt_grad_at_zero(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.during != "backward" or origin.external or backward_sign(origin) != "sqrt-grad-at-zero":
        return None
    return answer(
        facts,
        "sqrt-grad-at-zero",
        f"{verb(origin.where, 'differentiates', 'differentiate')} a root at zero, where its derivative is infinite",
        Fix("Keep the operand above zero.", "torch.sqrt(x.clamp_min(1e-12))"),
    )


@rule(
    code="nan/grad-overflow",
    title="A gradient becomes too large for its dtype.",
    symptom="The loss is an ordinary number, gradients are inf or NaN, and the weights are NaN after the step.",
    cause="Backward multiplies where the forward divides or scales: with a loss scale of 65,536 in float16, a gradient "
    "of 1 already overflows; the derivative of 1/x is -1/x², inf in float32 for x below 1e-20, where 1/x "
    "is still 1e20. `clip_grad_norm_` does not help: scaled by an infinite norm, an inf becomes NaN and "
    "everything else 0.",
    confirm="`[n for n, p in model.named_parameters() if p.grad is not None and not "
    "torch.isfinite(p.grad).all()]` after `backward()`; then the same with the loss divided by 1,024: if "
    "the gradients are finite then, this is the cause.",
    fix="In float16: `torch.amp.GradScaler`, which skips such a step and lowers its scale, with float32 weights "
    "under `torch.autocast`; or bfloat16, which needs no scale. Otherwise bound the denominator "
    "(`x.clamp_min(1e-6)`), and let clipping raise an error: `clip_grad_norm_(params, 1.0, "
    "error_if_nonfinite=True)`.",
    reference="https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
)
def grad_overflow(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if origin.during != "backward" or origin.external or backward_sign(origin) != "grad-overflow":
        return None
    if origin.dtype == "float16":
        cure = Fix(
            "Let GradScaler choose the scale and skip such steps, or use bfloat16.",
            "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        )
    else:
        cure = Fix(
            "Bound what the forward divides by, or scale the loss down.",
            "loss = loss / 1024  # or x.clamp_min(1e-6) in the denominator",
        )
    clause = f"makes a gradient too large for {origin.dtype} in the derivative of {origin.where.op}"
    return answer(facts, "grad-overflow", clause, cure)
