"""A third sentence has a segment number beyond the table of two."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {
    "code": "error/index-out-of-range",
    "names": ["token_type_embeddings", "token_type_ids"],
    "also": ["data/token-out-of-vocabulary"],
}


class Embeddings(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.word_embeddings = nn.Embedding(40, d, padding_idx=0)
        self.position_embeddings = nn.Embedding(16, d)
        self.token_type_embeddings = nn.Embedding(2, d)
        self.LayerNorm = nn.LayerNorm(d)

    def forward(self, input_ids, token_type_ids=None):
        pos = torch.arange(input_ids.shape[1])[None]
        e = self.word_embeddings(input_ids) + self.position_embeddings(pos) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(e)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, **kw):
        return self.encoder(self.embeddings(kw["input_ids"], kw.get("token_type_ids")))


def build(fixed=False):
    torch.manual_seed(0)
    tokenize = lambda parts: {
        "input_ids": torch.randint(1, 40, (1, 3 * len(parts))),
        "token_type_ids": torch.tensor([[i for i in range(len(parts)) for _ in range(3)]]),
    }
    bert = Bert().eval()
    texts = [["a", "b"], ["a", "b"] if fixed else ["a", "b", "c"]]
    return SimpleNamespace(trigger=lambda: [bert(**tokenize(t)) for t in texts])
