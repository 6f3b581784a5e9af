"""The rows at fault, followed to the items of the data set: shuffled, with workers, sorted by a collate function, read
in order from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import nbdebug
from nbdebug.report import Item

BAD = 13


class Rows(Dataset):
    """Item 13 holds a number that log refuses."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.rand(4, generator=torch.Generator().manual_seed(i)) + 0.1
        return x - 5 if i == BAD else x


class Files(Rows):
    def __init__(self) -> None:
        self.paths = [f"scans/{i:03}.npy" for i in range(len(self))]


class Named(Rows):
    def __getitem__(self, i: int) -> Any:
        return {"x": super().__getitem__(i), "id": f"patient {i}"}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows()
        return (rows[i] for i in range(len(rows)))


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.log())


def largest_first(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(sorted(items, key=lambda x: -float(x[0])))


def stacked(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items)


def found(loader: DataLoader, change: Any = lambda batch: batch) -> Any:
    """The items that nan_trace names, over a loop that stops at the bad batch."""
    torch.manual_seed(0)
    model, batches = Logged(), iter(loader) if loader.num_workers == 0 else None

    def step() -> torch.Tensor:
        nonlocal batches
        batches = iter(loader) if batches is None else batches
        batch = change(next(batches))
        loss = model(batch["x"] if isinstance(batch, dict) else batch).sum()
        loss.backward()
        return loss

    report = nbdebug.nan_trace(step, model=model, max_steps=100)
    assert report.findings[0].code == "nan/log-of-nonpositive"
    return report.findings[0].where.items


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_shuffled_loader(workers: int) -> None:
    assert found(DataLoader(Rows(), batch_size=6, shuffle=True, num_workers=workers)) == (Item(BAD),)


def test_of_a_stream_by_position() -> None:
    assert found(DataLoader(Stream(), batch_size=5)) == (Item(BAD),)


def test_a_path_or_an_id_is_named() -> None:
    assert found(DataLoader(Files(), batch_size=6, shuffle=True)) == (Item(BAD, "scans/013.npy"),)
    assert found(DataLoader(Named(), batch_size=6, shuffle=True)) == (Item(BAD, "patient 13"),)
    part = Subset(Files(), [BAD, *range(5)])
    assert found(DataLoader(part, batch_size=6, shuffle=True)) == (Item(0, "scans/013.npy"),)


def test_a_collate_function_that_keeps_the_order_is_trusted_and_one_that_sorts_is_not() -> None:
    assert found(DataLoader(Rows(), batch_size=6, shuffle=True, collate_fn=stacked)) == (Item(BAD),)
    assert found(DataLoader(Rows(), batch_size=6, shuffle=True, collate_fn=largest_first)) is None


def test_a_batch_that_the_loop_changes_is_still_known() -> None:
    assert found(DataLoader(Rows(), batch_size=6, shuffle=True), lambda batch: batch * 2) == (Item(BAD),)


def test_nothing_stays_on_the_loaders() -> None:
    before = _BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index
    found(DataLoader(Rows(), batch_size=6))
    with nbdebug.guard(nn.Linear(1, 1)):
        assert _BaseDataLoaderIter.__next__ is not before[0]
    assert (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index) == before
