"""One layer's factors both begin at zero: no gradient ever moves them."""

from types import SimpleNamespace

import torch

from tests.quality.adapters import network, trained

CODE, NAMES = "quality/adapter-zero", ["2.lora_A", "2.lora_B"]


def outcome(bad):
    run = network()
    if bad:
        torch.nn.init.zeros_(run.model[2].lora_A)
    return SimpleNamespace(**vars(trained(run)))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
