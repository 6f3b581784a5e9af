"""Two texts say their last words until the limit is reached."""

import random
from types import SimpleNamespace

from tests.quality import outputs

CODE, NAMES = "quality/repetition", ["1", "4"]


def outcome(bad):
    rng = random.Random(5)
    texts = [outputs.sentence(rng) for _ in range(8)]
    for row in (1, 4):
        texts[row] += " and then we went home again," * (12 if bad else 1)
    return SimpleNamespace(generated=texts)


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
