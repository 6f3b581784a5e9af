"""A corpus is one-hot encoded over a very large vocabulary."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

EXPECT = {"code": "error/out-of-memory", "names": ["corpus"]}


class Bow:
    def __init__(self, vocab):
        self.vocab = vocab

    def encode(self, corpus):
        counts = F.one_hot(corpus, self.vocab).sum(1)
        return counts / counts.sum(-1, keepdim=True)


def build(fixed=False):
    torch.manual_seed(0)
    corpus = torch.randint(0, 50, (64, 20)) if fixed else torch.randint(0, 50, (200, 500))
    return SimpleNamespace(trigger=lambda: Bow(50 if fixed else 500_000_000).encode(corpus))
