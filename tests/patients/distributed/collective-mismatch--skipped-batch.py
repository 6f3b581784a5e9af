"""One rank leaves out the backward of a batch: it has gone through all of its rows, the other waits in its last."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("rank 1", "if loss > 50:")

SOURCE = """for x in loader:
    loss = model(x)
    if loss > 50:
        continue
    loss.backward()
dist.barrier()
"""
PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 5},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 3, "first": 4, "last": 4},
]


def call(op, line, *marks):
    return {"k": "call", "op": op, "lines": [("train.py", line, "<module>")], "m": list(marks), "ranks": [0, 1]}


def sick():
    other = [*PLACES, call("backward", 5, 1, 2, 1), call("backward", 5, 1), call("barrier", 6, 1, 2, -1)]
    return facts_of({0: [*PLACES, *[call("backward", 5, 1)] * 3], 1: other}, SOURCE)


def healthy():
    log = [*PLACES, *[call("backward", 5, 1)] * 3, call("barrier", 6, 1, 2, -1)]
    return facts_of({0: log, 1: log}, SOURCE)
