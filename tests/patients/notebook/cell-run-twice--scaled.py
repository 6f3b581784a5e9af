"""Pixels are divided by 255 in a cell that is run again after the model has been changed; nothing raises."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 3, ["pixels"]
MODEL = "torch.manual_seed(0)\nmodel = nn.Linear(12, {})"
SCALE = "pixels = pixels / 255"


def notebook(last):
    return SimpleNamespace(
        cells=[
            "import torch\nfrom torch import nn\npixels = torch.randint(0, 256, (8, 12)).float()",
            SCALE,
            MODEL.format(3),
            last,
            MODEL.format(5),
            "out = model(pixels)",
        ]
    )


def sick():
    return notebook(SCALE)


def healthy():
    return notebook("pixels = pixels / pixels.max()")
