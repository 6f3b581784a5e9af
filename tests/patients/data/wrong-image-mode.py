"""One picture was saved with an alpha channel; nothing was said of the mode."""

from types import SimpleNamespace

from tests.media import picture, pictures

CODE, NAMES = "data/wrong-image-mode", ("p7.png", "RGBA")


def training(sick):
    def make(folder):
        paths = pictures(folder, 12)
        if sick:
            picture(7, mode="RGBA").save(paths[7])
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
