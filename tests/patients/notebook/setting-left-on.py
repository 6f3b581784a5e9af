"""NumPy was told to raise where it divides by zero, to find such a row; a later cell divides by zero on purpose."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/setting-left-on", 1, ["seterr"]
LOOK = "ratio = np.where(rows > 0, np.divide(1.0, rows), 0.0)"


def notebook(search):
    return SimpleNamespace(cells=["import numpy as np\nrows = np.array([2.0, 0.0])", search, LOOK])


def sick():
    return notebook("np.seterr(divide='raise')\nsums = rows / rows.sum()")


def healthy():
    return notebook("with np.errstate(divide='raise'):\n    sums = rows / rows.sum()")
