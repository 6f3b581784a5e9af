"""A value that backward needs was changed in place: the statement that did it."""

from __future__ import annotations

import dataclasses

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_autograd import Change, InPlaceFacts
from nbdebug.chapters.error.rules.autograd_words import NOTES, at, op
from nbdebug.finding import Finding, Fix, Link

IN_PLACE = NOTES + "#in-place-operations-with-autograd"


@rule(
    code="error/inplace-modified",
    title="A tensor that the backward pass needs was changed in place.",
    symptom="`one of the variables needed for gradient computation has been modified by an inplace operation`, or `a "
    "leaf Variable that requires grad is being used in an in-place operation`.",
    cause="`+=`, `x[i] = …`, a method with an underscore, `inplace=True` or an `optimizer.step()` between a forward "
    "and its backward overwrote values that a derivative is computed from (a relu's own result, a weight).",
    confirm="`torch.autograd.set_detect_anomaly(True)` prints the forward line whose value is missing; the change "
    "comes after it.",
    fix="Write the result to a new tensor (`out = out + residual`), change parameters under `torch.no_grad()`, and "
    "call every backward() before the first step().",
    reference=IN_PLACE,
)
def inplace_modified(facts: InPlaceFacts) -> Finding | None:
    change = facts.change
    where = at(change.where, facts.raised) if change is not None else facts.raised.where
    if change is not None and change.module:
        where = dataclasses.replace(where, module=change.module)
    evidence: dict[str, object] = {}
    if facts.shape is not None:
        evidence["the tensor"] = f"{facts.dtype or 'tensor'} {list(facts.shape)}"
    if facts.version is not None:
        evidence |= {"its version now": facts.version, "when it was saved": facts.expected}
    if facts.saved_by:
        evidence["missed by the backward of"] = op(facts.saved_by).strip("`")
    if facts.module:
        evidence["next to module"] = facts.module
    if facts.others:
        evidence["would fit too"] = "; ".join(f"{c.text} ({c.where.place})" for c in facts.others)
    return Finding("error/inplace-modified", _title(facts), where, evidence, _fixes(facts), _chain(facts))


def _title(facts: InPlaceFacts) -> str:
    change = facts.change
    if facts.what == "saved":
        return _saved(facts, change)
    name = f"`{facts.parameter or facts.tensor or (change.target if change else 'a tensor')}`"
    statement = f"`{change.text}`" if change is not None else "An in-place op"
    return {
        "leaf": f"{statement} changes {name} in place, a leaf that wants a gradient: autograd can't follow that",
        "leaf view": f"{statement} writes into {name} in place, and that is (a view of) a leaf which wants a gradient",
        "view": f"{statement} changes {name} in place, one of several views of one tensor, or one made under no_grad",
        "expanded": f"{statement} writes to {name}, whose entries share memory (it was expanded)",
        "out": f"{statement} writes its result with `out=`, and autograd can't follow that",
        "inference": f"{statement} changes {name} in place, which was made under `torch.inference_mode()`",
    }[facts.what]


def _saved(facts: InPlaceFacts, change: Change | None) -> str:
    whose = "its own result" if facts.own else "the old value"
    needs = f"the backward{' of ' + op(facts.saved_by) if facts.saved_by else ''} needs {whose}"
    if change is not None and change.how == "step":
        what = f"`{facts.parameter or facts.tensor}`" if facts.parameter or facts.tensor else "the weights"
        return f"`{change.text}` changed {what} between the forward and this `backward()`, and {needs}"
    if change is not None and change.how == "block" and facts.parameter:
        return f"`{change.text}` changed `{facts.parameter}` between the forward and this `backward()`, and {needs}"
    if change is not None and change.how == "module":
        return f"`{change.target}` is {change.text} and overwrites what it is given, but {needs}"
    if change is not None:
        return f"`{change.text}` changes `{change.target}` in place, but {needs}"
    name = (
        f"`{facts.parameter or facts.tensor}`"
        if facts.parameter or facts.tensor
        else (f"A tensor of shape {list(facts.shape)}" if facts.shape is not None else "A tensor")
    )
    return f"{name} was changed in place after the forward, but {needs}"


def _fixes(facts: InPlaceFacts) -> tuple[Fix, ...]:
    change = facts.change
    name = facts.tensor or (change.target if change is not None else "x")
    if change is not None and (change.how == "step" or change.how == "block" and facts.parameter):
        return (
            Fix(
                "Call every backward() before the weights change.",
                f"{facts.loss or 'loss'}.backward()   # all of them first\n{change.text}",
            ),
            Fix(
                "Or compute the second loss anew, after the change.",
                f"{facts.loss or 'loss'} = ...   # the forward again",
            ),
        )
    if facts.what in ("leaf", "leaf view"):
        return _leaf(facts, change, name)
    if facts.what == "expanded":
        return (Fix("Give it memory of its own first.", f"{name} = {name}.clone()"),)
    if facts.what == "inference":
        return (
            Fix("Copy it to an ordinary tensor first.", f"{name} = {name}.clone()"),
            Fix("Or make it under no_grad.", "with torch.no_grad():\n    ..."),
        )
    if change is None:
        return (
            Fix(
                "Let torch name the forward line whose value is missing; look for `+=`, `x[i] = …` and `_(` after it.",
                "with torch.autograd.set_detect_anomaly(True):\n    ...   # the step again",
            ),
        )
    if facts.what == "view" and "[" in change.target:
        return (Fix("Write to a new tensor.", "new = " + change.instead.partition(" = ")[2]),)
    rows = (
        Fix(
            "Or collect the parts in a list, and join them once.",
            f"parts.append({change.added})\n...\n{change.target} = torch.stack(parts)   # after the loop",
        ),
    ) * (change.how == "item" and change.text.count("=") == 1)
    return (
        Fix(
            "Write to a new tensor.",
            change.instead or change.text,
            facts.tried,
            {
                "backward": "passes" if facts.tried else "fails",
                "tried on": f"{op(facts.saved_by).strip('`')} of random numbers of shape {list(facts.shape or ())}",
            }
            if facts.tried is not None
            else {},
        ),
        *rows,
    )


def _leaf(facts: InPlaceFacts, change: Change | None, name: str) -> tuple[Fix, ...]:
    inside = (change.text if change is not None else f"{name}.add_(...)").replace("\n", "\n    ")
    aside = Fix("If it is an update of the weights: let autograd look away.", f"with torch.no_grad():\n    {inside}")
    if change is None or change.how == "module":
        return (Fix("Give it a copy.", f"{name}.clone()"),)
    instead = change.instead.replace("\n", "\n") if change.instead else f"{name} = {name}.clone()"
    return (aside, Fix("If it is a part of the computation: write to a new tensor.", instead))


def _chain(facts: InPlaceFacts) -> tuple[Link, ...]:
    change, links = facts.change, []
    if facts.what != "saved":
        return ()
    if facts.saved_by:
        named = facts.parameter or facts.tensor
        kept = "its own result" if facts.own else f"`{named}`" if named else "what it was given"
        links.append(Link(f"the forward of {op(facts.saved_by)} saves {kept} for its derivative"))
    if change is not None and change.where.line is not None:
        links.append(Link(f"`{change.text}` overwrites it", change.where))
    return (*links, Link("`backward()` finds other values than were saved", facts.raised.where))
