"""A stream of token ids in one dimension, one of them beyond the vocabulary; its twin has the last id of it there."""

from types import SimpleNamespace

import numpy as np

CODE, NAMES = "data/token-out-of-vocabulary", ("tokens.npy#1234",)


def training(sick):
    def make(folder):
        ids = np.random.default_rng(5).integers(0, 1000, 4096).astype(np.uint16)
        ids[1234] = 1000 if sick else 999
        np.save(folder / "tokens.npy", ids)
        return folder

    return SimpleNamespace(make=make, expected={"vocab_size": 1000})


def sick():
    return training(True)


def healthy():
    return training(False)
