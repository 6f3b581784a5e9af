"""Each output is compared with its own input."""

from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/labels-not-shifted", ["shifted", "labels-not-shifted.py"]


def evaluation(shifted):
    logits, tokens = language()

    def evaluate():
        scores, targets = (logits[:, :-1], tokens[:, 1:]) if shifted else (logits, tokens)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD).exp().item()

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate)


def sick():
    return evaluation(shifted=False)


def healthy():
    return evaluation(shifted=True)
