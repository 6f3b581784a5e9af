"""The optimizer was made of the model's parameters before the adapter was put in."""

import torch

from tests.quality.adapters import network, trained

CODE, NAMES = "quality/adapter-frozen", ["0.lora_A", "optimizer"]


def sick():
    run = network()
    run.optimizer = torch.optim.AdamW(run.base.parameters(), lr=1e-2)
    return run


def healthy():
    return trained(network())
