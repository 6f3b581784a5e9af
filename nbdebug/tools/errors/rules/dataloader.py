"""What the samples of a batch that could not be put together show: at which entry they differ, and which is odd."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import size
from nbdebug.tools.errors.facts import Raised


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


@dataclasses.dataclass(frozen=True)
class WorkerDied:
    """what: "killed" (by the system), "shared memory", "crashed" (a signal), "exited", "timeout", "bootstrap" (no main
    guard), "not picklable", "open files", "cuda after fork".

    signal: its name. workers, prefetch, timeout: of the loader. start: how its processes start ("fork", "spawn").
    shared_total, shared_free, memory_free, dataset_bytes: in bytes; dataset_bytes counts tensors and arrays, items the
    Python objects in its lists. unpicklable: by the user's name ("dataset.transform"), and what it is. in_notebook: the
    data set's class, or the function, is defined in a cell. files: how many a process may open.
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
    title="The samples of a batch do not fit together.",
    symptom="stack expects each tensor to be equal size; each element in list of batch should be of equal size; "
    "default_collate: batch must contain tensors, …; a KeyError inside the loader. With batch_size=1 it runs.",
    cause="The loader stacks the samples entry by entry. One has another size (a portrait among landscapes, a longer "
    "text, a grey picture), another type, lacks a key, or is None because a file could not be read.",
    confirm="`[sample['image'].shape for sample in (dataset[i] for i in range(8))]`.",
    fix="Bring every sample to one size in `__getitem__` (resize, crop, convert), or give the loader a `collate_fn` "
    "that "
    "pads or drops.",
    reference="https://docs.pytorch.org/docs/stable/data.html#working-with-collate-fn",
)
def collate_mismatch(facts: Any) -> Finding | None:
    if not isinstance(facts, CollateMismatch):
        return None
    return Finding(
        "error/collate-mismatch",
        _title(facts),
        _where(facts),
        _evidence(facts),
        tuple(_fixes(facts)),
        tuple(_chain(facts)),
    )


def _where(facts: CollateMismatch) -> Where:
    return dataclasses.replace(facts.raised.where, phase="input", module=None, module_type=None)


def _title(facts: CollateMismatch) -> str:
    who, entry = _who(facts), f"`{facts.name or facts.entry or 'sample'}`"
    entry = f"entry {entry}" if facts.name.isdigit() else entry
    if facts.what == "shape" and facts.odd and _two(facts):
        places = facts.indices or facts.positions
        source = f"`{facts.dataset}`" if facts.indices and facts.dataset else _batch(facts)
        return (
            f"Samples {places[0]} and {places[1]} of {source} have tensors of {facts.usual} and {facts.odd}: they "
            "can't be stacked into one batch."
        )
    if facts.what == "shape" and facts.odd:
        has = f"has {entry} of" if facts.entry else "has a tensor of" if facts.worker else "is"
        return f"{who} {has} {facts.odd}, where the others have {facts.usual}: they can't be stacked into one batch."
    if facts.what == "keys":
        lacking = ", ".join(f"`{key}`" for key in facts.lacking)
        return f"{who} has no {lacking}, which {'another' if facts.worker else 'the first'} sample of its batch has."
    if facts.what == "none" and not facts.entry and not facts.worker:
        return f"{who} is None: `__getitem__` returned nothing."
    if facts.what in ("none", "type") and facts.usual:
        return f"{who} has {facts.odd} as {entry} where the others have {facts.usual}."
    if facts.what in ("none", "unsupported"):
        many = "Every sample of the batch" if not facts.worker else "A sample"
        if facts.what == "none" and facts.worker and not facts.entry:
            return f"{who} is, or holds, None: nothing to put into a batch."
        place = f" as {entry}" if facts.entry else ""
        return f"{many} has {facts.odd}{place}: the loader stacks tensors, arrays and numbers, and no such object."
    if facts.what == "length" and facts.odd:
        return f"{who} has {facts.odd} as {entry}, the others have {facts.usual}: lists of one length are needed."
    return f"The samples of {_batch(facts)} differ in size, and can't be put together."


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
        "kept in": facts.held_at or None,
        "entries of a sample": ", ".join(facts.entries) or None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _chain(facts: CollateMismatch) -> list[Link]:
    links = []
    if facts.batch is not None and facts.rows and not _two(facts) and 0 < len(facts.positions) < facts.rows:
        links += [
            Link(
                f"{_batch(facts)[:1].upper()}{_batch(facts)[1:]} has {facts.rows} samples; position"
                f"{'s' * (len(facts.positions) > 1)} {', '.join(map(str, facts.positions[:8]))} differ"
                f"{'s' * (len(facts.positions) == 1)}"
            )
        ]
    if facts.own:
        links += [Link(f"`{facts.own}`, the loader's collate_fn, puts the batch together")]
    odd, usual = facts.odd_shape, facts.usual_shape
    if odd and usual and len(odd) > 1 and odd != usual and odd[:-2] == usual[:-2] and odd[-2:] == usual[-2:][::-1]:
        links += [Link("its two sides are swapped: a portrait among landscapes, or a picture turned by its EXIF mark")]
    return links


# -- what to do ----------------------------------------------------------------------------------------------------


def _fixes(facts: CollateMismatch) -> list[Fix]:
    if not facts.worker:
        return _cures(facts)
    apart = Fix(
        "Run it once without workers: the samples are then at hand, and the entry is named.",
        f"{facts.loader or 'loader'} = DataLoader({facts.dataset or 'dataset'}, ..., num_workers=0)",
    )
    return [*_cures(facts), apart] if facts.odd or facts.lacking else [apart]


def _cures(facts: CollateMismatch) -> list[Fix]:
    if facts.what == "shape" and facts.odd_shape is not None and facts.usual_shape is not None:
        return _for_shapes(facts, facts.odd_shape, facts.usual_shape)
    if facts.what == "keys":
        return [
            Fix(
                "Give every sample the same keys, with a value that says that there is none.",
                "\n".join(f"sample.setdefault({key!r}, ...)   # in __getitem__" for key in facts.lacking),
            )
        ]
    if facts.what == "none":
        return [
            Fix(
                "Drop the samples that could not be read.",
                "def collate(batch):\n    batch = [sample for sample in batch if sample is not None]\n"
                f"    return torch.utils.data.default_collate(batch)\n\n{_loader(facts)}",
            )
        ]
    if facts.what == "unsupported":
        return [Fix("Make a tensor of it in `__getitem__`.", _as_tensor_code(facts))]
    if facts.what == "length" or facts.odd == "":
        return [_padded(facts, tensors=False)]
    return [
        Fix(
            "Return the same type from `__getitem__` for every sample.",
            f"{_variable(facts)} = torch.as_tensor({_variable(facts)})   # in __getitem__",
        )
    ]


def _for_shapes(facts: CollateMismatch, odd: tuple[int, ...], usual: tuple[int, ...]) -> list[Fix]:
    name = _variable(facts)
    verified = True if facts.tried else None
    if len(odd) != len(usual):
        return [
            Fix(
                "Give every sample the same number of axes in `__getitem__`.",
                f"{name} = {name}.reshape({', '.join(map(str, usual))})"
                if _count(odd) == _count(usual)
                else f"{name} = {name}.squeeze()   # or {name}[None], until all have {len(usual)} axes",
            )
        ]
    if len(usual) >= 3 and odd[:-2] == usual[:-2]:
        return [
            Fix(
                "Bring every sample to one size in `__getitem__`.",
                f"{name} = torch.nn.functional.interpolate({name}[None], size={usual[-2:]})[0]",
                verified,
                facts.tried or {},
            )
        ]
    if len(usual) == 3 and odd[1:] == usual[1:] and {odd[0], usual[0]} <= {1, 2, 3, 4}:
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(usual[0], "RGB")
        return [
            Fix(
                "Open every picture with the same number of channels.",
                f"picture = PIL.Image.open(path).convert({mode!r})   # in __getitem__",
            )
        ]
    return [_padded(facts, tensors=True)]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


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
"""What becomes of the other entries of a sample."""


def _padded(facts: CollateMismatch, *, tensors: bool) -> Fix:
    """A collate function that pads this entry, and leaves the rest to torch's own."""
    name = _variable(facts)
    both = zip(facts.odd_shape or (), facts.usual_shape or ())
    axes = [axis for axis, (odd, usual) in enumerate(both) if odd != usual]
    if tensors and axes and axes != [0]:
        return _padded_along(facts, axes)
    if facts.worker and not facts.entry:
        return Fix(
            "Pad to the longest of the batch where the loader's collate_fn stacks.",
            f"{name} = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)   # a list of tensors",
        )
    value = f"sample{facts.entry}" if tensors else f"torch.as_tensor(sample{facts.entry})"
    lines = [
        "def collate(batch):",
        f"    {name} = torch.nn.utils.rnn.pad_sequence([{value} for sample in batch], batch_first=True)",
        *REST[facts.sample].format(name=name, key=facts.name).splitlines(),
    ]
    return Fix(
        "Pad to the longest of the batch, and give the loader this function.",
        "\n".join([*lines, "", _loader(facts)]),
        True if facts.tried and tensors else None,
        facts.tried or {} if tensors else {},
    )


def _padded_along(facts: CollateMismatch, axes: list[int]) -> Fix:
    """Padding along axes behind the first, which pad_sequence leaves as they are."""
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
        return Fix(
            "Pad to the longest of the batch where the loader's collate_fn stacks a list of tensors.",
            "\n".join(code),
            verified,
            tried,
        )
    lines = [
        "def collate(batch):",
        *(f"    {line}" for line in code),
        *REST[facts.sample].format(name=name, key=facts.name).splitlines(),
    ]
    return Fix(
        "Pad to the longest of the batch, and give the loader this function.",
        "\n".join([*lines, "", _loader(facts)]),
        verified,
        tried,
    )


def _loader(facts: CollateMismatch) -> str:
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
"""Shared memory below which a few workers with pictures run out of it: Docker gives 64 MiB, torch's README asks for
--ipc=host or a --shm-size."""


@rule(
    code="error/loader-worker-died",
    title="A worker of the DataLoader died, could not start, or did not answer.",
    symptom="DataLoader worker (pid …) is killed by signal, or exited unexpectedly; Bus error; can't pickle …; too "
    "many "
    "open files; DataLoader timed out; an attempt to start a new process before the bootstrapping phase.",
    cause="The machine ended it (memory, or shared memory, ran out), a library in it crashed, or it could not be "
    "started: "
    "under spawn everything that a worker needs is pickled, and the main file is imported again.",
    confirm="`num_workers=0` runs the same code in this process and shows the true error. `df -h /dev/shm` and `dmesg` "
    "show what ran out.",
    fix="Fewer workers; more shared memory (`docker run --shm-size=8g`); nothing in the data set that can't be "
    "pickled; "
    "`if __name__ == '__main__':` around the script; no CUDA inside of the data set.",
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
    count = f" (`num_workers={facts.workers}`)" if facts.workers else ""
    if facts.what == "killed":
        return f"The system killed a worker of {loader}{count}: as a rule because the machine's memory ran out."
    if facts.what == "shared memory":
        total = f" of {size(facts.shared_total)}" if facts.shared_total else ""
        return (
            f"A worker of {loader}{count} found no room in shared memory{total}, through which batches are handed over."
        )
    if facts.what == "crashed":
        return (
            f"A worker of {loader}{count} crashed ({facts.signal}): in a library that the data set calls, not in "
            f"Python."
        )
    if facts.what == "timeout":
        after = f" within {facts.timeout:g} s" if facts.timeout else ""
        return f"No worker of {loader}{count} gave a batch{after}: a sample takes too long, or a worker hangs."
    if facts.what == "bootstrap":
        return (
            "The workers are started by importing your file again, and its training starts again with that: it "
            "stands "
            "outside `if __name__ == '__main__':`."
        )
    if facts.what == "not picklable":
        guilty = (
            f"`{facts.unpicklable}` is {facts.unpicklable_is}" if facts.unpicklable else "the data set holds something"
        )
        return f"The workers of {loader} can't be sent the data set: {guilty}, which can't be pickled."
    if facts.what == "open files":
        limit = f" ({facts.files} are allowed)" if facts.files else ""
        return f"The workers of {loader}{count} keep too many files open{limit}: each tensor they hand over holds one."
    if facts.what == "cuda after fork":
        return f"The data set of {loader}{count} uses CUDA, which a forked worker can't."
    return _exited(facts, loader, count)


def _exited(facts: WorkerDied, loader: str, count: str) -> str:
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return (
            f"The workers of {loader} start afresh ({facts.start}) and don't find `{facts.dataset}`, which is "
            f"defined "
            "in a cell of the notebook."
        )
    how = f" ({facts.signal})" if facts.signal else ""
    why = (
        "a crash in a library, or an exit"
        if facts.signal
        else ("killed by the system (as a rule because memory ran out), a crash in a library, or an exit")
    )
    return f"A worker of {loader}{count} ended{how} without an error of Python's: {why}."


def _worker_evidence(facts: WorkerDied) -> dict[str, Any]:
    evidence = {
        "ended by": facts.signal or None,
        "loader": facts.loader or None,
        "data set": facts.dataset or None,
        "workers": facts.workers,
        "batches made in advance, by each": facts.prefetch,
        "processes start by": facts.start or None,
        "can't be pickled": facts.unpicklable or None,
        "shared memory": _of(facts.shared_total, facts.shared_free),
        "memory free now": size(facts.memory_free) if facts.memory_free is not None else None,
        "tensors and arrays of the data set": size(facts.dataset_bytes) if facts.dataset_bytes else None,
        "Python objects in its lists": facts.items,
        "timeout": facts.timeout,
        "files a process may open": facts.files if facts.what == "open files" else None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _of(total: int | None, free: int | None) -> str | None:
    return None if total is None or free is None else f"{size(total)}, {size(free)} free now"


def _worker_fixes(facts: WorkerDied) -> list[Fix]:
    loader = facts.loader or "loader"
    apart = Fix(
        "Run it once without workers: the same code, in this process, with its true error.",
        f"{loader} = DataLoader(..., num_workers=0)",
    )
    fewer = (
        apart
        if facts.workers == 1
        else Fix(
            "Fewer workers, and fewer batches in advance.",
            f"{loader} = DataLoader(..., num_workers={(facts.workers or 4) // 2}, prefetch_factor=1)",
        )
    )
    if facts.what == "shared memory":
        small = facts.shared_total is not None and facts.shared_total < ROOM
        more = Fix(
            f"Give the machine more shared memory{' (Docker gives 64 MiB by itself)' if small else ''}, or hand "
            "the batches over through files.",
            "docker run --shm-size=8g ...\n# or, before the loader is made:\n"
            "torch.multiprocessing.set_sharing_strategy('file_system')",
        )
        return [more, fewer]
    if facts.what == "killed":
        return [
            fewer,
            Fix(
                "Keep the samples in arrays or tensors, not in lists of Python objects: each worker's copy "
                "of a list grows as it is read.",
                "self.paths = numpy.array(paths)   # in the data set's __init__",
            ),
        ]
    if facts.what == "not picklable":
        return [_picklable(facts)]
    if facts.what == "bootstrap":
        return [
            Fix(
                "Start the training only where the file is run, not where it is imported.",
                "if __name__ == '__main__':\n    main()",
            )
        ]
    if facts.what == "open files":
        return [
            Fix(
                "Hand tensors over by name instead of by open file.",
                "torch.multiprocessing.set_sharing_strategy('file_system')   # or: ulimit -n 65536",
            ),
            Fix("Don't keep batches of the loader in a list as they are.", "kept.append(batch.clone())"),
        ]
    if facts.what == "cuda after fork":
        return [
            Fix(
                "Keep the data set on the CPU, and move each batch in the loop.",
                "batch = batch.to('cuda', non_blocking=True)",
            ),
            Fix("Or start the workers afresh.", f"{loader} = DataLoader(..., multiprocessing_context='spawn')"),
        ]
    if facts.what == "timeout":
        return [
            apart,
            Fix(
                "Where samples are merely slow: wait longer.",
                f"{loader} = DataLoader(..., timeout={int((facts.timeout or 30) * 4)})",
            ),
        ]
    if facts.in_notebook and facts.start in ("spawn", "forkserver"):
        return [Fix("Put the data set's class into a file, and import it.", f"from data import {facts.dataset}"), apart]
    return [apart] if fewer is apart else [apart, fewer]


def _picklable(facts: WorkerDied) -> Fix:
    name = facts.unpicklable.rpartition(".")[2] or "transform"
    if "lambda" in facts.unpicklable_is or "function" in facts.unpicklable_is:
        code = f"def {name}(...):   # at the top level of a file\n    ..."
        return Fix(f"Make `{name}` a function at the top level of a file (or a functools.partial of one).", code)
    return Fix(
        f"Open `{name}` inside of the worker, when it is first needed.",
        f"if self.{name} is None:   # in __getitem__\n    self.{name} = ...",
    )
