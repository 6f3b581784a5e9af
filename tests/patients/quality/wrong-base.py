"""Two is raised to a loss in nats."""

import math
from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/wrong-base", ["2", "nats", "wrong-base.py"]


def evaluation(bits):
    logits, tokens = language()

    def evaluate():
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD).item()
        return 2 ** (loss / math.log(2) if bits else loss)

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate)


def sick():
    return evaluation(bits=False)


def healthy():
    return evaluation(bits=True)
