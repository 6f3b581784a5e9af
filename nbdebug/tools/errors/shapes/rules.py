"""The rule for sizes, numbers of axes and axes that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.tools.errors.shapes.facts import ShapeFacts, ShapeFix, ShapeOperand
from nbdebug.tools.errors.shapes.rules_wording import SENTENCES, arrives, axes, layer, op, pair, parts, shaped, unit


def role(facts: ShapeFacts, *names: str) -> ShapeOperand | None:
    return next((part for name in names for part in facts.operands if name in part.role), None)


def loss(facts: ShapeFacts) -> str:
    scores, target = role(facts, "input"), role(facts, "target")
    if scores is None or target is None or scores.shape is None or target.shape is None:
        return f"The predictions and the targets given to {op(facts)} do not fit each other"
    both = f"{shaped(scores)} and {shaped(target)}"
    if facts.shift is not None:
        return f"{both} do not belong together: {_sequences(facts)}"
    classes = facts.op in ("cross_entropy", "nll_loss")
    if "weight" in [part.role for part in facts.operands] and classes and scores.shape[0] == (target.shape or (0,))[0]:
        weight = role(facts, "weight")
        if weight is not None and weight.shape != scores.shape[1:2]:
            return f"{shaped(weight)} weighs other classes than the {scores.shape[-1]} of {shaped(scores)}"
    if facts.op.startswith("binary_cross"):
        return f"{both} must have the same shape for {op(facts)}"
    if not classes or not scores.shape:
        return f"{both} do not fit each other in {op(facts)}"
    return _of_classes(facts, scores, target)


def _of_classes(facts: ShapeFacts, scores: ShapeOperand, target: ShapeOperand) -> str:
    """For scores [rows, classes, ...] class numbers [rows, ...] are wanted."""
    have, given = scores.shape or (), target.shape or ()
    if len(have) == 1:
        return f"{shaped(scores)} is one row of scores for {op(facts)}, and {shaped(target)} is not one class number"
    if given == have or len(given) == len(have):
        return (
            f"{shaped(target)} has an axis too many: for {shaped(scores)} {op(facts)} wants class numbers "
            f"{[*have[:1], *have[2:]]}"
        )
    if have[:1] != given[:1]:
        rows = given[0] if given else 1
        since = f"after a `{facts.batch_change.what}` " if facts.batch_change is not None else ""
        return (
            f"{shaped(scores)} and {shaped(target)} do not belong together: {since}the predictions have "
            f"{have[0]} rows, the targets {rows}"
        )
    if len(have) > 2 and have[:-1] == given:
        return (
            f"{shaped(scores)} has its classes on the last axis, and {op(facts)} wants them on axis 1; "
            f"the target is {shaped(target)}"
        )
    return (
        f"{shaped(scores)} and {shaped(target)} do not fit: for such scores {op(facts)} wants class numbers "
        f"{[*have[:1], *have[2:]]}"
    )


def _sequences(facts: ShapeFacts) -> str:
    """Which side of a next-token loss was cut."""
    cut = facts.shift
    assert cut is not None
    short, long = ("predictions", "targets") if cut.scores < cut.target else ("targets", "predictions")
    return (
        f"of each of the {cut.rows} sequences the predictions have {cut.scores} places and the targets "
        f"{cut.target}; the {short} were cut by one, and `{cut.name}` {list(cut.shape)}, of which the {long} are "
        "made, was not"
    )


def hidden(facts: ShapeFacts) -> str:
    state, first = role(facts, "hx", "hidden", "h_0"), parts(facts)[0]
    told = shaped(state) if state is not None else "The hidden state"
    batch = (
        f"a batch of {facts.expected}"
        if facts.expected is not None
        else f"`{first.name}` {list(first.shape or ())}"
        if first.name
        else f"its input {list(first.shape or ())}"
    )
    want = "" if facts.target is None else f": it wants {list(facts.target)}, layers first, then the batch"
    return f"{told} is no hidden state for {layer(facts)} and {batch}{want}"


def mask(facts: ShapeFacts) -> str:
    given, query = role(facts, "key_padding_mask", "attn_mask", "mask"), role(facts, "query", "input", "src")
    told = shaped(given) if given is not None else "The mask"
    want = (
        f": it wants {list(facts.target)}"
        if facts.target is not None
        else f": axis {facts.axis} must be {facts.expected}"
        if facts.axis is not None
        else ""
    )
    if facts.user_input is not None and (query is None or not query.name):
        query = facts.user_input
    return f"{told} does not fit {shaped(query) if query is not None else 'the queries'} in {layer(facts)}{want}"


def attention(facts: ShapeFacts) -> str:
    given = [part for part in facts.operands if part.role in ("query", "key", "value", "src", "tgt")]
    first = next((part.shape for part in given), None)
    odd = next((part for part in given[1:] if None not in (part.shape, first) and part.shape != first), None)
    if odd is None or not given:
        return f"The queries, keys and values given to {layer(facts)} do not fit each other"
    first_batch = facts.layer is not None and facts.layer.sizes.get("batch_first") == 1
    return (
        f"{shaped(given[0])} and {shaped(odd)} do not fit each other in {layer(facts)}: it takes the batch on axis "
        f"{0 if first_batch else 1} (batch_first={first_batch})"
    )


def small(facts: ShapeFacts) -> str:
    kernel = facts.layer.sizes.get("kernel_size") if facts.layer is not None else None
    size = f" with its kernel of {kernel}" if kernel is not None else ""
    told = arrives(facts, parts(facts)[0])
    end = ":" if "reaches" in told or "input" in told else " is"
    return (
        f"Too little is left for {layer(facts)}{size}: {told}"
        if end == ":"
        else f"{told} is too small for {layer(facts)}{size}"
    )


def single(facts: ShapeFacts) -> str:
    return (
        f"{layer(facts)} can't take a mean and a variance over one value while training: "
        f"{arrives(facts, parts(facts)[0])}"
    )


def lengths(facts: ShapeFacts) -> str:
    known = parts(facts)
    if facts.actual is not None and known:
        return (
            f"{shaped(known[-1])} gives {facts.actual} lengths for the {facts.expected} sequences of {shaped(known[0])}"
        )
    if "sorted" in facts.raised.message:
        return f"{shaped(known[-1]) if known else 'The lengths'} must be sorted, longest first, for {op(facts)}"
    return f"{shaped(known[-1]) if known else 'The lengths'} holds a length of 0, which {op(facts)} can't pack"


def index(facts: ShapeFacts) -> str:
    known = [part for part in facts.operands if part.shape is not None]
    first, mark = (known[0], known[1]) if len(known) > 1 else (known[0] if known else ShapeOperand(""), None)
    if mark is None:
        asked = ", ".join(text for text, _ in facts.arguments)
        return f"{shaped(first)} has fewer entries than `{facts.op}({asked})` asks for"
    if mark.dtype == "bool":
        at = facts.axis or 0
        at = at if at < min(len(mark.shape or ()), len(first.shape or ())) else 0
        sizes = f"axis {at} has {(mark.shape or (0,))[at]} and {(first.shape or (0,))[at]}"
        return f"The mask {shaped(mark)} does not cover {shaped(first)}: {sizes}"
    if len(mark.shape or ()) != len(first.shape or ()):
        return (
            f"The index {shaped(mark)} has {axes(mark.shape)} and {shaped(first)} has {axes(first.shape)}: "
            f"{op(facts)} wants as many"
        )
    return f"The index {shaped(mark)} does not fit {shaped(first)} in {op(facts)}"


def divide(facts: ShapeFacts) -> str:
    sizes = facts.layer.sizes if facts.layer is not None else {}
    by = facts.expected or sizes.get("num_groups")
    got = f"{facts.actual} is" if facts.actual is not None else "its size is"
    told = f": {arrives(facts, parts(facts)[0])}" if parts(facts) else ""
    if not parts(facts) and facts.arguments:
        told = f": it is made with {', '.join(text for text, _ in facts.arguments)}"
    return f"{layer(facts)} deals an axis out evenly, and {got} no multiple of {by or 'what it is dealt into'}{told}"


def unpack(facts: ShapeFacts) -> str:
    text, shape = next(((t, n) for t, n in facts.arguments if type(n) is tuple), ("", ()))
    if text:
        return f"`{text}` is {list(shape)}: {len(shape)} sizes, and the line unpacks {facts.expected}"
    known = parts(facts)
    if not known:
        return f"The line unpacks {facts.expected}, and there are not as many"
    if len(known) == 1 and known[0].name.endswith(")"):
        return f"`{known[0].name}` gives one tensor {list(known[0].shape or ())}, and the line unpacks {facts.expected}"
    if len(known) == 1:
        size = (known[0].shape or (0,))[0]
        return f"{shaped(known[0])} gives {size} parts along its first axis, and the line unpacks {facts.expected}"
    return f"`{known[0].name.rpartition('[')[0]}` gives {len(known)} tensors, and the line unpacks {facts.expected}"


def scalar(facts: ShapeFacts) -> str:
    known = parts(facts)
    if facts.op in ("tensor", "array") and known:
        return f"{op(facts)} makes tensors of numbers only, and is given {shaped(known[0])}"
    return f"{shaped(known[0]) if known else 'The tensor'} has several elements, and {op(facts)} wants a single one"


def truth(facts: ShapeFacts) -> str:
    known = parts(facts)
    return f"{shaped(known[0]) if known else 'The tensor'} is no single true or false: it has several elements"


def other(facts: ShapeFacts) -> str:
    known = [part for part in facts.operands if part.shape is not None]
    told = " and ".join(shaped(part) for part in known[:3])
    return f"{told or 'What it was given'} {'do' if len(known) > 1 else 'does'} not fit {layer(facts)}"


def strides(facts: ShapeFacts) -> str:
    return (
        f"{shaped(parts(facts)[0])} does not lie in memory in one piece, as after an exchange of axes, so `view` "
        "can't give it another shape"
    )


def square(facts: ShapeFacts) -> str:
    return f"{shaped(parts(facts)[0])} is no square matrix, and {op(facts)} takes only those"


def ragged(facts: ShapeFacts) -> str:
    return (
        f"{op(facts)} is given rows of different lengths: {facts.actual} where the first has {facts.expected}"
        if facts.actual is not None
        else f"{op(facts)} is given parts of different shapes"
    )


def split(facts: ShapeFacts) -> str:
    sizes = list(facts.target or ())
    return f"{shaped(parts(facts)[0])} has {facts.actual} on axis {facts.axis}, and the sizes {sizes} make {sum(sizes)}"


def gradient(facts: ShapeFacts) -> str:
    name = facts.raised.message.partition(" returned")[0].rpartition(" ")[2].removesuffix("Backward")
    return f"The backward of `{name}` gives a gradient of another shape than its input's, {list(facts.target or ())}"


FAMILIES: dict[str, Callable[[ShapeFacts], str]] = {
    "loss": loss,
    "hidden": hidden,
    "mask": mask,
    "attention": attention,
    "small": small,
    "single": single,
    "lengths": lengths,
    "index": index,
    "divide": divide,
    "unpack": unpack,
    "scalar": scalar,
    "truth": truth,
    "strides": strides,
    "square": square,
    "ragged": ragged,
    "gradient": gradient,
    "split": split,
}


MOST, LINES = 6, 3
"""Links of the way to the error that are told, and the user's lines among them: the last ones."""
TITLES = {
    "transpose": "Exchange two axes of {name}.",
    "permute": "Bring the axes of {name} into the order that is wanted.",
    "unsqueeze": "Give {name} the axis that it lacks.",
    "squeeze": "Take the axis of one from {name}.",
    "flatten": "Make several axes of {name} one.",
    "layer": "Make {name} for what it is given.",
    "kind": "Use the layer for that number of axes.",
    "pool": "Pool to a fixed size before the flattening: then pictures of any size fit.",
    "images": "Bring {name} to a size that the layer was made for.",
    "channels": "Bring {name} to the number of channels that the layer takes.",
    "resize": "Bring {name} to the size of the other.",
    "classes": "Give class numbers instead of one-hot rows or scores.",
    "classes-last": "Bring the classes of {name} to axis 1.",
    "axis": "Ask for an axis along which it fits.",
    "count": "Leave one of the sizes to torch.",
    "pooled": "Pool to the size that {name} was made for: then pictures of any size fit.",
    "downstream": "Flatten what there is, and make {name} for it.",
    "shift": "Cut the other side as well, so that each place meets the token after it.",
    "cut": "Take as much of {name} as there is to add it to.",
    "longer": "Make {name} as long as what it is added to, or bring that to the length it was made for.",
    "reshape": "Use reshape, which copies where it must.",
    "order": "Name every axis that there is.",
    "heads": "Repeat the mask for each head.",
    "state": "Make the hidden state for this batch.",
    "unsorted": "Let torch sort them.",
}
ALSO = {
    "broadcast": (
        "Bring both to one shape where they are made; print them on the line before.",
        "print({first}.shape, {last}.shape)",
    ),
    "small": ("Give it larger inputs, pool less before it, or pad.", 'padding="same"   # or a smaller kernel_size'),
    "single": (
        "Leave out the last batch where it has one row, or switch to eval() where nothing is trained.",
        "DataLoader(..., drop_last=True)   # or model.eval()",
    ),
    "scalar": ("Make one number of it, or keep the tensor.", "{first}.mean().item()   # or {first}.tolist()"),
    "truth": (
        "Say whether any or all of them must hold; `&` and `|` go element by element.",
        "if ({first}).any(): ...   # or ({first}).all()",
    ),
    "loss": (
        "Bring predictions and targets to shapes that belong together; print them on the line before.",
        "print({first}.shape, {last}.shape)",
    ),
    "unpack": ("Unpack as many as there are.", "{sizes} = {text}"),
    "count": ("Keep the rows of the batch apart, whatever their number.", "{first}.reshape(len({first}), -1)"),
    "hidden": ("Make the hidden state for each batch: the last one may be smaller.", "state = None   # torch makes it"),
    "inplace": ("Write it out of place: the result may then be larger.", "{first} = {first} + ..."),
    "ragged": ("Pad them to one length.", "torch.nn.utils.rnn.pad_sequence([...], batch_first=True)"),
    "divide": ("Choose a size that divides evenly.", "channels % groups == 0"),
}


@rule(
    code="error/shape-mismatch",
    title="Two shapes do not fit each other.",
    symptom="mat1 and mat2 shapes cannot be multiplied; The size of tensor a must match the size of tensor b; expected "
    "input to have 3 channels; shape is invalid for input of size; Dimension out of range; and many more.",
    cause="An axis is missing, in another place, or of another size: pictures of another size than the Linear behind "
    "the flattening was made for, channels on the last axis, a target [N, 1] beside [N], batch and time "
    "exchanged, a last batch that is smaller.",
    confirm="Print the shapes of the operands on the line before; the report names them.",
    fix="Bring the axis to its place (`permute`, `unsqueeze`, `squeeze`), or make the layer for the size that it is "
    "given.",
    reference="https://pytorch.org/docs/stable/notes/broadcasting.html",
)
def shape_mismatch(facts: ShapeFacts) -> Finding | None:
    sentence = (SENTENCES | FAMILIES).get(facts.kind, other)
    try:
        title = sentence(facts)
    except (IndexError, TypeError):  # an operand that could not be read: what is left is told
        title = other(facts)
    fixes = tuple(_fix(facts, cure) for cure in facts.fixes) or _advice(facts)
    return Finding("error/shape-mismatch", title, facts.raised.where, _evidence(facts), fixes, _chain(facts))


def _fix(facts: ShapeFacts, cure: ShapeFix) -> Fix:
    title = TITLES.get(cure.slug, "Change {name}.").format(name=f"`{cure.name}`" if cure.name else "it")
    if cure.slug == "layer":
        title = title.rstrip(".") + f": {facts.actual} {unit(facts)}."
    if (
        cure.slug in ("count", "flatten")
        and facts.kind == "count"
        and cure.result
        and facts.target
        and (facts.target[-1] not in (cure.result[-1], -1))
    ):
        title = f"{title.rstrip('.')}; what follows is then given {cure.result[-1]} instead of {facts.target[-1]}."
    after: dict[str, Any] = (
        {} if not cure.verified or cure.result is None else {"result": list(cure.result) or "a single number"}
    )
    note = f"   # {cure.name}" if cure.slug == "layer" and cure.name else ""
    return Fix(title, cure.code + note, cure.verified, after)


def _advice(facts: ShapeFacts) -> tuple[Fix, ...]:
    """What to do where no change could be tried."""
    if facts.remainder is not None:
        text, whole, by = facts.remainder
        return (
            Fix(
                f"Choose one of the two so that {whole} is a multiple of {by}.",
                f"assert {whole} % {text} == 0   # {', '.join(map(str, _divisors(whole)))}",
            ),
        )
    if facts.batch_change is not None:
        return (Fix("Keep the rows of the batch apart in that op.", "x = x.flatten(1)   # or x.reshape(len(x), -1)"),)
    if facts.kind not in ALSO and pair(facts) is None:
        return ()
    title, code = ALSO.get(facts.kind, ALSO["broadcast"])
    given = parts(facts)
    text, sizes = next(((t, n) for t, n in facts.arguments if type(n) is tuple), ("", ()))
    both = pair(facts) or (given[0], given[-1]) if given else (ShapeOperand("x"), ShapeOperand("y"))
    filled = {
        "first": both[0].name or "x",
        "last": both[1].name or "y",
        "text": text or (given[0].name if given else "") or "x",
        "sizes": ", ".join(f"n{i}" for i in range(len(sizes))) or "result",
    }
    return (Fix(title, code.format(**filled)),)


def _divisors(whole: int) -> list[int]:
    return [by for by in range(1, min(whole, 1000) + 1) if whole % by == 0][:12]


def _evidence(facts: ShapeFacts) -> dict[str, Any]:
    shapes = {part.name or part.role: list(part.shape) for part in facts.operands if part.shape is not None}
    found: dict[str, Any] = {"shapes": shapes}
    if facts.expected is not None and facts.actual is not None:
        found |= {"wanted": facts.expected, "given": facts.actual}
    if facts.axis is not None:
        found["joined along axis" if facts.kind == "join" else "axis"] = facts.axis
    if facts.layer is not None:
        found["layer"] = {facts.layer.path or facts.layer.kind: dict(facts.layer.sizes)}
    entered = facts.user_input
    if entered is not None and entered.shape is not None and shapes.get(entered.name) != list(entered.shape):
        found["went in"] = {entered.name: list(entered.shape)}
    return found | {"message": facts.raised.message.partition("\n")[0][:300]}


def _chain(facts: ShapeFacts) -> tuple[Link, ...]:
    """The user's lines that led there, then the way of the shape through the layers: six links at most."""
    if not facts.history:
        return facts.lines[-LINES:]
    entered, where, lines = facts.user_input, facts.raised.where, facts.lines[-(LINES - 1) :]
    start = [Link(f"`{entered.name}` {list(entered.shape)} goes in", where)] if entered and entered.shape else []
    if (
        entered is not None
        and entered.shape == facts.history[-1].shape
        or start
        and start[0].what in [link.what for link in lines]
    ):
        start = []  # the steps lie before it, or it is told already
    at = dataclasses.replace(where, module=None)
    ends = (
        [Link(f"{layer(facts)} wants {facts.expected} and is given {facts.actual}", at)]
        if facts.kind != "loss" and (None not in (facts.expected, facts.actual))
        else []
    )
    room = MOST - len(lines) - len(start) - len(ends)
    steps = [Link(f"after {step.what} it is {list(step.shape)}") for step in facts.history[-room:]]
    return (*lines, *start, *steps, *ends)
