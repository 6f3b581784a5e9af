"""An evaluation averages the perplexities of its batches."""

import math
from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/mean-of-perplexities", ["batches of 3", "mean-of-perplexities.py"]


def evaluation(whole):
    logits, tokens = language()

    def evaluate():
        values, total, count = [], 0.0, 0
        for rows in range(0, len(tokens), 3):
            targets = tokens[rows : rows + 3, 1:].flatten()
            loss = F.cross_entropy(logits[rows : rows + 3, :-1].flatten(0, 1), targets, ignore_index=PAD).item()
            values.append(math.exp(loss))
            known = int((targets != PAD).sum())
            total, count = total + loss * known, count + known
        return math.exp(total / count) if whole else sum(values) / len(values)

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, batch_size=3, reported=evaluate)


def sick():
    return evaluation(whole=False)


def healthy():
    return evaluation(whole=True)
