"""Games are kept in a deque that has no length; only the newest are drawn. Less than a list may gather on purpose."""

from collections import deque
from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/cache-unbounded", ["replay.games"], "replay.games.append"


def playing(length):
    torch.manual_seed(4)
    model = nn.Linear(2048, 1)
    replay = SimpleNamespace(games=deque(maxlen=length))

    def step():
        replay.games.append(torch.randn(40, 2048))
        loss = model(replay.games[-1]).square().mean()
        model.zero_grad()
        loss.backward()
        return loss.detach()

    return SimpleNamespace(model=model, optimizer=None, step=step, steps=5, names={"replay": replay})


def sick():
    return playing(None)


def healthy():
    return playing(3)
