"""A cell is empty, and one is infinite."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/nonfinite-values", ("t.csv#4", "t.csv#17")


def training(sick):
    def make(folder):
        table = numbers()
        if sick:
            table.loc[4, "a"], table.loc[17, "c"] = None, float("inf")
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"columns": ["a", "c"], "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
