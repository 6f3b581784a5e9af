"""A part of the rows comes from a program that writes decimal commas: the column as a whole is text."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/non-numeric", ("t.csv#b", "from row 11 to row 14", "it works")


def training(sick):
    def make(folder):
        table = numbers()
        table["b"] = table["b"].round(2).astype(str)
        if sick:
            table.loc[11:14, "b"] = table.loc[11:14, "b"].str.replace("-", "").str.replace(".", ",")
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"columns": ["a", "b"], "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
