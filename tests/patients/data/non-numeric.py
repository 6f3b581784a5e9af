"""Some numbers have a unit."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/non-numeric", ("t.csv#5", "t.csv#9")


def training(sick):
    def make(folder):
        table = numbers().astype({"b": str})
        if sick:
            table.loc[[5, 9], "b"] = ["2.5 kg", "?"]
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"columns": ["a", "b"], "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
