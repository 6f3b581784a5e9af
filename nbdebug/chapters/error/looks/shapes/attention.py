"""nn.MultiheadAttention: which of query, key and value has other features than the layer was made for, and the layer
made for them (`kdim` and `vdim` let keys and values differ from the queries)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.error.facts_shapes import Cure
from nbdebug.chapters.error.looks.shapes.bench import quiet
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.trials import shape_of
from nbdebug.observe.named import attributes

SIZES = {"query": "embed_dim", "key": "kdim", "value": "vdim"}


def measured(call: Call, said: Said) -> Said | None:
    """The first of the three whose features the layer does not take; None where they all fit."""
    told: Any = attributes(call.layer)
    for i, part in enumerate(call.parts):
        wanted = told.get(SIZES.get(part.role, ""))
        if type(wanted) is int and part.shape and part.shape[-1] != wanted:
            return dataclasses.replace(
                said, kind="features", axis=len(part.shape) - 1, wanted=wanted, got=part.shape[-1], which=i
            )
    return None


def cures(call: Call, path: str) -> Iterator[Cure]:
    """The layer made for the features that it is given, where its heads can share them; run on zeros."""
    parts = {part.role: part for part in call.parts if part.role in SIZES and part.shape is not None}
    if set(parts) != set(SIZES):
        return
    told: Any = attributes(call.layer)
    sizes = {role: part.shape[-1] for role, part in parts.items() if part.shape}
    given = [str(sizes["query"]), str(told["num_heads"])]
    given += [f"{SIZES[role]}={sizes[role]}" for role in ("key", "value") if sizes[role] != sizes["query"]]
    given += ["batch_first=True"] if told.get("batch_first") else []
    code = f"nn.MultiheadAttention({', '.join(given)})"
    with quiet():
        try:
            made = eval(code, {"nn": nn})  # a text of ours, of numbers of the layer's
            found = shape_of(made(*(_zeros(parts[role]) for role in SIZES)))
        except Exception:  # heads that do not divide, batches that differ: no cure
            return
    yield Cure("layer", path, code, True, found)


def _zeros(part: Part) -> Any:
    return torch.zeros(
        [min(size, 64) if i < len(part.shape or ()) - 1 else size for i, size in enumerate(part.shape or ())]
    )
