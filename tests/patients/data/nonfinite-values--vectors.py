"""A table with a vector in each row, one of which holds a NaN; the vectors of its twin are finite."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

CODE, NAMES = "data/nonfinite-values", ("vectors.parquet#7",)


def training(sick):
    def make(folder):
        vectors = np.random.default_rng(1).normal(size=(30, 8))
        vectors[7, 3] = np.nan if sick else 0
        table = pd.DataFrame({"user": [f"u{number}" for number in range(30)], "vector": list(vectors)})
        table.to_parquet(folder / "vectors.parquet")
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
