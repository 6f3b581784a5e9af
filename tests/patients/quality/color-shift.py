"""All samples are too blue."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/color-shift", ["blue"]


def outcome(bad):
    rng = np.random.default_rng(6)
    training = [outputs.scene(rng) for _ in range(60)]
    generated = [outputs.scene(rng) for _ in range(60)]
    if bad:
        generated = [picture * (0.9, 0.95, 1.25) for picture in generated]
    return SimpleNamespace(generated=outputs.whole(generated), training=outputs.whole(training))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
