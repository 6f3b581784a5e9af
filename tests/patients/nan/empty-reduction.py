"""A detector takes the mean of the box error over the anchors that hold an object. The third picture is empty, so
there is nothing to take a mean of.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

CODE, PHASE, MODULE, OP, LINE = "nan/empty-reduction", "forward", "", "mean", "error[hit].mean()"
SAMPLES, STEP = None, 2


def box_loss(error, hit, guarded):
    if guarded:
        return (error * hit[:, None]).sum() / hit.sum().clamp(min=1)
    return error[hit].mean()


def training(guarded):
    torch.manual_seed(9)
    trunk = nn.Sequential(nn.Linear(12, 20), nn.GELU())
    box, found = nn.Linear(20, 4), nn.Linear(20, 1)
    model = nn.ModuleDict({"trunk": trunk, "box": box, "found": found})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    anchors, truth = torch.randn(4, 15, 12), torch.rand(4, 15, 4)
    objects = torch.rand(4, 15) > 0.6
    objects[2] = False
    pictures = iter(zip(anchors, truth, objects, strict=True))

    def step():
        x, boxes, hit = next(pictures)
        h = trunk(x)
        error = F.smooth_l1_loss(box(h), boxes, reduction="none")
        loss = F.binary_cross_entropy_with_logits(found(h).squeeze(-1), hit.float())
        loss = loss + box_loss(error, hit, guarded)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=4)


def sick():
    return training(guarded=False)


def healthy():
    return training(guarded=True)
