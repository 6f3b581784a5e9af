"""A picture of a set without splits was saved a second time, smaller and mirrored."""

from types import SimpleNamespace

from PIL import Image, ImageOps

from tests.media import pictures

CODE, NAMES = "data/duplicate-within-split", ("p21.png",)


def training(sick):
    def make(folder):
        paths = pictures(folder, 24)
        if sick:
            ImageOps.mirror(Image.open(paths[4])).resize((38, 38)).resize((40, 40)).save(paths[21])
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
