"""Rules for the arithmetic itself: faults that show in the backward only, then the others in the order of the
catalogue. The last one takes whatever no other recognised.

What kind of arithmetic failed is one word, the last part of a code ("div-by-zero"): `forward_sign` and `backward_sign`
look at one op and its operands only; the rules add what the origin tells beyond (what absorbed the value, the target).
"""

from __future__ import annotations

import dataclasses
import math

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts, Operand, OriginFact
from nbdebug.tools.nan.rules.wording import MADE, answer, verb

DROPPERS = frozenset(
    "where masked_fill index masked_select masked_scatter nan_to_num index_select gather index_put".split()
)
"""Ops that drop elements in the forward and send a zero back to them."""


def droppers_of(facts: NanFacts) -> list[str]:
    """The ops that drop what is bad in the forward, where its gradient went bad all the same: of an op of the step, or
    of a tensor that the model was not given."""
    origin = facts.origin
    if facts.target.kind != "gradient" or origin.during != "forward" or origin.external not in (None, "target"):
        return []
    return sorted(DROPPERS & set(origin.absorbed_by))


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
    origin, droppers = facts.origin, droppers_of(facts)
    if not droppers or (not origin.external and forward_sign(origin) == "fully-masked-softmax"):
        return None  # of a softmax no operand can be made safe: the mask is at fault
    if origin.external:
        return answer(
            facts,
            "where-grad",
            f"{verb(origin.where, 'has', 'have')} {MADE[origin.made]} in a tensor from outside the model; "
            f"{droppers[0]} drops it after {origin.reader}, but not its gradient",
            Fix(
                "Make the tensor safe first, then choose: what is dropped may be any number.",
                "safe = torch.where(keep, target, 0.0)  # keep: the condition under which the result is used",
            ),
            where=dataclasses.replace(origin.where, phase="backward", op=origin.reader),
        )
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


@rule(
    code="nan/div-by-zero",
    title="A value is divided by zero.",
    symptom="Some rows of the output are inf, or NaN where the numerator is zero too. The other rows are fine.",
    cause="x/0 is inf and 0/0 is NaN; torch raises no error. The zero is usually an empty count (a mask that keeps "
    "nothing), the length of a vector of zeros, or a standard deviation of zero.",
    confirm="Count the zeros in the denominator: `(d == 0).sum()`. An eps that should prevent this may itself be "
    "zero: 1e-8 is 0 in float16.",
    fix="For counts: `total / count.clamp_min(1)`. For unit vectors: `F.normalize(v, dim=-1)`. For standard "
    "deviations: `x / (std + 1e-6)`. To leave bad rows out, select them before the division: `a[keep] / d[keep]`; "
    "`torch.where` after the division does not repair the gradient.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
)
def div_by_zero(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "div-by-zero":
        return None
    below = origin.operand("other")
    least = "1" if below is not None and below.dtype.startswith(("int", "uint")) else "1e-6"
    cure = Fix("Keep the denominator away from zero.", f"a / b.clamp_min({least})")
    if origin.op == "weight_norm_interface":
        cure = Fix(
            "Take weight normalization off before rows of the weight are set to zero: it divides by their length.",
            'torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")'
            if "parametrizations" in (origin.where.module or "")
            else "torch.nn.utils.remove_weight_norm(layer)",
        )
    return answer(facts, "div-by-zero", f"{verb(origin.where, 'divides', 'divide')} by zero", cure)


@rule(
    code="nan/log-of-nonpositive",
    title="log gets zero or a negative number.",
    symptom="The loss becomes inf or NaN once the model is certain: a probability has reached exactly 0, or 1 in "
    "log(1 - p). In backward the loss is an ordinary number, and gradients are inf or NaN.",
    cause="log(0) is -inf, and log of a negative number is NaN. softmax gives an exact 0 for a score that is more "
    "than about 104 below the highest one (float32); sigmoid gives an exact 1 from about 17 on.",
    confirm="Count them at the input of log: `(p <= 0).sum()`. log(1 - p) has its zero where p is 1.",
    fix="Do both in one op, from the scores: `F.log_softmax(scores, -1)`, `F.logsigmoid(s)` for log(p), "
    "`F.logsigmoid(-s)` for log(1 - p), `F.binary_cross_entropy_with_logits`. If you have no scores: "
    "`torch.log(p.clamp_min(1e-8))`. Adding 1e-8 to a p near 1, as in `torch.log(1 - (p + 1e-8))`, changes "
    "nothing in float32.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html",
)
def log_of_nonpositive(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "log-of-nonpositive":
        return None
    what = {"-inf": "zero", "nan": "a negative number"}.get(origin.made, "zero and of negative numbers")
    below = origin.operand("other")
    if origin.during == "backward" and below is not None and (below.low_at_fault or 0) >= 0:
        what = "zero"  # 0 * inf in its derivative
    if origin.op == "logdet":
        cure = Fix("Take the log of the determinant's size.", "torch.linalg.slogdet(A)[1]")
        return answer(facts, "log-of-nonpositive", "takes the log of a determinant below zero", cure)
    second = origin.where.op in ("xlogy", "special_xlog1py")
    return answer(
        facts,
        "log-of-nonpositive",
        f"{verb(origin.where, 'takes', 'take')} the log of {what}",
        Fix(
            "Keep the operand above zero (or compute the log from the scores).",
            "torch.xlogy(q, p.clamp_min(1e-8))" if second else "torch.log(p.clamp_min(1e-8))",
        ),
    )


@rule(
    code="nan/sqrt-of-negative",
    title="sqrt gets a negative number.",
    symptom="NaN in a distance, a norm or a standard deviation, mostly between points that are nearly the same.",
    cause="sqrt of a negative number is NaN. On paper the number is never negative, but a difference of "
    "two large, nearly equal numbers loses its last digits: E[x²] - E[x]² and |a|² + |b|² - 2ab can be "
    "slightly below zero.",
    confirm="Check the smallest input: `x.min()`. A small negative number (-1e-5) is rounding; a large one "
    "means that the formula, or the output of the network, needs another look.",
    fix="Use the function that does not subtract large numbers: `torch.cdist(a, b)`, `x.std(-1, correction=0)`, "
    "`torch.linalg.vector_norm(a - b, dim=-1)`. Or `torch.sqrt(x.clamp_min(1e-12))`: a small positive "
    "number, not 0, because the derivative of sqrt at 0 is inf. For an output that must be positive, such as a "
    "variance: `F.softplus(raw) + 1e-6`.",
    reference="https://github.com/pytorch/pytorch/pull/47240",
)
def sqrt_of_negative(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "sqrt-of-negative":
        return None
    return answer(
        facts,
        "sqrt-of-negative",
        f"{verb(origin.where, 'takes', 'take')} the square root of a negative number",
        Fix("Keep the operand above zero.", "torch.sqrt(x.clamp_min(1e-12))"),
    )


@rule(
    code="nan/pow-domain",
    title="A power has no finite value or derivative at this point.",
    symptom="NaN where a negative number is raised to a fraction, inf where 0 is raised to a negative power; or "
    "a finite loss and an inf gradient where 0 is raised to a power between 0 and 1.",
    cause="(-8) ** (1/3) is NaN in torch: real powers of negative numbers exist for whole exponents only. The "
    "derivative of x ** p is p * x ** (p - 1), which is inf at x = 0 for 0 < p < 1. With a trainable "
    "exponent the derivative contains log(x), which is NaN for a negative base, whatever the exponent.",
    confirm="Check the base, `(x < 0).sum()` and `(x == 0).sum()`, and the exponent.",
    fix="Keep the base above zero: `x.clamp_min(1e-6).pow(p)`. To keep the sign: `x.sign() * "
    "x.abs().clamp_min(1e-6).pow(p)`. For a focal loss with gamma below 1, clamp `1 - p` in the same way.",
    reference="https://github.com/pytorch/pytorch/issues/75405",
)
def pow_domain(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "pow-domain":
        return None
    what = "derivative" if origin.during == "backward" else "value"
    return answer(
        facts,
        "pow-domain",
        f"{verb(origin.where, 'computes', 'compute')} a power that has no finite {what}",
        Fix("Keep the base above zero.", "x.clamp_min(1e-6).pow(p)"),
    )


@rule(
    code="nan/inf-minus-inf",
    title="Infinity is subtracted from infinity.",
    symptom="NaN soon after a mask, or after a maximum is subtracted: log-space sums, alignment lattices, beam scores.",
    cause="-inf minus -inf (and inf minus inf) is NaN. In a row in which every entry is masked with -inf, the "
    "maximum is -inf too, and `row - row.max()` is NaN in every entry.",
    confirm="Find rows without a finite entry: `torch.isinf(x).all(-1).nonzero()`.",
    fix="Mask with a large finite number in place of -inf: `x.masked_fill(mask, torch.finfo(x.dtype).min)`. Or "
    "keep the maximum finite: `peak = x.amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).min)`. "
    "`torch.logsumexp` of a row of -inf is -inf in the forward, but its gradient is NaN: leave such rows out "
    "before it.",
    reference="https://github.com/pytorch/pytorch/issues/49724",
)
def inf_minus_inf(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "inf-minus-inf":
        return None
    return answer(
        facts,
        "inf-minus-inf",
        f"{verb(origin.where, 'subtracts', 'subtract')} infinity from infinity in {origin.where.op}",
        Fix("Mask with a large finite number in place of -inf.", "x.masked_fill(mask, -1e4)"),
    )


@rule(
    code="nan/zero-times-inf",
    title="Zero is multiplied by infinity.",
    symptom="NaN in an entropy, a KL divergence or a masked loss, at entries that should not count.",
    cause="0 * inf is NaN, so a zero weight does not remove an infinite term. p * log(p) at p = 0 is 0 * "
    "-inf; the same holds for loss * mask when the masked loss is inf.",
    confirm="Find the pair: `((a == 0) & torch.isinf(b)).sum()`. The inf comes from an earlier line (a log, a "
    "mask, a division).",
    fix="For a forward value: `torch.special.entr(p)` is -p log p with 0 at p = 0, `torch.special.xlogy(q, p)` "
    "is q log p with 0 at q = 0; for training clamp first, `torch.special.entr(p.clamp_min(1e-8))`, as the "
    "derivative at 0 is infinite. For masked actions: mask the scores with `torch.finfo(dtype).min` in place of "
    "-inf. Drop masked losses by index, `loss[mask]`, not by multiplication, or repair the inf where it is "
    "made.",
    reference="https://docs.pytorch.org/docs/stable/special.html#torch.special.xlogy",
)
def zero_times_inf(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "zero-times-inf":
        return None
    written = any(isinstance(v, float) and v in (float("inf"), float("-inf")) for v in origin.scalars.values())
    return answer(
        facts,
        "zero-times-inf",
        f"{verb(origin.where, 'multiplies', 'multiply')} zero by infinity",
        Fix(
            "Fill the mask in place of multiplying by it.",
            'bias = torch.zeros_like(keep).masked_fill(keep == 0, float("-inf"))',
        )
        if written
        else Fix(
            "Repair the infinity before the product: p * log p is torch.special.entr, q * log p is "
            "torch.special.xlogy; a mask should fill with a finite number.",
            "log_p = log_p.masked_fill(mask, 0.0)  # before p * log_p",
        ),
    )


@rule(
    code="nan/fully-masked-softmax",
    title="softmax gets a row in which everything is masked.",
    symptom="One row of the batch is NaN: a sentence of padding only, a graph node without neighbours, a state without "
    "a legal action. After one update all weights are NaN.",
    cause="softmax of a row of -inf is 0/0, NaN. -inf in a mask is right as long as each row keeps one finite entry.",
    confirm="Find such rows: `mask.all(-1).nonzero()` (mask True where masked), before softmax.",
    fix="Leave one entry open in a fully masked row: `mask = mask & ~mask.all(-1, keepdim=True)`, and drop the output "
    "of that row. `F.scaled_dot_product_attention` gives zeros for such a row; `nn.MultiheadAttention` does so "
    "only with `need_weights=False`. Replacing the NaN after softmax by `torch.nan_to_num` leaves NaN in the "
    "gradient.",
    reference="https://github.com/pytorch/pytorch/issues/41508",
)
def fully_masked_softmax(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "fully-masked-softmax":
        return None
    return answer(
        facts,
        "fully-masked-softmax",
        f"{verb(origin.where, 'passes', 'pass')} only masked entries to softmax",
        Fix(
            "Leave one entry open where all are masked, and drop the result of that row.",
            "mask = mask & ~mask.all(-1, keepdim=True)",
        ),
    )


@rule(
    code="nan/empty-reduction",
    title="A mean or a variance is taken over too few elements.",
    symptom="NaN in one step among many, mostly the last batch of an epoch or one without a positive example. "
    "torch warns for std and var ('degrees of freedom is <= 0'), not for mean.",
    cause="The mean of no elements is 0/0. std and var divide by n - 1, so one element gives NaN too. Losses with "
    "reduction='mean' do the same over an empty selection.",
    confirm="Print the number of elements: `x.numel()`, or the size of the dimension that is reduced; for a mask "
    "`mask.sum()`.",
    fix="For sums over a mask: `(x * mask).sum() / mask.sum().clamp_min(1)`. For the spread of a single element: "
    "`x.std(correction=0)`, which is 0 there, and add an eps where you divide by it. For short last batches: "
    "`DataLoader(..., drop_last=True)`.",
    reference="https://github.com/pytorch/pytorch/issues/29372",
)
def empty_reduction(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "empty-reduction":
        return None
    number = origin.operands[0].elements if origin.operands else 0
    return answer(
        facts,
        "empty-reduction",
        f"takes the {origin.op} of {'a single element' if number else 'no elements'}",
        Fix(
            "Leave such a batch out, or use the form that is defined there.",
            "x.std(correction=0)  # 0 for one element" if number else "(x * mask).sum() / mask.sum().clamp_min(1)",
        ),
    )


@rule(
    code="nan/domain-error",
    title="A function gets a number outside its domain.",
    symptom="NaN or inf from acos, asin, atanh, acosh, logit, erfinv and the like, in the forward or in the "
    "gradient only.",
    cause="acos and asin are defined on [-1, 1]; a cosine computed in float32 can be 1.0000001, and acos of it is "
    "NaN. At exactly ±1 the value is finite and the derivative is infinite. atanh(1) and logit(0) are infinite, "
    "acosh below 1 is NaN.",
    confirm="Check the range: `x.min(), x.max()`. A value just above 1 is rounding.",
    fix="For acos and asin: `torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))`; clamping to [-1, 1] repairs the value, "
    "not the derivative. `torch.atan2(cross, dot)` gives the angle between vectors without this problem. "
    "`torch.logit(p, eps=1e-6)` clamps for you.",
    reference="https://github.com/pytorch/pytorch/issues/8069",
)
def domain_error(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "domain-error":
        return None
    edge = "at the edge of" if origin.during == "backward" else "outside"
    return answer(
        facts,
        "domain-error",
        f"{verb(origin.where, 'calls', 'call')} {origin.where.op} {edge} its domain",
        Fix("Keep the operand inside the domain.", "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    )


@rule(
    code="nan/degenerate-decomposition",
    title="A decomposed matrix has equal eigenvalues or singular values.",
    symptom="The forward of eigh, svd or logdet is finite, its gradient is NaN: for an identity matrix at the "
    "start, a covariance of too few samples, a matrix of low rank.",
    cause="The gradient of eigenvectors contains 1 / (λi - λj), which is inf where two eigenvalues are equal. For svd, "
    "two equal (or two zero) singular values do it, for qr a matrix of low rank, for logdet a singular matrix.",
    confirm="`torch.linalg.eigvalsh(A).diff().min()`, or `torch.linalg.svdvals(A).diff()`: a gap of 0 or near it "
    "is the cause.",
    fix="Compute only what you need: `torch.linalg.eigvalsh(A)` and `torch.linalg.svdvals(A)` have finite "
    "gradients there. For whitening use `torch.linalg.cholesky(cov + 1e-4 * eye)`, whose gradient does not "
    "divide by gaps. If you need the vectors, separate the eigenvalues: `A + torch.diag(1e-3 * "
    "torch.arange(n))`; adding a multiple of the identity shifts all of them alike and does not help.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.linalg.eigh.html",
)
def degenerate_decomposition(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    if _sign(facts) != "degenerate-decomposition":
        return None
    op = (origin.where.op or "").removeprefix("linalg_")
    return answer(
        facts,
        "degenerate-decomposition",
        f"differentiates {op} of a matrix with equal or zero eigenvalues or singular values"
        if origin.during == "backward"
        else f"gives {op} a matrix that it can't decompose",
        Fix(
            "Separate the eigenvalues, or use cholesky, whose derivative does not divide by their gaps.",
            "A + torch.diag(1e-3 * torch.arange(n))",
        ),
    )


@rule(
    code="nan/overflow",
    title="A value becomes too large for its dtype and turns into inf.",
    symptom="The loss is inf, or NaN one op later. It often follows some ordinary steps, with one batch "
    "whose values are larger than the others.",
    cause="Every dtype has a largest number: 65,504 in float16, about 3.4e38 in float32 and bfloat16. exp gets there "
    "quickly: exp(11.1) is inf in float16, exp(88.8) in float32, exp(709.8) in float64.",
    confirm="Compare the largest input of the op, `x.abs().max()`, with `torch.finfo(x.dtype).max`. If it is "
    "above the numbers given here, this is the cause.",
    fix="Keep the input of exp in a range: `logvar.clamp(-30, 20)` before `torch.exp`. Better, stay in log space: "
    "`torch.logsumexp(x, -1)` for log of a sum of exp, `F.softplus(x)` for log(1 + exp(x)), "
    "`F.cross_entropy(logits, y)` in place of softmax and log. If it happens in float16 only, run that "
    "module in float32 or in bfloat16.",
    reference="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
)
def overflow(facts: NanFacts) -> Finding | None:
    origin = facts.origin
    wider = "x.float()" if origin.dtype == "float16" else "x.double()"
    general = Fix(
        "Bound the values before this op, or compute it in a wider dtype.",
        f"x = x.clamp(-1e4, 1e4)  # or normalize the input, or {wider}",
    )
    if origin.intended:
        clause = f"{verb(origin.where, 'lets', 'let')} the infinity of a mask reach the loss"
        return answer(facts, "overflow", clause, general)
    settings = facts.history.nonfinite_settings
    if origin.during == "optimizer" and settings:
        name, value = next(iter(settings.items()))
        clause = f"updates the weights with {name}={value} in {facts.history.optimizer}"
        cure = Fix("Give the optimizer a finite number.", f"optimizer.param_groups[0][{name!r}] = 0.01")
        return answer(facts, "overflow", clause, cure)
    # a bound on exp's operand whose result can still be squared: exp overflows at 11.1 in float16, at 88.7 in float32
    limit = 5 if origin.dtype == "float16" else 30
    bounded = f".clamp(-{limit}, {limit})"
    fixes = {
        "exp": Fix("Bound the operand.", f"torch.exp(x{bounded})"),
        "to": Fix("Bound what is cast, or keep this part in float32 or bfloat16, which has its range.", "x.float()"),
    }
    place = "where it is cast" if origin.op == "to" else f"in {origin.where.op}"
    clause = f"{verb(origin.where, 'makes', 'make')} a value too large for {origin.dtype} {place}"
    return answer(facts, "overflow", clause, fixes.get(origin.op, general))


def _sign(facts: NanFacts) -> str:
    """What failed, where the op tells it: in the forward, in the user's own backward, in the optimizer."""
    origin = facts.origin
    if origin.during == "optimizer" and facts.history.nonfinite_settings:
        return "overflow"
    return backward_sign(origin) if origin.during == "backward" else forward_sign(origin)


# -- one word for what failed ------------------------------------------------------------------------------------------


LOGS = frozenset({"log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "kl_div", "binary_cross_entropy"})
DIVISIONS = frozenset({"div", "reciprocal", "remainder", "fmod", "addcdiv", "floor_divide", "atan2", "rsqrt"})
DOMAINS = frozenset(
    "acos asin acosh atanh logit erfinv special_erfinv lgamma digamma polygamma sin cos tan special_ndtri".split()
)
PRODUCTS = frozenset(
    "mul mm bmm addmm baddbmm mv addmv dot addcmul convolution linear addbmm prod cumprod outer ger xlogy "
    "mkldnn_convolution embedding_bag".split()
)
SOFTMAXES = frozenset({"softmax", "log_softmax"})
DECOMPOSITIONS = tuple(
    "linalg_eig linalg_svd linalg_inv linalg_qr linalg_cholesky linalg_solve linalg_lu svd cholesky linalg_det "
    "linalg_slogdet linalg_lstsq linalg_pinv linalg_ldl triangular_solve geqrf lu_unpack".split()
)
SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
AVERAGES = SPREADS | {"mean", "logsumexp", "nanmean", "median", "nanmedian", "quantile"}
NORMS = frozenset(
    "layer_norm batch_norm group_norm batch_norm_legit fused_rms_norm cudnn_batch_norm weight_norm_interface "
    "batch_norm_with_update cosine_similarity".split()
)
FILLS = frozenset({"scalar_tensor", "full", "full_like", "fill", "new_full"})
OVERFLOW_LIKE = frozenset({"overflow", "inf-minus-inf", "zero-times-inf", "grad-overflow"})


def is_decomposition(op: str) -> bool:
    return op.startswith(DECOMPOSITIONS)


def forward_sign(origin: OriginFact) -> str:
    """What failed in an op that ran forward (or that the user wrote in a backward)."""
    numbers = [v for v in origin.scalars.values() if isinstance(v, float)]
    torchs_own = origin.op in FILLS and origin.where.library is not None  # so its functions say "not defined here"
    if origin.made != "inf" and any(map(math.isnan, numbers)) and not torchs_own:
        return "input-nonfinite"
    infinite = any(map(math.isinf, numbers))
    if (origin.parents or infinite) and origin.made in ("nan", "mixed"):
        return _made_of_inf(origin)
    op = origin.op
    if origin.made == "nan" and origin.scalars.get("elements") == 0 and not is_decomposition(op):
        return "empty-reduction"
    for matches, sign in _FORWARD:
        word = sign(origin) if op in matches else None
        if word:
            return word
    if is_decomposition(op):
        return "degenerate-decomposition"
    return "overflow"


def _made_of_inf(origin: OriginFact) -> str:
    """A NaN that an infinity turned into."""
    op = origin.op
    if op in SOFTMAXES or "attention" in op:
        infs = sum(o.infs for o in origin.operands)
        return "inf-minus-inf" if infs and not origin.scalars.get("rows_all_masked") else "fully-masked-softmax"
    if op in DOMAINS:
        return "domain-error"
    if op in ("mul", "addcmul", "xlogy", "prod", "cumprod"):
        return "zero-times-inf"
    if op in PRODUCTS:
        return "zero-times-inf" if any(o.zeros and not o.bad for o in origin.operands) else "inf-minus-inf"
    if op == "pow":
        return "pow-domain"
    return "inf-minus-inf"


def _log(origin: OriginFact) -> str | None:
    operand = origin.operand("self", "other", "input") or (origin.operands[0] if origin.operands else None)
    if origin.op == "xlogy":
        operand = origin.operand("other") or operand
    floor = -1.0 if origin.op in ("log1p", "special_xlog1py") else 0.0
    low = None if operand is None else _low(operand)
    return "log-of-nonpositive" if low is None or low <= floor else None


def _division(origin: OriginFact) -> str | None:
    if origin.op == "rsqrt":
        operand = origin.operands[0] if origin.operands else None
        return "sqrt-of-negative" if operand and (_low(operand) or 0) < 0 else "div-by-zero"
    if origin.scalars.get("other") == 0:
        return "div-by-zero"
    below = origin.operand("tensor2") if origin.op == "addcdiv" else origin.operand("other")
    if below is None and origin.op in ("reciprocal",):
        below = origin.operands[0] if origin.operands else None
    if below is None:
        below = next((o for o in origin.operands if o.name.startswith(("other", "tensor2"))), None)
    return "div-by-zero" if below is not None and _zeros(below) else None


def _pow(origin: OriginFact) -> str | None:
    base, exponent = origin.operand("self"), origin.operand("exponent")
    power = origin.scalars.get("exponent", exponent.low_at_fault if exponent else None)
    if origin.made in ("nan", "mixed"):
        return "pow-domain"
    return "pow-domain" if base and _zeros(base) and power is not None and power < 0 else None


def _flat(origin: OriginFact) -> bool:
    """A norm of values that do not vary (or are all zero), with nothing added to the denominator:
    values of ordinary size."""
    high = max((max(abs(o.low or 0), abs(o.high or 0)) for o in origin.operands), default=0.0)
    return high < 1e15


def _average(origin: OriginFact) -> str | None:
    """Too few elements: none at all, or one where a variance needs two."""
    group = origin.scalars.get("group", 1.0)
    empty = origin.scalars.get("elements") == 0
    return "empty-reduction" if empty or (origin.op in SPREADS and group <= 1) else None


_FORWARD = (
    (LOGS, _log),
    ({"logdet"}, lambda o: "log-of-nonpositive"),
    (DIVISIONS, _division),
    ({"sqrt"}, lambda o: "sqrt-of-negative" if o.made != "inf" else None),
    ({"pow", "float_power"}, _pow),
    (AVERAGES, _average),
    (DOMAINS, lambda b: "domain-error"),
    (SOFTMAXES, lambda b: "fully-masked-softmax" if b.scalars.get("rows_all_masked") else None),
    (
        {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"},
        lambda b: "uninitialized-memory",
    ),
    (NORMS, lambda b: "div-by-zero" if _flat(b) else None),
    (FILLS, lambda b: "domain-error" if b.made == "nan" else None),
    ({"nll_loss"}, lambda b: "all-labels-ignored" if b.made == "nan" else None),
    ({"ctc_loss"}, lambda b: "ctc-infeasible"),
)


def backward_sign(origin: OriginFact) -> str:
    """What failed in the derivative of a forward op (`birth.where.op`)."""
    op = origin.where.op or ""
    if origin.custom:
        return forward_sign(origin)
    if origin.parents and origin.made == "nan":
        return _made_of_inf(origin) if origin.op in PRODUCTS else "inf-minus-inf"
    if op in ("sqrt", "hypot") or op in SPREADS or op.startswith("linalg_vector_norm"):
        return "sqrt-grad-at-zero"
    if op in ("pow", "float_power"):
        return _pow_derivative(origin)
    if is_decomposition(op):
        return "degenerate-decomposition"
    if op in DOMAINS:
        return "domain-error"
    zero = any(_zeros(o) for o in origin.operands if o.name.startswith(("other", "tensor2")))
    if op in LOGS and zero:
        return "log-of-nonpositive"
    if op in DIVISIONS and zero:
        return "div-by-zero"
    return "grad-overflow"


def _pow_derivative(origin: OriginFact) -> str:
    power, own = origin.scalars.get("forward_exponent"), origin.scalars.get("exponent")
    if power == 0.5:
        return "sqrt-grad-at-zero"
    if origin.op == "pow" and own is not None and own < 0:  # the power in a second derivative
        return "pow-domain"
    return "pow-domain" if power is None or power < 1 else "grad-overflow"


def _low(operand: Operand) -> float | None:
    return operand.low_at_fault if operand.low_at_fault is not None else operand.low


def _zeros(operand: Operand) -> bool:
    if operand.zeros_at_fault is not None:
        return operand.zeros_at_fault > 0
    return operand.zeros > 0
