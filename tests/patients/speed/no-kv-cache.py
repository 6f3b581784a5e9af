"""Each further token comes from a run over all tokens before it."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, BOTTLENECK, LINE = "speed/no-kv-cache", "forward", "hidden, _ = model(word(tokens))"


def training(keep):
    torch.manual_seed(7)
    word, model = nn.Embedding(30, 16), nn.GRU(16, 30, batch_first=True)

    @torch.no_grad()
    def step():
        tokens = torch.tensor([[1, 2], [3, 4]])
        newest, state = tokens, None
        for _ in range(12):
            if keep:
                hidden, state = model(word(newest), state)
            else:
                hidden, _ = model(word(tokens))
            newest = hidden[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, newest], 1)
        return tokens

    return SimpleNamespace(model=model, optimizer=None, step=step)


def sick():
    return training(keep=False)


def healthy():
    return training(keep=True)
