"""What the samples of a batch that could not be put together show: at which entry they differ, and which is odd."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.chapters.error.facts import Raised


@dataclasses.dataclass(frozen=True)
class CollateMismatch:
    """what: "shape" (tensors of several), "length" (lists or strings of numbers), "keys" (a sample lacks some), "type",
    "unsupported" (all are of a type that can't be put together), "none" (a sample is None).

    entry: of the sample, as a person would write it ("['image']", "[0]", ".points", "" the sample itself); name: its
    last part ("image"); sample: what holds it: "dict", "tuple", "named tuple", "nested" (something within the sample),
    "" (it is the sample). odd, usual: what the odd samples have there and what the others have ("float32 [3, 24, 20]",
    "a list of 7"); odd_shape, usual_shape: of tensors. lacking: keys. positions: the odd samples in the batch, from 0;
    indices: the same in the data set, where that can be told. batch: its number, from 0, and rows: its samples.
    dataset: its name or class; loader: its name; own: the collate function, where it is not torch's. tried: what was
    seen when the samples were put together as the first fix does it, None where that was not tried.

    worker: where it was raised, if not in this process; held_at: the odd one in a list that the data set keeps;
    entries: the keys of its samples, as the source of `__getitem__` says them.
    """

    raised: Raised
    what: str
    entry: str = ""
    name: str = ""
    odd: str = ""
    usual: str = ""
    odd_shape: tuple[int, ...] | None = None
    usual_shape: tuple[int, ...] | None = None
    positions: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    batch: int | None = None
    rows: int | None = None
    lacking: tuple[str, ...] = ()
    dataset: str = ""
    loader: str = ""
    own: str = ""
    worker: str = ""
    held_at: str = ""
    tried: Mapping[str, Any] | None = None
    sample: str = ""
    entries: tuple[str, ...] = ()
