"""A graph network attends to neighbours only. The second batch holds a molecule with a lone ion: a node without any
neighbour, whose softmax has nothing left to choose from.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE = "nan/fully-masked-softmax", "forward", "layers.0"
OP, LINE = "softmax", "torch.softmax(scores, dim=-1)"
SAMPLES, STEP = (2,), 1


class Neighbours(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, atoms, bonded):
        scores = self.score(atoms) @ atoms.transpose(1, 2)
        scores = scores.masked_fill(~bonded, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return atoms + torch.tanh(weights @ self.value(atoms))


class Molecule(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.layers = nn.ModuleList([Neighbours(width), Neighbours(width)])
        self.energy = nn.Linear(width, 1)

    def forward(self, atoms, bonded):
        for layer in self.layers:
            atoms = layer(atoms, bonded)
        return self.energy(atoms).sum((1, 2))


def training(self_loops):
    torch.manual_seed(6)
    model = Molecule()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    atoms, energies = torch.randn(3, 4, 6, 10), torch.randn(3, 4)
    bonded = torch.ones(3, 4, 6, 6, dtype=torch.bool)
    bonded[:, :, range(6), range(6)] = self_loops
    bonded[1, 2, 5, :5] = bonded[1, 2, :5, 5] = False
    batches = iter(zip(atoms, bonded, energies, strict=True))

    def step():
        a, b, energy = next(batches)
        loss = nn.functional.mse_loss(model(a, b), energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(self_loops=False)


def healthy():
    return training(self_loops=True)
