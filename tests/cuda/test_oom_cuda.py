"""On a real card: the out-of-memory card names the owners, and what is let go comes back to the allocator."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nbdebug.text import bytes_of
from nbdebug.tools.memory.free import free
from nbdebug.tools.memory.oom import out_of_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
GIB = 1 << 30


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def two_gib() -> Iterator[None]:
    """The process may use 2 GiB of the card and no more."""
    gc.collect()  # what an earlier test's failure holds
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
    x = torch.randn(rows, 1024, device="cuda")
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("two_gib")
def test_the_card_of_a_real_failure() -> None:
    torch.manual_seed(0)
    net = Deep().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 64)
    names = {"net": net, "optimizer": optimizer}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(net, optimizer, 16384)
    report = out_of_memory(caught.value, names)
    (finding,) = report.findings
    held = {row[0]: row[2] for row in report.tables[0].rows}
    weights = sum(p.numel() * 4 for p in net.parameters())
    assert finding.title.startswith("After 1 step that fit") and finding.where.module.startswith("blocks.")
    assert held["net's parameters"] == weights and held["saved for backward"] > 0.2 * GIB
    assert 2 * weights <= held["optimizer's state"] <= 2.01 * weights
    assert held["x in step"] == 16384 * 1024 * 4
    failure = report.facts["failure"]
    told = sum(holding["bytes"] for holding in failure["held"]) + failure["left"]
    assert told == pytest.approx(failure["asked"]["allocated"], rel=0.02), "it adds up to the allocator's own total"
    assert failure["limit"] == pytest.approx(2 * GIB, rel=0.01) and failure["free"] < failure["asked"]["bytes"]
    assert len(finding.fixes) == 3 and bytes_of(finding.fixes[0].after["saves"].replace(" ", "")) > 0.1 * GIB
    print(report)


@pytest.mark.usefixtures("two_gib")
def test_what_the_remedy_says_is_enough_is_enough() -> None:
    torch.manual_seed(0)
    net = Deep().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 64)
    rows = 16384
    for _ in range(6):
        try:
            step(net, optimizer, rows)
            break
        except torch.OutOfMemoryError as error:
            report = out_of_memory(error, {"net": net, "optimizer": optimizer})
        fix = next(fix for fix in report.findings[0].fixes if fix.title.startswith("Batches of"))
        fewer = int(fix.title.split()[2].replace(",", ""))
        assert fewer < rows
        rows = fewer
        free("cache", names={})
    else:
        raise AssertionError("the batches that were advised never fitted")


@pytest.mark.usefixtures("two_gib")
def test_bytes_of_a_failed_cell_come_back() -> None:
    def work() -> None:
        activations = torch.zeros(GIB // 4, device="cuda")
        torch.empty(8 * GIB + len(activations), device="cuda")

    gc.collect()
    before = torch.cuda.memory_allocated()
    try:
        work()
    except torch.OutOfMemoryError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    assert torch.cuda.memory_allocated() == before + GIB
    (kept,) = free(names={}).facts["notebook"]
    assert kept["bytes"] == GIB and "on cuda:0" in kept["what"]
    report = free("traceback", names={})
    assert report.facts["freed"]["bytes"] == GIB and torch.cuda.memory_allocated() == before
    assert "%free cache" in " ".join(report.notes)
    free("cache", names={})
    assert torch.cuda.memory_reserved() < GIB
