"""A prompt grows beyond the table of positions while text is generated."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/index-out-of-range", "names": ["wpe", "pos"]}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        return x + self.mlp(self.ln(x))


class GPT(nn.Module):
    def __init__(self, vocab_size=30, block_size=16, n_embd=8):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList([Block(n_embd) for _ in range(2)]),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        _b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)

    @torch.no_grad()
    def generate(self, idx, n, crop):
        for _ in range(n):
            cond = idx[:, -self.block_size :] if crop else idx
            nxt = self(cond)[:, -1].argmax(-1, keepdim=True)
            idx = torch.cat((idx, nxt), dim=1)
        return idx


def build(fixed=False):
    torch.manual_seed(0)
    model = GPT().eval()
    start = torch.randint(0, 30, (1, 10))
    return SimpleNamespace(trigger=lambda: model.generate(start, 12, crop=fixed))
