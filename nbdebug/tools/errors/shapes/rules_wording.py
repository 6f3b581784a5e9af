"""One sentence for each kind of misfit, with the user's names and the sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from nbdebug.tools.errors.shapes.facts import ShapeFacts, ShapeOperand

Shape = tuple[int, ...]
UNITS = {
    "Conv": "channels",
    "Batch": "channels",
    "Group": "channels",
    "Instance": "channels",
    "Layer": "features",
    "RMS": "features",
    "Linear": "features",
    "Bilinear": "features",
    "PReLU": "channels",
    "RNN": "features",
    "LSTM": "features",
    "GRU": "features",
    "Multihead": "features",
    "Transformer": "features",
}
LETTER = re.compile(r"subscript (\w) has size (\d+) for operand \d+ .*?previously seen size (\d+)")
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")


def shaped(operand: ShapeOperand) -> str:
    """ "`x` [3, 5]"; "its input [3, 5]" where it has no name of the user's."""
    name = f"`{operand.name}`" if operand.name else f"its {operand.role or 'input'}"
    return name if operand.shape is None else f"{name} {list(operand.shape)}"


def layer(facts: ShapeFacts) -> str:
    """ "`stages.3.1` (Linear)", or the op."""
    if facts.layer is None:
        return op(facts)
    path, kind = facts.layer.path, facts.layer.kind
    return f"`{path}` ({kind})" if path and path != kind else f"`{kind}`"


def op(facts: ShapeFacts) -> str:
    """The op by its name, where the line could be read."""
    return f"`{facts.op}`" if facts.op else "the line that failed"


def unit(facts: ShapeFacts) -> str:
    return next((word for start, word in UNITS.items() if facts.op.lower().startswith(start.lower())), "values")


def arrives(facts: ShapeFacts, first: ShapeOperand) -> str:
    """How the user knows what the layer was given: by its name, or as what their tensor became."""
    entered = facts.user_input
    if first.name or entered is None or entered.shape is None:
        return f"{shaped(first)}" if first.name else f"its input is {list(first.shape or ())}"
    if entered.shape == first.shape:
        return f"`{entered.name}` {list(entered.shape)}"
    return f"`{entered.name}` {list(entered.shape)} reaches it as {list(first.shape or ())}"


def axes(shape: Shape | None) -> str:
    count = len(shape or ())
    return "no axis" if not count else "1 axis" if count == 1 else f"{count} axes"


def parts(facts: ShapeFacts) -> tuple[ShapeOperand, ...]:
    return tuple(part for part in facts.operands if not part.weight) or facts.operands


def pair(facts: ShapeFacts) -> tuple[ShapeOperand, ShapeOperand] | None:
    """The two operands that differ, of those that must agree."""
    known = [part for part in parts(facts) if part.shape is not None and (facts.op != "[]" or part.role != "self")]
    if len(known) < 2:
        return None
    if facts.axis is not None and facts.actual is not None and facts.expected is not None:
        most = max(len(part.shape or ()) for part in known)
        back = facts.axis - most
        sizes = {
            size: part
            for part in known
            if part.shape and len(part.shape) >= -back and (size := part.shape[back]) in (facts.actual, facts.expected)
        }
        if len(sizes) == 2:
            return sizes[facts.actual], sizes[facts.expected]
    return known[0], known[-1]


def features(facts: ShapeFacts) -> str:
    first, wanted, got = parts(facts)[0], facts.expected, facts.actual
    what = unit(facts)
    if facts.op == "MultiheadAttention" and facts.which is not None:
        odd = facts.operands[facts.which]
        size = {"key": "keys of {} features (kdim)", "value": "values of {} features (vdim)"}.get(
            odd.role, "queries of {} features (embed_dim)"
        ).format(wanted)
        return f"{layer(facts)} takes {size} and is given {got}: {shaped(odd)}"
    on = "" if what == "features" or facts.axis is None else f" on axis {facts.axis}"
    where = ""
    others = [i for i, size in enumerate(first.shape or ()) if size == wanted and i != facts.axis]
    if others and first.name and facts.fixes and facts.fixes[0].slug in ("permute", "transpose"):
        where = f", with {wanted} on axis {others[-1]}"
    end = arrives(facts, first)
    verb = " is " if end.startswith("`") and "reaches" not in end else " "
    end = end.replace("` [", f"`{verb}[", 1) if verb == " is " else end
    what = what.removesuffix("s") if wanted == 1 else what
    return f"{layer(facts)} takes {wanted} {what}{on} and is given {got}: {end}{where}"


def product(facts: ShapeFacts) -> str:
    both = pair(facts)
    if facts.op == "scaled_dot_product_attention":
        return attended(facts)
    if (summed := LETTER.search(facts.raised.message)) is not None and facts.which is not None:
        return lettered(facts, summed)
    if both is None or both[0].shape is None or both[1].shape is None:
        named = [f"`{part.name}`" for part in facts.operands if part.name][:2]
        told = " and ".join(named) if len(named) == 2 else "Two matrices"
        if facts.actual is None or facts.expected is None:
            return f"{told} can't be multiplied: their shapes do not fit each other"
        return f"{told} can't be multiplied: the first has {facts.actual} columns, the second {facts.expected} rows"
    a, b = both
    if facts.actual is None or facts.expected is None:
        return f"{shaped(a)} and {shaped(b)} can't be multiplied by {op(facts)}"
    second = "the second-last of the other" if len(b.shape or ()) > 1 else "the other"
    return (
        f"{shaped(a)} and {shaped(b)} can't be multiplied: the last axis of the first has {facts.actual}, {second} "
        f"{facts.expected}"
    )


def lettered(facts: ShapeFacts, found: re.Match[str]) -> str:
    """einsum: the letter that has two sizes."""
    letter, size, before = found.groups()
    given = [part for part in facts.operands if not part.name.startswith(("'", '"'))]
    if facts.which is None or facts.which >= len(given):
        return f"In {op(facts)} `{letter}` has two sizes: {before} and {size}"
    odd, others = given[facts.which], [part for i, part in enumerate(given) if i != facts.which]
    beside = f" and of {before} in {shaped(others[0])}" if len(others) == 1 else f", and of {before} before that"
    return f"In {op(facts)} `{letter}` stands for an axis of {size} in {shaped(odd)}{beside}"


def attended(facts: ShapeFacts) -> str:
    """Queries, keys, values and a mask, in this order: [..., length, size] each."""
    shapes = [part.shape or () for part in facts.operands]
    if len(shapes) < 3 or min(map(len, shapes[:3])) < 2:
        return f"The operands of {op(facts)} do not fit each other"
    query, key, value = facts.operands[:3]
    if shapes[0][-1] != shapes[1][-1]:
        return f"{shaped(query)} and {shaped(key)} differ in the size of a head: {shapes[0][-1]} and {shapes[1][-1]}"
    if len(facts.operands) > 3 and shapes[3][-2:] != (shapes[0][-2], shapes[1][-2]):
        return (
            f"The mask {shaped(facts.operands[3])} does not fit: {shaped(query)} and {shaped(key)} want "
            f"[..., {shapes[0][-2]}, {shapes[1][-2]}]"
        )
    odd = key if shapes[0][:-2] != shapes[1][:-2] else value
    return f"{shaped(query)} and {shaped(odd)} do not fit each other in {op(facts)}"


def broadcast(facts: ShapeFacts) -> str:
    both = pair(facts)
    if facts.op == "scaled_dot_product_attention":
        return attended(facts)
    if both is None:
        sizes = f": {facts.actual} and {facts.expected} on axis {facts.axis}" if facts.actual is not None else ""
        named = [f"`{part.name}`" for part in facts.operands if part.name]
        told = " and ".join(named[:2]) if len(named) > 1 else "The operands"
        return f"{told} do not fit each other in {op(facts)}{sizes}"
    a, b = both
    if facts.op in ("@", "matmul", "bmm", "baddbmm") and facts.actual is not None:
        return (
            f"{shaped(a)} and {shaped(b)} can't be multiplied: they hold {facts.actual} and {facts.expected} matrices"
        )
    return f"{shaped(a)} and {shaped(b)} do not fit each other in {op(facts)}{_clash(a.shape or (), b.shape or ())}"


def _clash(a: Shape, b: Shape) -> str:
    """Where two shapes clash, counted from the last axis as broadcasting does."""
    for i in range(1, min(len(a), len(b)) + 1):
        if a[-i] != b[-i] and 1 not in (a[-i], b[-i]):
            place = f"axis {len(a) - i}" if len(a) == len(b) else "the last axis" if i == 1 else f"axis -{i}"
            return f": {place} is {a[-i]} in one and {b[-i]} in the other"
    return ""


def inplace(facts: ShapeFacts) -> str:
    first = parts(facts)[0]
    return f"{shaped(first)} can't take the result of {op(facts)} in place: it has another shape"


def into(facts: ShapeFacts) -> str:
    """Assigning and expanding: the place has one shape, the value another."""
    known = [part for part in parts(facts) if part.shape is not None]
    target = next((part for part in known if part.role in ("target", "self")), None)
    value = next((part for part in reversed(known) if part is not target), None)
    if facts.op.startswith(("expand", "repeat")) and target is not None and facts.op != "expand_as":
        given = ", ".join(text for text, _ in facts.arguments)
        if facts.actual is not None and facts.axis is not None:
            return (
                f"{shaped(target)} can't be expanded to ({given}): only an axis of 1 can grow, and axis "
                f"{facts.axis} has {facts.actual}"
            )
        return f"{shaped(target)} has {axes(target.shape)}, more than `{facts.op}({given})` names"
    if target is not None and value is not None:
        return f"{shaped(value)} does not fit into {shaped(target)}{_clash(target.shape or (), value.shape or ())}"
    if facts.target is not None and facts.kind == "assign":
        shown = value or target
        name = "" if shown is None else f": {shaped(shown)}"
        return f"{op(facts)} wants the shape {list(facts.target)} and is given another{name}"
    if len(known) > 1:
        return (
            f"{shaped(known[0])} does not fit the rest of {op(facts)}: it wants {facts.expected} on axis {facts.axis}"
        )
    return f"A value does not fit into the place it is put by {op(facts)}: {facts.actual} against {facts.expected}"


def join(facts: ShapeFacts) -> str:
    known = [part for part in parts(facts) if part.shape is not None]
    if len(known) < 2:
        return f"The tensors given to {op(facts)} do not have the same shape"
    which = facts.which if facts.which is not None and facts.which < len(known) else None
    odd = known[which] if which else next((p for p in known if p.shape != known[0].shape), known[-1])
    other = known[0] if odd is not known[0] else known[-1]
    if len(odd.shape or ()) != len(other.shape or ()):
        return (
            f"{shaped(odd)} and {shaped(other)} can't be joined by {op(facts)}: {axes(odd.shape)} against "
            f"{axes(other.shape)}"
        )
    differ = [i for i, (x, y) in enumerate(zip(odd.shape or (), other.shape or ())) if x != y]
    along = f" along axis {facts.axis}" if facts.axis is not None else ""
    differ = [i for i in differ if i != facts.axis] or differ
    at = differ[0] if differ else 0
    sizes = f": axis {at} is {(other.shape or ())[at]} and {(odd.shape or ())[at]}" if differ else ""
    return f"{shaped(other)} and {shaped(odd)} can't be joined by {op(facts)}{along}{sizes}"


def count(facts: ShapeFacts) -> str:
    first = parts(facts)[0] if parts(facts) else ShapeOperand("", "tensor")
    sizes = facts.target or ()
    asked = f"`{facts.op}({', '.join(text for text, _ in facts.arguments)})`"
    if facts.remainder is not None:
        text, whole, by = facts.remainder
        value = f"`{text}`" if text == str(by) else f"`{text}`, {by}"
        return f"{shaped(first)} can't be dealt out by {asked}: {whole} is no multiple of {value}"
    if facts.op == "unflatten" or not sizes:
        return f"{shaped(first)} can't be given the shape that {asked} asks for"
    total, fixed = math.prod(first.shape or ()), math.prod(n for n in sizes if n > 0)
    if -1 in sizes:
        return f"{shaped(first)} has {total} elements, no multiple of the {fixed} that {asked} asks for"
    behind = facts.downstream
    end = f": {behind.actual} for each row, and `{behind.path}` (Linear) takes {behind.expected}" if behind else ""
    return f"{shaped(first)} has {total} elements and {asked} asks for {fixed}{end}"


def axis(facts: ShapeFacts) -> str:
    first = parts(facts)[0] if parts(facts) else ShapeOperand("", "tensor")
    if facts.op == "[]":
        return f"{shaped(first)} has {axes(first.shape)}, fewer than it is indexed by"
    if facts.axis is None:
        return f"{shaped(first)} is a single number: it has no axis to go along"
    if first.shape is None and facts.actual is not None:
        return f"{_first(op(facts))} asks for axis {facts.axis} of a tensor that has {axes((1,) * facts.actual)}"
    ends = f" (0 to {len(first.shape) - 1})" if first.shape and len(first.shape) > 1 else ""
    return f"{shaped(first)} has {axes(first.shape)}{ends}, and {op(facts)} asks for axis {facts.axis}"


def _first(text: str) -> str:
    return text[:1].upper() + text[1:]


def order(facts: ShapeFacts) -> str:
    first = parts(facts)[0]
    if facts.op == "t":
        return f"{shaped(first)} has {axes(first.shape)}, and `t()` exchanges the two of a matrix"
    return f"{shaped(first)} has {axes(first.shape)}, and {op(facts)} is given {facts.expected or len(facts.arguments)}"


def rank(facts: ShapeFacts) -> str:
    first = parts(facts)[0]
    wanted = f" takes {facts.expected} axes and" if facts.expected is not None else ""
    if facts.layer is not None and first.shape is not None:
        name = arrives(facts, first)
        takes_so = f" takes {takes(facts)} and" if takes(facts) else wanted
        return f"{layer(facts)}{takes_so} is given {axes(first.shape)}: {name}"
    return f"{shaped(first)} has {axes(first.shape)}, which {op(facts)} can't take"


def takes(facts: ShapeFacts) -> str:
    """How many axes a layer takes, by its class (torch.nn's pages give the shapes)."""
    kind = facts.layer.kind if facts.layer is not None else ""
    if kind in RECURRENT:
        return "1 or 2 axes" if kind.endswith("Cell") else "2 or 3 axes"
    digit = kind[-2:-1] if kind.endswith("d") else ""
    if not digit.isdigit():
        return ""
    spatial = int(digit)
    if kind == "BatchNorm1d":
        return "2 or 3 axes"
    return f"{spatial + 2} axes" if kind.startswith("Batch") else f"{spatial + 1} or {spatial + 2} axes"


SENTENCES: dict[str, Callable[[ShapeFacts], str]] = {
    "features": features,
    "product": product,
    "broadcast": broadcast,
    "inplace": inplace,
    "expand": into,
    "assign": into,
    "join": join,
    "count": count,
    "axis": axis,
    "order": order,
    "rank": rank,
}
