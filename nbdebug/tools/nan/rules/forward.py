"""Rules for the arithmetic itself, in the order of the catalogue. The last one takes whatever no other recognised."""

from __future__ import annotations

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.nan.facts import NanFacts, OriginFact
from nbdebug.tools.nan.rules.signatures import backward_sign, forward_sign
from nbdebug.tools.nan.rules.wording import answer, fix, verb


@rule(
    code="nan/div-by-zero",
    title="Something was divided by zero.",
    symptom="Some rows of the output are inf, or NaN where the numerator was zero too. The other rows are fine.",
    cause="x/0 is inf and 0/0 is NaN; no error is raised. The zero is usually an empty count (a mask that keeps "
    "nothing), the length of a vector that is all zeros, or a width or a spread that is zero.",
    confirm="Count the zeros in the denominator: `(d == 0).sum()`. An eps that is meant to help may itself be "
    "zero: 1e-8 is 0 in float16.",
    fix="For counts: `total / count.clamp_min(1)`. For unit vectors: `F.normalize(v, dim=-1)`. For spreads: `x / "
    "(std + 1e-6)`. To leave bad rows out, choose them before dividing: `a[keep] / d[keep]`; `torch.where` "
    "after the division does not repair the gradient.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
)
def div_by_zero(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "div-by-zero":
        return None
    below = birth.operand("other")
    least = "1" if below is not None and below.dtype.startswith(("int", "uint")) else "1e-6"
    return answer(
        facts,
        "div-by-zero",
        f"{verb(birth.where, 'divides', 'divide')} by zero",
        fix(
            birth,
            "Keep the denominator away from zero.",
            f"{{}}.clamp_min({least})",
            f"a / b.clamp_min({least})",
            operand=1,
        ),
    )


@rule(
    code="nan/log-of-nonpositive",
    title="log was given zero or a negative number.",
    symptom="The loss is inf or NaN once the model has become certain: a probability has reached exactly 0, or 1 "
    "in log(1 - p). In the backward it shows as inf or NaN gradients beside an ordinary loss.",
    cause="log(0) is -inf and log of a negative number is NaN. softmax gives an exact 0 when a score lies more "
    "than about 104 below the best one (float32), sigmoid gives an exact 1 from about 17 on.",
    confirm="Count them: `(p <= 0).sum()`, at log's input. log(1 - p) has its zero where p is 1.",
    fix="Do both in one op, from the scores: `F.log_softmax(scores, -1)`, `F.logsigmoid(s)` for log(p), "
    "`F.logsigmoid(-s)` for log(1 - p), `F.binary_cross_entropy_with_logits`. Where there are no scores: "
    "`torch.log(p.clamp_min(1e-8))`. Adding 1e-8 to a p near 1, as in `torch.log(1 - (p + 1e-8))`, changes "
    "nothing in float32.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html",
)
def log_of_nonpositive(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "log-of-nonpositive":
        return None
    what = {"-inf": "zero", "nan": "a negative number"}.get(birth.made, "zero and of negative numbers")
    return answer(
        facts,
        "log-of-nonpositive",
        f"{verb(birth.where, 'takes', 'take')} the log of {what}",
        fix(
            birth,
            "Keep the operand above zero (or compute the log from the scores).",
            "{}.clamp_min(1e-8)",
            "torch.log(p.clamp_min(1e-8))",
        ),
    )


@rule(
    code="nan/sqrt-of-negative",
    title="sqrt was given a negative number.",
    symptom="NaN in a distance, a norm or a standard deviation, mostly between points that are nearly the same.",
    cause="sqrt of a negative number is NaN. The number should never be negative on paper, but a difference of "
    "two large, nearly equal numbers loses its last digits: E[x²] - E[x]² and |a|² + |b|² - 2ab can come "
    "out a little below zero.",
    confirm="Look at the smallest input: `x.min()`. A small negative number (-1e-5) is rounding; a large one "
    "means that the formula, or what the network puts out, needs another look.",
    fix="Use the function that does not cancel: `torch.cdist(a, b)`, `x.std(-1, correction=0)`, "
    "`torch.linalg.vector_norm(a - b, dim=-1)`. Or `torch.sqrt(x.clamp_min(1e-12))`: a small positive "
    "number, not 0, for the derivative of sqrt at 0 is inf. For an output that must be positive, such as a "
    "variance: `F.softplus(raw) + 1e-6`.",
    reference="https://github.com/pytorch/pytorch/pull/47240",
)
def sqrt_of_negative(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "sqrt-of-negative":
        return None
    return answer(
        facts,
        "sqrt-of-negative",
        f"{verb(birth.where, 'takes', 'take')} the root of a negative number",
        fix(birth, "Keep the operand above zero.", "{}.clamp_min(1e-12)", "torch.sqrt(x.clamp_min(1e-12))"),
    )


@rule(
    code="nan/pow-domain",
    title="A power was taken where it has no finite value or slope.",
    symptom="NaN where a negative number is raised to a fraction, inf where 0 is raised to a negative power; or "
    "a finite loss and an inf gradient where 0 is raised to a power between 0 and 1.",
    cause="(-8) ** (1/3) is NaN in torch: real powers of negative numbers exist for whole exponents only. The "
    "derivative of x ** p is p * x ** (p - 1), which is inf at x = 0 for 0 < p < 1. With a trainable "
    "exponent the derivative holds log(x), which is NaN for a negative base, whatever the exponent.",
    confirm="Look at the base: `(x < 0).sum()` and `(x == 0).sum()`, and at the exponent.",
    fix="Keep the base above zero: `x.clamp_min(1e-6).pow(p)`. To keep the sign: `x.sign() * "
    "x.abs().clamp_min(1e-6).pow(p)`. For a focal loss with gamma below 1 clamp `1 - p` likewise.",
    reference="https://github.com/pytorch/pytorch/issues/75405",
)
def pow_domain(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "pow-domain":
        return None
    slope = birth.during == "backward"
    return answer(
        facts,
        "pow-domain",
        f"{verb(birth.where, 'takes', 'take')} a power where it has no finite {'slope' if slope else 'value'}",
        fix(birth, "Keep the base above zero.", "{}.clamp_min(1e-6)", "x.clamp_min(1e-6).pow(p)"),
    )


@rule(
    code="nan/inf-minus-inf",
    title="Infinity was subtracted from infinity.",
    symptom="NaN a little after a mask, or after a maximum was subtracted: log-space sums, alignment lattices, "
    "beam scores.",
    cause="-inf minus -inf (and inf minus inf) is NaN. A row in which every entry is masked with -inf has -inf "
    "as its maximum, and `row - row.max()` is NaN in every entry.",
    confirm="Ask for rows without a finite entry: `torch.isinf(x).all(-1).nonzero()`.",
    fix="Mask with a large finite number in place of -inf: `x.masked_fill(mask, torch.finfo(x.dtype).min)`. Or "
    "keep the maximum finite: `peak = x.amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).min)`. "
    "`torch.logsumexp` of a row of -inf is -inf in the forward, but its gradient is NaN: leave such rows out "
    "before it.",
    reference="https://github.com/pytorch/pytorch/issues/49724",
)
def inf_minus_inf(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "inf-minus-inf":
        return None
    return answer(
        facts,
        "inf-minus-inf",
        f"{verb(birth.where, 'subtracts', 'subtract')} infinity from infinity in {birth.where.op}",
        Fix("Mask with a large finite number in place of -inf.", "x.masked_fill(mask, -1e4)"),
    )


@rule(
    code="nan/zero-times-inf",
    title="Zero was multiplied by infinity.",
    symptom="NaN in an entropy, a KL divergence or a masked loss, at entries that should have counted nothing.",
    cause="0 * inf is NaN, so a zero weight does not switch an infinite term off. p * log(p) at p = 0 is 0 * "
    "-inf; the same holds for loss * mask when the masked loss is inf.",
    confirm="Look for the pair: `((a == 0) & torch.isinf(b)).sum()`. The inf came from the line before (a log, a "
    "mask, a division).",
    fix="For a forward value: `torch.special.entr(p)` is -p log p with 0 at p = 0, `torch.special.xlogy(q, p)` "
    "is q log p with 0 at q = 0; for training clamp first, `torch.special.entr(p.clamp_min(1e-8))`, as the "
    "slope at 0 is infinite. For masked actions: mask the scores with `torch.finfo(dtype).min` in place of "
    "-inf. Drop masked losses by index, `loss[mask]`, not by multiplication, or repair the inf where it is "
    "made.",
    reference="https://docs.pytorch.org/docs/stable/special.html#torch.special.xlogy",
)
def zero_times_inf(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "zero-times-inf":
        return None
    written = any(isinstance(v, float) and v in (float("inf"), float("-inf")) for v in birth.scalars.values())
    if written:
        return answer(
            facts,
            "zero-times-inf",
            f"{verb(birth.where, 'multiplies', 'multiply')} zero by infinity",
            Fix(
                "Fill the mask in place of multiplying by it.",
                'bias = torch.zeros_like(keep).masked_fill(keep == 0, float("-inf"))',
            ),
        )
    return answer(
        facts,
        "zero-times-inf",
        f"{verb(birth.where, 'multiplies', 'multiply')} zero by infinity",
        Fix(
            "Repair the infinity before the product: p * log p is torch.special.entr, q * log p is "
            "torch.special.xlogy; a mask should fill with a finite number.",
            "log_p = log_p.masked_fill(mask, 0.0)  # before p * log_p",
        ),
    )


@rule(
    code="nan/fully-masked-softmax",
    title="softmax was given a row in which everything is masked.",
    symptom="One row of the batch is NaN: a sentence of padding only, a graph without neighbours, a step without "
    "a legal action. After one update all weights are NaN.",
    cause="softmax of a row of -inf is 0/0, NaN. -inf in a mask is right as long as each row keeps one finite entry.",
    confirm="Ask for such rows: `mask.all(-1).nonzero()` (mask True where masked), before softmax.",
    fix="Leave one entry open in an empty row: `mask = mask & ~mask.all(-1, keepdim=True)`, and drop that row's "
    "output. `F.scaled_dot_product_attention` gives zeros for such a row; `nn.MultiheadAttention` does so "
    "only with `need_weights=False`. Replacing the NaN after softmax by `torch.nan_to_num` leaves NaN in the "
    "gradient.",
    reference="https://github.com/pytorch/pytorch/issues/41508",
)
def fully_masked_softmax(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "fully-masked-softmax":
        return None
    return answer(
        facts,
        "fully-masked-softmax",
        f"{verb(birth.where, 'gives', 'give')} softmax nothing but masked entries",
        Fix(
            "Leave one entry open where all are masked, and drop the result of that row.",
            "mask = mask & ~mask.all(-1, keepdim=True)",
        ),
    )


@rule(
    code="nan/empty-reduction",
    title="A mean or a variance was taken over too few elements.",
    symptom="NaN in one step among many, mostly the last batch of an epoch or one without any positive example. "
    "torch warns for std and var ('degrees of freedom is <= 0'), not for mean.",
    cause="The mean of nothing is 0/0. std and var divide by n - 1, so one element gives NaN too. Losses with "
    "reduction='mean' do the same over an empty selection.",
    confirm="Print the number of elements: `x.numel()`, or the size of the dimension that is reduced; for a mask "
    "`mask.sum()`.",
    fix="For sums over a mask: `(x * mask).sum() / mask.sum().clamp_min(1)`. For a spread of one: "
    "`x.std(correction=0)`, which is 0 there, and add an eps where you divide by it. For short last batches: "
    "`DataLoader(..., drop_last=True)`.",
    reference="https://github.com/pytorch/pytorch/issues/29372",
)
def empty_reduction(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "empty-reduction":
        return None
    count = birth.operands[0].elements if birth.operands else 0
    what = "nothing at all" if not count else "a single element"
    return answer(
        facts,
        "empty-reduction",
        f"takes the {birth.op} of {what}",
        Fix(
            "Leave such a batch out, or use the form that is defined there.",
            "x.std(correction=0)  # 0 for one element" if count else "(x * mask).sum() / mask.sum().clamp_min(1)",
        ),
    )


@rule(
    code="nan/domain-error",
    title="A function was given a number outside its domain.",
    symptom="NaN or inf from acos, asin, atanh, acosh, logit, erfinv and the like, in the forward or in the "
    "gradient only.",
    cause="acos and asin live on [-1, 1]; a cosine computed in float32 can be 1.0000001, and acos of it is NaN. "
    "At exactly ±1 the value is finite and the slope is infinite. atanh(1) and logit(0) are infinite, "
    "acosh below 1 is NaN.",
    confirm="Look at the range: `x.min(), x.max()`. A hair above 1 is rounding.",
    fix="For acos and asin: `torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))`; clamping to [-1, 1] repairs the value, "
    "not the slope. An angle between vectors comes out of `torch.atan2(cross, dot)` without trouble. "
    "`torch.logit(p, eps=1e-6)` clamps for you.",
    reference="https://github.com/pytorch/pytorch/issues/8069",
)
def domain_error(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "domain-error":
        return None
    edge = "at the edge of" if birth.during == "backward" else "outside"
    return answer(
        facts,
        "domain-error",
        f"{verb(birth.where, 'calls', 'call')} {birth.where.op} {edge} its domain",
        fix(
            birth,
            "Keep the operand inside the domain.",
            "{}.clamp(-1 + 1e-6, 1 - 1e-6)",
            "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))",
        ),
    )


@rule(
    code="nan/degenerate-decomposition",
    title="A matrix was decomposed whose eigenvalues or singular values coincide.",
    symptom="The forward of eigh, svd or logdet is finite, its gradient is NaN: on an identity matrix at the "
    "start, on a covariance of too few samples, on a matrix of low rank.",
    cause="The gradient of eigenvectors holds 1 / (λi - λj), inf where two eigenvalues are equal. For svd two "
    "equal (or two zero) singular values do it, for qr a matrix of low rank, for logdet a singular matrix.",
    confirm="`torch.linalg.eigvalsh(A).diff().min()`, or `torch.linalg.svdvals(A).diff()`: a gap of 0 or near it "
    "is the cause.",
    fix="Ask only for what you need: `torch.linalg.eigvalsh(A)` and `torch.linalg.svdvals(A)` have finite "
    "gradients there. For whitening use `torch.linalg.cholesky(cov + 1e-4 * eye)`, whose gradient does not "
    "divide by gaps. If you need the vectors, part the eigenvalues: `A + torch.diag(1e-3 * "
    "torch.arange(n))`; adding a multiple of the identity moves all of them alike and does not help.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.linalg.eigh.html",
)
def degenerate_decomposition(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    if _sign(facts) != "degenerate-decomposition":
        return None
    op = (birth.where.op or "").removeprefix("linalg_")
    return answer(
        facts,
        "degenerate-decomposition",
        f"differentiates {op} of a matrix whose values coincide"
        if birth.during == "backward"
        else f"gives {op} a matrix that it can't take apart",
        fix(
            birth,
            "Part the values, or use cholesky, whose derivative does not divide by their gaps.",
            "{0} + torch.diag(1e-3 * torch.arange({0}.size(-1)))",
            "A + torch.diag(1e-3 * torch.arange(n))",
        ),
    )


@rule(
    code="nan/overflow",
    title="A value became too large for its dtype and turned into inf.",
    symptom="The loss is inf, or NaN one op later. It often comes after some ordinary steps, with one batch "
    "whose values are larger than the others.",
    cause="Every dtype ends somewhere: float16 at 65,504, float32 and bfloat16 near 3.4e38. exp gets there "
    "quickly: exp(11.1) is inf in float16, exp(88.8) in float32, exp(709.8) in float64.",
    confirm="Look at the largest input of the op: `x.abs().max()`, beside `torch.finfo(x.dtype).max`. If it lies "
    "above the numbers given here, this is it.",
    fix="Keep exp's input in a range: `logvar.clamp(-30, 20)` before `torch.exp`. Better, stay in log space: "
    "`torch.logsumexp(x, -1)` for log of a sum of exp, `F.softplus(x)` for log(1 + exp(x)), "
    "`F.cross_entropy(logits, y)` in place of softmax and log. If it happens in float16 only, run that "
    "module in float32 or in bfloat16.",
    reference="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
)
def overflow(facts: NanFacts) -> Finding | None:
    birth = facts.birth
    limit = _limit(birth)
    bounded = f".clamp(-{limit}, {limit})"
    fixes = {
        "exp": fix(birth, "Bound the operand.", "{}" + bounded, f"torch.exp(x{bounded})"),
        "to": Fix("Keep this part in float32 (or use bfloat16, whose range is float32's).", "x.float()"),
    }
    general = Fix(
        "Bound the values before this op, or compute it in a wider dtype.",
        "x = x.clamp(-1e4, 1e4)  # or normalise the input, or x.double()",
    )
    if birth.intended:
        says = f"{verb(birth.where, 'lets', 'let')} a mask's infinity through to the loss"
        return answer(facts, "overflow", says, general)
    says = f"{verb(birth.where, 'makes', 'make')} a value too large for {birth.dtype} in {birth.where.op}"
    return answer(facts, "overflow", says, fixes.get(birth.op, general))


def _sign(facts: NanFacts) -> str:
    """What failed, where it is to be told by the op: in the forward, in the user's own backward, in the optimizer."""
    birth = facts.birth
    return backward_sign(birth) if birth.during == "backward" else forward_sign(birth)


def _limit(birth: OriginFact) -> int:
    """A bound on exp's operand whose result can still be squared:
    exp overflows at 11.1 in float16, at 88.7 in float32."""
    return 5 if birth.dtype == "float16" else 30
