"""Each rank takes its batches with next(), and the one that has fewer leaves the loop in `except StopIteration`."""

from tests.distributed.events import facts_of

CODE = "distributed/uneven-steps"
NAMES = ("rank 0 has 5, rank 1 has 4", "mine = rows[rank::world]")

SOURCE = """mine = rows[rank::world]
source = iter(mine)
while True:
    try:
        batch = next(source)
    except StopIteration:
        break
    train(batch)
dist.barrier()
"""
PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 3, "first": 4, "last": 8},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 6, "first": 7, "last": 7},
]


def call(op, line, *marks):
    return {"k": "call", "op": op, "lines": [("train.py", line, "<module>")], "m": list(marks), "ranks": [0, 1]}


def sick():
    log = [*PLACES, *[call("all_reduce", 8, 1)] * 4]
    return facts_of({0: [*log, call("all_reduce", 8, 1)], 1: [*log, call("barrier", 9, 1, 2)]}, SOURCE)


def healthy():
    log = [*PLACES, *[call("all_reduce", 8, 1)] * 4, call("barrier", 9, 1, 2)]
    return facts_of({0: log, 1: log}, SOURCE)
