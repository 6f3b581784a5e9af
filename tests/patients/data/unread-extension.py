"""A camera writes capitals, and the loader takes small letters."""

from types import SimpleNamespace

from tests.media import pictures

CODE, NAMES = "data/unread-extension", ("p3.PNG",)


def training(sick):
    def make(folder):
        paths = pictures(folder)
        if sick:
            paths[3].rename(folder / "p3.PNG")
        return folder

    return SimpleNamespace(make=make, expected={"extensions": [".png"]})


def sick():
    return training(True)


def healthy():
    return training(False)
