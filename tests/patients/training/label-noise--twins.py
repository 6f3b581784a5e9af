"""Each question of a batch is told from the answers of the others, and some of these are its own answer, too."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/label-noise", ["scores", "loss_fn"]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = nn.Linear(12, 16), nn.Embedding(20, 16)

    def forward(self, x, key):
        return nn.functional.normalize(self.question(x)), nn.functional.normalize(self.answer(key))


def training(masked):
    torch.manual_seed(92)
    key = torch.randint(0, 20, (600,))
    x, model = torch.randn(20, 12)[key] + 0.2 * torch.randn(600, 12), Towers()

    def loss_fn(model, batch):
        question, answer = model(*batch)
        scores = 15 * question @ answer.T
        same = (batch[1][:, None] == batch[1][None]).fill_diagonal_(False)
        scores = scores.masked_fill(same, -torch.inf) if masked else scores
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    return made(model, torch.optim.Adam(model.parameters(), lr=2e-2), loss_fn, loaders(x, key), 6)


def sick():
    return training(masked=False)


def healthy():
    return training(masked=True)
