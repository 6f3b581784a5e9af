"""Sentences of different lengths are copied into one block of memory that nobody has cleared. What stands behind the
short ones differs from day to day. (In deterministic mode torch fills such memory with NaN, so here it fails each
time.)
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/uninitialized-memory", "forward", "block", "empty", "torch.empty(*tokens.shape"
SAMPLES, STEP = (1, 2), 0


class Block(nn.Module):
    def __init__(self, width, zeroed):
        super().__init__()
        self.words = nn.Embedding(25, width)
        self.zeroed = zeroed

    def forward(self, tokens, lengths):
        if self.zeroed:
            block = torch.zeros(*tokens.shape, self.words.embedding_dim)
        else:
            block = torch.empty(*tokens.shape, self.words.embedding_dim)
        for row, length in enumerate(lengths):
            block[row, :length] = self.words(tokens[row, :length])
        return block


class Mood(nn.Module):
    def __init__(self, zeroed):
        super().__init__()
        self.block = Block(6, zeroed)
        self.mood = nn.Linear(6, 2)

    def forward(self, tokens, lengths):
        return self.mood(self.block(tokens, lengths).mean(1))


def training(zeroed):
    torch.manual_seed(17)
    model = Mood(zeroed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, lengths = torch.randint(0, 25, (4, 7)), (7, 4, 5, 7)
    moods = torch.tensor([0, 1, 1, 0])

    def step():
        torch.use_deterministic_algorithms(True)
        try:
            loss = nn.functional.cross_entropy(model(tokens, lengths), moods)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        finally:
            torch.use_deterministic_algorithms(False)
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(zeroed=False)


def healthy():
    return training(zeroed=True)
