"""A function reads the notebook's table and not the one that it is given, which has other rows of the same kind."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/stale-reference", 1, ["table", "means"]


def notebook(read):
    return SimpleNamespace(
        cells=[
            "import torch\ntable, other = torch.randn(30, 5), torch.randn(12, 5)",
            f"def means(rows):\n    return {read}.mean(0)",
            "a, b = means(table), means(other)\nprint(a - b)",
        ]
    )


def sick():
    return notebook("table")


def healthy():
    return notebook("rows")
