"""The file was written on a card, and there is none here."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

CODE, NAMES = "checkpoint/device-mapping", ("0.weight", "map_location")


def training(sick):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def make(folder):
        tag = "cuda:1" if sick else "cpu"
        with mock.patch.object(torch.serialization, "location_tag", lambda storage: tag):
            torch.save(model.state_dict(), folder / "run.pt")
        return folder / "run.pt"

    return SimpleNamespace(make=make, model=model)


def sick():
    return training(True)


def healthy():
    return training(False)
