"""A teacher's answers are kept in the order of one pass, and the next passes are shuffled anew."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.training.loops import clusters, cross_entropy, loaders

CODE, WHERE, RUN = "training/label-noise", ["teacher"], True


def training(by_sample):
    torch.manual_seed(93)
    x, y = clusters(480, classes=4)
    centres = torch.stack([x[y == k].mean(0) for k in range(4)])
    train_loader, val_loader = loaders(x, y)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def teacher(x):
        return (-torch.cdist(x, centres)).softmax(1)

    def train(callback):
        kept, step = [teacher(x) for x, _ in train_loader], 0
        for _ in range(6):
            for i, (x, y) in enumerate(train_loader):
                answers, scores = teacher(x) if by_sample else kept[i], model(x)
                soft = F.kl_div(scores.log_softmax(1), answers, reduction="batchmean")
                loss = 0.3 * F.cross_entropy(scores, y) + 0.7 * soft
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=cross_entropy,
        train_loader=train_loader,
        val_loader=val_loader,
        scheduler=None,
        train=train,
    )


def sick():
    return training(by_sample=False)


def healthy():
    return training(by_sample=True)
