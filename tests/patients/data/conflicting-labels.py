"""A text stands in the lists of two classes."""

from types import SimpleNamespace

import pandas as pd

CODE, NAMES = "data/conflicting-labels", ("t.csv#3", "t.csv#8")


def training(sick):
    def make(folder):
        texts = [f"patients of cohort {number} were followed up" for number in range(12)]
        if sick:
            texts[8] = texts[3]
        pd.DataFrame({"text": texts, "label": [0, 1, 2, 1] * 3}).to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"text": "text", "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
