"""Rules for the arithmetic itself, in the order of the catalogue. The last one takes whatever no other recognised."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts
from nbdebug.tools.nan.rules.signatures import backward_sign, forward_sign
from nbdebug.tools.nan.rules.wording import answer, verb


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
    return answer(
        facts,
        "div-by-zero",
        f"{verb(origin.where, 'divides', 'divide')} by zero",
        Fix("Keep the denominator away from zero.", f"a / b.clamp_min({least})"),
    )


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
    general = Fix(
        "Bound the values before this op, or compute it in a wider dtype.",
        "x = x.clamp(-1e4, 1e4)  # or normalize the input, or x.double()",
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
        "to": Fix("Keep this part in float32 (or use bfloat16, which has the range of float32).", "x.float()"),
    }
    clause = f"{verb(origin.where, 'makes', 'make')} a value too large for {origin.dtype} in {origin.where.op}"
    return answer(facts, "overflow", clause, fixes.get(origin.op, general))


def _sign(facts: NanFacts) -> str:
    """What failed, where the op tells it: in the forward, in the user's own backward, in the optimizer."""
    origin = facts.origin
    if origin.during == "optimizer" and facts.history.nonfinite_settings:
        return "overflow"
    return backward_sign(origin) if origin.during == "backward" else forward_sign(origin)
