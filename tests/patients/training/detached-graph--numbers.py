"""An actor and a critic, state by state: the critic's values are a baseline, and no loss trains them."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, WHERE = "training/detached-graph", ["value.weight", "values"]
RUN = True


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(4, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state):
        h = self.body(state).tanh()
        return self.policy(h).softmax(-1), self.value(h)[0]


def training(trained):
    torch.manual_seed(102)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(callback):
        for step in range(60):
            logs, values, rewards = [], [], []
            for _ in range(16):
                state = torch.randn(4)
                probabilities, value = model(state)
                policy = torch.distributions.Categorical(probabilities)
                action = policy.sample()
                logs.append(policy.log_prob(action))
                values.append(value)
                rewards.append(float(state[:3].argmax() == action))
            loss = torch.stack([-log * (r - v.item()) for log, r, v in zip(logs, rewards, values)]).mean()
            if trained:
                loss = loss + F.mse_loss(torch.stack(values), torch.tensor(rewards))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=model, optimizer=optimizer, train=train, **parts)


def sick():
    return training(trained=False)


def healthy():
    return training(trained=True)
