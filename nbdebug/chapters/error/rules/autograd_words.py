"""Words that the rules on autograd share."""

from __future__ import annotations

import dataclasses
import re

from nbdebug.chapters.error.facts import Raised, TensorFact
from nbdebug.chapters.error.facts_autograd import NoGradFacts
from nbdebug.finding import Where

NOTES = "https://pytorch.org/docs/stable/notes/autograd.html"
NODES = {
    "Addmm": "a Linear",
    "Convolution": "a convolution",
    "CudnnConvolution": "a convolution",
    "NativeBatchNorm": "batch norm",
    "CudnnBatchNorm": "batch norm",
    "NativeLayerNorm": "layer norm",
    "MkldnnRnnLayer": "the recurrent layer",
    "CopySlices": "an item assignment",
    "Mm": "a matrix product",
    "Bmm": "a matrix product",
    "T": "a transpose",
    "Mul": "a product",
    "Div": "a division",
    "Pow": "a power",
}


def at(known: Where, raised: Raised) -> Where:
    """The line of the cause, else the line that failed; the phase is that of the failure."""
    place = known if known.line is not None else raised.where
    return dataclasses.replace(place, phase=raised.where.phase, module=place.module or raised.where.module)


def line(where: Where) -> str:
    """` (train.py, line 3)`, or nothing."""
    return f" ({where.place})" if where.place else ""


def op(name: str) -> str:
    """An op by the name of its node: "NativeBatchNorm" → "batch norm", "Relu" → "`relu`"."""
    small = "".join("_" + c.lower() if c.isupper() else c for c in name).strip("_")
    return NODES.get(name, f"`{small}`")


def shaped(tensor: TensorFact | None) -> dict[str, object]:
    if tensor is None:
        return {}
    return {tensor.name: str(tensor), "requires_grad": tensor.requires_grad, "grad_fn": tensor.made_by or "none"}


def wants(facts: NoGradFacts) -> list[str]:
    """The user's variables that still have a gradient, without parameters."""
    return [t.name for t in facts.raised.tensors if t.requires_grad and t.made_by]


def indexed(path: str) -> str:
    """A module's path as code: "model.0.fc" → "model[0].fc"."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def ticked(names: tuple[str, ...] | list[str], most: int = 3) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
