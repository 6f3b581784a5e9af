"""The adapter was merged into the weights, which were saved, and is put on top of them again."""

import torch

from tests.quality.adapters import network, trained

CODE, NAMES = "quality/adapter-merged-twice", ["twice"]


def sick():
    run = trained(network())
    with torch.no_grad():
        for layer in (run.model[0], run.model[2]):
            layer.linear.weight += 2 * layer.lora_B @ layer.lora_A
    return run


def healthy():
    return trained(network())
