"""The causes of errors of CUDA, cuDNN, cuBLAS and the backends between processes: no usable GPU, a failed kernel, an op
that a library does not support, a requirement of NCCL, gloo or DDP that is not met."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link, Where
from nbdebug.text import count, listed, size
from nbdebug.tools.errors.rules import NOWHERE, ArgumentFact, Raised, TriedFix, as_code
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
    return Finding(
        "error/cuda-unavailable", _cuda_title(facts, subject), facts.raised.where, evidence, _cuda_fixes(facts)
    )


def _cuda_title(facts: CardFacts, subject: str) -> str:
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


def _cuda_fixes(facts: CardFacts) -> tuple[Fix, ...]:
    fixes = []
    if facts.kind == "load":
        fixes.append(Fix("Load to the CPU, then move the model.", 'state = torch.load(path, map_location="cpu")'))
    elif facts.kind == "not there":
        fixes.append(Fix("Use a GPU that exists.", 'device = torch.device("cuda:0")'))
    elif facts.kind in ("no kernel", "old driver"):
        title = "Install a build of torch for this driver's CUDA version and this GPU."
        fixes.append(Fix(title, "nvidia-smi   # its first lines show the driver's CUDA version"))
    else:
        title = "Choose the device once, and use it everywhere."
        fixes.append(Fix(title, 'device = "cuda" if torch.cuda.is_available() else "cpu"\nmodel.to(device)'))
        title = "If this machine has an NVIDIA GPU: install the CUDA build of torch."
        fixes.append(Fix(title, "nvidia-smi   # its first lines show the driver's CUDA version"))
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
    title = f"{facts.library} can't compute {op}: {_reason(facts)}"
    return Finding("error/cudnn-not-supported", title, facts.raised.where, evidence, _cudnn_fixes(facts))


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
        title = "Free memory: use a smaller batch, or delete what is no longer needed."
        fixes.append(Fix(title, "torch.backends.cudnn.benchmark = False   # and a smaller batch_size"))
    elif loose is not None:
        code = f"{_name(loose)} = {_name(loose)}.contiguous()"
        fixes.append((facts.dense or TriedFix(code)).fix("Pass a contiguous tensor.", code))
    if facts.library == "cuDNN":
        call = as_code(facts.op) if facts.op else "layer"
        code = f"with torch.backends.cudnn.flags(enabled=False):\n    out = {call}(x)"
        title = "Or use torch's own kernels." if fixes else "Use torch's own kernels."
        fixes.append((facts.without or TriedFix(code)).fix(title, code))
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
    title = "See which cuDNN is loaded, and from where."
    fixes = (
        Fix("See who holds the memory, and free it; then restart the kernel.", "%mem\n!nvidia-smi"),
        Fix(title, "torch.backends.cudnn.version(), os.environ.get('LD_LIBRARY_PATH')"),
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
        title = "Allow the plain kernel as well."
        fixes.append(Fix.of(title, facts.edit, works.worked if works else None, works.after if works else {}))
    if facts.flash:
        code = "AutoModel.from_pretrained(name, attn_implementation='sdpa')"
        fixes.append(Fix("Load the model with torch's own attention, which picks a kernel that can.", code))
    if not fixes:
        code = "with torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):\n    ..."
        fixes.append(Fix("Allow the plain kernel as well.", code))
    return tuple(fixes)


# -- between processes -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """what: one of KINDS in kinds/backends.py. values: those in the message (rank, port, operation, seconds, …).

    present, missing: the environment variables that a launcher sets; backend: of the process group, "" without one;
    rank, world: as they were set. cards: the number of GPUs that this process sees. version: NCCL's. unused: parameters
    of the wrapped model that got no gradient; model: its name. tensors: those of the user's line, each "name on
    device". edit: the failing line behind one that makes a group of this process; runs: whether the call then runs."""

    raised: Raised
    what: str
    values: tuple[tuple[str, str], ...] = ()
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    backend: str = ""
    rank: str = ""
    world: str = ""
    cards: int = 0
    version: str = ""
    unused: tuple[str, ...] = ()
    model: str = ""
    tensors: tuple[str, ...] = ()
    edit: Edit | None = None
    runs: bool | None = None

    def value(self, key: str) -> str:
        return dict(self.values).get(key, "")


LOG = Fix("Turn on the library's log, and run again.", "NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...")
RUN = "torchrun --nproc-per-node={count} train.py"


@rule(
    code="error/nccl",
    title="The processes of a distributed training failed to communicate.",
    symptom="NCCL error …, unhandled system error, invalid usage; Watchdog caught collective operation timeout; "
    "Expected to have finished reduction; Default process group has not been initialized; Address already in use.",
    cause="Two processes use the same GPU, one of them ended or took another branch than the others, the launcher's "
    "variables are not set, or a part of the model got no gradient, for which the other ranks wait.",
    confirm="`NCCL_DEBUG=INFO` prints the log of NCCL; `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the collectives of "
    "all ranks. The first rank that failed shows the cause; the others only lost the connection to it.",
    fix="`torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before anything on the GPU; start with torchrun; run "
    "the same number of steps and the same branches on all ranks; set `find_unused_parameters=True` where parts of the "
    "model are not used.",
    reference="https://docs.pytorch.org/docs/stable/distributed.html",
)
def nccl(facts: Any) -> Finding | None:
    if not isinstance(facts, Collective):
        return None
    where = dataclasses.replace(facts.raised.where, rank=int(facts.rank) if facts.rank.isdigit() else None)
    return Finding("error/nccl", _nccl_title(facts), where, _nccl_evidence(facts), tuple(_nccl_fixes(facts)))


def _nccl_title(facts: Collective) -> str:
    value = facts.value
    if facts.what == "duplicate gpu":
        return f"Rank {value('rank')} and rank {value('other')} use the same GPU; NCCL needs one for each process."
    if facts.what == "unused parameters":
        which = f": {listed(facts.unused)}" if facts.unused else ""
        return (
            f"Parameters of `{facts.model or 'the model'}` got no gradient in the last step, and "
            f"DistributedDataParallel waits for them{which}."
        )
    if facts.what == "environment":
        return f"The variable `{value('variable')}` is not set: the program was not started by torchrun."
    if facts.what == "port in use":
        port = f" {value('port')}" if value("port") else ""
        return f"The port{port} of the process group is in use, usually by an earlier run that has not ended."
    if facts.what == "other models":
        if value("parameter"):
            return (
                f"The model differs between ranks: parameter {value('parameter')} has sizes {value('sizes')} here, but "
                "not on rank 0."
            )
        return (
            f"The model differs between ranks: rank {value('rank')} has {value('mine')} parameters, but rank "
            f"{value('other')} has {value('theirs')}."
        )
    if facts.what == "joined":
        return f"Only {value('there')} of {value('all')} processes joined the group; the others did not start."
    if facts.what == "timeout":
        return _timeout(facts)
    if facts.what == "cpu tensor":
        tensors = f" ({', '.join(facts.tensors)})" if facts.tensors else ""
        device = value("device") or "the CPU"
        return f"The group's backend does not support tensors on {device}{tensors}: NCCL is for GPUs."
    return SENTENCES[facts.what]


SENTENCES = {
    "marked twice": "DistributedDataParallel got a gradient twice in one backward: a parameter is used by two "
    "forwards, or a reentrant checkpoint runs a block again.",
    "no group": "A collective was called before `init_process_group`.",
    "twice": "`init_process_group` was called a second time in this process: a cell was run again.",
    "not built": "This build of torch has no NCCL: it is a CPU build, or for another system.",
    "no gpu": "The backend is NCCL, but this process sees no GPU.",
    "mismatch": "The ranks called different collectives: they ran different branches of the code.",
    "refused": "The process at MASTER_ADDR and MASTER_PORT can't be reached: it has not started, or has ended.",
    "closed": "Another process ended, and this one lost its connection: the first failure is on another rank.",
    "usage": "NCCL was used incorrectly: usually two ranks use one GPU, or their tensors differ.",
    "system": "NCCL got a system error: network, shared memory, or a process that has ended.",
    "cuda": "NCCL got a CUDA error: usually an earlier failure on this GPU, or no free memory.",
    "internal": "NCCL failed internally, most often because another rank failed first.",
}
"""The titles without numbers."""


def _timeout(facts: Collective) -> str:
    operation = facts.value("operation").lower() or facts.value("what")
    limit = facts.value("limit") or facts.value("waited")
    after = f" within {int(limit) / 1000:g} s" if limit else ""
    return (
        f"Not every rank called the same {f'`{operation}`' if operation else 'collective'}{after}: one of them has "
        "ended, has fewer steps, or took another branch."
    )


def _nccl_evidence(facts: Collective) -> dict[str, Any]:
    evidence = {
        **{f"message: {key}": value for key, value in facts.values},
        "backend": facts.backend,
        "this rank": facts.rank,
        "processes": facts.world,
        "GPUs that this process sees": facts.cards,
        "NCCL": facts.version,
        "set": ", ".join(facts.present),
        "not set": ", ".join(facts.missing),
        "parameters without a gradient": ", ".join(facts.unused),
        "tensors": ", ".join(facts.tensors),
    }
    return {key: value for key, value in evidence.items() if value != ""}


# -- fixes -------------------------------------------------------------------------------------------------------


def _nccl_fixes(facts: Collective) -> list[Fix]:
    count = max(1, facts.cards)
    if facts.what in ("duplicate gpu", "usage"):
        title = "Select a GPU for each process before its first use of CUDA."
        return [Fix(title, "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"), LOG]
    if facts.what == "no group":
        return _without_group(facts)
    if facts.what == "unused parameters":
        name = facts.model or "model"
        title = "Or let DDP find unused parameters in each step (a little slower)."
        return [
            Fix(
                "Freeze the unused parameters, or use them in the loss.",
                "\n".join(f"{name}.module.{part}.requires_grad_(False)" for part in facts.unused[:5])
                or f"{name}.module.unused.requires_grad_(False)",
            ),
            Fix(title, f"{name} = DistributedDataParallel({name}.module, find_unused_parameters=True)"),
        ]
    if facts.what in ("environment", "joined"):
        code = (
            "os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='29501')"
        )
        return [
            Fix("Start it with torchrun, which sets all of these variables.", RUN.format(count=count)),
            Fix("In a notebook, with a single process: set the variables first.", code),
        ]
    if facts.what == "port in use":
        title = "Let torchrun find a free port."
        code = f"torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nproc-per-node={count} train.py"
        return [Fix(title, code), Fix("Or end the earlier run.", "pgrep -af torchrun   # then: kill PID")]
    if facts.what in ("no gpu", "not built", "cpu tensor"):
        moved = facts.tensors[0].partition(" on ")[0] if facts.tensors else "x"
        title = "With GPUs: move the tensor to the GPU of this process."
        code = f"{moved} = {moved}.to(f'cuda:{{local_rank}}')"
        return [Fix("On the CPU: use gloo.", "torch.distributed.init_process_group('gloo')"), Fix(title, code)]
    first = "Find the first error among the ranks: it is the cause of the others."
    fixes = SIMPLE.get(facts.what, {first: "torchrun --log-dir=logs --redirects=3 ... train.py"})
    return [*(Fix(title, code) for title, code in fixes.items()), LOG]


def _without_group(facts: Collective) -> list[Fix]:
    """By a launcher's variables where there are any; else a group of this process alone."""
    launched = Fix(
        "Initialize the group first, in a run that torchrun has started.",
        f"torch.distributed.init_process_group({'nccl' if facts.cards else 'gloo'!r})   # "
        + RUN.format(count=max(1, facts.cards)),
    )
    alone = "In one process: make a group of it alone."
    if facts.rank:
        return [launched]
    if facts.edit is not None:
        return [
            Fix.of(
                alone, facts.edit, facts.runs, {"the call then runs, in a group of": "1 process"} if facts.runs else {}
            )
        ]
    code = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
    return [Fix(alone, code), launched]


SIMPLE = {
    "twice": {
        "Initialize it once.": "if not torch.distributed.is_initialized():\n    "
        "torch.distributed.init_process_group('nccl')",
    },
    "marked twice": {
        "Use the non-reentrant checkpoint, and call backward once for each forward.": "torch.utils.checkpoint."
        "checkpoint(block, x, use_reentrant=False)",
    },
    "other models": {
        "Build the same model on every rank: the same configuration and vocabulary.": "print(rank, sum(p.numel() for p "
        "in model.parameters()))",
    },
    "timeout": {
        "Run the same number of steps on all ranks.": "DataLoader(dataset, sampler=DistributedSampler(dataset, "
        "drop_last=True), drop_last=True)",
        "If one rank is only slow (for example, it writes a checkpoint): wait longer.": "torch.distributed."
        "init_process_group('nccl', timeout=datetime.timedelta(minutes=60))",
    },
    "mismatch": {
        "Call collectives on all ranks or on none.": "if rank == 0:\n    save(model)\ntorch.distributed.barrier()   "
        "# outside the if",
    },
    "system": {
        "Set the network interface; in a container, increase the shared memory.": "NCCL_SOCKET_IFNAME=eth0 torchrun "
        "...   # docker run --shm-size=8g",
    },
}
"""Fixes without names of the user's: title → code."""
