"""An actor and a critic in one model: the critic's loss is computed, and left out of the sum."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, WHERE = "training/detached-graph", ["value.weight", "value_loss"]
RUN = True


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state):
        h = self.body(state).tanh()
        return self.policy(h), self.value(h)[:, 0]


def training(added):
    torch.manual_seed(101)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(callback):
        for step in range(60):
            state = torch.randn(32, 4)
            logits, values = model(state)
            policy = torch.distributions.Categorical(logits=logits)
            action = policy.sample()
            reward = (state[:, :3].argmax(1) == action).float()
            policy_loss = -(policy.log_prob(action) * (reward - values.detach())).mean()
            value_loss = F.mse_loss(values, reward)
            loss = policy_loss - 0.01 * policy.entropy().mean()
            if added:
                loss = loss + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(added=False)


def healthy():
    return training(added=True)
