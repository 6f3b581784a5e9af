"""Which changes are worth a try for each kind of misfit, likeliest first; those that run are kept, two at most."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.tools.errors.shapes.call import CallPart, FailedCall, before_flattening, with_base
from nbdebug.tools.errors.shapes.facts import ShapeFix, ShiftedSize
from nbdebug.tools.errors.shapes.layer_fixes import count
from nbdebug.tools.errors.shapes.messages import ParsedMessage
from nbdebug.tools.errors.shapes.trials import (
    CallTrials,
    FixIdea,
    aligned,
    axis_of,
    first,
    flattened,
    known,
    moved,
    named,
    narrowed,
    no_larger,
    resized,
    swapped,
    tried,
    widened,
)

CLASSES = ("cross_entropy", "nll_loss", "nll_loss_nd", "CrossEntropyLoss", "NLLLoss", "multi_margin_loss")


def loss(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Iterator[ShapeFix | None]:
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
    one_hot = [FixIdea("classes", j, f"{named(target)}.argmax(1)", lambda x: x.argmax(1))]
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
        yield ShapeFix(last[0].slug, scores.text, last[0].code)
    yield from found
    if not found or found[0] is not None and found[0].slug == "classes-last":
        yield _flat_both(trials, i, scores, j, target)


def _classes_second(which: int, part: CallPart) -> Iterator[FixIdea]:
    axes = len(part.shape or ())
    if axes == 3:
        yield FixIdea("classes-last", which, f"{named(part)}.transpose(1, 2)", lambda x: x.transpose(1, 2))
    if axes == 4:
        yield FixIdea("classes-last", which, f"{named(part)}.permute(0, 3, 1, 2)", lambda x: x.permute(0, 3, 1, 2))


def _flat_both(trials: CallTrials, i: int, scores: CallPart, j: int, target: CallPart) -> ShapeFix | None:
    axes = len(target.shape or ())
    if axes < 2 and len(scores.shape or ()) < 3:
        return None
    one = FixIdea("flatten", i, f"{named(scores)}.flatten(0, -2)", lambda x: x.flatten(0, -2))
    two = FixIdea("flatten", j, f"{named(target)}.flatten()", lambda x: x.flatten())
    shape = trials.result([one, two] if axes > 1 else [one])
    if shape is None:
        return None
    return ShapeFix("flatten", scores.text, f"{one.code}, {two.code}" if axes > 1 else one.code, True, shape)


def shifted(call: FailedCall, trials: CallTrials | None = None) -> tuple[ShiftedSize, ShapeFix | None] | None:
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
        told = ShiftedSize(
            batch, rows["input"] // batch, rows["target"] // batch, ast.unparse(base), tuple(value.shape)
        )
        code = with_base(source, base, f"{_atom(base)}{cut}")
        bound = f"{part.text} = " if isinstance(part.node, ast.Name) and source is not part.node else ""
        shape = trials.result([FixIdea("shift", which, code, _cut(batch, longer))]) if trials is not None else None
        return told, ShapeFix("shift", told.name, f"{bound}{code}", True if shape is not None else None, shape)
    return None


def _cut(batch: int, longer: str) -> Callable[[Any], Any]:
    """The flat operand without the place of each row that the other side does not have."""
    ends = slice(1, None) if longer == "target" else slice(None, -1)
    return lambda x: x.unflatten(0, (batch, -1))[:, ends].flatten(0, 1)


def _atom(base: ast.expr) -> str:
    simple = isinstance(base, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
    return ast.unparse(base) if simple else f"({ast.unparse(base)})"


KEPT = 2
Found = Iterator[ShapeFix | None]


def cures(call: FailedCall, said: ParsedMessage) -> tuple[ShapeFix, ...]:
    """The changes that were tried and fit, at most two; of some kinds one that can't be tried."""
    if not any(part.shape is not None for part in call.parts):
        return ()
    trials = CallTrials(call)
    ways = KINDS.get(said.kind)
    found: list[ShapeFix] = []
    for cure in ways(call, said, trials) if ways else ():
        if cure is not None and cure.code not in [known.code for known in found]:
            found.append(cure)
            if len(found) == KEPT:
                break
    return tuple(found)


def product(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """The right side transposed, then the left; a missing axis."""
    parts = known(call)[::-1]
    yield from first(
        trials,
        (idea for i, part in parts for idea in swapped(i, part)),
        (idea for i, part in parts for idea in [*flattened(i, part), *widened(i, part)]),
    )


def features(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """The axis with the right size brought to its place; a missing axis; pictures in grey; last the layer itself."""
    for i, part in known(call)[:1]:
        ways = (moved, swapped) if call.op.endswith("2d") else (swapped, moved)
        views = [idea for way in ways for idea in way(i, part)]
        if said.wanted not in (part.shape or ()) or _by_chance(part, said):
            views = []
        yield from first(
            trials,
            (idea for idea in views if _in_place(idea, part, said)),
            flattened(i, part),
            _colours(i, part, said),
            widened(i, part),
            narrowed(i, part),
        )


def _by_chance(part: CallPart, said: ParsedMessage) -> bool:
    """Height and width of a square picture that equal the channels wanted say nothing of channels."""
    shape = part.shape or ()
    return len(shape) == 4 and shape[2] == shape[3] == said.wanted


def _in_place(idea: FixIdea, part: CallPart, said: ParsedMessage) -> bool:
    """Whether a view has the wanted size on the axis that counts, and the batch where it was."""
    if said.axis is None or part.shape is None:
        return True
    after = tuple(idea.change(torch.zeros(()).expand(part.shape)).shape)
    return after[said.axis] == said.wanted and (said.axis == 0 or after[0] == part.shape[0])


def _colours(which: int, part: CallPart, said: ParsedMessage) -> Iterator[FixIdea]:
    """One channel where three are wanted, four where three are."""
    name, axes = named(part), len(part.shape or ())
    if axes == 4 and (said.got, said.wanted) == (1, 3):
        yield FixIdea("colours", which, f"{name}.expand(-1, 3, -1, -1)", lambda x: x.expand(-1, 3, -1, -1))
    if axes == 4 and (said.got, said.wanted) == (4, 3):
        yield FixIdea("colours", which, f"{name}[:, :3]", lambda x: x[:, :3])
    if axes == 4 and (said.got, said.wanted) == (3, 1):
        yield FixIdea("colours", which, f"{name}.mean(1, keepdim=True)", lambda x: x.mean(1, keepdim=True))


def rank(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    for i, part in known(call)[:2]:
        yield from first(trials, narrowed(i, part), widened(i, part), flattened(i, part))


def broadcast(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """An axis of one more or less, axes exchanged, a picture resized: whatever does not make the result larger."""
    parts, accept = known(call), no_larger(call)
    if len(parts) < 2:
        return
    ends = [parts[-1], *parts[:-1]]
    (i, left), (j, right) = parts[0], parts[-1]
    same = len(left.shape or ()) == len(right.shape or ())
    yield from first(
        trials,
        (idea for k, p in ends for idea in [*narrowed(k, p), *widened(k, p)]),
        [*aligned(i, left, right), *aligned(j, right, left)],
        (idea for k, p in ends for idea in [*swapped(k, p), *moved(k, p)] if same),
        [*resized(i, left, right), *resized(j, right, left)],
        (idea for k, p in ends for idea in _table(k, p, left if p is right else right)),
        accept=accept,
    )


def _table(which: int, part: CallPart, other: CallPart) -> Iterator[FixIdea]:
    """A table of positions that is longer than what it is added to, cut; a shorter one, made longer."""
    own, want = part.shape or (), other.shape or ()
    differ = [i for i, (x, y) in enumerate(zip(own, want)) if x != y and 1 not in (x, y)]
    if type(part.value) is not nn.Parameter or len(own) != len(want) or len(differ) != 1:
        return
    at, name = differ[0], named(part)
    size = want[at]
    if own[at] > size:
        index = ", ".join([":"] * at + [f":{named(other)}.shape[{at}]"])
        yield FixIdea("cut", which, f"{name}[{index}]", lambda x: x.narrow(at, 0, size))
    else:
        shape = [*own[:at], size, *own[at + 1 :]]
        code = f"{name} = nn.Parameter(torch.zeros({', '.join(map(str, shape))}))"
        yield FixIdea("longer", which, code, lambda x: x.new_zeros(shape))


def join(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """The odd one with an axis more or less, or exchanged; another axis to join along; a picture resized."""
    parts = known(call)
    if len(parts) < 2:
        return
    odd = said.which if said.which is not None and said.which < len(call.parts) else parts[-1][0]
    part, other = call.parts[odd], call.parts[0 if odd else -1]
    if len(part.shape or ()) != len(other.shape or ()):
        short = parts[0][0] if len(part.shape or ()) > len(other.shape or ()) else odd
        for i in dict.fromkeys((short, odd)):
            yield from tried(trials, [*widened(i, call.parts[i]), *narrowed(i, call.parts[i])])
    sizes = [cure for cure in tried(trials, resized(odd, part, other)) if cure is not None]
    yield from sizes
    if not sizes:  # pictures of two sizes are not meant to lie beside each other
        yield _along(call)
    yield from tried(trials, swapped(odd, part))


def _along(call: FailedCall) -> ShapeFix | None:
    """Another axis along which all of them fit."""
    shapes = [part.shape for part in call.parts]
    if call.op not in ("cat", "concatenate") or any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
        return None
    word = "dim" if call.op == "cat" else "axis"
    for axis in range(len(shapes[0] or ())):
        if axis != axis_of(call) and len({(s or ())[:axis] + (s or ())[axis + 1 :] for s in shapes}) == 1:
            given = list(shapes[0] or ())
            given[axis] = sum((s or ())[axis] for s in shapes)
            names = ", ".join(part.text for part in call.parts)
            code = f"{'torch' if word == 'dim' else 'np'}.{call.op}([{names}], {word}={axis})"
            return ShapeFix("axis", "", code, True, tuple(given))
    return None


def strides(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """reshape copies where view cannot."""
    node = call.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        code = f"{ast.unparse(node.func.value)}.reshape({', '.join(map(ast.unparse, node.args))})"
        yield _expression(call, trials, "reshape", code)


def _expression(call: FailedCall, trials: CallTrials, slug: str, code: str) -> ShapeFix | None:
    """A cure that is another text for the whole expression."""
    shape = trials.instead(ast.parse(code, mode="eval").body)
    return None if shape is None else ShapeFix(slug, call.parts[0].text if call.parts else "", code, True, shape)


def axis(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """The last axis that there is, or the batch axis that is missing."""
    if call.node is not None and said.axis is not None and said.axis > 0 and call.parts:
        wrong = str(said.axis)
        node = call.node
        if isinstance(node, ast.Call):
            args = [ast.unparse(arg) for arg in node.args]
            named_args = [(k.arg, ast.unparse(k.value)) for k in node.keywords]
            if args.count(wrong) + [v for _, v in named_args].count(wrong) == 1:
                new = ["-1" if a == wrong else a for a in args]
                new += [f"{k}={'-1' if v == wrong else v}" for k, v in named_args]
                yield _expression(call, trials, "axis", f"{ast.unparse(node.func)}({', '.join(new)})")
    for i, part in known(call)[:1] if call.op != "size" else ():
        yield from tried(trials, reversed(list(widened(i, part))[:2]))


def order(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    """As many axes as the tensor has."""
    for i, part in known(call)[:1]:
        if said.got is not None and said.wanted == said.got + 1:
            yield from tried(trials, widened(i, part))
        dims = [n for _, n in call.numbers if type(n) is int]
        if part.shape and len(dims) == len(part.shape) - 1 and sorted(dims) == list(range(len(dims))):
            new = ", ".join(map(str, [0, *(d + 1 for d in dims)]))
            yield _expression(call, trials, "order", f"{named(part)}.{call.op}({new})")
        if call.op == "t" and part.shape:
            yield _expression(call, trials, "order", f"{named(part)}.mT")


def index(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    for i, part in known(call)[1:2]:
        yield next(first(trials, narrowed(i, part), widened(i, part), swapped(i, part)), None)


def given(role: str) -> Callable[[FailedCall, ParsedMessage, CallTrials], Found]:
    """Another view of the operand of this role."""

    def ways(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
        for i, part in known(call):
            if role in part.role and (said.b is None or part.shape is None or part.shape in (said.a, said.b)):
                yield from first(trials, swapped(i, part), _heads(call, i, part), widened(i, part), narrowed(i, part))

    return ways


def _heads(call: FailedCall, which: int, part: CallPart) -> Iterator[FixIdea]:
    """One mask for each head, as a mask of three axes must have them."""
    heads = getattr(call.layer, "num_heads", None) if type(call.layer) is nn.MultiheadAttention else None
    if type(heads) is int and len(part.shape or ()) == 3:
        code = f"{named(part)}.repeat_interleave({heads}, 0)"
        yield FixIdea("heads", which, code, lambda x: x.repeat_interleave(heads, 0))


def any_view(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    for i, part in known(call)[:3]:
        yield from tried(
            trials, [*narrowed(i, part), *widened(i, part), *swapped(i, part), *moved(i, part)], no_larger(call)
        )


def lengths(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    node = call.node
    if isinstance(node, ast.Call) and "sorted" not in ast.unparse(node) and said.got is None:
        args = [*map(ast.unparse, node.args), *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)]
        code = f"{ast.unparse(node.func)}({', '.join(args)}, enforce_sorted=False)"
        yield _expression(call, trials, "unsorted", code)
    for i, part in known(call)[:1]:
        name = named(part)
        yield from tried(trials, [FixIdea("transpose", i, f"{name}.transpose(0, 1)", lambda x: x.transpose(0, 1))])


def grid(call: FailedCall, said: ParsedMessage, trials: CallTrials) -> Found:
    for i, part in known(call)[1:2]:
        yield from tried(trials, moved(i, part))


KINDS: dict[str, Callable[[FailedCall, ParsedMessage, CallTrials], Found]] = {
    "product": product,
    "features": features,
    "rank": rank,
    "broadcast": broadcast,
    "inplace": broadcast,
    "loss": loss,
    "join": join,
    "count": count,
    "strides": strides,
    "axis": axis,
    "order": order,
    "index": index,
    "expand": any_view,
    "assign": any_view,
    "hidden": given("h"),
    "mask": given("mask"),
    "attention": any_view,
    "lengths": lengths,
    "grid": grid,
    "samples": any_view,
    "square": product,
    "single": lambda *_: iter(()),
}
