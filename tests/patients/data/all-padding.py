"""An empty line was tokenized."""

from types import SimpleNamespace

CODE, NAMES = "data/all-padding", ("1",)


def training(sick):
    rows = [{"input_ids": [5, 9, 0, 0]}, {"input_ids": [0 if sick else 7, 0, 0, 0]}]
    return SimpleNamespace(dataset=rows, expected={"vocab_size": 30, "pad_id": 0})


def sick():
    return training(True)


def healthy():
    return training(False)
