"""A gauge writes -999 where it measured nothing, and 99.9 in a column of fractions."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/sentinel-value", ("t.csv#4", "t.csv#17", "t.csv#30")


def training(sick):
    def make(folder):
        table = numbers()
        table["c"] = table["c"].abs()
        table.loc[9, "c"] = 45.0  # far from the others, and measured
        if sick:
            table.loc[4, "a"], table.loc[[17, 30], "b"] = -999, 99.9
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
