"""A saved state that does not match: torch's frame has both the state and the model or optimizer."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from nbdebug.observe.state_keys import Rename, Shapes, rename
from nbdebug.observe.variables import attributes, registered
from nbdebug.tools.errors.context import ErrorContext, expression, shape_of
from nbdebug.tools.errors.rules.files import OptimizerMismatch, Resized, StateMismatch

_CONV, _TURNED = (
    ("out_channels", "in_channels", "kernel_size", "kernel_size", "kernel_size"),
    ("in_channels", "out_channels", "kernel_size", "kernel_size", "kernel_size"),
)
LAYOUTS: tuple[tuple[type | tuple[type, ...], dict[str, tuple[str, ...]]], ...] = (
    (nn.Linear, {"weight": ("out_features", "in_features"), "bias": ("out_features",)}),
    (nn.Bilinear, {"weight": ("out_features", "in1_features", "in2_features"), "bias": ("out_features",)}),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), {"weight": _TURNED, "bias": ("out_channels",)}),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), {"weight": _CONV, "bias": ("out_channels",)}),
    ((nn.Embedding, nn.EmbeddingBag), {"weight": ("num_embeddings", "embedding_dim")}),
    (
        nn.modules.batchnorm._NormBase,
        dict.fromkeys(("weight", "bias", "running_mean", "running_var"), ("num_features",)),
    ),
    (nn.GroupNorm, dict.fromkeys(("weight", "bias"), ("num_channels",))),
    (nn.LayerNorm, dict.fromkeys(("weight", "bias"), ("normalized_shape",) * 4)),
    (nn.MultiheadAttention, {"in_proj_weight": ("3 x embed_dim", "embed_dim"), "in_proj_bias": ("3 x embed_dim",)}),
    (nn.PReLU, {"weight": ("num_parameters",)}),
)
"""(class, {parameter: the argument for each axis}), in the order in which they are tried."""
GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


def size_of(
    kind: type, parameter: str, saved: tuple[int, ...], expected: tuple[int, ...]
) -> tuple[str, int, int] | None:
    """(argument, its value for the saved shape, for the model's) of the first axis that differs, or None."""
    axis = next((i for i, (a, b) in enumerate(zip(saved, expected)) if a != b), None)
    if axis is None:
        return None
    if issubclass(kind, (nn.RNNBase, nn.RNNCellBase)):
        return _recurrent(kind.__name__, parameter, axis, saved, expected)
    for kinds, parameters in LAYOUTS:
        if issubclass(kind, kinds) and axis < len(parameters.get(parameter, ())):
            argument = parameters[parameter][axis]
            parts = 3 if argument.startswith("3 x ") else 1
            return argument.removeprefix("3 x "), saved[axis] // parts, expected[axis] // parts
    return None


def _recurrent(
    kind: str, parameter: str, axis: int, saved: tuple[int, ...], expected: tuple[int, ...]
) -> tuple[str, int, int]:
    gates = GATES.get(kind, 1)
    if axis == 0:
        return "hidden_size", saved[0] // gates, expected[0] // gates
    return "input_size" if parameter.startswith("weight_ih") else "hidden_size", saved[axis], expected[axis]


MODEL = re.compile(r"Error\(s\) in loading state_dict for ([\w.]+)|Expected state_dict to be dict-like")
OPTIMIZER = re.compile(r"loaded state dict (has a different number of parameter groups|contains a parameter group)")
LISTED = {
    "missing": re.compile(r"Missing key\(s\) in state_dict: (.*?)\. ?(?:\n|$)"),
    "unexpected": re.compile(r"Unexpected key\(s\) in state_dict: (.*?)\. ?(?:\n|$)"),
}
SIZES = re.compile(
    r"size mismatch for (\S+): copying a param with shape (?:torch\.Size\()?\(?\[?([\d, ]*)\]?\)?\)? "
    r"from checkpoint, the shape in current model is (?:torch\.Size\()?\(?\[?([\d, ]*)\]?"
)
DICTS = 50
"""Entries of the argument that are searched for the state."""


def detect_model(context: ErrorContext) -> StateMismatch | None:
    match = MODEL.search(context.message)
    loads = (f for f in reversed(context.trail) if f.site.function == "load_state_dict")
    frame = next((f for f in loads if "self" in f.names and "state_dict" in f.names), None)
    if match is None or (frame is None and match[1] is None):
        return None
    names = frame.names if frame is not None else {}
    model, state = names.get("self"), names.get("state_dict")  # type: Any, Any
    owner, source, code = _load_arguments(context, "load_state_dict")
    kind = type(model).__name__ if model is not None else (match[1] or "the model").rpartition(".")[2]
    matches = {word: pattern.search(context.message) for word, pattern in LISTED.items()}
    listed = {word: tuple(re.findall(r'"([^"]*)"', m[1])) if m else () for word, m in matches.items()}
    facts = StateMismatch(
        context.raised(),
        owner or context.owners.paths.get(id(model)) or kind,
        kind,
        source,
        expression=code,
        strict=names.get("strict") is not False,
        resized=tuple(_resized(context.message, model)),
        missing=listed["missing"],
        unexpected=listed["unexpected"],
    )
    if issubclass(type(state), nn.Module):
        return dataclasses.replace(facts, whole_model=True)
    if match[1] is None:
        return dataclasses.replace(facts, no_dict=type(state).__name__)
    if not issubclass(type(model), nn.Module) or not issubclass(type(state), dict):
        return facts
    return _matched(facts, model, state)


def _matched(facts: StateMismatch, model: Any, state: Mapping[str, Any]) -> StateMismatch:
    """With the evidence of the keys and shapes of both sides."""
    expected = shapes_of(model)
    inside, saved = max(_states(state), key=lambda pair: _score(pair[1], expected), default=(None, {}))
    change = rename(saved, expected, 0)
    after = _after(saved, change)
    resized = facts.resized or tuple(
        _with_argument(Resized(key, shape, expected[key]), model)
        for key, shape in after.items()
        if key in expected and expected[key] != shape
    )
    return dataclasses.replace(
        facts,
        resized=resized,
        saved=len(saved),
        expected=len(expected),
        both=len(saved.keys() & expected.keys()),
        fitting=_fitting(saved, expected),
        inside=inside,
        renamed=change,
        unmatched=tuple(key for key, shape in after.items() if expected.get(key) != shape),
        lacking=tuple(key for key in expected if key not in after),
        argument=_argument(model, resized),
    )


def _after(saved: Shapes, change: Rename | None) -> dict[str, tuple[int, ...]]:
    names = dict(change.pairs) if change else {}
    return {names.get(key, key): shape for key, shape in saved.items()}


def _fitting(saved: Shapes, model: Shapes) -> int:
    """Saved keys that the model has with the same shape."""
    return sum(model.get(key) == shape for key, shape in saved.items())


def _score(saved: Shapes, expected: Shapes) -> tuple[int, int]:
    return _fitting(_after(saved, rename(saved, expected, 0)), expected), len(saved)


def _states(state: Mapping[str, Any]) -> Iterator[tuple[str | None, dict[str, tuple[int, ...]]]]:
    """The candidates for the state: the argument, and the dicts of tensors in it."""
    entries: list[tuple[str, Any]] = [(key, value) for key, value in _items(state) if type(key) is str]
    yield None, {key: shape for key, value in entries if (shape := shape_of(value)) is not None}
    for key, value in entries[:DICTS]:
        if issubclass(type(value), nn.Module):
            yield f"[{key!r}].state_dict()", shapes_of(value)
        if issubclass(type(value), dict):
            inner = [(k, v) for k, v in _items(value) if type(k) is str]
            yield f"[{key!r}]", {k: shape for k, v in inner if (shape := shape_of(v)) is not None}
            for k, v in inner[:DICTS]:
                if issubclass(type(v), dict):
                    yield (
                        f"[{key!r}][{k!r}]",
                        {n: shape for n, t in _items(v) if type(n) is str and (shape := shape_of(t)) is not None},
                    )


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    """The entries of a dict, without the methods of a subclass."""
    return list(dict.items(mapping))


def shapes_of(model: Any, before: str = "", depth: int = 0) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of a module's state, without its `state_dict`, which may be the user's own."""
    fields = attributes(model)
    unsaved = fields.get("_non_persistent_buffers_set") or set()
    shapes = {}
    for table in ("_parameters", "_buffers"):
        for name, value in (fields.get(table) or {}).items():
            if name not in unsaved and (shape := shape_of(value)) is not None:
                shapes[before + name] = shape
    for name, part in (fields.get("_modules") or {}).items():
        if part is not None and depth < 60:
            shapes |= shapes_of(part, f"{before}{name}.", depth + 1)
    return shapes


def _resized(message: str, model: Any) -> Iterator[Resized]:
    for key, saved, expected in SIZES.findall(message):
        first, second = (tuple(int(side) for side in re.findall(r"\d+", text)) for text in (saved, expected))
        yield _with_argument(Resized(key, first, second), model)


def _with_argument(resized: Resized, model: Any) -> Resized:
    """With the layer's class, and the argument for the size that differs."""
    path, _, name = resized.key.rpartition(".")
    layer = model
    for part in path.split(".") if path else ():
        layer = registered(layer, "_modules").get(part) if layer is not None else None
    if layer is None or len(resized.saved) != len(resized.model):
        return resized
    argument_sizes = size_of(type(layer), name, resized.saved, resized.model)
    sizes = next(((None, a, b) for a, b in zip(resized.saved, resized.model) if a != b), (None, None, None))
    argument, saved, expected = argument_sizes or sizes
    return Resized(resized.key, resized.saved, resized.model, type(layer).__name__, argument, saved, expected)


def _argument(model: Any, resized: tuple[Resized, ...]) -> tuple[str, int] | None:
    """The one argument of the model's own constructor whose default, or attribute, is the size that differs."""
    sizes = {(r.saved_size, r.model_size) for r in resized if r.saved_size is not None}
    if len(sizes) != 1 or any(r.transposed for r in resized):
        return None
    saved, expected = sizes.pop()
    init = next((vars(kind)["__init__"] for kind in type(model).__mro__ if "__init__" in vars(kind)), None)
    if not inspect.isfunction(init) or saved is None:
        return None
    fields = attributes(model)
    values = {name: (p.default, fields.get(name)) for name, p in inspect.signature(init).parameters.items()}
    names = [n for n, pair in values.items() if n != "self" and any(type(v) is int and v == expected for v in pair)]
    return (names[0], saved) if len(names) == 1 else None


# -- optimizers ---------------------------------------------------------------------------------------------------


def detect_optimizer(context: ErrorContext) -> OptimizerMismatch | None:
    loads = (f for f in reversed(context.trail) if f.site.function == "load_state_dict" and "optim" in f.site.file)
    frame = next((f for f in loads if "self" in f.names), None)
    lost = context.type == "KeyError" and "param_groups" in context.message
    if frame is None or not (lost or OPTIMIZER.search(context.message)):
        return None
    optimizer, state = frame.names["self"], frame.names.get("state_dict")  # type: Any, Any
    owner, source, code = _load_arguments(context, "load_state_dict")
    expected = tuple(_sizes(attributes(optimizer).get("param_groups")))
    entries = dict(_items(state)) if issubclass(type(state), dict) else {}
    inside = next(
        (f"[{k!r}]" for k, v in entries.items() if type(k) is str and type(v) is dict and "param_groups" in v), None
    )
    saved = tuple(_sizes(entries["param_groups"])) if "param_groups" in entries else None
    keys = tuple(key for key in entries if type(key) is str)[:8]
    return OptimizerMismatch(
        context.raised(), owner or "optimizer", type(optimizer).__name__, source, saved, expected, inside, keys, code
    )


def _sizes(groups: Any) -> Iterator[int]:
    for group in groups if type(groups) is list else ():
        parameters = group.get("params") if type(group) is dict else None
        yield len(parameters) if type(parameters) is list else 0


# -- the user's line -----------------------------------------------------------------------------------------------


def _load_arguments(context: ErrorContext, method: str) -> tuple[str | None, str, str | None]:
    """(the receiver of the method, a name for its first argument, the argument itself where that is not a name), as the
    user wrote them."""
    for frame in context.users:
        node = expression(frame)
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == method:
                named = next((k.value for k in part.keywords if k.arg == "state_dict"), None)
                first = part.args[0] if part.args else named
                text = ast.unparse(first) if first is not None else ""
                plain = isinstance(first, (ast.Name, ast.Attribute, ast.Subscript)) and len(text) <= 60
                receiver = part.func.value
                owner = ast.unparse(receiver)
                bare = isinstance(receiver, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
                return owner if bare else f"({owner})", text if plain else "state", None if plain else text or None
    return None, "state", None
