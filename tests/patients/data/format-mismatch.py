"""A picture was renamed in place of being converted."""

from types import SimpleNamespace

from tests.media import picture, pictures

CODE, NAMES = "data/format-mismatch", ("p2.png",)


def training(sick):
    def make(folder):
        paths = pictures(folder)
        if sick:
            picture(2).save(paths[2], format="BMP")
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
