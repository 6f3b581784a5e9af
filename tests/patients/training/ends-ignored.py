"""A Q-learner walks along a corridor, and expects more to come where it has ended."""

import copy
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.loops import made

CODE, WHERE = "training/ends-ignored", ["target", "done"]
CELLS = 6


def training(ends_count):
    torch.manual_seed(86)
    chance, states, steps, cell = random.Random(0), torch.eye(CELLS), [], 0
    for _ in range(640):
        side = chance.randrange(2)
        following = max(cell + 2 * side - 1, 0)
        steps.append((cell, side, following, following == CELLS - 1))
        cell = 0 if following == CELLS - 1 else following
    cell, side, following, done = torch.tensor(steps).T
    data = TensorDataset(states[cell], side, 5.0 * done, states[following], done.bool())
    network = nn.Sequential(nn.Linear(CELLS, 16), nn.ReLU(), nn.Linear(16, 2))
    frozen = copy.deepcopy(network)

    def loss_fn(model, batch):
        state, action, reward, following, done = batch
        with torch.no_grad():
            best = frozen(following).amax(1)
            wanted = reward + 0.9 * (best * ~done if ends_count else best)
        value = model(state).gather(1, action[:, None])[:, 0]
        return nn.functional.smooth_l1_loss(value, wanted)

    pair = DataLoader(data, 32, shuffle=True), None
    return made(network, torch.optim.Adam(network.parameters(), lr=1e-2), loss_fn, pair, 4)


def sick():
    return training(ends_count=False)


def healthy():
    return training(ends_count=True)
