"""Each output is compared with its own input, by a loss that was made beforehand."""

from types import SimpleNamespace

from torch import nn

from tests.quality.language import PAD, language

CODE, NAMES = "quality/labels-not-shifted", ["total += criterion(scores.flatten(0, 1), targets.flatten()).item()"]


def evaluation(shifted):
    logits, tokens = language()

    def evaluate():
        criterion, total = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum"), 0.0
        scores, targets = (logits[:, :-1], tokens[:, 1:]) if shifted else (logits, tokens)
        total += criterion(scores.flatten(0, 1), targets.flatten()).item()
        return 2.718281828459045 ** (total / int((targets != PAD).sum()))

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate)


def sick():
    return evaluation(shifted=False)


def healthy():
    return evaluation(shifted=True)
