"""Two sources were merged, and one review stands in both."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

CODE, NAMES = "data/duplicate-within-split", ("reviews.csv#30",)
WORDS = "the a plot actor music scene slow bright long dull funny score end".split()


def training(sick):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 14)) for _ in range(31)]
    if sick:
        texts[30] = texts[4]

    def make(folder):
        table = pd.DataFrame({"id": np.arange(31), "text": texts, "label": np.arange(31) % 2})
        table.to_csv(folder / "reviews.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"text": "text", "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
