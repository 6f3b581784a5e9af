"""The rule for sizes, numbers of axes and axes that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_shapes import Cure, Operand, ShapeFacts
from nbdebug.chapters.error.rules.shapes_more import FAMILIES, other
from nbdebug.chapters.error.rules.shapes_words import SENTENCES, layer, pair, parts, unit
from nbdebug.finding import Finding, Fix, Link

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
    "pictures": "Bring {name} to a size that the layer was made for.",
    "colours": "Bring {name} to the number of channels that the layer takes.",
    "resize": "Bring {name} to the size of the other.",
    "classes": "Give class numbers instead of one-hot rows or scores.",
    "classes-last": "Bring the classes of {name} to axis 1.",
    "axis": "Ask for an axis along which it fits.",
    "count": "Leave one of the sizes to torch.",
    "pooled": "Pool to the size that {name} was made for: then pictures of any size fit.",
    "behind": "Flatten what there is, and make {name} for it.",
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
    fixes = tuple(_fix(facts, cure) for cure in facts.cures) or _advice(facts)
    return Finding("error/shape-mismatch", title, facts.raised.where, _evidence(facts), fixes, _chain(facts))


def _fix(facts: ShapeFacts, cure: Cure) -> Fix:
    title = TITLES.get(cure.slug, "Change {name}.").format(name=f"`{cure.name}`" if cure.name else "it")
    if cure.slug == "layer":
        title = title.rstrip(".") + f": {facts.got} {unit(facts)}."
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
    if facts.uneven is not None:
        text, whole, by = facts.uneven
        return (
            Fix(
                f"Choose one of the two so that {whole} is a multiple of {by}.",
                f"assert {whole} % {text} == 0   # {', '.join(map(str, _divisors(whole)))}",
            ),
        )
    if facts.folded is not None:
        return (Fix("Keep the rows of the batch apart in that op.", "x = x.flatten(1)   # or x.reshape(len(x), -1)"),)
    if facts.kind not in ALSO and pair(facts) is None:
        return ()
    title, code = ALSO.get(facts.kind, ALSO["broadcast"])
    given = parts(facts)
    text, sizes = next(((t, n) for t, n in facts.numbers if type(n) is tuple), ("", ()))
    both = pair(facts) or (given[0], given[-1]) if given else (Operand("x"), Operand("y"))
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
    if facts.wanted is not None and facts.got is not None:
        found |= {"wanted": facts.wanted, "given": facts.got}
    if facts.axis is not None:
        found["joined along axis" if facts.kind == "join" else "axis"] = facts.axis
    if facts.layer is not None:
        found["layer"] = {facts.layer.path or facts.layer.kind: dict(facts.layer.sizes)}
    entered = facts.entered
    if entered is not None and entered.shape is not None and shapes.get(entered.name) != list(entered.shape):
        found["went in"] = {entered.name: list(entered.shape)}
    return found | {"message": facts.raised.message.partition("\n")[0][:300]}


def _chain(facts: ShapeFacts) -> tuple[Link, ...]:
    """The user's lines that led there, then the way of the shape through the layers: six links at most."""
    if not facts.passed:
        return facts.lines[-LINES:]
    entered, where, lines = facts.entered, facts.raised.where, facts.lines[-(LINES - 1) :]
    start = [Link(f"`{entered.name}` {list(entered.shape)} goes in", where)] if entered and entered.shape else []
    if (
        entered is not None
        and entered.shape == facts.passed[-1].shape
        or start
        and start[0].what in [link.what for link in lines]
    ):
        start = []  # the steps lie before it, or it is told already
    at = dataclasses.replace(where, module=None)
    ends = (
        [Link(f"{layer(facts)} wants {facts.wanted} and is given {facts.got}", at)]
        if facts.kind != "loss" and (None not in (facts.wanted, facts.got))
        else []
    )
    room = MOST - len(lines) - len(start) - len(ends)
    steps = [Link(f"after {step.what} it is {list(step.shape)}") for step in facts.passed[-room:]]
    return (*lines, *start, *steps, *ends)
