"""One photograph was taken with the phone on its side."""

from types import SimpleNamespace

from PIL import Image

from tests.media import picture

CODE, NAMES = "data/exif-orientation", ("p1.jpg",)


def training(sick):
    def make(folder):
        tags = Image.Exif()
        tags[0x0112] = 6
        for number in range(4):
            picture(number).save(folder / f"p{number}.jpg", **({"exif": tags} if sick and number == 1 else {}))
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
