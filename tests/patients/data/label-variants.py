"""Two of the names of the classes were typed in another way; short ones in two cases are two classes."""

from types import SimpleNamespace

from tests.media import numbers

CODE, NAMES = "data/label-variants", ("t.csv#4", "t.csv#17")


def training(sick):
    def make(folder):
        table = numbers()
        table["label"] = [["oak", "elm tree", "mW", "MW"][row % 4] for row in range(len(table))]
        if sick:
            table.loc[4, "label"], table.loc[17, "label"] = "Oak", "elm  tree "
        table.to_csv(folder / "t.csv", index=False)
        return folder

    return SimpleNamespace(make=make, expected={"label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
