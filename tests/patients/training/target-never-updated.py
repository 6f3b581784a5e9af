"""The target network of a Q-learner keeps its first weights."""

import copy
import random
from types import SimpleNamespace

import torch
from torch import nn

CODE, WHERE = "training/target-never-updated", ["target"]
CELLS = 6


def training(update):
    torch.manual_seed(78)
    network = nn.Sequential(nn.Linear(CELLS, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    chance = random.Random(0)
    moves = [(cell, side) for cell in range(CELLS - 1) for side in range(2)]

    def train(callback):
        for step in range(160):
            cell, side = torch.tensor(chance.choices(moves, k=32)).T
            following = (cell + 2 * side - 1).clamp_min(0)
            reward = (following == CELLS - 1).float()
            states = torch.eye(CELLS)
            with torch.no_grad():
                best = target(states[following]).amax(1)
                wanted = reward + 0.9 * (1 - reward) * best
            value = network(states[cell]).gather(1, side[:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update and step % 10 == 0:
                target.load_state_dict(network.state_dict())
            callback(step, loss.item())

    parts = dict.fromkeys(("loss_fn", "train_loader", "val_loader", "scheduler"))
    return SimpleNamespace(model=network, optimizer=optimizer, train=train, **parts)


def sick():
    return training(update=False)


def healthy():
    return training(update=True)
