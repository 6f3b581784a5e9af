"""Sizes that do not fit: the facts, one sentence for each kind of misfit (operations first, then layers, losses and
plain Python), and the rule."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link
from nbdebug.text import count, listed
from nbdebug.tools.errors.rules import Raised, word_pairs

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ShapeOperand:
    """A tensor or array that the op was given. name: the user's text for it, "" where it has none; role: torch's name
    for it ("input", "target", "attn_mask"), "" in an expression of the user's; shape: None where it is not known."""

    name: str
    role: str = ""
    shape: Shape | None = None
    dtype: str = ""
    weight: bool = False


@dataclasses.dataclass(frozen=True)
class FailedLayer:
    """The module of torch's that failed. path: its name in the model; sizes: what it was made for (in_features)."""

    path: str
    kind: str
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ShapeStep:
    """One step in the history of a size: the output shape of this layer or op."""

    what: str
    shape: Shape


@dataclasses.dataclass(frozen=True)
class ShapeFix:
    """A change that may help. slug: which kind of change; name: of the tensor or module that it changes; code: what the
    user would write; verified: it was tried and the op ran (None: not tried); result: the output shape. edit: it as a
    change of the user's own text, and reached: how far the program ran with that text."""

    slug: str
    name: str
    code: str
    verified: bool | None = None
    result: Shape | None = None
    edit: Edit | None = None
    reached: str = ""


@dataclasses.dataclass(frozen=True)
class ShiftedSize:
    """A sequence of which one side of a loss was cut and the other was not. rows: of the batch; scores, target: the
    positions of each sequence on either side; name: the tensor that the longer side was made of; shape: its shape."""

    rows: int
    scores: int
    target: int
    name: str = ""
    shape: Shape = ()


@dataclasses.dataclass(frozen=True)
class ViewDownstream:
    """The layer that takes the output of the view that failed. path: its name; expected: the features it takes; actual:
    those that it would get if the view kept the rows."""

    path: str
    expected: int
    actual: int


@dataclasses.dataclass(frozen=True)
class ShapeFacts:
    """kind: what does not fit (see `call`). op: as the user wrote it ("@", "cat", "view"). axis, expected, actual:
    where, and the two sizes. which: the number of the operand at fault. arguments: the plain ones of the op, each as
    (text, value) (`(("dim", 2),)`, a shape). target: the shape that was expected. user_input: the user's tensor that
    went into the failing module from the user's line. lines: the user's lines that led there. history: how the shape
    came about, in order. batch_change: the op after which the predictions no longer had the rows of the batch.
    remainder: (text of a divisor, what is divided, by what), where a size like `12 // heads` leaves one."""

    raised: Raised
    kind: str
    op: str
    operands: tuple[ShapeOperand, ...] = ()
    layer: FailedLayer | None = None
    axis: int | None = None
    expected: int | None = None
    actual: int | None = None
    which: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    target: Shape | None = None
    user_input: ShapeOperand | None = None
    lines: tuple[Link, ...] = ()
    history: tuple[ShapeStep, ...] = ()
    batch_change: ShapeStep | None = None
    shift: ShiftedSize | None = None
    downstream: ViewDownstream | None = None
    remainder: tuple[str, int, int] | None = None
    fixes: tuple[ShapeFix, ...] = ()


UNITS = word_pairs(
    "Conv:channels Batch:channels Group:channels Instance:channels Layer:features RMS:features Linear:features "
    "Bilinear:features PReLU:channels RNN:features LSTM:features GRU:features Multihead:features Transformer:features"
)
EINSUM_LETTER = re.compile(r"subscript (\w) has size (\d+) for operand \d+ .*?previously seen size (\d+)")
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


def shape_title(facts: ShapeFacts) -> str:
    """The sentence for the kind of misfit; where an operand could not be read, a general one."""
    try:
        return SENTENCES.get(facts.kind, _other)(facts)
    except (IndexError, TypeError):
        return _other(facts)


def with_shape(operand: ShapeOperand) -> str:
    """ "`x` [3, 5]"; "its input [3, 5]" where it has no name of the user's."""
    name = f"`{operand.name}`" if operand.name else f"its {operand.role or 'input'}"
    return name if operand.shape is None else f"{name} {list(operand.shape)}"


def layer_name(facts: ShapeFacts) -> str:
    """ "`stages.3.1` (Linear)", or the op."""
    if facts.layer is None:
        return op_name(facts)
    path, kind = facts.layer.path, facts.layer.kind
    return f"`{path}` ({kind})" if path and path != kind else f"`{kind}`"


def op_name(facts: ShapeFacts) -> str:
    """The op by its name, where the line could be read."""
    return f"`{facts.op}`" if facts.op else "the line that failed"


def unit(facts: ShapeFacts) -> str:
    return next((word for start, word in UNITS.items() if facts.op.lower().startswith(start.lower())), "values")


def axes(shape: Shape | None) -> str:
    return count(len(shape), "axis", "axes") if shape else "no axis"


def inputs(facts: ShapeFacts) -> tuple[ShapeOperand, ...]:
    """The operands that are no weights; all where there are only weights."""
    return tuple(operand for operand in facts.operands if not operand.weight) or facts.operands


def mismatched_pair(facts: ShapeFacts) -> tuple[ShapeOperand, ShapeOperand] | None:
    """The two operands that differ, of those that must agree."""
    known = [op for op in inputs(facts) if op.shape is not None and (facts.op != "[]" or op.role != "self")]
    if len(known) < 2:
        return None
    if facts.axis is not None and facts.actual is not None and facts.expected is not None:
        back = facts.axis - max(len(operand.shape or ()) for operand in known)
        sizes = {
            size: operand
            for operand in known
            if operand.shape
            and len(operand.shape) >= -back
            and (size := operand.shape[back]) in (facts.actual, facts.expected)
        }
        if len(sizes) == 2:
            return sizes[facts.actual], sizes[facts.expected]
    return known[0], known[-1]


def _first_input(facts: ShapeFacts) -> ShapeOperand:
    return inputs(facts)[0] if inputs(facts) else ShapeOperand("", "tensor")


def _known(facts: ShapeFacts) -> list[ShapeOperand]:
    return [operand for operand in inputs(facts) if operand.shape is not None]


def _of_role(facts: ShapeFacts, *roles: str) -> ShapeOperand | None:
    return next((operand for role in roles for operand in facts.operands if role in operand.role), None)


def _what_arrives(facts: ShapeFacts, first: ShapeOperand, verb: str = "") -> str:
    """What a layer was given, by the user's name, or as what the user's tensor became. verb: " is" between the two."""
    entry = facts.user_input
    if first.name:
        return f"`{first.name}`{verb} {list(first.shape)}" if first.shape is not None else f"`{first.name}`"
    if entry is None or entry.shape is None:
        return f"its input is {list(first.shape or ())}"
    if entry.shape == first.shape:
        return f"`{entry.name}`{verb} {list(entry.shape)}"
    return f"`{entry.name}` {list(entry.shape)} reaches it as {list(first.shape or ())}"


# -- operations ------------------------------------------------------------------------------------------------------


def _product(facts: ShapeFacts) -> str:
    both = mismatched_pair(facts)
    if facts.op == "scaled_dot_product_attention":
        return _dot_product_attention(facts)
    if (letter := EINSUM_LETTER.search(facts.raised.message)) is not None and facts.which is not None:
        return _einsum(facts, letter)
    if both is None or both[0].shape is None or both[1].shape is None:
        names = [operand.name for operand in facts.operands if operand.name][:2]
        start = f"{listed(names) if len(names) == 2 else 'Two matrices'} can't be multiplied: "
        if facts.actual is None or facts.expected is None:
            return start + "their shapes do not match"
        return start + f"the first has {count(facts.actual, 'column')}, the second {count(facts.expected, 'row')}"
    a, b = both
    if facts.actual is None or facts.expected is None:
        return f"{with_shape(a)} and {with_shape(b)} can't be multiplied by {op_name(facts)}"
    second = "the second-to-last axis of the second" if len(b.shape or ()) > 1 else "the second"
    return (
        f"{with_shape(a)} and {with_shape(b)} can't be multiplied: the last axis of the first is {facts.actual}, "
        f"{second} is {facts.expected}"
    )


def _einsum(facts: ShapeFacts, match: re.Match[str]) -> str:
    """einsum: the letter that has two sizes."""
    letter, size, before = match.groups()
    operands = [operand for operand in facts.operands if not operand.name.startswith(("'", '"'))]
    if facts.which is None or facts.which >= len(operands):
        return f"In {op_name(facts)}, `{letter}` has two sizes: {before} and {size}"
    odd, others = operands[facts.which], [operand for i, operand in enumerate(operands) if i != facts.which]
    beside = f"and {before} in {with_shape(others[0])}" if len(others) == 1 else f"but {before} before that"
    return f"In {op_name(facts)}, `{letter}` is {size} in {with_shape(odd)} {beside}"


def _dot_product_attention(facts: ShapeFacts) -> str:
    """Queries, keys, values and a mask, in this order: [..., length, size] each."""
    shapes = [operand.shape or () for operand in facts.operands]
    if len(shapes) < 3 or min(map(len, shapes[:3])) < 2:
        return f"The operands of {op_name(facts)} do not match"
    query, key, value = facts.operands[:3]
    both = f"{with_shape(query)} and {with_shape(key)}"
    if shapes[0][-1] != shapes[1][-1]:
        return f"{both} have different head sizes: {shapes[0][-1]} and {shapes[1][-1]}"
    if len(facts.operands) > 3 and shapes[3][-2:] != (shapes[0][-2], shapes[1][-2]):
        expected = f"[..., {shapes[0][-2]}, {shapes[1][-2]}]"
        return f"The mask {with_shape(facts.operands[3])} does not match {both}: the expected shape is {expected}"
    odd = key if shapes[0][:-2] != shapes[1][:-2] else value
    return f"{with_shape(query)} and {with_shape(odd)} do not match in {op_name(facts)}"


def _broadcast(facts: ShapeFacts) -> str:
    both = mismatched_pair(facts)
    if facts.op == "scaled_dot_product_attention":
        return _dot_product_attention(facts)
    if both is None:
        sizes = f": {facts.actual} and {facts.expected} on axis {facts.axis}" if facts.actual is not None else ""
        names = [operand.name for operand in facts.operands if operand.name][:2]
        return f"{listed(names) if len(names) > 1 else 'The operands'} do not match in {op_name(facts)}{sizes}"
    a, b = both
    start = f"{with_shape(a)} and {with_shape(b)}"
    if facts.op in ("@", "matmul", "bmm", "baddbmm") and facts.actual is not None:
        return f"{start} can't be multiplied: they are batches of {facts.actual} and {facts.expected} matrices"
    return f"{start} do not match in {op_name(facts)}{_clash(a.shape or (), b.shape or ())}"


def _clash(a: Shape, b: Shape) -> str:
    """Where two shapes clash, counted from the last axis as broadcasting does."""
    for i in range(1, min(len(a), len(b)) + 1):
        if a[-i] != b[-i] and 1 not in (a[-i], b[-i]):
            axis = f"axis {len(a) - i}" if len(a) == len(b) else "the last axis" if i == 1 else f"axis -{i}"
            return f": {axis} is {a[-i]} in one and {b[-i]} in the other"
    return ""


def _into(facts: ShapeFacts) -> str:
    """Assigning and expanding: the place has one shape, the value another."""
    known = _known(facts)
    target = next((operand for operand in known if operand.role in ("target", "self")), None)
    value = next((operand for operand in reversed(known) if operand is not target), None)
    if facts.op.startswith(("expand", "repeat")) and target is not None and facts.op != "expand_as":
        sizes = ", ".join(text for text, _ in facts.arguments)
        if facts.actual is not None and facts.axis is not None:
            only = f"only an axis of size 1 can be expanded, and axis {facts.axis} has size {facts.actual}"
            return f"{with_shape(target)} can't be expanded to ({sizes}): {only}"
        return f"{with_shape(target)} has {axes(target.shape)}, more than `{facts.op}({sizes})` names"
    if target is not None and value is not None:
        clash = _clash(target.shape or (), value.shape or ())
        return f"{with_shape(value)} does not fit into {with_shape(target)}{clash}"
    if facts.target is not None and facts.kind == "assign":
        actual_operand = value or target
        actual = "" if actual_operand is None else f": {with_shape(actual_operand)}"
        return f"{op_name(facts)} expects the shape {list(facts.target)} but gets another{actual}"
    if len(known) > 1:
        rest = f"axis {facts.axis} must be {facts.expected}"
        return f"{with_shape(known[0])} does not match the other operands of {op_name(facts)}: {rest}"
    return f"A value does not fit where {op_name(facts)} puts it: {facts.actual} against {facts.expected}"


def _join(facts: ShapeFacts) -> str:
    known = _known(facts)
    if len(known) < 2:
        return f"The tensors given to {op_name(facts)} do not have the same shape"
    which = facts.which if facts.which is not None and facts.which < len(known) else None
    odd = known[which] if which else next((op for op in known if op.shape != known[0].shape), known[-1])
    other = known[0] if odd is not known[0] else known[-1]
    a, b = other.shape or (), odd.shape or ()
    if len(a) != len(b):
        sizes = f"one has {axes(b)}, the other {axes(a)}"
        return f"{with_shape(odd)} and {with_shape(other)} can't be joined by {op_name(facts)}: {sizes}"
    differ = [i for i, (x, y) in enumerate(zip(b, a)) if x != y]
    along = f" along axis {facts.axis}" if facts.axis is not None else ""
    differ = [i for i in differ if i != facts.axis] or differ
    sizes = f": axis {differ[0]} is {a[differ[0]]} and {b[differ[0]]}" if differ else ""
    return f"{with_shape(other)} and {with_shape(odd)} can't be joined by {op_name(facts)}{along}{sizes}"


def _count(facts: ShapeFacts) -> str:
    first, sizes = _first_input(facts), facts.target or ()
    view = f"`{facts.op}({', '.join(text for text, _ in facts.arguments)})`"
    if facts.remainder is not None:
        text, whole, by = facts.remainder
        value = f"`{text}`" if text == str(by) else f"`{text}`, {by}"
        return f"{with_shape(first)} can't be divided evenly by {view}: {whole} is not a multiple of {value}"
    if facts.op == "unflatten" or not sizes:
        return f"{with_shape(first)} can't have the shape that {view} requests"
    total, fixed = math.prod(first.shape or ()), math.prod(n for n in sizes if n > 0)
    elements = f"{with_shape(first)} has {count(total, 'element')}, "
    if -1 in sizes:
        return elements + f"not a multiple of the {fixed} that {view} needs"
    after = facts.downstream
    rows = f": {after.actual} in each row, and `{after.path}` (Linear) expects {after.expected}" if after else ""
    return elements + f"but {view} needs {fixed}{rows}"


def _axis(facts: ShapeFacts) -> str:
    first = _first_input(facts)
    if facts.op == "[]":
        return f"{with_shape(first)} has {axes(first.shape)}, fewer than its indices"
    if facts.axis is None:
        return f"{with_shape(first)} is a single number: it has no axis"
    if first.shape is None and facts.actual is not None:
        name = op_name(facts)
        tensor = f"a tensor that has {axes((1,) * facts.actual)}"
        return f"{name[:1].upper() + name[1:]} asks for axis {facts.axis} of {tensor}"
    ends = f" (0 to {len(first.shape) - 1})" if first.shape and len(first.shape) > 1 else ""
    return f"{with_shape(first)} has {axes(first.shape)}{ends}, but {op_name(facts)} asks for axis {facts.axis}"


def _order(facts: ShapeFacts) -> str:
    first = inputs(facts)[0]
    start = f"{with_shape(first)} has {axes(first.shape)}, but "
    if facts.op == "t":
        return start + "`t()` transposes a matrix"
    return start + f"{op_name(facts)} gets {facts.expected or len(facts.arguments)}"


def _index(facts: ShapeFacts) -> str:
    known = [operand for operand in facts.operands if operand.shape is not None]
    first = known[0] if known else ShapeOperand("")
    if len(known) < 2:
        arguments = ", ".join(text for text, _ in facts.arguments)
        return f"{with_shape(first)} has fewer entries than `{facts.op}({arguments})` asks for"
    index, a, b = known[1], known[1].shape or (), first.shape or ()
    if index.dtype == "bool":
        axis = facts.axis or 0
        axis = axis if axis < min(len(a), len(b)) else 0
        sizes = f"axis {axis} is {(a or (0,))[axis]} and {(b or (0,))[axis]}"
        return f"The mask {with_shape(index)} does not match {with_shape(first)}: {sizes}"
    if len(a) != len(b):
        same = f"{op_name(facts)} needs the same number"
        return f"The index {with_shape(index)} has {axes(a)} and {with_shape(first)} has {axes(b)}: {same}"
    return f"The index {with_shape(index)} does not match {with_shape(first)} in {op_name(facts)}"


# -- layers ----------------------------------------------------------------------------------------------------------


def _features(facts: ShapeFacts) -> str:
    first, expected, actual = inputs(facts)[0], facts.expected, facts.actual
    what = unit(facts)
    if facts.op == "MultiheadAttention" and facts.which is not None:
        odd = facts.operands[facts.which]
        roles = {"key": ("keys", "kdim"), "value": ("values", "vdim")}
        tensors, setting = roles.get(odd.role, ("queries", "embed_dim"))
        size = f"{tensors} with {expected} features ({setting})"
        return f"{layer_name(facts)} expects {size} but gets {actual}: {with_shape(odd)}"
    axis = "" if what == "features" or facts.axis is None else f" on axis {facts.axis}"
    elsewhere = ""
    others = [i for i, size in enumerate(first.shape or ()) if size == expected and i != facts.axis]
    if others and first.name and facts.fixes and facts.fixes[0].slug in ("permute", "transpose"):
        elsewhere = f", with {expected} on axis {others[-1]}"
    what = what.removesuffix("s") if expected == 1 else what
    arrives = _what_arrives(facts, first, " is")
    return f"{layer_name(facts)} expects {expected} {what}{axis} but gets {actual}: {arrives}{elsewhere}"


def _rank(facts: ShapeFacts) -> str:
    operands = inputs(facts)
    first = operands[facts.which if facts.which is not None and facts.which < len(operands) else 0]
    if facts.op == "einsum" and facts.which is not None and facts.expected is not None:
        return (
            f"{with_shape(first)} has {axes(first.shape)}, but the equation of `einsum` names {facts.expected} for it"
        )
    if facts.layer is None or first.shape is None:
        return f"{with_shape(first)} has {axes(first.shape)}, which {op_name(facts)} does not accept"
    number = count(facts.expected, "axis", "axes") if facts.expected is not None else ""
    expected = _layer_axes(facts.layer.kind) or number
    expects = f"expects {expected} but gets" if expected else "gets"
    return f"{layer_name(facts)} {expects} {len(first.shape)}: {_what_arrives(facts, first)}"


def _layer_axes(kind: str) -> str:
    """How many axes a layer takes, by its class (torch.nn's pages give the shapes)."""
    if kind in RECURRENT:
        return "1 or 2 axes" if kind.endswith("Cell") else "2 or 3 axes"
    digit = kind[-2:-1] if kind.endswith("d") else ""
    if not digit.isdigit():
        return ""
    if kind == "BatchNorm1d":
        return "2 or 3 axes"
    return f"{int(digit) + 2} axes" if kind.startswith("Batch") else f"{int(digit) + 1} or {int(digit) + 2} axes"


def _hidden(facts: ShapeFacts) -> str:
    state, first = _of_role(facts, "hx", "hidden", "h_0"), inputs(facts)[0]
    name = with_shape(state) if state is not None else "The hidden state"
    batch = f"a batch of {facts.expected}" if facts.expected is not None else with_shape(first)
    expected = "" if facts.target is None else f": it must be {list(facts.target)}, layers first, then the batch"
    return f"{name} does not match {layer_name(facts)} and {batch}{expected}"


def _mask(facts: ShapeFacts) -> str:
    mask, query = _of_role(facts, "key_padding_mask", "attn_mask", "mask"), _of_role(facts, "query", "input", "src")
    name = with_shape(mask) if mask is not None else "The mask"
    expected = f": axis {facts.axis} must be {facts.expected}" if facts.axis is not None else ""
    if facts.target is not None:
        expected = f": it must be {list(facts.target)}"
    if facts.user_input is not None and (query is None or not query.name):
        query = facts.user_input
    queries = with_shape(query) if query is not None else "the queries"
    return f"{name} does not match {queries} in {layer_name(facts)}{expected}"


def _attention(facts: ShapeFacts) -> str:
    operands = [operand for operand in facts.operands if operand.role in ("query", "key", "value", "src", "tgt")]
    first = next((operand.shape for operand in operands), None)
    odd = next((op for op in operands[1:] if None not in (op.shape, first) and op.shape != first), None)
    if odd is None:
        return f"The queries, keys and values given to {layer_name(facts)} do not match"
    batch_first = facts.layer is not None and facts.layer.sizes.get("batch_first") == 1
    batch = f"its batch axis is {0 if batch_first else 1} (batch_first={batch_first})"
    return f"{with_shape(operands[0])} and {with_shape(odd)} do not match in {layer_name(facts)}: {batch}"


def _small(facts: ShapeFacts) -> str:
    kernel = facts.layer.sizes.get("kernel_size") if facts.layer is not None else None
    size = f" with its kernel of {kernel}" if kernel is not None else ""
    arrives = _what_arrives(facts, inputs(facts)[0])
    if "reaches" in arrives or "input" in arrives:
        return f"The input is too small for {layer_name(facts)}{size}: {arrives}"
    return f"{arrives} is too small for {layer_name(facts)}{size}"


def _divide(facts: ShapeFacts) -> str:
    if facts.remainder is not None:
        text, whole, divisor = facts.remainder
        return f"{layer_name(facts)} can't divide {whole} evenly: it is not a multiple of `{text}`, which is {divisor}"
    sizes = facts.layer.sizes if facts.layer is not None else {}
    by = facts.expected or sizes.get("num_groups")
    what = facts.actual if facts.actual is not None else "its size"
    end = f": {_what_arrives(facts, inputs(facts)[0])}" if inputs(facts) else ""
    if not inputs(facts) and facts.arguments:
        end = f": it is created with {', '.join(text for text, _ in facts.arguments)}"
    multiple = f"a multiple of {by}" if by else "divisible"
    return f"{layer_name(facts)} divides an axis evenly, but {what} is not {multiple}{end}"


# -- losses ----------------------------------------------------------------------------------------------------------


def _loss(facts: ShapeFacts) -> str:
    scores, target = _of_role(facts, "input"), _of_role(facts, "target")
    if scores is None or target is None or scores.shape is None or target.shape is None:
        return f"The predictions and the targets given to {op_name(facts)} do not match"
    both = f"{with_shape(scores)} and {with_shape(target)}"
    if facts.shift is not None:
        return f"{both} do not match: {_token_shift(facts)}"
    classes = facts.op in ("cross_entropy", "nll_loss")
    weighted = "weight" in [operand.role for operand in facts.operands]
    if weighted and classes and scores.shape[0] == (target.shape or (0,))[0]:
        weight = _of_role(facts, "weight")
        if weight is not None and weight.shape != scores.shape[1:2]:
            return (
                f"{with_shape(weight)} has no weight for each of the {scores.shape[-1]} classes of {with_shape(scores)}"
            )
    if facts.op.startswith("binary_cross"):
        return f"{both} must have the same shape for {op_name(facts)}"
    if not classes or not scores.shape:
        return f"{both} do not match in {op_name(facts)}"
    return _class_loss(facts, scores, target)


def _class_loss(facts: ShapeFacts, scores: ShapeOperand, target: ShapeOperand) -> str:
    """Scores [rows, classes, ...] need class indices [rows, ...]."""
    shape, classes = scores.shape or (), target.shape or ()
    both = f"{with_shape(scores)} and {with_shape(target)}"
    expects = f"{op_name(facts)} expects class indices of shape {[*shape[:1], *shape[2:]]}"
    if len(shape) == 1:
        one = f"{with_shape(scores)} is one row of scores for {op_name(facts)}"
        return f"{one}, but {with_shape(target)} is not one class index"
    if len(classes) == len(shape):
        return f"{with_shape(target)} has one axis too many: for {with_shape(scores)}, {expects}"
    if shape[:1] != classes[:1]:
        rows = f"the predictions have {count(shape[0], 'row')}, the targets {classes[0] if classes else 1}"
        after = f"after a `{facts.batch_change.what}` " if facts.batch_change is not None else ""
        return f"{both} do not match: {after}{rows}"
    if len(shape) > 2 and shape[:-1] == classes:
        axis = f"but {op_name(facts)} expects them on axis 1"
        return f"{with_shape(scores)} has its classes on the last axis, {axis}; the target is {with_shape(target)}"
    return f"{both} do not match: for such scores, {expects}"


def _token_shift(facts: ShapeFacts) -> str:
    """Which side of a next-token loss was cut."""
    shift = facts.shift
    assert shift is not None
    short, long = ("predictions", "targets") if shift.scores < shift.target else ("targets", "predictions")
    return (
        f"each of the {count(shift.rows, 'sequence')} has {count(shift.scores, 'prediction')} and "
        f"{count(shift.target, 'target')}; the {short} were cut by one, but `{shift.name}` {list(shift.shape)}, from "
        f"which the {long} are made, was not"
    )


def _lengths(facts: ShapeFacts) -> str:
    known = inputs(facts)
    if facts.actual is not None and known:
        sequences = f"the {count(facts.expected or 0, 'sequence')} of {with_shape(known[0])}"
        return f"{with_shape(known[-1])} has {count(facts.actual, 'length')} for {sequences}"
    name = with_shape(known[-1]) if known else ""
    if "sorted" in facts.raised.message:
        return f"{name or 'The lengths'} must be sorted, longest first, for {op_name(facts)}"
    return f"{name or 'The tensor of lengths'} contains a length of 0, which {op_name(facts)} can't pack"


# -- plain Python ----------------------------------------------------------------------------------------------------


def _unpack(facts: ShapeFacts) -> str:
    line = f"but the line unpacks {facts.expected}"
    text, shape = next(((t, n) for t, n in facts.arguments if type(n) is tuple), ("", ()))
    if text:
        return f"`{text}` is {list(shape)}: {count(len(shape), 'size')}, {line}"
    known = inputs(facts)
    if not known:
        return f"The line unpacks {facts.expected}, but there is another number of values"
    if len(known) == 1 and known[0].name.endswith(")"):
        return f"`{known[0].name}` returns one tensor {list(known[0].shape or ())}, {line}"
    if len(known) == 1:
        number = count((known[0].shape or (0,))[0], "entry", "entries")
        return f"{with_shape(known[0])} has {number} along its first axis, {line}"
    return f"`{known[0].name.rpartition('[')[0]}` returns {len(known)} tensors, {line}"


def _scalar(facts: ShapeFacts) -> str:
    known = inputs(facts)
    if facts.op in ("tensor", "array") and known:
        return f"{op_name(facts)} makes tensors of numbers only, but gets {with_shape(known[0])}"
    name = with_shape(known[0]) if known else "The tensor"
    return f"{name} has several elements, but {op_name(facts)} needs a single one"


def _other(facts: ShapeFacts) -> str:
    known = [operand for operand in facts.operands if operand.shape is not None][:3]
    names = listed(map(with_shape, known), quote="")
    return f"{names or 'What it was given'} {'do' if len(known) > 1 else 'does'} not fit {layer_name(facts)}"


SENTENCES: dict[str, Callable[[ShapeFacts], str]] = {
    "product": _product,
    "broadcast": _broadcast,
    "inplace": lambda facts: (
        f"{with_shape(inputs(facts)[0])} can't hold the result of {op_name(facts)}, which has another shape"
    ),
    "expand": _into,
    "assign": _into,
    "join": _join,
    "count": _count,
    "strides": lambda facts: (
        f"{with_shape(inputs(facts)[0])} is not contiguous in memory, as after an exchange of axes, so `view` can't "
        "give it another shape"
    ),
    "split": lambda facts: (
        f"{with_shape(inputs(facts)[0])} has {facts.actual} entries on axis {facts.axis}, but the sizes "
        f"{list(facts.target or ())} add up to {sum(facts.target or ())}"
    ),
    "axis": _axis,
    "order": _order,
    "index": _index,
    "square": lambda facts: f"{with_shape(inputs(facts)[0])} is not a square matrix, which {op_name(facts)} needs",
    "gradient": lambda facts: (
        f"The backward of `{facts.raised.message.partition('Backward returned')[0].rpartition(' ')[2]}` returns a "
        f"gradient whose shape is not that of its input, {list(facts.target or ())}"
    ),
    "features": _features,
    "rank": _rank,
    "hidden": _hidden,
    "mask": _mask,
    "attention": _attention,
    "small": _small,
    "single": lambda facts: (
        f"{layer_name(facts)} can't compute a mean and a variance of one value in training mode: "
        f"{_what_arrives(facts, inputs(facts)[0])}"
    ),
    "divide": _divide,
    "loss": _loss,
    "lengths": _lengths,
    "unpack": _unpack,
    "scalar": _scalar,
    "truth": lambda facts: (
        f"The truth value of {with_shape(inputs(facts)[0]) if inputs(facts) else 'a tensor'} is ambiguous: it has "
        f"{'no' if 'no values' in facts.raised.message else 'several'} elements"
    ),
    "ragged": lambda facts: (
        f"{op_name(facts)} gets parts of different shapes"
        if facts.actual is None
        else f"{op_name(facts)} gets rows of different lengths: {facts.actual} where the first has {facts.expected}"
    ),
    "zero": lambda facts: (
        f"{op_name(facts)} joins along an axis, but gets single numbers (shape []), such as losses: they can be stacked"
    ),
    "picture": lambda facts: (
        f"{with_shape(inputs(facts)[0]) if inputs(facts) else 'The array'} is no picture for matplotlib, which takes "
        "[height, width], or the channels last: [height, width, 3 or 4]"
    ),
}


MAX_LINKS, MAX_LINES = 6, 3
"""Links of the chain, and the user's lines among them: the last ones."""
TITLES = {
    "transpose": "Transpose two axes of {name}.",
    "permute": "Permute the axes of {name} into the expected order.",
    "unsqueeze": "Add the missing axis to {name}.",
    "squeeze": "Remove the axis of size 1 from {name}.",
    "flatten": "Flatten several axes of {name} into one.",
    "layer": "Create {name} for the size that it gets.",
    "kind": "Use the layer for that number of axes.",
    "pool": "Pool to a fixed size before the flattening: then images of any size fit.",
    "images": "Resize {name} to a size that the layer was made for.",
    "channels": "Give {name} the number of channels that the layer expects.",
    "resize": "Resize {name} to the size of the other.",
    "classes": "Pass class indices instead of one-hot rows or scores.",
    "classes-last": "Move the classes of {name} to axis 1.",
    "axis": "Use an axis along which it fits.",
    "count": "Let torch compute one of the sizes (-1).",
    "between": "Flatten before this layer.",
    "tokens": "Normalize all tokens of {name} as rows, and give them their axes back.",
    "pooled": "Pool to the size that {name} was made for: then images of any size fit.",
    "downstream": "Flatten each row whole, and create {name} for that size.",
    "shift": "Cut the other side as well, so that each position meets the token after it.",
    "cut": "Take only as much of {name} as the other operand has.",
    "longer": "Make {name} as long as the other operand, or cut that to the length of {name}.",
    "reshape": "Use reshape, which copies where it must.",
    "order": "Name every axis.",
    "heads": "Repeat the mask for each head.",
    "state": "Leave the state out: torch begins with zeros then, of this batch's size.",
    "unsorted": "Let torch sort them.",
    "mean": "Take the mean first.",
    "stack": "Stack the tensors.",
    "rows": "Join the rows instead of stacking.",
    "topk": "Ask for no more than there are.",
}
ADVICE = {
    "broadcast": (
        "Give both the same shape where they are created; print them on the line before.",
        "print({first}.shape, {last}.shape)",
    ),
    "small": ("Give it larger inputs, pool less before it, or pad.", 'padding="same"   # or a smaller kernel_size'),
    "single": (
        "Drop the last batch where it has one row, or switch to eval() where nothing is trained.",
        "DataLoader(..., drop_last=True)   # or model.eval()",
    ),
    "scalar": ("Reduce it to one number, or keep the tensor.", "{first}.mean().item()   # or {first}.tolist()"),
    "truth": (
        "Say whether any or all of them must hold; `&` and `|` work element by element.",
        "if ({first}).any(): ...   # or ({first}).all()",
    ),
    "loss": (
        "Give predictions and targets shapes that match; print them on the line before.",
        "print({first}.shape, {last}.shape)",
    ),
    "unpack": ("Unpack as many values as there are.", "{sizes} = {text}"),
    "count": ("Keep the batch axis, whatever its size.", "{first}.reshape(len({first}), -1)"),
    "hidden": ("Make the hidden state for each batch: the last one may be smaller.", "state = None   # torch makes it"),
    "inplace": ("Write the result to a new tensor, which may be larger.", "{first} = {first} + ..."),
    "ragged": ("Pad them to one length.", "torch.nn.utils.rnn.pad_sequence([...], batch_first=True)"),
    "divide": ("Choose a size that divides evenly.", "channels % groups == 0"),
}
"""What to do where no change could be tried, by the kind of misfit."""


@rule(
    code="error/shape-mismatch",
    title="The shapes of two operands do not match.",
    symptom="mat1 and mat2 shapes cannot be multiplied; The size of tensor a must match the size of tensor b; expected "
    "input to have 3 channels; shape is invalid for input of size; Dimension out of range; and many more.",
    cause="An axis is missing, in another place, or of another size: images of another size than the Linear after the "
    "flattening was made for, channels on the last axis, a target [N, 1] beside [N], batch and time exchanged, a last "
    "batch that is smaller.",
    confirm="Print the shapes of the operands on the line before; the report names them.",
    fix="Move the axis to its place (`permute`, `unsqueeze`, `squeeze`), or create the layer for the size that it "
    "gets.",
    reference="https://pytorch.org/docs/stable/notes/broadcasting.html",
)
def shape_mismatch(facts: ShapeFacts) -> Finding | None:
    fixes = tuple(_fix(facts, fix) for fix in facts.fixes) or _advice(facts)
    where, evidence = facts.raised.where, _evidence(facts)
    return Finding("error/shape-mismatch", shape_title(facts), where, evidence, fixes, _chain(facts))


def _fix(facts: ShapeFacts, fix: ShapeFix) -> Fix:
    title = TITLES.get(fix.slug, "Change {name}.").format(name=f"`{fix.name}`" if fix.name else "it")
    if fix.slug == "layer":
        title = f"{title.rstrip('.')}: {facts.actual} {unit(facts)}."
    if fix.slug in ("count", "flatten") and facts.kind == "count" and fix.result and facts.target:
        before, now = facts.target[-1], fix.result[-1]
        if before not in (now, -1):
            title = f"{title.rstrip('.')}; the next op then gets {now} instead of {before}."
    after: dict[str, Any] = {}
    if fix.verified and fix.result is not None:
        after = {"output shape": str(list(fix.result)) if fix.result else "[] (a single number)"}
    if fix.verified and fix.reached:
        after["the program then runs"] = fix.reached
    if fix.edit is not None:
        return Fix.of(title, fix.edit, fix.verified, after)
    note = f"   # {fix.name}" if fix.slug == "layer" and fix.name else ""
    return Fix(title, fix.code + note, fix.verified, after)


def _advice(facts: ShapeFacts) -> tuple[Fix, ...]:
    if facts.remainder is not None:
        text, whole, by = facts.remainder
        divisors = [n for n in range(1, min(whole, 1000) + 1) if whole % n == 0][:12]
        text = str(by) if facts.kind == "divide" else text
        code = f"assert {whole} % {text} == 0   # {', '.join(map(str, divisors))}"
        return (Fix(f"Change one of the two: {whole} must be a multiple of {by}.", code),)
    if facts.batch_change is not None:
        return (Fix("Keep the batch axis in that op.", "x = x.flatten(1)   # or x.reshape(len(x), -1)"),)
    both = mismatched_pair(facts)
    if facts.kind not in ADVICE and both is None:
        return ()
    title, code = ADVICE.get(facts.kind, ADVICE["broadcast"])
    operands = inputs(facts)
    text, sizes = next(((t, n) for t, n in facts.arguments if type(n) is tuple), ("", ()))
    first, last = both or (operands[0], operands[-1]) if operands else (ShapeOperand("x"), ShapeOperand("y"))
    words = {
        "first": first.name or "x",
        "last": last.name or "y",
        "text": text or (operands[0].name if operands else "") or "x",
        "sizes": ", ".join(f"n{i}" for i in range(len(sizes))) or "result",
    }
    return (Fix(title, code.format(**words)),)


def _evidence(facts: ShapeFacts) -> dict[str, Any]:
    shapes = {op.name or op.role: list(op.shape) for op in facts.operands if op.shape is not None}
    evidence: dict[str, Any] = {"shapes": shapes}
    if facts.expected is not None and facts.actual is not None:
        evidence |= {"expected": facts.expected, "got": facts.actual}
    if facts.axis is not None:
        evidence["joined along axis" if facts.kind == "join" else "axis"] = facts.axis
    if facts.layer is not None:
        evidence["layer"] = {facts.layer.path or facts.layer.kind: dict(facts.layer.sizes)}
    entry = facts.user_input
    if entry is not None and entry.shape is not None and shapes.get(entry.name) != list(entry.shape):
        evidence["input shape"] = {entry.name: list(entry.shape)}
    return evidence | {"message": facts.raised.message.partition("\n")[0][:300]}


def _chain(facts: ShapeFacts) -> tuple[Link, ...]:
    """The user's lines that led there, then the history of the shape through the layers: six links at most."""
    if not facts.history:
        return facts.lines[-MAX_LINES:]
    entry, where, lines = facts.user_input, facts.raised.where, facts.lines[-(MAX_LINES - 1) :]
    start = [Link(f"`{entry.name}` {list(entry.shape)} goes in", where)] if entry and entry.shape else []
    same = entry is not None and entry.shape == facts.history[-1].shape
    if same or start and start[0].what in [link.what for link in lines]:
        start = []  # the steps are before it, or a line says so already
    ends = []
    if facts.kind != "loss" and facts.expected is not None and facts.actual is not None:
        sizes = f"expects {facts.expected} but gets {facts.actual}"
        ends = [Link(f"{layer_name(facts)} {sizes}", dataclasses.replace(where, module=None))]
    room = MAX_LINKS - len(lines) - len(start) - len(ends)
    steps = [Link(f"after {step.what} it is {list(step.shape)}") for step in facts.history[-room:]]
    return (*lines, *start, *steps, *ends)
