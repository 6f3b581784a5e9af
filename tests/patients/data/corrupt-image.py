"""One download gave a page of HTML; it was saved under the name of the picture."""

import pathlib
import tempfile
from types import SimpleNamespace

import numpy as np
from PIL import Image

CODE, NAMES = "data/corrupt-image", ("leaf2.png", "HTML", "item 2")


class Leaves:
    def __init__(self, broken):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.paths = [folder / f"leaf{i}.png" for i in range(4)]
        for path in self.paths:
            Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(path)
        if broken:
            self.paths[2].write_text("<!DOCTYPE html><html><body>Sign in</body></html>")

    def __getitem__(self, index):
        return np.asarray(Image.open(self.paths[index]))


def training(broken):
    leaves = Leaves(broken)
    return SimpleNamespace(trigger=lambda: [leaves[i] for i in range(4)])


def sick():
    return training(broken=True)


def healthy():
    return training(broken=False)
