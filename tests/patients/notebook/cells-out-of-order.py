"""A cell is run before the one that defines the limit that it needs; that one is run later, and the first not again."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cells-out-of-order", 1, ["limit"]


def notebook(*last):
    return SimpleNamespace(
        cells=["import torch\nvalues = torch.arange(5.0)", "clipped = values.clamp(max=limit)", "limit = 2.5", *last]
    )


def sick():
    return notebook()


def healthy():
    return notebook("clipped = values.clamp(max=limit)")
