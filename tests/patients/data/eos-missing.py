"""One row was prepared without the end token; a row as long as the model is cut, and needs none."""

from types import SimpleNamespace

CODE, NAMES = "data/eos-missing", ("1",)


def training(sick):
    rows = [{"input_ids": [5, 9, 2, 0]}, {"input_ids": [7, 8, 6 if sick else 2, 0]}, {"input_ids": [3, 4, 5, 6]}]
    return SimpleNamespace(dataset=rows, expected={"pad_id": 0, "eos_id": 2, "max_length": 4})


def sick():
    return training(True)


def healthy():
    return training(False)
