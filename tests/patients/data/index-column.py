"""The index was written as a column, and read as one."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/index-column", ("t.csv#Unnamed: 0",)


def training(sick):
    def make(folder):
        numbers().to_csv(folder / "t.csv", index=sick)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
