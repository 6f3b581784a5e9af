"""check_loader(): what is wrong with the stream that a loader makes of a data set. Two passes are watched, in a copy of
the process: no row is taken from the user's own stream, and no random number is drawn."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import time
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from nbdebug.observe.items import loader_like
from nbdebug.observe.snapshot import own_random_numbers
from nbdebug.observe.step_hooks import BatchHook
from nbdebug.process import CopyFailed, NeedsGpu, can_fork, in_copy
from nbdebug.report import Report, RuledOut, Table
from nbdebug.text import count, figures, in_a_line, listed, percent, size
from nbdebug.tools.data.cures import DataFacts, Problem
from nbdebug.tools.data.expectation import DataExpectation
from nbdebug.tools.data.rows import TORCH_IGNORES, Row, array
from nbdebug.tools.data.rules import STREAM

STEPS, SECONDS = 200, 60.0
"""Batches of a pass that are watched, and the time for all of it."""
SKIPS = "skip_samples skip num_skip skip_first skip_batches skip_steps start_index start_at resume_from".split()
"""Names of what a data set leaves out when a run goes on."""
TOLD, ITEMS = 20_000, 32
"""Batches of a sampler, or rows of a stream, by which ranks are compared, and items of a set."""
REPLICAS, OWN_RANK = ("num_replicas", "world_size", "num_processes"), {"rank", "process_index"}
"""Names under which samplers and data sets keep how many ranks there are, and which of them they are for."""
COLLECTIVES = "broadcast broadcast_object_list scatter reduce all_reduce all_gather all_gather_object barrier".split()
CALLS = itertools.count()
Share = tuple[int, bool, list[str]]
"""What one rank has in a pass: batches, whether that is all, and what tells its rows from others."""


def check_loader(
    loader: Any,
    *,
    epochs: int | None = None,
    max_steps: int | None = None,
    resume_at: int | None = None,
    ranks: int = 1,
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> Report:
    """Find what is wrong with the batches of a loader: streams that end, rows that come twice, workers, ranks, resumes.

    loader: a DataLoader, or anything that is iterated. epochs, max_steps: of the planned training. resume_at: the step
    at which a run would go on; the data set's `skip_samples` (or the like) is then tried. ranks: so many processes
    would each make this loader: it is read as each of them; in a process group of so many all ask, and each says what
    it read. steps: batches of a pass that are watched (default: 200, or max_steps); seconds: for all of it.

    Two passes are read in a copy of the process (a fork, with files of its own), so that your iterators, generators,
    workers and random numbers stay as they are, also where a stream can't be rewound. Where there can be no copy
    (no fork, rows on a GPU), a stream is not read, and other loaders are read here.

    Raises TypeError for what can't be iterated, ValueError for numbers below 1."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"check_loader takes a DataLoader, or what can be iterated; got {type(loader).__name__}")
    for name, number in (("epochs", epochs), ("max_steps", max_steps), ("ranks", ranks), ("steps", steps)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} takes a whole number from 1 on; got {number!r}")
    watch = LoaderPasses(loader, epochs, max_steps, resume_at, ranks, max(steps, max_steps or 0), seconds)
    try:
        if not can_fork():
            raise NeedsGpu  # or there is no fork at all: it is read here
        vars(watch).update(in_copy(watch.run, seconds + 30))
    except NeedsGpu:
        if any(hasattr(type(source), "__next__") for source in (loader, watch.dataset)):  # an iterator
            watch.unchecked.append("the batches: a stream can only be read once, and there can be no copy")
        else:
            with own_random_numbers(loader):
                watch.run(copied=False)
    except CopyFailed as error:
        watch.unchecked.append(f"the batches: {error}")
    if watch.shares:
        watch.compare_ranks()
    return watch.report()


class Indices(list[Any]):
    """The log of a BatchHook: the indices that samplers give to loaders, a list for each batch. Streams have none."""

    def index(self, iterator: Any, index: Any) -> None:  # type: ignore[override]
        if None not in _flat([index]):
            self.append(list(index) if isinstance(index, (list, tuple)) else index)  # a sampler may fill one list again

    def batch(self, iterator: Any, batch: Any) -> None:
        pass


@dataclasses.dataclass
class Pass:
    """One reading of the loader. digests: of each row; ended: the end was reached."""

    batches: int = 0
    digests: list[bytes] = dataclasses.field(default_factory=list)
    indices: Indices = dataclasses.field(default_factory=Indices)
    ended: bool = False
    error: Exception | None = None
    bytes: int = 0
    padding: tuple[int, int] = (0, 0)


@dataclasses.dataclass
class LoaderPasses:
    """The loader and the plan; `run` reads it, in the copy."""

    loader: Any
    epochs: int | None
    max_steps: int | None
    resume_at: int | None
    ranks: int
    steps: int
    seconds: float

    def __post_init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.unchecked: list[str] = []
        self.passes: list[tuple[int, int, bool]] = []  # batches, rows, whether the end was reached
        self.shares: list[Share] = []  # of each rank; of the own one alone in a process group
        self.group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        self.rows: int | None = None
        self.dataset: Any = getattr(self.loader, "dataset", None)
        self.workers = int(getattr(self.loader, "num_workers", 0) or 0)
        source = self.loader if self.dataset is None else self.dataset
        with contextlib.suppress(Exception):  # a stream has no length, or says so in its own way
            self.rows = len(self.loader.dataset)
        # rows come one after the other, with no number of their own
        self.streams = not hasattr(type(source), "__getitem__") or isinstance(source, IterableDataset)

    def problem(self, code: str, sentence: str, item: str = "loader") -> None:
        self.problems.append(Problem(code if "/" in code else f"data/{code}", item, sentence))

    def run(self, copied: bool = True) -> dict[str, Any]:
        """What is found, for `in_copy`."""
        self.deadline = time.monotonic() + self.seconds
        simulated = as_rank(0, self.ranks) if self.ranks > 1 > self.group else contextlib.nullcontext()
        with without_others() if self.group and copied else simulated:
            if copied:
                with contextlib.suppress(AttributeError):
                    self.loader._iterator = None  # its workers are the original's
            first = self.read(note=True)
            self._set_epoch(1)
            second = self.read()
            if first.error is None:
                self._ends(first, second)
                self._order(first, second)
                self._shares(first)
            else:
                self._failure(first)
            for check in (self._workers, self._random, self._resume, self._ranks) if first.error is None else ():
                if time.monotonic() > self.deadline:
                    self.unchecked.append(f"{check.__name__.strip('_')}: the time was over ({self.seconds:g} s)")
                else:
                    check(first)
        return {name: getattr(self, name) for name in ("problems", "notes", "unchecked", "passes", "shares")}

    def read(self, loader: Any = None, note: bool = False) -> Pass:
        """One pass, bounded in batches and in time. note: look into the batches, too."""
        result, hook = Pass(), BatchHook(lambda begins: None)
        hook.log = result.indices
        hook.attach()
        try:
            for batch in self.loader if loader is None else loader:
                result.digests += row_digests(batch)
                if note:
                    self._batch(batch, result)
                result.batches += 1
                if result.batches >= self.steps or time.monotonic() > self.deadline:
                    break
            else:
                result.ended = True
        except CopyFailed:
            raise
        except Exception as error:  # the user's own: a finding
            result.error = error
        finally:
            hook.detach()
        self.passes.append((result.batches, len(result.digests), result.ended))
        return result

    def _batch(self, batch: Any, result: Pass) -> None:
        """NaN rows, no labels, padding, bytes."""
        step, row = result.batches, Row(batch, DataExpectation())
        columns = [column for name, value in row.fields.items() for column in _columns(value, name)]
        result.bytes = result.bytes or sum(getattr(column, "nbytes", 0) for _, column in columns)
        indices: Any = result.indices[step] if step < len(result.indices) else None
        for name, column in columns if len(self.problems) < 100 else ():
            for r in [r for r, value in enumerate(column) if not _is_finite(value)][:8]:
                item = f"batch {step}, row {r}" if indices is None else f"item {indices[r]}"
                sentence = f"Row {r} of batch {step} is not finite in `{name}`"
                self.problem("nonfinite-values", sentence + ("" if indices is None else f" ({item})"), item)
        labels = array(row.label)
        if labels is not None and labels.ndim and labels.dtype.kind in "iu" and (labels == TORCH_IGNORES).all():
            what = "no label at all" if not labels.size else "every label is -100, which the loss passes over"
            sentence = f"batch {step}: {what}, and the mean over no label is nan"
            self.problem("batch-without-labels", sentence, f"batch {step}")
        mask = array(row.fields.get("attention_mask"))
        if mask is not None and mask.ndim == 2:
            result.padding = (result.padding[0] + int((mask == 0).sum()), result.padding[1] + mask.size)

    def _failure(self, first: Pass) -> None:
        """The batch that can't be made, and the item of it that fails by itself."""
        last, culprit = first.indices[min(first.batches, len(first.indices) - 1)] if first.indices else [], ""
        for index in [] if self.streams else _flat([last]):
            try:
                self.loader.dataset[index]
            except Exception as error:
                culprit = f"; item {index} can't be made: {in_a_line(error)}"
                break
        message = str(first.error).splitlines()[-1:] if self.workers else []
        reason = message[0] if message and ":" in message[0] else in_a_line(first.error or Exception())
        self.problem("batch-fails", f"batch {first.batches} can't be made: {reason}{culprit}", f"batch {first.batches}")

    def _ends(self, first: Pass, second: Pass) -> None:
        n, batch_size = self.rows, getattr(self.loader, "batch_size", None)
        if not first.batches:
            why = "there is no row" if n == 0 else "it gives no batch"
            if getattr(self.loader, "drop_last", False) and n and batch_size:
                why = f"drop_last leaves out the only batch: {count(n, 'row')}, and a batch has {batch_size:,}"
            self.problem("no-batches", f"The loader gives nothing in an epoch: {why}")
            return
        batches = count(first.batches, "batch", "batches")
        once = first.ended and (not second.batches or second.batches < first.batches and second.ended and self.streams)
        if once:
            left = count(second.batches, "batch", "batches") if second.batches else "nothing"
            planned = self.epochs is None or self.epochs > 1
            if planned and (self.max_steps is None or first.batches < self.max_steps):
                self.problem("one-shot", f"The stream can be read once: {batches} in epoch 1, {left} in epoch 2")
        elif self.max_steps is not None and first.ended:
            passes = self.epochs or (1 if self.streams else None)
            there = first.batches * (passes or 1)
            if passes is not None and there < self.max_steps:
                data = f"{count(passes, 'epoch')} of {batches}"
                self.problem("exhausted", f"{self.max_steps:,} steps are planned, and there are {there:,}: {data}")
            elif there < self.max_steps:
                self.notes.append(f"{self.max_steps:,} steps take {figures(self.max_steps / first.batches)} epochs.")
        last = len(first.digests) % batch_size if isinstance(batch_size, int) and first.ended else 0
        if getattr(self.loader, "drop_last", False) and n and batch_size and n % batch_size > 0.2 * n:
            self.notes.append(f"drop_last leaves out {n % batch_size:,} of {n:,} rows in each epoch.")
        elif last == 1 and not self.streams:
            self.notes.append("The last batch has one row: BatchNorm refuses it in training.")

    def _order(self, first: Pass, second: Pass) -> None:
        """Shuffled, and the same in each epoch."""
        order, again = _flat(first.indices), _flat(second.indices)
        sampler = (_samplers(self.loader) or [None])[-1]
        shuffles = any(hasattr(sampler, name) for name in ("set_epoch", "seed", "generator", "rng", "shuffle"))
        if len(order) < 16 or order != again or not shuffles or not all(isinstance(i, int) for i in order):
            return
        rising = sum(b > a for a, b in itertools.pairwise(order)) / (len(order) - 1)
        if 0.3 < rising < 0.7 and len(set(order)) > len(order) / 2:
            how = (
                "although set_epoch(1) was called" if hasattr(sampler, "set_epoch") else "its seed is set anew in each"
            )
            self.problem("same-order", f"The order is shuffled, and the same in both epochs: {how}")

    def _set_epoch(self, epoch: int) -> None:
        for sampler in {id(s): s for s in _samplers(self.loader)}.values():
            with contextlib.suppress(Exception):  # most have none
                sampler.set_epoch(epoch)
                self.notes.append(f"{type(sampler).__name__}: set_epoch was called between passes, as loops must do.")

    def _shares(self, first: Pass) -> None:
        """Padding; room in shared memory."""
        padded, all_of = first.padding
        if all_of and padded > all_of / 2:
            self.notes.append(f"{percent(padded / all_of)} of the tokens are padding: batch rows of like length.")
        waiting = first.bytes * self.workers * (getattr(self.loader, "prefetch_factor", None) or 2)
        with contextlib.suppress(OSError):
            if waiting > (free := shutil.disk_usage("/dev/shm").free):
                self.notes.append(f"Workers may hold {size(waiting)} of batches; /dev/shm has {size(free)} free.")

    def _workers(self, first: Pass) -> None:
        """Rows that each worker of a stream gives."""
        if self.workers < 2 or not self.streams or self.dataset is None:
            return
        alone = self.read(loader_like(self.loader, num_workers=0))
        copies, single = collections.Counter(first.digests), collections.Counter(alone.digests)
        if first.ended and alone.ended:
            times = len(first.digests) / max(1, len(alone.digests))
            distinct = single and copies and max(single.values()) == 1
            repeated = times == self.workers or (distinct and min(copies.values()) >= self.workers)
            rows = f"{len(first.digests):,} rows in an epoch, {len(alone.digests):,} without workers"
        else:
            share = first.digests[: len(first.digests) // self.workers]
            few = len(first.digests) / (self.workers * (self.workers - 0.5))
            repeated = len(first.digests) >= 8 * self.workers and len(set(share)) <= few
            rows = "the same rows, one after the other"
        if repeated:
            self.problem("not-sharded", f"Each of the {self.workers} workers serves every row: {rows}")

    def _random(self, first: Pass) -> None:
        """The same item from each worker, twice: random within a worker, and the same across workers or epochs."""
        if self.workers < 2 or self.streams or not self.rows:
            return
        probe = loader_like(self.loader, batch_sampler=[[0]] * (2 * self.workers), num_workers=self.workers)
        draws, again = ([row_digests(batch)[0] for batch in probe] for _ in range(2))
        if draws[0] == draws[self.workers]:  # nothing random in it
            return
        code = "training/same-seed-workers"
        if len(set(draws[: self.workers])) == 1:
            self.problem(code, f"Each of {self.workers} workers draws the same random numbers: item 0 is alike in all")
        elif draws == again:
            self.problem(code, "The workers draw the same random numbers in each epoch: an item is alike in all")

    def _resume(self, first: Pass) -> None:
        """The data set's own way to leave out what was read: does it reach the workers, and does it end?"""
        if self.resume_at is None:
            return
        name = next((n for n in SKIPS if isinstance(getattr(self.dataset, n, None), int)), None)
        if name is None:
            self.notes.append("The data set has no skip_samples: a run goes on by reading and throwing away.")
            return
        per = getattr(self.loader, "batch_size", None) or 1
        rows = self.resume_at if "batch" in name or "step" in name else self.resume_at * per
        setattr(self.dataset, name, rows)
        self._set_epoch(0)
        resumed, after = self.read(), self.read()
        start = first.digests[self.resume_at * per :]
        if resumed.digests and resumed.digests[:per] == first.digests[:per] != start[:per]:
            why = " (persistent workers hold an old copy)" if self.loader.persistent_workers else ""
            self.problem("stale-worker-copy", f"{name} = {rows} does not reach the rows: the pass begins at 0{why}")
        elif len(after.digests) < len(first.digests) and after.digests[:per] == resumed.digests[:per]:
            left = f"{len(first.digests) - len(after.digests):,} rows"
            self.problem("skip-kept", f"{name} = {rows} stays: the next pass (or validation) leaves out {left}, too")

    def _ranks(self, first: Pass) -> None:
        """What each rank would read; in a process group what this one reads."""
        if self.group == self.ranks > 1:
            self.shares.append(self._share())
        for rank in range(self.ranks) if self.ranks > 1 and not self.shares else ():
            with as_rank(rank, self.ranks):
                for one in (*_samplers(self.loader), self.dataset):
                    own = vars(one) if hasattr(one, "__dict__") else {}
                    if self.ranks in map(own.get, REPLICAS):  # it keeps the rank on which it was made
                        own.update(dict.fromkeys(OWN_RANK & set(own), rank))
                with contextlib.suppress(AttributeError):
                    self.loader._iterator = None
                self.shares.append(self._share())

    def _share(self) -> Share:
        """Of a set with a sampler the indices of a pass, and in a group its first items; else what is read."""
        sampler = getattr(self.loader, "batch_sampler", None)
        if sampler is None or self.streams:
            one = self.read()
            return one.batches, one.ended, [digest.hex() for digest in one.digests[:TOLD]]
        batches = list(itertools.islice(sampler, TOLD))
        end = self.rows // self.ranks if self.rows and len(batches) == TOLD else None  # one epoch of what has no end
        items = [str(index) for index in sorted(set(_flat(batches)[:end]))]
        for place, index in enumerate(items[:ITEMS] if self.group else ()):
            random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # it may be augmented
            with contextlib.suppress(Exception):  # the user's own
                items[place] += f" {row_digests([self.loader.dataset[int(index)]])[0].hex()}"
        return len(batches), len(batches) < TOLD, items[:ITEMS]

    def compare_ranks(self) -> None:
        """Ranks that read the same, or unlike numbers of batches. A group's tell it by its store: nobody hangs."""
        if self.group:
            store = dist.distributed_c10d._get_default_store()
            call, until = next(CALLS), time.monotonic() + self.seconds
            keys = [f"nbdebug/check_loader/{call}/{rank}" for rank in range(self.ranks)]
            store.set(keys[dist.get_rank()], json.dumps(self.shares[0]))
            while not store.check(keys):
                if time.monotonic() > until:
                    self.unchecked.append(f"the other ranks: not all have asked within {self.seconds:g} s")
                    return
                time.sleep(0.05)
            self.shares = [json.loads(store.get(key)) for key in keys]
        (_, _, one), (_, _, other), *_ = self.shares
        single = [{row for row, times in collections.Counter(rows).items() if times == 1} for rows in (one, other)]
        common = len(single[0] & single[1]) / max(1, min(map(len, single)))
        common = 1 if one == other and len(set(one)) > 2 else common  # rows that come again and again
        steps = [batches for batches, _, _ in self.shares]
        if common > 0.5:
            same = f"ranks reads the same rows: {percent(common)} of rank 1's are rank 0's"
            self.problem("not-sharded", f"Each of the {self.ranks} {same}")
        elif len(set(steps)) > 1 and all(ended for _, ended, _ in self.shares):
            have = listed(steps, 8, quote="")
            self.problem("uneven-ranks", f"The ranks have {have} batches: the others wait for ever at the end")

    def report(self) -> Report:
        facts = DataFacts(tuple(self.problems))
        findings = tuple(finding for check in STREAM.values() if (finding := check(facts)) is not None)
        rows = [(n + 1, size, rows, "yes" if end else "no") for n, (size, rows, end) in enumerate(self.passes[:2])]
        watched = " and ".join(f"{batches:,} batches" for _, batches, _, _ in rows) or "nothing"
        headline = f"No problem was seen in two passes: {watched}." if rows else "Nothing could be read."
        source = "" if self.dataset is None else f" over {type(self.dataset).__name__}"
        return Report(
            "check_loader()",
            findings,
            (RuledOut("a stream that ends or repeats", f"{watched} in two passes"),) if rows and not findings else (),
            tuple(self.unchecked),
            tuple(dict.fromkeys(self.notes)),
            f"{type(self.loader).__name__}{source}, {count(self.workers, 'worker')}",
            {"passes": [list(p) for p in self.passes], "items": {p.item: p.code for p in self.problems}},
            headline="" if findings else headline,
            tables=[Table("Passes", ("pass", "batches", "rows", "to the end"), rows)] if rows else [],
            independent=True,
        )


def without_others() -> Any:
    """Within it no rank talks to others, which are in no copy: they would be disturbed, and the copy wait for ever."""
    error = CopyFailed("the loader asks the other ranks, which are not in the copy of the process")
    return unittest.mock.patch.multiple(dist, **dict.fromkeys(COLLECTIVES, unittest.mock.Mock(side_effect=error)))


def as_rank(rank: int, ranks: int) -> contextlib.ExitStack:
    """Within it torch.distributed and the environment say that this is one process of several."""
    values = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    result = contextlib.ExitStack()
    result.enter_context(unittest.mock.patch.dict(os.environ, values))
    for name, answer in {"get_rank": rank, "get_world_size": ranks, "is_initialized": True}.items():
        result.enter_context(unittest.mock.patch.object(dist, name, lambda *_, answer=answer: answer))
    return result


def _samplers(loader: Any) -> list[Any]:
    """The sampler, the batch sampler and what that holds: the last of them gives the order."""
    batches = getattr(loader, "batch_sampler", None)
    return [s for s in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)) if s is not None]


def _flat(indices: Sequence[Any]) -> list[Any]:
    return [i for part in indices for i in (part if isinstance(part, (list, tuple)) else [part])]


def row_digests(batch: Any) -> list[bytes]:
    """Of all that a batch holds of each row. Rows are the first dimension of its tensors, or the elements of lists."""
    columns = [column for _, column in _columns(batch)]
    arrays = [len(column) for column in columns if hasattr(column, "shape")]
    digests = [hashlib.blake2b(digest_size=12) for _ in range((arrays or list(map(len, columns)) or [1])[0])]
    for column in columns:
        for value, digest in zip(column, digests):
            digest.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode("utf-8", "replace"))
    return [digest.digest() for digest in digests]


def _columns(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What a batch holds row by row, with its name: arrays, and lists of what each row has."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _columns(one, f"{name}.{key}".lstrip("."))
    elif hasattr(value, "shape"):
        values = array(value)
        if values is not None and values.ndim:
            yield name, values
    elif isinstance(value, (list, tuple)) and not all(isinstance(v, (str, int, float, bytes)) for v in value):
        rows = [array(one) for one in value if hasattr(one, "shape")]
        if len(rows) == len(value) and len({len(row) if row is not None and row.ndim else 0 for row in rows}) > 1:
            yield name, rows
        else:
            for number, one in enumerate(value):
                yield from _columns(one, f"{name}[{number}]")
    else:
        yield name, value if isinstance(value, (list, tuple)) else [value]


def _is_finite(value: Any) -> bool:
    values = array(value)
    return values is None or values.dtype.kind not in "fc" or bool(numpy.isfinite(values).all())
