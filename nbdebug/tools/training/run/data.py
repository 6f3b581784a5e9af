"""Reading batches without using up anybody's random numbers.

A loader draws its order from a generator of its own, its dataset may draw from others, and both may draw from the
global ones. All that can be found are remembered, and put back after our own look.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nbdebug.observe.snapshot import random_sources as global_sources
from nbdebug.observe.tensors import tensors_in

DEPTH = 4
"""loader → sampler → dataset → transform: what draws is never deeper in the loaders that we have seen."""
MOST_BYTES = 256 << 20
MOST_SECONDS = 20.0


def remembered(*owners: Any) -> Callable[[], None]:
    """Remember the state of every generator in reach of loaders (or of a loss function); the answer puts them back."""
    found: dict[Any, tuple[Callable[[Any], Any], Any]] = {}
    for owner in owners:
        for generator in _generators(owner):
            found[id(generator)] = _state(generator)
    for name, read, write in global_sources():
        found["global", name] = (write, read())

    def put_back() -> None:
        for write, state in found.values():
            write(state)

    return put_back


def _state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):
        kept = copy.deepcopy(generator.bit_generator.state)
        return lambda state: setattr(generator.bit_generator, "state", state), kept
    return generator.set_state, generator.get_state()


def _generators(owner: Any) -> Iterator[Any]:
    """Generators among the members of an object, and of those members' own, a few steps deep."""
    todo, seen = [(owner, 0)], set()
    while todo:
        thing, depth = todo.pop()
        if id(thing) in seen or depth > DEPTH or isinstance(thing, (torch.Tensor, torch.nn.Module, str, bytes, type)):
            continue
        seen.add(id(thing))
        kind = f"{type(thing).__module__}.{type(thing).__name__}"
        if isinstance(thing, (torch.Generator, random.Random)) or (
            kind.startswith("numpy.random") and type(thing).__name__ in ("Generator", "RandomState")
        ):
            yield thing
        elif isinstance(thing, (list, tuple)):
            todo += [(member, depth + 1) for member in thing[:64]]
        else:
            members = dict(getattr(thing, "__dict__", {}))
            members |= {
                f"cell{i}": c.cell_contents
                for i, c in enumerate(getattr(thing, "__closure__", None) or ())
                if _filled(c)
            }
            todo += [(member, depth + 1) for member in members.values()]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty one raises)
    except ValueError:
        return False
    return True


def batches_of(loader: Any, most: int, seconds: float = MOST_SECONDS, passes: bool = False) -> list[Any]:
    """The first `most` batches, as the user's loop would get them next, with all random numbers put back.

    passes: go on with further passes until there are `most`. Fewer where they would take more than 256 MB or `seconds`.
    A loader that can be read only once (an iterator) gives none: reading it would take the batches away from the user.
    """
    if loader is None or iter_is_itself(loader):
        return []
    put_back = remembered(loader)
    taken: list[Any] = []
    size, until = 0, time.monotonic() + seconds
    iterator: Any = None
    try:
        while True:
            before = len(taken)
            for batch in (iterator := iter(loader)):
                taken.append(batch)
                size += sum(t.numel() * t.element_size() for t in tensors_in(batch))
                if len(taken) >= most or size > MOST_BYTES or time.monotonic() > until:
                    return taken
            if len(taken) == before or not passes:
                return taken
    finally:
        del iterator
        put_back()


def iter_is_itself(loader: Any) -> bool:
    return hasattr(loader, "__next__")


@contextlib.contextmanager
def unnoticed(*owners: Any) -> Iterator[None]:
    """What happens inside draws no random numbers that the user's loop would have drawn, and shows no warnings: the
    loop itself will, at the user's own line."""
    put_back = remembered(*owners)
    try:
        with quiet():
            yield
    finally:
        put_back()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings inside: they would name lines of ours, once for each time that we ask."""
    rule: Any = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, rule)  # by `warnings.simplefilter`, Python would forget which of the user's it has shown already
    try:
        yield
    finally:
        if rule in filters:
            filters.remove(rule)


def targets_of(batch: Any) -> torch.Tensor | None:
    """The targets of a batch, where its form tells: the second member of a pair, or a dict's usual keys."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        found = next((batch[key] for key in ("labels", "label", "targets", "target", "y") if key in batch), None)
        return found if isinstance(found, torch.Tensor) else None
    if isinstance(batch, (list, tuple)) and len(batch) > 1 and isinstance(batch[-1], torch.Tensor):
        return batch[-1]
    return None


def inputs_of(batch: Any) -> torch.Tensor | None:
    """The first tensor of a batch."""
    return next(iter(tensors_in(batch)), None)


UNFAIR = 3.0
"""Variance between batch means over a fair shuffle's. Over four batches and more, a fair one stays below 2.6 in 99 of
100 (chi-square with three degrees of freedom, divided by three: 3.8 at its 99th percentile for one column, less for
several)."""


def shuffled(batches: Sequence[Any]) -> list[Any] | None:
    """The samples of these batches, dealt out afresh. None where batches can't be taken apart into samples; raises
    RuntimeError or TypeError where samples of different batches do not fit together."""
    generator = torch.Generator().manual_seed(0)
    sizes = [_length(batch) for batch in batches]
    if None in sizes or len(batches) < 2:
        return None
    whole = _joined(list(batches))
    order = torch.randperm(sum(s or 0 for s in sizes), generator=generator)
    return [rows_of(whole, part) for part in order.split(sizes[0] or 1)]


def _length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    members = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(members, (list, tuple)) or not members:
        return None
    sizes = {_length(member) for member in members}
    return sizes.pop() if len(sizes) == 1 else None


def _joined(batches: list[Any]) -> Any:
    one = batches[0]
    if isinstance(one, torch.Tensor):
        return torch.cat(batches)
    if isinstance(one, dict):
        return {key: _joined([b[key] for b in batches]) for key in one}
    return [_joined(list(members)) for members in zip(*batches)]


def rows_of(whole: Any, rows: torch.Tensor) -> Any:
    if isinstance(whole, torch.Tensor):
        return whole[rows.to(whole.device)]
    if isinstance(whole, dict):
        return {key: rows_of(value, rows) for key, value in whole.items()}
    return [rows_of(member, rows) for member in whole]
