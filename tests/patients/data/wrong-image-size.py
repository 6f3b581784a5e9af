"""A tile at the edge is narrower."""

from types import SimpleNamespace

from tests.media import picture, pictures

CODE, NAMES = "data/wrong-image-size", ("p4.png",)


def training(sick):
    def make(folder):
        paths = pictures(folder)
        if sick:
            picture(4, (33, 40)).save(paths[4])
        return folder

    return SimpleNamespace(make=make, expected={"size": (40, 40)})


def sick():
    return training(True)


def healthy():
    return training(False)
