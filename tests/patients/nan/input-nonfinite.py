"""Depth maps are one over the disparity that the stereo camera gives. Where it saw nothing the disparity is 0, and
the dataset hands out inf for two pictures of the third batch.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/input-nonfinite", "input", "", "", "model(depth)"
SAMPLES, STEP = (0, 3), 2


class StereoPairs(torch.utils.data.Dataset):
    def __init__(self, farthest):
        seen = torch.Generator().manual_seed(21)
        self.disparity = torch.rand(20, 1, 8, 8, generator=seen) * 0.5 + 0.5
        self.disparity[10, 0, 2, 2:5] = self.disparity[13, 0, 0, 0] = 0.0
        self.room = torch.randint(0, 3, (20,), generator=seen)
        self.farthest = farthest

    def __len__(self):
        return len(self.room)

    def __getitem__(self, i):
        return (1 / self.disparity[i]).clamp(max=self.farthest), self.room[i]


def training(farthest):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.SiLU(), nn.Flatten(), nn.Linear(54, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = list(torch.utils.data.DataLoader(StereoPairs(farthest), batch_size=5))
    batches = iter(batches)

    def step():
        depth, room = next(batches)
        loss = nn.functional.cross_entropy(model(depth), room)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(farthest=float("inf"))


def healthy():
    return training(farthest=50.0)
