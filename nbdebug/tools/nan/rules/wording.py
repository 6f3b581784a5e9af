"""How a finding is put into words: the headline, the chain of events, the numbers, the fix in the user's own line."""

from __future__ import annotations

import ast
from typing import Any

from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.nan.facts import NanFacts, Operand, OriginFact

_OPERATORS = {"div": ast.Div, "pow": ast.Pow, "mul": ast.Mult, "sub": ast.Sub, "add": ast.Add}


def rewritten(text: str | None, op: str | None, template: str, operand: int = 0) -> str | None:
    """`text` with the given operand X of `op` replaced by `template.format(X)`; None where that can't be done.

    operand: 0 for the first operand, 1 for the second. Works on `f(X)`, `X.f()` and on operators.
    """
    if not text or not op:
        return None
    line = text.rstrip(":") if text.rstrip().endswith(":") else text
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return None
    found = [part for node in ast.walk(tree) if (part := _operand(node, op, operand)) is not None]
    if len(found) != 1:
        return None
    part = found[0]
    inside = ast.get_source_segment(line, part) or ""
    plain = isinstance(part, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    new = template.format(inside if plain else f"({inside})")
    before = line.encode()[: part.col_offset].decode()
    after = line.encode()[part.end_col_offset :].decode()
    if part.lineno != 1 or part.end_lineno != 1:
        return None
    return before + new + after


def _operand(node: ast.AST, op: str, operand: int) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS.get(op, ())):
        return node.right if operand else node.left
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    names = (op, op.removeprefix("linalg_"), "float_power" if op == "pow" else op)
    if node.func.attr.strip("_") not in names:
        return None
    owner = node.func.value
    module = (
        isinstance(owner, ast.Name)
        and owner.id in ("torch", "F", "np", "math")
        or (isinstance(owner, ast.Attribute) and owner.attr in ("functional", "linalg", "special", "nn"))
    )
    parts = list(node.args) if module else [owner, *node.args]
    return parts[operand] if len(parts) > operand and isinstance(parts[operand], ast.expr) else None


_MADE = {"nan": "NaN", "inf": "inf", "-inf": "-inf", "mixed": "inf and NaN"}
_TARGETS = {
    "loss": "The loss became {}.",
    "returned": "What the step returned became {}.",
    "gradient": "The gradient of {name} became {}.",
    "parameter": "The update made {name} {}.",
    "buffer": "The running statistic {name} became {}.",
    "exception": "The step raised {name}.",
}


def answer(facts: NanFacts, code: str, says: str, *fixes: Fix, where: Where | None = None, **evidence: Any) -> Finding:
    """The finding of `code`; `says` is a clause such as "divides by zero", to which subject and place are added."""
    birth = facts.birth
    place = where or birth.where
    title = f"{subject(place)} {says}{at(place)}"
    return Finding(f"nan/{code}", title, place, {**_numbers(birth), **evidence}, tuple(fixes), chain(facts))


def subject(where: Where) -> str:
    """ "Row 3", "Rows 1, 4 and 6", or "Step 12" where all rows are alike."""
    rows = where.samples
    if not rows:
        return f"Step {where.step}"
    if len(rows) == 1:
        return f"Row {rows[0]}"
    if len(rows) > 6:
        return f"{len(rows)} rows of the batch ({rows[0]}, {rows[1]}, {rows[2]} …)"
    return f"Rows {', '.join(str(r) for r in rows[:-1])} and {rows[-1]}"


def at(where: Where) -> str:
    """ ": `head.ent` (In [7], line 4)"."""
    inside = f"`{where.module}`" if where.module else ""
    if inside and where.place:
        return f": {inside} ({where.place})"
    return f": {inside or where.place}" if inside or where.place else ""


def verb(where: Where, one: str, many: str) -> str:
    """The form of the verb that goes with `subject`."""
    return many if where.samples and len(where.samples) > 1 else one


def chain(facts: NanFacts) -> tuple[Link, ...]:
    """What happened, in order: where the bad operand came from, each birth, what it reached."""
    links = [link for o in _guilty(facts.birth)[:1] if (link := _origin(o)) is not None]
    shown = [facts.birth, *facts.descendants[:3]]
    masks = [b for b in facts.births if b.intended and any(b.index in d.parents for d in shown)][:1]
    lines = {(b.where.file, b.where.line) for b in masks}
    links = [
        Link(f"{b.op or 'A tensor from outside'} put {_MADE[b.made]} there on purpose, as a mask.", b.where)
        for b in masks
    ] + [link for link in links if (link.where.file, link.where.line) not in lines]
    links += [Link(_event(b), b.where) for b in shown]
    target = facts.target
    name = f"`{target.name}`" if target.name else "a parameter"
    made = _MADE.get(target.made, "NaN") if target.kind == "parameter" else "inf or NaN"
    links.append(Link(_TARGETS[target.kind].format(made, name=name), target.where))
    return tuple(links)


def _event(birth: OriginFact) -> str:
    made, share = _MADE[birth.made], f" ({birth.bad_elements:,} of {birth.elements:,} elements)"
    if birth.external:
        owner = {"parameter": "parameter", "buffer": "buffer", "input": "model's input"}.get(birth.external, "tensor")
        name = f" `{birth.name}`" if birth.name else ""
        return f"The {owner}{name} held {made} already{share}."
    if birth.during == "backward" and not birth.custom:
        return f"The derivative of {birth.where.op} gave {made}{share}."
    if birth.absorbed_by:
        return (
            f"{birth.op} gave {made}{share}, and {birth.absorbed_by[0]} dropped it: "
            "the forward went on as if nothing was."
        )
    if birth.parents:
        return f"{birth.op} turned an infinity into {made}{share}."
    return f"{birth.op} gave {made}{share}."


def _guilty(birth: OriginFact) -> list[Operand]:
    """Operands that may be to blame, the likeliest first: a zero where one is fatal, then the largest."""
    return sorted(birth.operands, key=lambda o: (not (o.zeros_at_fault or 0), o.name != "other", o.name != "self"))


def _origin(operand: Operand) -> Link | None:
    if operand.source is None or not operand.source_op:
        return None
    what = "zeros" if operand.zeros_at_fault else "values"
    return Link(f"The {what} that it was given came from {operand.source_op}.", operand.source)


def _numbers(birth: OriginFact) -> dict[str, Any]:
    """The numbers that prove it, ready to be shown."""
    shown: dict[str, Any] = {
        "bad elements": f"{birth.bad_elements:,} of {birth.elements:,}",
        "shape": list(birth.shape),
        "dtype": birth.dtype,
    }
    for o in birth.operands[:3]:
        shown[f"operand {o.name}"] = describe(o)
    scalars = {k: v for k, v in birth.scalars.items() if k not in ("elements", "group", "self_is_result")}
    return shown | ({"arguments": scalars} if scalars else {})


def describe(o: Operand) -> str:
    """One operand in a line: shape, range, counts, range where it went wrong."""
    parts = [f"{o.role}, shape {list(o.shape)}, {o.dtype}"]
    if o.low is not None:
        parts.append(f"from {o.low:.4g} to {o.high:.4g}")
    infinite = o.infs + o.neg_infs
    for count, word in ((o.zeros, "zeros"), (o.negatives, "negative"), (o.nans, "NaN"), (infinite, "infinite")):
        if count:
            parts.append(f"{count:,} {word}")
    if o.low_at_fault is not None:
        parts.append(f"where it failed from {o.low_at_fault:.4g} to {o.high_at_fault:.4g}")
    return "; ".join(parts)


def fix(birth: OriginFact, title: str, template: str, general: str, operand: int = 0) -> Fix:
    """A fix written into the user's own line where that can be done, else in its general form."""
    return Fix(title, rewritten(birth.where.text, birth.where.op, template, operand) or general)
