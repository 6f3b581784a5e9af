"""A grain lies over all samples."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/noisy", ["grainier"]


def outcome(bad):
    rng = np.random.default_rng(6)
    training = [outputs.scene(rng) for _ in range(60)]
    generated = [outputs.scene(rng) for _ in range(16)]
    if bad:
        generated = [picture + rng.normal(0, 25, picture.shape) for picture in generated]
    return SimpleNamespace(generated=outputs.whole(generated), training=outputs.whole(training))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
