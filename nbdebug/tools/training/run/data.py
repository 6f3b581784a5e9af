"""Reading batches without using up anybody's random numbers.

A loader draws its order from a generator of its own, its dataset may draw from others, and both may draw from the
global ones. The states of all that can be found are saved, and restored after a probe of ours.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from nbdebug.observe.snapshot import random_sources
from nbdebug.observe.tensors import tensors_in
from nbdebug.observe.variables import attributes, closure_variables
from nbdebug.process import can_copy, in_copy

DEPTH = 4
"""loader → sampler → dataset → transform: no loader that we know keeps a generator deeper than that."""
MOST_BYTES = 256 << 20
MOST_SECONDS = 20.0


def save_rng(*owners: Any) -> Callable[[], None]:
    """Save the state of every generator in reach of loaders (or of a loss function); the result restores them."""
    states: dict[Any, tuple[Callable[[Any], Any], Any]] = {}
    for owner in owners:
        for generator in _generators(owner):
            states[id(generator)] = _state(generator)
    for name, read, write in random_sources():
        states["global", name] = (write, read())

    def restore() -> None:
        for write, state in states.values():
            write(state)

    return restore


@contextlib.contextmanager
def preserve_rng(*owners: Any) -> Iterator[None]:
    """Inside, no random numbers are drawn that the user's loop would have drawn, and no warnings are shown: the loop
    itself will show them, at the user's own line."""
    restore = save_rng(*owners)
    try:
        with no_warnings():
            yield
    finally:
        restore()


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """No warnings inside: they would name lines of ours, once for each call."""
    rule: Any = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, rule)  # by `warnings.simplefilter`, Python would forget which of the user's it has shown already
    try:
        yield
    finally:
        if rule in filters:
            filters.remove(rule)


def _state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """(what sets the state, the state)."""
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):
        state = copy.deepcopy(generator.bit_generator.state)
        return lambda state: setattr(generator.bit_generator, "state", state), state
    return generator.set_state, generator.get_state()


def _generators(owner: Any) -> Iterator[Any]:
    """Generators among the members of an object, and of those members' own, a few steps deep."""
    todo, visited = [(owner, 0)], set()
    while todo:
        item, depth = todo.pop()
        if id(item) in visited or depth > DEPTH or isinstance(item, (torch.Tensor, torch.nn.Module, str, bytes, type)):
            continue
        visited.add(id(item))
        kind = type(item)
        if isinstance(item, (torch.Generator, random.Random)) or (
            kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
        ):
            yield item
        elif isinstance(item, (list, tuple)):
            todo += [(member, depth + 1) for member in item[:64]]
        else:
            members = [*attributes(item).values()]
            if isinstance(item, FunctionType):
                members += closure_variables(item).values()
            todo += [(member, depth + 1) for member in members]


def batches_of(loader: Any, most: int, seconds: float = MOST_SECONDS, passes: bool = False) -> list[Any]:
    """The first `most` batches, as the user's loop would get them next, with all random numbers put back.

    passes: go on with further passes until there are `most`. Fewer where they would take more than 256 MiB or
    `seconds`. A loader that can be read only once (an iterator) gives none: reading it would take the batches away from
    the user.
    """
    if loader is None or is_iterator(loader):
        return []
    restore = save_rng(loader)
    batches: list[Any] = []
    size, until = 0, time.monotonic() + seconds
    iterator: Any = None
    try:
        while True:
            before = len(batches)
            for batch in (iterator := iter(loader)):
                batches.append(batch)
                size += sum(t.numel() * t.element_size() for t in tensors_in(batch))
                if len(batches) >= most or size > MOST_BYTES or time.monotonic() > until:
                    return batches
            if len(batches) == before or not passes:
                return batches
    finally:
        del iterator
        restore()


def is_iterator(loader: Any) -> bool:
    """Something that can be read only once: an iterator, or a stream that goes on where it was left, as a copy of the
    process shows. Nothing is taken from it."""
    if hasattr(type(loader), "__next__"):
        return True
    stream = getattr(loader, "dataset", loader)
    if hasattr(type(stream), "__getitem__") and not isinstance(stream, torch.utils.data.IterableDataset):
        return False
    if hasattr(type(stream), "__next__"):
        return True
    try:
        return can_copy() and bool(in_copy(lambda: _goes_on(loader), MOST_SECONDS))
    except Exception:  # the loader's own, which the loop will meet
        return False


def _goes_on(loader: Any) -> bool:
    """Whether a second pass begins otherwise than the first one. Only in a copy."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # its workers are the original's
    stream = getattr(loader, "dataset", loader)
    if iter(stream) is iter(stream):
        return True
    restore, first = save_rng(loader), next(iter(loader), None)
    restore()
    again = next(iter(loader), None)
    if first is None or again is None:
        return first is not None
    pairs = zip(tensors_in(first), tensors_in(again))
    return any(a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def targets_of(batch: Any) -> torch.Tensor | None:
    """The targets of a batch, where its form tells: the last member of a pair, or one of a dict's usual keys."""
    key = _target_key(batch)
    return batch[key] if key is not None and isinstance(batch[key], torch.Tensor) else None


def with_targets(batch: Any, targets: torch.Tensor) -> Any:
    """The same batch with these targets, where `targets_of` finds its own."""
    key = _target_key(batch)
    return {**batch, key: targets} if isinstance(key, str) else [*batch[:-1], targets]


def _target_key(batch: Any) -> str | int | None:
    if isinstance(batch, dict) or hasattr(type(batch), "keys"):
        return next((key for key in ("labels", "label", "targets", "target", "y") if key in batch), None)
    return -1 if isinstance(batch, (list, tuple)) and len(batch) > 1 else None


def shuffled(batches: Sequence[Any]) -> list[Any] | None:
    """The samples of these batches in a random order, in batches again. None where batches can't be taken apart into
    samples; raises RuntimeError or TypeError where samples of different batches do not fit together."""
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
    """These samples of a batch, in its form."""
    if isinstance(whole, torch.Tensor):
        return whole[rows.to(whole.device)]
    if isinstance(whole, dict):
        return {key: rows_of(value, rows) for key, value in whole.items()}
    return [rows_of(member, rows) for member in whole]
