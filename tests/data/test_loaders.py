"""Loader programs: each sick one is named by its code alone, each healthy one is met with silence. In one process, with
workers, with workers that stay, and on two real ranks (gloo), which each ask about the loader that they made."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import pathlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

import nbdebug

SICK: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {}
HEALTHY: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {}
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
STAY = {**WORKERS, "persistent_workers": True}


def program(code: str = "", **plan: Any) -> Callable[[Any], Any]:
    """Declare a program, which gives its loader. code: of what is wrong with it; plan: what check_loader is told."""

    def declared(make: Callable[[], Any]) -> Callable[[], Any]:
        (SICK if code else HEALTHY)[make.__name__] = code, make, plan
        return make

    return declared


def rows(count: int = 24) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 4), torch.arange(count) % 3)


class Stream(IterableDataset):
    """Rows one after the other; source: what is gone through in each pass."""

    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source())


def numbers(count: int = 24) -> Iterator[torch.Tensor]:
    return iter(torch.arange(float(count)))


def shared(count: int = 24) -> Iterator[torch.Tensor]:
    """Each worker of each rank has its share."""
    info, ranks = get_worker_info(), (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    number, workers = (info.id, info.num_workers) if info else (0, 1)
    return itertools.islice(numbers(count), ranks[0] * workers + number, None, ranks[1] * workers)


class Drawn(Dataset):
    """Rows that are augmented by numbers that `draw` gives."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw()])


class Resumed(IterableDataset):
    """Rows of which a resumed pass leaves out the first; ends: whether the next pass is whole again."""

    def __init__(self, ends: bool = True) -> None:
        self.skip_samples, self.ends = 0, ends

    def __iter__(self) -> Iterator[Any]:
        skip = self.skip_samples
        self.skip_samples = 0 if self.ends else skip
        return itertools.islice(shared(), skip, None)


# -- one process -------------------------------------------------------------------------------------------------------


@program("data/one-shot")
def a_generator_of_batches() -> Any:
    return (batch for batch in torch.randn(6, 4, 3))


@program("data/one-shot", epochs=3)
def two_loaders_in_one_zip() -> Any:
    return zip(DataLoader(rows(), 4), DataLoader(rows(), 4))


@program("data/exhausted", epochs=2, max_steps=40)
def more_steps_than_two_epochs_have() -> Any:
    return DataLoader(rows(), 4, shuffle=True)


@program("data/no-batches")
def a_batch_larger_than_the_set() -> Any:
    return DataLoader(rows(12), 16, drop_last=True)


@program("data/batch-fails")
def texts_of_several_lengths() -> Any:
    return DataLoader([torch.arange(3 + n % 2) for n in range(8)], 4)


@program("data/batch-without-labels")
def an_answer_that_was_cut_off() -> Any:
    labels = torch.arange(12).reshape(6, 2)
    labels[2:4] = -100
    return DataLoader([{"input_ids": torch.arange(2), "labels": row} for row in labels], 2)


@program("data/nonfinite-values")
def a_feature_that_is_nan() -> Any:
    features, labels = rows().tensors
    features[5, 1] = float("nan")
    return DataLoader(TensorDataset(features, labels), 4)


@program("data/skip-kept", resume_at=2)
def a_resumed_pass_that_is_never_whole_again() -> Any:
    return DataLoader(Resumed(ends=False), 2)


@program()
def batches_in_a_list() -> Any:
    return list(torch.randn(6, 4, 3))


@program(epochs=3, max_steps=18)
def a_shuffled_set() -> Any:
    return DataLoader(rows(), 4, shuffle=True)


@program(max_steps=50)
def a_stream_without_an_end() -> Any:
    return DataLoader(Stream(lambda: itertools.cycle(numbers())), 4)


@program(epochs=1)
def a_generator_that_is_read_once() -> Any:
    return (batch for batch in torch.randn(6, 4, 3))


@program()
def rare_rows_drawn_more_often() -> Any:
    sampler = torch.utils.data.WeightedRandomSampler([1.0, 9.0] * 12, 24)
    return DataLoader(rows(), 4, sampler=sampler)


@program()
def rows_of_like_length_in_a_batch() -> Any:
    return DataLoader(rows(), batch_sampler=[[0, 2, 4], [1, 3, 5, 7], [6, 8]])


@program(resume_at=2)
def a_resumed_pass() -> Any:
    return DataLoader(Resumed(), 2)


@program()
def prompts_whose_labels_are_masked() -> Any:
    return DataLoader([{"labels": torch.tensor([-100, n])} for n in range(12)], 3)


# -- workers -----------------------------------------------------------------------------------------------------------


@program("data/not-sharded")
def a_stream_for_each_worker() -> Any:
    return DataLoader(Stream(numbers), 4, **WORKERS)


def constant_seed(worker: int) -> None:
    np.random.seed(7)


def own_seed(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


@program("training/same-seed-workers")
def a_seed_for_all_workers() -> Any:
    return DataLoader(Drawn(np.random.rand), 4, worker_init_fn=constant_seed, **WORKERS)


@program("training/same-seed-workers")
def a_generator_that_the_set_holds() -> Any:
    return DataLoader(Drawn(random.Random(0).random), 4, **WORKERS)


class Torn(Drawn):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


@program("data/batch-fails")
def an_item_that_a_worker_cannot_make() -> Any:
    return DataLoader(Torn(lambda: 0.0), 4, **WORKERS)


@program("data/exhausted", epochs=1, max_steps=20)
def a_stream_of_fewer_batches_than_steps() -> Any:
    return DataLoader(Stream(shared), 4, **WORKERS)


@program()
def a_stream_in_shares() -> Any:
    return DataLoader(Stream(shared), 4, **WORKERS)


@program()
def equal_rows_in_shares() -> Any:
    return DataLoader(Stream(lambda: (row % 3 for row in shared(48))), 4, **WORKERS)


@program()
def a_seed_for_each_worker() -> Any:
    return DataLoader(Drawn(np.random.rand), 4, worker_init_fn=own_seed, **WORKERS)


@program()
def torchs_own_numbers() -> Any:
    return DataLoader(Drawn(lambda: torch.rand(()).item()), 4, shuffle=True, **WORKERS)


# -- workers that stay -------------------------------------------------------------------------------------------------


@program("data/stale-worker-copy", resume_at=2)
def a_skip_after_the_workers_were_started() -> Any:
    return DataLoader(Resumed(), 2, **{**STAY, "num_workers": 1})


@program("data/one-shot")
def a_generator_in_each_worker_that_stays() -> Any:
    source = numbers()
    return DataLoader(Stream(lambda: source), 4, **{**STAY, "num_workers": 1})


@program("data/not-sharded")
def a_stream_for_each_worker_that_stays() -> Any:
    return DataLoader(Stream(lambda: (row % 5 for row in numbers(40))), 4, **STAY)


@program()
def a_stream_in_shares_of_workers_that_stay() -> Any:
    return DataLoader(Stream(shared), 4, **STAY)


class Told(Resumed):
    """The number of rows to skip stands in memory that workers share."""

    def __init__(self) -> None:
        self.shared = multiprocessing.get_context("fork").Value("i", 0)

    @property
    def skip_samples(self) -> int:
        return self.shared.value

    @skip_samples.setter
    def skip_samples(self, count: int) -> None:
        self.shared.value = count

    ends = True


@program(resume_at=2)
def a_skip_that_reaches_workers_that_stay() -> Any:
    return DataLoader(Told(), 2, **{**STAY, "num_workers": 1})


# -- two ranks ---------------------------------------------------------------------------------------------------------


@program("data/not-sharded", ranks=2)
def a_shuffle_of_all_rows_on_each_rank() -> Any:
    return DataLoader(rows(4000), 4, shuffle=True)


@program("data/not-sharded", ranks=2)
def a_stream_in_shares_of_workers_alone() -> Any:
    def of_worker() -> Iterator[Any]:
        info = get_worker_info()
        return itertools.islice(numbers(), info.id, None, info.num_workers)

    return DataLoader(Stream(of_worker), 4, **WORKERS)


@program("data/uneven-ranks", ranks=2)
def a_row_that_nothing_fills_up() -> Any:
    return DataLoader(Stream(lambda: shared(25)), 4)


class Endless(DistributedSampler):
    def __iter__(self) -> Iterator[int]:
        for self.epoch in itertools.count():
            yield from super().__iter__()


class SameEachTime(DistributedSampler):
    def set_epoch(self, epoch: int) -> None:
        """It forgets to."""


@program("data/same-order", ranks=2)
def a_sampler_that_takes_no_epoch() -> Any:
    return DataLoader(rows(64), 4, sampler=SameEachTime(rows(64)))


@program(ranks=2)
def a_distributed_sampler() -> Any:
    return DataLoader(rows(25), 4, sampler=DistributedSampler(rows(25)))


@program(ranks=2, max_steps=30)
def a_distributed_sampler_without_an_end() -> Any:
    return DataLoader(rows(25), 4, sampler=Endless(rows(25)))


@program(ranks=2)
def a_stream_in_shares_of_ranks_and_workers() -> Any:
    return DataLoader(Stream(lambda: shared(32)), 4, **WORKERS)


class Sliced(IterableDataset):
    """It keeps the rank that it was made on."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(numbers(), self.rank, None, self.world_size)


@program(ranks=2)
def a_stream_that_keeps_its_rank() -> Any:
    return DataLoader(Sliced(), 4)


@program(ranks=2)
def a_subset_for_each_rank() -> Any:
    own = range(dist.get_rank(), 24, dist.get_world_size())
    return DataLoader(torch.utils.data.Subset(rows(), own), 4, shuffle=True)


@program(ranks=2)
def made_up_rows_that_are_all_alike() -> Any:
    return DataLoader(Stream(lambda: itertools.repeat(torch.zeros(3), 24)), 4)


PROGRAMS = {**SICK, **HEALTHY}


def rank(number: int, port: int, name: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    told = asked(name)
    dist.barrier()
    pathlib.Path(folder, str(number)).write_text(" ".join(told))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def asked(name: str) -> list[str]:
    _, make, plan = PROGRAMS[name]
    return [finding.code for finding in nbdebug.check_loader(make(), **plan)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, tmp_path: pathlib.Path) -> None:
    code, _, plan = PROGRAMS[name]
    if "ranks" not in plan:
        told = [asked(name)]
    else:
        mp.spawn(rank, args=(free_port(), name, str(tmp_path)), nprocs=2)
        told = [(tmp_path / str(number)).read_text().split() for number in range(2)]
    assert told == [[code] if code else []] * len(told)


class Agreed(DistributedSampler):
    """It asks the others in each pass, as accelerate's loaders do with their generators."""

    def __iter__(self) -> Iterator[Any]:
        dist.broadcast(torch.zeros(1), 0)
        return super().__iter__()


def agreed(number: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    report = nbdebug.check_loader(DataLoader(rows(), 4, sampler=Agreed(rows())), ranks=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    pathlib.Path(folder, str(number)).write_text(f"{len(report)} {int(total)} {report.unchecked[0]}")
    dist.destroy_process_group()


def test_the_other_ranks_are_left_alone(tmp_path: pathlib.Path) -> None:
    mp.spawn(agreed, args=(free_port(), str(tmp_path)), nprocs=2)
    for number in range(2):
        assert (tmp_path / str(number)).read_text().startswith("0 2 the batches: the loader asks the other ranks")


def test_there_are_twenty_of_each_and_all_kinds_of_processes() -> None:
    kinds = collections.Counter("ranks" in plan for _, _, plan in PROGRAMS.values())
    assert len(SICK) == len(HEALTHY) == 20 and kinds[True] == 10
