"""Three evaluation rows stand in training, in other case."""

import random
from types import SimpleNamespace

from tests.quality import outputs

CODE, NAMES = "quality/evaluation-overlap", ["2", "5", "9"]


def outcome(bad):
    rng = random.Random(5)
    training = [outputs.sentence(rng, 16) for _ in range(60)]
    evaluation = [outputs.sentence(rng, 16) for _ in range(12)]
    for row in (2, 5, 9) if bad else ():
        evaluation[row] = training[row + 20].upper()
    return SimpleNamespace(evaluation=evaluation, training=training)


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
