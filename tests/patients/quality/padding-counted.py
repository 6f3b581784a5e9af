"""The loss of an evaluation is a mean over all positions, padding too."""

from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/padding-counted", ["ignore_index=0", "padding-counted.py"]


def evaluation(ignored):
    logits, tokens = language()

    def evaluate():
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=PAD).exp().item()

    def evaluate_all():
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets).exp().item()

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate if ignored else evaluate_all)


def sick():
    return evaluation(ignored=False)


def healthy():
    return evaluation(ignored=True)
