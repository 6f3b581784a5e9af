"""Errors of CUDA, cuDNN and cuBLAS, and of the backends between processes: no usable GPU, a device-side assert, an op
that a library does not support, a collective that fails."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import edit_of, functions, nodes, tree_of
from nbdebug.observe.variables import attributes, named_modules, registered
from nbdebug.report import Edit
from nbdebug.text import module_name
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    bindings,
    callee_name,
    entries,
    expression,
    fact,
    is_tensor,
    kind_of_message,
    operands,
    statement,
    value_of,
    value_parts,
)
from nbdebug.tools.errors.kinds.indices import IGNORED, beyond
from nbdebug.tools.errors.operands import (
    OperandNames,
    failing_module,
    is_instance,
    library_frames,
    op_arguments,
    raised_by_user,
    raised_facts,
    where_of,
)
from nbdebug.tools.errors.rules import ArgumentFact, TriedFix
from nbdebug.tools.errors.rules.backends import (
    AssertFacts,
    AttentionFacts,
    CardFacts,
    Collective,
    CudaCard,
    CudnnFacts,
    Layout,
    Use,
)
from nbdebug.tools.errors.rules.indices import IndexFacts
from nbdebug.tools.errors.sandbox import SMALL, CannotRun, Sandbox, rerun

PATTERNS = {
    "load": "Attempting to deserialize object on (?:a CUDA device|CUDA device)",
    "not built": "Torch not compiled with CUDA enabled|PyTorch is not linked with support for cuda|"
    "no CUDA-capable build|not compiled with CUDA support",
    "no driver": "Found no NVIDIA driver",
    "old driver": "driver (?:on your system )?is too old|driver version is insufficient",
    "no kernel": "no kernel image is available|is not compatible with the current PyTorch installation",
    "not there": r"invalid device ordinal|device(?:=\d+)?, num_gpus=|Invalid device id",
    "none": "No CUDA GPUs are available|no CUDA-capable device is detected|CUDA unknown error",
}


def detect_unavailable(context: ErrorContext) -> CardFacts | None:
    """The facts of an error about the GPU itself; None of any other."""
    kind = kind_of_message(PATTERNS, context.message)
    if kind is None:
        return None
    numbers = re.findall(r"CUDA device (\d+)", context.message) if kind == "load" else []
    node = context.ran
    devices = re.findall(r"cuda:(\d+)", ast.unparse(node)) if node is not None else []
    number = int(numbers[0]) if numbers else int(devices[0]) if devices else None
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    text = text if len(text) <= 60 else f"{callee_name(node)}(…)" if isinstance(node, ast.Call) else ""
    return CardFacts(context.raised(), kind, card(), text, number, "CUDA_VISIBLE_DEVICES" in os.environ)


def card() -> CudaCard:
    """The build of torch, and the first GPU, where one is available."""
    known = CudaCard(torch.__version__, torch.version.cuda or "")
    try:
        if not torch.cuda.is_available():
            return known
        name, (major, minor) = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
        count, kernels = torch.cuda.device_count(), tuple(torch.cuda.get_arch_list())
        known = CudaCard(known.torch, known.built, True, count, name, f"sm_{major}{minor}", kernels)
        free, total = torch.cuda.mem_get_info()
        return dataclasses.replace(known, free=free, total=total)
    except Exception:  # a driver that has failed, a failed kernel: what was told before is still known
        return known


LOSSES = ("cross_entropy", "nll_loss", "multi_margin_loss")
LOSS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
LABELS = frozenset({"y", "label", "labels", "target", "targets", "classes", "gt", "mask", "masks"})
NUMBERS = 1_000_000
"""Entries of a list of numbers that are read."""


class Sources:
    """copies: the integer tensors on the CPU, as (text, tensor) by their name in the sources: variables, items of
    batches, tensors of data sets ("loader[1]": the second entry of a loader's batches)."""

    def __init__(self, context: ErrorContext):
        self.context = context
        self.copies: dict[str, tuple[str, torch.Tensor]] = {}
        for name, text, value in _copies(context):
            self.copies.setdefault(name, (text, value))  # the innermost frame's goes before the notebook's
        files = list(dict.fromkeys(frame.site.file for frame in context.users))
        files += [other for file in files[:1] for other in other_cells(file) if other not in files]
        self.trees = {file: tree for file in files if (tree := tree_of(file)) is not None}
        self.classes = {
            (path or name).rpartition(".")[2]: type(part).__name__
            for name, model in context.owners.models.items()
            for path, part in named_modules(model)
        }
        models, callees = context.owners.models, {ast.unparse(node.func) for _, node in self._calls()}
        self.models = [model for name, model in models.items() if name in callees] or list(models.values())

    def uses(self) -> list[Use]:
        uses = [*self._embeddings(), *self._losses()]
        return [self._checked(use) for use in {(u.kind, u.what, u.argument): u for u in uses}.values()]

    def _calls(self) -> Iterator[tuple[str, ast.Call]]:
        for file, tree in self.trees.items():
            for node in nodes(tree):
                if isinstance(node, ast.Call):
                    yield file, node

    def _embeddings(self) -> Iterator[Use]:
        names = OperandNames(self.context)
        for model in self.models:
            for _, module in named_modules(model):
                if not is_instance(module, (nn.Embedding, nn.EmbeddingBag)):
                    continue
                path, rows, called = names.module(module), attributes(module)["num_embeddings"], False
                last = path.rpartition(".")[2]
                for file, node in self._calls():
                    text = ast.unparse(node.func)
                    if node.args and (text == path or text.startswith("self.") and text.rpartition(".")[2] == last):
                        called = True
                        yield Use("embedding", path, rows, ast.unparse(node.args[0]), where_of(file, node))
                if not called:
                    yield Use("embedding", path, rows, "")

    def _losses(self) -> Iterator[Use]:
        for file, node in self._calls():
            frame = next((f for f in self.context.users if f.site.file == file), None)
            if len(node.args) >= 2 and (callee_name(node) in LOSSES or self._is_loss(node, frame)):
                size, head = self._classes(node.args[0], frame)
                if size is not None:
                    spared, target = self._spared(node, frame), ast.unparse(node.args[1])
                    yield Use("target", head or callee_name(node), size, target, where_of(file, node), spared)

    def _spared(self, node: ast.Call, frame: Frame | None) -> int:
        """The label that the loss ignores."""
        stated = next((k.value for k in node.keywords if k.arg == "ignore_index"), None)
        value = value_of(stated, frame) if stated is not None and frame is not None else UNKNOWN
        function: Any = value_of(node.func, frame) if frame is not None else UNKNOWN
        label = attributes(function).get("ignore_index") if is_instance(function, LOSS_MODULES) else value
        return label if type(label) is int else IGNORED

    def _is_loss(self, node: ast.Call, frame: Frame | None) -> bool:
        function = value_of(node.func, frame) if frame is not None else UNKNOWN
        if function is UNKNOWN:
            name = ast.unparse(node.func)
            function = next((value for other, value, _ in self.context.variables() if other == name), UNKNOWN)
        return is_instance(function, LOSS_MODULES)

    def _classes(self, scores: ast.expr, frame: Frame | None) -> tuple[int | None, str]:
        """How many classes the scores have: by their shape, else by the last layer of the model."""
        value = value_of(scores, frame) if frame is not None else UNKNOWN
        tensor: Any = value
        size = tensor.shape[1] if is_tensor(tensor) and tensor.ndim > 1 else None
        head, last = "", None
        for model in self.models:
            for _, module in named_modules(model):
                width = module.__dict__.get("out_features", module.__dict__.get("out_channels"))
                if module_name(type(module)).startswith("torch.nn.") and type(width) is int and size in (None, width):
                    head, last = OperandNames(self.context).module(module), width
        return size if size is not None else last, head

    def _checked(self, use: Use) -> Use:
        """The use, checked with the copies of its index on the CPU."""
        for name in self._named(use):
            bad = beyond(self.copies[name][1], 0, use.size - 1, use.spared)
            use = dataclasses.replace(use, checked=True)
            if bad is not None:
                return dataclasses.replace(use, copy=name, bad=bad)
        return use

    def _named(self, use: Use) -> list[str]:
        """The names of the copies that can be the index of a use."""
        origins = set(self._sources(use.argument))
        mine = [name for name in self.copies if name in origins]
        words = []
        if use.kind == "target":
            words = [n for n in self.copies if n.rpartition(".")[2].partition("[")[0].strip("'\"") in LABELS]
        return list(dict.fromkeys([*mine, *(words if not mine else [])]))

    def _sources(self, text: str) -> Iterator[str]:
        """The names that an index comes from: itself, the names bound to it, the arguments of calls for a parameter of
        this name."""
        todo, visited = [text], set()
        for _ in range(60):
            if not todo:
                return
            name = todo.pop(0)
            if name in visited or not name:
                continue
            visited.add(name)
            yield name
            for tree in self.trees.values():
                todo += _before(tree, name, self.classes)


def _before(tree: ast.Module, name: str, classes: dict[str, str]) -> list[str]:
    """What a name was bound to, or got as a parameter, anywhere in a file: names, and entries of data sets."""
    names: list[str] = []
    for scope in (tree, *functions(tree)):
        for value, keys in bindings(scope, name):
            for entry, rest in entries(value, keys):
                names += [
                    ast.unparse(part) + "".join(f"[{key!r}]" for key in rest)  # `loader[1]`
                    for part in value_parts(entry)
                    if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))
                ]
    return names + [
        ast.unparse(part)
        for argument in _passed(tree, name, classes)
        for part in value_parts(argument)
        if isinstance(part, (ast.Name, ast.Subscript))
    ]


def _passed(tree: ast.Module, name: str, classes: dict[str, str]) -> Iterator[ast.expr]:
    """The arguments in a file's calls for a parameter of this name: of a function by its name, of a `forward` by a
    module of its class."""
    homes = {id(method): kind.name for kind in nodes(tree) if isinstance(kind, ast.ClassDef) for method in kind.body}
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    for node in nodes(tree):
        names = [arg.arg for arg in node.args.args if arg.arg != "self"] if isinstance(node, ast.FunctionDef) else []
        if not isinstance(node, ast.FunctionDef) or name not in names:
            continue
        place = names.index(name)
        for call in calls:
            mine = (
                classes.get(callee_name(call)) == homes.get(id(node), "")
                if node.name == "forward"
                else (callee_name(call) == node.name)
            )
            if mine and place < len(call.args):
                yield call.args[place]


def _copies(context: ErrorContext) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, text, integer tensor on the CPU): variables, their entries, tensors of data sets."""
    visited: set[int] = set()
    for name, value, _ in context.variables():
        if id(value) in visited:
            continue
        visited.add(id(value))
        if _whole(value):
            yield name, name, value
        elif type(value) in (dict, list, tuple):
            pairs = [*value.items()][:60] if type(value) is dict else [*enumerate(value[:60])]
            for key, item in pairs:
                if type(key) in (str, int) and _whole(item):
                    yield f"{name}[{key!r}]", f"{name}[{key!r}]", item
        elif is_instance(value, (DataLoader, Dataset)):
            yield from _dataset_tensors(name, value)


def _dataset_tensors(name: str, value: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The tensors of a data set, or of a loader's."""
    dataset, path = value, name
    while is_instance(dataset, (DataLoader, Subset)):
        dataset, path = attributes(dataset).get("dataset"), f"{path}.dataset"
    if type(dataset) is TensorDataset:
        for i, item in enumerate(attributes(dataset).get("tensors", ())):
            if _whole(item):
                yield f"{name}[{i}]", f"{path}.tensors[{i}]", item
        return
    for key, item in attributes(dataset).items() if dataset is not None else ():
        if _whole(item):
            yield f"{name}.{key}", f"{path}.{key}", item
        elif type(item) is list and 0 < len(item) <= NUMBERS and all(type(number) is int for number in item):
            yield f"{name}.{key}", f"{path}.{key}", torch.tensor(item, device="cpu")


def _whole(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        and value.numel() > 0
    )


ASSERT_WORDS = {
    "assert": "device-side assert|cudaErrorAssert|hipErrorAssert",
    "memory access": "illegal memory access|misaligned address|unspecified launch failure",
    "library": "CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|"
    "CUDNN_STATUS_MAPPING_ERROR",
}


def detect_assert(context: ErrorContext) -> AssertFacts | None:
    """The ops that may have failed; None of any other error."""
    kind = kind_of_message(ASSERT_WORDS, context.message)
    if kind is None or raised_by_user(context):
        return None
    uses = sorted(Sources(context).uses(), key=lambda use: (use.bad is None, use.checked))
    return AssertFacts(context.raised(), kind, tuple(uses), os.environ.get("CUDA_LAUNCH_BLOCKING") == "1")


def detect_index(context: ErrorContext) -> IndexFacts | None:
    """The op whose index is out of range by its copy on the CPU; None without proof."""
    facts = detect_assert(context)
    proven = [use for use in facts.uses if use.bad is not None] if facts is not None else []
    if facts is None or not proven:
        return None
    use = proven[0]
    copy = Sources(context).copies.get(use.copy)
    if copy is None:
        return None
    late, at, module = facts.raised.where, use.where, use.what.partition(".")[2] or use.what
    where = dataclasses.replace(late, file=at.file, line=at.line, text=at.text, cell=at.cell, module=module)
    raised, index = dataclasses.replace(facts.raised, where=where), ArgumentFact(fact(*copy))
    own: dict[str, Any] = {"module": use.what} if use.kind == "embedding" else {"head": use.what}
    return IndexFacts(raised, use.kind, table=use.what, size=use.size, index=index, beyond=use.bad, late=late, **own)


ENGINE = r"unable to find an engine|Unable to find a valid cuDNN algorithm|No valid execution plans built"
STATUS = r"(CUDNN_STATUS_\w+|CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE))"
CUDNN = re.compile(
    rf"{STATUS}|{ENGINE}|cuDNN error|(?:input|hx|weight) is not contiguous|input must be contiguous|"
    r"cudnn RNN backward can only be called|passed in a non-contiguous input"
)


def detect_cudnn(context: ErrorContext) -> CudnnFacts | None:
    """The facts of an op that the library does not support; None of any other error."""
    message = context.message
    if not CUDNN.search(message) or raised_by_user(context):
        return None
    match = re.search(STATUS, message)
    status = match[1] if match else kind_of_message({"no engine": ENGINE, "not contiguous": "contiguous"}, message)
    status = status or "error"
    parts = [p for p in op_arguments(context) if p.value.ndim and p.value.layout is torch.strided]
    layouts = tuple(
        Layout(p.plain(), tuple(p.value.stride()), p.value.is_contiguous(), dense(p.value), p.value.numel())
        for p in parts[:8]
    )
    module, op = failing_module(context), next((frame.site.function for frame in library_frames(context)), "")
    if module is not None:
        op = OperandNames(context).module(module)
    loose: dict[int | str, torch.Tensor] = {
        id(p.value): p.value.detach().contiguous()
        for p in parts
        if not p.value.is_contiguous() and p.value.numel() < SMALL
    }
    library = "cuBLAS" if "CUBLAS" in status else "cuDNN"
    without = _tried(context, {}, lambda: torch.backends.cudnn.flags(enabled=False))
    tried = _tried(context, loose) if loose else None
    return CudnnFacts(raised_facts(context), library, status, op, layouts, card(), without, tried)


def dense(value: torch.Tensor) -> bool:
    """Whether the elements have no gaps or overlaps in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _tried(
    context: ErrorContext,
    swap: dict[int | str, torch.Tensor],
    inside: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> TriedFix | None:
    trial = rerun(context, swap, inside)
    return None if trial is None else TriedFix("", trial.worked, trial.after)


NOT_STARTED = re.compile(r"CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)")


def detect_not_started(context: ErrorContext) -> CudnnFacts | None:
    """The facts of a cuDNN that could not start; None of any other error."""
    match = NOT_STARTED.search(context.message)
    if match is None or raised_by_user(context):
        return None
    return CudnnFacts(raised_facts(context), "cuDNN", match[0], "", (), card())


ATTENTION = re.compile(
    r"No available kernel|No viable backend for scaled_dot_product|FlashAttention only support|"
    r"FlashAttention (?:forward|backward) only supports|Flash ?Attention requires|flash_attn is not available"
)


def detect_attention(context: ErrorContext) -> AttentionFacts | None:
    """The facts of attention without a kernel; None of any other error."""
    if not ATTENTION.search(context.message) or raised_by_user(context):
        return None
    parts = [part for part in op_arguments(context) if part.value.is_floating_point()]
    query = next((p for p in parts if p.role == "query"), parts[0] if parts else None)
    raised = raised_facts(context)
    masked = any("mask" in part.name for part in parts)
    flash = "FlashAttention" in context.message or "flash_attn" in context.message
    facts = AttentionFacts(raised, card(), query=query.plain() if query else None, masked=masked, flash=flash)
    for frame in context.users:
        call = _kernels_around(frame)
        if call is None:
            continue
        named = [n for n in ast.walk(call) if isinstance(n, ast.Attribute) and n.attr.isupper()]
        inside = call.args[0] if call.args else None
        edit = None
        if isinstance(inside, ast.Attribute):
            edit = edit_of(frame.site.file, {inside: f"[{{raw}}, {ast.unparse(inside.value)}.MATH]"})
        elif isinstance(inside, (ast.List, ast.Tuple)) and inside.elts and isinstance(inside.elts[-1], ast.Attribute):
            last = inside.elts[-1]
            edit = edit_of(frame.site.file, {last: f"{{raw}}, {ast.unparse(last.value)}.MATH"})
        math = functools.partial(torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH)
        works, by = _tried(context, {}, math) if edit is not None else None, where_of(frame.site.file, call)
        return dataclasses.replace(facts, kernels=tuple(n.attr for n in named), by=by, works=works, edit=edit)
    return facts


def _kernels_around(frame: Frame) -> ast.Call | None:
    """The `with sdpa_kernel(…)` around the line that ran."""
    tree = tree_of(frame.site.file)
    for node in nodes(tree) if tree is not None else ():
        if isinstance(node, ast.With) and node.lineno <= frame.site.line <= (node.end_lineno or 0):
            for item in node.items:
                if isinstance(item.context_expr, ast.Call) and callee_name(item.context_expr) in (
                    "sdpa_kernel",
                    "sdp_kernel",
                ):
                    return item.context_expr
    return None


# -- between processes -------------------------------------------------------------------------------------------------


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and env:// needs."""
KINDS = {
    "duplicate gpu": r"Duplicate GPU detected ?: rank (?P<rank>\d+) and rank (?P<other>\d+) both on CUDA device "
    r"(?P<device>\w+)",
    "unused parameters": "Expected to have finished reduction in the prior iteration",
    "marked twice": "Expected to mark a variable ready only once",
    "no group": "Default process group has not been initialized",
    "twice": "[Tt]rying to initialize the default process group twice",
    "environment": r"environment variable (?P<variable>\w+) expected, but not set",
    "port in use": r"(?s)(?:port: (?P<port>\d+).*?)?(?:EADDRINUSE|[Aa]ddress already in use)",
    "not built": "(?i)doesn't have NCCL built in|NCCL is not available|nccl.* not compiled",
    "no gpu": "ProcessGroupNCCL is only supported with GPUs",
    "cpu tensor": r"No backend type associated with device type (?P<device>\w+)|Tensors must be CUDA and dense",
    "other models": r"DDP expects same model across all ranks.*?Rank (?P<rank>\d+) has (?P<mine>\d+) params, while "
    r"rank (?P<other>\d+) has inconsistent (?P<theirs>\d+)|"
    r"params\[(?P<parameter>\d+)\] in this process with sizes (?P<sizes>\[.*?\]) appears",
    "mismatch": "Detected mismatch between collectives on ranks",
    "joined": r"(?P<there>\d+)/(?P<all>\d+) clients joined",
    "timeout": r"(?s)(?:collective operation timeout.*?)?OpType=(?P<operation>\w+).*?Timeout\(ms\)=(?P<limit>\d+)|"
    r"collective operation timeout|Timed out waiting (?P<waited>\d+)ms for (?P<what>\w+) operation",
    "refused": "client socket has (?:failed|timed out)|Connection refused|failed to connect to",
    "closed": "Connection closed by peer|Connection reset by peer|ncclRemoteError|remote process exited",
    "usage": "ncclInvalidUsage|ncclInvalidArgument|invalid usage",
    "system": "ncclSystemError|unhandled system error",
    "cuda": "ncclUnhandledCudaError|unhandled cuda error",
    "internal": "ncclInternalError|internal error",
}
"""(kind, pattern), the narrow before the wide."""
ABOUT = re.compile(
    r"nccl|gloo|process group|distributed|DistributedDataParallel|collective|rendezvous|c10d|TCPStore|"
    r"ProcessGroup|clients joined|DDP|finished reduction|ready only once|No backend type|socket",
    re.IGNORECASE,
)
OWN = re.compile(
    r"nccl|gloo|reduction in the prior|ready only once|clients joined|DDP expects|process group has not|"
    r"mismatch between collectives|collective operation timeout",
    re.IGNORECASE,
)
TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
FOLDER = re.compile(r"[\\/]torch[\\/](distributed|nn[\\/]parallel)[\\/]")


def detect_collective(context: ErrorContext) -> Collective | None:
    if not (
        context.type in TYPES
        or context.type in ("RuntimeError", "ValueError", "OSError", "TimeoutError")
        and ABOUT.search(context.message)
    ):
        return None
    near = any(FOLDER.search(frame.site.file) for frame in context.trail)
    if context.type not in TYPES and not near and not OWN.search(context.message):
        return None  # a socket of the user's own
    what = kind_of_message(KINDS, context.message)
    groups = re.search(KINDS[what], context.message) if what is not None else None
    if what is None or groups is None:
        return None
    values = tuple((key, value) for key, value in groups.groupdict().items() if value)
    model, unused = _unused(context) if what == "unused parameters" else ("", ())
    arguments = operands(context.users[0]) if context.users else ()
    tensors = tuple(f"{text} on {value.device}" for text, value in arguments if is_tensor(value))[:5]
    alone = what == "no group" and "RANK" not in os.environ
    edit, runs = _group_of_one(context) if alone else (None, None)
    return Collective(
        context.raised(),
        what,
        values,
        tuple(name for name in VARIABLES if name in os.environ),
        tuple(name for name in VARIABLES if name not in os.environ),
        _backend(),
        os.environ.get("RANK", ""),
        os.environ.get("WORLD_SIZE", ""),
        torch.cuda.device_count(),
        _version(),
        unused,
        model,
        tensors,
        edit,
        runs,
    )


def _group_of_one(context: ErrorContext) -> tuple[Edit | None, bool | None]:
    """(the failing line behind one that makes a group of this process alone, whether the failing call runs in it: on
    copies of its tensors; the group is ended again)."""
    frame = context.frame
    line, call = (statement(frame), expression(frame)) if frame is not None else (None, None)
    if frame is None or line is None or hasattr(line, "body"):
        return None, None
    call = getattr(line, "value", None) if call in (None, line) else call  # before Python 3.11 no columns tell
    space = {**frame.globals, **frame.names}
    home = (
        "torch.distributed" if "torch" in space else next((n for n, v in space.items() if v is torch.distributed), "")
    )
    if not home or not torch.distributed.is_gloo_available():
        return None, None
    pad = "\n" + " " * line.col_offset
    made = f'init_process_group("gloo", store={home}.HashStore(), rank=0, world_size=1)'
    edit = edit_of(frame.site.file, {line: f"if not {home}.is_initialized():{pad}    {home}.{made}{pad}{{raw}}"})
    runs = None
    if isinstance(call, ast.Call) and not torch.distributed.is_initialized():
        function = value_of(call.func, frame)
        if str(getattr(function, "__module__", "")).startswith("torch.distributed."):
            store = vars(torch.distributed)["HashStore"]()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                box = Sandbox()
                args = [box.evaluate(arg, frame) for arg in call.args]
                function(*args, **{k.arg: box.evaluate(k.value, frame) for k in call.keywords if k.arg})
                runs = True
            except (CannotRun, RuntimeError, ValueError, TypeError):
                pass
            finally:
                torch.distributed.destroy_process_group()
    return edit, runs


def _backend() -> str:
    distributed = torch.distributed
    return str(distributed.get_backend()) if distributed.is_available() and distributed.is_initialized() else ""


def _version() -> str:
    known = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if known else ""


def _unused(context: ErrorContext) -> tuple[str, tuple[str, ...]]:
    """(name, parameters without a gradient) of the model that DDP wraps."""
    for frame in reversed(context.trail):
        wrapped = frame.module
        if wrapped is not None and type(wrapped).__name__ == "DistributedDataParallel":
            inner = registered(wrapped, "_modules").get("module")
            lacking = []
            if inner is not None:
                lacking = [
                    name
                    for name, parameter in torch.nn.Module.named_parameters(inner)
                    if parameter.requires_grad and parameter.grad is None
                ]
            name = next((n for n, value, _ in context.variables() if value is wrapped and n != "self"), "model")
            return name, tuple(lacking[:30])
    return "", ()
