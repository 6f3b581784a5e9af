"""The share of each rank is kept in a trainer, made far above the loop that goes over it."""

from tests.distributed.events import facts_of

CODE = "distributed/uneven-steps"
NAMES = ("rank 0 has 4, rank 1 has 3", "self.rows = rows[rank::world]")

SOURCE = """class Trainer:
    def __init__(self, model, rows):
        self.model = model
        self.rows = rows[rank::world]
        self.losses = []

    def fit(self):
        for row in self.rows:
            self.step(row)
"""
PLACES = [{"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 8, "first": 9, "last": 9}]
STEP = {"k": "call", "op": "all_reduce", "lines": [("train.py", 9, "fit")], "m": [1], "ranks": [0, 1]}
END = {"k": "end", "code": 0, "m": [-1]}


def sick():
    return facts_of({0: [*PLACES, *[STEP] * 4], 1: [*PLACES, *[STEP] * 3, END]}, SOURCE)


def healthy():
    log = [*PLACES, *[STEP] * 3, END]
    return facts_of({0: log, 1: log}, SOURCE)
