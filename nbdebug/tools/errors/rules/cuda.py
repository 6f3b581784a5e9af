"""The causes of CUDA errors: no usable GPU, a failed kernel, an op that cuDNN or cuBLAS does not support."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link, Where
from nbdebug.text import count, listed, size
from nbdebug.tools.errors.facts import NOWHERE, ArgumentFact, Raised, TriedFix, as_code
from nbdebug.tools.errors.rules.indices import OutOfRange


@dataclasses.dataclass(frozen=True)
class CudaCard:
    """torch: its version; built: the CUDA version of its build, "" without; available: whether it finds a GPU; count:
    how many; name, capability ("sm_90"): of the first; kernels: the architectures in this build of torch; free, total:
    bytes of its memory, None where not known."""

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
    """The memory layout of a tensor. dense: without gaps, in any order of its dimensions."""

    part: ArgumentFact
    strides: tuple[int, ...]
    contiguous: bool
    dense: bool
    elements: int


@dataclasses.dataclass(frozen=True)
class CudnnFacts:
    """status: the library's code ("CUDNN_STATUS_NOT_SUPPORTED"), "no engine" where it found no kernel. op: the module
    or function; operands: its tensors; without: the trial without cuDNN; dense: the trial on contiguous copies."""

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
    """No usable GPU. kind: "not built", "no driver", "old driver", "no kernel", "not there" (fewer GPUs), "load" (a
    file saved from a GPU), "none". expression: the one that uses it; number: the GPU's number."""

    raised: Raised
    kind: str
    card: CudaCard = dataclasses.field(default_factory=CudaCard)
    expression: str = ""
    number: int | None = None
    visible: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """An op of the user's that fails with an assert on a GPU when an index is out of range. kind: "embedding" or
    "target"; what: the module or function; size: its rows or classes; argument: the text of the index; bad: its entries
    out of range, by a copy on the CPU; copy: that copy's name; spared: an ignored label."""

    kind: str
    what: str
    size: int
    argument: str
    where: Where = NOWHERE
    spared: int | None = None
    copy: str = ""
    bad: OutOfRange | None = None
    checked: bool = False


@dataclasses.dataclass(frozen=True)
class AssertFacts:
    """kind: "assert", "memory access", "library" (cuBLAS or cuDNN failed after it). uses: the ops that may have failed,
    those with a proven error first."""

    raised: Raised
    kind: str
    uses: tuple[Use, ...] = ()
    blocking: bool = False


@rule(
    code="error/cuda-unavailable",
    title="The program uses CUDA, but this torch or this machine has no usable GPU.",
    symptom="Torch not compiled with CUDA enabled; Found no NVIDIA driver; no kernel image is available for execution "
    "on the device; invalid device ordinal; Attempting to deserialize object on a CUDA device.",
    cause="The installed torch is the CPU build, the driver is missing or older than the CUDA that torch was built "
    "for, the GPU is older or newer than the kernels in this build, the requested number is higher than that of "
    "the visible GPUs, or a file has tensors of a GPU that does not exist here.",
    confirm="`torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()`; "
    "`nvidia-smi`.",
    fix='Choose the device once (`device = "cuda" if torch.cuda.is_available() else "cpu"`), load with '
    "`map_location`, install the build of torch that matches the driver.",
    reference="https://pytorch.org/get-started/locally/",
)
def cuda_unavailable(facts: CardFacts) -> Finding | None:
    card = facts.card
    evidence = {
        "torch": card.torch,
        "built for CUDA": card.built or "none",
        "GPU available": card.available,
        "GPUs": card.count,
        "GPU": card.name or "none",
        "capability": card.capability or "not known",
        "kernels for": list(card.kernels),
        "CUDA_VISIBLE_DEVICES": "set" if facts.visible else "not set",
    }
    subject = f"`{facts.expression}`" if facts.expression else "this line"
    return Finding("error/cuda-unavailable", _title(facts, subject), facts.raised.where, evidence, _fixes(facts))


def _title(facts: CardFacts, subject: str) -> str:
    card = facts.card
    if facts.kind == "load":
        return f"The tensors in the file are from a GPU, and {subject} loads them to it, but {_none(facts)}"
    if facts.kind == "not there":
        number = f"cuda:{facts.number}" if facts.number is not None else "another GPU"
        last = f" (the last is cuda:{card.count - 1})" if card.count else ""
        return f"{subject[:1].upper() + subject[1:]} uses {number}, but {_visible(card)} here{last}"
    if facts.kind == "no kernel":
        return (
            f"The GPU is {card.capability or 'of another architecture'}, but this torch ({card.torch}) has kernels for "
            f"{', '.join(card.kernels) or 'others'}"
        )
    if facts.kind == "old driver":
        return f"The driver is older than CUDA {card.built or 'of this torch'}, for which torch {card.torch} was built"
    return f"{subject[:1].upper() + subject[1:]} uses CUDA, but {_none(facts)}"


def _visible(card: CudaCard) -> str:
    return f"{count(card.count, 'GPU')} {'is' if card.count == 1 else 'are'} visible"


def _none(facts: CardFacts) -> str:
    card = facts.card
    if not card.built:
        return f"this torch ({card.torch}) was built without it"
    if facts.kind == "no driver":
        return "this machine has no NVIDIA driver"
    if card.available and facts.number is not None and facts.number >= card.count:
        return f"{_visible(card)} here"
    return "no GPU is available" + (" (CUDA_VISIBLE_DEVICES is set)" if facts.visible else "")


def _fixes(facts: CardFacts) -> tuple[Fix, ...]:
    fixes = []
    if facts.kind == "load":
        fixes.append(Fix("Load to the CPU, then move the model.", 'state = torch.load(path, map_location="cpu")'))
    elif facts.kind == "not there":
        fixes.append(Fix("Use a GPU that exists.", 'device = torch.device("cuda:0")'))
    elif facts.kind in ("no kernel", "old driver"):
        fixes.append(
            Fix(
                "Install a build of torch for this driver's CUDA version and this GPU.",
                "nvidia-smi   # its first lines show the driver's CUDA version",
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
                "If this machine has an NVIDIA GPU: install the CUDA build of torch.",
                "nvidia-smi   # its first lines show the driver's CUDA version",
            )
        )
    return tuple(fixes)


@rule(
    code="error/device-assert",
    title="A GPU kernel failed before the line that raises the error.",
    symptom="CUDA error: device-side assert triggered; an illegal memory access was encountered; CUBLAS_STATUS_… at a "
    "line that is correct. All later uses of the GPU fail as well.",
    cause="Kernels run while the program continues, so a later line raises the error. On a GPU an index out of range "
    "(a token in an embedding, a class number in a loss, a gather) is an assert; so are probabilities outside "
    "0…1 in BCELoss and an invalid distribution in multinomial. After that, nothing on the GPU can be read.",
    confirm="Restart the kernel and run with CUDA_LAUNCH_BLOCKING=1, or run the same step on the CPU, which "
    "names the index.",
    fix="Compare `ids.max()` with the rows of the embedding, and `target.max()` with the number of classes, before "
    "they are moved to the GPU.",
    reference="https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
)
def device_assert(facts: AssertFacts) -> Finding | None:
    kind = {
        "assert": "An assert failed on the GPU",
        "library": "cuBLAS or cuDNN failed",
        "memory access": "A kernel read or wrote outside its memory",
    }[facts.kind]
    late = "" if facts.blocking else ", at this line or before it: kernels run while the program continues"
    title = kind + late + _candidates(facts)
    rows = [
        {
            "op": use.what,
            "kind": "rows" if use.kind == "embedding" else "classes",
            "valid": f"0 to {use.size - 1}",
            "index": use.argument or "not known",
            "line": use.where.line,
            "copy on the CPU": "in range" if use.checked else "none",
        }
        for use in facts.uses[:12]
    ]
    evidence = {
        "ops that may have failed": rows,
        "CUDA_LAUNCH_BLOCKING": "1" if facts.blocking else "not set",
        "message": facts.raised.message.partition("\n")[0][:200],
    }
    return Finding("error/device-assert", title, facts.raised.where, evidence, _assert_fixes(facts))


def _suspects(facts: AssertFacts) -> list[Use]:
    """Those whose index has no copy on the CPU to compare."""
    return [use for use in facts.uses if not use.checked]


def _candidates(facts: AssertFacts) -> str:
    ops = [f"`{use.what}` ({use.size} {'rows' if use.kind == 'embedding' else 'classes'})" for use in _suspects(facts)]
    return f". It may be {' or '.join(ops[:3])}" if ops and facts.kind != "memory access" else ""


def _assert_fixes(facts: AssertFacts) -> tuple[Fix, ...]:
    restart = Fix(
        "Restart the notebook's kernel and make CUDA calls synchronous: the error is then raised at its own line. "
        "Or run one step on the CPU.",
        'import os\nos.environ["CUDA_LAUNCH_BLOCKING"] = "1"   # before torch is imported',
    )
    checks = "\n".join(
        f"assert 0 <= {use.argument}.min() and {use.argument}.max() < {use.size}   # {use.what}"
        for use in _suspects(facts)[:4]
        if use.argument.replace(".", "").replace("_", "").isalnum()
    )
    check = (Fix("Check the indices right before the line.", checks),) if checks else ()
    return (restart, *check)


MOST_ELEMENTS = 2**31 - 1
"""cuDNN counts elements in 32 bits: https://docs.nvidia.com/deeplearning/cudnn/ (limits of the legacy API)."""
LITTLE = 0.05
"""Share of the GPU's memory: with less free than that, allocating the workspace fails. Our choice."""
MEMORY = (
    "no engine",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)


@rule(
    code="error/cudnn-not-supported",
    title="cuDNN or cuBLAS does not support this op.",
    symptom="cuDNN error: CUDNN_STATUS_NOT_SUPPORTED, CUDNN_STATUS_EXECUTION_FAILED; GET was unable to find an engine "
    "to execute this computation; Unable to find a valid cuDNN algorithm to run convolution; "
    "CUBLAS_STATUS_NOT_SUPPORTED.",
    cause="The library has kernels for certain layouts, dtypes and sizes. A tensor with gaps in memory (a slice, an "
    "expand), more than 2³¹ elements, bfloat16 on a GPU before Ampere, or too little free memory for the "
    "workspace leave no usable kernel.",
    confirm="`x.is_contiguous(), x.dtype, x.numel()`; `torch.cuda.mem_get_info()`; the same within "
    "`torch.backends.cudnn.flags(enabled=False)`.",
    fix="Call `x.contiguous()` before the layer, use a smaller batch or another dtype, or run the layer without cuDNN.",
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
        "GPU": f"{card.name} {card.capability}".strip() or "not known",
    }
    return Finding(
        "error/cudnn-not-supported",
        f"{facts.library} can't compute {op}: {_reason(facts)}",
        facts.raised.where,
        evidence,
        _cudnn_fixes(facts),
    )


def _loose(facts: CudnnFacts) -> Layout | None:
    """A tensor of the user's that is not contiguous, first one with gaps."""
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
        return f"{large.part.phrase} has {large.elements:,} elements, but its limit is {MOST_ELEMENTS:,} (32 bits)"
    if _old_card(facts):
        return f"this GPU does not support bfloat16 ({facts.card.capability}; it needs sm_80 or newer)"
    if _short_of_memory(facts):
        free, total = facts.card.free or 0, facts.card.total or 1
        return f"{size(free)} of {size(total)} are free, too little for its workspace"
    if loose is not None:
        gaps = "has gaps in memory" if not loose.dense else "has another order in memory"
        shape = list(loose.part.fact.shape)
        return f"{loose.part.phrase} {gaps} (strides {list(loose.strides)} for {shape})"
    argument = facts.operands[0].part if facts.operands else None
    operand = f" for {argument.phrase}, {argument.fact}" if argument is not None else ""
    return f"it has no kernel{operand} ({facts.status})"


def _cudnn_fixes(facts: CudnnFacts) -> tuple[Fix, ...]:
    large, loose, fixes = _large(facts), _loose(facts), []
    if large is not None:
        fixes.append(
            Fix("Compute it in parts.", f"out = torch.cat([layer(part) for part in {_name(large)}.split(64)])")
        )
    elif _old_card(facts):
        fixes.append(Fix("Use float16 on this GPU.", "torch.autocast('cuda', dtype=torch.float16)"))
    elif _short_of_memory(facts):
        fixes.append(
            Fix(
                "Free memory: use a smaller batch, or delete what is no longer needed.",
                "torch.backends.cudnn.benchmark = False   # and a smaller batch_size",
            )
        )
    elif loose is not None:
        worked, after = (facts.dense.worked, facts.dense.after) if facts.dense is not None else (None, {})
        code = f"{_name(loose)} = {_name(loose)}.contiguous()"
        fixes.append(Fix("Pass a contiguous tensor.", code, worked, after))
    if facts.library == "cuDNN":
        worked, after = (facts.without.worked, facts.without.after) if facts.without is not None else (None, {})
        call = as_code(facts.op) if facts.op else "layer"
        fixes.append(
            Fix(
                "Or use torch's own kernels." if fixes else "Use torch's own kernels.",
                f"with torch.backends.cudnn.flags(enabled=False):\n    out = {call}(x)",
                worked,
                after,
            )
        )
    return tuple(fixes) or (Fix("Try another dtype.", "x = x.float()"),)


def _name(layout: Layout) -> str:
    return layout.part.name if layout.part.known else "x"


@rule(
    code="error/cudnn-not-initialized",
    title="cuDNN can't start on this GPU.",
    symptom="cuDNN error: CUDNN_STATUS_NOT_INITIALIZED; CUDNN_STATUS_ALLOC_FAILED, at the first convolution or "
    "recurrent layer.",
    cause="cuDNN needs some hundred megabytes when it starts. The memory is full: torch's own cache, another process, "
    "or a notebook whose kernel still runs. Else cuDNN's library is of another version than torch was built with, "
    "mostly by LD_LIBRARY_PATH.",
    confirm="`torch.cuda.mem_get_info()` and nvidia-smi; `torch.backends.cudnn.version()`; a plain matrix product on "
    "the GPU works.",
    fix="Free memory and restart the kernel; take cuDNN's folder out of LD_LIBRARY_PATH, so that torch finds its own.",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
)
def cudnn_not_initialized(facts: CudnnFacts) -> Finding:
    free, total = facts.card.free, facts.card.total
    if free is not None and total is not None and free < LITTLE * total:
        why = f": {size(free)} of {size(total)} are free, too little for cuDNN itself"
    elif free is not None and total is not None:
        why = f", though {size(free)} of {size(total)} are free now: its library may be of another version"
    else:
        why = ": mostly the memory of the card is full"
    fixes = (
        Fix("See who holds the memory, and free it; then restart the kernel.", "%mem\n!nvidia-smi"),
        Fix(
            "See which cuDNN is loaded, and from where.",
            "torch.backends.cudnn.version(), os.environ.get('LD_LIBRARY_PATH')",
        ),
    )
    evidence = {
        "status": facts.status,
        "free memory": free,
        "memory": total,
        "GPU": f"{facts.card.name} {facts.card.capability}".strip() or "not known",
    }
    return Finding("error/cudnn-not-initialized", f"cuDNN can't start{why}", facts.raised.where, evidence, fixes)


@dataclasses.dataclass(frozen=True)
class AttentionFacts:
    """Attention for which no kernel is allowed or able. kernels: those that the user's code allows ("FLASH_ATTENTION"),
    () where it names none; by: the line that does; query: what goes in; masked: it has a mask; flash: the message is of
    the package flash-attn. works: the plain kernel computes it; edit: the line that allows it."""

    raised: Raised
    card: CudaCard
    kernels: tuple[str, ...] = ()
    query: ArgumentFact | None = None
    masked: bool = False
    flash: bool = False
    by: Where = NOWHERE
    works: TriedFix | None = None
    edit: Edit | None = None


@rule(
    code="error/attention-kernel-missing",
    title="No attention kernel is left that can compute this.",
    symptom="No available kernel. Aborting execution; No viable backend for scaled_dot_product_attention was found; "
    "FlashAttention only supports Ampere GPUs or newer; FlashAttention only support fp16 and bf16 data type.",
    cause="Each fused kernel has conditions: FlashAttention takes float16 and bfloat16 on a GPU from Ampere (sm_80) "
    "on, no mask, heads of at most 256. Where the code allows only that one, or the package flash-attn is asked for, "
    "nothing is left for other tensors or cards.",
    confirm="`torch.cuda.get_device_capability()`, `query.dtype`, `query.shape[-1]`; torch warns why each kernel was "
    "refused.",
    fix="Allow the plain kernel as well (`SDPBackend.MATH`), compute in bfloat16, or load the model with "
    "`attn_implementation='sdpa'`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
def attention_kernel_missing(facts: AttentionFacts) -> Finding:
    query = facts.query
    evidence = {
        "query": str(query.fact) if query else None,
        "kernels allowed": ", ".join(facts.kernels),
        "GPU": f"{facts.card.name} {facts.card.capability}".strip(),
        "message": facts.raised.message.partition("\n")[0][:300],
    }
    allowed = (
        f"{listed(facts.kernels)} alone" if facts.kernels else "FlashAttention" if facts.flash else "only fused ones"
    )
    chain = (Link(f"this line allows {allowed}", facts.by),) if facts.by.line else ()
    return Finding(
        "error/attention-kernel-missing",
        f"No attention kernel is left: the code allows {allowed}, and {_refusal(facts)}",
        facts.raised.where,
        {key: value for key, value in evidence.items() if value},
        _attention_fixes(facts),
        chain,
    )


def _refusal(facts: AttentionFacts) -> str:
    """Which condition of the fused kernels is not met."""
    query, digits = facts.query, facts.card.capability.removeprefix("sm_")
    if "Ampere" in facts.raised.message or digits.isdigit() and int(digits) < 80:
        card = f"{facts.card.name} ({facts.card.capability})" if facts.card.name else "this GPU"
        return f"{card} is older than Ampere (sm_80)"
    if query is not None and query.fact.device == "cpu":
        return f"{query.phrase} is on the CPU"
    if "fp16" in facts.raised.message or query is not None and query.fact.dtype not in ("float16", "bfloat16"):
        name = query.phrase if query is not None else "the query"
        return f"{name} is {query.fact.dtype if query else 'float32'}, and it takes float16 or bfloat16"
    if facts.masked:
        return "it takes no mask"
    if query is not None and query.fact.shape and query.fact.shape[-1] > 256:
        return f"heads have {query.fact.shape[-1]} entries, and it takes 256 at most"
    return "no condition for it is met"


def _attention_fixes(facts: AttentionFacts) -> tuple[Fix, ...]:
    fixes = []
    if facts.edit is not None:
        works = facts.works
        fixes.append(
            Fix.of(
                "Allow the plain kernel as well.",
                facts.edit,
                works.worked if works else None,
                works.after if works else {},
            )
        )
    if facts.flash:
        code = "AutoModel.from_pretrained(name, attn_implementation='sdpa')"
        fixes.append(Fix("Load the model with torch's own attention, which picks a kernel that can.", code))
    if not fixes:
        code = "with torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):\n    ..."
        fixes.append(Fix("Allow the plain kernel as well.", code))
    return tuple(fixes)
