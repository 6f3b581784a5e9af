"""The labels are asked for under a name that is one letter off the one that the file has."""

import pathlib
import tempfile
from types import SimpleNamespace

import pandas as pd

CODE, NAMES = "error/file-not-found", ("lables.csv", "labels.csv")


def training(name):
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "labels.csv").write_text("leaf,kind\n1,oak\n")
    return SimpleNamespace(trigger=lambda: pd.read_csv(folder / name))


def sick():
    return training("lables.csv")


def healthy():
    return training("labels.csv")
