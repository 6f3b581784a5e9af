"""Which argument of a layer's constructor says a size of its weights: torch's own layers, by the layout of each."""

from __future__ import annotations

from torch import nn

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
"""(class, {parameter: the argument behind each axis}), in the order in which they are asked."""
GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


def size_of(kind: type, parameter: str, saved: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[str, int, int] | None:
    """(argument, its value for the saved shape, for the model's) of the first axis that differs, or None."""
    axis = next((i for i, (a, b) in enumerate(zip(saved, wanted)) if a != b), None)
    if axis is None:
        return None
    if issubclass(kind, (nn.RNNBase, nn.RNNCellBase)):
        return _recurrent(kind.__name__, parameter, axis, saved, wanted)
    for kinds, parameters in LAYOUTS:
        if issubclass(kind, kinds) and axis < len(parameters.get(parameter, ())):
            argument = parameters[parameter][axis]
            parts = 3 if argument.startswith("3 x ") else 1
            return argument.removeprefix("3 x "), saved[axis] // parts, wanted[axis] // parts
    return None


def _recurrent(
    kind: str, parameter: str, axis: int, saved: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[str, int, int]:
    gates = GATES.get(kind, 1)
    if axis == 0:
        return "hidden_size", saved[0] // gates, wanted[0] // gates
    return "input_size" if parameter.startswith("weight_ih") else "hidden_size", saved[axis], wanted[axis]
