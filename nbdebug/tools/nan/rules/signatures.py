"""What kind of arithmetic failed: pure functions from an origin to one word.

A word is the last part of a code ("div-by-zero"). These look at one op and its operands only; the rules add what can be
told from the run around it (labels, learning rate, what absorbed the value).
"""

from __future__ import annotations

import math

from nbdebug.tools.nan.facts import Operand, OriginFact

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
    infinite = any(isinstance(v, float) and v in (math.inf, -math.inf) for v in origin.scalars.values())
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
    (FILLS, lambda b: "domain-error" if b.made == "nan" else None),  # how torch's own functions say "not defined here"
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
