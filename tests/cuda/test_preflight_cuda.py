"""preflight of a model on the device, with batches that come on the CPU and are moved by the user, or by nobody yet.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from tests.training.loops import clusters, cross_entropy, loaders

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def moved(model, batch):
    return F.cross_entropy(model(batch[0].cuda()), batch[1].cuda())


@pytest.mark.parametrize(
    "loss_fn",
    [moved, cross_entropy, nn.CrossEntropyLoss()],
    ids=["moved-by-the-loss", "moved-by-the-loop", "criterion"],
)
def test_batches_reach_the_device_whoever_moves_them(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = Snapshot.take(model, optimizer)
    pair = loaders(*clusters(400))
    report = nbdebug.preflight(model, pair[0], loss_fn, optimizer=optimizer, val_loader=pair[1])
    assert report.ok, [f.title for f in report]
    assert not [line for line in report.unchecked if "Error" in line]
    assert before.differences() == []


def test_half_precision_under_autocast_is_left_in_peace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)).cuda()

    def loss_fn(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(batch[0].cuda()), batch[1].cuda())

    report = nbdebug.preflight(model, loaders(*clusters(400))[0], loss_fn)
    assert report.ok, [f.title for f in report]
    assert not [line for line in report.unchecked if "Error" in line]
