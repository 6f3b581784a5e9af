"""Two of ten samples are training pictures, one of them mirrored."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/memorized", ["2", "7"]


def outcome(bad):
    rng = np.random.default_rng(6)
    training = [outputs.scene(rng) for _ in range(60)]
    generated = [outputs.scene(rng) for _ in range(10)]
    if bad:
        generated[2], generated[7] = training[4], training[31][:, ::-1]
    return SimpleNamespace(generated=outputs.whole(generated), training=outputs.whole(training))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
