"""Cures for a loss whose predictions and targets do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from nbdebug.chapters.error.facts_shapes import Cure
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.trials import Idea, Trials, first, known, named, narrowed, widened


def loss(call: Call, said: Said, trials: Trials) -> Iterator[Cure | None]:
    """The target's axis of one, one-hot targets, classes on the last axis, axes of a sequence made one."""
    by_role = {part.role: (i, part) for i, part in known(call)}
    if not {"input", "target"} <= set(by_role):
        return
    (i, scores), (j, target) = by_role["input"], by_role["target"]
    one_hot = [Idea("classes", j, f"{named(target)}.argmax(1)", lambda x: x.argmax(1))]
    lacks = len(scores.shape or ()) == len(target.shape or ()) + 1 and said.wanted is None
    found = list(first(trials, [*narrowed(j, target), *narrowed(i, scores), *(widened(j, target) if lacks else ())],
                        one_hot if target.shape == scores.shape else (), _classes_second(i, scores)))
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
