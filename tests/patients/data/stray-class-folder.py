"""A copy that a notebook server has kept lies in a hidden folder beside the folders of the classes."""

from types import SimpleNamespace

import numpy
from PIL import Image

CODE, NAMES = "data/stray-class-folder", (".ipynb_checkpoints",)


def training(sick):
    def make(folder):
        draw = numpy.random.default_rng(3)
        for kind in ("cup", "fork", "spoon"):
            (folder / kind).mkdir()
            for n in range(4):
                blocks = Image.fromarray(draw.integers(0, 255, (5, 5, 3), dtype=numpy.uint8))
                blocks.resize((40, 40), Image.BICUBIC).save(folder / kind / f"{n}.png")
        (folder / ".cache").write_text("no folder") if not sick else (folder / ".ipynb_checkpoints").mkdir()
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
