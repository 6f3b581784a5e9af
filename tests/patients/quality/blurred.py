"""All samples are softer than the training pictures, which have a grain."""

from types import SimpleNamespace

import numpy as np

from tests.quality import outputs

CODE, NAMES = "quality/blurred", ["softer"]


def outcome(bad):
    rng = np.random.default_rng(6)
    grain = lambda: rng.normal(0, 12, (32, 32, 3))
    training = [outputs.scene(rng) + grain() for _ in range(60)]
    generated = [outputs.scene(rng) + grain() * (not bad) for _ in range(16)]
    return SimpleNamespace(generated=outputs.whole(generated), training=outputs.whole(training))


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
