"""To save disk space the checkpoint was written in float16. One gain of the sensor's calibration was above 65,504,
came back as inf, and the first loss is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/parameter-nonfinite", "parameter", "gain", "", None
SAMPLES, STEP = None, 0


class Gain(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(channels))

    def forward(self, volts):
        return volts * self.factor


class Sensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = Gain(5)
        self.norm = nn.LayerNorm(5)
        self.reading = nn.Linear(5, 1)

    def forward(self, volts):
        return self.reading(self.norm(self.gain(volts)))


def checkpoint(dtype):
    torch.manual_seed(14)
    calibrated = Sensor()
    with torch.no_grad():
        calibrated.gain.factor.copy_(torch.tensor([3.0, 12.5, 71_300.0, 40.0, 900.0]))
    return {name: value.to(dtype) for name, value in calibrated.state_dict().items()}


def training(dtype):
    model = Sensor()
    model.load_state_dict(checkpoint(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    volts, degrees = torch.rand(2, 6, 5) * 1e-3, torch.rand(2, 6, 1)
    batches = iter(zip(volts, degrees, strict=True))

    def step():
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=2)


def sick():
    return training(torch.float16)


def healthy():
    return training(torch.float32)
