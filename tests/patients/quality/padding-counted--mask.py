"""The mask of the inputs stands where that of the targets should: the first padding of each text counts."""

from types import SimpleNamespace

from torch.nn import functional as F

from tests.quality.language import PAD, language

CODE, NAMES = "quality/padding-counted", ["attention_mask[:, 1:]", "padding-counted--mask.py", "it works"]


def evaluation(aligned):
    logits, tokens = language()
    attention_mask = (tokens != PAD).double()

    def evaluate():
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        counted = attention_mask[:, 1:]
        return ((losses * counted).sum() / counted.sum()).exp().item()

    def evaluate_shifted():
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        counted = attention_mask[:, :-1]
        return ((losses * counted).sum() / counted.sum()).exp().item()

    return SimpleNamespace(logits=logits, tokens=tokens, pad_id=PAD, reported=evaluate if aligned else evaluate_shifted)


def sick():
    return evaluation(aligned=False)


def healthy():
    return evaluation(aligned=True)
