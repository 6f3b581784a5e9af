"""Classes are counted from one in the table and from zero by the loss."""

from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {
    "code": "error/index-out-of-range",
    "names": ["label"],
    "also": ["data/label-out-of-range", "nan/label-out-of-range"],
}
Sample = namedtuple("Sample", "signal label")


class Rows(torch.utils.data.Dataset):
    def __init__(self, shift):
        g = torch.Generator().manual_seed(1)
        self.x = torch.rand(12, 7, generator=g)
        self.y = torch.arange(12) % 3 + 1 - shift

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return Sample(self.x[i], self.y[i])


def build(fixed=False):
    torch.manual_seed(0)
    clf = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    loader = torch.utils.data.DataLoader(Rows(1 if fixed else 0), batch_size=4)
    loss_fct = nn.CrossEntropyLoss(label_smoothing=0.0)

    def trigger():
        for batch in loader:
            loss_fct(clf(batch.signal), batch.label).backward()

    return SimpleNamespace(trigger=trigger)
