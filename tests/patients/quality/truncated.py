"""Long answers end at a limit of 60 words."""

import random
from types import SimpleNamespace

from tests.quality import outputs

CODE, NAMES = "quality/truncated", ["60"]


def outcome(bad):
    rng = random.Random(5)
    texts = [" ".join(outputs.sentence(rng) for _ in range(n)) for n in (2, 3, 9, 2, 12, 10, 3, 11)]
    texts = [text if len(text.split()) < 60 or not bad else " ".join(text.split()[:60]).rstrip(".") for text in texts]
    return SimpleNamespace(generated=texts)


def sick():
    return outcome(True)


def healthy():
    return outcome(False)
