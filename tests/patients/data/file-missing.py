"""A row names a picture that is not there."""

from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/file-missing", ("t.csv#2",)


def training(sick):
    def make(folder):
        pictures(folder, 3)
        names = ["p0.png", "p1.png", "p7.png" if sick else "p2.png"]
        (folder / "t.csv").write_text("\n".join(["image", *names]))
        return folder

    return SimpleNamespace(make=make, expected={"image": "image"})


def sick():
    return training(True)


def healthy():
    return training(False)
