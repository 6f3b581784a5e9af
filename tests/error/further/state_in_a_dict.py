"""The state of a recurrent layer goes from chunk to chunk in a dict, with its graph."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/backward-twice", "names": ["hiddens"]}


class LitLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lstm, self.dec = nn.Embedding(12, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 12)

    def training_step(self, batch, hiddens):
        out, hiddens = self.lstm(self.emb(batch[:, :-1]), hiddens)
        loss = nn.functional.cross_entropy(self.dec(out).mT, batch[:, 1:])
        return {"loss": loss, "hiddens": hiddens}


def fit(module, batch, cut):
    opt = torch.optim.Adam(module.parameters())
    hiddens = None
    for chunk in batch.split(5, 1):
        res = module.training_step(chunk, hiddens)
        opt.zero_grad()
        res["loss"].backward()
        opt.step()
        hiddens = res["hiddens"]
        if cut:
            hiddens = tuple(h.detach() for h in hiddens)


def build(fixed=False):
    torch.manual_seed(0)
    return SimpleNamespace(trigger=lambda: fit(LitLM(), torch.randint(0, 12, (3, 15)), fixed))
