"""Cures of an index that is out of range, tried on the failing op: a larger table, classes from 0, a label left out."""

from __future__ import annotations

import torch

from nbdebug.chapters.error.facts_indices import Beyond
from nbdebug.chapters.error.facts_parts import Cure
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.trying import SMALL, rerun

NEAR = 1000
"""Ids so far beyond the table that a larger one is the cure; further away something else is wrong with them."""
IGNORED = -100
"""The label that torch's losses leave out unless they are told another."""


def grown(found: Beyond, table: torch.Tensor, scene: Scene) -> Cure | None:
    """The lookup with a table that has a row for the largest id."""
    rows, high = table.shape[0], found.high
    if high is None or (found.low or 0) < 0 or high >= 2 * rows + NEAR or (high + 1) * table.shape[-1] > SMALL:
        return None
    larger = torch.zeros(high + 1, *table.shape[1:], dtype=table.dtype, device=table.device)
    trial = rerun(scene, {id(table): larger})
    return Cure(str(high + 1)) if trial is None else Cure(str(high + 1), trial.worked, trial.after)


def shifted(found: Beyond, target: torch.Tensor, size: int, scene: Scene) -> Cure | None:
    """The loss with classes from 0, where they are counted from 1 to the number of classes."""
    if found.values != (size,) or (found.low or 0) < 1:
        return None
    trial = rerun(scene, {id(target): target.detach() - 1})
    return Cure("1") if trial is None else Cure("1", trial.worked, trial.after)


def ignored(found: Beyond, target: torch.Tensor, scene: Scene) -> Cure | None:
    """The loss without a label that stands apart (255, -1): left out, as `ignore_index` does."""
    if len(found.values) != 1 or not (found.value < 0 or found.value >= 255):
        return None
    code = str(found.value)
    if target.numel() > SMALL:
        return Cure(code)
    left_out = target.detach().masked_fill(target.detach() == found.value, IGNORED)
    trial = rerun(scene, {id(target): left_out})
    return Cure(code) if trial is None else Cure(code, trial.worked, trial.after)
