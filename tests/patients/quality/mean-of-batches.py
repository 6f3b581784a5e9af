"""An evaluation averages the losses of single texts, short and long ones alike."""

import math
from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/mean-of-batches", ["single texts", "mean-of-batches.py"]


def evaluation(weighted):
    logits, tokens = language()

    def evaluate():
        each, sizes = [], []
        for scores, row in zip(logits, tokens):
            each.append(F.cross_entropy(scores[:-1], row[1:], ignore_index=PAD).item())
            sizes.append(int((row[1:] != PAD).sum()) if weighted else 1)
        return math.exp(sum(a * b for a, b in zip(each, sizes)) / sum(sizes))

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, batch_size=1, reported=evaluate)


def sick():
    return evaluation(weighted=False)


def healthy():
    return evaluation(weighted=True)
