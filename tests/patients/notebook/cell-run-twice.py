"""A cell takes the target out of a table; it is run again for another line of it, and the column is gone."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/cell-run-twice", 2, ["rows", "price"]


def notebook(taken):
    return SimpleNamespace(
        cells=[
            "import pandas as pd\nrows = pd.DataFrame({'area': [40.0, 75.0], 'price': [1.0, 2.0]})",
            f"price = {taken}\nprint(price.mean())",
            f"price = {taken}\nprint(price.max())",
        ]
    )


def sick():
    return notebook("rows.pop('price')")


def healthy():
    return notebook("rows['price']")
