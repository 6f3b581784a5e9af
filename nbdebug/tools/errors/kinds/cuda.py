"""CUDA errors: no usable GPU, a device-side assert, an op that cuDNN or cuBLAS does not support."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import edit_of, functions, nodes, tree_of
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.tools.errors.context import ErrorContext, fact, is_tensor
from nbdebug.tools.errors.facts import ArgumentFact, TriedFix
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
from nbdebug.tools.errors.rules.cuda import AssertFacts, AttentionFacts, CardFacts, CudaCard, CudnnFacts, Layout, Use
from nbdebug.tools.errors.rules.indices import IndexFacts
from nbdebug.tools.errors.sandbox import SMALL, rerun
from nbdebug.tools.errors.values import UNKNOWN, bindings, callee_name, entries, expression, value_of, value_parts

PATTERNS: tuple[tuple[str, str], ...] = (
    ("load", r"Attempting to deserialize object on (?:a CUDA device|CUDA device)"),
    (
        "not built",
        r"Torch not compiled with CUDA enabled|PyTorch is not linked with support for cuda|"
        r"no CUDA-capable build|not compiled with CUDA support",
    ),
    ("no driver", r"Found no NVIDIA driver"),
    ("old driver", r"driver (?:on your system )?is too old|driver version is insufficient"),
    ("no kernel", r"no kernel image is available|is not compatible with the current PyTorch installation"),
    ("not there", r"invalid device ordinal|device(?:=\d+)?, num_gpus=|Invalid device id"),
    ("none", r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA unknown error"),
)


def detect_unavailable(context: ErrorContext) -> CardFacts | None:
    """The facts of an error about the GPU itself; None of any other."""
    kind = next((kind for kind, pattern in PATTERNS if re.search(pattern, context.message)), None)
    if kind is None:
        return None
    numbers = re.findall(r"CUDA device (\d+)", context.message) if kind == "load" else []
    node = expression(context.users[0]) if context.users else None
    devices = re.findall(r"cuda:(\d+)", ast.unparse(node)) if node is not None else []
    number = int(numbers[0]) if numbers else int(devices[0]) if devices else None
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    text = text if len(text) <= 60 else f"{callee_name(node)}(…)" if isinstance(node, ast.Call) else ""
    return CardFacts(context.raised(), kind, card(), text, number, "CUDA_VISIBLE_DEVICES" in os.environ)


def card() -> CudaCard:
    """The build of torch, and the first GPU, where one is available."""
    plain = CudaCard(torch.__version__, torch.version.cuda or "")
    try:
        if not torch.cuda.is_available():
            return plain
        count = torch.cuda.device_count()
        major, minor = torch.cuda.get_device_capability(0)
        described = CudaCard(
            plain.torch,
            plain.built,
            True,
            count,
            torch.cuda.get_device_name(0),
            f"sm_{major}{minor}",
            tuple(torch.cuda.get_arch_list()),
        )
    except Exception:  # a driver that has failed: the build of torch is still known
        return plain
    try:
        free, total = torch.cuda.mem_get_info()
    except Exception:  # after a failed kernel the GPU can't be queried
        return described
    return CudaCard(
        described.torch,
        described.built,
        True,
        count,
        described.name,
        described.capability,
        described.kernels,
        free,
        total,
    )


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
                path, called = names.module(module), False
                last = path.rpartition(".")[2]
                for file, node in self._calls():
                    text = ast.unparse(node.func)
                    if node.args and (text == path or text.startswith("self.") and text.rpartition(".")[2] == last):
                        called = True
                        yield Use(
                            "embedding",
                            path,
                            attributes(module)["num_embeddings"],
                            ast.unparse(node.args[0]),
                            where_of(file, node),
                        )
                if not called:
                    yield Use("embedding", path, attributes(module)["num_embeddings"], "")

    def _losses(self) -> Iterator[Use]:
        for file, node in self._calls():
            frame = next((f for f in self.context.users if f.site.file == file), None)
            if len(node.args) >= 2 and (callee_name(node) in LOSSES or self._is_loss(node, frame)):
                size, head = self._classes(node.args[0], frame)
                if size is not None:
                    yield Use(
                        "target",
                        head or callee_name(node),
                        size,
                        ast.unparse(node.args[1]),
                        where_of(file, node),
                        spared=self._spared(node, frame),
                    )

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
                if type(module).__module__.startswith("torch.nn.") and type(width) is int and size in (None, width):
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
        words = (
            [n for n in self.copies if n.rpartition(".")[2].partition("[")[0].strip("'\"") in LABELS]
            if use.kind == "target"
            else []
        )
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


ASSERT_WORDS: tuple[tuple[str, str], ...] = (
    ("assert", r"device-side assert|cudaErrorAssert|hipErrorAssert"),
    ("memory access", r"illegal memory access|misaligned address|unspecified launch failure"),
    (
        "library",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)|"
        r"CUDNN_STATUS_MAPPING_ERROR",
    ),
)


def detect_assert(context: ErrorContext) -> AssertFacts | None:
    """The ops that may have failed; None of any other error."""
    kind = next((kind for kind, pattern in ASSERT_WORDS if re.search(pattern, context.message)), None)
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
    where = dataclasses.replace(
        facts.raised.where,
        file=use.where.file,
        line=use.where.line,
        text=use.where.text,
        cell=use.where.cell,
        module=use.what.partition(".")[2] or use.what,
    )
    return IndexFacts(
        dataclasses.replace(facts.raised, where=where),
        use.kind,
        table=use.what,
        size=use.size,
        module=use.what if use.kind == "embedding" else "",
        head=use.what if use.kind == "target" else "",
        index=ArgumentFact(fact(*copy)),
        beyond=use.bad,
        late=facts.raised.where,
    )


ENGINE = r"unable to find an engine|Unable to find a valid cuDNN algorithm|No valid execution plans built"
STATUS = r"(CUDNN_STATUS_\w+|CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE))"
WORDS = re.compile(
    rf"{STATUS}|{ENGINE}|cuDNN error|(?:input|hx|weight) is not contiguous|input must be contiguous|"
    r"cudnn RNN backward can only be called|passed in a non-contiguous input"
)


def detect_cudnn(context: ErrorContext) -> CudnnFacts | None:
    """The facts of an op that the library does not support; None of any other error."""
    message = context.message
    if not WORDS.search(message) or raised_by_user(context):
        return None
    match = re.search(STATUS, message)
    status = (
        match[1]
        if match
        else "no engine"
        if re.search(ENGINE, message)
        else "not contiguous"
        if ("contiguous" in message)
        else "error"
    )
    parts = [p for p in op_arguments(context) if p.value.ndim and p.value.layout is torch.strided]
    layouts = tuple(
        Layout(
            ArgumentFact(p.fact(), p.role, p.owner, p.known),
            tuple(p.value.stride()),
            p.value.is_contiguous(),
            dense(p.value),
            p.value.numel(),
        )
        for p in parts[:8]
    )
    module = failing_module(context)
    op = (
        OperandNames(context).module(module)
        if module is not None
        else next((frame.site.function for frame in library_frames(context)), "")
    )
    loose: dict[int | str, torch.Tensor] = {
        id(p.value): p.value.detach().contiguous()
        for p in parts
        if not p.value.is_contiguous() and p.value.numel() < SMALL
    }
    return CudnnFacts(
        raised_facts(context),
        "cuBLAS" if "CUBLAS" in status else "cuDNN",
        status,
        op,
        layouts,
        card(),
        _tried(context, {}, True),
        _tried(context, loose, False) if loose else None,
    )


def dense(value: torch.Tensor) -> bool:
    """Whether the elements have no gaps or overlaps in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _tried(context: ErrorContext, swap: dict[int | str, torch.Tensor], other: bool) -> TriedFix | None:
    off = (lambda: torch.backends.cudnn.flags(enabled=False)) if other else contextlib.nullcontext
    trial = rerun(context, swap, off)
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
    facts = AttentionFacts(
        raised_facts(context),
        card(),
        query=ArgumentFact(query.fact(), query.role, query.owner, query.known) if query else None,
        masked=any("mask" in part.name for part in parts),
        flash="FlashAttention" in context.message or "flash_attn" in context.message,
    )
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
        trial = rerun(context, {}, math) if edit is not None else None
        return dataclasses.replace(
            facts,
            kernels=tuple(n.attr for n in named),
            by=where_of(frame.site.file, call),
            works=TriedFix("", trial.worked, trial.after) if trial is not None else None,
            edit=edit,
        )
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
