"""One camera gives a tint."""

from types import SimpleNamespace

import numpy as np
from PIL import Image

from tests.media import picture, pictures

CODE, NAMES = "data/color-shift", ("cam_b",)


def training(sick):
    def make(folder):
        for place, camera in enumerate(("cam_a", "cam_b", "cam_c")):
            for number, path in enumerate(pictures(folder / camera, 6, 10 * place)):
                if sick and camera == "cam_b":
                    tinted = np.asarray(picture(10 * place + number)) * np.array([1.0, 0.9, 0.3])
                    Image.fromarray(tinted.astype(np.uint8)).save(path)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
