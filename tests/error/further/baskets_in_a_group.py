"""The errors of an epoch are raised in a group within a group; the one that counts is an index beyond a table."""

import builtins
from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/index-out-of-range", "names": ["items", "basket"], "also": ["data/token-out-of-vocabulary"]}


class Recommender(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.items = nn.Embedding(n, 4)

    def forward(self, basket):
        return self.items(basket).sum(1)


def build(fixed=False):
    torch.manual_seed(0)
    rec = Recommender(10)
    baskets = [torch.tensor([[1, 2]]), torch.tensor([[9 if fixed else 10, 3]])]

    def one(basket):
        return rec(basket)

    def trigger():
        bad = []
        for basket in baskets:
            try:
                one(basket)
            except IndexError as e:
                bad.append(e)
        group = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
        if bad and group is not None:
            raise group("epoch", [group("baskets", bad)])
        if bad:
            raise bad[0]

    return SimpleNamespace(trigger=trigger)
