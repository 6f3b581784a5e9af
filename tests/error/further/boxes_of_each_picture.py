"""Each picture has another number of boxes, and the loader has no collate_fn of its own."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/collate-mismatch", "names": ["boxes"]}


def tuple_collate(batch):
    return tuple(zip(*batch))


class PennFudan(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.n = [2, 3, 1, 2]
        self.boxes = [torch.rand(n, 4, generator=g) for n in self.n]

    def __getitem__(self, idx):
        target = {"boxes": self.boxes[idx], "labels": torch.ones(self.n[idx], dtype=torch.int64), "image_id": idx}
        return torch.zeros(3, 10, 10), target

    def __len__(self):
        return 4


def build(fixed=False):
    torch.manual_seed(0)
    kw = {"collate_fn": tuple_collate} if fixed else {}
    data_loader = DataLoader(PennFudan(), batch_size=2, shuffle=False, **kw)

    def train_one_epoch():
        for images, targets in data_loader:
            images = list(images)
            targets = [dict(t.items()) for t in targets] if fixed else targets

    return SimpleNamespace(trigger=train_one_epoch)
