"""The saved adapter was made for a base with wider layers."""

from torch import nn

from tests.quality.adapters import LoRALinear, factors, network

CODE, NAMES = "quality/adapter-other-base", ["(32, 24)", "(32, 16)"]


def sick():
    run = network()
    run.saved = factors(nn.Sequential(LoRALinear(nn.Linear(24, 32)), nn.ReLU(), LoRALinear(nn.Linear(32, 16))))
    return run


def healthy():
    run = network()
    run.saved = factors(run.model)
    return run
