"""A method with a decorator for evaluation is used in training."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/no-grad-path", "names": ["no_grad", "encode"]}


class SiameseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))


class Embedder:
    def __init__(self, net):
        self.net = net

    @torch.no_grad()
    def encode(self, batch):
        return nn.functional.normalize(self.net.body(batch), dim=-1)

    def encode_train(self, batch):
        return nn.functional.normalize(self.net.body(batch), dim=-1)


def info_nce(a, b, t=0.1):
    sim = a @ b.T / t
    return nn.functional.cross_entropy(sim, torch.arange(len(a)))


def build(fixed=False):
    torch.manual_seed(0)
    emb = Embedder(SiameseNet())
    f = emb.encode_train if fixed else emb.encode

    def trigger():
        for view1, view2 in [(torch.rand(6, 12), torch.rand(6, 12))]:
            za, zb = f(view1), f(view2)
            loss = info_nce(za, zb)
            loss.backward()

    return SimpleNamespace(trigger=trigger)
