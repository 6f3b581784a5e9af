"""A buffer with room for thousands of namedtuples keeps each episode's log-probability, with its graph."""

from collections import deque, namedtuple
from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/graph-retained", ["episodes"], "episodes.append(Episode("
Episode = namedtuple("Episode", "states score")


def policy(cut):
    torch.manual_seed(4)
    actor = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 3))
    optimizer = torch.optim.Adam(actor.parameters())
    episodes = deque(maxlen=5000)

    def step():
        states = torch.randn(200, 8)
        score = actor(states).log_softmax(-1)[:, 0].sum()
        (-score).backward()
        optimizer.step()
        optimizer.zero_grad()
        episodes.append(Episode(states, score.detach() if cut else score))

    return SimpleNamespace(model=actor, optimizer=optimizer, step=step, steps=3, names={"episodes": episodes})


def sick():
    return policy(cut=False)


def healthy():
    return policy(cut=True)
