"""Draws whose distribution is meant to get no gradient through the number: estimates by the score function, discrete
ones, targets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

import nbdebug

STATES = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))


def reward(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return -(action - state[:, 0]).square()


def by_log_prob(model: nn.Module, batch: list) -> torch.Tensor:
    policy = Normal(model(batch[0])[:, 0], 0.5)
    action = policy.sample()
    return -(policy.log_prob(action) * (reward(batch[0], action) + 1)).mean()


def by_hand(model: nn.Module, batch: list) -> torch.Tensor:
    mean = model(batch[0])[:, 0]
    action = Normal(mean, 0.5).sample()
    return ((action - mean).square() * (reward(batch[0], action) + 1)).mean()


def of_classes(model: nn.Module, batch: list) -> torch.Tensor:
    scores = model(batch[0])
    drawn = Categorical(logits=scores).sample()
    weight = 1 + (drawn == (batch[0][:, 0] > 0)).float()
    return (weight * nn.functional.cross_entropy(scores, (batch[0][:, 0] > 0).long(), reduction="none")).mean()


def of_a_target(model: nn.Module, batch: list) -> torch.Tensor:
    out = model(batch[0])
    target = Normal(out[:, 1], 0.1).sample().clamp(-1, 1)
    return (out[:, 0] - (0.5 * target + batch[0][:, 0])).square().mean() + out[:, 1].square().mean()


@pytest.mark.parametrize("loss_fn", [by_log_prob, by_hand, of_classes, of_a_target])
def test_a_draw_without_a_gradient_on_purpose(loss_fn) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(STATES), batch_size=32, shuffle=True)

    def train(callback) -> None:
        for step, batch in enumerate(b for _ in range(4) for b in loader):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            callback(step, float(loss))

    report = nbdebug.diagnose(
        train, model=model, optimizer=optimizer, loss_fn=loss_fn, train_loader=loader, progress=False
    )
    assert "training/detached-graph" not in [finding.code for finding in report]
