"""The data set gives None for a picture that can't be read."""

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "error/collate-mismatch", "names": ["None", "6"]}


class Coco(Dataset):
    def __init__(self, skip):
        self.ids = list(range(10))
        if skip:
            self.ids.remove(6)

    def __len__(self):
        return len(self.ids)

    def _read(self, idx):
        if idx == 6:
            return None
        return torch.full((3, 8, 8), float(idx))

    def __getitem__(self, index):
        img = self._read(self.ids[index])
        if img is None:
            return None
        return img, torch.tensor(self.ids[index] % 2)


def build(fixed=False):
    torch.manual_seed(0)
    val_loader = DataLoader(Coco(fixed), batch_size=4)

    @torch.no_grad()
    def evaluate(loader):
        n = 0
        for imgs, targets in loader:
            n += (imgs.mean((1, 2, 3)) > targets).sum().item()
        return n

    return SimpleNamespace(trigger=lambda: evaluate(val_loader))
