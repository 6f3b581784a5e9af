"""A cell puts a flip at the end of a list of steps, and ran twice: each picture is flipped back."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 2, ["steps"]


def notebook(add):
    return SimpleNamespace(
        cells=[
            "import torch\nsteps = [torch.sqrt]\n\ndef flip(picture):\n    return picture.flip(-1)",
            add,
            add,
            "picture = torch.rand(4, 4)\nfor step in steps:\n    picture = step(picture)",
        ]
    )


def sick():
    return notebook("steps.append(flip)")


def healthy():
    return notebook("steps = [torch.sqrt, flip]")
