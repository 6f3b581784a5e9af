"""Labels come from an int32 array; the loss wants int64."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

EXPECT = {"code": "error/dtype-mismatch", "names": ["labels"]}


class ChatDataset(torch.utils.data.Dataset):
    def __init__(self, fixed):
        rng = np.random.RandomState(0)
        self.x_data = rng.rand(20, 5).astype(np.float32)
        self.y_data = rng.randint(0, 4, 20).astype(np.int64 if fixed else np.int32)

    def __getitem__(self, index):
        return self.x_data[index], self.y_data[index]

    def __len__(self):
        return 20


def build(fixed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def main():
        for _epoch in range(2):
            for words, labels in torch.utils.data.DataLoader(ChatDataset(fixed), batch_size=8, shuffle=True):
                outputs = model(words)
                loss = criterion(outputs, labels)
                opt.zero_grad()
                loss.backward()
                opt.step()

    return SimpleNamespace(trigger=main)
