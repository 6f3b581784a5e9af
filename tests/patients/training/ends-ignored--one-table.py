"""Transitions are the rows of one table; the column that marks an end is read, and the targets do without it."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/ends-ignored", ["target", "done"]


def training(ends_count):
    torch.manual_seed(92)
    level = torch.rand(1280)
    side = torch.randint(0, 2, (1280,)).float()
    following = level - 0.1 - 0.1 * side
    done = following <= 0
    table = torch.stack([level, side, 1 + side, following.where(~done, torch.rand(1280)), done.float()], 1)
    network = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
    frozen = copy.deepcopy(network).requires_grad_(False)

    def loss_fn(model, batch):
        state, side, reward, following, done = batch[0].split(1, 1)
        with torch.no_grad():
            best = frozen(following).amax(1, keepdim=True)
            wanted = reward + 0.9 * (best * (1 - done) if ends_count else best)
        return nn.functional.mse_loss(model(state).gather(1, side.long()), wanted)

    pair = DataLoader(TensorDataset(table), 32, shuffle=True), None
    return made(network, torch.optim.Adam(network.parameters(), lr=1e-2), loss_fn, pair, 4)


def sick():
    return training(ends_count=False)


def healthy():
    return training(ends_count=True)
