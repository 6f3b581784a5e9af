"""How a finding is put into words: the headline, the chain of events, the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, figures, listed
from nbdebug.tools.nan.facts import NanFacts, Operand, OriginFact

MADE = {"nan": "NaN", "inf": "inf", "-inf": "-inf", "mixed": "inf and NaN"}
_TARGETS = {
    "loss": "The loss becomes {}.",
    "returned": "The step returns {}.",
    "gradient": "The gradient of {name} becomes {}.",
    "parameter": "The update makes {name} {}.",
    "buffer": "The running statistic {name} becomes {}.",
    "exception": "The step raises {name}.",
}

LIBRARY_FIXES = {
    "all-labels-ignored": Fix(
        "Leave out what has no label, where the data set is made. If a prompt fills the whole length: cut the prompt, "
        "not the answer.",
        'dataset = [item for item in dataset if any(label != -100 for label in item["labels"])]',
    ),
    "fully-masked-softmax": Fix(
        "Leave out what has no token, where the data set is made.",
        'dataset = [item for item in dataset if any(item["attention_mask"])]',
    ),
    "input-nonfinite": Fix(
        "Repair the data where it is read: the data set's __getitem__, or the collator.",
        "assert torch.isfinite(x).all(), index",
    ),
}
"""What a user can do where the line is in a package: at the data, the collator, the arguments."""


def answer(
    facts: NanFacts, code: str, clause: str, *fixes: Fix, where: Where | None = None, **evidence: Any
) -> Finding:
    """The finding of `code`; `clause` is one such as "divides by zero", to which subject and place are added."""
    place = where or facts.origin.where
    if place.library is not None and code in LIBRARY_FIXES:
        fixes = (LIBRARY_FIXES[code],)
    title = f"{subject(place)} {clause}{at(place)}"
    return Finding(f"nan/{code}", title, place, {**_numbers(facts.origin), **evidence}, tuple(fixes), chain(facts))


def subject(where: Where) -> str:
    """ "Row 3 (item 57 of the data set)", "Rows 1, 4 and 6", or "Step 12" where all rows are alike."""
    words = numbered("row", where.samples) if where.samples else f"step {where.step}"
    if where.items and len(where.items) <= 3:
        words += f" ({numbered('item', [item.index for item in where.items])} of the data set)"
    return words[0].upper() + words[1:]


def numbered(noun: str, numbers: Sequence[int], most: int = 6) -> str:
    """ "row 3", "rows 1, 4 and 6", "12 rows (1, 4, 6, …)"."""
    if len(numbers) > most:
        return f"{len(numbers):,} {noun}s ({', '.join(map(str, numbers[:3]))}, …)"
    return f"{noun}{'s' * (len(numbers) > 1)} {listed(numbers, most, quote='')}"


def at(where: Where) -> str:
    """ ": `head.ent` (In [7], line 4)"."""
    inside = f"`{where.module}`" if where.module else ""
    if inside and where.place:
        return f": {inside} ({where.place})"
    return f": {inside or where.place}" if inside or where.place else ""


def verb(where: Where, one: str, many: str) -> str:
    """The form of the verb that goes with `subject`."""
    return many if where.samples and len(where.samples) > 1 else one


# -- the chain ---------------------------------------------------------------------------------------------------------


def chain(facts: NanFacts) -> tuple[Link, ...]:
    """What happened, in order: a mask, where the operand came from, each origin, what went bad in the end."""
    shown = [facts.origin, *facts.descendants[:3]]
    masks = [o for o in facts.origins if o.intended and any(o.index in d.parents for d in shown)][:1]
    links = [Link(_mask_event(mask), mask.where) for mask in masks]
    source = _source(facts.origin)
    lines = {(mask.where.file, mask.where.line) for mask in masks}
    if source is not None and (source.where.file, source.where.line) not in lines:
        links.append(source)
    links += [Link(_event(origin, facts.target.kind), origin.where) for origin in shown]
    target = facts.target
    name = f"`{target.name}`" if target.name else "a parameter"
    made = MADE.get(target.made, "NaN") if target.kind == "parameter" else "inf or NaN"
    links.append(Link(_TARGETS[target.kind].format(made, name=name), target.where))
    return tuple(links)


def _mask_event(mask: OriginFact) -> str:
    what = f"{mask.op} writes" if mask.op else "A tensor from outside holds"
    return f"{what} {MADE[mask.made]} on purpose, as a mask."


def _source(origin: OriginFact) -> Link | None:
    """Where the operand that is likeliest to blame came from: a zero where one is fatal, then the divisor, then the
    first."""
    likeliest = sorted(
        origin.operands, key=lambda o: (not (o.zeros_at_fault or 0), o.name != "other", o.name != "self")
    )
    operand = next(iter(likeliest), None)
    if operand is None or operand.source is None or not operand.source_op:
        return None
    what = "zeros" if operand.zeros_at_fault else "values"
    return Link(f"{operand.source_op} makes the {what} that go into {_op(origin)}.", operand.source)


def _op(origin: OriginFact) -> str:
    if origin.during == "backward" and not origin.custom:
        return f"the derivative of {origin.where.op}"
    return "the cast" if origin.op == "to" else origin.op


def _event(origin: OriginFact, target: str) -> str:
    what = f"{MADE[origin.made]} ({origin.bad_elements:,} of {count(origin.elements, 'element')})"
    if origin.external:
        owner = {"parameter": "parameter", "buffer": "buffer", "input": "model's input"}.get(origin.external, "tensor")
        name = f" `{origin.name}`" if origin.name else ""
        return f"The {owner}{name} already holds {what}."
    op = _op(origin)
    if origin.parents and op == origin.op and not origin.absorbed_by:
        return f"{op} turns an infinity into {what}."
    event = f"{op[0].upper() + op[1:] if op != origin.op else op} gives {what}."
    if origin.absorbed_by and op == origin.op and target == "gradient":
        event += f" {origin.absorbed_by[0]} drops it, so the loss stays finite."
    return event


# -- the numbers -------------------------------------------------------------------------------------------------------


def _numbers(origin: OriginFact) -> dict[str, Any]:
    """The numbers that prove it, ready to be shown."""
    result = f"{origin.bad_elements:,} of {origin.elements:,} (shape {list(origin.shape)}, {origin.dtype})"
    shown: dict[str, Any] = {"bad elements": result}
    shown |= {f"operand {o.name}": describe(o) for o in origin.operands[:3]}
    hidden = ("elements", "group", "self_is_result")
    scalars = {k: v for k, v in origin.scalars.items() if k not in hidden and v is not False}
    return shown | ({"arguments": scalars} if scalars else {})


def describe(operand: Operand) -> str:
    """One operand in a line: shape, range, counts, range where it went wrong."""
    parts = [f"{operand.role}, shape {list(operand.shape)}, {operand.dtype}"]
    if operand.low is not None and operand.high is not None:
        parts.append(f"from {figures(operand.low)} to {figures(operand.high)}")
    infinite = operand.infs + operand.neg_infs
    counts = ((operand.negatives, "negative"), (operand.nans, "NaN"), (infinite, "infinite"))
    parts += [count(operand.zeros, "zero")] if operand.zeros else []
    parts += [f"{number:,} {word}" for number, word in counts if number]
    low, high = operand.low_at_fault, operand.high_at_fault
    if low is not None and high is not None:
        span = figures(low) if low == high else f"from {figures(low)} to {figures(high)}"
        parts.append(f"{span} where the result is bad")
    return "; ".join(parts)
