"""The hidden layer's weights were drawn twenty times too wide: nearly all of its sigmoids are 0 or 1."""
import torch
from torch import nn

from tests.training.loops import loaders, made, mse

CODE, WHERE = "training/saturated-activation", ["0", "1"]


def training(wide):
    torch.manual_seed(55)
    x = torch.randn(800, 10)
    y = torch.tanh(x[:, :3].sum(1, keepdim=True)) + 0.5 * x[:, 3:4]
    model = nn.Sequential(nn.Linear(10, 24), nn.Sigmoid(), nn.Linear(24, 1))
    nn.init.normal_(model[0].weight, std=wide)
    return made(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, loaders(x, y), 10)


def sick():
    return training(wide=20.0)


def healthy():
    return training(wide=0.3)
