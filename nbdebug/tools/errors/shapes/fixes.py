"""Which changes are worth a try for each kind of misfit, likeliest first; those that run are offered, two at most."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.tools.errors.shapes.call import CallOperand, FailedCall, bindings_back, unflattened
from nbdebug.tools.errors.shapes.layer_fixes import count_fixes
from nbdebug.tools.errors.shapes.messages import ParsedMessage
from nbdebug.tools.errors.shapes.rules import ShapeFix, ShiftedSize
from nbdebug.tools.errors.shapes.trials import (
    Accept,
    CallTrials,
    FixIdea,
    add_axis,
    align_axes,
    flatten_axes,
    join_axis,
    known_operands,
    no_larger,
    permute_axes,
    remove_axis,
    resize_image,
    transpose_axes,
    with_method,
)

MAX_FIXES = 2
CLASS_LOSSES = ("cross_entropy", "nll_loss", "nll_loss_nd", "CrossEntropyLoss", "NLLLoss", "multi_margin_loss")
Fixes = Iterator[ShapeFix | None]


def operand_fixes(call: FailedCall, message: ParsedMessage) -> tuple[ShapeFix, ...]:
    """The changes that were tried and fit, at most two; of some kinds one that can't be tried."""
    if not any(operand.shape is not None for operand in call.operands):
        return ()
    trials = CallTrials(call)
    of_kind = BY_KIND.get(message.kind)
    distinct: dict[str, ShapeFix] = {}
    for fix in of_kind(call, message, trials) if of_kind else ():
        if fix is not None:
            distinct.setdefault(fix.code, fix)
            if len(distinct) == MAX_FIXES:
                break
    return tuple(distinct.values())


def _tried(trials: CallTrials, ideas: Iterable[FixIdea], accept: Accept | None = None) -> Fixes:
    return (trials.fix(idea, accept) for idea in ideas)


def _expression_fix(call: FailedCall, trials: CallTrials, slug: str, code: str) -> ShapeFix | None:
    """Another text for the whole expression."""
    shape = trials.result_of(ast.parse(code, mode="eval").body)
    name = call.operands[0].text if call.operands else ""
    return None if shape is None else ShapeFix(slug, name, code, True, shape)


def _product(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The right side transposed, then the left; a missing axis."""
    operands = known_operands(call)[::-1]
    yield from trials.first_fixes(
        (idea for i, op in operands for idea in transpose_axes(i, op)),
        (idea for i, op in operands for idea in [*flatten_axes(i, op), *add_axis(i, op)]),
    )


def _features(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The axis with the right size moved to its place; a missing axis; images in grey; last the layer itself."""
    for i, operand in known_operands(call)[:1]:
        shape = operand.shape or ()
        ways = (permute_axes, transpose_axes) if call.op.endswith("2d") else (transpose_axes, permute_axes)
        # height and width of a square image that equal the expected channels say nothing of channels
        by_chance = len(shape) == 4 and shape[2] == shape[3] == message.expected
        views = (
            [idea for way in ways for idea in way(i, operand)] if message.expected in shape and not by_chance else []
        )
        yield from trials.first_fixes(
            (idea for idea in views if _fits_axis(idea, operand, message)),
            flatten_axes(i, operand),
            _change_channels(i, operand, message),
            add_axis(i, operand),
            remove_axis(i, operand),
        )


def _fits_axis(idea: FixIdea, operand: CallOperand, message: ParsedMessage) -> bool:
    """Whether a view has the expected size on the axis that counts, and the batch where it was."""
    if message.axis is None or operand.shape is None:
        return True
    after = tuple(idea.change(torch.zeros(()).expand(operand.shape)).shape)
    return after[message.axis] == message.expected and (message.axis == 0 or after[0] == operand.shape[0])


def _change_channels(which: int, operand: CallOperand, message: ParsedMessage) -> Iterator[FixIdea]:
    """One channel where three are expected, four where three are."""
    name, sizes = with_method(operand), (message.actual, message.expected)
    if len(operand.shape or ()) != 4:
        return
    if sizes == (1, 3):
        yield FixIdea("channels", which, f"{name}.expand(-1, 3, -1, -1)", lambda x: x.expand(-1, 3, -1, -1))
    if sizes == (4, 3):
        yield FixIdea("channels", which, f"{name}[:, :3]", lambda x: x[:, :3])
    if sizes == (3, 1):
        yield FixIdea("channels", which, f"{name}.mean(1, keepdim=True)", lambda x: x.mean(1, keepdim=True))


def _rank(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    for i, operand in known_operands(call)[:2]:
        yield from trials.first_fixes(
            remove_axis(i, operand), _whole_image(call, i, operand), add_axis(i, operand), flatten_axes(i, operand)
        )


def _in_front(image: torch.Tensor, axis: int) -> torch.Tensor:
    return image.squeeze(axis)[None, None]


def _whole_image(call: FailedCall, which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """An image [H, W] that has one axis more already, `depth.unsqueeze(1)`: both are missing in front of it. A further
    axis anywhere else makes as many images as it has rows."""
    shape = operand.shape or ()
    for source in bindings_back(operand.node, call.frame) if call.frame is not None and len(shape) == 3 else ():
        for node in ast.walk(source):
            method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            if method is None or method.attr != "unsqueeze" or not isinstance(node, ast.Call) or len(node.args) != 1:
                continue
            axis = ast.unparse(node.args[0])
            if axis in ("0", "1", "2") and shape[int(axis)] == 1:
                code, k = f"{ast.unparse(method.value)}[None, None]", int(axis)
                yield FixIdea("unsqueeze", which, code, functools.partial(_in_front, axis=k))
                return


def _broadcast(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """An axis of size 1 more or less, axes exchanged, an image resized: whatever does not make the result larger."""
    operands = known_operands(call)
    if len(operands) < 2:
        return
    ends = [operands[-1], *operands[:-1]]
    (i, left), (j, right) = operands[0], operands[-1]
    same = len(left.shape or ()) == len(right.shape or ())
    yield from trials.first_fixes(
        (idea for k, op in ends for idea in [*remove_axis(k, op), *add_axis(k, op)]),
        [*align_axes(i, left, right), *align_axes(j, right, left)],
        (idea for k, op in ends for idea in [*transpose_axes(k, op), *permute_axes(k, op)] if same),
        [*resize_image(i, left, right), *resize_image(j, right, left)],
        (idea for k, op in ends for idea in _fit_table(k, op, left if op is right else right)),
        accept=no_larger(call),
    )


def _fit_table(which: int, operand: CallOperand, other: CallOperand) -> Iterator[FixIdea]:
    """A table of positions that is longer than what it is added to, cut; a shorter one, made longer."""
    own, to = operand.shape or (), other.shape or ()
    differ = [i for i, (x, y) in enumerate(zip(own, to)) if x != y and 1 not in (x, y)]
    if type(operand.value) is not nn.Parameter or len(own) != len(to) or len(differ) != 1:
        return
    axis, name = differ[0], with_method(operand)
    size = to[axis]
    if own[axis] > size:
        index = ", ".join([":"] * axis + [f":{with_method(other)}.shape[{axis}]"])
        yield FixIdea("cut", which, f"{name}[{index}]", lambda x: x.narrow(axis, 0, size))
    else:
        shape = [*own[:axis], size, *own[axis + 1 :]]
        code = f"{name} = nn.Parameter(torch.zeros({', '.join(map(str, shape))}))"
        yield FixIdea("longer", which, code, lambda x: x.new_zeros(shape))


def _join(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The odd one with an axis more or less, or exchanged; another axis to join along; an image resized."""
    known = known_operands(call)
    if len(known) < 2:
        return
    odd = message.which if message.which is not None and message.which < len(call.operands) else known[-1][0]
    operand, other = call.operands[odd], call.operands[0 if odd else -1]
    if len(operand.shape or ()) != len(other.shape or ()):
        short = known[0][0] if len(operand.shape or ()) > len(other.shape or ()) else odd
        for i in dict.fromkeys((short, odd)):
            yield from _tried(trials, [*add_axis(i, call.operands[i]), *remove_axis(i, call.operands[i])])
    resized = [fix for fix in _tried(trials, resize_image(odd, operand, other)) if fix is not None]
    yield from resized
    if not resized:  # images of two sizes are not meant to be put side by side
        yield _other_join_axis(call)
    yield from _tried(trials, transpose_axes(odd, operand))


def _other_join_axis(call: FailedCall) -> ShapeFix | None:
    """Another axis along which all of them fit."""
    shapes = [operand.shape or () for operand in call.operands]
    unknown = any(operand.shape is None for operand in call.operands)
    if call.op == "stack" and not unknown and shapes[0] and len({shape[1:] for shape in shapes}) == 1:
        code = ast.unparse(call.node).replace("stack", "cat", 1) if call.node is not None else ""
        return ShapeFix("rows", "", code, True, (sum(shape[0] for shape in shapes), *shapes[0][1:])) if code else None
    if call.op not in ("cat", "concatenate") or unknown or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    keyword = "dim" if call.op == "cat" else "axis"
    for axis in range(len(shapes[0])):
        if axis != join_axis(call) and len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) == 1:
            result = (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])
            names = ", ".join(operand.text for operand in call.operands)
            code = f"{'torch' if keyword == 'dim' else 'np'}.{call.op}([{names}], {keyword}={axis})"
            return ShapeFix("axis", "", code, True, result)
    return None


def _strides(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """reshape copies where view cannot."""
    node = call.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        code = f"{ast.unparse(node.func.value)}.reshape({', '.join(map(ast.unparse, node.args))})"
        yield _expression_fix(call, trials, "reshape", code)


def _axis(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The last axis that there is, or the batch axis that is missing."""
    node, wrong = call.node, str(message.axis)
    if isinstance(node, ast.Call) and message.axis is not None and message.axis > 0 and call.operands:
        args = [ast.unparse(arg) for arg in node.args]
        keywords = [(k.arg, ast.unparse(k.value)) for k in node.keywords]
        if args.count(wrong) + [value for _, value in keywords].count(wrong) == 1:
            new = ["-1" if arg == wrong else arg for arg in args]
            new += [f"{name}={'-1' if value == wrong else value}" for name, value in keywords]
            yield _expression_fix(call, trials, "axis", f"{ast.unparse(node.func)}({', '.join(new)})")
    for i, operand in known_operands(call)[:1] if call.op != "size" else ():
        yield from _tried(trials, reversed(list(itertools.islice(add_axis(i, operand), 2))))


def _order(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """As many axes as the tensor has."""
    for i, operand in known_operands(call)[:1]:
        if message.actual is not None and message.expected == message.actual + 1:
            yield from _tried(trials, reversed(list(itertools.islice(add_axis(i, operand), 2))))  # the batch, first
        dims = [n for _, n in call.arguments if type(n) is int]
        if operand.shape and len(dims) == len(operand.shape) - 1 and sorted(dims) == list(range(len(dims))):
            new = ", ".join(map(str, [0, *(d + 1 for d in dims)]))
            yield _expression_fix(call, trials, "order", f"{with_method(operand)}.{call.op}({new})")
        if call.op == "t" and operand.shape:
            yield _expression_fix(call, trials, "order", f"{with_method(operand)}.mT")


def _expand(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """An axis more, beside those that have their size already."""
    for i, op in known_operands(call)[:1]:
        yield from _tried(trials, [*add_axis(i, op), *remove_axis(i, op), *transpose_axes(i, op)])


def _scalar(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The mean as the one number; tensors in a list stacked."""
    node = call.node
    texts = [operand.text for operand in call.operands]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item":
        name = ast.unparse(node.func.value)
        yield ShapeFix("mean", texts[0] if texts else name, f"{name}.mean().item()")
    elif isinstance(node, ast.Call) and call.op in ("tensor", "as_tensor", "FloatTensor") and len(node.args) == 1:
        yield _expression_fix(call, trials, "stack", f"torch.stack({ast.unparse(node.args[0])})")


def _index(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    node = call.node
    for _, operand in known_operands(call)[1:2] if isinstance(node, ast.Subscript) else ():
        shape, mask = call.operands[0].shape or (), operand.shape or ()
        axes = [k for k in range(1, len(shape)) if shape[k : k + len(mask)] == mask]
        if isinstance(node, ast.Subscript) and len(axes) == 1 and "bool" in str(getattr(operand.value, "dtype", "")):
            code = f"{ast.unparse(node.value)}[{':, ' * axes[0]}{operand.text}]"
            yield _expression_fix(call, trials, "axis", code)
    if call.op == "topk" and isinstance(node, ast.Call) and call.operands and call.operands[0].shape:
        yield _expression_fix(call, trials, "topk", _topk(call, node))
    for i, operand in known_operands(call)[1:2]:
        ideas = remove_axis(i, operand), add_axis(i, operand), transpose_axes(i, operand)
        yield next(trials.first_fixes(*ideas), None)


def _topk(call: FailedCall, node: ast.Call) -> str:
    """No more than there are."""
    axis = next((value for text, value in call.arguments[1:] if type(value) is int), -1)
    name, k = with_method(call.operands[0]), call.arguments[0][0] if call.arguments else "k"
    return ast.unparse(node).replace(f"({k}", f"(min({k}, {name}.shape[{axis}])", 1)


def _of_role(role: str) -> Callable[[FailedCall, ParsedMessage, CallTrials], Fixes]:
    """Another view of the operand of this role."""

    def fixes(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
        for i, op in known_operands(call):
            if role in op.role and (message.b is None or op.shape is None or op.shape in (message.a, message.b)):
                heads, rows = _repeat_for_heads(call, i, op), _rows_of_state(call, i, op)
                yield from trials.first_fixes(transpose_axes(i, op), heads, rows, add_axis(i, op), remove_axis(i, op))

    return fixes


def _repeat_for_heads(call: FailedCall, which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """One mask for each head, as a mask of three axes must have them."""
    heads = getattr(call.layer, "num_heads", None) if type(call.layer) is nn.MultiheadAttention else None
    if type(heads) is int and len(operand.shape or ()) == 3:
        code = f"{with_method(operand)}.repeat_interleave({heads}, 0)"
        yield FixIdea("heads", which, code, lambda x: x.repeat_interleave(heads, 0))


def _rows_of_state(call: FailedCall, which: int, operand: CallOperand) -> Iterator[FixIdea]:
    """The rows of a state that a smaller batch needs, such as the last."""
    first = call.operands[0]
    if isinstance(call.layer, nn.RNNBase) and len(first.shape or ()) == len(operand.shape or ()) == 3 and first.text:
        axis = 0 if call.layer.batch_first else 1
        rows = (first.shape or ())[axis]
        if rows < (operand.shape or ())[1]:
            name = ast.unparse(operand.node) if isinstance(operand.node, ast.Call) else with_method(operand)
            code = f"{name}[:, :{with_method(first)}.shape[{axis}]].contiguous()"
            yield FixIdea("cut", which, code, lambda x: x[:, :rows].contiguous())


def _any_view(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    for i, op in known_operands(call)[:3]:
        ideas = [*remove_axis(i, op), *add_axis(i, op), *transpose_axes(i, op), *permute_axes(i, op)]
        yield from _tried(trials, ideas, no_larger(call))


def _lengths(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    node = call.node
    if isinstance(node, ast.Call) and "sorted=False" not in ast.unparse(node) and message.actual is None:
        keywords = [f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords if k.arg != "enforce_sorted"]
        args = [*map(ast.unparse, node.args), *keywords]
        code = f"{ast.unparse(node.func)}({', '.join(args)}, enforce_sorted=False)"
        yield _expression_fix(call, trials, "unsorted", code)
    for i, operand in known_operands(call)[:1]:
        code = f"{with_method(operand)}.transpose(0, 1)"
        yield trials.fix(FixIdea("transpose", i, code, lambda x: x.transpose(0, 1)))


def _zero(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """Single numbers stacked."""
    if isinstance(call.node, ast.Call) and call.op == "cat":
        yield ShapeFix("stack", "", ast.unparse(call.node).replace("cat", "stack", 1))


def _picture(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The channels last, as matplotlib has them; a batch of one, or one channel, without that axis."""
    for _, operand in known_operands(call)[:1]:
        shape, name = operand.shape or (), with_method(operand)
        method = "transpose" if type(operand.value) is np.ndarray else "permute"
        if 1 in shape[:-2]:
            yield ShapeFix("squeeze", operand.text, f"{name}[0]")
        elif len(shape) == 3 and shape[0] in (3, 4):
            yield ShapeFix("permute", operand.text, f"{name}.{method}(1, 2, 0)")


def _grid(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    for i, operand in known_operands(call)[1:2]:
        yield from _tried(trials, permute_axes(i, operand))


# -- losses ----------------------------------------------------------------------------------------------------------


def _loss(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The target's axis of size 1, one-hot targets, classes on the last axis, axes of a sequence made one."""
    by_role = {operand.role: (i, operand) for i, operand in known_operands(call)}
    if not {"input", "target"} <= set(by_role):
        return
    shift = token_shift(call, trials)
    if shift is not None:
        yield shift[1]
        return
    (i, scores), (j, target) = by_role["input"], by_role["target"]
    shape = scores.shape or ()
    last = (
        list(_classes_second(i, scores))
        if call.op in CLASS_LOSSES and len(shape) > 2 and target.shape == shape[:-1]
        else []
    )
    one_hot = [FixIdea("classes", j, f"{with_method(target)}.argmax(1)", lambda x: x.argmax(1))]
    lacks_axis = len(shape) == len(target.shape or ()) + 1 and message.expected is None
    fixes = list(
        trials.first_fixes(
            last,
            [*remove_axis(j, target), *remove_axis(i, scores), *(add_axis(j, target) if lacks_axis else ())],
            one_hot if target.shape == scores.shape else (),
            () if last else _classes_second(i, scores),
        )
    )
    if last and not fixes:  # it is plain from the shapes, though it can't be tried
        yield ShapeFix(last[0].slug, scores.text, last[0].code)
    yield from fixes
    if not fixes or fixes[0].slug == "classes-last":
        yield _flatten_both(trials, i, scores, j, target)


def _classes_second(which: int, operand: CallOperand) -> Iterator[FixIdea]:
    axes, name = len(operand.shape or ()), with_method(operand)
    if axes == 3:
        yield FixIdea("classes-last", which, f"{name}.transpose(1, 2)", lambda x: x.transpose(1, 2))
    if axes == 4:
        yield FixIdea("classes-last", which, f"{name}.permute(0, 3, 1, 2)", lambda x: x.permute(0, 3, 1, 2))


def _flatten_both(trials: CallTrials, i: int, scores: CallOperand, j: int, target: CallOperand) -> ShapeFix | None:
    axes = len(target.shape or ())
    if axes < 2 and len(scores.shape or ()) < 3:
        return None
    ideas = [FixIdea("flatten", i, f"{with_method(scores)}.flatten(0, -2)", lambda x: x.flatten(0, -2))]
    if axes > 1:
        ideas.append(FixIdea("flatten", j, f"{with_method(target)}.flatten()", lambda x: x.flatten()))
    shape = trials.result(ideas)
    code = ", ".join(idea.code for idea in ideas)
    return None if shape is None else ShapeFix("flatten", scores.text, code, True, shape)


def token_shift(call: FailedCall, trials: CallTrials | None = None) -> tuple[ShiftedSize, ShapeFix | None] | None:
    """Predictions of the next token: both sides are flattened to rows, and only one of them was cut by one position.
    The rows of the batch are known from what one of them was flattened from."""
    by_role = {operand.role: (i, operand) for i, operand in known_operands(call)}
    if call.frame is None or not {"input", "target"} <= set(by_role):
        return None
    scores, target = by_role["input"][1].shape or (), by_role["target"][1].shape or ()
    if len(scores) != 2 or len(target) != 1:
        return None
    rows = {"input": scores[0], "target": target[0]}
    longer, shorter = sorted(rows, key=rows.__getitem__, reverse=True)
    which, operand = by_role[longer]
    for source, base, value in unflattened(operand.node, call.frame, rows[longer]):
        batch, positions = value.shape[0], value.shape[1]
        if batch * (positions - 1) != rows[shorter]:
            continue
        index = "[:, 1:]" if longer == "target" else "[:, :-1]"
        simple = isinstance(base, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
        name = ast.unparse(base)
        shift = ShiftedSize(batch, rows["input"] // batch, rows["target"] // batch, name, tuple(value.shape))
        code = ast.unparse(source).replace(name, (name if simple else f"({name})") + index, 1)
        code = code.replace(".view(", ".reshape(")  # as a cut tensor needs
        target_name = f"{operand.text} = " if isinstance(operand.node, ast.Name) and source is not operand.node else ""
        idea = FixIdea("shift", which, code, _without_position(batch, longer))
        shape = trials.result([idea]) if trials is not None else None
        return shift, ShapeFix("shift", name, f"{target_name}{code}", True if shape is not None else None, shape)
    return None


def _without_position(batch: int, longer: str) -> Callable[[Any], Any]:
    """The flat operand without the position of each row that the other side does not have."""
    ends = slice(1, None) if longer == "target" else slice(None, -1)
    return lambda x: x.unflatten(0, (batch, -1))[:, ends].flatten(0, 1)


BY_KIND: dict[str, Callable[[FailedCall, ParsedMessage, CallTrials], Fixes]] = {
    "product": _product,
    "features": _features,
    "rank": _rank,
    "broadcast": _broadcast,
    "inplace": _broadcast,
    "loss": _loss,
    "join": _join,
    "count": count_fixes,
    "strides": _strides,
    "axis": _axis,
    "order": _order,
    "index": _index,
    "expand": _expand,
    "assign": _any_view,
    "hidden": _of_role("h"),
    "mask": _of_role("mask"),
    "attention": _any_view,
    "lengths": _lengths,
    "grid": _grid,
    "samples": _any_view,
    "scalar": _scalar,
    "picture": _picture,
    "zero": _zero,
    "square": _product,
}
