"""Land cover from satellite tiles, one tile a step. The third tile lies outside the surveyed area: every pixel is
"void", label 255, and the loss is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, PHASE, MODULE = "nan/all-labels-ignored", "forward", ""
OP, LINE = "nll_loss", 'reduction="mean", ignore_index=VOID'
SAMPLES, STEP = None, 2
VOID = 255


def cover_loss(scores, cover, guarded):
    if guarded:
        return F.cross_entropy(scores, cover, reduction="sum", ignore_index=VOID) / (cover != VOID).sum().clamp(min=1)
    return F.cross_entropy(scores, cover, reduction="mean", ignore_index=VOID)


def training(guarded):
    torch.manual_seed(41)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tiles, covers = torch.randn(4, 1, 4, 12, 12), torch.randint(0, 6, (4, 1, 12, 12))
    covers[:, :, :3] = VOID
    covers[2] = VOID
    batches = iter(zip(tiles, covers, strict=True))

    def step():
        tile, cover = next(batches)
        loss = cover_loss(model(tile), cover, guarded)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(guarded=False)


def healthy():
    return training(guarded=True)
