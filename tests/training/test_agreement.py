"""Outputs against their targets: a run that falls, and agrees with nothing, is not called healthy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nbdebug
from nbdebug import verdict
from nbdebug.tools.training.evaluate import FixedBatches
from nbdebug.tools.training.experiments import agreement_at_end
from tests.training.loops import clusters, loaders, made


def rolled(by):
    """Each output is compared with the target of the sample that stands `by` places before it."""
    torch.manual_seed(3)
    x = torch.randn(1200, 10)
    y = x[:, :1].sin() + x[:, 1:2]
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 1))

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1].roll(by, 0))

    return made(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn, loaders(x, y), 6)


@pytest.mark.parametrize("by", [1, 0])
def test_targets_of_other_rows_are_not_well(by):
    ns = rolled(by)
    report = nbdebug.diagnose(
        ns.train, model=ns.model, optimizer=ns.optimizer, loss_fn=ns.loss_fn, train_loader=ns.train_loader,
        val_loader=ns.val_loader, progress=False,
    )  # fmt: skip
    assert report.ok == (by == 0)
    assert by == 0 or any("ignores the input" in symptom.what for symptom in report.symptoms)


def scored(model, x, y, loss_fn):
    batches = [(x[i : i + 50], y[i : i + 50]) for i in range(0, len(x), 50)]
    known = agreement_at_end(model, FixedBatches(model, loss_fn, batches), FixedBatches(model, loss_fn, []))
    return math.nan if known is None else known.end


def test_agreement_has_no_regard_for_how_often_a_class_occurs():
    x, y = clusters(400, spread=0.5)
    y = torch.where(torch.rand(400) < 0.9, torch.zeros_like(y), y)  # nearly all are of one class
    constant = nn.Linear(12, 5)
    with torch.no_grad():
        constant.weight.zero_()
        constant.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    assert scored(constant, x, y, loss_fn) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_agreement_of_scores_and_labels(by_hand):
    x, y = clusters(400, spread=0.2)
    means = torch.stack([x[y == k].mean(0) for k in range(5)])
    nearest = nn.Linear(12, 5)
    with torch.no_grad():
        nearest.weight.copy_(means)
        nearest.bias.copy_(-means.square().sum(1) / 2)

    def loss_fn(model, batch):
        if by_hand:
            return -(F.one_hot(batch[1], 5) * model(batch[0]).softmax(1).log()).sum(1).mean()
        return F.cross_entropy(model(batch[0]), batch[1])

    assert scored(nearest, x, y, loss_fn) > 0.9
    assert scored(nearest, -x, y, loss_fn) < 0


def test_distances_that_a_label_picks_are_no_scores():
    """Of a loss that draws samples to the centre of their class, the right distance is the smallest."""
    x, y = clusters(400, spread=0.2)
    centres = nn.Linear(12, 5)

    def loss_fn(model, batch):
        return torch.cdist(batch[0], model.weight).gather(1, batch[1][:, None]).mean()

    assert math.isnan(scored(centres, x, y, loss_fn))


def test_what_is_said_of_an_agreement():
    assert not verdict.of_agreement(0.0, 0.9, 0.9, (200, 200))
    assert not verdict.of_agreement(0.0, math.nan, math.nan, (0, 0))
    assert not verdict.of_agreement(0.0, 0.05, math.nan, (50, 0))  # too few to tell
    assert "less and less" in verdict.of_agreement(0.0, -0.8, math.nan, (200, 0))[0].what
    assert "ignores the input" in verdict.of_agreement(0.0, 0.05, math.nan, (400, 0))[0].what
    assert "as by chance" in verdict.of_agreement(math.nan, 0.9, 0.01, (400, 400))[0].what
