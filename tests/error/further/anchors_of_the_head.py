"""A detector moves to the accelerator (the meta device stands in for it); the anchors of its head, a plain attribute,
do not.
"""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/device-mismatch", "names": ["anchors", "boxes"]}


class Detect(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 1)
        a = torch.tensor([[10.0, 13.0], [16.0, 30.0]])
        if keep:
            self.register_buffer("anchors", a)
        else:
            self.anchors = a


class Yolo(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU())
        self.head = Detect(keep)

    def forward(self, im):
        return self.head.conv(self.backbone(im))


def build_targets(model, targets):
    head = model.head
    boxes = targets[:, 2:4]
    ratio = boxes[None] / head.anchors[:, None]
    return ratio.max(2)[0]


class ComputeLoss:
    def __init__(self, model, hyp=None):
        self.model, self.hyp = model, hyp or {"box": 0.05}

    def __call__(self, p, targets):
        r = build_targets(self.model, targets)
        return p.mean() + self.hyp["box"] * r.mean()


def build(fixed=False):
    torch.manual_seed(0)
    device = torch.device("meta")
    model = Yolo(fixed).to(device)
    compute_loss = ComputeLoss(model)

    def trigger():
        for imgs, targets, _ in [(torch.rand(2, 3, 16, 16), torch.rand(5, 6), ["a.jpg"])]:
            imgs = imgs.to(device)
            loss = compute_loss(model(imgs), targets.to(device))
            loss.backward()

    return SimpleNamespace(trigger=trigger)
