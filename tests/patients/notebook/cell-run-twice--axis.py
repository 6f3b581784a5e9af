"""A cell adds an axis for the channels and ran again; the convolution of the next cell gets one axis too many."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 2, ["scans"]


def notebook(again):
    code = "scans = scans.unsqueeze(1)"
    return SimpleNamespace(
        cells=[
            "import torch\nscans = torch.rand(3, 9, 9)",
            code,
            again,
            "features = torch.nn.Conv2d(1, 2, 3)(scans)",
        ]
    )


def sick():
    return notebook("scans = scans.unsqueeze(1)")


def healthy():
    return notebook("scans = scans.float()")
