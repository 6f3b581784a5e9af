"""A factorization whose vectors are drawn as torch draws an embedding's, so that their products are in the tens."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/bad-init", ["users", "items"]


class Factors(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.users, self.items = nn.Embedding(80, 64), nn.Embedding(60, 64)
        self.level = nn.Embedding(60, 1)
        nn.init.zeros_(self.level.weight)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=std)

    def forward(self, pairs):
        user, item = pairs.unbind(1)
        return (self.users(user) * self.items(item)).sum(1, keepdim=True) + self.level(item)


def training(std):
    torch.manual_seed(12)
    pairs = torch.stack([torch.randint(0, 80, (4000,)), torch.randint(0, 60, (4000,))], 1)
    taste = torch.randn(80, 2) @ torch.randn(2, 60)
    liked = (taste[pairs[:, 0], pairs[:, 1]] > 0).float()[:, None]
    model = Factors(std)

    def loss_fn(model, batch):
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn, loaders(pairs, liked, 64), 4)


def sick():
    return training(std=1.0)


def healthy():
    return training(std=0.1)
