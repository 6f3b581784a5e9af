"""A forecaster's window ends with the hour that it is to forecast, and holds its target."""

import torch
from torch import nn

from tests.training.loops import loaders, made

CODE, WHERE = "training/leakage", ["train_loader", "target"]


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.past, self.out = nn.GRU(3, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, window):
        return self.out(self.past(window)[0][:, -1])


def training(ends_before):
    torch.manual_seed(15)
    time = torch.arange(900.0)
    load = (time / 4).sin() + (time / 11).cos() + 0.3 * torch.randn(900)
    table = torch.stack([load, (time / 24).sin(), torch.randn(900)], 1)
    windows = table.unfold(0, 12, 1).transpose(1, 2).clone()
    target = windows[:, -1, :1].clone()
    windows[:, -1, 0] = 0.0 if ends_before else target[:, 0]
    model = Forecast()

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return made(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, loaders(windows, target), 5)


def sick():
    return training(ends_before=False)


def healthy():
    return training(ends_before=True)
