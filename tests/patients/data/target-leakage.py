"""The desk that deals with an outcome is a column."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/target-leakage", ("t.csv#desk",)


def training(sick):
    def make(folder):
        table = numbers()
        codes = table.label.map({0: 40, 1: 10, 2: 30})
        table["desk"] = codes if sick else codes.sample(frac=1, random_state=0).to_numpy()
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"columns": ["a", "b", "desk"], "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
