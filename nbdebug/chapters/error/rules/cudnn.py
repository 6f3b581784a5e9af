"""The rule over what cuDNN and cuBLAS would not compute: what they were given, and what of it they can't take."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_cuda import CudnnFacts, Layout
from nbdebug.chapters.error.facts_parts import as_code
from nbdebug.finding import Finding, Fix

MOST_ELEMENTS = 2**31 - 1
"""cuDNN counts elements in 32 bits: https://docs.nvidia.com/deeplearning/cudnn/ (limits of the legacy API)."""
LITTLE = 0.05
"""Of a card's memory: with less free than that a workspace is what fails. Our choice."""
MEMORY = (
    "no engine",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)


@rule(
    code="error/cudnn-not-supported",
    title="cuDNN or cuBLAS will not compute what it is given.",
    symptom="cuDNN error: CUDNN_STATUS_NOT_SUPPORTED, CUDNN_STATUS_EXECUTION_FAILED; GET was unable to find an engine "
    "to execute this computation; Unable to find a valid cuDNN algorithm to run convolution; "
    "CUBLAS_STATUS_NOT_SUPPORTED.",
    cause="The library has kernels for certain layouts, dtypes and sizes. A tensor with gaps in memory (a slice, an "
    "expand), more than 2³¹ elements, bfloat16 on a card before Ampere, or too little free memory for the "
    "workspace leave it without one.",
    confirm="`x.is_contiguous(), x.dtype, x.numel()`; `torch.cuda.mem_get_info()`; the same within "
    "`torch.backends.cudnn.flags(enabled=False)`.",
    fix="`x.contiguous()` before the layer, a smaller batch, another dtype; or that layer without cuDNN.",
    reference="https://docs.nvidia.com/deeplearning/cudnn/backend/latest/",
)
def cudnn_not_supported(facts: CudnnFacts) -> Finding | None:
    op = f"`{facts.op}`" if facts.op else "the op"
    rows = [
        {
            "tensor": layout.part.name,
            "dtype": layout.part.fact.dtype,
            "shape": list(layout.part.fact.shape),
            "strides": list(layout.strides),
            "contiguous": layout.contiguous,
            "device": layout.part.fact.device,
        }
        for layout in facts.operands
    ]
    card = facts.card
    evidence = {
        "status": facts.status,
        "operands": rows,
        "free memory": card.free,
        "memory": card.total,
        "card": f"{card.name} {card.capability}".strip() or "not known",
    }
    return Finding(
        "error/cudnn-not-supported",
        f"{facts.library} will not compute {op}: {_reason(facts)}",
        facts.raised.where,
        evidence,
        _fixes(facts),
    )


def _loose(facts: CudnnFacts) -> Layout | None:
    """A tensor of the user's that does not lie densely."""
    return next(
        (lay for lay in facts.operands if not lay.contiguous and not lay.dense),
        next((lay for lay in facts.operands if not lay.contiguous), None),
    )


def _large(facts: CudnnFacts) -> Layout | None:
    return next((lay for lay in facts.operands if lay.elements > MOST_ELEMENTS), None)


def _short_of_memory(facts: CudnnFacts) -> bool:
    free, total = facts.card.free, facts.card.total
    return facts.status in MEMORY and free is not None and total is not None and free < LITTLE * total


def _old_card(facts: CudnnFacts) -> bool:
    """bfloat16 came with Ampere, sm_80."""
    digits = facts.card.capability.removeprefix("sm_")
    return digits.isdigit() and int(digits) < 80 and any(lay.part.fact.dtype == "bfloat16" for lay in facts.operands)


def _reason(facts: CudnnFacts) -> str:
    large, loose = _large(facts), _loose(facts)
    if large is not None:
        return f"{large.part.told} has {large.elements:,} elements, and it counts in 32 bits (to {MOST_ELEMENTS:,})"
    if _old_card(facts):
        return f"bfloat16 is not computed by this card ({facts.card.capability}; it takes sm_80 or newer)"
    if _short_of_memory(facts):
        free, total = facts.card.free or 0, facts.card.total or 1
        return f"{free / 2**20:,.0f} MiB of {total / 2**20:,.0f} MiB are free, too little for its workspace"
    if loose is not None:
        gaps = "with gaps" if not loose.dense else "in another order"
        shape = list(loose.part.fact.shape)
        return f"{loose.part.told} lies in memory {gaps} (strides {list(loose.strides)} for {shape})"
    given = facts.operands[0].part if facts.operands else None
    said = f" for {given.told}, {given.fact}" if given is not None else ""
    return f"it has no way to do it{said} ({facts.status})"


def _fixes(facts: CudnnFacts) -> tuple[Fix, ...]:
    large, loose, found = _large(facts), _loose(facts), []
    if large is not None:
        found.append(
            Fix("Compute it in pieces.", f"out = torch.cat([layer(part) for part in {_name(large)}.split(64)])")
        )
    elif _old_card(facts):
        found.append(Fix("Use float16 on this card.", "torch.autocast('cuda', dtype=torch.float16)"))
    elif _short_of_memory(facts):
        found.append(
            Fix(
                "Make room: a smaller batch, or what is no longer needed given back.",
                "torch.backends.cudnn.benchmark = False   # and a smaller batch_size",
            )
        )
    elif loose is not None:
        worked, after = (facts.dense.worked, facts.dense.after) if facts.dense is not None else (None, {})
        code = f"{_name(loose)} = {_name(loose)}.contiguous()"
        found.append(Fix("Give it a tensor without gaps.", code, worked, after))
    if facts.library == "cuDNN":
        worked, after = (facts.without.worked, facts.without.after) if facts.without is not None else (None, {})
        call = as_code(facts.op) if facts.op else "layer"
        found.append(
            Fix(
                "Or let torch's own kernels do it." if found else "Let torch's own kernels do it.",
                f"with torch.backends.cudnn.flags(enabled=False):\n    out = {call}(x)",
                worked,
                after,
            )
        )
    return tuple(found) or (Fix("See whether another dtype is computed.", "x = x.float()"),)


def _name(layout: Layout) -> str:
    return layout.part.name if layout.part.known else "x"
