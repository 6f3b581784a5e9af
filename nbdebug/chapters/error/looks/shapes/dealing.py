"""Elements dealt out to other sizes, `x.view(n, 400)`: the size that is left to torch, and whether what comes next can
take what it then gets: a view that runs and a layer that does not is no cure."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from nbdebug.chapters.error.asked import Names
from nbdebug.chapters.error.facts_shapes import Behind, Cure, Shape
from nbdebug.chapters.error.looks.shapes.call import Call, Part
from nbdebug.chapters.error.looks.shapes.expressions import look_up
from nbdebug.chapters.error.looks.shapes.graph import path_of
from nbdebug.chapters.error.looks.shapes.layers import anew
from nbdebug.chapters.error.looks.shapes.said import Said
from nbdebug.chapters.error.looks.shapes.sources import taken_by
from nbdebug.chapters.error.looks.shapes.through import through
from nbdebug.chapters.error.looks.shapes.trials import Trials, named
from nbdebug.chapters.error.operands import value_of
from nbdebug.observe.named import attributes


def count(call: Call, said: Said, trials: Trials) -> Iterator[Cure | None]:
    """One of the sizes left to torch (-1); for a flattening view, flatten itself."""
    part, sizes = call.parts[0], said.a
    if call.op not in ("view", "reshape") or call.inner is not None or sizes is None or part.shape is None:
        return
    if uneven(call) is not None or behind(call, said) is not None:
        return
    name = named(part)
    texts = [t for t, _ in call.numbers] if len(call.numbers) == len(sizes) else [str(size) for size in sizes]
    if -1 not in sizes:
        for i in range(len(sizes)):
            new = [*sizes[:i], -1, *sizes[i + 1 :]]
            yield _as(part, "count", new, f"{name}.{call.op}({', '.join([*texts[:i], '-1', *texts[i + 1 :]])})")
    elif len(sizes) == 2 and len(part.shape) > 2:
        yield Cure("flatten", part.text, f"{name}.flatten(1)", True, (part.shape[0], math.prod(part.shape[1:])))


def _as(part: Part, slug: str, sizes: list[int], code: str) -> Cure | None:
    """Whether the elements can be dealt out so."""
    fixed, left = math.prod(size for size in sizes if size > 0), math.prod(part.shape or ())
    if left % fixed or left == 0:
        return None
    return Cure(slug, part.text, code, True, tuple(left // fixed if size == -1 else size for size in sizes))


def behind(call: Call, said: Said, names: Names | None = None) -> Behind | None:
    """The layer that comes next, where it could not take the rows that there are."""
    layer, shape = _next(call, said), call.parts[0].shape if call.parts else None
    if layer is None or not shape:
        return None
    wants, gets = attributes(layer)["in_features"], math.prod(shape[1:])
    return Behind(path_of(layer, names) if names is not None else "", wants, gets) if wants != gets else None


def _next(call: Call, said: Said) -> Any:
    """The Linear that is given what a flattening gives."""
    if said.kind != "count" or call.op not in ("view", "reshape") or call.frame is None or len(said.a or ()) != 2:
        return None
    then = taken_by(call.node, call.frame)
    module: Any = value_of(then.func, call.frame) if then is not None else None
    while type(module) is nn.Sequential:
        module = next(iter((attributes(module).get("_modules") or {}).values()), None)
    return module if type(module) is nn.Linear else None


def flattened(call: Call, said: Said, path: str) -> Iterator[Cure]:
    """What fits the layer behind as well: pictures pooled to the square that it was made for; the layer made anew."""
    layer, part = _next(call, said), call.parts[0]
    shape: Shape = part.shape or ()
    told = attributes(layer)
    side = math.isqrt(told["in_features"] // shape[1]) if len(shape) == 4 and shape[1] else 0
    if side and shape[1] * side * side == told["in_features"]:
        pooled = through(nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten(), layer), shape)
        code = f"F.adaptive_avg_pool2d({part.text}, {side}).flatten(1)"
        yield Cure("pooled", path, code, pooled is not None, pooled)
    gets = math.prod(shape[1:])
    made = anew(layer, gets)
    if made is not None:
        code = f"{named(part)}.flatten(1)\n{made[1]}   # {path}"
        yield Cure("behind", path, code, True, through(made[0], (shape[0], gets)))


def uneven(call: Call) -> tuple[str, int, int] | None:
    """(text of the divisor, what is divided, by what) of a size `12 // heads` that leaves a rest."""
    for node in ast.walk(call.node) if call.node is not None and call.frame is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and call.frame is not None:
            whole, by = look_up(node.left, call.frame), look_up(node.right, call.frame)
            if type(whole) is int and type(by) is int and by > 0 and whole % by:
                return ast.unparse(node.right), whole, by
    return None
