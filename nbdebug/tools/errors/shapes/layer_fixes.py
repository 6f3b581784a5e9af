"""Fixes for a layer that was made for another size: the layer made for this one, the images resized to the size that it
was made for, or a pooling before the flattening that makes images of any size fit. Then, of a flattening view, fixes
that also fit the layer after it; and of attention. The last part makes all fixes of shapes edits of the user's own
text, and runs the program on with that text: only what comes through is called tried. An operand is rewritten where the
failing line names it, a layer where it is made."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import edit_of, nodes_of, parse, statement_at
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.report import Edit
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.continuation import before_line, continued
from nbdebug.tools.errors.operands import OperandNames
from nbdebug.tools.errors.sandbox import quiet
from nbdebug.tools.errors.shapes.call import FailedCall, next_call, operand_value
from nbdebug.tools.errors.shapes.history import frames_below, layer_sizes, output_shape, path_of, user_input
from nbdebug.tools.errors.shapes.messages import ParsedMessage
from nbdebug.tools.errors.shapes.rules import Shape, ShapeFix, ShapeStep, ViewDownstream
from nbdebug.tools.errors.shapes.trials import CallTrials, result_shape, with_method
from nbdebug.tools.errors.values import callee_name, expression, shape_of, statement, value_of

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
        maker = LAYER_CODE.get(family) if family is not None and family is not type(layer) else None
        size = layer_sizes(layer).get("num_features") or layer_sizes(layer).get("in_channels")
        if maker is not None and type(size) is int:
            code = maker(attributes(layer), size)
            with quiet():
                yield from CallTrials(call).with_layer(eval(code, {"nn": nn}), code, path, "kind")
    if message.kind == "hidden" and call.function is not None and isinstance(call.node, ast.Call) and call.node.args:
        result = CallTrials(call).without("hx")
        if result is not None:
            code = f"{ast.unparse(call.node.func)}({ast.unparse(call.node.args[0])})"
            yield ShapeFix("state", "", f"{code}   # without a state: torch begins with zeros", True, result)


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
    maker = LAYER_CODE.get(type(layer))
    if maker is None or size is None or size <= 0:
        return None
    code = maker(attributes(layer), size)
    with quiet():
        try:
            return eval(code, {"nn": nn}), code  # a text of ours, of numbers of the layer's
        except Exception:
            return None


def _linear_code(settings: Settings, size: int) -> str:
    bias = "" if settings["_parameters"].get("bias") is not None else ", bias=False"
    return f"nn.Linear({size}, {settings['out_features']}{bias})"


def _conv_code(name: str) -> Callable[[Settings, int], str]:
    def code(settings: Settings, size: int) -> str:
        arguments = [f"nn.{name}({size}, {settings['out_channels']}, {_one_number(settings['kernel_size'])}"]
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = _one_number(settings[key])
            arguments += [f"{key}={value!r}"] if value != default else []
        return ", ".join(arguments) + ")"

    return code


def _one_number(value: Any) -> Any:
    return value[0] if type(value) is tuple and len(set(value)) == 1 else value


def _norm_code(name: str) -> Callable[[Settings, int], str]:
    return lambda settings, size: f"nn.{name}({size})"


def _recurrent_code(name: str) -> Callable[[Settings, int], str]:
    def code(settings: Settings, size: int) -> str:
        more = f", {settings['num_layers']}" if settings.get("num_layers", 1) > 1 else ""
        more += ", batch_first=True" if settings.get("batch_first") else ""
        more += ", bidirectional=True" if settings.get("bidirectional") else ""
        return f"nn.{name}({size}, {settings['hidden_size']}{more})"

    return code


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
LAYER_CODE: dict[type, Callable[[Settings, int], str]] = {
    nn.Linear: _linear_code,
    **{kind: _conv_code(kind.__name__) for kind in _CONVS},
    **{kind: _norm_code(kind.__name__) for kind in _NORMS},
    nn.GroupNorm: lambda settings, size: f"nn.GroupNorm({settings['num_groups']}, {size})",
    nn.MultiheadAttention: lambda settings, size: f"nn.MultiheadAttention({size}, {settings['num_heads']})",
    **{kind: _recurrent_code(kind.__name__) for kind in _RECURRENT},
}


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
    with quiet():
        try:
            new = eval(code, {"nn": nn})  # a text of ours, of numbers of the layer's
            result = result_shape(new(*map(torch.zeros, small)))
        except Exception:  # heads that do not divide, batches that differ: no fix
            return
    yield ShapeFix("layer", path, code, True, result)


# -- fixes as edits ----------------------------------------------------------------------------------------------------

WHOLE = ("reshape", "axis", "order", "count", "unsorted", "state", "pooled", "mean", "stack", "rows", "topk")
"""Fixes whose code stands for the whole failing expression."""
LAYERS = ("layer", "downstream")
"""Fixes that make a layer anew."""
SIZES = {"Linear": "out_features", "Conv1d": "out_channels", "Conv2d": "out_channels", "Conv3d": "out_channels"}


def as_edits(
    context: ErrorContext, call: FailedCall, fixes: tuple[ShapeFix, ...], size: int | None
) -> tuple[ShapeFix, ...]:
    """The fixes as edits, each tried on the program behind the line; those that fail there are left out, and those that
    are no edit, or could not be tried, become suggestions. Those that came through go first."""
    results = []
    for fix in fixes:
        edit = _edit(context, call, fix)
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
    frame = context.users[0] if context.users else None
    node = expression(frame) if frame is not None else None
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


def _edit(context: ErrorContext, call: FailedCall, fix: ShapeFix) -> Edit | None:
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
    if new is None or made is None or not made[1].args:
        return None, None
    weight = next(iter(layer.parameters(recurse=False)), None)
    module = new[0] if weight is None else new[0].to(weight.dtype)
    return edit_of(made[0], {made[1].args[0]: str(size)}), {id(layer): module}


def constructor(context: ErrorContext, layer: nn.Module) -> tuple[str, ast.Call] | None:
    """(file, call) of the only call in the user's sources that can have made a layer: its class, and its sizes where
    they are numbers."""
    own, kind = attributes(layer), type(layer).__name__
    names = [name for name in (*_FIRST, SIZES.get(kind, "")) if name in own]
    wanted = [own[name] for name in names]
    exact: list[tuple[str, ast.Call]] = []
    possible: list[tuple[str, ast.Call]] = []
    for file in _files(context):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and callee_name(node) == kind and node.args:
                numbers = [_number(arg) for arg in node.args[: len(wanted)]]
                if any(n is not None and n != w for n, w in zip(numbers, wanted)):
                    continue
                (exact if None not in numbers else possible).append((file, node))
    candidates = exact or possible
    if len(candidates) > 1:  # the one that the attribute of this name gets
        name = (context.path(layer) or "").rpartition(".")[2]
        lines = [(made, statement_at(made[0], made[1].lineno)) for made in candidates]
        candidates = [
            made
            for made, line in lines
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == f"self.{name}"
        ]
    return candidates[0] if len(candidates) == 1 else None


_FIRST = ("num_embeddings", "in_features", "in_channels", "input_size", "num_features", "normalized_shape")


def _number(node: ast.expr) -> int | None:
    """The value of an expression of whole numbers: `16 * 5 * 5`."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None:
            return None
        ops: dict[type, Any] = {ast.Mult: left * right, ast.Add: left + right, ast.Sub: left - right}
        if isinstance(node.op, (ast.FloorDiv, ast.Pow)) and 0 < right < 32:
            return left // right if isinstance(node.op, ast.FloorDiv) else left**right if abs(left) < 1e4 else None
        return ops.get(type(node.op))
    return None


def _files(context: ErrorContext) -> Iterator[str]:
    """The user's files that can have made a layer: those of the traceback, other cells, and those of their models."""
    files = [frame.site.file for frame in context.users]
    files += [other for file in files[:1] for other in other_cells(file)]
    for model in context.owners.models.values():
        code = getattr(class_attribute(model, "__init__"), "__code__", None)
        if code is not None and not type(model).__module__.startswith("torch."):
            files.append(code.co_filename)
    yield from dict.fromkeys(files)
