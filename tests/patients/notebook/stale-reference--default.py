"""A default that is a variable of the notebook: the function goes on with its value of before."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/stale-reference", 1, ["share", "kept"]


def notebook(given):
    return SimpleNamespace(
        cells=[
            "import torch\nrows = torch.arange(10.0)\nshare = 0.5",
            "def kept(rows, share=share):\n    return rows[: int(share * len(rows))]",
            "print(len(kept(rows)))",
            "share = 0.8",
            f"print(len(kept({given})))",
        ]
    )


def sick():
    return notebook("rows")


def healthy():
    return notebook("rows, share=share")
