"""A text of the table is white space."""

from types import SimpleNamespace

CODE, NAMES = "data/empty-text", ("t.csv#1",)


def training(sick):
    def make(folder):
        lines = ["text,label", "good,1", f"{'  ' if sick else 'bad'},0", "fine,1"]
        (folder / "t.csv").write_text("\n".join(lines))
        return folder

    return SimpleNamespace(make=make, expected={"text": "text", "label": "label"})


def sick():
    return training(True)


def healthy():
    return training(False)
