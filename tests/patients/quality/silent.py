"""One of eight sounds is silent."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/silent", ["2", "silent"]


def outcome(bad):
    rng = np.random.default_rng(2)
    generated = [outputs.speech(rng) for _ in range(8)]
    if bad:
        generated[2] = generated[2] * 0
    return SimpleNamespace(generated=generated, sample_rate=outputs.RATE)


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
