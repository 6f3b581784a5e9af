"""A picture of the validation set is one of the training set, mirrored and saved again."""

from types import SimpleNamespace

from PIL import Image, ImageOps

from tests.media import pictures

CODE, NAMES = "data/duplicate-across-splits", ("val/p2.png",)


def training(sick):
    def make(folder):
        train, val = pictures(folder / "train", 9), pictures(folder / "val", 4, 50)
        if sick:
            ImageOps.mirror(Image.open(train[4])).save(val[2])
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
