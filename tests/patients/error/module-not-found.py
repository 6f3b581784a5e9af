"""A whole model is saved, the file of its class is renamed, and the saved model is loaded by the new program."""

import io
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

CODE, NAMES = "error/module-not-found", ("nets_of_last_year", "Encoder", "nets_of_this_year")


def written(name):
    """A module that holds the class, as an import of its file would give it."""
    module = sys.modules[name] = ModuleType(name)
    exec("from torch import nn\nclass Encoder(nn.Linear):\n    pass\n", module.__dict__)
    return module


def training(weights_alone):
    torch.manual_seed(0)
    model, file = written("nets_of_last_year").Encoder(3, 2), io.BytesIO()
    torch.save(model.state_dict() if weights_alone else model, file)
    del sys.modules["nets_of_last_year"]

    def serve():
        nets = written("nets_of_this_year")
        file.seek(0)
        if not weights_alone:
            return torch.load(file, weights_only=False)
        fresh = nets.Encoder(3, 2)
        fresh.load_state_dict(torch.load(file))
        return nn.Sequential(fresh)

    return SimpleNamespace(trigger=serve)


def sick():
    return training(weights_alone=False)


def healthy():
    return training(weights_alone=True)
