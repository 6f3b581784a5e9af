"""diagnose and preflight on a card: experiments repeat the run, random numbers of the card included, and a label beyond
the classes is named without a device-side assert.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from tests.training.loops import clusters, cured_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 5)).cuda()


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].cuda()), batch[1].cuda())


def loaders(shift: int = 0) -> tuple[DataLoader, DataLoader]:
    x, y = clusters(400)
    return (
        DataLoader(TensorDataset(x[:320], y[:320] + shift), 32, shuffle=True),
        DataLoader(TensorDataset(x[320:], y[320:] + shift), 40),
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_with_dropout_is_repeated(fused: bool) -> None:
    model, (train, val) = network(), loaders()
    optimizer = torch.optim.SGD(model.parameters(), 200.0, fused=fused)
    before = Snapshot.take(model, optimizer)

    def loop(callback):
        for step, batch in enumerate([batch for _ in range(4) for batch in train]):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, loss)

    report = nbdebug.diagnose(
        loop, model=model, optimizer=optimizer, loss_fn=loss_fn, train_loader=train, val_loader=val, progress=False
    )
    assert before.differences() == []
    assert [f.code for f in report] == ["training/lr-too-high"], report
    assert cured_loss(report.findings[0].fixes[0]) < 1.0, report.unchecked


def test_a_label_beyond_the_classes_leaves_the_card_alive() -> None:
    model, (train, val) = network(0.0), loaders(shift=1)
    report = nbdebug.preflight(
        model, train, loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2), val_loader=val
    )
    assert [f.code for f in report] == ["training/label-out-of-range"]
    assert cured_loss(report.findings[0].fixes[0]) < 1.0
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
