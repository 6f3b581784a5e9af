"""A table in UTF-16, as a spreadsheet writes it, lacks a number; its twin in the same encoding lacks none."""

from types import SimpleNamespace

import numpy as np

from tests.media import numbers

CODE, NAMES = "data/nonfinite-values", ("weather.csv#11",)


def training(sick):
    def make(folder):
        table = numbers()
        table.loc[11, "b"] = np.nan if sick else 0.5
        table.to_csv(folder / "weather.csv", sep=";", index=False, encoding="utf-16")
        return folder

    return SimpleNamespace(make=make, expected={"columns": ["a", "b", "c"], "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
