"""A cell keeps a sum under the name of Python's function; a cell that sums fails from then on."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/name-shadowed", 1, ["sum"]


def notebook(name):
    return SimpleNamespace(
        cells=[
            "import torch\nweights = [torch.ones(3), torch.ones(2)]",
            f"{name} = torch.stack([w.norm() for w in weights]).sum()\nprint({name}.item())",
            "count = sum(w.numel() for w in weights)",
        ]
    )


def sick():
    return notebook("sum")


def healthy():
    return notebook("total")
