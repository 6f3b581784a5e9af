"""Which changes are worth a try for each kind of misfit, likeliest first; those that run are offered, two at most.

For a layer that was made for another size: the layer made for this one, the images resized to the size that it was made
for, or a pooling before the flattening that makes images of any size fit. Of a flattening view, fixes that also fit the
layer after it; of attention, the layer made for its features. Then all fixes of shapes are made edits of the user's own
text, and the program runs on with that text: only what comes through is called tried. An operand is rewritten where the
failing line names it, a layer where it is made. The last part has the other views of an operand, by the kind of misfit.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nbdebug.observe.sources import edit_of, names_loaded, nodes_of, parse, tree_of
from nbdebug.observe.variables import attributes
from nbdebug.report import Edit
from nbdebug.tools.errors.context import (
    ErrorContext,
    callee_name,
    expression,
    functions_around,
    shape_of,
    statement,
    value_of,
)
from nbdebug.tools.errors.operands import OperandNames
from nbdebug.tools.errors.sandbox import before_line, continued, quiet
from nbdebug.tools.errors.shapes.call import (
    CallOperand,
    FailedCall,
    ParsedMessage,
    bindings_back,
    frames_below,
    layer_sizes,
    next_call,
    operand_value,
    path_of,
    unflattened,
    user_input,
)
from nbdebug.tools.errors.shapes.rules import Shape, ShapeFix, ShapeStep, ShiftedSize, ViewDownstream
from nbdebug.tools.errors.shapes.trials import (
    CONVS,
    TRANSPOSED_CONVS,
    Accept,
    CallTrials,
    FixIdea,
    add_axis,
    align_axes,
    constructor,
    flatten_axes,
    join_axis,
    known_operands,
    no_larger,
    output_shape,
    permute_axes,
    remove_axis,
    resize_image,
    shape_of_run,
    transpose_axes,
    with_method,
)

LARGEST = 1024
"""The side of the largest image that is tried."""
Settings = dict[str, Any]


def resized_layer_fixes(
    context: ErrorContext, call: FailedCall, message: ParsedMessage, history: tuple[ShapeStep, ...], path: str
) -> Iterator[ShapeFix]:
    """For a layer that was made for another size, likeliest first."""
    layer = call.layer
    if layer is None or not call.operands:
        return
    if call.operands[0].shape is None:  # of a compiled model only the message has the sizes
        new = layer_of_size(layer, message.actual) if message.a is not None and message.kind == "features" else None
        if new is not None and message.a is not None:
            result = output_shape(new[0], message.a)
            yield ShapeFix("layer", path, new[1], result is not None, result)
        return
    yield from _resized_images(context, call)
    trials = CallTrials(call)
    before = next((step.shape for step in reversed(history) if len(step.shape) > 2), None)
    if type(layer) is nn.Linear and before is not None and len(call.operands[0].shape) == 2:
        yield from _pooling(layer, before)
    new = layer_of_size(layer, message.actual)
    if new is not None and message.actual != message.expected:
        yield from trials.with_layer(*new, path)


def other_layer_fixes(call: FailedCall, message: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """The layer of the same family for as many axes; a recurrent layer without the state that does not fit."""
    layer, shape = call.layer, call.operands[0].shape if call.operands else None
    if layer is None or shape is None:
        return
    kind = type(layer).__name__
    if kind.endswith("d") and kind[-2:-1].isdigit() and len(shape) in (3, 4, 5):
        family = getattr(nn, f"{kind[:-2]}{len(shape) - 2}d", None)
        size = layer_sizes(layer).get("num_features") or layer_sizes(layer).get("in_channels")
        other = family is not None and family is not type(layer) and type(size) is int
        code = layer_code(family, attributes(layer), size) if other and size is not None else None
        if code is not None:
            with quiet():
                yield from CallTrials(call).with_layer(eval(code, {"nn": nn}), code, path, "kind")
    if message.kind == "hidden" and call.function is not None and isinstance(call.node, ast.Call) and call.node.args:
        result = CallTrials(call).without("hx")
        if result is not None:
            code = f"{ast.unparse(call.node.func)}({ast.unparse(call.node.args[0])})"
            yield ShapeFix("state", "", code, True, result)


def _pooling(layer: nn.Linear, before: Shape) -> Iterator[ShapeFix]:
    """A pooling to the square that the layer was made for, if it was made for one."""
    channels, axes = before[1], len(before) - 2
    pool = {1: "AdaptiveAvgPool1d", 2: "AdaptiveAvgPool2d"}.get(axes)
    area = layer.in_features // channels if channels else 0
    side = area if axes == 1 else math.isqrt(area)
    if pool and 0 < side <= min(before[2:]) and channels * side**axes == layer.in_features:
        result = output_shape(nn.Sequential(getattr(nn, pool)(side), nn.Flatten(), layer), before)
        yield ShapeFix("pool", "", f"nn.{pool}({side})   # before the flattening", result is not None, result)


def _resized_images(context: ErrorContext, call: FailedCall) -> Iterator[ShapeFix]:
    """The image size that the layer was made for: by the formulas of the layers, for each size."""
    image, layer = user_input(call), call.layer
    levels = [f for f in frames_below(context) if type(f.module) is nn.Sequential and "input" in f.names]
    shape = image.shape if image else None
    if image is None or shape is None or len(shape) < 3 or not levels or layer is None:
        return
    axes = 2 if len(shape) > 3 else 1

    def result(side: int) -> Shape | None:
        return _at_layer(levels, (*shape[:-axes], *(side,) * axes), layer)

    sides = [side for side in range(1, LARGEST + 1) if result(side) is not None]
    if sides and shape[-axes:] not in [(side,) * axes for side in sides]:
        distances = [abs(side - max(shape[-axes:])) for side in sides]
        roundest = min(sides, key=lambda side: -(side & -side))  # 32 rather than 33
        side = roundest if type(layer) is nn.Linear else sides[distances.index(min(distances))]
        code = f"{image.name} = F.interpolate({image.name}, size={(side,) * axes})"
        yield ShapeFix("images", image.name, code, True, result(side))


def _at_layer(levels: list[Any], start: Shape, layer: nn.Module) -> Shape | None:
    """The output shape of the layer for that shape at the entrance of the Sequentials; None where it does not fit."""
    shape: Shape | None = start
    for level in levels:
        for child in (attributes(level.module).get("_modules") or {}).values():
            if child is level.names.get("module") or shape is None:
                break
            shape = output_shape(child, shape)
    return output_shape(layer, shape) if shape is not None else None


def layer_of_size(layer: nn.Module, size: int | None) -> tuple[nn.Module, str] | None:
    """The layer made for inputs of this size, and the code that makes it."""
    code = layer_code(type(layer), attributes(layer), size) if size is not None and size > 0 else None
    if code is None:
        return None
    with quiet():
        try:
            return eval(code, {"nn": nn}), code  # a text of ours, of numbers of the layer's
        except Exception:
            return None


def _one_number(value: Any) -> Any:
    return value[0] if type(value) is tuple and len(set(value)) == 1 else value


_NORMS = [nn.LayerNorm, *(getattr(nn, f"{kind}Norm{axes}d") for kind in ("Batch", "Instance") for axes in (1, 2, 3))]
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def layer_code(kind: Any, settings: Settings, size: int) -> str | None:
    """The code that makes a layer of this class for inputs of this size, else with the settings of another one."""
    start = f"nn.{kind.__name__}({size}"
    if kind is nn.Linear:
        bias = "" if settings["_parameters"].get("bias") is not None else ", bias=False"
        return f"{start}, {settings['out_features']}{bias})"
    if kind in CONVS or kind in TRANSPOSED_CONVS:
        arguments = [f"{start}, {settings['out_channels']}, {_one_number(settings['kernel_size'])}"]
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = _one_number(settings[key])
            arguments += [f"{key}={value!r}"] if value != default else []
        return ", ".join(arguments) + ")"
    if kind in _RECURRENT:
        more = f", {settings['num_layers']}" if settings.get("num_layers", 1) > 1 else ""
        more += "".join(f", {flag}=True" for flag in ("batch_first", "bidirectional") if settings.get(flag))
        return f"{start}, {settings['hidden_size']}{more})"
    if kind is nn.GroupNorm:
        return f"nn.GroupNorm({settings['num_groups']}, {size})"
    if kind is nn.MultiheadAttention:
        return f"{start}, {settings['num_heads']})"
    return start + ")" if kind in _NORMS else None


# -- a view that flattens --------------------------------------------------------------------------------------------


def count_fixes(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Iterator[ShapeFix | None]:
    """One of the sizes left to torch (-1); for a flattening view, flatten itself."""
    operand, sizes = call.operands[0], message.a
    if call.op not in ("view", "reshape") or call.inner is not None or sizes is None or operand.shape is None:
        return
    if remainder(call) is not None or downstream(call, message) is not None:
        return
    name, total = with_method(operand), math.prod(operand.shape)
    texts = [t for t, _ in call.arguments] if len(call.arguments) == len(sizes) else [str(size) for size in sizes]
    if -1 not in sizes:
        for i in range(len(sizes)):
            new = [*sizes[:i], -1, *sizes[i + 1 :]]
            fixed = math.prod(size for size in new if size > 0)
            if total and total % fixed == 0:
                code = f"{name}.{call.op}({', '.join([*texts[:i], '-1', *texts[i + 1 :]])})"
                result = tuple(total // fixed if size == -1 else size for size in new)
                yield ShapeFix("count", operand.text, code, True, result)
    elif len(sizes) == 2 and len(operand.shape) > 2:
        result = (operand.shape[0], math.prod(operand.shape[1:]))
        yield ShapeFix("flatten", operand.text, f"{name}.flatten(1)", True, result)


def downstream(call: FailedCall, message: ParsedMessage, names: OperandNames | None = None) -> ViewDownstream | None:
    """The layer that comes next, where it could not take the rows that there are."""
    layer, shape = _next_layer(call, message), call.operands[0].shape if call.operands else None
    if layer is None or not shape:
        return None
    expected, actual = attributes(layer)["in_features"], math.prod(shape[1:])
    path = path_of(layer, names) if names is not None else ""
    return ViewDownstream(path, expected, actual) if expected != actual else None


def _next_layer(call: FailedCall, message: ParsedMessage) -> Any:
    """The Linear that takes the output of a flattening."""
    two_sizes = message.kind == "count" and len(message.a or ()) == 2
    if not two_sizes or call.op not in ("view", "reshape") or call.frame is None:
        return None
    after = next_call(call.node, call.frame)
    module: Any = value_of(after.func, call.frame) if after is not None else None
    while type(module) is nn.Sequential:
        module = next(iter((attributes(module).get("_modules") or {}).values()), None)
    return module if type(module) is nn.Linear else None


def downstream_fixes(call: FailedCall, message: ParsedMessage, path: str) -> Iterator[ShapeFix]:
    """What also fits the layer after the view: images pooled to the square that it was made for; the layer made for
    them."""
    layer, operand = _next_layer(call, message), call.operands[0]
    shape: Shape = operand.shape or ()
    features = attributes(layer)["in_features"]
    side = math.isqrt(features // shape[1]) if len(shape) == 4 and shape[1] else 0
    if 0 < side <= min(shape[2:], default=0) and shape[1] * side * side == features:
        result = output_shape(nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten(), layer), shape)
        code = f"F.adaptive_avg_pool2d({operand.text}, {side}).flatten(1)"
        yield ShapeFix("pooled", path, code, result is not None, result)
    actual = math.prod(shape[1:])
    new = layer_of_size(layer, actual)
    if new is not None:
        code = f"{with_method(operand)}.flatten(1)\n{new[1]}   # {path}"
        yield ShapeFix("downstream", path, code, True, output_shape(new[0], (shape[0], actual)))


def remainder(call: FailedCall) -> tuple[str, int, int] | None:
    """(text of the divisor, what is divided, by what) of a size `12 // heads` that leaves a remainder."""
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and call.frame is not None:
            whole, by = operand_value(node.left, call.frame), operand_value(node.right, call.frame)
            if type(whole) is int and type(by) is int and by > 0 and whole % by:
                return ast.unparse(node.right), whole, by
    return None


# -- attention -------------------------------------------------------------------------------------------------------

ATTENTION_SIZES = {"query": "embed_dim", "key": "kdim", "value": "vdim"}


def attention_message(call: FailedCall, message: ParsedMessage) -> ParsedMessage | None:
    """The first of query, key and value whose features the layer does not take; None where they all fit."""
    settings: Any = attributes(call.layer)
    for i, operand in enumerate(call.operands):
        expected, shape = settings.get(ATTENTION_SIZES.get(operand.role, "")), operand.shape
        if type(expected) is int and shape and shape[-1] != expected:
            axis, actual = len(shape) - 1, shape[-1]
            return dataclasses.replace(message, kind="features", axis=axis, expected=expected, actual=actual, which=i)
    return None


def attention_fixes(call: FailedCall, path: str) -> Iterator[ShapeFix]:
    """The layer made for the features that it is given, where its heads divide them; run on zeros."""
    shapes = {op.role: op.shape for op in call.operands if op.role in ATTENTION_SIZES and op.shape is not None}
    if set(shapes) != set(ATTENTION_SIZES):
        return
    settings: Any = attributes(call.layer)
    sizes = {role: shape[-1] for role, shape in shapes.items() if shape}
    arguments = [str(sizes["query"]), str(settings["num_heads"])]
    arguments += [f"{ATTENTION_SIZES[r]}={sizes[r]}" for r in ("key", "value") if sizes[r] != sizes["query"]]
    arguments += ["batch_first=True"] if settings.get("batch_first") else []
    code = f"nn.MultiheadAttention({', '.join(arguments)})"
    small = [(*(min(size, 64) for size in shapes[role][:-1]), *shapes[role][-1:]) for role in ATTENTION_SIZES]
    # a text of ours, of numbers of the layer's; heads may not divide, batches may differ
    result = shape_of_run(lambda: eval(code, {"nn": nn})(*map(torch.zeros, small)))
    if result is not None:
        yield ShapeFix("layer", path, code, True, result)


# -- fixes as edits ----------------------------------------------------------------------------------------------------

WHOLE = ("reshape", "axis", "order", "count", "unsorted", "state", "pooled", "mean", "stack", "rows", "topk")
"""Fixes whose code stands for the whole failing expression."""
LAYERS = ("layer", "downstream")
"""Fixes that make a layer anew."""


def as_edits(
    context: ErrorContext, call: FailedCall, fixes: tuple[ShapeFix, ...], size: int | None
) -> tuple[ShapeFix, ...]:
    """The fixes as edits, each tried on the program behind the line; those that fail there are left out, and those that
    are no edit, or could not be tried, become suggestions. Those that came through go first."""
    results = []
    for fix in fixes:
        edit = _edit(call, fix)
        if fix.slug in LAYERS:
            edit, layers = _layer_edit(context, call, fix, size)
            trial = continued(context, None, layers) if edit is not None and layers is not None else None
        else:
            trial = continued(context, edit) if edit is not None else None
        if trial is not None and not trial.worked:
            continue
        tried = fix.verified if edit is not None and fix.verified is not False else None
        results.append(dataclasses.replace(fix, edit=edit, verified=tried, reached=trial.text if trial else ""))
    if not any(fix.verified for fix in results):
        results += [*_tokens_as_rows(context, call), *_flattened_between(context, call)]
    return tuple(sorted(results, key=lambda fix: not fix.verified))


def _tokens_as_rows(context: ErrorContext, call: FailedCall) -> list[ShapeFix]:
    """Batch norm of tokens [batch, tokens, features]: all tokens as rows, and back, around the call in the line."""
    frame, node = context.frame, context.ran
    if frame is None or not isinstance(node, ast.Call) or len(node.args) != 1 or type(call.layer) is not nn.BatchNorm1d:
        return []
    shape, text = shape_of(value_of(node.args[0], frame)), ast.unparse(node.args[0])
    if shape is None or len(shape) != 3:
        return []
    code = f"{ast.unparse(node.func)}({text}.flatten(0, 1)).unflatten(0, {text}.shape[:2])"
    edit = edit_of(frame.site.file, {node: code})
    trial = continued(context, edit)
    return [ShapeFix("tokens", text, code, True, None, edit, trial.text)] if trial is not None and trial.worked else []


def _flattened_between(context: ErrorContext, call: FailedCall) -> list[ShapeFix]:
    """A Flatten before a Linear in the call that makes their Sequential."""
    level = next((f.module for f in frames_below(context) if type(f.module) is nn.Sequential), None)
    layer = call.layer
    made = constructor(context, layer) if level is not None and type(layer) is nn.Linear else None
    children = list((attributes(level).get("_modules") or {}).values()) if level is not None else []
    at = next((i for i, child in enumerate(children) if child is layer), 0)
    if made is None or layer is None or not at:
        return []
    around = [n for n in nodes_of(made[0]) if isinstance(n, ast.Call) and any(arg is made[1] for arg in n.args)]
    if len(around) != 1 or callee_name(around[0]) != "Sequential":
        return []
    maker = ast.unparse(made[1].func).rpartition(".")[0]
    edit = edit_of(made[0], {made[1]: f"{maker}.Flatten(), {{raw}}" if maker else "Flatten(), {raw}"})
    trial = continued(context, None, {id(level): nn.Sequential(*children[:at], nn.Flatten(), *children[at:])})
    code = edit.code if edit is not None else ""
    worked = maker and trial is not None and trial.worked and "to line" in trial.text
    return [ShapeFix("between", "", code, True, None, edit, trial.text)] if worked and trial is not None else []


def _edit(call: FailedCall, fix: ShapeFix) -> Edit | None:
    frame = call.frame
    if frame is None or fix.slug in LAYERS or "\n" in fix.code or "#" in fix.code:
        return None
    code = fix.code
    if "F." in code and "F" not in {**frame.globals, **frame.names}:
        code = code.replace("F.", "torch.nn.functional.")
    if fix.slug == "images":
        line, tree = statement(frame), parse(code)
        fits = line is not None and not hasattr(line, "body") and tree is not None
        return before_line(frame, line, tree.body) if fits and line is not None and tree is not None else None
    whole = fix.slug in WHOLE or fix.slug == "flatten" and call.op in ("view", "reshape")
    if fix.slug == "axis" and call.op in ("cat", "concatenate"):
        whole = True
    node: Any = call.node if whole else _operand_node(call, fix.name)
    if not isinstance(node, ast.expr) or node.end_lineno is None:
        return None
    return edit_of(frame.site.file, {node: code})


def _operand_node(call: FailedCall, name: str) -> ast.AST | None:
    """The operand of this text in the user's line."""
    operand = next((one for one in call.operands if one.text == name and name), None)
    if operand is None or call.frame is None:
        return None
    roots = (call.node, expression(call.frame), statement(call.frame))
    inside = [n for root in roots if root is not None for n in ast.walk(root)]
    if operand.node is not None and any(n is operand.node for n in inside):
        return operand.node
    alike = (n for n in inside if isinstance(n, ast.expr) and isinstance(getattr(n, "ctx", None), ast.Load))
    return next((n for n in alike if ast.unparse(n) == name or value_of(n, call.frame) is operand.value), None)


def _layer_edit(
    context: ErrorContext, call: FailedCall, fix: ShapeFix, size: int | None
) -> tuple[Edit | None, dict[int | str, nn.Module] | None]:
    """The size in the call that made the failing layer, and what replaces the layer in a trial."""
    layer = call.layer
    if layer is None or size is None or fix.slug != "layer" or type(layer) is nn.MultiheadAttention:
        return None, None
    new, made = layer_of_size(layer, size), constructor(context, layer)
    if new is None or made is None or not made[1].args or _makes_several(*made):
        return None, None
    weight = next(iter(layer.parameters(recurse=False)), None)
    module = new[0] if weight is None else new[0].to(weight.dtype)
    return edit_of(made[0], {made[1].args[0]: str(size)}), {id(layer): module}


# -- views of an operand, by the kind of misfit -----------------------------------------------------------------------

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
    after = tuple(idea.change(torch.zeros((), device="cpu").expand(operand.shape)).shape)
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


def _in_front(axis: int) -> Callable[[Any], Any]:
    return lambda image: image.squeeze(axis)[None, None]


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
                yield FixIdea("unsqueeze", which, code, _in_front(k))
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
        axis = next((value for text, value in call.arguments[1:] if type(value) is int), -1)
        name, k = with_method(call.operands[0]), call.arguments[0][0] if call.arguments else "k"
        code = ast.unparse(node).replace(f"({k}", f"(min({k}, {name}.shape[{axis}])", 1)  # no more than there are
        yield _expression_fix(call, trials, "topk", code)
    for i, operand in known_operands(call)[1:2]:
        ideas = remove_axis(i, operand), add_axis(i, operand), transpose_axes(i, operand)
        yield next(trials.first_fixes(*ideas), None)


def _of_role(role: str) -> Callable[[FailedCall, ParsedMessage, CallTrials], Fixes]:
    """Another view of the operand of this role."""

    def fixes(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
        for i, op in known_operands(call):
            if role in op.role and (message.b is None or op.shape is None or op.shape in (message.a, message.b)):
                heads = getattr(call.layer, "num_heads", None) if type(call.layer) is nn.MultiheadAttention else None
                masks = []
                if type(heads) is int and len(op.shape or ()) == 3:  # one mask for each head
                    code = f"{with_method(op)}.repeat_interleave({heads}, 0)"
                    masks = [FixIdea("heads", i, code, operator.methodcaller("repeat_interleave", heads, 0))]
                rows = _rows_of_state(call, i, op)
                yield from trials.first_fixes(transpose_axes(i, op), masks, rows, add_axis(i, op), remove_axis(i, op))

    return fixes


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


def _picture(call: FailedCall, message: ParsedMessage, trials: CallTrials) -> Fixes:
    """The channels last, as matplotlib has them; a batch of one, or one channel, without that axis."""
    for _, operand in known_operands(call)[:1]:
        shape, name = operand.shape or (), with_method(operand)
        method = "transpose" if type(operand.value) is np.ndarray else "permute"
        if 1 in shape[:-2]:
            yield ShapeFix("squeeze", operand.text, f"{name}[0]")
        elif len(shape) == 3 and shape[0] in (3, 4):
            yield ShapeFix("permute", operand.text, f"{name}.{method}(1, 2, 0)")


# -- losses ----------------------------------------------------------------------------------------------------------


def _without_position(batch: int, kept: slice) -> Callable[[Any], Any]:
    return lambda x: x.unflatten(0, (batch, -1))[:, kept].flatten(0, 1)


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
    last = []
    if call.op in CLASS_LOSSES and len(shape) > 2 and target.shape == shape[:-1]:
        last = list(_classes_second(i, scores))
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
        # the flat operand without the position of each row that the other side does not have
        ends = slice(1, None) if longer == "target" else slice(None, -1)
        idea = FixIdea("shift", which, code, _without_position(batch, ends))
        shape = trials.result([idea]) if trials is not None else None
        return shift, ShapeFix("shift", name, f"{target_name}{code}", True if shape is not None else None, shape)
    return None


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
    "expand": lambda call, message, trials: (
        fix
        for i, op in known_operands(call)[:1]
        for fix in _tried(trials, [*add_axis(i, op), *remove_axis(i, op), *transpose_axes(i, op)])
    ),
    "assign": _any_view,
    "hidden": _of_role("h"),
    "mask": _of_role("mask"),
    "attention": _any_view,
    "lengths": _lengths,
    "grid": lambda call, message, trials: (
        fix for i, op in known_operands(call)[1:2] for fix in _tried(trials, permute_axes(i, op))
    ),
    "samples": _any_view,
    "scalar": _scalar,
    "picture": _picture,
    "zero": lambda call, message, trials: iter(
        [ShapeFix("stack", "", ast.unparse(call.node).replace("cat", "stack", 1))]
        if isinstance(call.node, ast.Call) and call.op == "cat"
        else []
    ),
    "square": _product,
}


def _makes_several(file: str, call: ast.Call) -> bool:
    """Whether the size is an argument of a function that is no `__init__`: each call of it makes a layer."""
    scope = next(iter(functions_around(tree_of(file), call.lineno)), None)
    given = {n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg)} if scope is not None else set()
    return getattr(scope, "name", "") != "__init__" and bool(names_loaded(call.args[0]) & given)
