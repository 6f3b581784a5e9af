"""Which changes are worth a try for each kind of misfit, likeliest first; those that run are kept, two at most."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import torch
from torch import nn

from nbdebug.chapters.error.facts_shapes import Cure
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.dealing import count
from nbdebug.chapters.error.looks.shapes.losses import loss
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.trials import (
    Idea,
    Trials,
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

KEPT = 2
Found = Iterator[Cure | None]


def cures(call: Call, said: Said) -> tuple[Cure, ...]:
    """The changes that were tried and fit, at most two; of some kinds one that can't be tried."""
    if not any(part.shape is not None for part in call.parts):
        return ()
    trials = Trials(call)
    ways = KINDS.get(said.kind)
    found: list[Cure] = []
    for cure in ways(call, said, trials) if ways else ():
        if cure is not None and cure.code not in [known.code for known in found]:
            found.append(cure)
            if len(found) == KEPT:
                break
    return tuple(found)


def product(call: Call, said: Said, trials: Trials) -> Found:
    """The right side transposed, then the left; a missing axis."""
    parts = known(call)[::-1]
    yield from first(
        trials,
        (idea for i, part in parts for idea in swapped(i, part)),
        (idea for i, part in parts for idea in [*flattened(i, part), *widened(i, part)]),
    )


def features(call: Call, said: Said, trials: Trials) -> Found:
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


def _by_chance(part: Part, said: Said) -> bool:
    """Height and width of a square picture that equal the channels wanted say nothing of channels."""
    shape = part.shape or ()
    return len(shape) == 4 and shape[2] == shape[3] == said.wanted


def _in_place(idea: Idea, part: Part, said: Said) -> bool:
    """Whether a view has the wanted size on the axis that counts, and the batch where it was."""
    if said.axis is None or part.shape is None:
        return True
    after = tuple(idea.change(torch.zeros(()).expand(part.shape)).shape)
    return after[said.axis] == said.wanted and (said.axis == 0 or after[0] == part.shape[0])


def _colours(which: int, part: Part, said: Said) -> Iterator[Idea]:
    """One channel where three are wanted, four where three are."""
    name, axes = named(part), len(part.shape or ())
    if axes == 4 and (said.got, said.wanted) == (1, 3):
        yield Idea("colours", which, f"{name}.expand(-1, 3, -1, -1)", lambda x: x.expand(-1, 3, -1, -1))
    if axes == 4 and (said.got, said.wanted) == (4, 3):
        yield Idea("colours", which, f"{name}[:, :3]", lambda x: x[:, :3])
    if axes == 4 and (said.got, said.wanted) == (3, 1):
        yield Idea("colours", which, f"{name}.mean(1, keepdim=True)", lambda x: x.mean(1, keepdim=True))


def rank(call: Call, said: Said, trials: Trials) -> Found:
    for i, part in known(call)[:2]:
        yield from first(trials, narrowed(i, part), widened(i, part), flattened(i, part))


def broadcast(call: Call, said: Said, trials: Trials) -> Found:
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


def _table(which: int, part: Part, other: Part) -> Iterator[Idea]:
    """A table of positions that is longer than what it is added to, cut; a shorter one, made longer."""
    own, want = part.shape or (), other.shape or ()
    differ = [i for i, (x, y) in enumerate(zip(own, want)) if x != y and 1 not in (x, y)]
    if type(part.value) is not nn.Parameter or len(own) != len(want) or len(differ) != 1:
        return
    at, name = differ[0], named(part)
    size = want[at]
    if own[at] > size:
        index = ", ".join([":"] * at + [f":{named(other)}.shape[{at}]"])
        yield Idea("cut", which, f"{name}[{index}]", lambda x: x.narrow(at, 0, size))
    else:
        shape = [*own[:at], size, *own[at + 1 :]]
        code = f"{name} = nn.Parameter(torch.zeros({', '.join(map(str, shape))}))"
        yield Idea("longer", which, code, lambda x: x.new_zeros(shape))


def join(call: Call, said: Said, trials: Trials) -> Found:
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


def _along(call: Call) -> Cure | None:
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
            return Cure("axis", "", code, True, tuple(given))
    return None


def strides(call: Call, said: Said, trials: Trials) -> Found:
    """reshape copies where view cannot."""
    node = call.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        code = f"{ast.unparse(node.func.value)}.reshape({', '.join(map(ast.unparse, node.args))})"
        yield _expression(call, trials, "reshape", code)


def _expression(call: Call, trials: Trials, slug: str, code: str) -> Cure | None:
    """A cure that is another text for the whole expression."""
    shape = trials.instead(ast.parse(code, mode="eval").body)
    return None if shape is None else Cure(slug, call.parts[0].text if call.parts else "", code, True, shape)


def axis(call: Call, said: Said, trials: Trials) -> Found:
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


def order(call: Call, said: Said, trials: Trials) -> Found:
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


def index(call: Call, said: Said, trials: Trials) -> Found:
    for i, part in known(call)[1:2]:
        yield next(first(trials, narrowed(i, part), widened(i, part), swapped(i, part)), None)


def given(role: str) -> Callable[[Call, Said, Trials], Found]:
    """Another view of the operand of this role."""

    def ways(call: Call, said: Said, trials: Trials) -> Found:
        for i, part in known(call):
            if role in part.role and (said.b is None or part.shape is None or part.shape in (said.a, said.b)):
                yield from first(trials, swapped(i, part), _heads(call, i, part), widened(i, part), narrowed(i, part))

    return ways


def _heads(call: Call, which: int, part: Part) -> Iterator[Idea]:
    """One mask for each head, as a mask of three axes must have them."""
    heads = getattr(call.layer, "num_heads", None) if type(call.layer) is nn.MultiheadAttention else None
    if type(heads) is int and len(part.shape or ()) == 3:
        code = f"{named(part)}.repeat_interleave({heads}, 0)"
        yield Idea("heads", which, code, lambda x: x.repeat_interleave(heads, 0))


def any_view(call: Call, said: Said, trials: Trials) -> Found:
    for i, part in known(call)[:3]:
        yield from tried(
            trials, [*narrowed(i, part), *widened(i, part), *swapped(i, part), *moved(i, part)], no_larger(call)
        )


def lengths(call: Call, said: Said, trials: Trials) -> Found:
    node = call.node
    if isinstance(node, ast.Call) and "sorted" not in ast.unparse(node) and said.got is None:
        args = [*map(ast.unparse, node.args), *(f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords)]
        code = f"{ast.unparse(node.func)}({', '.join(args)}, enforce_sorted=False)"
        yield _expression(call, trials, "unsorted", code)
    for i, part in known(call)[:1]:
        name = named(part)
        yield from tried(trials, [Idea("transpose", i, f"{name}.transpose(0, 1)", lambda x: x.transpose(0, 1))])


def grid(call: Call, said: Said, trials: Trials) -> Found:
    for i, part in known(call)[1:2]:
        yield from tried(trials, moved(i, part))


KINDS: dict[str, Callable[[Call, Said, Trials], Found]] = {
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
