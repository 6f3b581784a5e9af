"""scaled_dot_product_attention takes True for places that it sees; the mask says where the padding is."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import cross_entropy, loaders, made

CODE, WHERE = "training/inverted-mask", ["mask", "forward"]


class Words(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.words, self.mix, self.out, self.seen = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 2), seen

    def forward(self, x):
        q, k, v = self.mix(self.words(x))[:, None].chunk(3, -1)
        mask = ((x != 0) == self.seen)[:, None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0, 0])


def training(seen):
    torch.manual_seed(106)
    x, y = torch.randint(3, 20, (400, 9)), torch.randint(0, 2, (400,))
    x[:, 1] = 1 + y
    x[torch.arange(9) >= torch.randint(3, 7, (400, 1))] = 0
    model = Words(seen)
    return made(model, torch.optim.Adam(model.parameters(), lr=1e-2), cross_entropy, loaders(x, y), 8)


def sick():
    return training(seen=False)


def healthy():
    return training(seen=True)
