"""The closure of LBFGS clears nothing: the loop does, once for all the calls of a step."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/zero-grad-missing", ["optimizer", "closure"]


def training(clear):
    torch.manual_seed(73)
    x = torch.randn(320, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    ns = made(model, optimizer, loss_fn, loaders(x, torch.sin(x @ torch.randn(6, 1)), 64), 6)

    def train(callback):
        step = 0
        for _ in range(6):
            for batch in ns.train_loader:
                optimizer.zero_grad()

                def closure(batch=batch):
                    if clear:
                        optimizer.zero_grad()
                    loss = loss_fn(model, batch)
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
                callback(step, float(loss))
                step += 1

    ns.train = train
    return ns


def sick():
    return training(clear=False)


def healthy():
    return training(clear=True)
