"""Cures for a loss whose predictions and targets do not fit each other."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from nbdebug.chapters.error.facts_shapes import Cure, Shifted
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.sources import before_flattening, with_base
from nbdebug.chapters.error.looks.shapes.trials import Idea, Trials, first, known, named, narrowed, widened

CLASSES = ("cross_entropy", "nll_loss", "nll_loss_nd", "CrossEntropyLoss", "NLLLoss", "multi_margin_loss")


def loss(call: Call, said: Said, trials: Trials) -> Iterator[Cure | None]:
    """The target's axis of one, one-hot targets, classes on the last axis, axes of a sequence made one."""
    by_role = {part.role: (i, part) for i, part in known(call)}
    if not {"input", "target"} <= set(by_role):
        return
    (i, scores), (j, target) = by_role["input"], by_role["target"]
    cut = shifted(call, trials)
    if cut is not None:
        yield cut[1]
        return
    last = (
        list(_classes_second(i, scores))
        if call.op in CLASSES and len(scores.shape or ()) > 2 and (target.shape == (scores.shape or ())[:-1])
        else []
    )
    one_hot = [Idea("classes", j, f"{named(target)}.argmax(1)", lambda x: x.argmax(1))]
    lacks = len(scores.shape or ()) == len(target.shape or ()) + 1 and said.wanted is None
    found = list(
        first(
            trials,
            last,
            [*narrowed(j, target), *narrowed(i, scores), *(widened(j, target) if lacks else ())],
            one_hot if target.shape == scores.shape else (),
            () if last else _classes_second(i, scores),
        )
    )
    if last and not found:  # it is plain from the shapes, though it can't be tried
        yield Cure(last[0].slug, scores.text, last[0].code)
    yield from found
    if not found or found[0] is not None and found[0].slug == "classes-last":
        yield _flat_both(trials, i, scores, j, target)


def _classes_second(which: int, part: Part) -> Iterator[Idea]:
    axes = len(part.shape or ())
    if axes == 3:
        yield Idea("classes-last", which, f"{named(part)}.transpose(1, 2)", lambda x: x.transpose(1, 2))
    if axes == 4:
        yield Idea("classes-last", which, f"{named(part)}.permute(0, 3, 1, 2)", lambda x: x.permute(0, 3, 1, 2))


def _flat_both(trials: Trials, i: int, scores: Part, j: int, target: Part) -> Cure | None:
    axes = len(target.shape or ())
    if axes < 2 and len(scores.shape or ()) < 3:
        return None
    one = Idea("flatten", i, f"{named(scores)}.flatten(0, -2)", lambda x: x.flatten(0, -2))
    two = Idea("flatten", j, f"{named(target)}.flatten()", lambda x: x.flatten())
    shape = trials.result([one, two] if axes > 1 else [one])
    if shape is None:
        return None
    return Cure("flatten", scores.text, f"{one.code}, {two.code}" if axes > 1 else one.code, True, shape)


def shifted(call: Call, trials: Trials | None = None) -> tuple[Shifted, Cure | None] | None:
    """Predictions of the next token: both sides are flattened to rows, and only one of them was cut by one place. The
    rows of the batch stand in what one of them was flattened from."""
    roles = {part.role: (i, part) for i, part in known(call)}
    if call.frame is None or not {"input", "target"} <= set(roles):
        return None
    scores, target = roles["input"][1].shape or (), roles["target"][1].shape or ()
    if len(scores) != 2 or len(target) != 1:
        return None
    rows = {"input": scores[0], "target": target[0]}
    longer = max(rows, key=rows.__getitem__)
    which, part = roles[longer]
    for source, base, value in before_flattening(part.node, call.frame, rows[longer]):
        batch, places = value.shape[0], value.shape[1]
        other = rows["input" if longer == "target" else "target"]
        if batch * (places - 1) != other:
            continue
        cut = "[:, 1:]" if longer == "target" else "[:, :-1]"
        told = Shifted(batch, rows["input"] // batch, rows["target"] // batch, ast.unparse(base), tuple(value.shape))
        code = with_base(source, base, f"{_atom(base)}{cut}")
        bound = f"{part.text} = " if isinstance(part.node, ast.Name) and source is not part.node else ""
        shape = trials.result([Idea("shift", which, code, _cut(batch, longer))]) if trials is not None else None
        return told, Cure("shift", told.name, f"{bound}{code}", True if shape is not None else None, shape)
    return None


def _cut(batch: int, longer: str) -> Callable[[Any], Any]:
    """The flat operand without the place of each row that the other side does not have."""
    ends = slice(1, None) if longer == "target" else slice(None, -1)
    return lambda x: x.unflatten(0, (batch, -1))[:, ends].flatten(0, 1)


def _atom(base: ast.expr) -> str:
    simple = isinstance(base, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return ast.unparse(base) if simple else f"({ast.unparse(base)})"
