"""Rules for faults that show in the backward only: the loss is finite and a gradient is not."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.rules.signatures import backward_sign
from nbdebug.tools.nan.rules.wording import answer, fix, verb

DROPPERS = frozenset(
    {
        "where",
        "masked_fill",
        "index",
        "masked_select",
        "masked_scatter",
        "nan_to_num",
        "index_select",
        "gather",
        "index_put",
    }
)
"""Ops that drop elements in the forward and send a zero back to them."""


@rule(
    code="nan/where-grad",
    title="torch.where dropped a bad value, and its gradient came back.",
    symptom="The forward is finite everywhere, gradients are NaN, and the line that is to blame is the branch "
    "that was not taken.",
    cause="`torch.where` computes both branches and picks. In the backward the branch not taken gets gradient 0, "
    "and 0 times the inf derivative of that branch is NaN. `masked_fill`, indexing after the fact, "
    "`nan_to_num` and multiplying by a mask share this.",
    confirm="Compute the branch alone and look: `torch.isfinite(branch).all()`, at the entries that `where` drops.",
    fix="Make the input safe first, then choose (the double where): `safe = torch.where(x > 0, x, 1.0)`, then "
    "`torch.where(x > 0, torch.log(safe), other)`. For exp: `torch.exp(x.clamp(max=0))` in the branch for x "
    "< 0. Or select first: `y[keep] = f(x[keep])`.",
    reference="https://github.com/pytorch/pytorch/issues/68425",
)
def where_grad(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    droppers = sorted(DROPPERS & set(birth.absorbed_by))
    if facts.target.kind != "gradient" or birth.during != "forward" or birth.external or not droppers:
        return None
    return answer(
        facts,
        "where-grad",
        f"{verb(birth.where, 'makes', 'make')} a bad value in {birth.op} that "
        f"{droppers[0]} drops, and its derivative comes back",
        Fix(
            "Make the operand safe first, then choose.",
            "safe = torch.where(keep, x, 1.0)  # keep: the condition under which the op's result is used\n"
            f"y = torch.where(keep, {birth.op}(safe), other)",
        ),
    )


@rule(
    code="nan/sqrt-grad-at-zero",
    title="The slope of sqrt at zero is infinite.",
    symptom="The loss is finite, even zero, and gradients are NaN. It comes with two identical points, a padded "
    "row, a flat image patch, or a constant feature.",
    cause="The derivative of sqrt(x) is 1 / (2 sqrt(x)), inf at 0. Behind it stands a square whose derivative is "
    "0 there, and inf * 0 is NaN. `x.pow(0.5)`, `torch.hypot` and `x.var().sqrt()` do the same.",
    confirm="Ask for zeros at sqrt's input: `(x == 0).sum()`. They are legal in the forward: sqrt(0) is 0.",
    fix="Use a function that knows the point: `torch.linalg.vector_norm(a - b, dim=-1)`, `torch.cdist`, "
    "`x.std()` have gradient 0 there. If you write the root yourself: `torch.sqrt(squared + 1e-12)` or "
    "`torch.sqrt(squared.clamp_min(1e-12))`. To divide by a length: `F.normalize`, as `x / x.norm()` is 0/0 "
    "at zero.",
    reference="https://github.com/pytorch/pytorch/issues/6394",
)
def sqrt_grad_at_zero(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.during != "backward" or birth.external or backward_sign(birth) != "sqrt-grad-at-zero":
        return None
    return answer(
        facts,
        "sqrt-grad-at-zero",
        f"{verb(birth.where, 'differentiates', 'differentiate')} a root at zero, where its slope is infinite",
        fix(birth, "Keep the operand above zero.", "{}.clamp_min(1e-12)", "torch.sqrt(x.clamp_min(1e-12))"),
    )


@rule(
    code="nan/grad-overflow",
    title="A gradient became too large for its dtype.",
    symptom="The loss is an ordinary number, gradients are inf or NaN, and the weights are lost after the step.",
    cause="The backward multiplies where the forward divided or scaled: a loss scale of 65,536 in float16 leaves "
    "gradients a range of 1; the derivative of 1/x is -1/x², inf in float32 from x = 1e-20 on, where 1/x "
    "is still 1e20. `clip_grad_norm_` does not save it: scaled by an infinite norm, an inf becomes NaN and "
    "everything else 0.",
    confirm="`[n for n, p in model.named_parameters() if p.grad is not None and not "
    "torch.isfinite(p.grad).all()]` after `backward()`; then the same with the loss divided by 1,024: if "
    "it is finite, this is it.",
    fix="In float16: `torch.amp.GradScaler`, which skips such a step and lowers its scale, with float32 weights "
    "under `torch.autocast`; or bfloat16, which needs no scale. Otherwise bound the denominator "
    "(`x.clamp_min(1e-6)`), and let clipping speak up: `clip_grad_norm_(params, 1.0, "
    "error_if_nonfinite=True)`.",
    reference="https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
)
def grad_overflow(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if birth.during != "backward" or birth.external or backward_sign(birth) != "grad-overflow":
        return None
    half = birth.dtype == "float16"
    return answer(
        facts,
        "grad-overflow",
        f"makes a gradient too large for {birth.dtype} in the derivative of {birth.where.op}",
        Fix(
            "Let GradScaler choose the scale and skip such steps, or use bfloat16."
            if half
            else "Bound what the forward divides by, or scale the loss down.",
            "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
            if half
            else "loss = loss / 1024  # or x.clamp_min(1e-6) in the denominator",
        ),
    )
