"""Parameters that nobody was told of: modules in a plain list, tensors that are no `nn.Parameter`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.looks.autograd.held import is_module, modules
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.observe.named import MODULES_OWN, attributes

MOST = 8


def untracked(scene: Scene) -> Iterator[tuple[str, str]]:
    """(name, what it is) of a module's attributes that `parameters()` does not give."""
    told = 0
    for model_name, model in scene.owners.models.items():
        for part in modules(model):
            path = scene.owners.paths.get(id(part)) or model_name
            for name, thing in attributes(part).items():
                what = None if name in MODULES_OWN else _kind(thing)
                if what is not None and told < MOST:
                    told += 1
                    yield f"{path}.{name}", what


def _kind(thing: Any) -> str | None:
    inside = list(thing.values()) if type(thing) is dict else thing
    if type(thing) in (list, tuple, dict) and inside and all(is_module(one) for one in inside):
        return f"a plain {type(thing).__name__} of {len(inside)} modules"
    if is_tensor(thing) and thing.requires_grad and thing.is_leaf:
        return "a tensor, no nn.Parameter"
    return None
