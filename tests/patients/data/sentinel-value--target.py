"""A number to be predicted, where the station wrote -9999 for what it did not measure."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/sentinel-value", ("t.csv#8", "t.csv#21")


def training(sick):
    def make(folder):
        table = numbers()
        table["flux"] = (table["a"] * 0.5 + table["b"]).round(3)
        if sick:
            table.loc[[8, 21], "flux"] = -9999
        table.drop(columns="label").to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"label": "flux"})


def sick():
    return training(True)


def healthy():
    return training(False)
