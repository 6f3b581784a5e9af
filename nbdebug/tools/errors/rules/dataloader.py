"""The causes of errors in a DataLoader: samples that can't be collated, and workers that ended."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.text import count, size
from nbdebug.tools.errors.rules import Raised


@dataclasses.dataclass(frozen=True)
class CollateMismatch:
    """what: "shape" (tensors of several), "length" (lists or strings of numbers), "keys" (a sample lacks some), "type",
    "unsupported" (all are of a type that can't be collated), "none" (a sample is None).

    entry: of the sample, as a person would write it ("['image']", "[0]", ".points", "" the sample itself); name: its
    last part ("image"); sample: what contains it: "dict", "tuple", "named tuple", "nested" (a part of the sample), ""
    (it is the sample). odd, usual: the entry in the odd samples and in the others ("float32 [3, 24, 20]",
    "a list of 7"); odd_shape, usual_shape: of tensors. lacking: keys. positions: the odd samples in the batch, from 0;
    indices: the same in the data set, where known. batch: its number, from 0, and rows: its samples. dataset: its
    name or class; loader: its name; own: the collate function, where it is not torch's. tried: the result of collating
    the samples with the first fix, None where that was not tried.

    worker: where it was raised, if not in this process; stored_at: the odd one in a list of the data set;
    entries: the keys of its samples, from the source of `__getitem__`; trainer: the name of what makes the loader.
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
    stored_at: str = ""
    tried: Mapping[str, Any] | None = None
    sample: str = ""
    entries: tuple[str, ...] = ()
    trainer: str = ""


@dataclasses.dataclass(frozen=True)
class WorkerDied:
    """what: "killed" (by the system), "shared memory", "crashed" (a signal), "exited", "timeout", "bootstrap" (no main
    guard), "not picklable", "open files", "cuda after fork".

    signal: its name. workers, prefetch, timeout: of the loader. start: how its processes start ("fork", "spawn").
    shared_total, shared_free, memory_free, dataset_bytes: in bytes; dataset_bytes counts tensors and arrays, items the
    Python objects in its lists. unpicklable: by the user's name ("dataset.transform"), and what it is. in_notebook: the
    data set's class, or the function, is defined in a cell. files: how many a process can open.
    """

    raised: Raised
    what: str
    signal: str = ""
    loader: str = ""
    dataset: str = ""
    workers: int | None = None
    prefetch: int | None = None
    timeout: float | None = None
    start: str = ""
    shared_total: int | None = None
    shared_free: int | None = None
    memory_free: int | None = None
    dataset_bytes: int | None = None
    items: int | None = None
    unpicklable: str = ""
    unpicklable_is: str = ""
    in_notebook: bool = False
    files: int | None = None


@rule(
    code="error/collate-mismatch",
    title="The samples of a batch can't be collated.",
    symptom="stack expects each tensor to be equal size; each element in list of batch should be of equal size; "
    "default_collate: batch must contain tensors, …; a KeyError inside the loader. With batch_size=1 it runs.",
    cause="The loader stacks the samples entry by entry. One has another size (a portrait among landscapes, a longer "
    "text, a grayscale image), another type, lacks a key, or is None because a file could not be read.",
    confirm="`[sample['image'].shape for sample in (dataset[i] for i in range(8))]`.",
    fix="Give all samples one size in `__getitem__` (resize, crop, convert), or use a `collate_fn` that pads or drops "
    "samples.",
    reference="https://docs.pytorch.org/docs/stable/data.html#working-with-collate-fn",
)
def collate_mismatch(facts: Any) -> Finding | None:
    if not isinstance(facts, CollateMismatch):
        return None
    where = dataclasses.replace(facts.raised.where, phase="input", module=None, module_type=None)
    return Finding(
        "error/collate-mismatch", _title(facts), where, _evidence(facts), tuple(_fixes(facts)), tuple(_chain(facts))
    )


def _title(facts: CollateMismatch) -> str:
    who, entry = _who(facts), f"`{facts.name or facts.entry or 'sample'}`"
    entry = f"entry {entry}" if facts.name.isdigit() else entry
    if facts.what == "shape" and facts.odd and _two(facts):
        places = facts.indices or facts.positions
        source = f"`{facts.dataset}`" if facts.indices and facts.dataset else _batch(facts)
        return (
            f"Samples {places[0]} and {places[1]} of {source} have tensors of shape {facts.usual} and {facts.odd}, "
            "which can't be stacked into one batch."
        )
    if facts.what == "shape" and facts.odd:
        has = f"has {entry} of" if facts.entry else "has a tensor of" if facts.worker else "is"
        return f"{who} {has} {facts.odd}, but the others have {facts.usual}: they can't be stacked into one batch."
    if facts.what == "keys":
        lacking = ", ".join(f"`{key}`" for key in facts.lacking)
        return f"{who} has no {lacking}, but {'another' if facts.worker else 'the first'} sample of its batch has."
    if facts.what == "none" and not facts.entry and not facts.worker:
        return f"{who} is None: `__getitem__` returned no value."
    if facts.what in ("none", "type") and facts.usual:
        return f"{who} has {facts.odd} as {entry}, but the others have {facts.usual}."
    if facts.what in ("none", "unsupported"):
        many = "Every sample of the batch" if not facts.worker else "A sample"
        if facts.what == "none" and facts.worker and not facts.entry:
            return f"{who} is None or contains None, which can't be collated."
        place = f" as {entry}" if facts.entry else ""
        return f"{many} has {facts.odd}{place}: the loader collates only tensors, arrays, numbers and strings."
    if facts.what == "length" and facts.odd:
        return f"{who} has {facts.odd} as {entry}, but the others have {facts.usual}: the lists must have one length."
    return f"The samples of {_batch(facts)} have different sizes and can't be collated."


def _two(facts: CollateMismatch) -> bool:
    """Whether it is not known which of two samples is the odd one."""
    return bool(facts.worker) and len(facts.positions) == 2


def _who(facts: CollateMismatch) -> str:
    source = f" of `{facts.dataset}`" if facts.dataset else ""
    if facts.indices:
        more = f" and {len(facts.indices) - 1} more" if len(facts.indices) > 1 else ""
        return f"Sample {facts.indices[0]}{more}{source}"
    if facts.positions:
        return f"Sample {facts.positions[0]} of {_batch(facts)}"
    return f"A sample of {_batch(facts)}"


def _batch(facts: CollateMismatch) -> str:
    number = f"batch {facts.batch}" if facts.batch is not None else "the batch"
    return f"{number} of `{facts.loader}`" if facts.loader else number


def _evidence(facts: CollateMismatch) -> dict[str, Any]:
    evidence = {
        "entry of the sample": facts.entry or None,
        "odd": facts.odd or None,
        "the others": facts.usual or None,
        "samples in the data set": list(facts.indices[:8]) or None,
        "positions in the batch": list(facts.positions[:8]) or None,
        "batch (from 0)": facts.batch,
        "samples in it": facts.rows,
        "data set": facts.dataset or None,
        "loader": facts.loader or None,
        "lacking": ", ".join(facts.lacking) or None,
        "stored in": facts.stored_at or None,
        "entries of a sample": ", ".join(facts.entries) or None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _chain(facts: CollateMismatch) -> list[Link]:
    links = []
    if facts.batch is not None and facts.rows and not _two(facts) and 0 < len(facts.positions) < facts.rows:
        what = (
            f"{_batch(facts)[:1].upper()}{_batch(facts)[1:]} has {count(facts.rows, 'sample')}; different: "
            f"{', '.join(map(str, facts.positions[:8]))}"
        )
        links += [Link(what)]
    if facts.own:
        links += [Link(f"`{facts.own}`, the loader's collate_fn, collates the batch")]
    odd, usual = facts.odd_shape, facts.usual_shape
    if odd and usual and len(odd) > 1 and odd != usual and odd[:-2] == usual[:-2] and odd[-2:] == usual[-2:][::-1]:
        what = (
            "its height and width are swapped: a portrait among landscapes, or an image rotated by its EXIF orientation"
        )
        links += [Link(what)]
    return links


# -- fixes -------------------------------------------------------------------------------------------------------


def _fixes(facts: CollateMismatch) -> list[Fix]:
    if not facts.worker:
        return _cures(facts)
    title = "Run it once without workers: the report can then name the sample and the entry."
    apart = Fix(title, f"{facts.loader or 'loader'} = DataLoader({facts.dataset or 'dataset'}, ..., num_workers=0)")
    return [*_cures(facts), apart] if facts.odd or facts.lacking else [apart]


def _cures(facts: CollateMismatch) -> list[Fix]:
    if facts.what == "shape" and facts.odd_shape is not None and facts.usual_shape is not None:
        return _for_shapes(facts, facts.odd_shape, facts.usual_shape)
    if facts.what == "keys":
        title = "Give all samples the same keys, with a default value for a missing one."
        return [Fix(title, "\n".join(f"sample.setdefault({key!r}, ...)   # in __getitem__" for key in facts.lacking))]
    if facts.what == "none":
        code = (
            "def collate(batch):\n    batch = [sample for sample in batch if sample is not None]\n"
            f"    return torch.utils.data.default_collate(batch)\n\n{_loader(facts)}"
        )
        return [Fix("Drop the samples that could not be read.", code)]
    if facts.what == "unsupported":
        return [Fix("Convert it to a tensor in `__getitem__`.", _as_tensor_code(facts))]
    if facts.what == "length" or facts.odd == "":
        return [_padded(facts, tensors=False)]
    title = "Return the same type from `__getitem__` for every sample."
    return [Fix(title, f"{_variable(facts)} = torch.as_tensor({_variable(facts)})   # in __getitem__")]


def _for_shapes(facts: CollateMismatch, odd: tuple[int, ...], usual: tuple[int, ...]) -> list[Fix]:
    name = _variable(facts)
    verified = True if facts.tried else None
    if len(odd) != len(usual):
        code = (
            f"{name} = {name}.reshape({', '.join(map(str, usual))})"
            if math.prod(odd) == math.prod(usual)
            else f"{name} = {name}.squeeze()   # or {name}[None], until all have {len(usual)} axes"
        )
        return [Fix("Give all samples the same number of axes in `__getitem__`.", code)]
    if len(usual) >= 3 and odd[:-2] == usual[:-2]:
        code = f"{name} = torch.nn.functional.interpolate({name}[None], size={usual[-2:]})[0]"
        return [Fix("Resize all samples to one size in `__getitem__`.", code, verified, facts.tried or {})]
    if len(usual) == 3 and odd[1:] == usual[1:] and {odd[0], usual[0]} <= {1, 2, 3, 4}:
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(usual[0], "RGB")
        title = "Open all images with the same number of channels."
        return [Fix(title, f"image = PIL.Image.open(path).convert({mode!r})   # in __getitem__")]
    return [_padded(facts, tensors=True)]


REST = {
    "dict": """    rest = [{{k: v for k, v in sample.items() if k != '{key}'}} for sample in batch]
    return {{**torch.utils.data.default_collate(rest), '{key}': {name}}}""",
    "tuple": """    rest = [[v for i, v in enumerate(sample) if i != {key}] for sample in batch]
    rest = torch.utils.data.default_collate(rest)
    return (*rest[:{key}], {name}, *rest[{key}:])""",
    "named tuple": """    rest = [{{k: v for k, v in sample._asdict().items() if k != '{key}'}} for sample in batch]
    return type(batch[0])(**torch.utils.data.default_collate(rest), {key}={name})""",
    "nested": """    return {name}   # and the other entries, each by torch.utils.data.default_collate""",
    "": """    return {name}""",
}
"""Code that collates the other entries of a sample."""


def _padded(facts: CollateMismatch, *, tensors: bool) -> Fix:
    """A collate function that pads this entry and collates the rest with torch's own."""
    name = _variable(facts)
    both = zip(facts.odd_shape or (), facts.usual_shape or ())
    axes = [axis for axis, (odd, usual) in enumerate(both) if odd != usual]
    if tensors and axes and axes != [0]:
        return _padded_along(facts, axes)
    if facts.worker and not facts.entry:
        title = "Pad to the longest of the batch where the collate_fn stacks."
        return Fix(title, f"{name} = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)   # a list of tensors")
    value = f"sample{facts.entry}" if tensors else f"torch.as_tensor(sample{facts.entry})"
    lines = [
        "def collate(batch):",
        f"    {name} = torch.nn.utils.rnn.pad_sequence([{value} for sample in batch], batch_first=True)",
        *REST[facts.sample].format(name=name, key=facts.name).splitlines(),
    ]
    title = "Pad to the longest of the batch, with this collate function."
    code = "\n".join([*lines, "", _loader(facts)])
    return Fix(title, code, True if facts.tried and tensors else None, facts.tried or {} if tensors else {})


def _padded_along(facts: CollateMismatch, axes: list[int]) -> Fix:
    """Padding along axes after the first, which pad_sequence does not pad."""
    name, axis = _variable(facts), axes[0]
    values = "tensors" if facts.worker and not facts.entry else f"[sample{facts.entry} for sample in batch]"
    behind = "0, 0, " * (len(facts.odd_shape or ()) - 1 - axis)
    code = [
        f"longest = max(t.shape[{axis}] for t in {name})",
        f"{name} = torch.stack([torch.nn.functional.pad(t, ({behind}0, longest - t.shape[{axis}]))",
        f"{' ' * len(name)}                     for t in {name}])",
    ]
    if len(axes) > 1:
        code = [
            f"longest = [max(sides) for sides in zip(*(t.shape for t in {name}))]",
            f"{name} = torch.stack([torch.nn.functional.pad(",
            "    t, [n for side, has in zip(longest[::-1], t.shape[::-1]) for n in (0, side - has)])",
            f"    for t in {name}])",
        ]
    code = [f"{name} = {values}", *code]
    verified, tried = True if facts.tried and len(axes) == 1 else None, facts.tried or {}
    if facts.worker and not facts.entry:
        title = "Pad to the longest of the batch where the collate_fn stacks a list of tensors."
        return Fix(title, "\n".join(code), verified, tried)
    lines = [
        "def collate(batch):",
        *(f"    {line}" for line in code),
        *REST[facts.sample].format(name=name, key=facts.name).splitlines(),
    ]
    title = "Pad to the longest of the batch, with this collate function."
    return Fix(title, "\n".join([*lines, "", _loader(facts)]), verified, tried)


def _loader(facts: CollateMismatch) -> str:
    if facts.trainer and not facts.loader:
        return f"{facts.trainer}.data_collator = collate"
    source = facts.dataset or "dataset"
    return f"{facts.loader or 'loader'} = DataLoader({source}, ..., collate_fn=collate)"


def _as_tensor_code(facts: CollateMismatch) -> str:
    name = _variable(facts)
    if "ndarray" in facts.odd or "object" in facts.odd or "NumPy" in facts.odd:
        return f"{name} = torch.as_tensor({name}.astype('float32'))"
    if "sparse" in facts.odd:
        return f"{name} = {name}.to_dense()"
    if "Image" in facts.odd:
        return (
            f"{name} = torch.from_numpy(numpy.array({name}.convert('RGB'))).permute(2, 0, 1) / 255   "
            "# or torchvision's ToTensor()"
        )
    return f"{name} = torch.as_tensor({name}, dtype=torch.float32)"


def _variable(facts: CollateMismatch) -> str:
    if facts.name.isidentifier():
        return facts.name
    return facts.entries[0] if len(facts.entries) == 1 and facts.entries[0].isidentifier() else "item"


ROOM = 2 << 30
"""Shared memory below which a few workers with images run out of it: Docker's default is 64 MiB, torch's README
recommends --ipc=host or --shm-size."""


@rule(
    code="error/loader-worker-died",
    title="A worker of the DataLoader ended, could not start, or did not respond.",
    symptom="DataLoader worker (pid …) is killed by signal, or exited unexpectedly; Bus error; can't pickle …; too "
    "many open files; DataLoader timed out; an attempt to start a new process before the bootstrapping phase.",
    cause="The system ended it (memory or shared memory ran out), a library in it crashed, or it could not start: with "
    "spawn, everything that a worker needs is pickled, and the main file is imported again.",
    confirm="`num_workers=0` runs the same code in this process and shows the true error. `df -h /dev/shm` and `dmesg` "
    "show what ran out.",
    fix="Use fewer workers or more shared memory (`docker run --shm-size=8g`); keep objects that can't be pickled, and "
    "CUDA, out of the data set; put the script under `if __name__ == '__main__':`.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_worker_died(facts: Any) -> Finding | None:
    if not isinstance(facts, WorkerDied):
        return None
    where = dataclasses.replace(facts.raised.where, phase="input", module=None, module_type=None)
    return Finding(
        "error/loader-worker-died", _worker_title(facts), where, _worker_evidence(facts), tuple(_worker_fixes(facts))
    )


def _worker_title(facts: WorkerDied) -> str:
    loader = f"`{facts.loader}`" if facts.loader else "the loader"
    workers = f" (`num_workers={facts.workers}`)" if facts.workers else ""
    if facts.what == "killed":
        return f"The system killed a worker of {loader}{workers}, usually because memory ran out."
    if facts.what == "shared memory":
        total = f" of {size(facts.shared_total)}" if facts.shared_total else ""
        return f"A worker of {loader}{workers} ran out of shared memory{total}, which passes batches between processes."
    if facts.what == "crashed":
        return f"A worker of {loader}{workers} crashed ({facts.signal}) in a library that the data set calls."
    if facts.what == "timeout":
        after = f" within {facts.timeout:g} s" if facts.timeout else ""
        return f"No worker of {loader}{workers} returned a batch{after}: a sample takes too long, or a worker hangs."
    if facts.what == "bootstrap":
        return (
            "Each worker imports your file again, and that starts the training again, because it is not under "
            "`if __name__ == '__main__':`."
        )
    if facts.what == "not picklable":
        guilty = f"`{facts.unpicklable}` is {facts.unpicklable_is}" if facts.unpicklable else "it contains an object"
        return f"The data set can't be sent to the workers of {loader}: {guilty}, which can't be pickled."
    if facts.what == "open files":
        limit = f" (the limit is {facts.files:,})" if facts.files else ""
        return (
            f"The workers of {loader}{workers} keep too many files open{limit}: each tensor that they send needs one."
        )
    if facts.what == "cuda after fork":
        return f"The data set of {loader}{workers} uses CUDA, which does not work in a forked worker."
    return _exited(facts, loader, workers)


def _exited(facts: WorkerDied, loader: str, workers: str) -> str:
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return (
            f"The workers of {loader} are new processes ({facts.start}) without `{facts.dataset}`, which is defined in "
            "a cell of the notebook."
        )
    how = f" ({facts.signal})" if facts.signal else ""
    killed = "" if facts.signal else "the system killed it (usually because memory ran out), "
    return f"A worker of {loader}{workers} ended{how} without a Python error: {killed}a library crashed, or it exited."


def _worker_evidence(facts: WorkerDied) -> dict[str, Any]:
    evidence = {
        "ended by": facts.signal or None,
        "loader": facts.loader or None,
        "data set": facts.dataset or None,
        "workers": facts.workers,
        "batches prefetched by each": facts.prefetch,
        "start method": facts.start or None,
        "can't be pickled": facts.unpicklable or None,
        "shared memory": _of(facts.shared_total, facts.shared_free),
        "memory free now": size(facts.memory_free) if facts.memory_free is not None else None,
        "tensors and arrays of the data set": size(facts.dataset_bytes) if facts.dataset_bytes else None,
        "Python objects in its lists": facts.items,
        "timeout": facts.timeout,
        "open files allowed": facts.files if facts.what == "open files" else None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _of(total: int | None, free: int | None) -> str | None:
    return None if total is None or free is None else f"{size(total)}, {size(free)} free now"


def _worker_fixes(facts: WorkerDied) -> list[Fix]:
    loader = facts.loader or "loader"
    title = "Run it once without workers: the same code in this process shows the real error."
    apart = Fix(title, f"{loader} = DataLoader(..., num_workers=0)")
    fewer = apart
    if facts.workers != 1:
        code = f"{loader} = DataLoader(..., num_workers={(facts.workers or 4) // 2}, prefetch_factor=1)"
        fewer = Fix("Use fewer workers, and prefetch fewer batches.", code)
    if facts.what == "shared memory":
        small = facts.shared_total is not None and facts.shared_total < ROOM
        more = Fix(
            f"Increase the shared memory{' (the default of Docker is 64 MiB)' if small else ''}, or pass batches "
            "through files.",
            "docker run --shm-size=8g ...\n# or, before the loader is created:\n"
            "torch.multiprocessing.set_sharing_strategy('file_system')",
        )
        return [more, fewer]
    if facts.what == "killed":
        title = (
            "Keep the samples in arrays or tensors, not in lists of Python objects: reading a list copies "
            "its memory in each worker."
        )
        return [fewer, Fix(title, "self.paths = numpy.array(paths)   # in the data set's __init__")]
    if facts.what == "not picklable":
        return [_picklable(facts)]
    if facts.what == "bootstrap":
        title = "Start the training only when the file is run, not when it is imported."
        return [Fix(title, "if __name__ == '__main__':\n    main()")]
    if facts.what == "open files":
        title = "Share tensors by file name instead of by open file."
        return [
            Fix(title, "torch.multiprocessing.set_sharing_strategy('file_system')   # or: ulimit -n 65536"),
            Fix("Clone batches of the loader before you keep them in a list.", "batches.append(batch.clone())"),
        ]
    if facts.what == "cuda after fork":
        title = "Keep the data set on the CPU, and move each batch in the loop."
        return [
            Fix(title, "batch = batch.to('cuda', non_blocking=True)"),
            Fix("Or start the workers with spawn.", f"{loader} = DataLoader(..., multiprocessing_context='spawn')"),
        ]
    if facts.what == "timeout":
        title = "If samples are only slow: wait longer."
        return [apart, Fix(title, f"{loader} = DataLoader(..., timeout={int((facts.timeout or 30) * 4)})")]
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return [Fix("Move the data set's class to a file, and import it.", f"from data import {facts.dataset}"), apart]
    return [apart] if fewer is apart else [apart, fewer]


def _picklable(facts: WorkerDied) -> Fix:
    name = facts.unpicklable.rpartition(".")[2] or "transform"
    if "lambda" in facts.unpicklable_is or "function" in facts.unpicklable_is:
        code = f"def {name}(...):   # at the top level of a file\n    ..."
        return Fix(f"Define `{name}` at the top level of a file (or use a functools.partial of such a function).", code)
    title = f"Open `{name}` in the worker, when it is first needed."
    return Fix(title, f"if self.{name} is None:   # in __getitem__\n    self.{name} = ...")
