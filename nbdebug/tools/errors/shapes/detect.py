"""The look for sizes, numbers of axes and axes that do not fit.

said      what the message says: which kind of misfit, and its numbers
call      which call failed, and the tensors that it was given, by the user's names
expressions     the operands of an expression, by its syntax
came, graph     how the shape at fault came about, layer by layer
through   a layer's output shape by its formula
bench     an expression or a layer of torch's run again on copies
trials    the failing call with an operand seen in another way
cures, layers   the changes worth a try for each kind of misfit; losses, dealing, attention: of these families
sources   what a name was bound to before the line, and which layer takes what the line gives
compiled  the layer of a compiled model, whose frames are known from text alone
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from torch import nn

from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.facts import Raised
from nbdebug.tools.errors.operands import OperandNames
from nbdebug.tools.errors.shapes import history as came
from nbdebug.tools.errors.shapes import layer_fixes as attention
from nbdebug.tools.errors.shapes import layer_fixes as layers
from nbdebug.tools.errors.shapes.call import CallPart, FailedCall, failing, layer_of, look_up, of_shapes
from nbdebug.tools.errors.shapes.facts import FailedLayer, ShapeFacts, ShapeFix, ShapeOperand, ShapeStep, ViewDownstream
from nbdebug.tools.errors.shapes.fixes import KEPT, cures, shifted
from nbdebug.tools.errors.shapes.history import batch_changed, path_of
from nbdebug.tools.errors.shapes.layer_fixes import behind, flattened, uneven
from nbdebug.tools.errors.shapes.messages import ParsedMessage, read
from nbdebug.tools.errors.values import UNKNOWN, statement

RAISES = (
    "RuntimeError",
    "ValueError",
    "IndexError",
    "AssertionError",
    "TypeError",
    "NotImplementedError",
    "AxisError",
    "TorchRuntimeError",
    "DimensionMismatchError",
)
TELLS = ("features", "small", "rank", "loss", "count")
"""Kinds for which the way of the shape through the layers is told."""


def look(scene: ErrorContext) -> ShapeFacts | None:
    """The facts of a shape that does not fit, or None where the exception speaks of something else."""
    said = read(scene.message) if scene.type in RAISES else None
    if said is None or _elsewhere(scene) or _raised_by_user(scene):
        return None
    names = OperandNames(scene)
    call = failing(scene, said.kind, names)
    if said.kind in OWN and not OWN[said.kind](call):
        return None
    if not call.parts and call.node is None:
        call.parts = of_shapes(scene, (said.a, said.b))
    entered = came.entered(call)
    if call.layer is None and said.kind == "product" and (hidden := layer_of(scene, said.b)) is not None:
        entered = next((part.operand() for part in call.parts if part.shape is not None), None)
        call.layer, call.op, call.parts = hidden, type(hidden).__name__, [CallPart("", "input", None)]
    said = measured(call, said)
    layer = _layer(call, names)
    at_fault = call.parts[said.which or 0 if said.kind == "features" else 0] if call.parts else None
    passed = came.passed(scene, call, at_fault, names) if said.kind in TELLS else ()
    cut, folded = (shifted(call), _folded(call, said, names)) if said.kind == "loss" else (None, None)
    after = behind(call, said, names)
    found = _cures(scene, call, said, layer, after, passed)
    if said.kind == "loss" and cut is None and folded is None:
        passed = passed[-1:]  # how its axes came about: what made them last
    raised, target = _raised(scene, call, layer), said.b if said.kind == "mask" else said.a
    return ShapeFacts(
        raised,
        said.kind,
        call.op,
        operands(call, said),
        layer,
        said.axis,
        said.wanted,
        said.got,
        said.which,
        tuple(call.numbers),
        target,
        entered,
        came.lines(scene, at_fault),
        passed,
        folded,
        cut[0] if cut else None,
        after,
        uneven(call) if said.kind == "count" else None,
        found,
    )


def _cures(
    scene: ErrorContext,
    call: FailedCall,
    said: ParsedMessage,
    layer: FailedLayer | None,
    after: ViewDownstream | None,
    passed: tuple[ShapeStep, ...],
) -> tuple[ShapeFix, ...]:
    """What was tried, likeliest first: another view of an operand, then another layer."""
    if layer is not None and type(call.layer) is nn.MultiheadAttention and said.kind == "features":
        return tuple(attention.attention_fixes(call, layer.path))
    found = cures(call, said)
    if after is not None:
        return (*flattened(call, said, after.path), *found)[:KEPT]
    if layer is not None and (said.kind == "small" or said.kind == "features" and not found):
        return (*found, *layers.cures(scene, call, said, passed, layer.path))[: KEPT + 1]
    if layer is not None and said.kind in ("hidden", "rank"):
        return (*found, *layers.others(call, said, layer.path))[:KEPT]
    return found


def _layer(call: FailedCall, names: OperandNames) -> FailedLayer | None:
    if call.layer is None:
        return None
    return FailedLayer(path_of(call.layer, names), type(call.layer).__name__, came.sizes(call.layer))


def _raised(scene: ErrorContext, call: FailedCall, layer: FailedLayer | None) -> Raised:
    """The exception, with the module by the name that the title says."""
    raised = scene.raised()
    where = raised.where
    if layer is not None:
        where = dataclasses.replace(where, module=layer.path, module_type=layer.kind)
    elif (where.module_type or "").endswith("Loss"):  # what ran there is no part of a model
        where = dataclasses.replace(where, module=None, module_type=None)
    return dataclasses.replace(raised, where=where)


def _folded(call: FailedCall, said: ParsedMessage, names: OperandNames) -> ShapeStep | None:
    """Where the rows of the predictions left the batch, as `view(-1, 400)` does with pictures of another size."""
    scores = next((part.value for part in call.parts if part.role == "input"), None)
    return batch_changed(scores, said.got, names) if said.got is not None else None


def _raised_by_user(scene: ErrorContext) -> bool:
    """Whether it is an exception of the user's own, whatever its words."""
    frame = scene.trail[-1] if scene.trail else None
    line = statement(frame) if frame is not None and frame.users else None
    return isinstance(line, ast.Raise) or isinstance(line, ast.Assert) and scene.type == "AssertionError"


def _elsewhere(scene: ErrorContext) -> bool:
    """In collate a sample is at fault, in an optimizer its state: those are told by others."""
    return any(
        part in frame.site.file.replace("\\", "/")
        for frame in scene.trail
        for part in ("torch/utils/data/_utils/collate.py", "torch/optim/")
    )


def operands(call: FailedCall, said: ParsedMessage) -> tuple[ShapeOperand, ...]:
    """The operands as plain facts; of those that are not at hand the shape that the message gives."""
    own = [part for part in call.parts if part.text or not part.role.startswith("hx")]  # a state that torch has made
    found = [part.operand() for part in own]
    unknown = [i for i, part in enumerate(found) if part.shape is None]
    told = [shape for shape in (said.a, said.b) if shape is not None]
    if call.layer is not None and unknown and said.a is not None:  # what went into the layer of a compiled model
        found[0] = dataclasses.replace(found[0], shape=said.a)
    elif len(found) == len(told) and said.kind in ("product", "broadcast", "loss", "join"):
        for i in unknown:
            found[i] = dataclasses.replace(found[i], shape=told[i])
    return tuple(found)


def measured(call: FailedCall, said: ParsedMessage) -> ParsedMessage:
    """What the message leaves out, from the operands themselves."""
    shapes = [part.shape for part in call.parts]
    if type(call.layer) is nn.MultiheadAttention and said.kind in ("product", "count", "broadcast"):
        return attention.measured(call, said) or dataclasses.replace(said, kind="attention")
    if call.layer is not None and said.kind == "product":  # a Linear: its message speaks of matrices
        said = dataclasses.replace(said, kind="features")
    if said.kind == "product" and len(shapes) == 2 and said.got is None:
        return _inner(said, shapes)
    shape = shapes[0] or said.a if shapes else None
    if said.kind == "features" and shape:
        return _channel(call, said, shape)
    return said


def _inner(said: ParsedMessage, shapes: list[Any]) -> ParsedMessage:
    """Which sizes of two factors differ: those summed over, or those of the batch."""
    a, b = shapes
    if not a or not b:
        return said
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        return dataclasses.replace(said, got=a[-1], wanted=b[-2 if len(b) > 1 else -1])
    return dataclasses.replace(said, kind="broadcast", got=a[0], wanted=b[0], axis=0)


MADE_FOR = (
    "in_features",
    "in_channels",
    "num_features",
    "normalized_shape",
    "num_channels",
    "input_size",
    "embed_dim",
    "d_model",
    "num_parameters",
)
LAST = (
    "Linear",
    "LayerNorm",
    "RMSNorm",
    "RNN",
    "LSTM",
    "GRU",
    "RNNCell",
    "LSTMCell",
    "GRUCell",
    "MultiheadAttention",
    "Bilinear",
    "linear",
    "layer_norm",
    "rms_norm",
)


def _channel(call: FailedCall, said: ParsedMessage, shape: tuple[int, ...]) -> ParsedMessage:
    """Which axis of the input a layer looks at, and what it was made for."""
    weight = {"Conv1d": 2, "Conv2d": 3, "Conv3d": 4, "ConvTranspose1d": 2, "ConvTranspose2d": 3, "ConvTranspose3d": 4}
    axis = len(shape) - 1 if call.op in LAST else 0 if len(shape) == weight.get(call.op) else min(1, len(shape) - 1)
    told = came.sizes(call.layer) if call.layer is not None else {}
    made = next((told[name] for name in MADE_FOR if name in told), None)
    wanted = said.wanted if said.wanted is not None else made if type(made) is int else (said.b or (None,))[-1]
    if call.layer is not None and type(made) is int and "Linear" in call.op:
        wanted = made
    return dataclasses.replace(said, axis=axis, wanted=wanted, got=shape[axis])


def _of_tensors(call: FailedCall) -> bool:
    """Whether what was unpacked, indexed or asked is a tensor's or its shape: other tuples are none of ours."""
    if any(part.shape is not None for part in call.parts):
        return True
    node = call.node
    if call.frame is not None and isinstance(node, (ast.Tuple, ast.List)):
        around = statement(call.frame)
        node = around.value if isinstance(around, ast.Assign) else None
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Attribute) and part.attr in ("shape", "size") and call.frame is not None:
            value = look_up(part.value, call.frame)
            if value is not UNKNOWN and CallPart("", "", value).shape is not None:
                return True
    return False


OWN = dict.fromkeys(("unpack", "truth", "scalar"), _of_tensors)
"""Kinds whose message Python words the same for things that are no tensors."""
