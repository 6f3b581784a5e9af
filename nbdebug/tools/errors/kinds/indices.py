"""An index out of range: of which table, which entry of which tensor, in which row.

The message has one number at most ("index out of range in self" has none). The table and the tensor of indices are in
the frames: comparing the indices with the size of the table finds every entry that is out of range.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import operator
import re
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import edit_of, nodes_of, tree_of
from nbdebug.observe.variables import attributes, named_modules
from nbdebug.report import Link
from nbdebug.text import module_name
from nbdebug.tools.errors.context import (
    READ_AT_MOST,
    UNKNOWN,
    ErrorContext,
    callee_name,
    calls_in,
    comprehensions,
    expression,
    is_tensor,
    parsed_expression,
    value_of,
    value_part,
)
from nbdebug.tools.errors.kinds.dataloader import iterator_of, loader_of
from nbdebug.tools.errors.operands import (
    OpArgument,
    OperandNames,
    failing_module,
    is_instance,
    library_frames,
    op_arguments,
    origin_of,
    raised_by_user,
    raised_facts,
)
from nbdebug.tools.errors.rules import TriedFix, ValueOrigin
from nbdebug.tools.errors.rules.indices import IndexFacts, OutOfRange
from nbdebug.tools.errors.sandbox import SMALL, computed_operands, rerun


def beyond(index: torch.Tensor, least: int, most: int, spared: int | None = None) -> OutOfRange | None:
    """The entries of a tensor of indices outside least … most; spared: a label that a loss ignores. None where all are
    inside, or where the tensor can't be read (a failed device, meta, too large)."""
    whole = not index.dtype.is_floating_point and not index.dtype.is_complex
    if index.is_meta or not whole or not 0 < index.numel() <= READ_AT_MOST:
        return None
    try:
        with torch.no_grad():
            entries = index.detach().to("cpu", torch.int64)
            bad = (entries < least) | (entries > most)
            if spared is not None:
                bad &= entries != spared
            if not bad.any():
                return None
            place = tuple(int(i) for i in bad.nonzero()[0])
            kinds = tuple(int(v) for v in entries[bad].unique()[:6])
            value, count = int(entries[place]), int(bad.sum())
            return OutOfRange(value, place, count, entries.numel(), int(entries.min()), int(entries.max()), kinds)
    except RuntimeError:  # after a device-side assert no value can be read
        return None


def _sizes_kept(last: str, size: int, context: ErrorContext) -> tuple[str, ...]:
    """Where the model of this layer keeps the number of classes, by which its forward reshapes the scores."""
    name = last.split(".")[0]
    model = context.owners.models.get(name)
    kept = [(f"{name}.{key}", attributes(model).get(key)) for key in ("num_labels", "num_classes")]
    kept.append((f"{name}.config.num_labels", getattr(attributes(model).get("config"), "num_labels", None)))
    return tuple(text for text, number in kept if type(number) is int and number == size)


def head(scores: str, size: int, context: ErrorContext) -> tuple[str, nn.Module | None]:
    """The last layer with as many outputs as there are scores: of the model whose call computed them, named
    as the user's line calls it; where the sources don't show the call, of the only model that has one. ("", None) where
    several have: a wrong name would be worse than none."""
    text, model = _caller(scores, context)
    if model is not None:
        path, layer = _last(model, size)
        if layer is None:
            return "", None
        named = OperandNames(context).module(layer)
        root = named.split(".")[0]
        by_variable = text.isidentifier() and text != "self" and root != text
        return f"{text}.{path}".rstrip(".") if by_variable and "[" not in named else named, layer
    layers = [layer for one in context.owners.models.values() if (layer := _last(one, size)[1]) is not None]
    return (OperandNames(context).module(layers[0]), layers[0]) if len(layers) == 1 else ("", None)


def _more_classes(layer: nn.Module | None, target: torch.Tensor, context: ErrorContext) -> TriedFix | None:
    """The last layer with an output for the largest label, as an edit of the call that makes it; tried on the program
    from before the scores. Only where few classes are lacking: else the labels are wrong."""
    from nbdebug.tools.errors.autograd.trials import retried
    from nbdebug.tools.errors.shapes.trials import constructor

    made = constructor(context, layer) if type(layer) is nn.Linear else None
    if made is None or not isinstance(layer, nn.Linear):
        return None
    needed, size = 1 + (_highest(target, int(target.max()), context) or 0), layer.out_features
    sizes = [*made[1].args[1:2], *(k.value for k in made[1].keywords if k.arg == "out_features")]
    if len(sizes) != 1 or not size < needed <= size + max(1, size // 2):
        return None
    old = sizes[0]
    edit = edit_of(made[0], {old: str(needed) if isinstance(old, ast.Constant) else f"max({{raw}}, {needed})"})
    larger = nn.Linear(layer.in_features, needed, layer.bias is not None, layer.weight.device, layer.weight.dtype)
    trial = retried(context, edit, 1, {id(layer): larger}) if edit is not None else None
    if trial is None or not trial.worked:
        return None
    return TriedFix(str(needed), True, {"the program then runs": trial.text}, edit)


def _last(model: nn.Module, size: int) -> tuple[str, nn.Module | None]:
    """(dotted name within the model, layer) of the last of torch's own layers with so many outputs."""
    last: tuple[str, nn.Module | None] = "", None
    for path, module in named_modules(model):
        if module_name(type(module)).startswith("torch.nn.") and size in (
            module.__dict__.get("out_features"),
            module.__dict__.get("out_channels"),
        ):
            last = path.replace("_orig_mod.", ""), module
    return last


def _caller(scores: str, context: ErrorContext) -> tuple[str, nn.Module | None]:
    """(text of the callee, model) of the call that computed the scores."""

    def called(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and _module(node.func, context) is not None

    inner = [node for node in calls_in(parsed_expression(scores)) if called(node)]
    if not inner:
        way = origin_of(scores, context, called)
        maker = way[0].maker if way else None
        inner = [maker] if isinstance(maker, ast.Call) else []
    return (ast.unparse(inner[0].func), _module(inner[0].func, context)) if inner else ("", None)


def _module(node: ast.expr, context: ErrorContext) -> nn.Module | None:
    """The module that an expression refers to, in the innermost of the user's frames with a value for it."""
    value: Any = next((result for frame in context.users if (result := value_of(node, frame)) is not UNKNOWN), None)
    return value if is_instance(value, nn.Module) else None


NEAR = 1000
"""Ids up to so far beyond the table are fixed by a larger table; beyond that the ids themselves are wrong."""
IGNORED = -100
"""The label that torch's losses ignore by default."""


def _tried(code: str, context: ErrorContext, swap: dict[int | str, torch.Tensor]) -> TriedFix:
    """A change of an operand as a fix, tried on the failing op."""
    trial = rerun(context, swap)
    return TriedFix(code) if trial is None else TriedFix(code, trial.worked, trial.after)


def grown(bad: OutOfRange, table: torch.Tensor, context: ErrorContext) -> TriedFix | None:
    """The lookup with a table that has a row for the largest id."""
    rows, high = table.shape[0], bad.high
    if high is None or (bad.low or 0) < 0 or high >= 2 * rows + NEAR or (high + 1) * table.shape[-1] > SMALL:
        return None
    larger = torch.zeros(high + 1, *table.shape[1:], dtype=table.dtype, device=table.device)
    return _tried(str(high + 1), context, {id(table): larger})


def shifted(bad: OutOfRange, target: torch.Tensor, size: int, context: ErrorContext) -> TriedFix | None:
    """The loss with classes from 0, where they are counted from 1 to the number of classes; or from -1, and the last
    class is lacking."""
    if bad.values == (-1,) and bad.high == size - 2 and bad.count <= bad.total / 2:
        return _tried("-1", context, {id(target): target.detach() + 1})
    if bad.values != (size,) or (bad.low or 0) < 1:
        return None
    return _tried("1", context, {id(target): target.detach() - 1})


def ignored(bad: OutOfRange, target: torch.Tensor, context: ErrorContext) -> TriedFix | None:
    """The loss without a special label (255, -1), as with `ignore_index`."""
    if len(bad.values) != 1 or not (bad.value < 0 or bad.value >= 255):
        return None
    if target.numel() > SMALL:
        return TriedFix(str(bad.value))
    masked = target.detach().masked_fill(target.detach() == bad.value, IGNORED)
    return _tried(str(bad.value), context, {id(target): masked})


EMBEDDING = re.compile(r"index out of range in self|Index \d+ of input takes value -?\d+ which is not in the valid")
TARGET = re.compile(r"Target (-?\d+) is out of bounds|target out of range|target value .* out of range")
BOUNDS = re.compile(r"index (-?\d+) is out of bounds for (?:dimension|axis|dim) (\d+) with size (\d+)")
TAKE = re.compile(r"tried to access index (-?\d+) on a tensor of (\d+) elements")
SELECT = re.compile(r"select\(\): index (-?\d+) out of range for tensor of size \[([\d, ]+)\] at dimension (-?\d+)")
ONE_HOT = re.compile(r"Class values must be smaller than num_classes|Class values must be non-negative")
NEGATIVE = re.compile(r"bincount only supports 1-d non-negative")
RANDOM = re.compile(r"expects 'from' to be less than 'to', but got from=(-?\d+) >= to=(-?\d+)")


def detect(context: ErrorContext) -> IndexFacts | None:
    """The facts of an error about an index; None of any other."""
    if raised_by_user(context):
        return None
    message, facts = context.message, IndexFacts(raised_facts(context), "tensor")
    if TARGET.search(message):
        return _target(facts, context)
    if EMBEDDING.search(message):
        return _embedding(facts, context)
    if ONE_HOT.search(message) or NEGATIVE.search(message):
        return _classes(facts, context)
    match = BOUNDS.search(message) or TAKE.search(message) or SELECT.search(message)
    if match:
        return _tensor(facts, context, *_numbers(match))
    interval = RANDOM.search(message)
    if interval:
        low, high = int(interval[1]), int(interval[2])
        return dataclasses.replace(facts, kind="random", size=max(0, high - low), least=low, beyond=OutOfRange(high))
    return _label(facts, context) if context.type == "KeyError" else sequence_facts(facts, context)


def _parts(context: ErrorContext) -> list[OpArgument]:
    """The tensors of the failing line, with those that it computes itself."""
    arguments = op_arguments(context)
    return arguments + [
        OpArgument(value, text) for text, value in computed_operands(context, {part.name for part in arguments})
    ]


def _numbers(match: re.Match[str]) -> tuple[int, int | None, int]:
    """(the index, the dimension, its size) in a message."""
    if match.re is TAKE:
        return int(match[1]), None, int(match[2])
    if match.re is SELECT:
        sizes = [int(n) for n in match[2].split(",")]
        return int(match[1]), int(match[3]), sizes[int(match[3])]
    return int(match[1]), int(match[2]), int(match[3])


def _frame_of(context: ErrorContext, *functions: str) -> dict[str, Any]:
    """The variables of the running function of torch's, {} where none of these was running."""
    return next((dict(f.names) for f in library_frames(context) if f.site.function in functions), {})


def _named(value: Any, role: str, context: ErrorContext) -> OpArgument:
    argument = next((p for p in op_arguments(context) if p.value is value), None)
    return argument if argument is not None else OperandNames(context).argument(value, role)


def _embedding(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    names = _frame_of(context, "embedding", "embedding_bag")
    table, index = names.get("weight"), names.get("input")
    if table is None or index is None or not is_tensor(table) or not is_tensor(index):
        return _selected(facts, context)
    module = failing_module(context)
    argument = _users_index(_named(index, "input", context), context)
    path = OperandNames(context).module(module) if is_instance(module, (nn.Embedding, nn.EmbeddingBag)) else ""
    weight = _named(table, "weight", context)
    if not path and weight.owner and weight.name == f"{weight.owner}.weight":  # compiled: the module has no frame
        path = weight.owner
    facts = dataclasses.replace(
        facts,
        kind="embedding",
        table=path or weight.name,
        module="" if path == type(module).__name__ else path,
        size=table.shape[0],
        width=table.shape[-1],
        dim=0,
        shape=tuple(table.shape),
        index=argument.plain(read=True),
        beyond=beyond(index, 0, table.shape[0] - 1),
    )
    if facts.beyond is None:
        return None
    counted, along, origin = _counted(argument.name, context)
    words = None if counted else _vocabulary(facts.beyond, table.shape[0], context)
    whole = dataclasses.replace(facts.beyond, high=_highest(index, facts.beyond.high, context))
    larger = grown(whole, table, context)
    if larger is not None and type(module) is nn.Embedding and not counted:
        larger = _made_larger(context, module, larger, max(int(larger.code), words[1] if words else 0))
    return dataclasses.replace(facts, grown=larger, counted=counted, along=along, origin=origin, vocabulary=words)


def _highest(index: torch.Tensor, high: int | None, context: ErrorContext) -> int | None:
    """The largest id of the data that a batch of ids is taken from, as far as a variable holds it: a later batch must
    find its row, too. high: the largest of this batch."""
    ids, highest = index.detach().cpu(), list[int]()
    for _, value, _ in context.variables():
        dataset: Any = getattr(value, "dataset", None) if type(value) is DataLoader else value
        parts: list[Any] = list(dataset.tensors) if type(dataset) is TensorDataset else [dataset]
        if module_name(type(dataset)).startswith("pandas") and type(dataset).__name__ == "DataFrame":
            parts = [dataset[name].to_numpy() for name in dataset.columns if dataset[name].dtype.kind == "i"]
        for part in parts:
            if type(part) is np.ndarray and part.dtype.kind == "i":
                part = torch.tensor(part, device="cpu")
            alike = is_tensor(part) and part.shape[1:] == ids.shape[1:] and not part.is_floating_point()
            if alike and ids.numel() < part.numel() <= READ_AT_MOST and torch.isin(ids, part.detach().cpu()).all():
                highest.append(int(part.max()))
    return min(highest, default=high)  # of several that hold these ids, the nearest


def _made_larger(context: ErrorContext, table: nn.Embedding, fix: TriedFix, rows: int) -> TriedFix:
    """The fix as an edit of the call that makes the table; tried on the program behind the failing line."""
    from nbdebug.tools.errors.sandbox import continued
    from nbdebug.tools.errors.shapes.trials import constructor

    made = constructor(context, table)
    if made is None or not made[1].args or table.num_embeddings * table.embedding_dim > SMALL:
        return fix
    first = made[1].args[0]
    edit = edit_of(made[0], {first: str(rows) if isinstance(first, ast.Constant) else f"max({{raw}}, {rows})"})
    larger = nn.Embedding(rows, table.embedding_dim, dtype=table.weight.dtype, device=table.weight.device)
    trial = continued(context, None, {id(table): larger})
    if edit is None or trial is None or not trial.worked:
        return fix
    return TriedFix(str(rows), True, {**fix.after, "the program then runs": trial.text}, edit)


def _users_index(argument: OpArgument, context: ErrorContext) -> OpArgument:
    """For a tensor of indices only in torch's frames: the user's one with the same values, where there is one."""
    if argument.known:
        return argument
    for name, value, _ in context.variables():
        same = type(value) is torch.Tensor and not value.is_meta and value.dtype == argument.value.dtype
        if same and value.shape == argument.value.shape and torch.equal(value, argument.value):
            return dataclasses.replace(argument, name=name, known=True)
    return argument


def _selected(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    """index_select and similar functions have the same message: the operands of the user's line."""
    node = _call(context)
    if callee_name(node) not in ("index_select", "embedding", "index_add", "index_copy") or not context.users:
        return None
    parts = _parts(context)
    index = next((p for p in parts if not p.value.dtype.is_floating_point and p.value.ndim <= 1), None)
    table = next((p for p in parts if index is not None and p is not index and p.value.ndim), None)
    if index is None or table is None:
        return None
    dims = [value_of(arg, context.users[0]) for arg in getattr(node, "args", [])]
    dim = next((d for d in dims if type(d) is int), 0)
    bad = beyond(index.value, 0, table.value.shape[dim] - 1)
    if bad is None:
        return None
    size, shape = table.value.shape[dim], tuple(table.value.shape)
    index_fact = index.plain(read=True)
    return dataclasses.replace(facts, table=table.name, size=size, dim=dim, shape=shape, index=index_fact, beyond=bad)


def _counted(name: str, context: ErrorContext) -> tuple[str, str, ValueOrigin | None]:
    """The `arange` that created an index (then it is a position, and the sequence is too long), and the tensor whose
    length it counts."""
    way = origin_of(name, context, lambda node: callee_name(node) == "arange")
    if not way:
        return "", "", None
    maker = way[0].maker or way[0].node
    links = tuple(Link(binding.phrase, binding.where) for binding in way)
    sizes = _sized(maker)
    for word in ast.walk(maker) if not sizes else ():
        if isinstance(word, ast.Name):  # `batch, length = ids.shape` before it
            before = origin_of(word.id, context, lambda node: bool(_sized(node)))
            sizes += _sized(before[0].maker or before[0].node) if before else []
    along = ast.unparse(sizes[0]) if sizes else ""
    return ast.unparse(maker), along, ValueOrigin(way[0].name, way[0].code, "arange", way[0].where, links)


def _sized(node: ast.AST) -> list[ast.expr]:
    """The tensors whose shape an expression reads."""
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr in ("shape", "size")]


def _vocabulary(bad: OutOfRange, size: int, context: ErrorContext) -> tuple[str, int] | None:
    """A dict of the user's with more entries than the table has rows, and enough for the largest id."""
    for name, value, _ in context.variables():
        fits = type(value) is dict and size < len(value) <= 4 * size + 1000 and (bad.high or 0) < len(value)
        if fits and all(type(number) is int for number in value.values()):
            return name, len(value)
    return None


def _target(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    names = _frame_of(context, "cross_entropy", "nll_loss", "multi_margin_loss")
    scores, target, spared = names.get("input"), names.get("target"), names.get("ignore_index")
    if not is_tensor(scores) or not is_tensor(target):
        both = op_arguments(context)
        scores = next((p.value for p in both if p.value.dtype.is_floating_point), None)
        target = next((p.value for p in both if not p.value.dtype.is_floating_point), None)
        if scores is None or target is None:
            return None
    assert scores is not None and target is not None
    size = scores.shape[1 if scores.ndim > 1 else 0]
    bad = beyond(target, 0, size - 1, spared if type(spared) is int else -100)
    if bad is None:
        return None
    labels, table = _named(target, "target", context), _named(scores, "input", context).name
    last, layer = head(table, size, context)
    return dataclasses.replace(
        facts,
        kind="target",
        table=table,
        size=size,
        shape=tuple(scores.shape),
        index=labels.plain(read=True),
        beyond=bad,
        head=last,
        sizes_kept=_sizes_kept(last, size, context),
        shifted=shifted(bad, target, size, context),
        ignored=ignored(bad, target, context),
        grown=_more_classes(layer, target, context) if (bad.low or 0) >= 0 else None,
    )


def _classes(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    """one_hot with too few classes, or negative numbers in bincount."""
    index = next((p for p in _parts(context) if not p.value.dtype.is_floating_point), None)
    if index is None:
        return None
    node, size = _call(context), None
    for expr in [*getattr(node, "args", [])[1:], *(k.value for k in getattr(node, "keywords", []))]:
        value = value_of(expr, context.users[0])
        size = value if value is not UNKNOWN and type(value) is int else size
    if "smaller" in context.message:
        kind, table = "one_hot", "num_classes"
        bad = beyond(index.value, 0, size - 1) if size is not None else None
    else:
        kind, table, size = "negative", callee_name(node), None
        bad = beyond(index.value, 0, 1 << 62)
    if bad is None:
        return None
    return dataclasses.replace(facts, kind=kind, size=size, index=index.plain(read=True), beyond=bad, table=table)


def _call(context: ErrorContext) -> ast.AST:
    """What ran in the failing line; an empty module where that is not known."""
    return value_part(context.ran) or ast.Module([], [])


def _tensor(facts: IndexFacts, context: ErrorContext, value: int, dim: int | None, size: int) -> IndexFacts | None:
    """x[i], gather, scatter, take: the message has the number, the frames have its tensor."""
    parts = _parts(context)
    least = 0 if callee_name(_call(context)).startswith(("gather", "scatter", "index_", "take_along")) else -size
    indices = [(p, bad) for p in parts if (bad := beyond(p.value, least, size - 1)) is not None]
    indices = [(p, bad) for p, bad in indices if value in (bad.value, *bad.values)] or indices[:0]
    text = _indexed(context)
    mine = [p for p in parts if p.name == text]
    if text and not mine and indices:  # the result of a user's call: its size is in the message
        index = indices[0][0].plain(read=True)
        return dataclasses.replace(
            facts, table=text, size=size, dim=dim, least=least, index=index, beyond=indices[0][1]
        )
    tables = mine or [p for p in parts if not any(p is h for h, _ in indices)]
    fits = [p for p in tables if p.value.ndim and size in p.value.shape or dim is None and p.value.numel() == size]
    table = next(iter(fits), None)
    if table is None:
        return array_facts(facts, context, value, dim, size)
    shape = tuple(table.value.shape)
    axis = dim if dim is None or dim < len(shape) and shape[dim] == size else shape.index(size)
    facts = dataclasses.replace(
        facts,
        table=table.name,
        size=size,
        dim=axis,
        shape=shape,
        least=least,
        beyond=OutOfRange(value),
        key=_key(context, value),
        module=table.owner or "",
    )
    if indices:
        argument, bad = indices[0]
        facts = dataclasses.replace(facts, index=argument.plain(read=True), beyond=bad)
    return sample_of(facts, context)


def _indexed(context: ErrorContext) -> str:
    """The text of what the failing line indexes: `x` of x[i], x.gather(0, i), torch.gather(x, 0, i)."""
    node = _call(context)
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return ""
    module = value_of(node.func.value, context.users[0])
    return ast.unparse(node.args[0] if module in (torch, nn.functional) else node.func.value)


def _key(context: ErrorContext, value: int) -> str:
    """The text of a plain index in the failing line that has this value."""
    for node in ast.walk(_call(context)):
        for key in _keys(node) if isinstance(node, ast.Subscript) else ():
            if number(key, context.users[0]) == value and not isinstance(key, (ast.Constant, ast.UnaryOp)):
                return ast.unparse(key)
    return ""


# -- lists, arrays and tables ------------------------------------------------------------------------------------------

_WHOLE: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def number(node: ast.AST, frame: Frame) -> int | None:
    """The value of an integer expression, such as `i` or `i + self.width`, computed only from plain ints."""
    if isinstance(node, ast.BinOp) and type(node.op) in _WHOLE:
        left, right = number(node.left, frame), number(node.right, frame)
        return None if left is None or right is None else _WHOLE[type(node.op)](left, right)
    value = value_of(node, frame)
    return value if type(value) is int else None


def sample_of(facts: IndexFacts, context: ErrorContext) -> IndexFacts:
    """In a data set's `__getitem__`: the facts with the length that it returns, the requested sample, the data set's
    name, and the correct length."""
    frame = context.frame
    methods = _methods(frame) if frame is not None else {}
    if frame is None or "__len__" not in methods:
        return facts
    returned = [r.value for r in ast.walk(methods["__len__"]) if isinstance(r, ast.Return) and r.value]
    if not returned:
        return facts
    parameters = methods["__getitem__"].args.args[1:2]
    parameter = parameters[0].arg if parameters else ""
    value = frame.names.get(parameter)
    name, promised = _promise(frame, context)
    separate = parameter != facts.key and type(value) is int
    head, fits = ast.unparse(returned[0]), _fits(facts, parameter, frame)
    if head == fits:  # its length is right: the index is what is wrong
        return facts
    sample = f"`{parameter}` is {value}" if separate else ""
    return dataclasses.replace(facts, head=head, sample=sample, data_set=name, promised=promised, fits=fits)


def _methods(frame: Frame) -> dict[str, ast.FunctionDef]:
    """The methods of the class whose `__getitem__` was running."""
    if frame.site.function != "__getitem__":
        return {}
    for node in nodes_of(frame.site.file):
        if isinstance(node, ast.ClassDef):
            methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
            mine = methods.get("__getitem__")
            if mine is not None and mine.lineno <= frame.site.line <= (mine.end_lineno or 0):
                return methods
    return {}


def _fits(facts: IndexFacts, parameter: str, frame: Frame) -> str:
    """What `__len__` would have to return, where the failing index is the sample's or a fixed distance after it."""
    entries = f"{facts.table}.shape[{facts.dim}]" if facts.dim else f"len({facts.table})"
    ran = expression(frame)
    for node in ast.walk(ran) if ran is not None else ():
        if not isinstance(node, ast.Subscript) or ast.unparse(node.value) != facts.table:
            continue
        for key in _keys(node):
            if ast.unparse(key) == parameter == facts.key:
                return entries
            if isinstance(key, ast.BinOp) and isinstance(key.op, ast.Add) and ast.unparse(key) == facts.key:
                for mine, more in ((key.left, key.right), (key.right, key.left)):
                    ahead = number(more, frame)
                    names = {n.id for n in ast.walk(more) if isinstance(n, ast.Name)}
                    lasting = names <= {"self", *frame.globals}  # known in `__len__` as well
                    fits = ahead is not None and 0 < ahead < (facts.size or 0)
                    if ast.unparse(mine) == parameter and lasting and fits:
                        return f"{entries} - {ast.unparse(more)}"
    return ""


def _promise(frame: Frame, context: ErrorContext) -> tuple[str, int | None]:
    """(the data set by the user's name or its loader's, the number of samples that the loader's sampler got)."""
    mine, iterator = frame.names.get("self"), iterator_of(context)
    state = attributes(iterator) if iterator is not None else {}
    if mine is not None and state.get("_dataset") is mine:
        loader, name, _ = loader_of(context)
        if name == type(mine).__name__ and loader:
            name = f"{loader}.dataset"
        return name, _sampler_length(state.get("_sampler_iter"))
    names = (n for n, value, _ in context.variables() if value is mine and n.partition(".")[0] != "self")
    return next(names, "") if mine is not None else "", None


def _sampler_length(running: Any) -> int | None:
    """The length over which torch's sampler runs, from its own frames: the user's `__len__` is not called."""
    if type(running) is type(iter(range(0))):
        whole = running.__reduce__()[1][0]
        return whole.stop if type(whole) is range else None  # from Python 3.12 on it has only the rest
    frame = running.gi_frame if type(running) is GeneratorType else None
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
        return None
    length = frame.f_locals.get("n")
    return length if type(length) is int else _sampler_length(frame.f_locals.get("sampler_iter"))


WORDS = re.compile(
    r"^(?:list|tuple|string|deque|range object|bytes)(?: assignment)? index out of range|"
    r"^index -?\d+ is out of range|^single positional indexer is out-of-bounds"
)
SAMPLES = 10_000
"""Numbers of a comprehension that are compared."""
EXACT = (list, tuple, str, range, bytes, collections.deque, torch.Size)


def _label(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    """A row of a pandas table by a number that is no label of it any more, as rows were taken out."""
    frame, ran = context.frame, context.ran
    if frame is None or ran is None or not context.message.isdigit():
        return None
    missing = int(context.message)
    for node in [n for n in ast.walk(ran) if isinstance(n, ast.Subscript)]:
        base: ast.expr = node.value
        while isinstance(base, (ast.Subscript, ast.Attribute)) and value_of(base, frame) is UNKNOWN:
            base = base.value
        table: Any = value_of(base, frame)
        if module_name(type(table)).startswith("pandas") and type(table).__name__ in ("DataFrame", "Series"):
            labels, text = table.index, "" if isinstance(node.slice, ast.Constant) else ast.unparse(node.slice)
            if labels.dtype.kind == "i" and len(labels) and missing not in labels and missing <= labels.max():
                beyond = OutOfRange(missing, low=int(labels.min()), high=int(labels.max()))
                return dataclasses.replace(
                    facts, kind="label", table=ast.unparse(base), size=len(labels), key=text, beyond=beyond
                )
    return None


def sequence_facts(facts: IndexFacts, context: ErrorContext) -> IndexFacts | None:
    """The subscript of the failing line that is out of range."""
    if context.type != "IndexError" or not WORDS.search(context.message) or not context.users:
        return None
    frame = context.users[0]
    subscripts = _subscripts(frame)
    # raised in this very line
    alone = context.carried is not None and len(subscripts) == 1 and context.trail[-1] is frame
    for base, key, size, value in subscripts:
        if value is not None and not -size <= value < size or value is None and alone:
            text = "" if isinstance(key, (ast.Constant, ast.UnaryOp)) else ast.unparse(key)
            beyond = OutOfRange(value) if value is not None else OutOfRange(size, total=0)
            facts = dataclasses.replace(facts, kind="sequence", table=ast.unparse(base), size=size, least=-size)
            return sample_of(dataclasses.replace(facts, key=text, beyond=beyond), context)
    return None


def array_facts(facts: IndexFacts, context: ErrorContext, value: int, dim: int | None, size: int) -> IndexFacts | None:
    """NumPy's message is torch's: the array of the failing line whose size the message names."""
    frame, ran = context.frame, context.ran
    if frame is None or ran is None:
        return None
    subscripts = [node for node in ast.walk(ran) if isinstance(node, ast.Subscript)]
    facts = dataclasses.replace(facts, kind="sequence", size=size, dim=dim, least=-size, beyond=OutOfRange(value))
    for node in subscripts:
        table = value_of(node.value, frame)
        if type(table) is np.ndarray and dim is not None and dim < table.ndim and table.shape[dim] == size:
            mine = [ast.unparse(key) for key in _keys(node) if _reaches(key, value, frame)]
            facts = dataclasses.replace(facts, table=ast.unparse(node.value), shape=table.shape, key="".join(mine[:1]))
            return sample_of(facts, context)
    if len(subscripts) != 1 or subscripts[0] is not value_part(ran) or context.trail[-1] is not frame:
        return None
    key = ast.unparse(subscripts[0].slice)
    facts = dataclasses.replace(facts, table=ast.unparse(subscripts[0].value), key=key if key.isidentifier() else "")
    return sample_of(facts, context)


def _keys(node: ast.Subscript) -> list[ast.expr]:
    """The indices between the brackets."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _reaches(key: ast.expr, value: int, frame: Frame) -> bool:
    """Whether a key other than a constant has or contains the value."""
    result: Any = _whole(key, frame)
    if isinstance(key, ast.Constant) or result is UNKNOWN:
        return False
    array = type(result) is np.ndarray and result.dtype.kind in "iu"
    if array or is_tensor(result) and not result.is_meta and not result.dtype.is_floating_point:
        return bool((result == value).any())
    return is_instance(result, (int, np.integer)) and int(result) == value


def _whole(key: ast.expr, frame: Frame) -> Any:
    """The value of a key, also of a sum of whole numbers."""
    value = value_of(key, frame)
    result = number(key, frame) if value is UNKNOWN and isinstance(key, ast.BinOp) else None
    return value if result is None else result


def _subscripts(frame: Frame) -> list[tuple[ast.expr, ast.expr, int, int | None]]:
    """(what is indexed, the index, the number of entries, the value where known) of the failing line's subscripts."""
    subscripts = []
    for node in ast.walk(expression(frame) or ast.Module([], [])):
        if isinstance(node, ast.Subscript):
            size, value = _size(node.value, frame), _whole(node.slice, frame)
            if value is UNKNOWN and isinstance(node.slice, ast.Name) and size is not None:
                value = _first_beyond(node, node.slice.id, size, frame)
            whole = is_instance(value, (int, np.integer)) and type(value) is not bool
            if size is not None and (whole or value is UNKNOWN and isinstance(node.slice, ast.Name)):
                subscripts.append((node.value, node.slice, size, int(value) if whole else None))
    return subscripts


def _first_beyond(node: ast.AST, name: str, size: int, frame: Frame) -> Any:
    """The first value beyond `size` entries that a comprehension gives a variable of its own; UNKNOWN where it is not
    over known numbers."""
    tree = tree_of(frame.site.file)
    for clause in comprehensions(tree, node) if tree is not None else ():
        if isinstance(clause.target, ast.Name) and clause.target.id == name and not clause.ifs:
            numbers: Any = value_of(clause.iter, frame)
            if isinstance(clause.iter, ast.Call) and value_of(clause.iter.func, frame) is range:
                limits = [number(arg, frame) for arg in clause.iter.args]
                numbers = range(*limits) if limits and None not in limits else UNKNOWN  # type: ignore[arg-type]
            if type(numbers) in (range, list, tuple) and all(type(n) is int for n in numbers[:SAMPLES]):
                return next((n for n in numbers[:SAMPLES] if not -size <= n < size), UNKNOWN)
    return UNKNOWN


def _size(node: ast.expr, frame: Frame) -> int | None:
    """The number of entries of an object, where its length needs no code of the user's."""
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "iloc"):
        inner: Any = value_of(node.value, frame)
        if node.attr == "shape":
            return inner.ndim if is_tensor(inner) or type(inner) is np.ndarray else None
        table = module_name(type(inner)).partition(".")[0] == "pandas" and type(inner).__name__ in (
            "DataFrame",
            "Series",
        )
        return int(inner.shape[0]) if table else None
    if isinstance(node, (ast.List, ast.Tuple)) and not any(isinstance(part, ast.Starred) for part in node.elts):
        return len(node.elts)
    value: Any = value_of(node, frame)
    return len(value) if type(value) in (*EXACT, nn.Sequential, nn.ModuleList, nn.ParameterList) else None
