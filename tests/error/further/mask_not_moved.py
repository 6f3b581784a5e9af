"""The entries of a batch are moved one by one, and the mask is forgotten; the pooling fails."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/device-mismatch", "names": ["mask"]}


class Pooler(nn.Module):
    def forward(self, hidden, mask):
        m = mask[..., None].to(hidden.dtype)
        return (hidden * m).sum(1) / m.sum(1).clamp(min=1)


class Classifier(nn.Module):
    def __init__(self, vocab, dim, n):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.pool = Pooler()
        self.out = nn.Sequential(nn.Dropout(0.1), nn.Linear(2 * dim, n))

    def forward(self, input_ids, mask, labels=None):
        h, _ = self.lstm(self.emb(input_ids))
        logits = self.out(self.pool(h, mask))
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels) if labels is not None else None}


def build(fixed=False):
    torch.manual_seed(0)
    dev = "meta"
    model = Classifier(40, 8, 3).to(dev)
    keys = ("input_ids", "labels", "mask") if fixed else ("input_ids", "labels")

    def batches():
        for _ in range(2):
            ids = torch.randint(0, 40, (4, 7))
            yield {"input_ids": ids, "mask": ids.ne(0), "labels": torch.randint(0, 3, (4,))}

    def train_one_epoch(loader, epoch):
        running = 0.0
        for _step, batch in enumerate(loader):
            batch = {k: (v.to(dev) if k in keys else v) for k, v in batch.items()}
            out = model(**batch)
            out["loss"].backward()
            running += 1
        return running

    return SimpleNamespace(trigger=lambda: [train_one_epoch(batches(), e) for e in range(2)])
