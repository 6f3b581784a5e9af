"""A policy gradient without its minus sign: what is rewarded becomes rarer."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "training/wrong-policy-gradient", ["loss", "log_prob"]


def training(sign):
    torch.manual_seed(77)
    policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    centre = torch.randn(3, 4) * 2

    def train(callback):
        for step in range(60):
            right = torch.randint(0, 3, (64,))
            choice = torch.distributions.Categorical(logits=policy(centre[right] + 0.3 * torch.randn(64, 4)))
            action = choice.sample()
            reward = (action == right).float()
            loss = sign * (choice.log_prob(action) * (reward - reward.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=policy, optimizer=optimizer, train=train, **parts)


def sick():
    return training(1)


def healthy():
    return training(-1)
