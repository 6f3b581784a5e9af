"""The picture was cut, and its mask was not."""

from types import SimpleNamespace

from PIL import Image

from tests.media import picture

CODE, NAMES = "data/mask-size-mismatch", ("masks/p1.png",)


def training(sick):
    def make(folder):
        for number in range(3):
            side = 30 if sick and number == 1 else 40
            for name, one in (("images", picture(number)), ("masks", Image.new("L", (side, 40), 1))):
                (folder / name).mkdir(exist_ok=True)
                one.save(folder / name / f"p{number}.png")
        return folder

    return SimpleNamespace(make=make, expected={"masks": "masks", "num_classes": 2})


def sick():
    return training(True)


def healthy():
    return training(False)
