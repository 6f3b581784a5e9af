"""The embeddings of a gallery are collected with the model in eval mode, and with every graph."""

from types import SimpleNamespace

import torch
from torch import nn

CODE, HOLDER, LINE = "memory/eval-without-no-grad", ["gallery"], "gallery.append(encoder(images))"


def evaluation(mode):
    torch.manual_seed(4)
    encoder = nn.Sequential(nn.Linear(90, 800), nn.ReLU(), nn.Dropout(), nn.Linear(800, 16)).eval()
    gallery = []

    def step():
        images = torch.randn(120, 90)
        with mode():
            gallery.append(encoder(images))

    return SimpleNamespace(model=encoder, optimizer=None, step=step, steps=3, names={"gallery": gallery})


def sick():
    return evaluation(torch.enable_grad)


def healthy():
    return evaluation(torch.inference_mode)
