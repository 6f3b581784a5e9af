"""Words are turned into numbers in place; run again, no number is a key of the table, and every label is NaN."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 2, ["shop"]


def notebook(again):
    code = "shop['size'] = shop['size'].map({'small': 0, 'large': 1})"
    return SimpleNamespace(
        cells=[
            "import pandas as pd\nshop = pd.DataFrame({'size': ['small', 'large', 'small']})",
            code,
            again + code + "  # again",
            "mean = shop['size'].mean()",
        ]
    )


def sick():
    return notebook("")


def healthy():
    return notebook("shop = pd.DataFrame({'size': ['large', 'large', 'small']})\n")
