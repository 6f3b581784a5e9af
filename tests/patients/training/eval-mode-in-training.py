"""A pretrained model comes in eval mode, and the loop never calls train()."""

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders, made

CODE, WHERE = "training/eval-mode-in-training", ["train"]


def pretrained():
    torch.manual_seed(44)
    return nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 5)).eval()


def training(switch):
    model = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ns = made(model, optimizer, cross_entropy, loaders(*clusters(800, spread=2.0)), 1)

    def train(callback):
        step = 0
        if switch:
            model.train()
        for _ in range(6):
            for batch in ns.train_loader:
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    ns.train = train
    return ns


def sick():
    return training(switch=False)


def healthy():
    return training(switch=True)
