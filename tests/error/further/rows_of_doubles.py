"""NumPy's rows are float64; a data class carries them into a list of Linear layers."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

EXPECT = {"code": "error/dtype-mismatch", "names": ["features", "encoder"]}


@dataclass
class Batch:
    features: torch.Tensor
    target: torch.Tensor


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 1)

    def forward(self, batch: Batch):
        h = batch.features
        for layer in self.encoder:
            h = torch.relu(layer(h))
        return self.head(h).squeeze(-1)


def build(fixed=False):
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(32, 6)), rng.normal(size=32)
    if fixed:
        X, y = X.astype(np.float32), y.astype(np.float32)

    def collate(rows):
        return Batch(torch.stack([torch.as_tensor(r[0]) for r in rows]), torch.tensor(np.array([r[1] for r in rows])))

    loader = torch.utils.data.DataLoader(list(zip(X, y)), batch_size=8, collate_fn=collate)
    model = Regressor()

    def trigger():
        total = 0.0
        for b in loader:
            pred = model(b)
            loss = ((pred - b.target) ** 2).mean()
            loss.backward()
            total += loss.item()
        return total

    return SimpleNamespace(trigger=trigger)
