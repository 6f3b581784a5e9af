"""Labels count from 1."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/label-out-of-range", ("t.csv#2",)


def training(sick):
    def make(folder):
        table = numbers()
        table.label = [2 if row == 2 else int(v > 1) for row, v in enumerate(table.label)]
        table.label += int(sick)
        table[:3].to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"label": "label", "num_classes": 3})


def sick():
    return training(True)


def healthy():
    return training(False)
