"""What errors of the card's own libraries need: what was asked of them, what the card and this torch are."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.tools.errors.facts import NOWHERE, ArgumentFact, Raised, TriedFix, as_code
from nbdebug.tools.errors.rules.indices import OutOfRange


@dataclasses.dataclass(frozen=True)
class CudaCard:
    """torch: its version; built: the CUDA that it was built for, "" without; available: whether it finds a card;
    count: how many; name, capability ("sm_90"): of the first; kernels: the architectures that this torch holds; free,
    total: bytes of its memory, None where not known."""

    torch: str = ""
    built: str = ""
    available: bool = False
    count: int = 0
    name: str = ""
    capability: str = ""
    kernels: tuple[str, ...] = ()
    free: int | None = None
    total: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory. dense: without gaps, in any order of its dimensions."""

    part: ArgumentFact
    strides: tuple[int, ...]
    contiguous: bool
    dense: bool
    elements: int


@dataclasses.dataclass(frozen=True)
class CudnnFacts:
    """status: what the library said ("CUDNN_STATUS_NOT_SUPPORTED"), "no engine" where it found no way to compute it.
    op: the module or function; operands: what it was given; without: the same without cuDNN, tried; dense: the same on
    contiguous copies, tried."""

    raised: Raised
    library: str
    status: str
    op: str = ""
    operands: tuple[Layout, ...] = ()
    card: CudaCard = dataclasses.field(default_factory=CudaCard)
    without: TriedFix | None = None
    dense: TriedFix | None = None


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """No card to work with. kind: "not built", "no driver", "old driver", "no kernel", "not there" (fewer cards),
    "load" (a file saved from a card), "none". wanted: the expression that asked for it; asked: the card's number."""

    raised: Raised
    kind: str
    card: CudaCard = dataclasses.field(default_factory=CudaCard)
    wanted: str = ""
    asked: int | None = None
    visible: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """An op of the user's that fails with an assert on a card when an index is out of range. kind: "embedding" or
    "target"; what: the module or function; size: how many rows or classes; argument: the index as it is written there;
    found: where a copy on the host shows that it is beyond, with that copy's name; spared: a label left out."""

    kind: str
    what: str
    size: int
    argument: str
    where: Where = NOWHERE
    spared: int | None = None
    copy: str = ""
    found: OutOfRange | None = None
    checked: bool = False


@dataclasses.dataclass(frozen=True)
class AssertFacts:
    """kind: "assert", "memory access", "library" (cuBLAS or cuDNN failed after it). uses: the ops that can have failed,
    those that are proven guilty first."""

    raised: Raised
    kind: str
    uses: tuple[Use, ...] = ()
    blocking: bool = False


@rule(
    code="error/cuda-unavailable",
    title="CUDA is asked for, and this torch and this machine have none that fits.",
    symptom="Torch not compiled with CUDA enabled; Found no NVIDIA driver; no kernel image is available for execution "
    "on the device; invalid device ordinal; Attempting to deserialize object on a CUDA device.",
    cause="The installed torch is the CPU build, the driver is missing or older than the CUDA that torch was built "
    "for, the card is older or newer than the kernels in this build, fewer cards are visible than the number "
    "asked for, or a file keeps its tensors on a card that is not here.",
    confirm="`torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()`; "
    "`nvidia-smi`.",
    fix='Choose the device once (`device = "cuda" if torch.cuda.is_available() else "cpu"`), load with '
    "`map_location`, install the build of torch that fits the driver.",
    reference="https://pytorch.org/get-started/locally/",
)
def cuda_unavailable(facts: CardFacts) -> Finding | None:
    card = facts.card
    evidence = {
        "torch": card.torch,
        "built for CUDA": card.built or "none",
        "a card answers": card.available,
        "cards": card.count,
        "card": card.name or "none",
        "capability": card.capability or "not known",
        "kernels for": list(card.kernels),
        "CUDA_VISIBLE_DEVICES": "set" if facts.visible else "not set",
    }
    subject = f"`{facts.wanted}`" if facts.wanted else "this line"
    return Finding("error/cuda-unavailable", _title(facts, subject), facts.raised.where, evidence, _fixes(facts))


def _title(facts: CardFacts, subject: str) -> str:
    card = facts.card
    if facts.kind == "load":
        return f"The file keeps its tensors on a card, {subject} brings them back to it, and {_none(facts)}"
    if facts.kind == "not there":
        number = f"cuda:{facts.asked}" if facts.asked is not None else "a further card"
        last = f", the last of them cuda:{card.count - 1}" if card.count else ""
        return f"{subject[:1].upper() + subject[1:]} asks for {number}, and {card.count} cards are visible here{last}"
    if facts.kind == "no kernel":
        return (
            f"The card is {card.capability or 'of another kind'}, and this torch ({card.torch}) holds kernels for "
            f"{', '.join(card.kernels) or 'others'}"
        )
    if facts.kind == "old driver":
        return f"The driver is older than CUDA {card.built or 'of this torch'}, for which torch {card.torch} was built"
    return f"{subject[:1].upper() + subject[1:]} asks for CUDA, and {_none(facts)}"


def _none(facts: CardFacts) -> str:
    card = facts.card
    if not card.built:
        return f"this torch ({card.torch}) was built without it"
    if facts.kind == "no driver":
        return "no NVIDIA driver is found on this machine"
    if card.available and facts.asked is not None and facts.asked >= card.count:
        return f"{card.count} cards are visible here"
    return "no card answers" + (" (CUDA_VISIBLE_DEVICES is set)" if facts.visible else "")


def _fixes(facts: CardFacts) -> tuple[Fix, ...]:
    fixes = []
    if facts.kind == "load":
        fixes.append(Fix("Load onto the host, then move.", 'state = torch.load(path, map_location="cpu")'))
    elif facts.kind == "not there":
        fixes.append(Fix("Take a card that is there.", 'device = torch.device("cuda:0")'))
    elif facts.kind in ("no kernel", "old driver"):
        fixes.append(
            Fix(
                "Install the build of torch that fits: one for this driver's CUDA, of a release that knows the card.",
                "nvidia-smi   # the driver's CUDA stands in its first lines",
            )
        )
    else:
        fixes.append(
            Fix(
                "Choose the device once, and use it everywhere.",
                'device = "cuda" if torch.cuda.is_available() else "cpu"\nmodel.to(device)',
            )
        )
        fixes.append(
            Fix(
                "If this machine has a card: install the CUDA build of torch.",
                "nvidia-smi   # the driver's CUDA stands in its first lines",
            )
        )
    return tuple(fixes)


@rule(
    code="error/device-assert",
    title="A kernel on the card failed earlier than the line that shows it.",
    symptom="CUDA error: device-side assert triggered; an illegal memory access was encountered; CUBLAS_STATUS_… in a "
    "line that is right. Every further use of the card fails as well.",
    cause="Kernels run while the program goes on, so the error shows at a later line. On a card an index out of range "
    "(a token in an embedding, a class number in a loss, a gather) is an assert; so are probabilities outside "
    "of 0…1 in BCELoss and a broken distribution in multinomial. After it nothing on the card can be read.",
    confirm="Restart the kernel and run with CUDA_LAUNCH_BLOCKING=1, or run the same step on the CPU: it says the "
    "index.",
    fix="Hold `ids.max()` against the rows of the embedding, and `target.max()` against the number of classes, before "
    "they go to the card.",
    reference="https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
)
def device_assert(facts: AssertFacts) -> Finding | None:
    kind = {
        "assert": "An assert failed on the card",
        "library": "A library of the card's failed",
        "memory access": "A kernel read or wrote memory that is not its own",
    }[facts.kind]
    late = "" if facts.blocking else ", at this line or before it: kernels run while the program goes on"
    title = kind + late + _candidates(facts)
    rows = [
        {
            "op": use.what,
            "kind": "rows" if use.kind == "embedding" else "classes",
            "valid": f"0 to {use.size - 1}",
            "index": use.argument or "not known",
            "line": use.where.line,
            "its copy on the host": "in range" if use.checked else "not at hand",
        }
        for use in facts.uses[:12]
    ]
    evidence = {
        "what can have failed": rows,
        "CUDA_LAUNCH_BLOCKING": "1" if facts.blocking else "not set",
        "message": facts.raised.message.partition("\n")[0][:200],
    }
    return Finding("error/device-assert", title, facts.raised.where, evidence, _assert_fixes(facts))


def _suspects(facts: AssertFacts) -> list[Use]:
    """Those whose index was not held against a copy on the host."""
    return [use for use in facts.uses if not use.checked]


def _candidates(facts: AssertFacts) -> str:
    ops = [f"`{use.what}` ({use.size} {'rows' if use.kind == 'embedding' else 'classes'})" for use in _suspects(facts)]
    return f". What can fail so here: {', '.join(ops[:3])}" if ops and facts.kind != "memory access" else ""


def _assert_fixes(facts: AssertFacts) -> tuple[Fix, ...]:
    restart = Fix(
        "Restart the kernel and have each kernel waited for: the error then shows at its line. Or run one "
        "step on the CPU.",
        'import os\nos.environ["CUDA_LAUNCH_BLOCKING"] = "1"   # before torch is imported',
    )
    checks = "\n".join(
        f"assert 0 <= {use.argument}.min() and {use.argument}.max() < {use.size}   # {use.what}"
        for use in _suspects(facts)[:4]
        if use.argument.replace(".", "").replace("_", "").isalnum()
    )
    check = (Fix("Check what is looked up, right before the line.", checks),) if checks else ()
    return (restart, *check)


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
        _cudnn_fixes(facts),
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
        return f"{large.part.phrase} has {large.elements:,} elements, and it counts in 32 bits (to {MOST_ELEMENTS:,})"
    if _old_card(facts):
        return f"bfloat16 is not computed by this card ({facts.card.capability}; it takes sm_80 or newer)"
    if _short_of_memory(facts):
        free, total = facts.card.free or 0, facts.card.total or 1
        return f"{free / 2**20:,.0f} MiB of {total / 2**20:,.0f} MiB are free, too little for its workspace"
    if loose is not None:
        gaps = "with gaps" if not loose.dense else "in another order"
        shape = list(loose.part.fact.shape)
        return f"{loose.part.phrase} lies in memory {gaps} (strides {list(loose.strides)} for {shape})"
    argument = facts.operands[0].part if facts.operands else None
    operand = f" for {argument.phrase}, {argument.fact}" if argument is not None else ""
    return f"it has no way to do it{operand} ({facts.status})"


def _cudnn_fixes(facts: CudnnFacts) -> tuple[Fix, ...]:
    large, loose, fixes = _large(facts), _loose(facts), []
    if large is not None:
        fixes.append(
            Fix("Compute it in pieces.", f"out = torch.cat([layer(part) for part in {_name(large)}.split(64)])")
        )
    elif _old_card(facts):
        fixes.append(Fix("Use float16 on this card.", "torch.autocast('cuda', dtype=torch.float16)"))
    elif _short_of_memory(facts):
        fixes.append(
            Fix(
                "Make room: a smaller batch, or what is no longer needed given back.",
                "torch.backends.cudnn.benchmark = False   # and a smaller batch_size",
            )
        )
    elif loose is not None:
        worked, after = (facts.dense.worked, facts.dense.after) if facts.dense is not None else (None, {})
        code = f"{_name(loose)} = {_name(loose)}.contiguous()"
        fixes.append(Fix("Give it a tensor without gaps.", code, worked, after))
    if facts.library == "cuDNN":
        worked, after = (facts.without.worked, facts.without.after) if facts.without is not None else (None, {})
        call = as_code(facts.op) if facts.op else "layer"
        fixes.append(
            Fix(
                "Or let torch's own kernels do it." if fixes else "Let torch's own kernels do it.",
                f"with torch.backends.cudnn.flags(enabled=False):\n    out = {call}(x)",
                worked,
                after,
            )
        )
    return tuple(fixes) or (Fix("See whether another dtype is computed.", "x = x.float()"),)


def _name(layout: Layout) -> str:
    return layout.part.name if layout.part.known else "x"
