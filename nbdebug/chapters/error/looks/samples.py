"""Where the samples of one batch differ: each as a flat list of its entries, compared entry by entry.

Only exact lists, tuples, dicts, tensors and arrays are opened; of other objects the class is told.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nbdebug.chapters.error.lying import shape_of

Path = tuple[Any, ...]
ENTRIES = 2000
DEEPEST = 6
NUMBERS = (bool, int, float, complex)
DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class Field(NamedTuple):
    """A part of a path: the field of a named tuple."""

    place: int
    name: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """kind: "tensor", "array", "number", "list", "dict", "None", or the name of a class; shape: of a tensor or an
    array, (length,) of a list; keys: of a dict."""

    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    keys: tuple[Any, ...] = ()
    value: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.kind in ("tensor", "array"):
            return f"{self.dtype} {list(self.shape or ())}" + (" (NumPy)" if self.kind == "array" else "")
        if self.kind == "list" and self.shape:
            return f"a list of {self.shape[0]}"
        return {
            "number": "a number",
            "dict": "a dict",
            "None": "None",
            "str": "a string",
            "Image": "a PIL `Image`",
            "sparse tensor": "a sparse tensor",
        }.get(self.kind, f"a `{self.kind}`")

    @property
    def sort(self) -> str:
        """What may stand beside each other in a batch: a tensor and an array may."""
        return "tensor" if self.kind == "array" else self.kind


@dataclasses.dataclass(frozen=True)
class Difference:
    """what: as CollateMismatch.what. positions: of the odd samples. odd, usual: their entry and the others'."""

    what: str
    path: Path
    positions: tuple[int, ...]
    odd: Entry | None
    usual: Entry | None
    lacking: tuple[Any, ...] = ()


def flat(sample: Any, path: Path = ()) -> Iterator[tuple[Path, Entry]]:
    """(path, entry) of a sample and all that lies in it, the outer before the inner."""
    kind, dtype = type(sample), ""
    if (shape := shape_of(sample)) is not None:
        yield path, Entry("tensor", shape, str(sample.dtype).removeprefix("torch."), value=sample)
    elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        dtype = str(sample.dtype)
        yield path, Entry("array", tuple(sample.shape), dtype, value=sample)
    elif kind in NUMBERS or kind.__module__ == "numpy" and hasattr(kind, "dtype"):
        yield path, Entry("number")
    elif sample is None or kind in (str, bytes):
        yield path, Entry("None" if sample is None else kind.__name__)
    elif kind in DICTS:
        keys = tuple(key for key in dict.keys(sample) if type(key) in (str, int))
        yield path, Entry("dict", None, "", keys, sample)
        for key in keys[:ENTRIES] if len(path) < DEEPEST else ():
            yield from flat(dict.__getitem__(sample, key), (*path, key))
    elif issubclass(kind, (list, tuple)):
        inside = list.__iter__(sample) if issubclass(kind, list) else tuple.__iter__(sample)
        values = list(inside)
        yield path, Entry("list", (len(values),), value=sample)
        names = fields_of(kind)
        for i, value in enumerate(values[:ENTRIES] if len(path) < DEEPEST else ()):
            yield from flat(value, (*path, Field(i, names[i]) if i < len(names) else i))
    else:
        yield path, Entry(kind.__name__, value=sample)


def fields_of(kind: type) -> tuple[str, ...]:
    """The fields of a named tuple; () of another class."""
    found = next((vars(one)["_fields"] for one in kind.__mro__ if "_fields" in vars(one)), ())
    return found if issubclass(kind, tuple) and type(found) is tuple and all(type(n) is str for n in found) else ()


def differences(samples: Sequence[Any]) -> list[Difference]:
    """Every entry at which the samples can't be put together, in the order in which they are met."""
    entries: list[dict[Path, Entry]] = [dict(flat(sample)) for sample in samples]
    found: list[Difference] = []
    for path in dict.fromkeys(path for one in entries for path in one):
        if any(path[: len(other.path)] == other.path for other in found):
            continue  # below an entry that differs already
        difference = _at(path, [one.get(path) for one in entries])
        found += [difference] if difference is not None else []
    return found


def _at(path: Path, there: list[Entry | None]) -> Difference | None:
    known = [entry for entry in there if entry is not None]
    if not known or len(known) < len(there):
        return None  # its parent differs, in keys or length, and is told
    sorts = collections.Counter(entry.sort for entry in known)
    usual = known[0] if len(sorts) == len(known) else next(e for e in known if e.sort == sorts.most_common(1)[0][0])
    if len(sorts) > 1:
        others = [i for i, entry in enumerate(known) if entry.sort != usual.sort]
        what = "none" if all(known[i].kind == "None" for i in others) else "type"
        return Difference(what, path, tuple(others), known[others[0]], usual)
    if usual.kind == "dict":
        lacks = {i: tuple(key for key in known[0].keys if key not in entry.keys) for i, entry in enumerate(known)}
        short = [i for i, missing in lacks.items() if missing]
        return Difference("keys", path, tuple(short), known[short[0]], known[0], lacks[short[0]]) if short else None
    shapes = collections.Counter(entry.shape for entry in known)
    if len(shapes) < 2 or usual.kind not in ("tensor", "array", "list"):
        return None
    most = shapes.most_common(1)[0][0]
    odd = [i for i, entry in enumerate(known) if entry.shape != most]
    return Difference(
        "shape" if usual.sort == "tensor" else "length",
        path,
        tuple(odd),
        known[odd[0]],
        next(entry for entry in known if entry.shape == most),
    )


def unsupported(samples: Sequence[Any], wanted: str = "") -> Difference | None:
    """The first entry of a class that can't be put together: an image, an object array, None in every sample."""
    for path, entry in flat(samples[0]) if samples else ():
        if entry.kind == "tensor" and entry.value.layout is not torch.strided:
            entry = dataclasses.replace(entry, kind="sparse tensor")
        if entry.kind in ("tensor", "number", "list", "dict", "str", "bytes"):
            continue
        if entry.kind == "array" and not (entry.dtype == "object" or "U" in entry.dtype[:2]):
            continue
        return Difference(
            "none" if entry.kind == "None" else "unsupported", path, tuple(range(len(samples))), entry, None
        )
    return None
