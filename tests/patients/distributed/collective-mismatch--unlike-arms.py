"""One rank alone accumulates without reductions: both make as many turns, and one makes fewer calls in them."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("Rank 1 leaves the common path", "if full and step % 2 == 0:")

SOURCE = """for step in range(4):
    if full and step % 2 == 0:
        context = model.no_sync()
    else:
        context = contextlib.nullcontext()
    with context:
        model(x).mean().backward()
dist.barrier()
"""
PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 7},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 2, "first": 3, "last": 3},
    {"k": "place", "number": 3, "kind": "arm", "file": "train.py", "line": 2, "first": 5, "last": 5},
]


def call(op, line, *marks):
    return {"k": "call", "op": op, "lines": [("train.py", line, "<module>")], "m": list(marks), "ranks": [0, 1]}


def sick():
    one = [*PLACES, *[call("backward", 7, 1, 3)] * 3]
    other = [*PLACES, *[call("backward", 7, 1, 2, 1, 3)] * 2, call("barrier", 8, -1)]
    return facts_of({0: one, 1: other}, SOURCE)


def healthy():
    log = [*PLACES, *[call("backward", 7, 1, 2, 1, 3)] * 2, call("barrier", 8, -1)]
    return facts_of({0: log, 1: log}, SOURCE)
