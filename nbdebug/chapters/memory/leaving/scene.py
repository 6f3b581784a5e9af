"""What was held when an allocation failed, by the names in the frames of its traceback.

The order of owners is that of `facts.KINDS`: a weight that a frame's variable shows as well is told as a weight. What
the frames themselves hold comes under the name of the variable and its function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.chapters.memory.facts import Holding
from nbdebug.chapters.memory.leaving.reach import Block, Walk
from nbdebug.finding import Where
from nbdebug.observe.frames import Frame, Owners
from nbdebug.observe.named import MODULES_OWN, attributes, own
from nbdebug.observe.shell import Kept


@dataclasses.dataclass
class Scene:
    """Who holds what. activations: the blocks that the frames and the graph hold."""

    holdings: list[Holding]
    activations: list[Block]


def held(names: Mapping[str, Any], trail: list[Frame], owners: Owners, kept: Kept, device: str) -> Scene:
    """All of it on this device, each storage at its first owner, largest first."""
    stop = [t for t in [names, *kept.spaces, kept.outputs, kept.shell] if t is not None]
    walk = Walk(graphs=False, tracebacks=False, stop=stop)
    parts = [*_weights(owners, walk)]
    parts += [
        ("variable", name, walk(value), Where())
        for name, value in own(names).items()
        if id(value) not in owners.modules
    ]
    local = list(_locals(trail, owners, walk))
    saved = Walk(after=walk, stop=stop)
    graph = [("graph", "saved for backward", saved(*walk.nodes), Where())]
    outputs = [("cell output", name, walk(value), Where()) for name, value, _ in kept.shown()]
    holdings = [
        h for part in _together([*parts, *local, *graph, *outputs]) if (h := _holding(*part, device)) is not None
    ]
    active = [b for _, _, blocks, _ in [*local, *graph] for b in blocks if b.on(device)]
    return Scene(sorted(holdings, key=lambda h: -h.bytes), active)


def _weights(owners: Owners, walk: Walk) -> Iterator[tuple[str, str, list[Block], Where]]:
    for name, model in owners.models.items():
        weights = list(model.parameters())
        grads = [p.grad for p in weights if p.grad is not None]
        yield "parameter", f"{name}'s parameters", walk.take(weights), Where()
        yield "gradient", f"{name}'s gradients", walk.take(grads), Where()
        yield "buffer", f"{name}'s buffers", walk.take(model.buffers()), Where()
        for path, part in model.named_modules(prefix=name):
            for key, value in attributes(part).items():
                if key not in MODULES_OWN:
                    yield "variable", f"{path}.{key}", walk(value), Where()
    for name, optimizer in owners.optimizers.items():
        yield "optimizer state", f"{name}'s state", walk(optimizer.state), Where()


def _locals(trail: list[Frame], owners: Owners, walk: Walk) -> Iterator[tuple[str, str, list[Block], Where]]:
    """The variables of each frame, the user's frames first; of an object that the method belongs to, its attributes."""
    lines: list[Where] = []
    for frame in trail:  # a frame of torch's is told at the line of the user's that led there
        lines.append(frame.where if frame.users or not lines else lines[-1])
    for frame, where in sorted(zip(trail, lines), key=lambda pair: not pair[0].users):
        path = owners.paths.get(id(frame.module))
        inside = f"{path}.{frame.site.function}" if path else frame.site.function
        for name, value in frame.names.items():
            if name != "self":
                known = frame.users or path
                yield "variable", f"{name} in {inside}" if known else "operands of this line", walk(value), where
            elif frame.module is None:
                for key, part in attributes(value).items():
                    yield "variable", f"self.{key}", walk(part), where


def _together(parts: list[tuple[str, str, list[Block], Where]]) -> list[tuple[str, str, list[Block], Where]]:
    """Those of one name at one line as one."""
    found: dict[tuple[str, str, Where], list[Block]] = {}
    for kind, name, blocks, where in parts:
        found.setdefault((kind, name, where), []).extend(blocks)
    return [(kind, name, blocks, where) for (kind, name, where), blocks in found.items()]


def _holding(kind: str, name: str, blocks: list[Block], where: Where, device: str) -> Holding | None:
    mine = [block for block in blocks if block.on(device)]
    if not mine:
        return None
    largest = max(mine, key=lambda b: b.bytes)
    return Holding(
        kind, name, sum(b.bytes for b in mine), len(mine), largest.device, largest.dtype, largest.shape, where=where
    )
