"""What the garbage collector says of tensors that no name leads to: who refers to them, and who to those.

It goes over all objects for each question, so it is asked for all tensors at once, and for the largest alone.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 16
"""Tensors that are asked about."""
LEVELS = 4
"""From a tensor outwards: a list, the dict that holds the list, the object that holds the dict."""
NOBODY = "no Python object (a library holds it)"
_ANONYMOUS = (list, tuple, dict, set, frozenset, types.CellType)


def holders(tensors: Sequence[Any], ours: Iterable[Any]) -> list[str]:
    """For each tensor, who holds it: "a list, in a dict, in a Recorder". ours: what this look itself holds."""
    tensors = tensors[:MOST]
    skip = {id(tensors), *(id(thing) for thing in ours)}
    chains: list[dict[int, str]] = [{} for _ in tensors]
    at: list[Any] = list(tensors)
    for _ in range(LEVELS):
        asked = {id(thing): thing for thing in at if thing is not None}
        if not asked:
            break
        above = _above(asked, skip | {id(at), id(asked)})
        at = [_step(thing, chain, above) for thing, chain in zip(at, chains)]
    return [", in ".join(chain.values()) if chain else NOBODY for chain in chains]


def _step(thing: Any, chain: dict[int, str], above: dict[int, Any]) -> Any:
    """Add who holds this one to the chain; give it back if it has no name of its own, so that one must ask on."""
    holder = above.get(id(thing)) if thing is not None else None
    if holder is None:
        return None
    if id(holder) in chain:
        chain[0] = "itself (`gc.collect()` lets go of it)"
        return None
    chain[id(holder)] = _said(holder)
    return holder if type(holder) in _ANONYMOUS else None


def _above(asked: dict[int, Any], skip: set[int]) -> dict[int, Any]:
    """One that refers to each; where there are several, one that says more than a list does."""
    found: dict[int, Any] = {}
    referrers = gc.get_referrers(*asked.values())
    for referrer in referrers:
        if id(referrer) in skip or referrer is referrers or _is_ours(referrer):
            continue
        for key in {id(inside) for inside in gc.get_referents(referrer)} & asked.keys():
            if key not in found or type(found[key]) in _ANONYMOUS and type(referrer) not in _ANONYMOUS:
                found[key] = referrer
    return found


def _is_ours(thing: Any) -> bool:
    return type(thing) is types.FrameType and str(thing.f_globals.get("__name__", "")).startswith("nbdebug.")


def _said(thing: Any) -> str:
    kind = type(thing)
    if kind is types.FunctionType:
        return f"the function {thing.__qualname__}"
    if kind is types.FrameType:
        return f"the call of {thing.f_code.co_name} that runs"
    if kind is types.ModuleType:
        return f"the module {vars(thing).get('__name__', '')}"
    if kind is types.CellType:
        return "the closure of a function"
    if issubclass(kind, type):
        return f"the class {type.__getattribute__(thing, '__qualname__')}"
    if kind is dict and type(thing.get("__name__")) is str and "__builtins__" in thing:
        return f"the module {thing['__name__']}"
    if kind in _ANONYMOUS:
        return f"a {kind.__name__}" + (f" of {len(thing):,}" if len(thing) > 1 else "")
    return f"an object of {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
