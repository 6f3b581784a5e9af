"""A variable takes the name of Python's set; a function that was defined before skips every row, as it catches all."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/name-shadowed", 1, ["set"]
COUNT = """def kinds(row):
    try:
        return len(set(row.tolist()))
    except Exception:
        return 0"""


def notebook(name):
    return SimpleNamespace(
        cells=[
            f"import torch\n{COUNT}",
            f"{name} = torch.arange(12).view(3, 4)",
            f"found = [kinds(row) for row in {name}]",
        ]
    )


def sick():
    return notebook("set")


def healthy():
    return notebook("rows")
