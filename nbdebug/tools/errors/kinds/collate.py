"""A batch that can't be collated: its samples are in the frame of the loader's fetcher.

For a worker of the loader these frames no longer exist: then the message, the number of the batch, the order of the
sampler and the lists of the data set are the evidence.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import inspect
import linecache
import math
import multiprocessing
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import source_text
from nbdebug.observe.sources import edit_of, nodes_of, parse, statement_at, tree_of, with_keyword
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.report import Edit, Finding, Fix
from nbdebug.tools.errors.autograd.functions import function_source
from nbdebug.tools.errors.context import ErrorContext
from nbdebug.tools.errors.kinds.workers import iterator_of, loader_of
from nbdebug.tools.errors.rules.dataloader import CollateMismatch
from nbdebug.tools.errors.sandbox import quiet
from nbdebug.tools.errors.values import callee_name, shape_of

Path = tuple[Any, ...]
SAMPLE_ENTRIES = 2000
DEEPEST = 6
NUMBERS = (bool, int, float, complex)
DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class Field(NamedTuple):
    """A part of a path: the field of a named tuple."""

    place: int
    name: str


@dataclasses.dataclass(frozen=True)
class SampleEntry:
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
        """The kind, one for tensors and arrays, which can be collated together."""
        return "tensor" if self.kind == "array" else self.kind


@dataclasses.dataclass(frozen=True)
class Difference:
    """what: as CollateMismatch.what. positions: of the odd samples. odd, usual: their entry and the others'."""

    what: str
    path: Path
    positions: tuple[int, ...]
    odd: SampleEntry | None
    usual: SampleEntry | None
    lacking: tuple[Any, ...] = ()


def flat(sample: Any, path: Path = ()) -> Iterator[tuple[Path, SampleEntry]]:
    """(path, entry) of a sample and everything in it, the outer before the inner."""
    kind, dtype = type(sample), ""
    if (shape := shape_of(sample)) is not None:
        yield path, SampleEntry("tensor", shape, str(sample.dtype).removeprefix("torch."), value=sample)
    elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        dtype = str(sample.dtype)
        yield path, SampleEntry("array", tuple(sample.shape), dtype, value=sample)
    elif kind in NUMBERS or kind.__module__ == "numpy" and hasattr(kind, "dtype"):
        yield path, SampleEntry("number")
    elif sample is None or kind in (str, bytes):
        yield path, SampleEntry("None" if sample is None else kind.__name__)
    elif kind in DICTS:
        keys = tuple(key for key in dict.keys(sample) if type(key) in (str, int))
        yield path, SampleEntry("dict", None, "", keys, sample)
        for key in keys[:SAMPLE_ENTRIES] if len(path) < DEEPEST else ():
            yield from flat(dict.__getitem__(sample, key), (*path, key))
    elif issubclass(kind, (list, tuple)):
        inside = list.__iter__(sample) if issubclass(kind, list) else tuple.__iter__(sample)
        values = list(inside)
        yield path, SampleEntry("list", (len(values),), value=sample)
        names = fields_of(kind)
        for i, value in enumerate(values[:SAMPLE_ENTRIES] if len(path) < DEEPEST else ()):
            yield from flat(value, (*path, Field(i, names[i]) if i < len(names) else i))
    else:
        yield path, SampleEntry(kind.__name__, value=sample)


def fields_of(kind: type) -> tuple[str, ...]:
    """The fields of a named tuple; () of another class."""
    fields = next((vars(one)["_fields"] for one in kind.__mro__ if "_fields" in vars(one)), ())
    return fields if issubclass(kind, tuple) and type(fields) is tuple and all(type(n) is str for n in fields) else ()


def differences(samples: Sequence[Any]) -> list[Difference]:
    """The entries at which the samples can't be collated, in their order."""
    entries: list[dict[Path, SampleEntry]] = [dict(flat(sample)) for sample in samples]
    results: list[Difference] = []
    for path in dict.fromkeys(path for one in entries for path in one):
        if any(path[: len(other.path)] == other.path for other in results):
            continue  # below an entry that differs already
        difference = _at(path, [one.get(path) for one in entries])
        results += [difference] if difference is not None else []
    return results


def _at(path: Path, there: list[SampleEntry | None]) -> Difference | None:
    present = [entry for entry in there if entry is not None]
    if not present or len(present) < len(there):
        return None  # its parent differs, in keys or length, and is reported
    sorts = collections.Counter(entry.sort for entry in present)
    usual = (
        present[0] if len(sorts) == len(present) else next(e for e in present if e.sort == sorts.most_common(1)[0][0])
    )
    if len(sorts) > 1:
        others = [i for i, entry in enumerate(present) if entry.sort != usual.sort]
        what = "none" if all(present[i].kind == "None" for i in others) else "type"
        return Difference(what, path, tuple(others), present[others[0]], usual)
    if usual.kind == "dict":
        lacks = {i: tuple(key for key in present[0].keys if key not in entry.keys) for i, entry in enumerate(present)}
        short = [i for i, missing in lacks.items() if missing]
        return Difference("keys", path, tuple(short), present[short[0]], present[0], lacks[short[0]]) if short else None
    shapes = collections.Counter(entry.shape for entry in present)
    if len(shapes) < 2 or usual.kind not in ("tensor", "array", "list"):
        return None
    most = shapes.most_common(1)[0][0]
    odd = [i for i, entry in enumerate(present) if entry.shape != most]
    return Difference(
        "shape" if usual.sort == "tensor" else "length",
        path,
        tuple(odd),
        present[odd[0]],
        next(entry for entry in present if entry.shape == most),
    )


def unsupported(samples: Sequence[Any]) -> Difference | None:
    """The first entry of a class that can't be collated: an image, an object array, None in every sample."""
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


COLLATE = re.compile(r"[\\/]utils[\\/]data[\\/]_utils[\\/]collate\.py$")
FETCH = re.compile(r"[\\/]utils[\\/]data[\\/]_utils[\\/]fetch\.py$")
STACKED = re.compile(
    r"Unable to create tensor|"
    r"stack expects each tensor to be equal size|each element in list of batch should be of equal "
    r"size|Trying to resize storage that is not resizable|must have same number of dimensions|"
    r"all input arrays must have the same shape|expected Tensor as element|"
    r"inhomogeneous (shape|part)|expected sequence of length|could not determine the shape of object"
)
ENTRIES = re.compile(r"got \[([\d, ]*)\] at entry 0 and \[([\d, ]*)\] at entry (\d+)")
CLASS = re.compile(r"found <class '([\w.]+)'>|found (object|<U\d+|\w+)\s*$")
ELEMENT = re.compile(r"expected Tensor as element (\d+) in argument 0, but got (\w+)")
NO_ATTRIBUTE = re.compile(r"'(\w+)' object (?:has no attribute|is not (?:iterable|subscriptable))")
SPARSE = re.compile(r"Batches of sparse tensors are not")
NAMED = {"NoneType": "None", "str": "a string", "int": "a number", "float": "a number", "Image": "a PIL `Image`"}
SMALL = 4_000_000
"""Elements of all samples with which a fix is tried: some milliseconds."""


def detect(context: ErrorContext) -> CollateMismatch | None:
    fetch = next((frame for frame in reversed(context.trail) if FETCH.search(frame.site.file)), None)
    collating = [frame for frame in context.trail if COLLATE.search(frame.site.file)]
    own = _own_collate(context)
    if not collating and not (own and (STACKED.search(context.message) or context.type in ("KeyError", "TypeError"))):
        return None
    samples = _samples(fetch, collating)
    if samples is None and not own:
        read = read_samples(context, _batch_indices(context, loader_of(context)[2]))
        samples = read if read is not None and differences(read) else None
        collating = [] if samples is not None else collating
        if samples is not None:
            facts = _mismatch_facts(context, differences(samples)[0], samples)
            indices = list(_batch_indices(context, facts.batch))
            message = _from_message(context, own)
            stored = message.stored_at if message is not None else ""
            return dataclasses.replace(facts, indices=tuple(indices[i] for i in facts.positions), stored_at=stored)
    if samples is None:
        return _from_message(context, own) if collating or STACKED.search(context.message) else None
    difference = _difference(context, samples, collating)
    if (
        difference is None
        or not collating
        and not STACKED.search(context.message)
        and difference.what not in ("keys", "none")
    ):
        return None  # the collate function fails by itself
    facts = _mismatch_facts(context, difference, samples)
    indices = _indices(fetch, len(samples))
    return dataclasses.replace(
        facts, own=own, indices=tuple(indices[i] for i in difference.positions if i < len(indices))
    )


def _own_collate(context: ErrorContext) -> str:
    """The collate function that the fetcher called, where it is not torch's."""
    for fetch, callee in zip(context.trail, context.trail[1:]):
        if FETCH.search(fetch.site.file) and "collate_fn(" in (source_text(fetch.site) or ""):
            if COLLATE.search(callee.site.file):
                return ""
            mine = callee.names.get("self")
            return callee.site.function if callee.site.function != "__call__" else type(mine).__name__
    return ""


def _samples(fetch: Frame | None, collating: Sequence[Frame]) -> Sequence[Any] | None:
    """The samples of the batch, from the fetcher or from the arguments of `default_collate`."""
    data: Any = fetch.names.get("data") if fetch is not None else None
    if data is None and collating:
        data = collating[0].names.get("batch")
    return data if type(data) in (list, tuple) and len(data) > 0 else None


def _difference(context: ErrorContext, samples: Sequence[Any], collating: Sequence[Frame]) -> Difference | None:
    """The difference at the entry that was being collated, else the first one."""
    if SPARSE.search(context.message):
        return unsupported(samples)
    results = differences(samples)
    path = _path_of(collating[-1].names.get("batch"), samples) if collating else None
    if path is not None:
        results = [d for d in results if d.path[: len(path)] == path or path[: len(d.path)] == d.path] or results
    if results:
        return results[0]
    return unsupported(samples) if collating and CLASS.search(context.message) else None


def _path_of(batch: Any, samples: Sequence[Any]) -> Path | None:
    """The path in a sample of the values that `default_collate` was collating."""
    first = batch[0] if type(batch) in (list, tuple) and batch else None
    if first is None:
        return None
    return next((path for path, entry in flat(samples[0]) if entry.value is first), None)


def _indices(fetch: Frame | None, count: int) -> list[int]:
    indices: Any = fetch.names.get("possibly_batched_index") if fetch is not None else None
    dataset = attributes(fetch.names.get("self")).get("dataset") if fetch is not None else None
    if (
        type(indices) not in (list, tuple)
        or len(indices) != count
        or issubclass(type(dataset), torch.utils.data.IterableDataset)
    ):
        return []
    return [i for i in indices if type(i) is int]


def _mismatch_facts(context: ErrorContext, difference: Difference, samples: Sequence[Any]) -> CollateMismatch:
    loader, dataset, batch = loader_of(context)
    odd, usual = difference.odd, difference.usual
    return CollateMismatch(
        context.raised(),
        difference.what,
        "".join(f".{part.name}" if isinstance(part, Field) else f"[{part!r}]" for part in difference.path),
        _name(difference.path),
        str(odd or ""),
        str(usual or ""),
        odd.shape if odd else None,
        usual.shape if usual else None,
        difference.positions,
        batch=batch,
        rows=len(samples),
        lacking=tuple(map(str, difference.lacking)),
        dataset=dataset,
        loader=loader,
        tried=_tried(difference, samples),
        sample=_sort(difference.path),
    )


def _sort(path: Path) -> str:
    """The container of an entry at the top of a sample."""
    if len(path) != 1:
        return "nested" if path else ""
    return "named tuple" if isinstance(path[0], Field) else "dict" if type(path[0]) is str else "tuple"


def _name(path: Path) -> str:
    last = path[-1] if path else ""
    return last.name if isinstance(last, Field) else str(last)


# -- in a worker ------------------------------------------------------------------------------------------------------


def _from_message(context: ErrorContext, own: str) -> CollateMismatch | None:
    """The facts from a worker's message, with the order in which its parent requested the samples."""
    loader, dataset, batch = loader_of(context)
    worker = context.carried.where if context.carried else ""
    sizes, kind, element = (pattern.search(context.message) for pattern in (ENTRIES, CLASS, ELEMENT))
    facts = CollateMismatch(
        context.raised(),
        "shape",
        batch=batch,
        dataset=dataset,
        loader=loader,
        own=own,
        worker=worker,
        entries=_entries(context),
    )
    indices = _batch_indices(context, batch)
    if kind is not None and "default_collate" in context.message:
        name = (kind[1] or kind[2]).rpartition(".")[2]
        return dataclasses.replace(
            facts, what="none" if name == "NoneType" else "unsupported", odd=NAMED.get(name, f"a `{name}`")
        )
    if element is not None:
        place, odd = int(element[1]), NAMED.get(element[2], f"a `{element[2]}`")
        return dataclasses.replace(
            facts,
            what="none" if odd == "None" else "type",
            odd=odd,
            usual="" if odd == "None" else "a tensor",
            positions=(place,),
            indices=tuple(indices[place : place + 1]),
        )
    if (lacks := NO_ATTRIBUTE.search(context.message)) is not None:
        return dataclasses.replace(
            facts, what="none" if lacks[1] == "NoneType" else "unsupported", odd=NAMED.get(lacks[1], f"a `{lacks[1]}`")
        )
    if sizes is not None:
        return _shape_mismatch(facts, context, sizes, indices)
    what = (
        "keys"
        if context.type == "KeyError"
        else "length"
        if "each element" in context.message
        else ("shape" if STACKED.search(context.message) else "type")
    )
    return dataclasses.replace(facts, what=what, lacking=(context.message.strip("'"),) if what == "keys" else ())


def _shape_mismatch(
    facts: CollateMismatch, context: ErrorContext, match: re.Match[str], indices: Sequence[int]
) -> CollateMismatch:
    shapes = [tuple(int(n) for n in re.findall(r"\d+", text)) for text in match.groups()[:2]]
    place, position = _odd_in_dataset(context, indices, int(match[3]), shapes[0], shapes[1])
    unknown = position is None
    position = int(match[3]) if position is None else position
    usual, odd = shapes if position else shapes[::-1]
    tried = _tried_on_shapes([torch.zeros(shape) for shape in shapes]) if sum(map(math.prod, shapes)) <= SMALL else None
    result = dataclasses.replace(
        facts,
        odd=str(list(odd)),
        usual=str(list(usual)),
        odd_shape=odd,
        usual_shape=usual,
        stored_at=place,
        rows=len(indices) or None,
        tried=tried,
    )
    if unknown:  # of two samples neither is the odd one
        return dataclasses.replace(result, positions=(0, position), indices=tuple(indices[:2]))
    return dataclasses.replace(result, positions=(position,), indices=tuple(indices[position : position + 1]))


def _batch_indices(context: ErrorContext, batch: int | None) -> Sequence[int]:
    """The data set's indices of a batch, where the sampler runs through it in order."""
    sampler = attributes(iterator_of(context)).get("_index_sampler") if iterator_of(context) is not None else None
    state = attributes(sampler) if type(sampler) is BatchSampler else {}
    size = state.get("batch_size")
    if type(state.get("sampler")) is not SequentialSampler or type(size) is not int or batch is None:
        return ()
    return range(batch * size, (batch + 1) * size)


def _odd_in_dataset(
    context: ErrorContext, indices: Sequence[int], position: int, first: tuple[int, ...], other: tuple[int, ...]
) -> tuple[str, int | None]:
    """("images[5]", 0 where it is the first that is odd) from a list of tensors, or of their sizes, in the
    data set, or from a batch before it; None where the odd one of the first two is not known."""
    iterator = iterator_of(context)
    dataset = attributes(iterator).get("_dataset") if iterator is not None else None
    for name, value in attributes(dataset).items() if dataset is not None and position < len(indices) else ():
        if (
            type(value) is list
            and len(value) > indices[position]
            and shape_of(value[indices[position]]) == other
            and shape_of(value[indices[0]]) == first
        ):
            shapes = [shape_of(item) for item in value[:200]]
            odd = 0 if shapes.count(first) < shapes.count(other) else position
            return f"{name}[{indices[odd]}]", odd
    if position > 1:
        return "", position  # those between have the shape of the first
    for name, value in attributes(dataset).items() if dataset is not None and position < len(indices) else ():
        if type(value) is list and len(value) > indices[position] and all(type(item) is int for item in value):
            mine, its = value.count(value[indices[0]]), value.count(value[indices[position]])
            if mine != its and (value[indices[0]], value[indices[position]]) in list(zip(first, other)):
                odd = 0 if mine < its else position
                return f"{name}[{indices[odd]}]", odd
    return "", _unlike_batches(context, position, first, other)


def _unlike_batches(context: ErrorContext, position: int, first: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    """Which is odd, by the previous batch in a variable."""
    shapes = [
        entry.shape
        for _, value, frame in context.variables()
        if frame is not None
        for _, entry in flat(value)
        if entry.kind == "tensor"
    ]
    usual = {shape[1:] for shape in shapes if shape}
    return None if (first in usual) == (other in usual) else 0 if other in usual else position


def _entries(context: ErrorContext) -> tuple[str, ...]:
    """The keys of the samples, from the source of the data set's `__getitem__`."""
    iterator = iterator_of(context)
    dataset = attributes(iterator).get("_dataset") if iterator is not None else None
    method = next((vars(kind)["__getitem__"] for kind in type(dataset).__mro__ if "__getitem__" in vars(kind)), None)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method))) if inspect.isfunction(method) else None
    except (OSError, SyntaxError, TypeError):  # no source
        return ()
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)] if tree is not None else []
    return tuple(
        key.value
        for value in returned
        if isinstance(value, ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


# -- a fix, tried on the samples ------------------------------------------------------------------------------------


def _tried(difference: Difference, samples: Sequence[Any]) -> Mapping[str, Any] | None:
    """Collate the entry after resizing or padding, on detached tensors; None where that is not tried."""
    values: list[Any] = [next((e.value for at, e in flat(sample) if at == difference.path), None) for sample in samples]
    if difference.what != "shape" or any(
        type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided for value in values
    ):
        return None
    if sum(value.numel() for value in values) > SMALL or len({value.dim() for value in values}) > 1:
        return None
    with torch.no_grad():
        plain, size = [value.detach() for value in values], difference.usual.shape if difference.usual else ()
        if values[0].dim() >= 3 and size and all(value.shape[:-2] == size[:-2] for value in values):
            whole = torch.stack(
                [
                    torch.nn.functional.interpolate(value[None].float(), size=size[-2:])[0]
                    for value in plain
                    if value.dim() == 3
                ]
            )
            return {"the batch then has": str(list(whole.shape))} if len(whole) == len(values) else None
        return _tried_padded(plain)


def _tried_on_shapes(values: list[torch.Tensor]) -> Mapping[str, Any] | None:
    """The same on tensors of the two shapes in a worker's message."""
    if (
        len({value.dim() for value in values}) > 1
        or values[0].dim() >= 3
        and values[0].shape[:-2] == (values[1].shape[:-2])
    ):
        return None
    with torch.no_grad():
        result = _tried_padded(values)
    return {"two such, padded": result["the batch then has"]} if result else None


def _tried_padded(values: list[torch.Tensor]) -> dict[str, Any] | None:
    """Along the one axis that differs, as the fix does it."""
    axes = [axis for axis in range(values[0].dim()) if len({value.shape[axis] for value in values}) > 1]
    if axes == [0]:
        whole = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    elif len(axes) == 1:
        behind, longest = (0, 0) * (values[0].dim() - 1 - axes[0]), max(value.shape[axes[0]] for value in values)
        whole = torch.stack(
            [torch.nn.functional.pad(value, (*behind, 0, longest - value.shape[axes[0]])) for value in values]
        )
    else:
        return None
    return {"the batch then has": str(list(whole.shape))}


# -- fixes as edits ----------------------------------------------------------------------------------------------------


def _dataset_of(context: ErrorContext) -> Any:
    fetch = next((frame for frame in reversed(context.trail) if FETCH.search(frame.site.file)), None)
    if fetch is not None and "self" in fetch.names:
        return attributes(fetch.names["self"]).get("dataset")
    iterator = iterator_of(context)
    return attributes(iterator).get("_dataset") if iterator is not None else None


def read_samples(context: ErrorContext, indices: Sequence[int], edit: Edit | None = None) -> list[Any] | None:
    """The samples of these indices, as the user's `__getitem__` makes them by torch's functions alone, with an edit of
    it; None where it needs more. Nothing of the user's is run."""
    from nbdebug.tools.errors.continuation import Run
    from nbdebug.tools.errors.training import TRAINING_SECONDS, TrainingSandbox

    dataset = _dataset_of(context)
    method = class_attribute(dataset, "__getitem__", None)
    if type(method) is not FunctionType or not indices or not context.users:
        return None
    sandbox = TrainingSandbox(context.users[0], edit)
    sandbox.run = Run(time.monotonic() + TRAINING_SECONDS, sandbox)
    try:
        with quiet():
            samples = [sandbox.call(method, dataset, i) for i in indices[:64]]
    except Exception:  # what it needs is not torch's alone, or the data refuses it
        return None
    return samples if edit is None or sandbox.covered else None


def cured(context: ErrorContext, finding: Finding) -> Finding:
    """The finding with a collate function of the fixes written at the user's own `DataLoader`, and a new size in their
    `__getitem__`; both tried on the samples of the batch."""
    fixes = []
    for fix in finding.fixes:
        edit = _of_loader(context, fix.code) if fix.code.startswith("def collate(") else _of_item(context, fix.code)
        after = _batch_with(context, fix.code, edit) if edit is not None else None
        fixes.append(Fix.of(fix.title, edit, True, after) if edit is not None and after is not None else fix)
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _of_loader(context: ErrorContext, code: str) -> Edit | None:
    """The statement that makes the loader, with the collate function before it."""
    function = code.rpartition("\n\n")[0] if "DataLoader(" in code else code
    name = loader_of(context)[0]
    for file in dict.fromkeys(frame.site.file for frame in context.users):
        calls = [n for n in nodes_of(file) if isinstance(n, ast.Call) and callee_name(n) == "DataLoader"]
        lines = [(statement_at(file, call.lineno), call) for call in calls]
        named = [p for p in lines if isinstance(p[0], ast.Assign) and ast.unparse(p[0].targets[0]) == name]
        for line, call in named or lines if len(named or lines) == 1 else ():
            if line is not None and not any(k.arg == "collate_fn" for k in call.keywords):
                pad = "\n" + " " * line.col_offset
                text = function.replace("\n", pad).replace(pad + "\n", "\n\n")
                here = with_keyword(file, call, "collate_fn", "collate")
                workers = any(k.arg == "num_workers" for k in call.keywords)
                if line.col_offset and workers and multiprocessing.get_start_method() != "fork":
                    return _above(file, edit_of(file, here), function)
                return edit_of(file, {line: f"{text}{pad}{{raw}}", **here})
    return None


def _above(file: str, edit: Edit | None, function: str) -> Edit | None:
    """The edit with a function of the file's own before the one that it stands in: workers that are started anew can't
    be given a local one."""
    tree, lines = tree_of(file), [line.rstrip("\n") for line in linecache.getlines(file)]
    if edit is None or tree is None:
        return None
    first = max(n.lineno for n in tree.body if n.lineno <= edit.line)
    between = lines[first - 1 : edit.line - 1]
    old, new = "\n".join([*between, edit.old]), "\n".join([*function.split("\n"), "", "", *between, edit.new])
    return dataclasses.replace(edit, line=first, old=old, new=new)


def _of_item(context: ErrorContext, code: str) -> Edit | None:
    """An assignment before the only `return` of `__getitem__`, where that returns what it assigns."""
    source = function_source(class_attribute(_dataset_of(context), "__getitem__", None))
    tree = parse(code)
    lines = [n for n in source.statements() if isinstance(n, ast.Return)] if source is not None else []
    if source is None or len(lines) != 1 or tree is None or len(tree.body) != 1 or "#" in code:
        return None
    new, line = tree.body[0], lines[0]
    if not isinstance(new, ast.Assign) or ast.unparse(new.targets[0]) not in [
        n.id for n in ast.walk(line) if isinstance(n, ast.Name)
    ]:
        return None
    return edit_of(source.source.file, {line: code + "\n" + " " * line.col_offset + "{raw}"})


def _batch_with(context: ErrorContext, code: str, edit: Edit) -> dict[str, Any] | None:
    """What the batch becomes with an edit; None where it can't be told, or still can't be collated."""
    fetch = next((frame for frame in reversed(context.trail) if FETCH.search(frame.site.file)), None)
    collating = [frame for frame in context.trail if COLLATE.search(frame.site.file)]
    samples = _samples(fetch, collating)
    indices = _indices(fetch, len(samples)) if samples else _batch_indices(context, loader_of(context)[2])
    try:
        with quiet():
            if code.startswith("def collate("):
                samples = samples if samples is not None else read_samples(context, indices)
                names: dict[str, Any] = {"torch": torch}
                exec(code.rpartition("\n\n")[0], names)  # a text of ours: torch's functions, on the samples
                batch = names["collate"](samples)
            else:
                batch = torch.utils.data.default_collate(read_samples(context, indices, edit) or [])
    except Exception:
        return None
    shapes = [str(list(entry.shape or ())) for _, entry in flat(batch) if entry.kind == "tensor"]
    return {"the batch then has": ", ".join(shapes[:4])} if shapes else None
