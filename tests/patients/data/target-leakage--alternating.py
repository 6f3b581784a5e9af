"""Rows of two classes by turns, with their dates, which give nothing away; a column that is written later does."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

CODE, NAMES = "data/target-leakage", ("closed",)


def training(sick):
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"opened": pd.date_range("2020", periods=60), "amount": rng.normal(size=60)})
    table["closed"] = [0, 7] * 30 if sick else rng.integers(0, 9, 60)
    table["label"] = [0, 1] * 30
    return SimpleNamespace(dataset=table, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
