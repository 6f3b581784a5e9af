"""SGD with momentum, which the loop over the batches makes anew: the momentum adds up nothing. No optimizer is given.
Made anew in each epoch, as by those who train in stages, it is left in peace."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.training.loops import clusters, cross_entropy, loaders

CODE, WHERE, RUN = "training/optimizer-recreated", ["optimizer", "SGD"], True


def training(each_batch):
    torch.manual_seed(36)
    train_loader, val_loader = loaders(*clusters(640))
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))

    def train(callback):
        number = 0
        for _ in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for batch in train_loader:
                if each_batch:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
                loss = cross_entropy(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                callback(number, loss.item())
                number += 1

    given = {"train_loader": train_loader, "val_loader": val_loader, "scheduler": None}
    return SimpleNamespace(model=model, optimizer=None, loss_fn=cross_entropy, train=train, **given)


def sick():
    return training(each_batch=True)


def healthy():
    return training(each_batch=False)
