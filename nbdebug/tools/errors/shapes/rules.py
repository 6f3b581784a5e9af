"""The rule for sizes, numbers of axes and axes that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.tools.errors.shapes.facts import ShapeFacts, ShapeFix, ShapeOperand
from nbdebug.tools.errors.shapes.rules_wording import inputs, layer_name, mismatched_pair, shape_title, unit

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
    "state": "Make the hidden state for this batch.",
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
