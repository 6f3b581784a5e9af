"""What trainings in these tests are made of: data, loaders, the loop that everybody writes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def loaders(x, y, batch=32, held=0.2, **more):
    """Training and validation loaders; the samples are in no order."""
    cut = int(len(x) * (1 - held))
    g = torch.Generator().manual_seed(7)
    return (
        DataLoader(TensorDataset(x[:cut], y[:cut]), batch_size=batch, shuffle=True, generator=g, **more),
        DataLoader(TensorDataset(x[cut:], y[cut:]), batch_size=64),
    )


def plainly(model, optimizer, loss_fn, train_loader, passes, *, scheduler=None, each=None, clip=None, validate=None):
    """The loop that everybody writes. each: step the scheduler once a "batch" or once a "pass"."""

    def train(callback):
        step = 0
        for _ in range(passes):
            model.train()
            for batch in train_loader:
                optimizer.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if each == "batch":
                    scheduler.step()
                callback(step, loss.item())
                step += 1
            if validate is not None:
                value = validate()
            if each == "pass":
                scheduler.step()
            elif each == "metric":
                scheduler.step(value)

    return train


def made(model, optimizer, loss_fn, pair, passes, **more):
    train_loader, val_loader = pair
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        train_loader=train_loader,
        val_loader=val_loader,
        scheduler=more.get("scheduler"),
        train=plainly(model, optimizer, loss_fn, train_loader, passes, **more),
    )


def cured_loss(fix):
    """The loss with the fix: of an edit that was run, or of the experiment that stands for a suggestion."""
    assert (fix.verified is True) == (fix.edit is not None) == ("experiment" not in fix.after), fix
    return fix.after["loss in the experiment" if fix.edit is None else "loss with the fix"]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def validation(model, loss_fn, val_loader):
    @torch.no_grad()
    def validate():
        model.eval()
        value = sum(loss_fn(model, batch).item() for batch in val_loader) / len(val_loader)
        model.train()
        return value

    return validate


def shapes(n, size=8, classes=4, noise=0.7, seed=0):
    """Pictures of one channel with a bright quarter."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, classes, (n,), generator=g)
    x = torch.randn(n, 1, size, size, generator=g) * noise
    half = size // 2
    for i, k in enumerate(label.tolist()):
        x[i, 0, (k // 2) * half : (k // 2) * half + half, (k % 2) * half : (k % 2) * half + half] += 1.0
    return x, label


def clusters(n, classes=5, width=12, spread=1.0, seed=1):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, classes, (n,), generator=g)
    centre = torch.randn(classes, width, generator=g) * 1.5
    return centre[label] + torch.randn(n, width, generator=g) * spread, label
