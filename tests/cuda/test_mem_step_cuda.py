"""mem(step) where the allocator tells its own peak: the same within 0.5%, workspaces included, and a leak on the card.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbdebug.tools.memory.mem import mem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Training:
    def __init__(self, model: nn.Module, batch: torch.Tensor, make: Any = torch.optim.AdamW, half: bool = False):
        self.model, self.batch, self.half = model.cuda(), batch.cuda(), half
        self.optimizer = make(self.model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half):
            out = self.model(self.batch)
            out = out[0] if isinstance(out, tuple) else out
            loss = out.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def transformer(half: bool = False) -> Training:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return Training(nn.TransformerEncoder(layer, 4), torch.randn(16, 256, 512), half=half)


def convolutions() -> Training:
    layers = [m for _ in range(4) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    return Training(nn.Sequential(nn.Conv2d(3, 32, 7, 2), *layers), torch.randn(32, 3, 128, 128), torch.optim.SGD)


def recurrent() -> Training:
    return Training(nn.LSTM(256, 512, 2, batch_first=True), torch.randn(64, 100, 256))


@pytest.mark.parametrize(
    "make",
    [transformer, lambda: transformer(half=True), convolutions, recurrent],
    ids=["transformer", "bfloat16", "convolutions", "lstm"],
)
def test_the_peak_is_the_allocator_s(make: Callable[[], Training]) -> None:
    torch.manual_seed(0)
    training = make()
    for _ in range(2):
        training.step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    wanted = torch.cuda.max_memory_allocated()

    report = mem(training.step, model=training.model, optimizer=training.optimizer, names={}, progress=False)
    parts = dict(report.plot("memory")["parts"])
    print(
        f"\n{wanted:,} wanted, {report.facts['peak']:,} told",
        {k: f"{v / 2**20:.1f}" for k, v in parts.items()},
        report.notes,
    )

    assert report.facts["peak"] == report.facts["measured_peak"] == pytest.approx(wanted, rel=0.005)
    assert sum(parts.values()) == pytest.approx(report.facts["peak"], rel=0.001)
    blocks = [-(-p.nbytes // 512) * 512 for p in training.model.parameters()]
    assert parts["parameters"] == sum(blocks)
    assert parts.get("other", 0) < 100 << 20  # what cuBLAS keeps for itself


def test_a_leak_on_the_card_is_named() -> None:
    training, losses = transformer(), []

    def step() -> None:
        losses.append(training.step())

    report = mem(step, model=training.model, optimizer=training.optimizer, names={"losses": losses}, progress=False)
    assert [f.code for f in report] == ["memory/graph-retained"]
    assert report.findings[0].evidence["holder"] == ["losses"] and "losses.append" in report.findings[0].where.text


def test_big_activations_are_told_by_line() -> None:
    training = transformer()
    report = mem(training.step, model=training.model, optimizer=training.optimizer, names={}, progress=False)
    lines = next(t.rows for t in report.tables if t.title == "By line")
    assert any("self.model(self.batch)" in row[-1] and row[1] > 1 << 20 for row in lines)
    modules = {row[0]: row[2] for row in next(t.rows for t in report.tables if t.title == "By module")}
    assert modules["layers"] > modules["layers.0"] > 0
