"""A word was split into two tokens, and its label was not."""

from types import SimpleNamespace

CODE, NAMES = "data/labels-misaligned", ("2",)


def training(sick):
    rows = [{"tokens": ["to", "be"], "ner_tags": [0, 1]}, {"tokens": ["or"], "ner_tags": [2]}]
    rows.append({"tokens": ["not", "to", "be"], "ner_tags": [0, 1] if sick else [0, 1, 1]})
    return SimpleNamespace(dataset=rows, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
