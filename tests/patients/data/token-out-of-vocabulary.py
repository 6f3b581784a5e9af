"""A token was added to the tokenizer, and the model was not told."""

from types import SimpleNamespace

CODE, NAMES = "data/token-out-of-vocabulary", ("30",)


def training(sick):
    rows = [{"input_ids": [5, 9, 29, 0]}, {"input_ids": [7, 30 if sick else 8, 3, 0]}]
    return SimpleNamespace(dataset=rows, expected={"vocab_size": 30, "pad_id": 0})


def sick():
    return training(True)


def healthy():
    return training(False)
