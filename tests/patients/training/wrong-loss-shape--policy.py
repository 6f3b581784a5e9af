"""Returns of (N, 1) minus values of (N,), standardized: the log-probability of each action is multiplied by the returns
of all, and a policy hardly learns."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE, RUN = "training/wrong-loss-shape", ["loss_fn", "advantage"], True


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.actor(h), self.critic(h).squeeze(-1)


def training(flat):
    torch.manual_seed(71)
    x, best = torch.randn(640, 6), torch.randn(6, 3)
    model = ActorCritic()

    def loss_fn(model, batch):
        scores, values = model(batch[0])
        policy = torch.distributions.Categorical(logits=scores)
        action = policy.sample()
        returns = ((batch[0] @ best).argmax(1) == action).float().reshape(-1, 1)
        if flat:
            returns = returns.flatten()
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        return (-policy.log_prob(action) * advantage).mean() + (values - returns.flatten()).square().mean()

    parts = made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(x, torch.zeros(640)), 6)
    parts.val_loader = None
    return parts


def sick():
    return training(flat=False)


def healthy():
    return training(flat=True)
