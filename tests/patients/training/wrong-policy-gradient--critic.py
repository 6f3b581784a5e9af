"""An actor and a critic with one loss: the advantage keeps the graph of the critic's values."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "training/wrong-policy-gradient", ["advantage"]


def training(detached):
    torch.manual_seed(87)
    actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def train(callback):
        for step in range(60):
            state = torch.randn(32, 4)
            policy = torch.distributions.Categorical(logits=actor(state))
            action, values = policy.sample(), critic(state)[:, 0]
            reward = (state[:, :3].argmax(1) == action).float()
            advantage = reward - values
            chosen = policy.log_prob(action) * (advantage.detach() if detached else advantage)
            loss = advantage.square().mean() - chosen.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(detached=False)


def healthy():
    return training(detached=True)
