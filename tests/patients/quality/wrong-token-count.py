"""The losses of all tokens but the first are summed, and divided by the number of all tokens."""

from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/wrong-token-count", ["(tokens[:, 1:] != PAD).sum()", "wrong-token-count.py", "it works"]


def evaluation(shifted):
    logits, tokens = language()

    def evaluate():
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
        )
        count = (tokens[:, 1:] != PAD).sum()
        return (total / count).exp().item()

    def evaluate_by_all():
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
        )
        count = (tokens != PAD).sum()
        return (total / count).exp().item()

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate if shifted else evaluate_by_all)


def sick():
    return evaluation(shifted=False)


def healthy():
    return evaluation(shifted=True)
