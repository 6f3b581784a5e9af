"""One of eight sounds is cut off at full scale."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/clipped", ["5", "clipped"]


def outcome(bad):
    rng = np.random.default_rng(2)
    generated = [outputs.speech(rng) for _ in range(8)]
    if bad:
        generated[5] = np.clip(generated[5] * 6, -1, 1)
    return SimpleNamespace(generated=generated, sample_rate=outputs.RATE)


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
