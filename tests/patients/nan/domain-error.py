"""A robot's policy is a Gaussian squashed by tanh. To score recorded actions it is undone with atanh; two recordings
sit at the stop, at exactly 1 and -1, and the loss is inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/domain-error", "forward", "policy", "atanh", "torch.atanh(action)"
SAMPLES, STEP = (0, 7), 1


class Squashed(nn.Module):
    def __init__(self, sensors, joints, edge):
        super().__init__()
        self.mean = nn.Linear(sensors, joints)
        self.log_std = nn.Parameter(torch.zeros(joints))
        self.edge = edge

    def forward(self, state, action):
        action = action.clamp(-self.edge, self.edge)
        before = torch.atanh(action)
        z = (before - self.mean(state)) * torch.exp(-self.log_std)
        return (0.5 * z.square() + self.log_std).sum(-1) + torch.log(1 - action.square() + 1e-6).sum(-1)


def training(edge):
    torch.manual_seed(12)
    model = nn.ModuleDict({"policy": Squashed(5, 3, edge)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    states, actions = torch.randn(3, 8, 5), torch.tanh(torch.randn(3, 8, 3) * 0.5)
    actions[1, 0, 2], actions[1, 7, 0] = 1.0, -1.0
    recordings = iter(zip(states, actions, strict=True))

    def step():
        loss = model["policy"](*next(recordings)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(edge=1.0)


def healthy():
    return training(edge=1 - 1e-5)
