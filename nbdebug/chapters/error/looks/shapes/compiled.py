"""A compiled model: its frames are known from text alone, so the layer that failed is found by the sizes that the
message gives."""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

from torch import nn

from nbdebug.chapters.error.scene import Scene
from nbdebug.observe.frames import Frame, parts_of


def layer_of(scene: Scene, weight: tuple[int, ...] | None) -> Any:
    """The one Linear of the user's models whose weight, transposed, has this shape; None where several have it."""
    if scene.carried is None or weight is None or len(weight) != 2:
        return None
    found = {
        id(part): part
        for model in scene.owners.models.values()
        for _, part in parts_of(model)
        if type(part) is nn.Linear and (part.in_features, part.out_features) == weight
    }
    return next(iter(found.values())) if len(found) == 1 else None


def revived(scene: Scene, frame: Frame) -> Frame:
    """A frame that is known from text alone, as a compiled model's, with its `self` where one module of the user's has
    this method."""
    if frame.names or frame.site.function in ("<module>", "<lambda>"):
        return frame
    found = {
        id(part): part
        for model in scene.owners.models.values()
        for _, part in parts_of(model)
        for kind in type(part).__mro__
        if _written_at(vars(kind).get(frame.site.function), frame)
    }
    if len(found) != 1:
        return frame
    mine = next(iter(found.values()))
    return dataclasses.replace(frame, names={"self": mine}, module=mine)


def _written_at(method: Any, frame: Frame) -> bool:
    code = method.__code__ if type(method) is FunctionType else None
    lines = [line for *_, line in code.co_lines() if line is not None] if code is not None else []
    return code is not None and code.co_filename == frame.site.file and frame.site.line in lines
