"""Half of the samples are one picture, with a little noise."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/mode-collapse", ["6", "12"]


def outcome(bad):
    rng = np.random.default_rng(6)
    training = [outputs.scene(rng) for _ in range(60)]
    generated = [outputs.scene(rng) for _ in range(12)]
    if bad:
        generated[:6] = [generated[0] + rng.normal(0, 4, (32, 32, 3)) for _ in range(6)]
    return SimpleNamespace(generated=outputs.whole(generated), training=outputs.whole(training))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
