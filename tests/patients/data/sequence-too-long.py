"""A text was not cut."""

from types import SimpleNamespace

CODE, NAMES = "data/sequence-too-long", ("9",)


def training(sick):
    rows = [{"input_ids": list(range(8))}, {"input_ids": list(range(9 if sick else 7))}]
    return SimpleNamespace(dataset=rows, expected={"vocab_size": 30, "max_length": 8})


def sick():
    return training(True)


def healthy():
    return training(False)
